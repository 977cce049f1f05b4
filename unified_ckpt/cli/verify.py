"""The verb `verify`: whether every byte is there, and with `--deep` whether it is the one that was
written; `--repair` mends it.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from contextlib import closing
from dataclasses import asdict

from tqdm import tqdm

from unified_ckpt.cli.text import count_text, human_size
from unified_ckpt.engine.folder.reader import Folder, open_path
from unified_ckpt.engine.folder.verify import VerifyReport, unreadable_report, verify_with_replicas
from unified_ckpt.engine.repair.repair import RepairReport, repair
from unified_ckpt.errors import IntegrityError
from unified_ckpt.runtime.storage.storage import absolute_path


def run(arguments: Namespace) -> int:
    """Takes `path`, `deep`, `repair`, `sources` and `json`. Returns 1 where there is a problem."""
    if arguments.repair:
        return _repair(arguments)
    started = time.monotonic()
    try:
        report, has_digests = _verify(open_path(arguments.path, lock=True), deep=arguments.deep)
    except IntegrityError as error:
        report, has_digests = (
            unreadable_report(absolute_path(arguments.path), error, deep=arguments.deep),
            False,
        )
    if arguments.json:
        print(
            json.dumps(
                {"ok": report.ok, "digests": arguments.deep and has_digests, **asdict(report)},
                indent=2,
            )
        )
    else:
        print(_text(report, has_digests=has_digests, seconds=time.monotonic() - started))
    return 0 if report.ok else 1


def _verify(folder: Folder, *, deep: bool) -> tuple[VerifyReport, bool]:
    """What is found of it, and whether it has digests."""
    with closing(folder):
        # disable=None: a bar for a terminal only.
        with tqdm(
            total=_total(folder),
            desc="verify",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            leave=False,
            disable=None,
        ) as bar:
            report = verify_with_replicas(folder, deep=deep, progress=bar.update)
        return report, folder.manifest is not None and folder.manifest.digests is not None


def _repair(arguments: Namespace) -> int:
    started = time.monotonic()
    with tqdm(
        desc="verify", unit="B", unit_scale=True, unit_divisor=1024, leave=False, disable=None
    ) as bar:
        report = repair(arguments.path, arguments.sources, progress=bar.update)
    if arguments.json:
        print(json.dumps({"ok": report.ok, **asdict(report)}, indent=2))
    else:
        print(_repair_text(report, seconds=time.monotonic() - started))
    return 0 if report.ok else 1


def _repair_text(report: RepairReport, *, seconds: float) -> str:
    lines = [f"found    {text}" for text in report.damage]
    lines += [f"mended   {file}" for file in report.repaired]
    lines += [f"damaged  {text}" for text in report.problems]
    lines += [f"note     {text}" for text in report.notes]
    if report.problems:
        summary = f"still damaged, {count_text(len(report.problems), 'problem')}; {count_text(len(report.repaired), 'file')} mended"
    else:
        summary = (
            f"mended, {count_text(len(report.repaired), 'file')}, {human_size(report.nbytes)} written"
            if report.repaired
            else "nothing to mend"
        )
    return "\n  ".join([f"{report.path}: {summary} ({seconds:.2f} s)", *lines])


def _total(folder: Folder) -> int | None:
    """Tensor bytes of the parts that are there; None for a folder that does not say, and for one
    with copies of others beside them.
    """
    if folder.manifest is None or (
        folder.manifest.node_group is not None and folder.manifest.node_group.replicas
    ):
        return None
    return sum(folder.manifest.parts[part].total_nbytes for part in folder.parts)


def _text(report: VerifyReport, *, has_digests: bool, seconds: float) -> str:
    if not report.ok:
        return "\n  ".join(
            [
                f"{report.path}: damaged, {count_text(len(report.problems), 'problem')}",
                *report.problems,
            ]
        )
    summary = (
        f"({count_text(report.tensors, 'tensor')}, {human_size(report.nbytes)}, {seconds:.2f} s)"
    )
    if report.deep and has_digests:
        return f"{report.path}: every digest is right {summary}"
    hint = (
        "; --deep also checks every digest"
        if has_digests
        else "; there are no digests to check bytes against"
    )
    return f"{report.path}: sizes and headers are right {summary}{hint}"
