"""The key-value store that ranks share: torch's, with errors that say who is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from unified_ckpt.errors import RankError


@contextmanager
def _translating_errors() -> Iterator[None]:
    """Replace torch's error for a store whose server has exited: its text names nobody."""
    try:
        yield
    except dist.DistNetworkError as error:
        raise RankError(
            "the store of the ranks cannot be reached: the process that serves it, usually rank 0, "
            f"has exited: {error}"
        ) from error


class KeyStore:
    """A key-value store that the ranks share. No call waits; RankError if it cannot be reached."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @_translating_errors()
    def set(self, key: str, value: str | bytes, /) -> None:
        """Set a key."""
        # The stub says str, but bytes are accepted.
        self._store.set(key, value)  # type: ignore[arg-type]

    @_translating_errors()
    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is set; call `check` first."""
        return bytes(self._store.get(key))

    @_translating_errors()
    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys are set."""
        return bool(self._store.check(keys))

    @_translating_errors()
    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return its new value."""
        return int(self._store.add(key, amount))

    @_translating_errors()
    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return the values of keys that are set."""
        return [bytes(value) for value in self._store.multi_get(keys)]

    @_translating_errors()
    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Set the key if it holds `expected`, and return its value. An unset key holds ""."""
        return bytes(self._store.compare_set(key, expected, value))

    @_translating_errors()
    def delete_key(self, key: str, /) -> bool:
        """Delete a key and return whether it was set."""
        return bool(self._store.delete_key(key))
