"""The report of a load, and the remarks in it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from unified_ckpt.core.text import MAX_SHOWN, count_text, first_items, human_size, step_text
from unified_ckpt.engine.load.mismatches import Mismatches, is_resumed
from unified_ckpt.engine.load.request import LoadRequest
from unified_ckpt.engine.source.protocol import SourceMetadata
from unified_ckpt.engine.source.stateful import RANK_EXTRA_ENTRY
from unified_ckpt.runtime.comm.phases import PhaseReport
from unified_ckpt.runtime.comm.traffic import NetworkReport

_LOG = logging.getLogger("unified_ckpt")
_OBJECTS = ("extra:", "rank_extra")  # start the names of objects' states


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load. Tensors are named "part:name", the extra state of modules
    "modules:name". Byte counts are of this rank.

    `bytes_read`: decoded bytes; files have fewer bytes of compressed tensors.
    `missing`, `unexpected`: names that only the target or only the checkpoint has. `wrong`: one
    sentence for each mismatch of shape, dtype or state. All three are empty with `strict`.
    `rank_extra`: the entry of `rank_extra` that this rank gets. None if there is none for its place
    in the mesh, and None in place of an object's state that was kept.
    `data_coordinate`: this rank's data coordinate and their number, equal for ranks that read the
    same data; rank and world if the mesh is unknown.
    `sources`: for each target part, the stored parts that were read for it.
    `notes`: further remarks, one sentence each.
    `kept`: paths in `rank_extra` of objects left unchanged, on one rank at least, because their
    state belongs to another place in the mesh; `notes` says why. `unused`: stored parts and object
    states ("extra:scheduler") that no rank loaded. Both are equal on all ranks.
    `saved_ranks`: the number of ranks that saved the checkpoint, None if unknown; `ranks`: of those
    that loaded it. `phases`: the steps of all ranks, on rank 0 only.
    `network`: what crossed the network between nodes, on rank 0 only; None if nothing did.
    `metadata`: all that the checkpoint stores beside tensors, with the values of this rank.
    """

    step: int | None
    extra: Any
    rank_extra: Any
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    wrong: tuple[str, ...]
    bytes_read: int
    verified_bytes: int
    sources: Mapping[str, tuple[str, ...]]
    seconds: float
    notes: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    data_coordinate: tuple[int, int] = (0, 1)
    saved_ranks: int | None = None
    ranks: int = 1
    phases: PhaseReport | None = field(default=None, repr=False)
    network: NetworkReport | None = None
    metadata: SourceMetadata | None = field(default=None, repr=False)

    def __str__(self) -> str:
        step = "a checkpoint without a step" if self.step is None else f"step {self.step}"
        read = f"{human_size(self.bytes_read)} read, {human_size(self.verified_bytes)} verified"
        counts = {"missing": self.missing, "unexpected": self.unexpected, "different": self.wrong}
        remarks = [f"{len(names)} {kind}" for kind, names in counts.items() if names]
        remarks += [f"unused: {', '.join(self.unused)}"] if self.unused else []
        result = "; ".join([*remarks, *self.notes]) or "everything matches"
        loaded = f"loaded {step} in {self.seconds:.2f} s"
        network = [str(self.network)] if self.network is not None else []
        return "\n  ".join([loaded, f"{read}: {', '.join(self.sources)}", result, *network])


