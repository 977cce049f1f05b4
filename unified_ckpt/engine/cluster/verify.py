"""Verify the folder of a node and the replicas in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from unified_ckpt.engine.cluster.node_inventory import missing_from_node
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.folder.reader import open_folder
from unified_ckpt.engine.folder.verify import VerifyReport, verify_folder
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format import names
from unified_ckpt.runtime.storage.roots import open_reader


def verify_with_replicas(
    folder: Folder, *, deep: bool, progress: Callable[[int], object] | None = None
) -> VerifyReport:
    """Check a folder and its replicas of other nodes' folders, as `verify_folder` does.

    A note says which other nodes hold the rest of the save.
    """
    report = verify_folder(folder, deep=deep, progress=progress)
    node_group = folder.manifest.node_group if folder.manifest is not None else None
    for group_number in node_group.replicas if node_group is not None else ():
        replica_name = names.replica_name(group_number)
        try:
            replica = open_folder(open_reader(f"{folder.storage.root}/{replica_name}"))
        except CheckpointError as error:
            report = replace(
                report, problems=(*report.problems, f"{replica_name}: cannot be read: {error}")
            )
            continue
        try:
            replica_report = verify_folder(replica, deep=deep, progress=progress)
            problems = [
                f"{replica_name}: {text}"
                for text in (
                    *_check_replica(replica, folder, group_number),
                    *replica_report.problems,
                )
            ]
            notes = (*report.notes, *(f"{replica_name}: {text}" for text in replica_report.notes))
            damage = (*report.damage, *(f"{replica_name}: {t}" for t in replica_report.damage))
        finally:
            replica.close()
        report = replace(
            report,
            problems=(*report.problems, *problems),
            tensors=report.tensors + replica_report.tensors,
            nbytes=report.nbytes + replica_report.nbytes,
            notes=notes,
            damage=damage,
        )
    with suppress(CheckpointError):  # a problem says what is damaged
        if missing := missing_from_node(folder):
            report = replace(report, notes=(*report.notes, f"partial: {missing}"))
    return report


def _check_replica(replica: Folder, folder: Folder, group_number: int) -> Iterator[str]:
    """Report a replica of another save or of another node group."""
    replica_manifest, manifest = replica.manifest, folder.manifest
    if (
        replica_manifest is None
        or manifest is None
        or replica_manifest.node_group is None
        or (replica_manifest.save_id, replica_manifest.node_group.number)
        != (manifest.save_id, group_number)
    ):
        yield f"is not node group {group_number}'s folder of this save"
