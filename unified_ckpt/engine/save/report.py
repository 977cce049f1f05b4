"""The result of a save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unified_ckpt.core.text import count_text, human_size
from unified_ckpt.format.manifest_fields import ReplicaDifference
from unified_ckpt.runtime.comm.phases import PhaseReport
from unified_ckpt.runtime.comm.traffic import NetworkReport


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The result of a save.

    `nbytes`: tensor bytes of the folder at `path`.
    `seconds`: from the call to the commit on this rank.
    `blocked_seconds`: the part of `seconds` in which the caller waited; all of it for `save`.
    `existed`: true if nothing was saved because a checkpoint was kept, see `SaveOptions.if_exists`.
    `step` and `id` are then those of that checkpoint.
    `encoded_nbytes`: the part of `nbytes` in compressed tensors. `outliers`: the elements of them
    that are stored separately, without loss. `plain_tensors`: the number of tensors that this save
    could not compress, though the option applies to them.
    `differing_values`: names of values beside tensors that differ between ranks, such as
    "extra.scheduler", on rank 0 only. Each is stored for the ranks that hold it.
    `parts`: tensor bytes by part, on rank 0 only. `phases`: the steps of the ranks that share the
    folder of rank 0, on rank 0 only. `network`: what these ranks exchanged between nodes, and with
    `SaveOptions.node_copies` what all ranks did; None if nothing, and on other ranks.
    `omitted_parts`: parts of the state that `SaveOptions` leave out.
    `failed_attempts`: failed attempts of the `CheckpointManager` before this commit.
    `replica_differences`: tensors that ranks did not hold alike, at most 32; see
    `SaveOptions.check_replicas`.
    """

    path: str
    step: int | None
    id: str
    nbytes: int
    seconds: float
    existed: bool = False
    encoded_nbytes: int = 0
    outliers: int = 0
    plain_tensors: int = 0
    differing_values: tuple[str, ...] = ()
    blocked_seconds: float = 0.0
    parts: Mapping[str, int] = field(default_factory=dict, hash=False)
    omitted_parts: tuple[str, ...] = ()
    phases: PhaseReport | None = field(default=None, hash=False, repr=False)
    network: NetworkReport | None = field(default=None, hash=False)
    failed_attempts: int = 0
    replica_differences: tuple[ReplicaDifference, ...] = field(default=(), hash=False)

    def __str__(self) -> str:
        step = "without a step" if self.step is None else f"of step {self.step}"
        verb = "was there already and stays" if self.existed else "committed"
        size = f"{human_size(self.nbytes)} in {self.seconds:.2f} s"
        if self.encoded_nbytes:
            size += f", {human_size(self.encoded_nbytes)} of it compressed"
        if self.omitted_parts:
            size += f", without {', '.join(self.omitted_parts)}"
        if self.replica_differences:
            size += f"; replicas of {count_text(len(self.replica_differences), 'tensor')} differ"
        network = f"\n  {self.network}" if self.network is not None else ""
        return f"{self.path}\n  save {self.id} {step} {verb}\n  {size}{network}"

    @property
    def background_seconds(self) -> float:
        """The part of `seconds` in which the caller could go on."""
        return max(self.seconds - self.blocked_seconds, 0.0)
