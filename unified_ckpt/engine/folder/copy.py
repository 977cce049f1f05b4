"""Copies a committed checkpoint to another root, and verifies every byte on the way.

Each range is read once, compared with the manifest's digests, and written from that memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

from unified_ckpt.core.text import first_items
from unified_ckpt.engine.folder.backup import engine_files
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.folder.if_exists import PublishTarget, resolve_copy_if_exists
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.folder.transaction import Transaction
from unified_ckpt.engine.folder.verified_file import (
    Range,
    blocks_of,
    read_block,
    read_part_header,
    read_whole,
    write_ranges,
)
from unified_ckpt.engine.folder.verify import verify_folder
from unified_ckpt.errors import IncompleteError, IntegrityError
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest, encode_manifest, parse_manifest
from unified_ckpt.format.manifest_fields import FileRecord
from unified_ckpt.runtime.comm.comm import single_process
from unified_ckpt.runtime.storage.protocol import Reader, ReadRange, Storage
from unified_ckpt.runtime.storage.roots import listable

ProgressCallback = Callable[
    [int], object
]  # called with the bytes of each range written; an exception ends the copy


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy or a merge wrote.

    `nbytes` is what this rank wrote. It is 0 on every rank if a checkpoint exists at the target and
    is kept; `save_id` is then the id of that checkpoint, and `is_other_save` says that it is
    another save. `notes` lists damage that was bypassed and state that was left out.
    """

    save_id: str
    nbytes: int
    notes: tuple[str, ...] = ()
    is_other_save: bool = False


def copy_checkpoint(
    source: str,
    storage: Storage,
    name: str,
    *,
    if_exists: str,
    on_progress: ProgressCallback,
) -> CopyReport:
    """Copy the checkpoint folder `source` to `name` below the storage's root.

    Uses a few MiB of memory; any rank and thread may call it. Copies all files, and links to files
    as files; skips links to folders and files added later. If the same save is committed at the
    target, nothing is done; `if_exists` applies to another save. The source cannot be removed
    meanwhile.

    Raises IntegrityError or IncompleteError if the source is damaged, NotFoundError if it is gone
    and StorageError if it cannot be read or written. Any error leaves `name` unchanged.
    """
    folder = open_path(source, lock=True)
    try:
        manifest, manifest_bytes = _check_source(folder)
        target = PublishTarget(
            name, if_exists, manifest.parts, is_managed_path=True
        )  # only the manager copies
        collective = single_process().begin_collective(f"copy of {source}", timeout_seconds=60)
        with Transaction(collective, storage, target) as transaction:
            existing = transaction.begin(
                partial(resolve_copy_if_exists, storage, target, save_id=manifest.save_id),
                copied_save_id=manifest.save_id,
            )
            if existing is not None:
                save_id = existing["id"]
                return CopyReport(save_id, 0, is_other_save=save_id != manifest.save_id)
            files = manifest.with_parts(folder.parts).files()
            extra = ExtraFiles(folder.storage, engine_files(manifest) - {names.REPLICAS})
            sizes = {file: folder.storage.size(file) or 0 for file in files} | extra.files
            transaction.check_free_space(sum(sizes.values()))
            transaction.expect_files(sizes)
            copier = FolderCopier(folder, storage, transaction.folder, on_progress)
            for file in files:
                copier.copy_file(file)
            copier.copy_extra_files(extra)
            storage.put(f"{transaction.folder}/{names.MANIFEST}", manifest_bytes)
            transaction.publish_and_clean_up()
        return CopyReport(manifest.save_id, copier.nbytes)
    finally:
        folder.close()
        storage.close()


