"""Deletes this rank's store keys once every rank has finished the collectives that used them."""

from __future__ import annotations

import threading
from collections import deque

from unified_ckpt.errors import RankError
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.key_store import KeyStore


class StaleKeys:
    """The store keys that one rank has to delete. Thread-safe, for background saves.

    A deletion is a round trip, so waits of later collectives are used for most of them.
    """

    def __init__(self, store: KeyStore, *, rank: int, world: int) -> None:
        self._store, self._world, self._key = store, world, f"stale-keys/{rank}"
        self._collectives: list[Collective] = []
        self._entries: list[str] | None = None  # of this rank's previous instance, once read
        self._deletable: deque[str] = deque()
        self._lock = threading.Lock()

    def add(self, collective: Collective) -> None:
        """Register a collective of this rank."""
        with self._lock:
            self._collectives.append(collective)

    def delete(self, joined: Collective) -> None:
        """Let `delete_one` delete the keys of collectives before `joined` that are not in use.

        Every rank has joined it, and so has left those before it. Other ranks may still read keys
        of later ones, which this rank has when a background save calls. Deletes what remains of the
        last call.
        """
        self._delete_all()
        with self._lock:
            self._entries = [entry for entry in self._read_entries() if not self._release(entry)]
            released = {
                id(owner)
                for owner in self._collectives
                if owner.number < joined.number
                and not (owner.in_progress or owner.open_steps)
                and self._release(owner.stale_keys())
            }
            self._collectives = [owner for owner in self._collectives if id(owner) not in released]

    def delete_one(self) -> bool:
        """Delete a key that no rank needs; return whether there was any."""
        try:
            key = self._deletable.popleft()
        except IndexError:
            return False
        self._store.delete_key(key)
        return True

    def _delete_all(self) -> None:
        while self.delete_one():
            pass

    def store_entries(self) -> None:
        """Delete what can be deleted, and record the rest for this rank's next `StaleKeys`."""
        try:
            self._delete_all()
            entries = [
                *self._read_entries(),
                *(owner.stale_keys() for owner in self._collectives),
            ]
            self._store.set(self._key, "\n".join(entries))
        except RankError:
            return  # the store's server has exited, and the keys with it

    def _read_entries(self) -> list[str]:
        """Return what remains of the entries that this rank's previous instance stored."""
        if self._entries is None:
            body = self._store.try_get(self._key)
            self._entries = body.decode().split("\n") if body else []
            if body:
                self._store.delete_key(self._key)
        return self._entries

    def _release(self, entry: str) -> bool:
        """Let the keys be deleted unless some rank is still in that collective.

        The first rank that sees that all have finished deletes the counter too.
        """
        counter, _, keys = entry.partition("\t")
        if counter and self._store.check([counter]):
            finished = self._store.add(counter, 0)
            if 0 < finished < self._world:
                return False
            # This rank has finished: 0 means that the counter was deleted after `check`, and that
            # `add` created it again.
            if finished == 0:
                self._deletable.append(counter)
        self._deletable.extend(keys.split())
        return True
