"""The steps of a run in both tiers and on all nodes: rank 0 lists and selects, every rank learns
the result.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from unified_ckpt.errors import NotFoundError
from unified_ckpt.manager.restore.select import select, step_check
from unified_ckpt.manager.restore.targets import RestorePoint, RestoreRequest
from unified_ckpt.manager.run_context import RunContext
from unified_ckpt.manager.save_job import SaveJob
from unified_ckpt.manager.steps.finish import finish_commits
from unified_ckpt.manager.steps.save_target import SaveTarget
from unified_ckpt.manager.steps.scan import Scan, StepRecord, check_run_root, step_name
from unified_ckpt.manager.tiers.cluster_scan import ClusterScan, decode_record
from unified_ckpt.manager.tiers.tiers import TieredStorage
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.storage.locks import shared_lock
from unified_ckpt.runtime.storage.roots import open_root


class RunSteps:
    """The steps of a run, in both tiers and on all nodes. `tiers`: None without a local directory.

    `later`: complete steps from which the run has gone back. `damaged`: save id -> step that a
    restore could not use.
    """

    def __init__(self, run: RunContext, tiers: TieredStorage | None) -> None:
        self._run, self._tiers = run, tiers
        self._local_directory = tiers.local_directory if tiers is not None else run.root
        self.later: Sequence[int] = ()
        self.damaged: dict[str, int] = {}
        self._heartbeat: Callable[[], object] = lambda: None  # of the collective that selects

    def scan(self) -> Scan:
        """Scan what this rank sees of both tiers, the better copy of a step last."""
        if self._tiers is not None:
            return self._tiers.scan()
        return self._run.scan_root()

    def common(self) -> list[StepRecord]:
        """Return the steps that a restore could load, the same on every rank. Collective.

        `path` is that of this node.
        """

        def list_loadable(cluster: ClusterScan | None) -> object:
            check = step_check(cluster)
            loadable = [
                record
                for record in self._scan_all(cluster).complete
                if (cluster is None and not record.in_node_group) or not check(record)
            ]
            unique = {record.step: record for record in loadable}.values()
            return [[asdict(record), self._is_local(record.path)] for record in unique]

        timeout = self._run.timeout_seconds
        steps, spans_nodes = self._broadcast("steps", list_loadable, timeout_seconds=timeout)
        records = [(decode_record(fields), local) for fields, local in steps]
        return [
            replace(record, path=self._node_path(record.path, local=local))
            if spans_nodes
            else record
            for record, local in records
        ]

    def select(
        self,
        request: RestoreRequest,
        load_failures: Mapping[str, str],
        locks: contextlib.ExitStack,
    ) -> RestorePoint:
        """Select on rank 0 what to load. Collective. Rank 0 locks the folder against removal while
        `locks` is open. In a bucket, it finishes unfinished commits before.
        """

        def select_point(cluster: ClusterScan | None) -> object:
            prefix = self._run.options.step_prefix
            required = None if request.step is None else step_name(request.step, prefix)
            self._finish_commits(required=required)
            point = select(
                self._scan_all(cluster),
                self._run.options,
                request,
                root=self._run.root,
                load_failures=load_failures,
                cluster=cluster,
            )
            if point.path:
                # removed meanwhile: the load raises on all ranks
                with contextlib.suppress(NotFoundError):
                    locks.enter_context(shared_lock(point.path))
            is_local = point.kind == "unified" and self._is_local(point.path)
            return asdict(replace(point, local=is_local))

        timeout = self._run.load_options.timeout_seconds
        fields, spans_nodes = self._broadcast("restore", select_point, timeout_seconds=timeout)
        point = RestorePoint(**fields)
        self.damaged |= point.damaged
        if self._tiers is not None:
            self._tiers.damaged = frozenset(self.damaged)
        if not spans_nodes or point.kind not in ("unified", "foreign"):
            return point
        path = self._node_path(point.path, local=point.local, name=point.name)
        return replace(point, path=path)

    def choose_step(self, choose_path: Callable[[Scan, Callable[[StepRecord], str]], str]) -> str:
        """Return the path of a step on this node, "" for none. Collective.

        Rank 0 chooses from the steps of both tiers on all nodes, the better copy of a step last.
        It also gets a function that returns why the nodes cannot load a step, "" if they can. In a
        bucket, it finishes unfinished commits before.
        """

        def choose_on_rank_0(cluster: ClusterScan | None) -> object:
            self._finish_commits()
            path = choose_path(self._scan_all(cluster), step_check(cluster))
            is_in_root = path.startswith(f"{self._run.root}{os.sep}")
            name = os.path.relpath(path, self._run.root) if is_in_root else os.path.split(path)[1]
            return path, name, not is_in_root

        timeout = self._run.load_options.timeout_seconds
        (path, name, is_local), spans_nodes = self._broadcast(
            "resume", choose_on_rank_0, timeout_seconds=timeout
        )
        has_node_path = path and spans_nodes
        return self._node_path(path, local=is_local, name=name) if has_node_path else str(path)

    def on_commit(self, job: SaveJob, target: SaveTarget) -> None:
        """Apply retention and schedule the upload after a commit on all nodes. A failure here does
        not fail the save.
        """
        if job.state.path is None and self._tiers is None:
            self.apply_retention(job.step, counted=job.state.counted)
        elif job.state.path is None and self._tiers is not None:
            self._tiers.on_commit(job, target)

    def apply_retention(self, step: int, *, counted: Collection[int] = ()) -> None:
        """Remove old checkpoints from the root after the commit of `step`. One rank per root
        acts. `counted`: steps that stay in place of one of the latest.
        """
        if self._run.session.is_folder_leader(self._run.root):
            self._run.rotate_root(step, counted=counted, excluded=self.damaged)

    def _broadcast(
        self,
        operation: str,
        select_value: Callable[[ClusterScan | None], object],
        *,
        timeout_seconds: float,
    ) -> tuple[Any, bool]:
        """Broadcast the JSON value of `select_value` on rank 0. Collective. With several nodes it
        gets a view of all of them. Also returns whether there are several.
        """
        topology = self._run.session.resolve_ranks(
            f"{operation} of {self._run.root}", timeout_seconds=timeout_seconds
        )
        collective = self._run.session.comm.begin_collective(
            operation, timeout_seconds=timeout_seconds
        )
        self._heartbeat = collective.heartbeat
        # All nodes see one bucket.
        one_root = self._tiers is None and is_bucket_url(self._run.root)
        spans_nodes = topology.spans_nodes and not one_root
        with collective.step("select"):
            cluster = value = None
            if spans_nodes and topology.is_node_leader:
                cluster = ClusterScan(
                    self._run, collective, topology.node_leaders, directory=self._local_directory
                )
            if collective.rank == 0:
                value = select_value(cluster)
                if cluster is not None:
                    cluster.close()
            elif cluster is not None:
                cluster.serve()
            return collective.broadcast_json("selection", value), spans_nodes

    def _finish_commits(self, *, required: str | None = None) -> None:
        """Finish the commits that a process left unfinished in a root in a bucket."""
        storage = open_root(self._run.root)
        if isinstance(storage, ObjectStorage):
            storage.on_request = self._heartbeat
        finish_commits(storage, required=required)

    def _scan_all(self, cluster: ClusterScan | None) -> Scan:
        """Scan both tiers, on all nodes. Rank 0 only. OptionError if the root is a checkpoint."""
        check_run_root(self._run.root)
        if cluster is None:
            return self.scan()
        return cluster.scan(self._run.scan_root())

    def _is_local(self, path: str) -> bool:
        return os.path.dirname(path) != self._run.root

    def _node_path(self, path: str, *, local: bool, name: str = "") -> str:
        """Return the path of a step on this node, whose folders may have other names."""
        directory = self._local_directory if local else self._run.root
        return os.path.join(directory, name or os.path.split(path)[1])
