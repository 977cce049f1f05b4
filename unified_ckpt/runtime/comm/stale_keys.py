"""Keys that this rank has left in the ranks' store: deleted once every rank is through with the
meetings that they were for.
"""

from __future__ import annotations

import threading
from typing import Protocol

from unified_ckpt.errors import RankError


class Store(Protocol):
    """What is used of `comm.Keys`, which says what its calls do."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def delete_key(self, key: str, /) -> bool: ...


class KeyOwner(Protocol):
    """A meeting, as far as its keys go. `in_progress`: this rank is still in it, though it may have
    come to later ones.
    """

    in_progress: bool

    def stale_keys(self) -> str:
        """Its keys to delete with spaces between them, after a tab; before it, the counter that
        must reach the number of ranks first.
        """


class StaleKeys:
    """What one rank has to delete. Its calls may come from the thread of a save in the background,
    too.
    """

    def __init__(self, store: Store, *, rank: int, world: int) -> None:
        self._store, self._world, self._key = store, world, f"left/{rank}"
        self._collectives: list[KeyOwner] = []
        self._lock = threading.Lock()

    def add(self, collective: KeyOwner) -> None:
        """At the roll call of a meeting, which is then the last."""
        self._collectives.append(collective)

    def delete(self) -> None:
        """Once everybody has come to the last meeting: of those before it, all but what goes on in
        the background.
        """
        with self._lock:
            entries = self._handed_over()
            remaining = [entry for entry in entries if not self._delete(entry)]
            earlier = self._collectives[:-1]
            deleted = {
                id(collective)
                for collective in earlier
                if not collective.in_progress and self._delete(collective.stale_keys())
            }
            self._collectives = [
                collective for collective in self._collectives if id(collective) not in deleted
            ]
            if remaining:
                self._store.set(self._key, "\n".join(remaining))
            elif entries:
                self._store.delete_key(self._key)

    def hand_over(self) -> None:
        """Leaves word of what is still to be deleted, for this rank's next `StaleKeys`."""
        try:
            self._store.set(
                self._key,
                "\n".join(
                    [
                        *self._handed_over(),
                        *(collective.stale_keys() for collective in self._collectives),
                    ]
                ),
            )
        except RankError:
            return  # the store is gone, and the keys with it

    def _handed_over(self) -> list[str]:
        """What earlier ones of this rank have handed on: a line for each meeting."""
        if not self._store.check([self._key]):
            return []
        return [entry for entry in self._store.get(self._key).decode().split("\n") if entry]

    def _delete(self, entry: str) -> bool:
        """Deletes the keys unless some rank is still in that meeting. Whoever sees first that all
        are out deletes the count too.
        """
        counter, _, keys = entry.partition("\t")
        if counter and self._store.check([counter]):
            finished = self._store.add(counter, 0)
            if 0 < finished < self._world:
                return False
            if (
                finished == 0
            ):  # this rank is out, so it was deleted between the two looks and made anew by the second
                self._store.delete_key(counter)
        for key in keys.split():
            self._store.delete_key(key)
        return True
