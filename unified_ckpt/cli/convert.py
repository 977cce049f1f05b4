"""The verb `convert`: writes a checkpoint of any format as a unified folder or another format.

Under torchrun, all processes write.
"""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import asdict

from tqdm import tqdm

from unified_ckpt.cli.arguments import source_options
from unified_ckpt.cli.text import count_text, human_size, printable
from unified_ckpt.engine.rewrite.convert import ConvertReport
from unified_ckpt.exports.convert import convert
from unified_ckpt.runtime.comm.comm import join_torchrun


def run(arguments: Namespace) -> int:
    """Convert `arguments.sources` to `arguments.target` and print a report; return 0."""
    with ExitStack() as stack:
        is_first_rank = join_torchrun(stack)
        disable = None if is_first_rank else True  # None: show the bar on terminals only
        bar = stack.enter_context(
            tqdm(desc="convert", unit="B", unit_scale=True, leave=False, disable=disable)
        )

        def progress(nbytes: int, total: int) -> None:
            bar.total = total
            bar.update(nbytes)

        report = convert(
            arguments.sources,
            arguments.target,
            progress=progress,
            to=arguments.to,
            source=source_options(arguments),
            parts=tuple(arguments.part) or None,
            model_dtype=arguments.dtype,
            compression=arguments.compression,
            max_file_bytes=arguments.max_file_size,
            if_exists=arguments.if_exists,
            compare=not arguments.no_compare,
            fsync=not arguments.no_fsync,
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
