"""The events of a run: one JSON object per line, for saves, copies, loads, deletions and stops.

Checkpoints never depend on it. A reader skips lines that it cannot parse: a crash may have torn the
last one, and a newer version may write other events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from unified_ckpt.format.manifest_fields import Rank, Ranks, ReplicaDifference, Size, UtcTime

EVENTS_NAME = "unified_events.jsonl"
EVENTS_FOLDER = "unified_events"  # in a bucket, where nothing can be appended: files of this kind

Seconds = Annotated[float, Field(ge=0)]
Tier = Literal["root", "local"]
StopReason = Literal["end", "stop", "exception"]


class _Record(BaseModel):
    # Unknown fields come from a newer version.
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Phases(_Record):
    """The steps of the ranks of one save or load.

    `summary`: name of the step -> seconds of the fastest, the median and the slowest rank, and that
    rank. `by_rank`: [step, start, seconds] of each rank; above 64 ranks, of the slowest only.
    `start` counts from the moment at which all ranks had arrived.
    """

    world_size: Ranks
    summary: dict[str, tuple[Seconds, Seconds, Seconds, Rank]] = {}
    by_rank: dict[Rank, list[tuple[str, float, Seconds]]] = {}


class Network(_Record):
    """What crossed the network between nodes, in one save or load.

    `addresses`: address -> bytes sent, bytes received, seconds in which they arrived; above 64, the
    slowest only. `slowest`: sender, receiver, bytes and seconds of the slowest connection.
    """

    nbytes: Size
    address_count: Ranks
    addresses: dict[str, tuple[Size, Size, Seconds]] = {}
    slowest: tuple[str, str, Size, Seconds] | None = None


class _Event(_Record):
    """`path`: of the checkpoint, relative to the root unless absolute."""

    time: UtcTime
    path: str
    step: Size | None = None


class SaveEvent(_Event):
    """A committed save. `seconds` runs from the call to the commit; training waited during
    `blocked_seconds` of it, including retries and the wait for an earlier save.

    `attempt`: 1 unless earlier ones failed. `parts`: tensor bytes by part. `replica_differences`:
    as in the manifest. `nodes`: the number of nodes of the ranks. `retention`: the retention rules,
    as options of the manager that are set.
    """

    event: Literal["save"] = "save"
    save_id: str
    tier: Tier = "root"
    asynchronous: bool = False
    attempt: Annotated[int, Field(ge=1)] = 1
    nbytes: Size
    parts: dict[str, Size] = {}
    seconds: Seconds
    blocked_seconds: Seconds
    metrics: dict[str, float] = {}
    replica_differences: list[ReplicaDifference] = []
    nodes: Ranks | None = None
    retention: dict[str, int | float | str] = {}
    phases: Phases | None = None
    network: Network | None = None


class SaveFailedEvent(_Event):
    """A failed attempt to save. `seconds` runs from the call of the save to the failure."""

    event: Literal["save_failed"] = "save_failed"
    tier: Tier = "root"
    attempt: Annotated[int, Field(ge=1)] = 1
    error: str
    seconds: Seconds | None = None
    will_retry: bool = False


class CopyStartedEvent(_Event):
    """A copy of a local checkpoint to the root has begun. `path`: in the root."""

    event: Literal["copy_started"] = "copy_started"
    attempt: Annotated[int, Field(ge=1)] = 1


class CopyEvent(_Event):
    """A finished copy to the root. `nbytes`: what was written; of a merge, its tensors."""

    event: Literal["copy"] = "copy"
    attempt: Annotated[int, Field(ge=1)] = 1
    nbytes: Size
    seconds: Seconds


class CopyFailedEvent(_Event):
    """A failed attempt to copy to the root, or a copy that is not made."""

    event: Literal["copy_failed"] = "copy_failed"
    attempt: Annotated[int, Field(ge=1)] = 1
    error: str
    seconds: Seconds
    will_retry: bool = False


class LoadEvent(_Event):
    """A restore. `bytes_read`: by rank 0. `source`: what was loaded, such as "unified". `nodes`: as
    of a save.
    """

    event: Literal["load"] = "load"
    source: str
    bytes_read: Size
    seconds: Seconds
    nodes: Ranks | None = None
    phases: Phases | None = None
    network: Network | None = None


class DeleteEvent(_Event):
    """A checkpoint that the retention rules removed."""

    event: Literal["delete"] = "delete"
    tier: Tier = "root"


class StopEvent(_Event):
    """The manager was closed. `step`: the last step of the loop, if known; `path` is empty.

    `reason`: "end" of the loop, a "stop" that a signal or a call requested, or an "exception". A
    job that was killed records nothing.
    """

    event: Literal["stop"] = "stop"
    reason: StopReason


class VerifyEvent(_Event):
    """`unified-ckpt verify` has checked a checkpoint. `deep`: also its digests. `problems`: their
    number.
    """

    event: Literal["verify"] = "verify"
    deep: bool
    problems: Size


Event = (
    SaveEvent
    | SaveFailedEvent
    | CopyStartedEvent
    | CopyEvent
    | CopyFailedEvent
    | LoadEvent
    | DeleteEvent
    | StopEvent
    | VerifyEvent
)
_EVENTS: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


def utc_now() -> str:
    """Return the time of an event that happens now."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def encode_event(event: Event) -> bytes:
    """Return an event as one line."""
    return event.model_dump_json(exclude_none=True).encode() + b"\n"


def parse_events(lines: Iterable[bytes]) -> Iterator[Event]:
    """Yield the events of a file, without lines that are torn or unknown."""
    for line in lines:
        try:
            yield _EVENTS.validate_json(line)
        except ValidationError:
            continue
