"""Copies of what a machine stores, in the folders of the machines after it: as many machines may be
lost as there are further copies.

How data could be lost: a copy is counted that is not there. (1) It is of another save, or of
another machine. So what a machine serves must name this save and that machine. (2) Bytes are
damaged on the way, or on the disk that they are read from: every block is compared with its digest,
and the memory that was compared is written. (3) A copy that a crash cut off is taken for a whole
one: the manifest of each copy is written last, after its files are on the disk. (4) The checkpoint
gets its name before the copies are there: they are made before the gate at which all machines give
the name. (5) What is believed to be on enough machines is not: what is counted is what the
machines' plans store, by part and name; two fragment files are the same only if they hold the same
fragments; and several machines that share a folder are one. (6) Orders of another layout are
followed: they go with the plan, and are asked for anew whenever any rank has another one. (7) A
load mixes saves: it joins copies by their save id, as any folder. Each is a test in
tests/test_machine_copies.py.

A copy is a folder of its own within the checkpoint, so that whatever renames, withdraws or removes
that does so to the copies, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX
from unified_ckpt.core.nodes.replica_placement import place_replicas
from unified_ckpt.engine.folder import commit
from unified_ckpt.engine.folder.copy import FolderCopier
from unified_ckpt.engine.folder.manifest import write_manifest
from unified_ckpt.engine.folder.reader import Folder, open_folder
from unified_ckpt.engine.plan.save_plan import GlobalPlan
from unified_ckpt.engine.save.node_local import CommitGroup
from unified_ckpt.errors import IntegrityError, RankError
from unified_ckpt.format import index, names
from unified_ckpt.format.manifest import IndexFile, Manifest, Part
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.exchange.file_server import FolderServer, PeerStorage
from unified_ckpt.runtime.exchange.tcp import parse_address
from unified_ckpt.runtime.storage.storage import LocalStorage

_FAILURE_CHECK_NBYTES = 64 << 20  # copied between two looks whether another rank has failed


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What this island copies: files by the numbers of the islands that have them. Empty where
    nobody asked for copies.
    """

    files_by_group: Mapping[int, Sequence[str]]


def check_copy_count(commit_group: CommitGroup, copies: int) -> None:
    """Collective over all islands. RankError where ranks want different numbers, or more than there
    are islands.
    """
    with commit_group.step("machine-copies"):
        expected = int(
            commit_group.collective.broadcast("machine-copies-wanted", str(copies).encode())
        )
        if expected != copies:
            raise RankError(
                f"rank {commit_group.collective.rank} saves with machine_copies={copies}, rank 0 with {expected}; needed the same"
            )
        if copies > commit_group.node_group.count:
            raise RankError(
                f"machine_copies={copies}: the ranks are on {commit_group.node_group.count} machines that have a folder of their own; needed {copies} "
                "or more of them, or fewer copies"
            )


def plan_copies(
    commit_group: CommitGroup, global_plan: GlobalPlan | None, *, copies: int
) -> CopyPlan:
    """Collective over all islands, once for a layout. Rank 0 is told what each island stores, equal
    words once, and tells who copies.
    """
    collective, number = commit_group.collective, commit_group.node_group.number
    if copies == 1:
        return CopyPlan({})
    with commit_group.step("copies"):
        if global_plan is not None:
            unit_by_file, units = stored_units(global_plan)
            for name, members in units.items():
                if collective.add(f"units/{name}") == 1:
                    collective.put(f"units-of/{name}", json.dumps(members).encode())
            collective.put(f"holding/{number}", json.dumps(unit_by_file).encode())
        if collective.rank == 0:
            all_unit_by_file = [
                json.loads(collective.get(f"holding/{group_number}"))
                for group_number in range(commit_group.node_group.count)
            ]
            distinct = dict.fromkeys(
                name for unit_by_file in all_unit_by_file for name in unit_by_file.values()
            )
            units_of = {name: json.loads(collective.get(f"units-of/{name}")) for name in distinct}
            for group_number, group_copies in enumerate(
                place_replicas(all_unit_by_file, units_of, copies=copies)
            ):
                collective.put(f"orders/{group_number}", json.dumps(group_copies).encode())
        received = json.loads(collective.get(f"orders/{number}"))
    return CopyPlan({int(source): tuple(files) for source, files in received.items()})


