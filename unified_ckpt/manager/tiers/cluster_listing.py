"""What the local directories of all machines hold between them, for a restore: rank 0 asks, the other machines' leads answer.

A local save counts where any machine's directory counts it (`lineage.py`), and is good where a gathering of its folders, as a load makes
it, finds a complete copy between the machines. So a machine may be lost, or replaced by an empty one, and a folder of another run in the
way of a load is no choice. With one tier the root is looked at in this way, for it may be a folder of each machine's own.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import count
from typing import Any

from unified_ckpt.core.nodes.node_groups import FRAGMENTS
from unified_ckpt.engine.nodes.discover import gather, open_folders
from unified_ckpt.engine.nodes.source import Joint
from unified_ckpt.errors import CheckpointError
from unified_ckpt.manager.steps.scan import Scan, StepRecord, scan
from unified_ckpt.manager.tiers import run_marker
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.sources.step_names import StepEntry, list_steps

_LOG = logging.getLogger("unified_ckpt")
_END = "."


class Survey:
    """Inside a phase of a meeting of all ranks. `leads`: one rank of each machine, 0 the first. Rank 0 calls `look`, `damage` and `end`,
    the other leads `answer`."""

    def __init__(
        self,
        meeting: Meeting,
        ranks: Comm,
        leads: Sequence[int],
        *,
        root: str,
        directory: str,
        prefix: str,
    ) -> None:
        self._meeting, self._leads, self._root, self._directory, self._prefix = (
            meeting,
            leads,
            root,
            directory,
            prefix,
        )
        self._comm = ranks.among("tiers/survey", leads, within=meeting)
        self._asked = 0
        self._plain: set[str | None] = set()  # saves in the root that rank 0 sees, of one folder
        self._answers: dict[
            int, dict[str, Any]
        ] = {}  # by lead, where the root may be a folder of each machine

    def look(self, there: Scan) -> Scan:
        """On rank 0: both tiers, the best last. `there`: the root, as rank 0 sees it."""
        saves = run_marker.ids(there.complete)
        self._plain = {one.save_id for one in there.complete if not one.island}
        self._meeting.put("root-saves", json.dumps(sorted(saves)).encode())
        if self._directory == self._root:
            self._meeting.put(
                "root-entries",
                json.dumps(
                    [one.name for one in list_steps(self._root, prefix=self._prefix)]
                ).encode(),
            )
        told = [self._own(saves)] + [
            json.loads(self._meeting.get(f"local/{rank}")) for rank in self._leads[1:]
        ]
        if self._directory == self._root:
            self._answers = dict(zip(self._leads, told, strict=True))
        here, apart = joined(
            [([record(one) for one in own["steps"]], own["strangers"]) for own in told],
            self._directory,
        )
        if not saves and any(
            own["known"] for own in told
        ):  # the root was emptied: a directory that was not told so does not count either
            apart = run_marker.ids(here.steps)
        return here if self._directory == self._root else run_marker.together(there, here, apart)

    def entries(self) -> tuple[list[StepEntry], dict[str, str]]:
        """On rank 0, after `look`: the root's entries on all machines, as if they lay in rank 0's, and by path why one is not on all."""
        every = list_steps(self._root, prefix=self._prefix)
        absent: dict[str, str] = {}
        for rank, answer in self._answers.items():
            more = [
                replace(StepEntry(**one), path=os.path.join(self._root, one["name"]))
                for one in answer["more"]
            ]
            absent |= {
                os.path.join(self._root, name): f"rank {rank}'s node does not have it"
                for name in answer["absent"]
            }
            absent |= {one.path: "rank 0's node does not have it" for one in more}
            every += [one for one in more if one.path not in {known.path for known in every}]
        return every, absent

    def damage(self, one: StepRecord, *, otherwise: Callable[[str], str]) -> str:
        """On rank 0: why these machines cannot load a step of the local tier, empty where they can; `otherwise`: one of the root."""
        if os.path.dirname(one.path) == self._root and (
            self._directory != self._root or one.save_id in self._plain
        ):
            return otherwise(one.path)
        self._ask(one.name)
        try:
            found = self._gathered(one.name)
        except CheckpointError as error:
            self._meeting.heed()  # what ends the restore says nothing of the step
            return str(error)
        return (
            ""
            if found == one.save_id
            else f"another save, {found}, is in the way of save {one.save_id}"
        )

    def end(self) -> None:
        self._ask(_END)
        self._comm.leave()

    def answer(self) -> None:
        """On the other leads, until rank 0 has chosen."""
        saves = frozenset(json.loads(self._meeting.get("root-saves")))
        self._meeting.put(f"local/{self._meeting.rank}", json.dumps(self._own(saves)).encode())
        for number in count(1):
            name = self._meeting.get(f"ask/{number}").decode()
            if name == _END:
                break
            try:
                self._gathered(name)
            except CheckpointError as error:
                self._meeting.heed()
                _LOG.debug("%s: %s", name, error)  # rank 0 has it too
        self._comm.leave()

    def _ask(self, name: str) -> None:
        self._asked += 1
        self._meeting.beat()
        self._meeting.put(f"ask/{self._asked}", name.encode())

    def _own(self, saves: frozenset[str]) -> dict[str, Any]:
        """What this machine's directory holds, which of that is of other runs, and whether it knows of saves in the root."""
        entries: dict[str, StepEntry] = {}
        try:
            found = scan(LocalStorage(self._directory), self._prefix)
            if self._directory == self._root:
                entries = {one.name: one for one in list_steps(self._root, prefix=self._prefix)}
        except CheckpointError as error:
            _LOG.warning("the local directory cannot be looked at: %s", error)
            found = Scan((), ())
        if self._directory == self._root:
            first = set(
                json.loads(self._meeting.get("root-entries"))
            )  # of rank 0: where the root is shared, the difference is nothing
            more = [asdict(one) for name, one in entries.items() if name not in first]
            steps = [asdict(one) for one in found.steps]
            return {
                "steps": steps,
                "strangers": [],
                "known": False,
                "absent": sorted(first - entries.keys()),
                "more": more,
            }
        said = run_marker.read(self._directory)
        apart = run_marker.strangers(
            said, self._root, committed=saves, local=run_marker.ids(found.steps)
        )
        found = run_marker.attributable(said, self._root, found, committed=saves)
        known = said is not None and said.root == self._root and bool(said.saves)
        return {
            "steps": [asdict(one) for one in found.steps],
            "strangers": sorted(apart),
            "known": known,
        }

    def _gathered(self, name: str) -> str | None:
        """Collective over the leads. The save that a load of this name would take. Its errors are those of the load."""
        with ExitStack() as owned:
            paths, machines = [os.path.join(self._directory, name)], range(self._comm.world)
            opened = open_folders(paths, owned, hold=False)
            timeout = self._meeting.timeout_seconds
            found = gather(
                self._comm,
                f"restore of {name}",
                paths,
                opened,
                machines,
                owned,
                timeout_seconds=timeout,
            )
            with self._comm.meet("gathered", same=False, timeout_seconds=timeout).phase(
                "gathered"
            ):  # others may read here until then
                return found.save_id if isinstance(found, Joint) else None


