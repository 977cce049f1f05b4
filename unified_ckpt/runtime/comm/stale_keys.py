"""Deletes this rank's store keys once every rank has finished the collectives that used them."""

from __future__ import annotations

import threading

from unified_ckpt.errors import RankError
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.key_store import KeyStore


class StaleKeys:
    """The store keys that one rank has to delete. Thread-safe, for background saves."""

    def __init__(self, store: KeyStore, *, rank: int, world: int) -> None:
        self._store, self._world, self._key = store, world, f"stale-keys/{rank}"
        self._collectives: list[Collective] = []
        self._lock = threading.Lock()

    def add(self, collective: Collective) -> None:
        """Register a collective, which is then the newest one."""
        self._collectives.append(collective)

    def delete(self) -> None:
        """Delete the keys of all collectives but the newest, except those still in progress.

        Call it once every rank has joined the newest collective.
        """
        with self._lock:
            entries = self._stored_entries()
            remaining = [entry for entry in entries if not self._delete(entry)]
            earlier = self._collectives[:-1]
            deleted = {
                id(owner)
                for owner in earlier
                if not owner.in_progress and self._delete(owner.stale_keys())
            }
            self._collectives = [owner for owner in self._collectives if id(owner) not in deleted]
            if remaining:
                self._store.set(self._key, "\n".join(remaining))
            elif entries:
                self._store.delete_key(self._key)

    def store_entries(self) -> None:
        """Record the keys still to be deleted, for this rank's next `StaleKeys`."""
        try:
            entries = [
                *self._stored_entries(),
                *(owner.stale_keys() for owner in self._collectives),
            ]
            self._store.set(self._key, "\n".join(entries))
        except RankError:
            return  # the store's server has exited, and the keys with it

    def _stored_entries(self) -> list[str]:
        """Return the entries that this rank's previous instance stored."""
        if not self._store.check([self._key]):
            return []
        return [entry for entry in self._store.get(self._key).decode().split("\n") if entry]

    def _delete(self, entry: str) -> bool:
        """Delete the keys unless some rank is still in that collective.

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
                self._store.delete_key(counter)
        for key in keys.split():
            self._store.delete_key(key)
        return True
