"""Two tiers of one run: a local directory for frequent saves, and the root, to which some are copied. Rank 0 acts, all are told alike.

On several machines the first rank of each, its lead, acts for that machine's local directory. Nothing here waits for the root's storage
but what says so.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from unified_ckpt.engine.folder import commit
from unified_ckpt.errors import CheckpointError, FormatError, StorageError
from unified_ckpt.manager.rules import when
from unified_ckpt.manager.steps.remove import clear
from unified_ckpt.manager.steps.rotate import keep
from unified_ckpt.manager.steps.scan import Bad, Scan, scan
from unified_ckpt.manager.tiers import run_marker
from unified_ckpt.manager.tiers.merge_queue import Convoy, Order
from unified_ckpt.manager.tiers.protected_steps import Newest
from unified_ckpt.manager.tiers.run_marker import Lineage
from unified_ckpt.manager.tiers.upload_queue import DAMAGED, Copies
from unified_ckpt.options import ManagerOptions, SaveOptions
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.error_codec import decode_error, encode_error
from unified_ckpt.runtime.comm.topology import first_ranks
from unified_ckpt.runtime.storage.storage import LocalStorage

_LOG = logging.getLogger("unified_ckpt")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a save goes: `path`, below the root unless absolute, on this machine. `replace`: what is there is of another run."""

    path: str
    local: bool = False
    replace: bool = False


