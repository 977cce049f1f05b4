"""The verb `verify`: checks sizes and headers and, with `--deep`, digests; or repairs damage.

A run's folder is checked step by step.
"""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from unified_ckpt.cli.display.console import rendered, stdout_console
from unified_ckpt.cli.display.progress import progress_bar
from unified_ckpt.cli.display.text import printable
from unified_ckpt.cli.option_values import UNFINISHED, step_prefix
from unified_ckpt.core.text import count_text, human_size
from unified_ckpt.engine.cluster.verify import verify_with_replicas
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.folder.verify import VerifyReport, unreadable_report
from unified_ckpt.engine.repair.repair import RepairReport, repair
from unified_ckpt.errors import CheckpointError, IntegrityError, NotFoundError
from unified_ckpt.format.events import VerifyEvent, utc_now
from unified_ckpt.manager.events.file import append_to_recorded
from unified_ckpt.manager.steps.bucket import UnfinishedCommit, read_unfinished
from unified_ckpt.manager.steps.scan import StepRecord, scan
from unified_ckpt.runtime.objects.registry import is_bucket_url, split_url
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.storage.paths import absolute_path, is_url
from unified_ckpt.runtime.storage.regular_files import is_folder
from unified_ckpt.runtime.storage.roots import open_parent, open_root, root_path

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text


def run(arguments: Namespace) -> int:
    """Verify or repair `arguments.path`.

    Returns 1 if a problem is left, and 3 if the commit of a checkpoint in a bucket is unfinished.
    """
    if arguments.repair:
        return _repair(arguments)
    commit = _unfinished_commit(arguments.path)
    if commit is not None:
        result = {"ok": False, "unfinished": asdict(commit)}
        print(json.dumps(result, indent=2) if arguments.json else printable(str(commit)))
        return UNFINISHED
    try:
        check = _check(arguments.path, deep=arguments.deep)
    except NotFoundError:
        records, commits = _run_records(arguments)
        if not records and not commits:
            raise
        return _verify_run(arguments, records, commits)
    if arguments.json:
        print(json.dumps(check.as_json(), indent=2))
    else:
        lines = [check.report.path, *_remarks(check, "  "), check.summary("  ")]
        lines += [f"  {check.hint}"] if check.hint else []
        print(rendered(stdout_console(), *lines, cut=True))
    return 0 if check.report.ok else 1


@dataclass(frozen=True, slots=True)
class _Check:
    """The report of one checkpoint. `has_digests`: the folder has some to check bytes against."""

    report: VerifyReport
    has_digests: bool
    seconds: float

    def as_json(self) -> dict[str, object]:
        """Return the report, whether it is good, and whether digests were checked."""
        digests = self.report.deep and self.has_digests
        return {"ok": self.report.ok, "digests": digests, **asdict(self.report)}

    @property
    def hint(self) -> str:
        """What would check more."""
        if self.report.deep:
            return ""
        return "--deep also checks all digests" if self.has_digests else "it has no digests"

    def summary(self, indent: str) -> Text:
        """Return the result in one line, after `indent`."""
        from rich.text import Text  # `--json` does without it

        report = self.report
        if not report.ok:
            problems = count_text(len(report.problems), "problem")
            return Text.assemble(indent, (f"damaged: {problems}", "red"))
        is_deep = report.deep and self.has_digests
        result = "all digests match" if is_deep else "sizes and headers match", "green"
        tensors, size = count_text(report.tensors, "tensor"), human_size(report.nbytes)
        return Text.assemble(indent, result, f": {tensors}, {size} ({self.seconds:.2f} s)")


def _check(path: str, *, deep: bool) -> _Check:
    started, has_digests = time.monotonic(), False
    try:
        folder = open_path(path, lock=True)
        with closing(folder), progress_bar("verify", total=_total(folder)) as advance:
            report = verify_with_replicas(folder, deep=deep, progress=advance)
            has_digests = folder.manifest is not None and folder.manifest.digests is not None
    except IntegrityError as error:
        report = unreadable_report(absolute_path(path), error, deep=deep)
    root, name = os.path.split(report.path)
    event = VerifyEvent(
        time=utc_now(), path=name, deep=deep and has_digests, problems=len(report.problems)
    )
    append_to_recorded(root, event)
    return _Check(report, has_digests, time.monotonic() - started)


def _unfinished_commit(path: str) -> UnfinishedCommit | None:
    """Return the unfinished commit of a checkpoint in a bucket, if there is one."""
    url = absolute_path(path)
    if not is_bucket_url(url) or not split_url(url)[1]:  # a whole bucket is no checkpoint
        return None
    storage, name = open_parent(root_path(url))
    assert isinstance(storage, ObjectStorage)
    return read_unfinished(storage, name)


def _run_records(
    arguments: Namespace,
) -> tuple[list[StepRecord], Sequence[UnfinishedCommit]]:
    """Return the steps of a run that this library wrote, if the path is a run's folder.

    Steps whose commit is unfinished are returned as such.
    """
    path = absolute_path(arguments.path)
    if not is_bucket_url(path) and (is_url(path) or not is_folder(path)):
        return [], ()
    root = root_path(path) if is_bucket_url(path) else path
    scanned = scan(open_root(root), step_prefix(arguments, root))
    unfinished = {commit.name for commit in scanned.commits}
    records = [record for record in scanned.steps if record.name not in unfinished]
    return [record for record in records if record.is_unified], scanned.commits


def _verify_run(
    arguments: Namespace, records: list[StepRecord], commits: Sequence[UnfinishedCommit]
) -> int:
    """Verify all steps of a run.

    Returns 1 if one of them is damaged or incomplete, else 3 if a commit is unfinished.
    """
    checks: list[_Check] = []
    console = None if arguments.json else stdout_console()
    root = os.path.dirname(records[0].path if records else commits[0].path)
    if console is not None:
        print(rendered(console, root, cut=True))
    width = max((len(record.name) for record in records), default=0)
    for record in records:
        try:
            check = _check(record.path, deep=arguments.deep)
        except CheckpointError as error:  # an unfinished save, which is no checkpoint
            report = VerifyReport(record.path, (str(error),), 0, 0, arguments.deep)
            check = _Check(report, has_digests=False, seconds=0.0)
        checks.append(check)
        if console is not None:
            lines = [check.summary(f"  {record.name:{width}}  "), *_remarks(check, "    ")]
            print(rendered(console, *lines, cut=True), flush=True)
    damaged = sum(not check.report.ok for check in checks)
    if arguments.json:
        results = [check.as_json() for check in checks]
        fields = {"ok": not damaged and not commits, "path": root, "checkpoints": results}
        unfinished = [asdict(commit) for commit in commits]
        print(json.dumps({**fields, "unfinished": unfinished}, indent=2))
    else:
        hints = sorted({check.hint for check in checks if check.has_digests})
        total = f"{count_text(len(checks), 'checkpoint')}, {damaged} damaged"
        print("; ".join([f"  {total}", *filter(None, hints)]))
        for commit in commits:
            print(f"  {printable(str(commit))}")
    if damaged:
        return 1
    return UNFINISHED if commits else 0


def _remarks(check: _Check, indent: str) -> list[RenderableType]:
    folder = f"{check.report.path}/"
    texts = (*check.report.problems, *check.report.notes)
    return [f"{indent}{printable(' '.join(t.removeprefix(folder).split()))}" for t in texts]


def _repair(arguments: Namespace) -> int:
    started = time.monotonic()
    with progress_bar("repair") as advance:
        report = repair(arguments.path, arguments.sources, progress=advance)
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
