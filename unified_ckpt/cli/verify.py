"""The verb `verify`: checks sizes and headers and, with `--deep`, digests; or repairs damage."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from contextlib import closing
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from unified_ckpt.cli.text import count_text, human_size
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.folder.verify import VerifyReport, unreadable_report, verify_with_replicas
from unified_ckpt.engine.repair.repair import RepairReport, repair
from unified_ckpt.errors import IntegrityError
from unified_ckpt.runtime.storage.storage import absolute_path


def run(arguments: Namespace) -> int:
    """Verify or repair `arguments.path`; return 1 if a problem is left."""
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
        digests = arguments.deep and has_digests
        print(json.dumps({"ok": report.ok, "digests": digests, **asdict(report)}, indent=2))
    else:
        print(_text(report, has_digests=has_digests, seconds=time.monotonic() - started))
    return 0 if report.ok else 1


def _verify(folder: Folder, *, deep: bool) -> tuple[VerifyReport, bool]:
    """Return the report, and whether the folder has digests."""
    with closing(folder), _progress_bar(_total(folder)) as bar:
        report = verify_with_replicas(folder, deep=deep, progress=bar.update)
        return report, folder.manifest is not None and folder.manifest.digests is not None


def _progress_bar(total: int | None) -> Any:
    # disable=None: show the bar on terminals only.
    return tqdm(
        total=total,
        desc="verify",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        leave=False,
        disable=None,
    )


def _repair(arguments: Namespace) -> int:
    started = time.monotonic()
    with _progress_bar(None) as bar:
        report = repair(arguments.path, arguments.sources, progress=bar.update)
    if arguments.json:
        print(json.dumps({"ok": report.ok, **asdict(report)}, indent=2))
    else:
        print(_repair_text(report, seconds=time.monotonic() - started))
    return 0 if report.ok else 1


def _repair_text(report: RepairReport, *, seconds: float) -> str:
    lines = [f"found    {text}" for text in report.damage]
    lines += [f"repaired {file}" for file in report.repaired]
    lines += [f"damaged  {text}" for text in report.problems]
    lines += [f"note     {text}" for text in report.notes]
    files = count_text(len(report.repaired), "file")
    if report.problems:
        problems = count_text(len(report.problems), "problem")
        summary = f"still damaged, {problems}; {files} repaired"
    elif report.repaired:
        summary = f"repaired, {files}, {human_size(report.nbytes)} written"
    else:
        summary = "nothing to repair"
    return "\n  ".join([f"{report.path}: {summary} ({seconds:.2f} s)", *lines])


def _total(folder: Folder) -> int | None:
    """Return the tensor bytes to read; None if the folder does not say, or has replicas."""
    if folder.manifest is None or (
        folder.manifest.node_group is not None and folder.manifest.node_group.replicas
    ):
        return None
    return sum(folder.manifest.parts[part].total_nbytes for part in folder.parts)


def _text(report: VerifyReport, *, has_digests: bool, seconds: float) -> str:
    if not report.ok:
        problems = count_text(len(report.problems), "problem")
        return "\n  ".join([f"{report.path}: damaged, {problems}", *report.problems])
    tensors, size = count_text(report.tensors, "tensor"), human_size(report.nbytes)
    summary = f"({tensors}, {size}, {seconds:.2f} s)"
    if report.deep and has_digests:
        return f"{report.path}: all digests match {summary}"
    hint = "--deep also checks all digests" if has_digests else "no digests to check bytes against"
    return f"{report.path}: sizes and headers match {summary}; {hint}"