def load_notes(
    request: LoadRequest,
    mismatches: Mismatches,
    nbytes: int,
    *,
    rank: int,
) -> Iterator[str]:
    """Yield what the caller should know of a load that read `nbytes`; rank 0 also logs the worst.

    Formats of other frameworks have no digests, so only an explicit verify="full" is answered.
    """
    for kept in _kept_notes(request, mismatches):
        if rank == 0:
            _LOG.warning("%s", kept)
        yield kept
    if request.placed.unplaced:
        unplaced = (
            f"{first_items(request.placed.unplaced, MAX_SHOWN)}: differed between the ranks of the "
            f"save: {request.placed.placement.reason}: this rank gets those of the lowest rank"
            f"{_mesh_remedy(request)}"
        )
        if rank == 0 and _takes_values(request):
            _LOG.warning("%s", unplaced)
        yield unplaced
    if mismatches.padded:
        padded = ", ".join(mismatches.padded)
        yield f"padded; the target keeps its values beyond the stored shape: {padded}"
    verify, is_unified = request.options.verify, request.source.format == "unified"
    expects_digests = verify == "full" or (is_unified and verify != "off")
    if nbytes and expects_digests and not request.metadata.has_digests:
        yield (
            f'verify="{verify}": the checkpoint has no digests; only sizes and headers were checked'
        )
    if RANK_EXTRA_ENTRY in mismatches.unplaced:
        yield (
            f"rank_extra is not restored: {request.placed.placement.reason}; read it from "
            f"`uc.open(path).rank_extra`{_mesh_remedy(request)}"
        )


def _kept_notes(request: LoadRequest, mismatches: Mismatches) -> Iterator[str]:
    """Yield which objects in `rank_extra` stay as they are, and what to do."""
    unplaced = [path for path in mismatches.kept if path in mismatches.unplaced]
    lost = [path for path in mismatches.kept if path not in mismatches.unplaced]
    for paths, reason, remedy in (
        (unplaced, request.placed.placement.reason, _mesh_remedy(request)),
        (lost, "saved on a node that is missing", ""),
    ):
        if paths:
            yield (
                f"{', '.join(paths)}: left unchanged: {reason}; give them a load_from_ranks, or "
                f"restore them from `uc.open(path).rank_extra`{remedy}; for data positions, save "
                "a uc.ElasticSampler in `extra`"
            )


def _takes_values(request: LoadRequest) -> bool:
    """Return whether the load has targets for values beside tensors, or resumes training."""
    takes_modules = any(request.state.extra_owners().values())
    return is_resumed(request) or request.extra is not None or takes_modules


def _mesh_remedy(request: LoadRequest) -> str:
    """Return how the mesh of a load could be known, which would place values; "" if it is."""
    mesh, data_dims = request.placed.mesh, request.options.data_dims
    if mesh is None:
        has_mesh = request.metadata.rank_mesh is not None
        return ", or pass model= or layout= in the same load, for its mesh" if has_mesh else ""
    unknown = mesh.data_coordinates(data_dims) is None
    return ", or name its mesh dims and pass LoadOptions(data_dims=...)" if unknown else ""


def log_resume(path: str, report: LoadReport, *, rank: int) -> None:
    """Log on rank 0 that a run resumes, in one line: from which checkpoint, on how many ranks."""
    if rank == 0:
        text = resume_text(path, step_text(report.step), report)
        _LOG.info("%s", "; ".join([text, *report.notes]))


def resume_text(label: str, position: str, report: LoadReport) -> str:
    """Return where a run resumes, for the log, with the numbers of ranks. `position`: its step."""
    saved = f", saved by {count_text(report.saved_ranks, 'rank')}" if report.saved_ranks else ""
    loaded = count_text(report.ranks, "rank")
    return f"resumed from {label}: {position}{saved}, loaded by {loaded}"


def log_report(label: str, report: LoadReport) -> None:
    """Log the load of rank 0."""
    _LOG.info(
        "loaded %s: rank 0 read %s in %.2f s, %s/s%s",
        label,
        human_size(report.bytes_read),
        report.seconds,
        human_size(report.bytes_read / max(report.seconds, 1e-9)),
        "; ".join(["", *report.notes, *([str(report.network)] if report.network else [])]),
    )


def log_unused(label: str, report: LoadReport, *, resumes: bool, restores_values: bool) -> None:
    """Log what no rank loaded: a warning if a run `resumes`, which may have forgotten a scheduler;
    others chose their parts. `restores_values`: the caller restores objects of the report.
    """
    unused = [name for name in report.unused if not (restores_values and name.startswith(_OBJECTS))]
    if unused:
        level = logging.WARNING if resumes else logging.INFO
        _LOG.log(level, "%s: no rank loaded %s from the checkpoint", label, ", ".join(unused))
