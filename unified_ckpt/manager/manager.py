"""Many checkpoints over a run's life: when to save, what to keep, what to do when it fails, and where to start from.

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
from unified_ckpt.manager.restore import Origin
from unified_ckpt.manager.rules import when
from unified_ckpt.manager.rules.metrics import Metrics
from unified_ckpt.manager.save_scheduler import Saves, Wanted
from unified_ckpt.manager.steps.rotate import keep
from unified_ckpt.manager.steps.scan import Bad, Scan, StepRecord, scan, step_name
from unified_ckpt.manager.stopping.stop_signals import Notices
from unified_ckpt.manager.tiers.cluster_listing import Survey, record
from unified_ckpt.manager.tiers.tiers import Place, Tiers
from unified_ckpt.options import LoadOptions, ManagerOptions, SaveOptions, unless_chosen
from unified_ckpt.runtime.comm.topology import first_ranks
from unified_ckpt.runtime.storage.locks import reading
from unified_ckpt.runtime.storage.storage import LocalStorage, writable

if TYPE_CHECKING:
    import torch.distributed as dist

_LOG = logging.getLogger("unified_ckpt")
_OF_PARAMETERS = (
    "model",
    "optimizer",
    "master_weights",
    "parts",
    "layout",
    "strict",
)  # the optimizer: masters that it has
# What a load of a step may fail with where an older one may serve. Of an own step a FormatError is the caller's: the step was looked at.
_OF_OWN = (IntegrityError, IncompleteError, StorageError, NotFoundError)
_OF_FOREIGN = (IntegrityError, IncompleteError, FormatError)


class CheckpointManager:
    """Checkpoints as `<prefix><step>` folders under a local root. A context manager: it owns the signals and a `Checkpointer`.

    `options`: when to save, what to keep; `save_options` and `load_options`: how. A step that an earlier life has left complete stays, but
    for the last save, which replaces it; unless `save_options` sets another `if_exists`. `group`, `machine`: as in `Checkpointer`.
    """

    def __init__(
        self,
        root: Path,
        *,
        options: ManagerOptions | None = None,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        group: dist.ProcessGroup | None = None,
        machine: str | None = None,
    ) -> None:
        self.root = os.path.realpath(writable(os.fspath(root)))
        self.options, self._load_options = (
            origin.resolved(options or ManagerOptions()),
            load_options or LoadOptions(),
        )
        self._save_options = unless_chosen(save_options or SaveOptions(), if_exists="keep_complete")
        self._checkpointer = Checkpointer(self.root, group=group, machine=machine)
        self._tiers: Tiers | None = None
        if self.options.enabled and self.options.local_directory is not None:
            timeout, own = self._save_options.timeout_seconds, self._checkpointer
            machines = partial(own._find_machines, f"two tiers of {self.root}", timeout)
            self._tiers = Tiers(
                self.root,
                self.options,
                ranks=own._ranks,
                machines=machines,
                timeout_seconds=timeout,
            )
        self._saves = Saves(
            self._checkpointer, self.options, tiers=self._tiers, committed=self._committed
        )
        self._asked: tuple[int, tuple[str, ...]] | None = None
        self._bad: frozenset[Bad] = frozenset()  # what restores have found
        self._notices, self._metrics = Notices(self.options), Metrics(best=self.options.best_metric)
        self._warned = when.saves_on_its_own(self.options) or not self.options.enabled

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
            self._close(alone=True)
        except Exception as late:
            _LOG.warning(
                "%s: the save in flight failed: %s", self.root, late
            )  # the error under way is the one to raise

    def should_save(self, step: int) -> bool:
        """Whether `save` would save at this step. Waits for nobody; the same on every rank."""
        return bool(self._due(step))

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
        **what: Any,
    ) -> SaveReport | PendingSave | None:
        """Saves if it is time to, or with `force`. Call it on every rank after every step, with the arguments of `Checkpointer.save`.

        None where it is not time, the step is saved already, the save failed and may, or, with a warning, where the step of an earlier
        life stays; a save in the background says that when it ends. Raises what is wrong with the arguments at
        once, and a failure of the storage or of a rank after `raise_after` saves that failed in a row.
        """
        reasons = self._due(step)
        if not self.options.enabled or not (reasons or force):
            self._warn_never()
            return None
        wanted = self._wanted(step, metrics, what, due=force or reasons != (when.LOCAL,))
        if self.options.asynchronous and not self.should_stop:
            return self._saves.background(wanted, retried=reasons == ("retry",))
        return self._saves.foreground(wanted, final=self.should_stop)

    def finish(
        self, step: int, *, metrics: Mapping[str, float] | None = None, **what: Any
    ) -> SaveReport | None:
        """After the last step: saves it, with `on_completion` and unless it is saved, and waits. Raises where that fails.

        The same step of an earlier life is replaced, with a warning: there will be no later save, and this state is nowhere else.
        """
        if not (self.options.enabled and self.options.on_completion):
            self.wait()
            return None
        report = self._saves.foreground(self._wanted(step, metrics, what, due=True), final=True)
        self._drain()
        return report

    def request_stop(self) -> None:
        """The scheduler's notice: all ranks save at a step on which they agree, and `should_stop`. One rank is enough; any thread."""
        if not self._notices.watching:
            raise CheckpointError(
                "request_stop: this manager does not stop runs; needed ManagerOptions(enabled=True, on_preemption=True)"
            )
        self._notices.requested = "request"

    @property
    def should_stop(self) -> bool:
        """True on every rank from the step on that was agreed after SIGTERM, SIGINT or `request_stop`; that step's `save` saves."""
        return self._notices.stopped

    def restore(
        self, step: int | None = None, *, allow_fresh: bool = False, **targets: Any
    ) -> LoadReport | None:
        """Fills the targets of `Checkpointer.load` from the newest valid step of both tiers that has the parts asked for, or from `step`.
        Of `model` and `master_weights` either will do, and with strict=False any of the parts where no step has them all.

        Where there is none: from the newest that another engine wrote there, in its own naming; from `load_parameters_path` (all but the
        optimizer, whose masters follow; the report has no step and no extra) or `load_full_state_path`; else None: start fresh. A step
        that is not whole is passed over with a warning, and stays. IncompleteError where there are steps, none can be used and no path is
        set; with `allow_fresh` that is a warning, and None.
        """
        self.wait()
        failed: dict[str, str] = {}
        last: CheckpointError | None = None
        while self.options.enabled:
            with contextlib.ExitStack() as held:
                found = self._choose(step, targets, failed, held, allow_fresh=allow_fresh)
                self._bad |= frozenset(found.bad)
                if self._tiers is not None:
                    self._tiers.bad = self._bad
                if found.kind == "none":
                    break
                try:
                    return self._load(found, targets)
                except CheckpointError as error:
                    passes = (
                        _OF_OWN
                        if found.kind == "own"
                        else _OF_FOREIGN
                        if found.kind == "foreign" and step is None
                        else ()
                    )
                    if not isinstance(error, passes):
                        raise
                    failed[found.path], last = str(error), error
        if last is not None:
            raise last  # what was read of it has spoiled the targets
        return None

    def steps(self) -> list[StepRecord]:
        """The complete checkpoints, by step, each where it is best. This and the next two look at the disk from this rank only: where
        machines have folders of their own they may differ from machine to machine, see `common_steps`."""
        return list({one.step: one for one in self._scan().complete}.values())

    def latest(self) -> StepRecord | None:
        """The newest complete one."""
        return next(reversed(self.steps()), None)

    def best(self, among: Sequence[StepRecord] | None = None) -> StepRecord | None:
        """The best complete one by `best_metric`, of `steps()` or those given; of equal ones the later."""
        if self.options.best_metric is None:
            raise CheckpointError("best: by which metric? needed ManagerOptions(best_metric=…)")
        found = {one.step: one for one in (self.steps() if among is None else among)}
        order = ranked(
            [one.saved for one in found.values()],
            metric=self.options.best_metric,
            mode=self.options.best_mode,
        )
        return found[order[0].step] if order else None

    def common_steps(self) -> list[StepRecord]:
        """Collective. `steps` as `restore` knows them, the same on every rank: those of which the machines have a complete copy between
        them. `path`: by which this machine has it, or gets it in a load. Opens every checkpoint where there are several machines."""

        def told(survey: Survey | None) -> bytes:
            every = self._look(survey)
            good = [
                one
                for one in every.complete
                if survey is None or not survey.damage(one, otherwise=origin.damage)
            ]
            found = {one.step: one for one in good}.values()
            return json.dumps([[asdict(one), self._is_local(one.path)] for one in found]).encode()

        body = self._told_to_all("steps", told, timeout_seconds=self._save_options.timeout_seconds)
        return [
            replace(one, path=self._here(one.path, local=local))
            for one, local in ((record(r), local) for r, local in json.loads(body))
        ]

    def wait(self) -> None:
        """Returns once no save is in flight, and no copy to the root. Raises the error of the one that was.

        StorageError also for a copy that has got on by no byte for the `timeout_seconds` of `save_options`; it may still go on.
        """
        self._saves.collect(strict=True)
        self._drain()

    def close(self) -> None:
        """Waits as `wait` does, gives back signals and buffers. Raises what `wait` raises; a copy that hangs is given up.

        A SIGTERM or a first SIGINT that comes meanwhile does what it does elsewhere, but at the end.
        """
        self._close(alone=False)

    def _close(self, *, alone: bool) -> None:
        """`alone`: other ranks may not do the same."""
        self._notices.end()
        try:
            self._end(alone=alone)
        finally:
            try:
                if self._tiers is not None:
                    self._tiers.stop()
                self._checkpointer.close()
            finally:
                self._notices.close()  # last: a signal while it waits does not cut off the save

    def _end(self, *, alone: bool) -> None:
        try:
            self._saves.collect(strict=True)
        except Exception:
            try:
                self._drain(
                    alone=True
                )  # a save that failed is no reason to give up the copy of a good one
            except CheckpointError as late:
                _LOG.warning("%s: a copy failed too: %s", self.root, late)
            raise
        self._drain(alone=alone)

    def _drain(self, *, alone: bool = False) -> None:
        if self._tiers is not None and alone:
            self._tiers.finish_alone()
        elif self._tiers is not None:
            self._tiers.drain()

    def _scan(self) -> Scan:
        return (
            scan(LocalStorage(self.root), self.options.step_prefix)
            if self._tiers is None
            else self._tiers.scan()
        )

    def _warn_never(self) -> None:
        """Once, on rank 0, where a save is left out and no option ever asks for one."""
        if not self._warned and self._checkpointer._ranks().rank == 0:
            text = "%s: no option says when to save, so only finish, a stop and save(force=True) do; set interval_steps, for one"
            _LOG.warning(text, self.root)
        self._warned = True

    def _due(self, step: int) -> tuple[str, ...]:
        """Why to save at this step. Asked again about it, it says the same again."""
        if self._asked is None or self._asked[0] != step:
            begun = self._saves.begun
            reasons = when.due(
                self.options, step, last_step=begun, first=self._asked is None and begun is None
            )
            if self.options.enabled:
                reasons += self._notices.at(
                    step, self._checkpointer._ranks(), self._saves.clock_says
                )
            self._asked = (step, reasons)
        return self._asked[1]

    def _wanted(
        self, step: int, metrics: Mapping[str, float] | None, what: Mapping[str, Any], *, due: bool
    ) -> Wanted:
        """A save, with the arguments that are not the caller's. A step that was found damaged is replaced."""
        given = what.get("options")
        options = (
            self._save_options if given is None else unless_chosen(given, if_exists="keep_complete")
        )
        if any(one.step == step for one in self._bad):
            options = options.model_copy(update={"if_exists": "replace"})
        measured = self._metrics.stored(metrics, step=step, rank=self._checkpointer._ranks().rank)
        how = {**what, "step": step, "metrics": measured, "options": options}
        return Wanted(step, step_name(step, self.options.step_prefix), how, due)

    def _choose(
        self,
        step: int | None,
        targets: Mapping[str, Any],
        failed: Mapping[str, str],
        held: contextlib.ExitStack,
        *,
        allow_fresh: bool,
    ) -> Origin:
        """Collective. Rank 0 looks, tells where to load from, and keeps that from being removed while `held` is open."""
        options = targets.get("options") or self._load_options
        request = origin.Request(
            step, origin.needs(targets, options), targets.get("strict", True), allow_fresh, options
        )

        def told(survey: Survey | None) -> bytes:
            found = origin.choose(
                self._look(survey),
                self.options,
                request,
                root=self.root,
                failed=failed,
                survey=survey,
            )
            if found.path:
                with contextlib.suppress(
                    NotFoundError
                ):  # removed just now: the load says so on all ranks
                    held.enter_context(reading(found.path))
            return origin.encode(
                replace(found, local=found.kind == "own" and self._is_local(found.path))
            )

        found = origin.decode(
            self._told_to_all("restore", told, timeout_seconds=self._load_options.timeout_seconds)
        )
        if found.kind == "own":
            return replace(found, path=self._here(found.path, local=found.local))
        return (
            replace(found, path=self._here(found.path, local=False, name=found.name))
            if found.kind == "foreign"
            else found
        )

    def _told_to_all(
        self, what: str, told: Callable[[Survey | None], bytes], *, timeout_seconds: float
    ) -> bytes:
        """Collective. What `told` says on rank 0, which may ask the other machines, if there are several, by a survey."""
        comm, own = self._checkpointer._ranks(), self._checkpointer
        leads = first_ranks(own._find_machines(f"{what} of {self.root}", timeout_seconds))
        meeting = comm.meet(what, same=False, timeout_seconds=timeout_seconds)
        with meeting.phase("look"):
            survey = None
            if len(leads) > 1 and meeting.rank in leads:
                directory = self._tiers.directory if self._tiers is not None else self.root
                survey = Survey(
                    meeting,
                    comm,
                    leads,
                    root=self.root,
                    directory=directory,
                    prefix=self.options.step_prefix,
                )
            if meeting.rank == 0:
                body = told(survey)
                if survey is not None:
                    survey.end()
                meeting.put("told", body)
            elif survey is not None:
                survey.answer()
            return meeting.get("told")

    def _look(self, survey: Survey | None) -> Scan:
        """Rank 0 only: all that is there."""
        return (
            self._scan()
            if survey is None
            else survey.look(scan(LocalStorage(self.root), self.options.step_prefix))
        )

    def _is_local(self, path: str) -> bool:
        return os.path.dirname(path) != self.root

    def _here(self, path: str, *, local: bool, name: str = "") -> str:
        """A step's path as this machine has it: each may have its folders by other names. On one machine, rank 0's."""
        if not any(self._checkpointer._machines or ()):
            return path
        directory = self._tiers.directory if self._tiers is not None and local else self.root
        return os.path.join(directory, name or os.path.split(path)[1])

    def _load(self, found: Origin, targets: Mapping[str, Any]) -> LoadReport:
        options = targets.get("options") or self._load_options
        if found.kind == "parameters":
            wanted = {name: targets[name] for name in _OF_PARAMETERS if name in targets}
            weights = options.model_copy(
                update={"parts": origin.weights(found.path, targets, options)}
            )
            return replace(
                self._checkpointer.load(found.path, **wanted, options=weights),
                step=None,
                extra=None,
                rank_extra=None,
            )
        report = self._checkpointer.load(found.path, **{**targets, "options": options})
        if found.kind == "foreign" and report.step is None:
            return replace(report, step=found.step)  # the folder's name is all that says it
        if found.kind == "own" and found.step is not None:
            self._saves.restored(found.step, found.save_id, lasting=found.lasting)
        return report

    def _committed(self, wanted: Wanted, place: Place) -> None:
        """After a commit of all machines: rank 0 removes what the rules do not keep, and has copied what is due. That is no failure of the
        save."""
        if self._tiers is not None:
            self._tiers.committed(
                place, wanted.step, due=wanted.due, options=wanted.what["options"]
            )
            return
        _, land = self._checkpointer._lands.get(self.root, (None, None))
        if (
            land.comm if land is not None else self._checkpointer._ranks()
        ).rank == 0:  # of each machine that has a root of its own
            rules, bad = when.rules(self.options), {one.save_id for one in self._bad}
            keep(
                LocalStorage(self.root),
                self.options.step_prefix,
                rules,
                protected=lambda: {wanted.step},
                apart=bad,
            )
