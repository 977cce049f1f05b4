"""What the local directories of all machines hold between them, for a restore: rank 0 asks, the
other machines' leads answer.

A local save counts where any machine's directory counts it (`lineage.py`), and is good where a
gathering of its folders, as a load makes it, finds a complete copy between the machines. So a
machine may be lost, or replaced by an empty one, and a folder of another run in the way of a load
is no choice. With one tier the root is looked at in this way, for it may be a folder of each
machine's own.
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

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX
from unified_ckpt.engine.nodes.discover import open_cluster_source, open_folders
from unified_ckpt.engine.nodes.source import ClusterSource
from unified_ckpt.errors import CheckpointError
from unified_ckpt.manager.steps.scan import Scan, StepRecord, scan
from unified_ckpt.manager.tiers import run_marker
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.sources.step_names import StepEntry, list_steps

_LOG = logging.getLogger("unified_ckpt")
_END = "."


class ClusterScan:
    """Inside a phase of a meeting of all ranks. `leads`: one rank of each machine, 0 the first.
    Rank 0 calls `scan`, `diagnose` and `close`, the other leads `serve`.
    """

    def __init__(
        self,
        collective: Collective,
        comm: Comm,
        leaders: Sequence[int],
        *,
        root: str,
        directory: str,
        prefix: str,
    ) -> None:
        self._collective, self._leaders, self._root, self._directory, self._prefix = (
            collective,
            leaders,
            root,
            directory,
            prefix,
        )
        self._comm = comm.subgroup("tiers/survey", leaders, parent=collective)
        self._requests_sent = 0
        self._whole_saves: set[str | None] = (
            set()
        )  # saves in the root that rank 0 sees, of one folder
        self._answers: dict[
            int, dict[str, Any]
        ] = {}  # by lead, where the root may be a folder of each machine

    def scan(self, root_scan: Scan) -> Scan:
        """On rank 0: both tiers, the best last. `root_scan`: the root, as rank 0 sees it."""
        saves = run_marker.save_ids(root_scan.complete)
        self._whole_saves = {
            entry.save_id for entry in root_scan.complete if not entry.in_node_group
        }
        self._collective.put("root-saves", json.dumps(sorted(saves)).encode())
        if self._directory == self._root:
            self._collective.put(
                "root-entries",
                json.dumps(
                    [entry.name for entry in list_steps(self._root, prefix=self._prefix)]
                ).encode(),
            )
        answers = [self._describe_local(saves)] + [
            json.loads(self._collective.get(f"local/{rank}")) for rank in self._leaders[1:]
        ]
        if self._directory == self._root:
            self._answers = dict(zip(self._leaders, answers, strict=True))
        local_scan, excluded = merge_scans(
            [
                ([decode_record(entry) for entry in answer["steps"]], answer["strangers"])
                for answer in answers
            ],
            self._directory,
        )
        if not saves and any(
            answer["known"] for answer in answers
        ):  # the root was emptied: a directory that was not told so does not count either
            excluded = run_marker.save_ids(local_scan.steps)
        return (
            local_scan
            if self._directory == self._root
            else run_marker.merge_tiers(root_scan, local_scan, excluded)
        )

    def root_entries(self) -> tuple[list[StepEntry], dict[str, str]]:
        """On rank 0, after `scan`: the root's entries on all machines, as if they lay in rank 0's,
        and by path why one is not on all.
        """
        entries = list_steps(self._root, prefix=self._prefix)
        absences: dict[str, str] = {}
        for rank, answer in self._answers.items():
            additional = [
                replace(StepEntry(**entry), path=os.path.join(self._root, entry["name"]))
                for entry in answer["more"]
            ]
            absences |= {
                os.path.join(self._root, name): f"rank {rank}'s node does not have it"
                for name in answer["absent"]
            }
            absences |= {entry.path: "rank 0's node does not have it" for entry in additional}
            entries += [
                entry
                for entry in additional
                if entry.path not in {existing.path for existing in entries}
            ]
        return entries, absences

    def diagnose(self, record: StepRecord, *, diagnose_root: Callable[[str], str]) -> str:
        """On rank 0: why these machines cannot load a step of the local tier, empty where they can;
        `diagnose_root`: one of the root.
        """
        if os.path.dirname(record.path) == self._root and (
            self._directory != self._root or record.save_id in self._whole_saves
        ):
            return diagnose_root(record.path)
        self._request(record.name)
        try:
            save_id = self._loadable_save(record.name)
        except CheckpointError as error:
            self._collective.raise_if_failed()  # what ends the restore says nothing of the step
            return str(error)
        return (
            ""
            if save_id == record.save_id
            else f"another save, {save_id}, is in the way of save {record.save_id}"
        )

    def close(self) -> None:
        self._request(_END)
        self._comm.detach()

    def serve(self) -> None:
        """On the other leads, until rank 0 has chosen."""
        saves = frozenset(json.loads(self._collective.get("root-saves")))
        self._collective.put(
            f"local/{self._collective.rank}", json.dumps(self._describe_local(saves)).encode()
        )
        for request in count(1):
            name = self._collective.get(f"ask/{request}").decode()
            if name == _END:
                break
            try:
                self._loadable_save(name)
            except CheckpointError as error:
                self._collective.raise_if_failed()
                _LOG.debug("%s: %s", name, error)  # rank 0 has it too
        self._comm.detach()

    def _request(self, name: str) -> None:
        self._requests_sent += 1
        self._collective.heartbeat()
        self._collective.put(f"ask/{self._requests_sent}", name.encode())

    def _describe_local(self, saves: frozenset[str]) -> dict[str, Any]:
        """What this machine's directory holds, which of that is of other runs, and whether it knows
        of saves in the root.
        """
        entries: dict[str, StepEntry] = {}
        try:
            scanned = scan(LocalStorage(self._directory), self._prefix)
            if self._directory == self._root:
                entries = {
                    entry.name: entry for entry in list_steps(self._root, prefix=self._prefix)
                }
        except CheckpointError as error:
            _LOG.warning("the local directory cannot be looked at: %s", error)
            scanned = Scan((), ())
        if self._directory == self._root:
            root_names = set(
                json.loads(self._collective.get("root-entries"))
            )  # of rank 0: where the root is shared, the difference is nothing
            additional = [
                asdict(entry) for name, entry in entries.items() if name not in root_names
            ]
            steps = [asdict(entry) for entry in scanned.steps]
            return {
                "steps": steps,
                "strangers": [],
                "known": False,
                "absent": sorted(root_names - entries.keys()),
                "more": additional,
            }
        marker = run_marker.read(self._directory)
        excluded = run_marker.foreign_saves(
            marker, self._root, root_saves=saves, local_saves=run_marker.save_ids(scanned.steps)
        )
        scanned = run_marker.attributable_steps(marker, self._root, scanned, root_saves=saves)
        knows_root_saves = (
            marker is not None and marker.root == self._root and bool(marker.root_saves)
        )
        return {
            "steps": [asdict(entry) for entry in scanned.steps],
            "strangers": sorted(excluded),
            "known": knows_root_saves,
        }

    def _loadable_save(self, name: str) -> str | None:
        """Collective over the leads. The save that a load of this name would take. Its errors are
        those of the load.
        """
        with ExitStack() as stack:
            paths, nodes = [os.path.join(self._directory, name)], range(self._comm.world)
            opened = open_folders(paths, stack, lock=False)
            timeout = self._collective.timeout_seconds
            source = open_cluster_source(
                self._comm,
                f"restore of {name}",
                opened,
                nodes,
                stack,
                timeout_seconds=timeout,
            )
            with self._comm.begin_collective(
                "gathered", cached=False, timeout_seconds=timeout
            ).step("gathered"):  # others may read here until then
                return source.save_id if isinstance(source, ClusterSource) else None


def merge_scans(
    answers: Iterable[tuple[Sequence[StepRecord], Sequence[str]]], directory: str
) -> tuple[Scan, frozenset[str]]:
    """What all machines have as if it lay in one `directory`: a record for each save; and the saves
    that no machine counts. Pure.

    Of each machine: its steps, and the ids of those that it does not count.
    """
    records_by_node = [
        (record, set(excluded)) for records, excluded in answers for record in records
    ]
    counted = {
        record.save_id
        for record, excluded in records_by_node
        if record.save_id is not None and record.save_id not in excluded
    }
    saves: dict[str, list[StepRecord]] = {}
    for record, _ in records_by_node:
        if record.status == "complete" and record.save_id is not None:
            saves.setdefault(record.save_id, []).append(record)
    merged = [_merge_records(records, directory) for records in saves.values()]
    merged_names = {record.name for record in merged}
    unmerged = {
        record.name: replace(record, path=os.path.join(directory, record.name))
        for record, _ in records_by_node
        if record.name not in merged_names
    }
    steps = sorted(
        [*merged, *unmerged.values()],
        key=lambda record: (-1 if record.step is None else record.step, record.name),
    )
    return Scan(tuple(steps), ()), frozenset(
        id_ for _, excluded in records_by_node for id_ in excluded
    ) - counted


def _merge_records(records: Sequence[StepRecord], directory: str) -> StepRecord:
    """The folders of one save."""
    parts = sorted({part.removesuffix(SHARD_SUFFIX) for record in records for part in record.parts})
    nbytes, files = (
        sum(record.nbytes for record in records),
        sum(record.files for record in records),
    )
    return replace(
        records[0],
        path=os.path.join(directory, records[0].name),
        parts=tuple(parts),
        nbytes=nbytes,
        files=files,
    )


def decode_record(fields: Mapping[str, Any]) -> StepRecord:
    """As it was before it went through JSON."""
    return StepRecord(
        **{
            **fields,
            "parts": tuple(fields["parts"]),
            "omitted_parts": tuple(fields["omitted_parts"]),
        }
    )