def stored_units(global_plan: GlobalPlan) -> tuple[dict[str, str], dict[str, list[str]]]:
    """What an island stores, for `spread`. Whole tensors are units of their own: machines may file
    the same ones differently. The fragments of a file are one: they are many, and machines that
    have the same ones are alike.
    """
    unit_by_file: dict[str, str] = {}
    units: dict[str, list[str]] = {}
    for part, weight_map in global_plan.weight_maps.items():
        members: dict[str, list[str]] = {}
        for fqn, file in weight_map.items():
            members.setdefault(file, []).append(fqn)
        for file, fqns in members.items():
            unit_id = _content_id([part, sorted(fqns)])
            unit_by_file[file] = unit_id
            units[unit_id] = (
                [unit_id]
                if part.endswith(SHARD_SUFFIX)
                else [_content_id([part, fqn]) for fqn in sorted(fqns)]
            )
    return unit_by_file, units


def _content_id(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def replicate(
    commit_group: CommitGroup,
    group_collective: Collective,
    storage: LocalStorage,
    staging_dir: commit.StagingDir,
    copy_plan: CopyPlan,
    *,
    fsync: bool,
) -> None:
    """Collective over all islands, whose folders are complete but for their copies.
    `group_collective`: the meeting of this island, whose ranks share the copying, file by file; its
    first rank serves what others ask for.

    StorageError or IntegrityError on every rank of all islands where one cannot.
    """
    if not copy_plan.files_by_group:
        return
    with ExitStack() as exit_stack:  # served until all are through, or one has said why it is not
        with commit_group.step("copy"):
            if group_collective.rank == 0:
                exit_stack.callback(_serve(commit_group, storage, staging_dir, copy_plan).close)
            sources = _PeerFolders(commit_group, staging_dir)
            exit_stack.callback(sources.close)
            if group_collective.rank == 0:
                commit.check_free_space(
                    storage,
                    staging_dir,
                    sum(
                        _copied_nbytes(sources[number], files)
                        for number, files in copy_plan.files_by_group.items()
                    ),
                )
            commit_group.collective.get(
                _server_key(commit_group.node_group.number)
            )  # from here on the folders are there
            nearest = sorted(
                copy_plan.files_by_group,
                key=lambda source: (
                    (commit_group.node_group.number - source) % commit_group.node_group.count
                ),
            )
            tasks = [
                (number, file)
                for number in nearest
                for file in (
                    names.DIGESTS,
                    names.EXTRA,
                    names.RANK_EXTRA,
                    *copy_plan.files_by_group[number],
                )
            ]
            on_bytes = _copy_heartbeat(commit_group.collective)
            for source, file in tasks[group_collective.rank :: group_collective.world]:
                _copy_file(
                    FolderCopier(
                        sources[source],
                        storage,
                        _replica_folder(staging_dir, source),
                        fsync,
                        on_bytes,
                    ),
                    sources[source],
                    file,
                )
        with commit_group.step("seal"):
            if group_collective.rank == 0:
                for source, files in copy_plan.files_by_group.items():
                    _finalize_copy(
                        sources[source],
                        files,
                        storage,
                        _replica_folder(staging_dir, source),
                        fsync=fsync,
                    )
                if fsync:
                    storage.sync_folder(f"{staging_dir.folder}/{names.REPLICAS}")


class _PeerFolders:
    """The folders of other islands, by number, each opened when it is first wanted."""

    def __init__(self, commit_group: CommitGroup, staging_dir: commit.StagingDir) -> None:
        self._gate, self._save_id = commit_group, staging_dir.save_id
        self._opened: dict[int, Folder] = {}

    def __getitem__(self, number: int) -> Folder:
        if number not in self._opened:
            self._opened[number] = self._open(number)
        return self._opened[number]

    def _open(self, number: int) -> Folder:
        """IntegrityError where what is served is not what this island of this save wrote."""
        collective = self._gate.collective
        address_info = json.loads(collective.get(_server_key(number)))
        address, timeout_seconds = (
            parse_address(address_info["address"]),
            collective.timeout_seconds,
        )
        rank = collective.ranks[address_info["rank"]]
        folder = open_folder(
            PeerStorage(
                address,
                folder=0,
                root=address_info["root"],
                rank=rank,
                names=address_info["files"],
                timeout_seconds=timeout_seconds,
            )
        )
        check_peer_manifest(folder, save_id=self._save_id, number=number)
        return folder

    def close(self) -> None:
        for folder in self._opened.values():
            folder.close()


def check_peer_manifest(folder: Folder, *, save_id: str, number: int) -> Manifest:
    """The manifest of a folder; IntegrityError unless it is of this save and of the island
    `number`.
    """
    manifest = folder.manifest
    identity = (
        (manifest.save_id, manifest.node_group.number)
        if manifest is not None and manifest.node_group is not None
        else None
    )
    if manifest is None or identity != (save_id, number):
        raise IntegrityError(
            f"{folder.storage.root}: is {identity}; needed what machine {number} wrote of save {save_id}"
        )
    return manifest


def _serve(
    commit_group: CommitGroup,
    storage: LocalStorage,
    staging_dir: commit.StagingDir,
    copy_plan: CopyPlan,
) -> FolderServer:
    """Makes the folders for copies, and says where this island's files are to be had."""
    manifest = commit.read_manifest(storage, staging_dir.folder)
    if manifest is None:
        raise AssertionError("it is complete but for its copies")
    files = [*manifest.files(), names.MANIFEST]
    server = FolderServer(
        [(storage.path(staging_dir.folder), files)],
        timeout_seconds=commit_group.collective.timeout_seconds,
    )
    try:
        storage.make_folder(f"{staging_dir.folder}/{names.REPLICAS}")
        for source in copy_plan.files_by_group:
            storage.make_folder(_replica_folder(staging_dir, source))
        address_info = {
            "address": server.address.encode(),
            "root": storage.path(staging_dir.folder),
            "rank": commit_group.collective.rank,
            "files": files,
        }
        commit_group.collective.put(
            _server_key(commit_group.node_group.number), json.dumps(address_info).encode()
        )
    except BaseException:
        server.close()
        raise
    return server


def _server_key(number: int) -> str:
    return f"serves/{number}"


def _replica_folder(staging_dir: commit.StagingDir, source: int) -> str:
    return f"{staging_dir.folder}/{names.replica_name(source)}"


def _copy_heartbeat(collective: Collective) -> Callable[[int], None]:
    """A sign of life with each block; and the end of it where another rank has failed."""
    unchecked_nbytes = 0

    def on_bytes(nbytes: int) -> None:
        nonlocal unchecked_nbytes
        collective.heartbeat()
        unchecked_nbytes += nbytes
        if unchecked_nbytes >= _FAILURE_CHECK_NBYTES:
            unchecked_nbytes = 0
            collective.raise_if_failed()

    return on_bytes


def _copy_file(copy: FolderCopier, folder: Folder, file: str) -> None:
    """One file, if the folder has it."""
    manifest = _require_manifest(folder)
    for auxiliary in manifest.auxiliary_files():
        if auxiliary.file == file:
            copy.copy_auxiliary(file, auxiliary.nbytes, auxiliary.crc)
    for part, record in manifest.parts.items():
        if file in record.files:
            copy.copy_part_file(part, file, record.files[file].header_crc)


def _require_manifest(folder: Folder) -> Manifest:
    if folder.manifest is None:
        raise AssertionError("checked when it was opened")
    return folder.manifest


def _copied_nbytes(folder: Folder, files: Collection[str]) -> int:
    """Of these files and of those that go with them."""
    manifest = _require_manifest(folder)
    return sum(auxiliary.nbytes for auxiliary in manifest.auxiliary_files()) + sum(
        record.nbytes
        for part in manifest.parts.values()
        for file, record in part.files.items()
        if file in files
    )


def subset_manifest(folder: Folder, files: Collection[str]) -> tuple[Manifest, dict[str, bytes]]:
    """Manifest and indexes of a copy that has only these files of the parts. All else is said as in
    the folder itself.
    """
    manifest, parts, indexes = _require_manifest(folder), {}, {}
    for part, record in manifest.parts.items():
        weight_map = {
            name: folder.file_of(part, name)
            for name in folder.names(part)
            if folder.file_of(part, name) in files
        }
        total = sum(spec.nbytes for spec in folder.specs(part, weight_map).values())
        kept_files = {
            file: file_record for file, file_record in record.files.items() if file in files
        }
        encoded = (
            index.encode_index(total_size=total, weight_map=weight_map) if kept_files else None
        )
        if encoded is not None:
            indexes[names.index_name(part)] = encoded
        parts[part] = Part(
            files=kept_files,
            index=IndexFile.from_bytes(encoded) if encoded is not None else None,
            total_nbytes=total,
            aliases=record.aliases,
            codec=record.codec,
        )
    node_group = (
        manifest.node_group.model_copy(update={"replicas": []})
        if manifest.node_group is not None
        else None
    )
    return manifest.model_copy(update={"parts": parts, "node_group": node_group}), indexes


def _finalize_copy(
    folder: Folder, files: Collection[str], storage: LocalStorage, folder_name: str, *, fsync: bool
) -> None:
    """The indexes and the manifest of a copy, all of whose files are there."""
    manifest, indexes = subset_manifest(folder, files)
    for name, encoded in indexes.items():
        storage.put(f"{folder_name}/{name}", encoded, fsync=fsync)
    write_manifest(storage, folder_name, manifest, fsync=fsync)
    if fsync:
        storage.sync_folder(folder_name)
