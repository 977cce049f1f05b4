"""An object store on a schedule: one key, one value, conditional writes; any request may be late.

A rank that stands still before a request sends it when it wakes, whatever has happened since. A
rank that dies before a request has not sent it; whether it died before an answer makes no
difference to others.
"""

from __future__ import annotations

from tests.support.schedules.scheduler import Scheduler


class VirtualObjects:
    """Objects by key, strongly consistent, as S3 with conditional requests.

    `loses_answers`: a conditional write may be carried out although its answer is lost. The client
    then repeats it, as HTTP clients do, and the second answer says that the key exists.
    """

    def __init__(self, scheduler: Scheduler, *, loses_answers: bool = False) -> None:
        self.values: dict[str, bytes] = {}
        self._scheduler, self._loses_answers = scheduler, loses_answers

    def put_if_absent(self, key: str, value: bytes) -> bool:
        """Write an object unless the key exists; return whether the last answer says it did."""
        self._scheduler.operation(f"put_if_absent {key}")
        is_new = self.values.setdefault(key, value) is value
        if is_new:
            self._scheduler.version += 1
            if self._loses_answers and self._scheduler.draw(2):
                is_new = False
        self._observe(is_new)
        return is_new

    def put(self, key: str, value: bytes) -> None:
        """Write an object, or replace it."""
        self._scheduler.operation(f"put {key}")
        self.values[key] = value
        self._scheduler.version += 1

    def get(self, key: str) -> bytes | None:
        """Return an object, None if there is none."""
        self._scheduler.operation(f"get {key}")
        self._observe(self.values.get(key))
        return self.values.get(key)

    def list(self, prefix: str) -> list[str]:
        """Return the keys with a prefix, sorted."""
        self._scheduler.operation(f"list {prefix}")
        keys = sorted(key for key in self.values if key.startswith(prefix))
        self._observe(tuple(keys))
        return keys

    def delete(self, key: str) -> None:
        """Delete an object, if it exists."""
        self._scheduler.operation(f"delete {key}")
        self.values.pop(key, None)
        self._scheduler.version += 1

    def state(self) -> int:
        """Return a hash of all objects."""
        return hash(tuple(sorted(self.values.items())))

    def _observe(self, value: object) -> None:
        task = self._scheduler.current()
        if task is not None:
            task.observe(value)
