"""The verb `verify`: whether every byte of a checkpoint is there, and with `--deep` whether it is the one that was written."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from dataclasses import asdict

from tqdm import tqdm

from unified_ckpt.cli.words import count, human
from unified_ckpt.engine.checkpoint import Folder, open_path
from unified_ckpt.engine.prove import VerifyReport, verify_copies


def run(arguments: Namespace) -> int:
    """Takes `path`, `deep` and `json`. Returns 1 where there is a problem."""
    started = time.monotonic()
    folder = open_path(arguments.path, hold=True)
    try:
        # disable=None: a bar for a terminal only.
        with tqdm(total=_total(folder), desc="verify", unit="B", unit_scale=True, unit_divisor=1024, leave=False, disable=None) as bar:
            report = verify_copies(folder, deep=arguments.deep, progress=bar.update)
        digested = folder.manifest is not None and folder.manifest.digests is not None
    finally:
        folder.close()
    if arguments.json:
        print(json.dumps({"ok": report.ok, "digests": arguments.deep and digested, **asdict(report)}, indent=2))
    else:
        print(_text(report, digested=digested, seconds=time.monotonic() - started))
    return 0 if report.ok else 1


def _total(folder: Folder) -> int | None:
    """Tensor bytes of the parts that are there; None for a folder that does not say, and for one with copies of others beside them."""
    if folder.manifest is None or (folder.manifest.island is not None and folder.manifest.island.copies):
        return None
    return sum(folder.manifest.parts[part].total_nbytes for part in folder.parts)


def _text(report: VerifyReport, *, digested: bool, seconds: float) -> str:
    if not report.ok:
        return "\n  ".join([f"{report.path}: damaged, {count(len(report.problems), 'problem')}", *report.problems])
    seen = f"({count(report.tensors, 'tensor')}, {human(report.nbytes)}, {seconds:.2f} s)"
    if report.deep and digested:
        return f"{report.path}: every digest is right {seen}"
    more = "; --deep also checks every digest" if digested else "; there are no digests to check bytes against"
    return f"{report.path}: sizes and headers are right {seen}{more}"
