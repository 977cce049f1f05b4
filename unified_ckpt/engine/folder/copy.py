"""Copy a committed checkpoint to another root, and verify every byte on the way.

Each range is read once, compared with the manifest's digests, and written from that memory.
Knows one complete folder and one target; decides nothing about when to copy and knows no ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from unified_ckpt.core.text import first_items
from unified_ckpt.engine.folder.backup import engine_files
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.folder.if_exists import PublishTarget, resolve_copy_if_exists
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.folder.transaction import Transaction
from unified_ckpt.engine.folder.verify import verify_folder
from unified_ckpt.errors import IncompleteError, IntegrityError
from unified_ckpt.format import digests, names
from unified_ckpt.format.manifest import Manifest, parse_manifest
from unified_ckpt.runtime.comm.comm import single_process
from unified_ckpt.runtime.storage.regular_files import file_size, walk
from unified_ckpt.runtime.storage.storage import LocalStorage

ProgressCallback = Callable[
    [int], object
]  # called with the bytes of each range written; an exception ends the copy

_FLUSH_NBYTES = 32 << 20  # start writeback after so many bytes of a file


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
    storage: LocalStorage,
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
                partial(resolve_copy_if_exists, storage, target, save_id=manifest.save_id)
            )
            if existing is not None:
                save_id = existing["id"]
                return CopyReport(save_id, 0, is_other_save=save_id != manifest.save_id)
            nbytes = sum(file_size(path) or 0 for _, paths in walk(source) for path in paths)
            transaction.check_free_space(nbytes)
            nbytes = _copy_files(folder, manifest, storage, transaction.folder, on_progress)
            storage.put(f"{transaction.folder}/{names.MANIFEST}", manifest_bytes)
            transaction.publish_and_clean_up()
        return CopyReport(manifest.save_id, nbytes)
    finally:
        folder.close()
        storage.close()


def _check_source(folder: Folder) -> tuple[Manifest, bytes]:
    """Return the manifest and its bytes, after checking sizes, headers and names."""
    root = folder.storage.root
    manifest_bytes = folder.storage.read(names.MANIFEST)
    manifest = parse_manifest(manifest_bytes, file=f"{root}/{names.MANIFEST}")
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


def _copy_files(
    folder: Folder,
    manifest: Manifest,
    storage: LocalStorage,
    target_folder: str,
    on_progress: ProgressCallback,
) -> int:
    """Copy everything but the manifest; return the number of bytes."""
    copier = FolderCopier(folder, storage, target_folder, on_progress)
    for file in manifest.with_parts(folder.parts).files():
        copier.copy_file(file)
    copier.copy_extra_files("", engine_files(manifest) - {names.REPLICAS})
    storage.remove_file(f"{target_folder}/{names.SAVE_ID_FILE}")
    return copier.nbytes


class FolderCopier:
    """Copies one folder to another, file by file, with a buffer of one block."""

    def __init__(
        self,
        folder: Folder,
        storage: LocalStorage,
        target_folder: str,
        on_progress: ProgressCallback,
    ) -> None:
        self._folder, self._source = folder, folder.storage
        self._storage, self._target_folder = storage, target_folder
        self._on_progress = on_progress
        self._buffer = memoryview(bytearray(digests.BLOCK_NBYTES))
        self.nbytes = 0
        manifest = folder.require_manifest()
        self._whole_files = dict(manifest.whole_files())
        self._part_files = {  # part and CRC of the header
            file: (part, record.header_crc)
            for part, part_record in manifest.parts.items()
            for file, record in part_record.files.items()
        }

    def copy_file(self, file: str) -> None:
        """Copy a file that the manifest names and verify every byte; no other file is copied."""
        if file in self._whole_files:
            record = self._whole_files[file]
            self._copy_range(file, 0, record.nbytes, record.crc)
            self._finish_file(file)
        elif file in self._part_files:
            self._copy_part_file(file, *self._part_files[file])

    def _copy_part_file(self, file: str, part: str, header_crc: str) -> None:
        entries = self._folder.header(file)
        digests_by_key = self._folder.block_digests([(part, name) for name in entries])
        data_start = min(
            (entry.start for entry in entries.values()), default=self._source.size(file) or 0
        )
        self._copy_range(file, 0, data_start, header_crc, what="its header ")
        flushed = 0
        for name, entry in entries.items():
            expected = digests_by_key[part, name]
            if expected is None or len(expected) != digests.block_count(entry.stop - entry.start):
                raise IntegrityError(
                    f"{self._path(file)}: {part}:{name} has no digests, expected one for each block"
                )
            for block, (start, stop) in enumerate(_block_ranges(entry.start, entry.stop)):
                what = f"block {block} of {part}:{name} "
                self._copy_range(file, start, stop, f"{expected[block]:016x}", what=what)
                if stop - flushed >= _FLUSH_NBYTES:
                    self._storage.start_flush(
                        f"{self._target_folder}/{file}", flushed, stop - flushed
                    )
                    flushed = stop
        self._finish_file(file)

    def copy_extra_files(self, subfolder: str, copied: set[str]) -> None:
        """Copy files, and links to files, that a trainer or a user added: they have no digests."""
        folder = os.path.join(self._source.root, subfolder)
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            name, is_folder = (
                os.path.join(subfolder, entry.name),
                entry.is_dir(follow_symlinks=False),
            )
            is_interrupted_repair = (
                not subfolder and not is_folder and name.startswith(names.REPAIR_TMP)
            )
            if name in copied or is_interrupted_repair or not (is_folder or entry.is_file()):
                continue
            if is_folder:
                self._storage.make_folder(f"{self._target_folder}/{name}")
                self.copy_extra_files(name, copied)
                continue
            size = file_size(entry.path) or 0
            self._copy_range(name, 0, size)
            if size == 0:
                self._storage.resize(f"{self._target_folder}/{name}", 0)
            self._finish_file(name)

    def _copy_range(
        self, file: str, start: int, stop: int, expected_crc: str = "", *, what: str = ""
    ) -> None:
        """Copy a range; IntegrityError if it has another CRC than the expected one, if any.

        A damaged range is written as well, but never published.
        """
        crc = 0
        for low, high in _block_ranges(start, stop):
            view = self._buffer[: high - low]
            self._source.read_at(file, low, view)
            crc = digests.crc(view, crc) if expected_crc else 0
            self._storage.write_at(f"{self._target_folder}/{file}", low, [view])
            self.nbytes += len(view)
            self._on_progress(len(view))
        if expected_crc and f"{crc:016x}" != expected_crc:
            raise IntegrityError(
                f"{self._path(file)}: {what}has CRC {crc:016x}, expected {expected_crc}: "
                "it is not copied"
            )

    def _finish_file(self, file: str) -> None:
        self._source.close()  # keep one file open at a time
        self._storage.sync(f"{self._target_folder}/{file}")
        self._on_progress(0)

    def _path(self, file: str) -> str:
        return f"{self._source.root}/{file}"


def _block_ranges(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Split [start, stop) into blocks; a tensor's blocks begin at its first byte."""
    for low in range(start, stop, digests.BLOCK_NBYTES):
        yield low, min(low + digests.BLOCK_NBYTES, stop)
