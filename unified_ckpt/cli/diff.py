"""The verb `diff`: what differs between two checkpoints, of whatever formats. 1 where something
does.
"""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import ExitStack, closing

from tqdm import tqdm

from unified_ckpt.cli.source_args import source_options
from unified_ckpt.cli.tensor_tree import natural_key, spec_text, table
from unified_ckpt.cli.text import count_text, human_size, printable
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.diff import Difference, DiffReport, diff_sources
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.sources import open_source


def run(arguments: Namespace) -> int:
    """Takes `first` and how to read it, `second`, `part`, `match`, `deep` and `json`. Returns 1
    where the two differ.
    """
    parts = arguments.part or None
    with ExitStack() as stack:
        first = stack.enter_context(
            closing(open_source(arguments.first, source_options(arguments)))
        )
        second = stack.enter_context(closing(open_source(arguments.second)))
        # disable=None: a bar for a terminal only.
        bar = stack.enter_context(
            tqdm(
                total=_total(first),
                desc="diff",
                unit="B",
                unit_scale=True,
                leave=False,
                disable=None,
            )
        )
        report = diff_sources(
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
        (f"  {printable(f'{difference.part}:{difference.name}')}", (_describe(difference),))
        for difference in sorted(report.differences, key=_sort_key)
    ]
    summary = f"{count_text(report.equal, 'tensor')} equal, {len(report.differences)} not; {human_size(report.bytes_read)} read"
    return [*table(rows), summary]


def _sort_key(difference: Difference) -> tuple[object, ...]:
    return difference.part, natural_key(difference.name)


def _describe(difference: Difference) -> str:
    """`BF16 [4] and F32 [4], 3 elements differ, by 0.5 at most`."""
    if difference.first is None or difference.second is None:
        return f"only in the {'first' if difference.second is None else 'second'}: {spec_text(_existing_spec(difference))}"
    specs = (
        spec_text(difference.first)
        if difference.first == difference.second
        else f"{spec_text(difference.first)} and {spec_text(difference.second)}"
    )
    if difference.first.shape != difference.second.shape:
        return specs
    if not difference.elements:
        return f"{specs}, equal values"
    size = (
        "one of them is no number, or nan"
        if difference.max_abs is None
        else f"by {difference.max_abs:.6g} at most"
    )
    return f"{specs}, {count_text(difference.elements, 'element')} differ{'s' if difference.elements == 1 else ''}, {size}"


def _existing_spec(difference: Difference) -> TensorSpec:
    spec = difference.first or difference.second
    if spec is None:
        raise AssertionError("a difference is of a tensor that one side has")
    return spec


def _as_json(report: DiffReport) -> dict[str, object]:
    def spec_json(spec: TensorSpec | None) -> dict[str, object] | None:
        return None if spec is None else {"dtype": spec.dtype, "shape": list(spec.shape)}

    differences = [
        {
            "part": difference.part,
            "name": difference.name,
            "first": spec_json(difference.first),
            "second": spec_json(difference.second),
            "elements": difference.elements,
            "max_abs": difference.max_abs,
        }
        for difference in sorted(report.differences, key=_sort_key)
    ]
    return {"equal": report.equal, "bytes_read": report.bytes_read, "differences": differences}