class Tiers:
    """Of the ranks of one manager. `root`, `directory`: absolute, and two. `machines`: collective, the machine of each rank. Collective
    calls say so; the others are for leads."""

    def __init__(
        self,
        root: str,
        options: ManagerOptions,
        *,
        ranks: Callable[[], Comm],
        machines: Callable[[], list[int]],
        timeout_seconds: float,
    ) -> None:
        self.root, self.directory = root, os.path.realpath(options.local_directory or "")
        if self.root == self.directory:
            raise FormatError(
                f"local_directory={options.local_directory!r}: is the root, {root}, whose checkpoints would go by keep_latest_local; "
                "needed another folder"
            )
        self._options, self._ranks, self._machines, self._timeout_seconds = (
            options,
            ranks,
            machines,
            timeout_seconds,
        )
        self._copies = Copies(
            self.directory, root, options, silence_seconds=timeout_seconds, copied=self._after_copy
        )
        self._leads: tuple[int, ...] = ()  # once they are known
        self._token = secrets.token_hex(8)  # rank 0's is that of all
        self._convoy: Convoy | None = None  # on the leads of several machines
        self._due = 0  # local saves that were due
        self._newest: set[int] = (
            set()
        )  # the last steps that were saved locally: a later one may be there, and be damaged
        self._in_root = Newest()
        self.bad: frozenset[Bad] = frozenset()  # what lies in both tiers and is known to be damaged
        self._lineage: Lineage | None = None  # once it is opened
        self._housekeeping = (
            threading.Lock()
        )  # of the local directory: a save's thread and that of copies
        self._failed = 0  # copies in a row
        self._distrusted = False  # what lay in the local directory was damaged

    # collective

    def where(self, step: int, name: str, *, due: bool, straight: bool, final: bool) -> Place:
        """Collective. Where the save `name` of `step` goes; `due` for the root too, `straight` to it. Raises what copies have failed with
        `raise_after` times in a row, but for a `final` save, which may succeed.

        One machine's `final` save goes straight to the root, and one after damage; those of several machines are merged in any case.
        """
        self._leads = self._leads or first_ranks(self._machines())
        alone = len(self._leads) == 1
        straight = straight or (alone and (final or (due and self._distrusted)))

        def told_by_first(meeting: Meeting) -> dict[str, Any]:
            return {
                "place": asdict(self._place(meeting, name, due=due, straight=straight)),
                "token": self._token,
            }

        told = self._tell(
            "where",
            told_by_first,
            others=None if straight else lambda meeting: self._look_too(meeting, name),
        )
        self._hear(told["outcomes"], strict=False, final=final)
        self._token = told["token"]
        self._join()
        place = Place(**told["place"])
        self._distrusted = self._distrusted and (place.local or not due)
        self._newest = self._newest | {step} if place.local else self._newest
        return replace(place, path=os.path.join(self.directory, name)) if place.local else place

    def straight(self, step: int) -> None:
        """Before a save that goes straight to the root."""
        self._in_root.begun(step, due=self._due)

    def _join(self) -> None:
        """The lead's part in merges, from the first save on."""
        if self._convoy is None and len(self._leads) > 1 and self._ranks().rank in self._leads:
            self._convoy = self._copies.convoy = Convoy(
                self._ranks(),
                self._leads,
                self._token,
                source=self.directory,
                target=self.root,
                timeout_seconds=self._timeout_seconds,
                note=self._note,
            )

    def settle(self, step: int, name: str) -> bool:
        """Collective, before the last save. Whether the last step saved locally is in the root too, once its copy is waited for. Raises
        that copy's silence."""

        def settled(meeting: Meeting) -> dict[str, Any]:
            self._copies.wait(step=step, beat=meeting.beat)
            there, here = (
                commit.committed(LocalStorage(path), name) for path in (self.root, self.directory)
            )
            return {
                "settled": there is not None and (here is None or here.save_id == there.save_id)
            }

        told = self._tell("settle", settled)
        self._hear(
            [one for one in told["outcomes"] if one["step"] != step], strict=False, final=True
        )  # of `step`: as told
        return bool(told["settled"])

    def drain(self) -> None:
        """Collective. Returns once nothing is owed to the root. Raises the error of a copy that failed, or its silence."""

        def drained(meeting: Meeting) -> dict[str, Any]:
            self._copies.wait(beat=meeting.beat)
            return {}

        told = self._tell("copies", drained)
        if (
            self._convoy is not None
            and self._lineage is not None
            and not any(one["error"] for one in told["outcomes"])
        ):
            self._keep_local(set())
        self._hear(told["outcomes"], strict=True)

    def _tell(
        self,
        what: str,
        act: Callable[[Meeting], dict[str, Any]],
        *,
        others: Callable[[Meeting], None] | None = None,
    ) -> dict[str, Any]:
        """What `act` says on rank 0, and how copies ended that were not told yet, on every rank. `others`: called on the other leads."""
        meeting = self._ranks().meet(what, same=False, timeout_seconds=self._timeout_seconds)
        with meeting.phase("tell"):
            if meeting.rank == 0:
                said = act(meeting)
                outcomes = [
                    {
                        "step": one.step,
                        "error": one.error and encode_error(one.error, rank=0, world=1),
                        "damaged": isinstance(one.error, DAMAGED),
                    }
                    for one in self._copies.outcomes()
                ]
                saves = sorted(self._lineage.saves) if self._lineage is not None else []
                meeting.put(
                    "told", json.dumps({**said, "outcomes": outcomes, "saves": saves}).encode()
                )
            elif others is not None and meeting.rank in self._leads:
                others(meeting)
            found: dict[str, Any] = json.loads(meeting.get("told"))
        if (
            self._convoy is not None
            and self._lineage is not None
            and not self._lineage.saves.issuperset(found["saves"])
        ):
            self._note(frozenset(found["saves"]))
        return found

    def _hear(self, outcomes: list[dict[str, Any]], *, strict: bool, final: bool = False) -> None:
        """Every rank counts alike. `strict`: raises the first error, else the one that is `raise_after` in a row; `final`: none."""
        failure: CheckpointError | None = None
        for one in outcomes:
            self._distrusted = self._distrusted or one["damaged"]
            self._failed = self._failed + 1 if one["error"] else 0
            if one["error"] and (
                strict or (self._failed >= self._options.raise_after and not final)
            ):
                failure = failure or decode_error(one["error"])
            elif one["error"] and self._ranks().rank == 0:
                text = (
                    "the copy of step %d to %s failed, the training goes on; %d of %d in a row: %s"
                )
                _LOG.warning(
                    text,
                    one["step"],
                    self.root,
                    self._failed,
                    self._options.raise_after,
                    decode_error(one["error"]),
                )
        if failure is not None:
            raise failure

    # of rank 0, and of the other leads

    def _place(self, meeting: Meeting, name: str, *, due: bool, straight: bool) -> Place:
        """On rank 0: the local directory, where all machines can use theirs."""
        if straight:
            return Place(name)
        saves: list[frozenset[str]] = []

        def committed() -> frozenset[str]:
            saves[:] = saves or [self._committed()]
            return saves[0]

        words, others = [self._look(name, committed)], self._leads[1:]
        if any(meeting.get(f"opened/{rank}") == b"0" for rank in others):
            try:
                body: list[str] | str = sorted(committed())
            except (CheckpointError, OSError) as error:
                body = str(error)
            meeting.put("committed", json.dumps(body).encode())
        words += [json.loads(meeting.get(f"look/{rank}")) for rank in others]
        wrong = next((one["error"] for one in words if one["error"]), None)
        if wrong is not None and due:
            _LOG.warning(
                "the local directory cannot be used, this save goes to %s: %s", self.root, wrong
            )
            return Place(name)
        return Place(
            name, local=True, replace=any(one["replace"] for one in words)
        )  # one that is not due says itself what is wrong

    def _look_too(self, meeting: Meeting, name: str) -> None:
        """On the other leads, what `_place` waits for."""

        def committed() -> frozenset[str]:
            found = json.loads(meeting.get("committed"))
            if isinstance(found, str):
                raise StorageError(found)
            return frozenset(found)

        meeting.put(f"opened/{meeting.rank}", b"0" if self._lineage is None else b"1")
        meeting.put(f"look/{meeting.rank}", json.dumps(self._look(name, committed)).encode())

    def _look(self, name: str, committed: Callable[[], frozenset[str]]) -> dict[str, Any]:
        """Whether what this machine's local directory has by this name is to be replaced, or why it cannot be used."""
        try:
            with self._housekeeping:
                opened = self._lineage or self._open(committed())
            found = commit.committed(LocalStorage(self.directory), name)
        except (CheckpointError, OSError) as error:
            return {"replace": False, "error": str(error)}
        return {"replace": found is not None and found.save_id in opened.strangers, "error": None}

    def _open(self, committed: frozenset[str]) -> Lineage:
        """Before the first save: whose the local directory is, by what is `committed` in the root. Clears away what this run's interrupted
        saves have left there."""
        os.makedirs(self.directory, exist_ok=True)
        storage, prefix = LocalStorage(self.directory), self._options.step_prefix
        said, local = run_marker.read(self.directory), scan(storage, prefix)
        foreign = run_marker.strangers(
            said, self.root, committed=committed, local=run_marker.ids(local.steps)
        )
        opened = Lineage(self.root, committed, foreign)
        run_marker.write(self.directory, opened)
        if foreign:
            _LOG.warning(
                "%s: %d checkpoints are of another run; they are not used, and stay until `prune`",
                self.directory,
                len(foreign),
            )
        if said is not None and said.root == self.root:
            for left in local.leftovers:
                if left.kind == "construction" and not left.needed:
                    clear(storage, left.name)
        self._lineage = opened
        return opened

    def committed(self, place: Place, step: int, *, due: bool, options: SaveOptions) -> None:
        """After the commit, on every rank: leads have it copied where it is due, and apply the rules. What fails is a warning."""
        try:
            self._after_commit(place, step, due=due, options=options)
        except (CheckpointError, OSError) as error:
            _LOG.warning(
                "%s: step %d is saved; old checkpoints stay for now: %s",
                self.directory,
                step,
                error,
            )

    def _after_commit(self, place: Place, step: int, *, due: bool, options: SaveOptions) -> None:
        if not place.local:
            self._in_root.saved(step)
            if self._ranks().rank == 0:
                self._keep_root()
        elif self._ranks().rank in self._leads:
            self._due += due
            if due and self._convoy is not None:
                self._convoy.due(self._due)
            if due and self._ranks().rank == 0:
                name = os.path.relpath(place.path, self.directory)
                self._copies.order(
                    Order(
                        step,
                        name,
                        options.if_exists,
                        options.fsync,
                        options.max_file_bytes,
                        self._due,
                    )
                )
            self._newest = {step}
            self._keep_local(
                None if self._convoy is None else self._convoy.agree(self._copies.owed())
            )

    def _after_copy(self, order: Order) -> None:
        self._in_root.copied(order.number)
        self._keep_root()
        if self._convoy is None:
            self._copies.let_go()
            self._keep_local(None)
        elif self._lineage is not None:
            self._convoy.tell(
                self._lineage.saves
            )  # local ones go on all machines alike, with the next commit

    def _keep_root(self) -> None:
        """Touches the root's storage. The local directory learns of a new save there before an old one goes."""
        committed = self._committed()
        self._note(committed | (self._lineage.saves if self._lineage else frozenset()))
        storage, rules, bad = (
            LocalStorage(self.root),
            when.rules(self._options),
            {one.save_id for one in self.bad if not one.local},
        )
        keep(
            storage,
            self._options.step_prefix,
            rules,
            protected=lambda: self._in_root.steps() | self._copies.owed(),
            apart=bad,
        )
        self._note(self._committed())

    def _keep_local(self, needed: set[int] | None) -> None:
        """`needed`: steps that stay in any case; None: those that this machine still copies, asked for under the lock, so that of a
        commit and the end of a copy the later one sees what both have changed."""
        with self._housekeeping:
            needed = self._copies.owed() if needed is None else needed
            apart = self._lineage.strangers if self._lineage else frozenset()
            apart |= {
                one.save_id
                for one in self.bad
                if one.local and one.step > max(self._newest, default=0)
            }  # then it goes, for room
            rules = when.local_rules(self._options)
            keep(
                LocalStorage(self.directory),
                self._options.step_prefix,
                rules,
                protected=lambda: needed | self._newest,
                apart=apart,
            )
        self._note(None)

    def _note(self, saves: frozenset[str] | None) -> None:
        """The local directory, if this run has one, says which saves are in the root; None: those that it knows."""
        with self._housekeeping:
            if self._lineage is None:
                return
            if saves is not None:
                self._lineage = replace(self._lineage, saves=saves)
            try:
                if run_marker.read(self.directory) != self._lineage:
                    run_marker.write(self.directory, self._lineage)
            except CheckpointError as error:
                _LOG.warning(
                    "after a restart local checkpoints may be taken for those of another run: %s",
                    error,
                )

    def _committed(self) -> frozenset[str]:
        return run_marker.ids(scan(LocalStorage(self.root), self._options.step_prefix).complete)

    # of any rank

    def scan(self) -> Scan:
        """Both tiers, the best last; without the local checkpoints of other runs."""
        return both_tiers(self.root, self.directory, self._options.step_prefix)[0]

    def finish_alone(self) -> None:
        """Not collective: waits for what is owed as long as it gets on. Raises its silence, tells its failures."""
        self._copies.wait()
        for one in self._copies.outcomes():
            if one.error is not None:
                _LOG.warning("the copy of step %d to %s failed: %s", one.step, self.root, one.error)
        if self._convoy is not None:
            self._convoy.wait()

    def stop(self) -> None:
        self._copies.stop()
        if self._convoy is not None:
            self._convoy.stop()


def both_tiers(root: str, directory: str, prefix: str) -> tuple[Scan, frozenset[str]]:
    """What lies in both, the best last, and the ids of the local saves that are of other runs and not among them."""
    there = scan(LocalStorage(root), prefix)
    try:
        here = scan(LocalStorage(directory), prefix)
    except CheckpointError as error:
        _LOG.warning("the local directory cannot be looked at: %s", error)
        here = Scan((), ())
    said, committed = run_marker.read(directory), run_marker.ids(there.complete)
    apart = run_marker.strangers(said, root, committed=committed, local=run_marker.ids(here.steps))
    here = run_marker.attributable(said, root, here, committed=committed)
    return run_marker.together(there, here, apart), apart
