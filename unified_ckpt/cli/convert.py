"""The verb `convert`: writes a checkpoint of any format as a unified folder or another format.

Under torchrun, all processes write.
"""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import asdict

from unified_ckpt.cli.display.progress import progress_bar
from unified_ckpt.cli.display.text import printable
from unified_ckpt.cli.option_values import options_from, source_options
from unified_ckpt.core.text import count_text, human_size
from unified_ckpt.engine.rewrite.convert import ConvertReport
from unified_ckpt.foreign.export.convert import convert
from unified_ckpt.options import ConvertOptions
from unified_ckpt.runtime.comm.comm import join_torchrun


def run(arguments: Namespace) -> int:
    """Convert `arguments.sources` to `arguments.target` and print a report; return 0."""
    with ExitStack() as stack:
        is_first_rank = join_torchrun(stack)
        advance = stack.enter_context(progress_bar("convert", enabled=is_first_rank))
        report = convert(
            arguments.sources,
            arguments.target,
            progress=advance,
            **dict(options_from(ConvertOptions, arguments)) | {"source": source_options(arguments)},
        )
    if is_first_rank and arguments.json:
        print(json.dumps(asdict(report), indent=2))
    elif is_first_rank:
        print("\n".join(_text(report)))
    return 0


def _text(report: ConvertReport) -> list[str]:
    if report.existed:
        return [f"{printable(report.path)}: already holds save {report.id}, kept as it is"]
    step = "" if report.step is None else f", step {report.step}"
    size = human_size(sum(report.nbytes.values()))
    lines = [
        f"{printable(report.path)}: from {report.format}{step}, {size} in {report.seconds:.1f} s"
    ]
    for part, tensor_count in report.tensors.items():
        size = human_size(report.nbytes[part])
        lines.append(f"  {printable(part)}: {count_text(tensor_count, 'tensor')}, {size}")
    lines.append("  every element was written exactly once")
    if report.compared:
        compared = count_text(report.compared, "tensor")
        lines.append(f"  {compared} of master_weights, cast down, equal the model bit for bit")
    if report.verified:
        lines.append(f"  {count_text(report.verified, 'tensor')} match the digests of the source")
    lines += [f"  {printable(note)}" for note in report.notes]
    if report.left_out:
        lines.append(f"  neither read nor copied: {', '.join(map(printable, report.left_out))}")
    return lines
