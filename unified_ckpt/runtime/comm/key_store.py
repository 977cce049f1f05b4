"""The key-value store that ranks share: torch's, with errors that say who is gone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from unified_ckpt.errors import RankError

_UNSET = "unified_ckpt: not set"  # the value of no key
_Arguments = ParamSpec("_Arguments")
_Value = TypeVar("_Value")


def _translating_errors(call: Callable[_Arguments, _Value]) -> Callable[_Arguments, _Value]:
    """Replace torch's error for a store whose server has exited: its text names nobody."""

    @wraps(call)
    def translated(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Value:
        try:
            return call(*arguments, **keywords)
        except dist.DistNetworkError as error:
            raise RankError(
                "the store of the ranks cannot be reached: the process that serves it, usually "
                f"rank 0, has exited: {error}"
            ) from error

    return translated


class KeyStore:
    """A key-value store that the ranks share. No call waits; RankError if it cannot be reached."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @_translating_errors
    def set(self, key: str, value: str | bytes, /) -> None:
        """Set a key."""
        # The stub says str, but bytes are accepted.
        self._store.set(key, value)  # type: ignore[arg-type]

    @_translating_errors
    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is set; call `check` first."""
        return bytes(self._store.get(key))

    @_translating_errors
    def try_get(self, key: str, /) -> bytes | None:
        """Return the value of a key, None if it is not set, in one round trip."""
        # A comparison with a value that no key has changes nothing, and returns the key's value.
        value = bytes(self._store.compare_set(key, _UNSET, _UNSET))
        return None if value == _UNSET.encode() else value

    @_translating_errors
    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys are set."""
        return bool(self._store.check(keys))

    @_translating_errors
    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return its new value."""
        return int(self._store.add(key, amount))

    @_translating_errors
    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return the values of keys that are set."""
        return [bytes(value) for value in self._store.multi_get(keys)]

    @_translating_errors
    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Set the key if it holds `expected`, and return its value. An unset key holds ""."""
        return bytes(self._store.compare_set(key, expected, value))

    @_translating_errors
    def delete_key(self, key: str, /) -> bool:
        """Delete a key and return whether it was set."""
        return bool(self._store.delete_key(key))