def _check_source(folder: Folder) -> tuple[Manifest, bytes]:
    """Return the manifest and its bytes, after checking sizes, headers and names."""
    root = folder.storage.root
    manifest_bytes = folder.storage.read(names.MANIFEST)
    stored = parse_manifest(manifest_bytes, file=f"{root}/{names.MANIFEST}")
    manifest = stored.at(root)
    if stored.etags:  # of objects in the source; a commit adds those in the target
        manifest_bytes = encode_manifest(stored.at(""))
    if folder.manifest is None or manifest != folder.manifest:
        raise IntegrityError(f"{root}: changed while it was opened; copy again")
    if manifest.node_group is not None:
        raise IncompleteError(
            f"{root}: holds one of {manifest.node_group.count} node groups, expected a folder "
            "with the complete save"
        )
    problems = verify_folder(folder, deep=False).problems
    if problems:
        raise IntegrityError(f"{root}: cannot be copied: {first_items(problems, 1)}")
    return manifest, manifest_bytes


class ExtraFiles:
    """Files, and links to files, beside those named in `excluded`; and the folders they are in.

    `files`: sizes by path. `folders`: paths, each after its parent. Both are below the root of
    `storage`. StorageError for a storage that cannot be listed.
    """

    def __init__(self, storage: Reader, excluded: Collection[str]) -> None:
        self.files: dict[str, int] = {}
        self.folders: list[str] = []
        self._storage, self._excluded = listable(storage), excluded
        self._add("")

    def _add(self, prefix: str) -> None:
        sizes = self._storage.sizes(prefix)
        for entry in self._storage.entries(prefix):
            name = prefix + entry
            if name in self._excluded:
                continue
            if entry not in sizes and self._storage.kind(name) == "folder":
                self.folders.append(name)
                self._add(f"{name}/")
            elif entry in sizes and (prefix or not name.startswith(names.REPAIR_TMP)):
                self.files[name] = sizes[entry]


class FolderCopier:
    """Copies one folder to another, file by file. `nbytes`: copied so far."""

    def __init__(
        self,
        folder: Folder,
        storage: Storage,
        target_folder: str,
        on_progress: ProgressCallback,
    ) -> None:
        self._folder, self._source = folder, folder.storage
        self._storage, self._target_folder = storage, target_folder
        self._on_progress = on_progress
        self.nbytes = 0
        manifest = folder.require_manifest()
        self._whole_files = dict(manifest.whole_files())
        self._part_files = {
            file: (part, record)
            for part, part_record in manifest.parts.items()
            for file, record in part_record.files.items()
        }

    def copy_file(self, file: str) -> None:
        """Copy a file that the manifest names and verify every byte; no other file is copied."""
        if file in self._whole_files:
            record = self._whole_files[file]
            self._write(file, read_whole(self._source, file, record.nbytes, record.crc))
        elif file in self._part_files:
            self._write(file, self._part_ranges(file, *self._part_files[file]))

    def _part_ranges(self, file: str, part: str, record: FileRecord) -> Iterator[Range]:
        header = read_part_header(self._source, file, record)
        block_crcs = self._folder.block_digests([(part, name) for name in header.entries])
        blocks = blocks_of(part, header, block_crcs)
        if blocks is None:
            raise IntegrityError(
                f"{self._source.root}/{file}: lacks digests, expected one for each block"
            )
        yield 0, header.body
        self._source.expect(
            ReadRange(file, block.start, block.start + block.nbytes) for block in blocks
        )
        for block in blocks:
            yield block.start, read_block(self._source, file, block)

    def copy_extra_files(self, extra: ExtraFiles) -> None:
        """Copy files that a trainer or a user added: they have no digests."""
        for subfolder in extra.folders:
            self._storage.make_folder(f"{self._target_folder}/{subfolder}")
        for file, nbytes in extra.files.items():
            self._write(file, read_whole(self._source, file, nbytes))

    def _write(self, file: str, ranges: Iterator[Range]) -> None:
        try:
            write_ranges(self._storage, f"{self._target_folder}/{file}", ranges, self._count)
        except IntegrityError as error:
            raise IntegrityError(f"{error}: it is not copied") from error
        self._source.close()  # keep one file open at a time

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._on_progress(nbytes)
