"""Keys that this rank has left in the ranks' store: deleted once every rank is through with the meetings that they were for."""

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


class Left(Protocol):
    """A meeting, as far as its keys go. `goes_on`: this rank is still in it, though it may have come to later ones."""

    goes_on: bool

    def leftovers(self) -> str:
        """Its keys to delete with spaces between them, after a tab; before it, the counter that must reach the number of ranks first."""


class Leftovers:
    """What one rank has to delete. Its calls may come from the thread of a save in the background, too."""

    def __init__(self, store: Store, *, rank: int, world: int) -> None:
        self._store, self._world, self._name = store, world, f"left/{rank}"
        self._past: list[Left] = []
        self._turn = threading.Lock()

    def add(self, meeting: Left) -> None:
        """At the roll call of a meeting, which is then the last."""
        self._past.append(meeting)

    def delete(self) -> None:
        """Once everybody has come to the last meeting: of those before it, all but what goes on in the background."""
        with self._turn:
            lines = self._told()
            stay = [line for line in lines if not self._delete(line)]
            before = self._past[:-1]
            gone = {
                id(meeting)
                for meeting in before
                if not meeting.goes_on and self._delete(meeting.leftovers())
            }
            self._past = [meeting for meeting in self._past if id(meeting) not in gone]
            if stay:
                self._store.set(self._name, "\n".join(stay))
            elif lines:
                self._store.delete_key(self._name)

    def hand_on(self) -> None:
        """Leaves word of what is still to be deleted, for this rank's next `Leftovers`."""
        try:
            self._store.set(
                self._name,
                "\n".join([*self._told(), *(meeting.leftovers() for meeting in self._past)]),
            )
        except RankError:
            return  # the store is gone, and the keys with it

    def _told(self) -> list[str]:
        """What earlier ones of this rank have handed on: a line for each meeting."""
        if not self._store.check([self._name]):
            return []
        return [line for line in self._store.get(self._name).decode().split("\n") if line]

    def _delete(self, leftovers: str) -> bool:
        """Deletes the keys unless some rank is still in that meeting. Whoever sees first that all are out deletes the count too."""
        count, _, keys = leftovers.partition("\t")
        if count and self._store.check([count]):
            out = self._store.add(count, 0)
            if 0 < out < self._world:
                return False
            if (
                out == 0
            ):  # this rank is out, so it was deleted between the two looks and made anew by the second
                self._store.delete_key(count)
        for key in keys.split():
            self._store.delete_key(key)
        return True
