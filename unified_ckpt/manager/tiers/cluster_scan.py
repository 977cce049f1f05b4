"""Lists the saves in the folders of all nodes for a restore. Rank 0 asks each node's first rank.

A local save belongs to the run if the directory of any node says so (`run_marker.py`). It is valid
if the nodes together have all of it, checked as in a load. So a node may be lost or replaced by an
empty one, and a folder of another run is never selected. With one tier the root is listed in the
same way, because each node may have its own root.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import count
from typing import Any

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX
from unified_ckpt.engine.cluster.discover import open_cluster_source, open_folders
from unified_ckpt.engine.cluster.node_inventory import another_save_text
from unified_ckpt.errors import CheckpointError
from unified_ckpt.foreign.step_names import StepEntry, list_steps
from unified_ckpt.manager.run_context import RunContext
from unified_ckpt.manager.steps.bucket import UnfinishedCommit
from unified_ckpt.manager.steps.diagnose import diagnose
from unified_ckpt.manager.steps.scan import (
    Scan,
    StepRecord,
    other_checkpoints,
    scan,
)
from unified_ckpt.manager.steps.stale import StaleFolder
from unified_ckpt.manager.tiers import run_marker
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.storage.storage import LocalStorage

_LOG = logging.getLogger("unified_ckpt")
_END = "."


class ClusterScan:
    """Works inside a step of a collective of all ranks. `leaders`: one rank per node, rank 0 first.

    `directory`: the local one, or the root. Rank 0 calls `scan`, `diagnose` and `close`; the other
    leaders call `serve`.
    """

    def __init__(
        self, run: RunContext, collective: Collective, leaders: Sequence[int], *, directory: str
    ) -> None:
        self._collective, self._leaders, self._directory = collective, leaders, directory
        self._root, self._prefix = run.root, run.options.step_prefix
        self._comm = run.session.comm.subgroup("tiers/cluster-scan", leaders, parent=collective)
        self._requests_sent = 0
        # complete in one folder of the root, as rank 0 sees it
        self._whole_saves: set[str | None] = set()
        # by leader, if each node may have a root of its own
        self._replies: dict[int, dict[str, Any]] = {}

    def scan(self, root_scan: Scan) -> Scan:
        """Return both tiers over all nodes, the better copy last. Rank 0 only. `root_scan`: the
        root as rank 0 sees it.
        """
        saves = run_marker.save_ids(root_scan.complete)
        self._whole_saves = {
            entry.save_id for entry in root_scan.complete if not entry.in_node_group
        }
        self._collective.put_json("root-saves", sorted(saves))
        if self._directory == self._root:
            names = [entry.name for entry in list_steps(self._root, prefix=self._prefix)]
            self._collective.put_json("root-entries", names)
        replies = self._collect_local(saves)
        if self._directory == self._root:
            self._replies = dict(zip(self._leaders, replies, strict=True))
        local_scan, excluded = merge_scans(
            [(_decode_scan(reply["scan"]), reply["excluded"]) for reply in replies],
            self._directory,
        )
        # the root was emptied: exclude all
        if not saves and any(reply["knows_root_saves"] for reply in replies):
            excluded = run_marker.save_ids(local_scan.steps)
        if self._directory == self._root:
            return local_scan
        return run_marker.merge_tiers(root_scan, local_scan, excluded)

    def root_entries(self) -> tuple[list[StepEntry], dict[str, str]]:
        """Return the root's entries over all nodes, and path -> reason of those that some node
        lacks. Rank 0 only, after `scan`.
        """
        entries = list_steps(self._root, prefix=self._prefix)
        absences: dict[str, str] = {}
        for rank, reply in self._replies.items():
            additional = [
                replace(StepEntry(**entry), path=os.path.join(self._root, entry["name"]))
                for entry in reply["additional"]
            ]
            absences |= {
                os.path.join(self._root, name): f"rank {rank}'s node does not have it"
                for name in reply["absent"]
            }
            absences |= {entry.path: "rank 0's node does not have it" for entry in additional}
            entries += [
                entry
                for entry in additional
                if entry.path not in {existing.path for existing in entries}
            ]
        return entries, absences

    def other_checkpoints(self, *, known: Collection[str]) -> list[StepRecord]:
        """Return the root's checkpoints of other names on all nodes. Rank 0 only, after `scan`."""
        if self._directory != self._root:
            return other_checkpoints(self._root, self._prefix, known=known)
        records = [
            decode_record(fields) for reply in self._replies.values() for fields in reply["others"]
        ]
        return list({record.path: record for record in records}.values())

    def diagnose(self, record: StepRecord) -> str:
        """Return why the nodes cannot load a step, "" if they can. Rank 0 only."""
        if os.path.dirname(record.path) == self._root and (
            self._directory != self._root or record.save_id in self._whole_saves
        ):
            return diagnose(record)
        self._request(record.name)
        try:
            save_id = self._loadable_save(record.name)
        except CheckpointError as error:
            # an error of the restore itself says nothing about the step
            self._collective.raise_if_failed()
            return str(error)
        if save_id == record.save_id:
            return ""
        return another_save_text(save_id, record.save_id)

    def close(self) -> None:
        """End the `serve` of the other leaders. Rank 0 only."""
        self._request(_END)
        self._comm.hand_over_keys()

    def serve(self) -> None:
        """Answer rank 0 until it has selected. Other leaders only."""
        saves = frozenset(self._collective.get_json("root-saves"))
        self._collect_local(saves)
        for request in count(1):
            name = self._collective.get(f"request/{request}").decode()
            if name == _END:
                break
            try:
                self._loadable_save(name)
            except CheckpointError as error:
                self._collective.raise_if_failed()
                _LOG.debug("%s: %s", name, error)  # rank 0 raises it too
        self._comm.hand_over_keys()

    def _collect_local(self, saves: frozenset[str]) -> list[dict[str, Any]]:
        """Return what the leaders describe, on rank 0."""
        described = self._describe_local(saves)
        return self._collective.collect_json("local", described, dst=0, ranks=self._leaders)

    def _request(self, name: str) -> None:
        self._requests_sent += 1
        self._collective.heartbeat()
        self._collective.put(f"request/{self._requests_sent}", name.encode())

    def _describe_local(self, saves: frozenset[str]) -> dict[str, Any]:
        """Describe this node's directory: its steps, which are of other runs, and whether it knows
        saves in the root.
        """
        if self._directory == self._root:
            return self._describe_root()
        local = run_marker.scan_local(self._directory, self._prefix, self._root, root_saves=saves)
        marker = local.marker
        knows_root_saves = (
            marker is not None and marker.root == self._root and bool(marker.root_saves)
        )
        return {
            "scan": asdict(local.scan),
            "excluded": sorted(local.foreign_saves),
            "knows_root_saves": knows_root_saves,
        }

    def _describe_root(self) -> dict[str, Any]:
        """Describe this node's root: its steps, and how its entries differ from rank 0's."""
        entries: dict[str, StepEntry] = {}
        others: list[StepRecord] = []
        try:
            scanned = scan(LocalStorage(self._root), self._prefix)
            entries = {entry.name: entry for entry in list_steps(self._root, prefix=self._prefix)}
            if not scanned.complete:
                known = {record.path for record in scanned.steps}
                known |= {entry.path for entry in entries.values()}
                others = other_checkpoints(self._root, self._prefix, known=known)
        except CheckpointError as error:
            _LOG.warning("cannot list the root: %s", error)
            scanned = Scan((), ())
        root_names = set(self._collective.get_json("root-entries"))
        return {
            "scan": asdict(scanned),
            "excluded": [],
            "knows_root_saves": False,
            "others": [asdict(record) for record in others],
            "absent": sorted(root_names - entries.keys()),
            "additional": [
                asdict(entry) for name, entry in entries.items() if name not in root_names
            ],
        }

    def _loadable_save(self, name: str) -> str | None:
        """Return the save id that a load of this name would read. Collective over the leaders;
        raises the errors of the load.
        """
        with ExitStack() as stack:
            paths = [os.path.join(self._directory, name)]
            opened = open_folders(paths, stack, lock=False)
            timeout = self._collective.timeout_seconds
            source = open_cluster_source(
                self._comm,
                f"restore of {name}",
                opened,
                Topology.shared_folder(self._comm.rank, range(self._comm.world)),
                stack,
                timeout_seconds=timeout,
            )
            collective = self._comm.begin_collective("diagnose", timeout_seconds=timeout)
            with collective.step("read"):  # other nodes may read this folder until here
                return source.save_id if source is not None else None


