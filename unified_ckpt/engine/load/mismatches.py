"""Collect the mismatches of checkpoint and targets over all ranks, equally on each rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field

from unified_ckpt.core.text import first_items, format_list
from unified_ckpt.engine.load.custom_modules import target_part
from unified_ckpt.engine.load.match import MatchReport
from unified_ckpt.engine.load.request import LoadRequest
from unified_ckpt.engine.load.same_on_all_ranks import check_same_on_all_ranks, shared_settings
from unified_ckpt.engine.plan.holders import (
    check_layout_reports,
    gather_distinct_json,
    layout_report,
)
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.engine.source.stateful import StatefulRestore
from unified_ckpt.errors import MismatchError
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER, WEIGHTS
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.error_spread import Spread, mark

_LOG = logging.getLogger("unified_ckpt")


@dataclass(slots=True)
class Mismatches:
    """The mismatches of all ranks, as names or sentences.

    The fields are those of `LoadReport`; `unplaced`: see `StatefulRestore`. `offered`: unexpected
    names that a module which customizes its loading may use.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    unplaced: list[str] = field(default_factory=list)
    padded: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    offered: list[str] = field(default_factory=list)


def collect_mismatches(
    collective: Collective,
    request: LoadRequest,
    match_report: MatchReport,
    stateful: StatefulRestore,
) -> Mismatches:
    """Join the match reports of all ranks, collectively."""
    names = {
        "missing": match_report.missing,
        "wrong": match_report.wrong,
        "used": sorted(match_report.used),
        "requested": sorted(request.state.requested_parts),
        "kept": stateful.kept,
        "unplaced": stateful.unplaced,
        "padded": sorted(match_report.padded.values()),
        "loaded": [
            *stateful.labels,
            *sorted({part for parts in match_report.sources.values() for part in parts}),
        ],
    }
    owners = request.state.extra_owners()
    names["module_parts"] = sorted(owners)
    names["modules"] = sorted(name for modules in owners.values() for name in modules)
    names["custom"] = request.custom.prefixes()
    if is_resumed(request):
        names["masters"] = sorted(match_report.masters - match_report.masters_read)
        names["masters_read"] = sorted(match_report.masters_read)
    settings = shared_settings(
        request.metadata.save_id, strict=request.strict, options=request.options
    )
    summary = {
        "layout": layout_report(request.layout, request.matched_rules),
        "names": names,
        "settings": settings,
    }
    summary_ids, summaries = gather_distinct_json(collective, "mismatches", summary)
    joined = None
    if collective.rank == 0:
        check_layout_reports([summary["layout"] for summary in summaries.values()])
        check_same_on_all_ranks([summaries[name]["settings"] for name in summary_ids])
        names_of_ranks = [summary["names"] for summary in summaries.values()]
        joined = astuple(_join_names(names_of_ranks, request))
    return Mismatches(*collective.broadcast_json("joined-mismatches", joined))


def check_modules(request: LoadRequest, match_report: MatchReport) -> None:
    """Record modules whose extra state is not stored: a note where no format could have it."""
    metadata = request.metadata
    absent = [
        name
        for modules in request.state.extra_owners().values()
        for name in modules
        if name not in metadata.modules
    ]
    if metadata.modules or metadata.stores_modules:
        match_report.missing += [f"modules:{name}" for name in absent]
    elif absent:
        match_report.notes.append(
            "left unchanged, as the checkpoint has no extra state of modules: "
            f"{first_items(absent, 3)}"
        )


def is_resumed(request: LoadRequest) -> bool:
    """Return whether the load resumes training, with all parts requested by default."""
    return OPTIMIZER in request.state.requested_parts and request.options.parts is None


def _join_names(
    names_of_ranks: Sequence[Mapping[str, Sequence[str]]], request: LoadRequest
) -> Mismatches:
    source, joined = request.source, dict[str, set[str]]()
    for names in names_of_ranks:
        for kind, values in names.items():
            joined.setdefault(kind, set()).update(values)
    expected, wrong = joined["requested"], sorted(joined["wrong"])
    if MODEL in expected and MODEL not in source.parts:  # their union is the model
        expected |= set(WEIGHTS)
    unexpected = [
        f"{part}:{name}"
        for part in sorted(expected & set(source.parts))
        for name in sorted(source.names(part))
        if not request.ignores_unexpected and f"{part}:{name}" not in joined["used"]
    ]
    prefixes = tuple(joined["custom"])
    offered = dict.fromkeys(n for n in unexpected if _target_name(n, source).startswith(prefixes))
    unexpected = [name for name in unexpected if name not in offered]
    unused: list[str] = []
    for name in sorted(request.metadata.modules.keys() - joined["modules"]):
        part = name.partition(".")[0]
        part = part if part in {*source.parts, *expected} else MODEL
        if part in expected:  # a dict of tensors has no place for it
            (unexpected if part in joined["module_parts"] else unused).append(f"modules:{name}")
    lost = sorted(joined.get("masters", set()) - joined.get("masters_read", set()))
    if lost:
        wrong.insert(
            0,
            f"{MASTER}: {first_items(lost, 3)}: the checkpoint's master weights are more precise "
            "than the model; pass master_weights=, load a float32 model, or leave them out with "
            'LoadOptions(parts=("model", "optimizer"))',
        )
    stored = [
        *source.parts,
        *([OPTIMIZER] if request.metadata.groups and OPTIMIZER not in source.parts else []),
        *request.metadata.objects,
    ]
    return Mismatches(
        missing=sorted(joined["missing"]),
        unexpected=unexpected,
        wrong=wrong,
        kept=sorted(joined["kept"]),
        unplaced=sorted(joined["unplaced"]),
        padded=sorted(joined["padded"]),
        unused=[name for name in stored if name not in expected | joined["loaded"]] + unused,
        offered=list(offered),
    )


def _target_name(name: str, source: Source) -> str:
    part, _, fqn = name.partition(":")
    return f"{target_part(part, source)}:{fqn}"


def raise_mismatches(request: LoadRequest, mismatches: Mismatches) -> None:
    """Raise one MismatchError with all mismatches, the same on every rank, if strict."""
    problems = _problems(mismatches)
    if not request.strict or not problems:
        return
    remedy = "" if request.ignores_unexpected else "\n  pass strict=False to skip them"
    error = MismatchError(
        format_list("checkpoint and target differ", problems) + remedy,
        missing=mismatches.missing,
        unexpected=mismatches.unexpected,
        wrong=mismatches.wrong,
    )
    raise mark(error, Spread.SHARED)


def warn_mismatches(label: str, mismatches: Mismatches) -> None:
    """With strict=False, log what was left unchanged."""
    if problems := _problems(mismatches):
        title = f"loaded {label} with strict=False, which left these unchanged"
        _LOG.warning("%s", format_list(title, problems))


def _problems(mismatches: Mismatches) -> list[str]:
    return [
        *mismatches.wrong,
        *(f"{name}: is not in the checkpoint" for name in mismatches.missing),
        *(f"{name}: is in the checkpoint, requested by no rank" for name in mismatches.unexpected),
    ]
