"""The verb `diff`: what differs between two checkpoints, of whatever formats. 1 where something does."""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import ExitStack, closing

from tqdm import tqdm

from unified_ckpt.cli.source_args import source_options
from unified_ckpt.cli.tensor_tree import natural, spec_text, table
from unified_ckpt.cli.text import count, human, plain
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.diff import Difference, DiffReport, compare
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.sources import open_any


def run(arguments: Namespace) -> int:
    """Takes `first` and how to read it, `second`, `part`, `match`, `deep` and `json`. Returns 1 where the two differ."""
    parts = arguments.part or None
    with ExitStack() as owned:
        first = owned.enter_context(closing(open_any(arguments.first, source_options(arguments))))
        second = owned.enter_context(closing(open_any(arguments.second)))
        # disable=None: a bar for a terminal only.
        bar = owned.enter_context(
            tqdm(
                total=_total(first),
                desc="diff",
                unit="B",
                unit_scale=True,
                leave=False,
                disable=None,
            )
        )
        report = compare(
            first,
            second,
            parts=parts,
            match=arguments.match,
            deep=arguments.deep,
            progress=bar.update,
        )
    print(json.dumps(_as_json(report), indent=2) if arguments.json else "\n".join(_text(report)))
    return 1 if report.differences else 0


def _total(source: Source) -> int:
    return sum(
        spec.nbytes
        for part in source.parts
        for spec in source.specs(part, source.names(part)).values()
    )


def _text(report: DiffReport) -> list[str]:
    rows = [
        (f"  {plain(f'{one.part}:{one.name}')}", (_words(one),))
        for one in sorted(report.differences, key=_place)
    ]
    end = f"{count(report.equal, 'tensor')} equal, {len(report.differences)} not; {human(report.bytes_read)} read"
    return [*table(rows), end]


def _place(one: Difference) -> tuple[object, ...]:
    return one.part, natural(one.name)


def _words(one: Difference) -> str:
    """`BF16 [4] and F32 [4], 3 elements differ, by 0.5 at most`."""
    if one.first is None or one.second is None:
        return (
            f"only in the {'first' if one.second is None else 'second'}: {spec_text(_there(one))}"
        )
    specs = (
        spec_text(one.first)
        if one.first == one.second
        else f"{spec_text(one.first)} and {spec_text(one.second)}"
    )
    if one.first.shape != one.second.shape:
        return specs
    if not one.elements:
        return f"{specs}, equal values"
    size = (
        "one of them is no number, or nan"
        if one.max_abs is None
        else f"by {one.max_abs:.6g} at most"
    )
    return f"{specs}, {count(one.elements, 'element')} differ{'s' if one.elements == 1 else ''}, {size}"


def _there(one: Difference) -> TensorSpec:
    spec = one.first or one.second
    if spec is None:
        raise AssertionError("a difference is of a tensor that one side has")
    return spec


def _as_json(report: DiffReport) -> dict[str, object]:
    def told(spec: TensorSpec | None) -> dict[str, object] | None:
        return None if spec is None else {"dtype": spec.dtype, "shape": list(spec.shape)}

    differences = [
        {
            "part": one.part,
            "name": one.name,
            "first": told(one.first),
            "second": told(one.second),
            "elements": one.elements,
            "max_abs": one.max_abs,
        }
        for one in sorted(report.differences, key=_place)
    ]
    return {"equal": report.equal, "bytes_read": report.bytes_read, "differences": differences}
