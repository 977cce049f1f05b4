"""Many checkpoints over a run's life: when to save, what to keep, what to do when it fails, and
where to start from.

Every rank makes one manager and calls the same of its methods in the same order.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from unified_ckpt.api import Checkpointer, Path
from unified_ckpt.core.retention import ranked
from unified_ckpt.engine.load.load import LoadReport
from unified_ckpt.engine.save.job import SaveReport
from unified_ckpt.engine.save.pending import PendingSave
from unified_ckpt.errors import (
    CheckpointError,
    FormatError,
    IncompleteError,
    IntegrityError,
    NotFoundError,
    StorageError,
)
from unified_ckpt.manager import restore as origin
from unified_ckpt.manager.restore import RestorePoint
from unified_ckpt.manager.rules import when
from unified_ckpt.manager.rules.metrics import Metrics
from unified_ckpt.manager.save_scheduler import SaveJob, SaveScheduler
from unified_ckpt.manager.steps.rotate import rotate_after_save
from unified_ckpt.manager.steps.scan import BadStep, Scan, StepRecord, scan, step_name
from unified_ckpt.manager.stopping.stop_signals import StopSignals
from unified_ckpt.manager.tiers.cluster_listing import ClusterScan, decode_record
from unified_ckpt.manager.tiers.tiers import SaveTarget, TieredStorage
from unified_ckpt.options import LoadOptions, ManagerOptions, SaveOptions, with_default_if_exists
from unified_ckpt.runtime.comm.topology import first_ranks
from unified_ckpt.runtime.storage.locks import shared_lock
from unified_ckpt.runtime.storage.storage import LocalStorage, writable_path

if TYPE_CHECKING:
    import torch.distributed as dist

_LOG = logging.getLogger("unified_ckpt")
_PARAMETER_TARGETS = (
    "model",
    "optimizer",
    "master_weights",
    "parts",
    "layout",
    "strict",
)  # the optimizer: masters that it has
# What a load of a step may fail with where an older one may serve. Of an own step a FormatError is
# the caller's: the step was looked at.
_OWN_STEP_ERRORS = (IntegrityError, IncompleteError, StorageError, NotFoundError)
_FOREIGN_STEP_ERRORS = (IntegrityError, IncompleteError, FormatError)


class CheckpointManager:
    """Checkpoints as `<prefix><step>` folders under a local root. A context manager: it owns the
    signals and a `Checkpointer`.

    `options`: when to save, what to keep; `save_options` and `load_options`: how. A step that an
    earlier life has left complete stays, but for the last save, which replaces it; unless
    `save_options` sets another `if_exists`. `group`, `machine`: as in `Checkpointer`.
    """

    def __init__(
        self,
        root: Path,
        *,
        options: ManagerOptions | None = None,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        group: dist.ProcessGroup | None = None,
        node: str | None = None,
    ) -> None:
        self.root = os.path.realpath(writable_path(os.fspath(root)))
        self.options, self._load_options = (
            origin.resolve_paths(options or ManagerOptions()),
            load_options or LoadOptions(),
        )
        self._save_options = with_default_if_exists(
            save_options or SaveOptions(), if_exists="keep_complete"
        )
        self._checkpointer = Checkpointer(self.root, group=group, node=node)
        self._tiers: TieredStorage | None = None
        if self.options.enabled and self.options.local_directory is not None:
            timeout, checkpointer = self._save_options.timeout_seconds, self._checkpointer
            nodes = partial(checkpointer._resolve_nodes, f"two tiers of {self.root}", timeout)
            self._tiers = TieredStorage(
                self.root,
                self.options,
                ranks=checkpointer._get_comm,
                nodes=nodes,
                timeout_seconds=timeout,
            )
        self._scheduler = SaveScheduler(
            self._checkpointer, self.options, tiers=self._tiers, on_commit=self._on_commit
        )
        self._last_reasons: tuple[int, tuple[str, ...]] | None = None
        self._bad_steps: frozenset[BadStep] = frozenset()  # what restores have found
        self._stop_signals, self._metrics = (
            StopSignals(self.options),
            Metrics(best_metric=self.options.best_metric),
        )
        self._warned = when.saves_automatically(self.options) or not self.options.enabled

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self._close(this_rank_only=True)
        except Exception as failure:
            _LOG.warning(
                "%s: the save in flight failed: %s", self.root, failure
            )  # the error under way is the one to raise

    def should_save(self, step: int) -> bool:
        """Whether `save` would save at this step. Waits for nobody; the same on every rank."""
        return bool(self._save_reasons(step))

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
        **arguments: Any,
    ) -> SaveReport | PendingSave | None:
        """Saves if it is time to, or with `force`. Call it on every rank after every step, with the
        arguments of `Checkpointer.save`.

        None where it is not time, the step is saved already, the save failed and may, or, with a
        warning, where the step of an earlier life stays; a save in the background says that when it
        ends. Raises what is wrong with the arguments at once, and a failure of the storage or of a
        rank after `raise_after` saves that failed in a row.
        """
        reasons = self._save_reasons(step)
        if not self.options.enabled or not (reasons or force):
            self._warn_no_trigger()
            return None
        job = self._save_job(
            step, metrics, arguments, for_root=force or reasons != (when.LOCAL_INTERVAL,)
        )
        if self.options.asynchronous and not self.should_stop:
            return self._scheduler.save_async(job, retried=reasons == ("retry",))
        return self._scheduler.save_sync(job, is_last=self.should_stop)

    def finish(
        self, step: int, *, metrics: Mapping[str, float] | None = None, **arguments: Any
    ) -> SaveReport | None:
        """After the last step: saves it, with `on_completion` and unless it is saved, and waits.
        Raises where that fails.

        The same step of an earlier life is replaced, with a warning: there will be no later save,
        and this state is nowhere else.
        """
        if not (self.options.enabled and self.options.on_completion):
            self.wait()
            return None
        report = self._scheduler.save_sync(
            self._save_job(step, metrics, arguments, for_root=True), is_last=True
        )
        self._flush()
        return report

    def request_stop(self) -> None:
        """The scheduler's notice: all ranks save at a step on which they agree, and `should_stop`.
        One rank is enough; any thread.
        """
        if not self._stop_signals.watching:
            raise CheckpointError(
                "request_stop: this manager does not stop runs; needed ManagerOptions(enabled=True, on_preemption=True)"
            )
        self._stop_signals.requested = "request"

    @property
    def should_stop(self) -> bool:
        """True on every rank from the step on that was agreed after SIGTERM, SIGINT or
        `request_stop`; that step's `save` saves.
        """
        return self._stop_signals.stopped

    def restore(
        self, step: int | None = None, *, allow_fresh: bool = False, **targets: Any
    ) -> LoadReport | None:
        """Fills the targets of `Checkpointer.load` from the newest valid step of both tiers that
        has the parts asked for, or from `step`. Of `model` and `master_weights` either will do, and
        with strict=False any of the parts where no step has them all.

        Where there is none: from the newest that another engine wrote there, in its own naming;
        from `load_parameters_path` (all but the optimizer, whose masters follow; the report has no
        step and no extra) or `load_full_state_path`; else None: start fresh. A step that is not
        whole is passed over with a warning, and stays. IncompleteError where there are steps, none
        can be used and no path is set; with `allow_fresh` that is a warning, and None.
        """
        self.wait()
        load_failures: dict[str, str] = {}
        last_error: CheckpointError | None = None
        while self.options.enabled:
            with contextlib.ExitStack() as locks:
                point = self._select_restore_point(
                    step, targets, load_failures, locks, allow_fresh=allow_fresh
                )
                self._bad_steps |= frozenset(point.bad)
                if self._tiers is not None:
                    self._tiers.bad_steps = self._bad_steps
                if point.kind == "none":
                    break
                try:
                    return self._load(point, targets)
                except CheckpointError as error:
                    recoverable = (
                        _OWN_STEP_ERRORS
                        if point.kind == "own"
                        else _FOREIGN_STEP_ERRORS
                        if point.kind == "foreign" and step is None
                        else ()
                    )
                    if not isinstance(error, recoverable):
                        raise
                    load_failures[point.path], last_error = str(error), error
        if last_error is not None:
            raise last_error  # what was read of it has spoiled the targets
        return None

    def steps(self) -> list[StepRecord]:
        """The complete checkpoints, by step, each where it is best. This and the next two look at
        the disk from this rank only: where machines have folders of their own they may differ from
        machine to machine, see `common_steps`.
        """
        return list({record.step: record for record in self._scan().complete}.values())

    def latest(self) -> StepRecord | None:
        """The newest complete one."""
        return next(reversed(self.steps()), None)

    def best(self, among: Sequence[StepRecord] | None = None) -> StepRecord | None:
        """The best complete one by `best_metric`, of `steps()` or those given; of equal ones the
        later.
        """
        if self.options.best_metric is None:
            raise CheckpointError("best: by which metric? needed ManagerOptions(best_metric=…)")
        by_step = {record.step: record for record in (self.steps() if among is None else among)}
        ranking = ranked(
            [record.retention_entry for record in by_step.values()],
            metric=self.options.best_metric,
            mode=self.options.best_mode,
        )
        return by_step[ranking[0].step] if ranking else None

    def common_steps(self) -> list[StepRecord]:
        """Collective. `steps` as `restore` knows them, the same on every rank: those of which the
        machines have a complete copy between them. `path`: by which this machine has it, or gets it
        in a load. Opens every checkpoint where there are several machines.
        """

        def encode_steps(cluster: ClusterScan | None) -> bytes:
            scanned = self._scan_all(cluster)
            loadable = [
                step_record
                for step_record in scanned.complete
                if cluster is None
                or not cluster.diagnose(step_record, diagnose_root=origin.diagnose)
            ]
            unique = {step_record.step: step_record for step_record in loadable}.values()
            return json.dumps(
                [[asdict(step_record), self._is_local(step_record.path)] for step_record in unique]
            ).encode()

        body = self._broadcast_from_rank0(
            "steps", encode_steps, timeout_seconds=self._save_options.timeout_seconds
        )
        return [
            replace(step_record, path=self._node_path(step_record.path, local=local))
            for step_record, local in (
                (decode_record(fields), local) for fields, local in json.loads(body)
            )
        ]

    def wait(self) -> None:
        """Returns once no save is in flight, and no copy to the root. Raises the error of the one
        that was.

        StorageError also for a copy that has got on by no byte for the `timeout_seconds` of
        `save_options`; it may still go on.
        """
        self._scheduler.collect(strict=True)
        self._flush()

    def close(self) -> None:
        """Waits as `wait` does, gives back signals and buffers. Raises what `wait` raises; a copy
        that hangs is given up.

        A SIGTERM or a first SIGINT that comes meanwhile does what it does elsewhere, but at the
        end.
        """
        self._close(this_rank_only=False)

    def _close(self, *, this_rank_only: bool) -> None:
        """`this_rank_only`: other ranks may not do the same."""
        self._stop_signals.defer()
        try:
            self._finish_saves(this_rank_only=this_rank_only)
        finally:
            try:
                if self._tiers is not None:
                    self._tiers.stop()
                self._checkpointer.close()
            finally:
                # last: a signal while it waits does not cut off the save
                self._stop_signals.close()

    def _finish_saves(self, *, this_rank_only: bool) -> None:
        try:
            self._scheduler.collect(strict=True)
        except Exception:
            try:
                self._flush(
                    this_rank_only=True
                )  # a save that failed is no reason to give up the copy of a good one
            except CheckpointError as failure:
                _LOG.warning("%s: a copy failed too: %s", self.root, failure)
            raise
        self._flush(this_rank_only=this_rank_only)

    def _flush(self, *, this_rank_only: bool = False) -> None:
        if self._tiers is not None and this_rank_only:
            self._tiers.flush_this_rank()
        elif self._tiers is not None:
            self._tiers.flush()

    def _scan(self) -> Scan:
        return (
            scan(LocalStorage(self.root), self.options.step_prefix)
            if self._tiers is None
            else self._tiers.scan()
        )

    def _warn_no_trigger(self) -> None:
        """Once, on rank 0, where a save is left out and no option ever asks for one."""
        if not self._warned and self._checkpointer._get_comm().rank == 0:
            text = "%s: no option says when to save, so only finish, a stop and save(force=True) do; set interval_steps, for one"
            _LOG.warning(text, self.root)
        self._warned = True

    def _save_reasons(self, step: int) -> tuple[str, ...]:
        """Why to save at this step. Asked again about it, it says the same again."""
        if self._last_reasons is None or self._last_reasons[0] != step:
            last_begun = self._scheduler.last_begun
            reasons = when.due_reasons(
                self.options,
                step,
                last_step=last_begun,
                first=self._last_reasons is None and last_begun is None,
            )
            if self.options.enabled:
                reasons += self._stop_signals.save_reasons(
                    step, self._checkpointer._get_comm(), self._scheduler.clock_reason
                )
            self._last_reasons = (step, reasons)
        return self._last_reasons[1]

    def _save_job(
        self,
        step: int,
        metrics: Mapping[str, float] | None,
        arguments: Mapping[str, Any],
        *,
        for_root: bool,
    ) -> SaveJob:
        """A save, with the arguments that are not the caller's. A step that was found damaged is
        replaced.
        """
        requested = arguments.get("options")
        options = (
            self._save_options
            if requested is None
            else with_default_if_exists(requested, if_exists="keep_complete")
        )
        if any(bad.step == step for bad in self._bad_steps):
            options = options.model_copy(update={"if_exists": "replace"})
        stored_metrics = self._metrics.storable(
            metrics, step=step, rank=self._checkpointer._get_comm().rank
        )
        save_arguments = {**arguments, "step": step, "metrics": stored_metrics, "options": options}
        return SaveJob(step, step_name(step, self.options.step_prefix), save_arguments, for_root)

    def _select_restore_point(
        self,
        step: int | None,
        targets: Mapping[str, Any],
        load_failures: Mapping[str, str],
        locks: contextlib.ExitStack,
        *,
        allow_fresh: bool,
    ) -> RestorePoint:
        """Collective. Rank 0 looks, tells where to load from, and keeps that from being removed
        while `locks` is open.
        """
        options = targets.get("options") or self._load_options
        request = origin.RestoreRequest(
            step,
            origin.required_parts(targets, options),
            targets.get("strict", True),
            allow_fresh,
            options,
        )

        def encode_selection(cluster: ClusterScan | None) -> bytes:
            point = origin.select(
                self._scan_all(cluster),
                self.options,
                request,
                root=self.root,
                load_failures=load_failures,
                cluster=cluster,
            )
            if point.path:
                with contextlib.suppress(
                    NotFoundError
                ):  # removed just now: the load says so on all ranks
                    locks.enter_context(shared_lock(point.path))
            return origin.encode_point(
                replace(point, local=point.kind == "own" and self._is_local(point.path))
            )

        point = origin.decode_point(
            self._broadcast_from_rank0(
                "restore", encode_selection, timeout_seconds=self._load_options.timeout_seconds
            )
        )
        if point.kind == "own":
            return replace(point, path=self._node_path(point.path, local=point.local))
        return (
            replace(point, path=self._node_path(point.path, local=False, name=point.name))
            if point.kind == "foreign"
            else point
        )

    def _broadcast_from_rank0(
        self,
        operation: str,
        encode: Callable[[ClusterScan | None], bytes],
        *,
        timeout_seconds: float,
    ) -> bytes:
        """Collective. What `encode` says on rank 0, which may ask the other machines, if there are
        several, by a survey.
        """
        comm, checkpointer = self._checkpointer._get_comm(), self._checkpointer
        leaders = first_ranks(
            checkpointer._resolve_nodes(f"{operation} of {self.root}", timeout_seconds)
        )
        collective = comm.begin_collective(operation, cached=False, timeout_seconds=timeout_seconds)
        with collective.step("look"):
            cluster = None
            if len(leaders) > 1 and collective.rank in leaders:
                directory = self._tiers.local_directory if self._tiers is not None else self.root
                cluster = ClusterScan(
                    collective,
                    comm,
                    leaders,
                    root=self.root,
                    directory=directory,
                    prefix=self.options.step_prefix,
                )
            if collective.rank == 0:
                body = encode(cluster)
                if cluster is not None:
                    cluster.close()
                collective.put("told", body)
            elif cluster is not None:
                cluster.serve()
            return collective.get("told")

    def _scan_all(self, cluster: ClusterScan | None) -> Scan:
        """Rank 0 only: all that is there."""
        return (
            self._scan()
            if cluster is None
            else cluster.scan(scan(LocalStorage(self.root), self.options.step_prefix))
        )

    def _is_local(self, path: str) -> bool:
        return os.path.dirname(path) != self.root

    def _node_path(self, path: str, *, local: bool, name: str = "") -> str:
        """A step's path as this machine has it: each may have its folders by other names. On one
        machine, rank 0's.
        """
        if not any(self._checkpointer._nodes or ()):
            return path
        directory = self._tiers.local_directory if self._tiers is not None and local else self.root
        return os.path.join(directory, name or os.path.split(path)[1])

    def _load(self, point: RestorePoint, targets: Mapping[str, Any]) -> LoadReport:
        options = targets.get("options") or self._load_options
        if point.kind == "parameters":
            parameter_targets = {
                name: targets[name] for name in _PARAMETER_TARGETS if name in targets
            }
            weights = options.model_copy(
                update={"parts": origin.weight_parts(point.path, targets, options)}
            )
            return replace(
                self._checkpointer.load(point.path, **parameter_targets, options=weights),
                step=None,
                extra=None,
                rank_extra=None,
            )
        report = self._checkpointer.load(point.path, **{**targets, "options": options})
        if point.kind == "foreign" and report.step is None:
            return replace(report, step=point.step)  # the folder's name is all that says it
        if point.kind == "own" and point.step is not None:
            self._scheduler.mark_restored(point.step, point.save_id, in_root=point.in_root)
        return report

    def _on_commit(self, job: SaveJob, target: SaveTarget) -> None:
        """After a commit of all machines: rank 0 removes what the rules do not keep, and has copied
        what is due. That is no failure of the save.
        """
        if self._tiers is not None:
            self._tiers.on_commit(
                target, job.step, for_root=job.for_root, options=job.arguments["options"]
            )
            return
        _, topology = self._checkpointer._topologies.get(self.root, (None, None))
        if (
            topology.comm if topology is not None else self._checkpointer._get_comm()
        ).rank == 0:  # of each machine that has a root of its own
            rules, bad_ids = (
                when.retention_rules(self.options),
                {bad_step.save_id for bad_step in self._bad_steps},
            )
            rotate_after_save(
                LocalStorage(self.root),
                self.options.step_prefix,
                rules,
                protected=lambda: {job.step},
                excluded=bad_ids,
            )
