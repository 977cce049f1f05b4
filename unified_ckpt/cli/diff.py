"""The verb `diff`: shows what differs between two checkpoints; exit code 1 if anything does."""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import ExitStack, closing
from dataclasses import asdict

from unified_ckpt.cli.display.progress import progress_bar
from unified_ckpt.cli.display.tensor_tree import spec_text, tree_key
from unified_ckpt.cli.display.text import aligned, no_match_error, printable
from unified_ckpt.cli.option_values import source_options
from unified_ckpt.core.text import count_text, human_size
from unified_ckpt.engine.source.diff import Difference, DiffReport, diff_sources
from unified_ckpt.foreign.open import open_source


def run(arguments: Namespace) -> int:
    """Compare `arguments.first` with `arguments.second`; return 1 if they differ."""
    with ExitStack() as stack:
        first = stack.enter_context(
            closing(open_source(arguments.first, source_options(arguments)))
        )
        second = stack.enter_context(closing(open_source(arguments.second)))
        nbytes = sum(spec.nbytes for spec in first.all_specs().values())
        advance = stack.enter_context(progress_bar("diff", total=nbytes))
        report = diff_sources(
            first,
            second,
            parts=arguments.parts,
            match=arguments.match,
            deep=arguments.deep,
            progress=advance,
        )
    if arguments.match is not None and not report.equal and not report.differences:
        raise no_match_error(arguments.match, arguments.first)
    print(json.dumps(_as_json(report), indent=2) if arguments.json else "\n".join(_text(report)))
    return 1 if report.differences else 0


def _text(report: DiffReport) -> list[str]:
    rows = [
        (f"  {printable(f'{difference.part}:{difference.name}')}", _describe(difference))
        for difference in sorted(report.differences, key=_sort_key)
    ]
    equal, read = count_text(report.equal, "tensor"), human_size(report.bytes_read)
    return [*aligned(rows), f"{equal} equal, {len(report.differences)} different; {read} read"]


def _sort_key(difference: Difference) -> tuple[object, ...]:
    return difference.part, tree_key(difference.name)


def _describe(difference: Difference) -> str:
    """Describe a difference: `BF16 [4] and F32 [4], 3 elements differ, by 0.5 at most`."""
    first, second = difference.first, difference.second
    if first is None or second is None:
        present = [spec for spec in (first, second) if spec is not None]
        return f"only in the {'second' if first is None else 'first'}: {spec_text(present[0])}"
    specs = spec_text(first) if first == second else f"{spec_text(first)} and {spec_text(second)}"
    if first.shape != second.shape:
        return specs
    if not difference.elements:
        return f"{specs}, equal values"
    count = f"{count_text(difference.elements, 'element')} differ"
    count += "s" if difference.elements == 1 else ""
    if difference.max_abs is None:
        return f"{specs}, {count}, not comparable as numbers"
    return f"{specs}, {count}, by {difference.max_abs:.6g} at most"


def _as_json(report: DiffReport) -> dict[str, object]:
    differences = [asdict(difference) for difference in sorted(report.differences, key=_sort_key)]
    return {"equal": report.equal, "bytes_read": report.bytes_read, "differences": differences}
