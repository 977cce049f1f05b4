"""The verb `convert`: a checkpoint of any format, written as a unified folder or in another format.
Under torchrun all processes write.
"""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import ExitStack

from tqdm import tqdm

from unified_ckpt.cli.source_args import source_options
from unified_ckpt.cli.text import count_text, human_size, printable
from unified_ckpt.engine.rewrite.convert import ConvertReport
from unified_ckpt.exports.convert import convert
from unified_ckpt.runtime.comm.comm import join_torchrun


def run(arguments: Namespace) -> int:
    """Takes `sources` and how to read them, `target`, `to`, `part`, `dtype`, `max_file_size`,
    `if_exists`, `no_compare`, `no_fsync` and
    `json`."""
    with ExitStack() as stack:
        is_first_rank = join_torchrun(stack)
        # disable=None: a bar for a terminal only.
        bar = stack.enter_context(
            tqdm(
                desc="convert",
                unit="B",
                unit_scale=True,
                leave=False,
                disable=None if is_first_rank else True,
            )
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
            max_file_bytes=arguments.max_file_size,
            if_exists=arguments.if_exists,
            compare=not arguments.no_compare,
            fsync=not arguments.no_fsync,
        )
    if is_first_rank:
        print(
            json.dumps(_as_json(report), indent=2) if arguments.json else "\n".join(_text(report))
        )
    return 0


def _text(report: ConvertReport) -> list[str]:
    if report.existed:
        return [f"{printable(report.path)}: holds save {report.id} already, which stays"]
    parts = [
        f"  {printable(part)}: {count_text(tensor_count, 'tensor')}, {human_size(report.nbytes[part])}"
        for part, tensor_count in report.tensors.items()
    ]
    proofs = ["  every tensor was written whole, once"]
    if report.compared:
        proofs.append(
            f"  {count_text(report.compared, 'tensor')} of master_weights, cast down, are the model bit for bit"
        )
    if report.verified:
        proofs.append(
            f"  {count_text(report.verified, 'tensor')} have the digests that the source says"
        )
    step = "" if report.step is None else f", step {report.step}"
    total = sum(report.nbytes.values())
    first_line = f"{printable(report.path)}: from {report.format}{step}, {human_size(total)} in {report.seconds:.1f} s"
    left_out = (
        [f"  not read, not copied: {', '.join(map(printable, report.left_out))}"]
        if report.left_out
        else []
    )
    return [
        first_line,
        *parts,
        *proofs,
        *(f"  {printable(note)}" for note in report.notes),
        *left_out,
    ]


def _as_json(report: ConvertReport) -> dict[str, object]:
    return {
        "path": report.path,
        "format": report.format,
        "id": report.id,
        "step": report.step,
        "seconds": report.seconds,
        "tensors": dict(report.tensors),
        "nbytes": dict(report.nbytes),
        "compared": report.compared,
        "proved": report.verified,
        "notes": list(report.notes),
        "left_out": list(report.left_out),
        "stays": report.existed,
    }