def joined(
    told: Iterable[tuple[Sequence[StepRecord], Sequence[str]]], directory: str
) -> tuple[Scan, frozenset[str]]:
    """What all machines have as if it lay in one `directory`: a record for each save; and the saves that no machine counts. Pure.

    Of each machine: its steps, and the ids of those that it does not count.
    """
    every = [(one, set(apart)) for records, apart in told for one in records]
    counting = {
        one.save_id for one, apart in every if one.save_id is not None and one.save_id not in apart
    }
    saves: dict[str, list[StepRecord]] = {}
    for one, _ in every:
        if one.status == "complete" and one.save_id is not None:
            saves.setdefault(one.save_id, []).append(one)
    found = [_as_one(records, directory) for records in saves.values()]
    good = {one.name for one in found}
    bad = {
        one.name: replace(one, path=os.path.join(directory, one.name))
        for one, _ in every
        if one.name not in good
    }
    steps = sorted(
        [*found, *bad.values()], key=lambda one: (-1 if one.step is None else one.step, one.name)
    )
    return Scan(tuple(steps), ()), frozenset(id_ for _, apart in every for id_ in apart) - counting


def _as_one(records: Sequence[StepRecord], directory: str) -> StepRecord:
    """The folders of one save."""
    parts = sorted({part.removesuffix(FRAGMENTS) for one in records for part in one.parts})
    nbytes, files = sum(one.nbytes for one in records), sum(one.files for one in records)
    return replace(
        records[0],
        path=os.path.join(directory, records[0].name),
        parts=tuple(parts),
        nbytes=nbytes,
        files=files,
    )


def record(told: Mapping[str, Any]) -> StepRecord:
    """As it was before it went through JSON."""
    return StepRecord(
        **{**told, "parts": tuple(told["parts"]), "omitted_parts": tuple(told["omitted_parts"])}
    )
