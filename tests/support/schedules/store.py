"""The store of the ranks, on a schedule: as TCPStore, whose client retries nothing.

A client waits for each answer, so its requests are not reordered. It sends none twice: a request
that fails was carried out once, or not at all, and all later ones fail.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from tests.support.schedules.scheduler import ScheduleError, Scheduler


class VirtualStore:
    """Keys and values. `host`: the rank whose process serves it, None for the launcher's.

    `unreachable`: ranks whose connection is lost. A `get` of an unset key would wait for the
    store's time-out, minutes, in a call that nothing interrupts: it fails the schedule.
    """

    def __init__(self, scheduler: Scheduler, *, host: int | None = None) -> None:
        self.values: dict[str, bytes] = {}
        self.unreachable = set[int]()
        self._scheduler = scheduler

        def lose_server(rank: int) -> None:
            if rank == host:
                self.unreachable |= {task.rank for task in scheduler.tasks}

        scheduler.on_death.append(lose_server)

    def set(self, key: str, value: str | bytes) -> None:
        self._request("set", key)
        self._put(key, _to_bytes(value))
        self._check_reachable()

    def get(self, key: str) -> bytes:
        self._request("get", key)
        return self._read(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._request("multi_get", " ".join(keys))
        return [self._read(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        self._request("check", " ".join(keys))
        return bool(self._observed(all(key in self.values for key in keys)))

    def add(self, key: str, amount: int) -> int:
        self._request("add", key)
        value = int(self.values.get(key, b"0")) + amount
        if amount or key not in self.values:
            self._put(key, str(value).encode())
        self._observed(value)
        return value

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self._request("compare_set", key)
        if self.values.get(key, b"") == expected.encode() and (key in self.values or not expected):
            if self.values.get(key) != value.encode():
                self._put(key, value.encode())
            result = value.encode()
        else:
            result = self.values.get(key, expected.encode())
        self._observed(result)
        return result

    def delete_key(self, key: str) -> bool:
        self._request("delete", key)
        is_set = key in self.values
        if is_set:
            del self.values[key]
            self._scheduler.version += 1
        self._observed(is_set)
        return is_set

    def num_keys(self) -> int:
        return len(self.values)

    def state(self) -> int:
        """Return a hash of all keys and values."""
        return hash(tuple(sorted(self.values.items())))

    def _request(self, verb: str, key: str) -> None:
        task = self._scheduler.operation(f"{verb} {key}")
        if task is None:
            return
        if task.rank not in self.unreachable and self._scheduler.chooser.cuts_connection():
            self.unreachable.add(task.rank)
            if self._scheduler.chooser.draw(2):
                return  # it is carried out, and its answer is lost
        self._check_reachable()

    def _check_reachable(self) -> None:
        task = self._scheduler.current()
        if task is not None and task.rank in self.unreachable:
            raise dist.DistNetworkError("Connection reset by peer")

    def _put(self, key: str, value: bytes) -> None:
        self.values[key] = value
        self._scheduler.version += 1

    def _read(self, key: str) -> bytes:
        if key not in self.values:
            self._scheduler.fail(
                ScheduleError(f"get {key}: is not set, so it waits\n{self._scheduler.stacks()}")
            )
        value = self.values[key]
        self._observed(value)
        return value

    def _observed(self, value: object) -> object:
        self._check_reachable()
        task = self._scheduler.current()
        if task is not None:
            task.observe(value)
        return value


class VirtualPrefixStore:
    """A store whose keys have a prefix, as `dist.PrefixStore`."""

    def __init__(self, prefix: str, store: VirtualStore | VirtualPrefixStore) -> None:
        self._prefix, self._store = prefix, store

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes:
        return self._store.get(f"{self._prefix}/{key}")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get([f"{self._prefix}/{key}" for key in keys])

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check([f"{self._prefix}/{key}" for key in keys])

    def add(self, key: str, amount: int) -> int:
        return self._store.add(f"{self._prefix}/{key}", amount)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._store.compare_set(f"{self._prefix}/{key}", expected, value)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(f"{self._prefix}/{key}")

    def num_keys(self) -> int:
        return self._store.num_keys()


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