def merge_scans(
    replies: Sequence[tuple[Scan, Sequence[str]]], directory: str
) -> tuple[Scan, frozenset[str]]:
    """Merge the scans of all nodes as if their steps lay in one `directory`. Pure.

    `replies`: per node, its scan and the save ids that it excludes. Returns one record per save
    and the stale folders of all nodes, and the saves that every node excludes.
    """
    records_by_node = [
        (record, set(excluded)) for scanned, excluded in replies for record in scanned.steps
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
    # a folder that the nodes share counts once
    stale = {folder.path: folder for scanned, _ in replies for folder in scanned.stale_folders}
    return Scan(tuple(steps), tuple(stale.values())), frozenset(
        id_ for _, excluded in records_by_node for id_ in excluded
    ) - counted


def _merge_records(records: Sequence[StepRecord], directory: str) -> StepRecord:
    """Merge the records of one save's folders."""
    parts = sorted({part.removesuffix(SHARD_SUFFIX) for record in records for part in record.parts})
    nbytes = sum(record.nbytes for record in records)
    files = sum(record.files for record in records)
    return replace(
        records[0],
        path=os.path.join(directory, records[0].name),
        parts=tuple(parts),
        nbytes=nbytes,
        files=files,
    )


def _decode_scan(fields: Mapping[str, Any]) -> Scan:
    """Rebuild a Scan from its JSON."""
    return Scan(
        tuple(decode_record(record) for record in fields["steps"]),
        tuple(StaleFolder(**folder) for folder in fields["stale_folders"]),
        tuple(UnfinishedCommit(**commit) for commit in fields["commits"]),
    )


def decode_record(fields: Mapping[str, Any]) -> StepRecord:
    """Rebuild a StepRecord from its JSON."""
    return StepRecord(
        **{
            **fields,
            "parts": tuple(fields["parts"]),
            "omitted_parts": tuple(fields["omitted_parts"]),
        }
    )
