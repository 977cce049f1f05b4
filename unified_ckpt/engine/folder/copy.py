"""Copy a committed checkpoint to another root, and verify every byte on the way.

Each range is read once, compared with the manifest's digests, and written from that memory.
Knows one complete folder and one target; decides nothing about when to copy and knows no ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from unified_ckpt.engine.folder import commit
from unified_ckpt.engine.folder.backup import clean_up, engine_files
from unified_ckpt.engine.folder.reader import Folder, open_path
from unified_ckpt.engine.folder.verify import verify_folder
from unified_ckpt.errors import IncompleteError, IntegrityError
from unified_ckpt.format import digests, names
from unified_ckpt.format.manifest import Manifest, parse_manifest
from unified_ckpt.runtime.storage.storage import LocalStorage

ProgressCallback = Callable[
    [int], object
]  # called with the bytes of each range written; an exception ends the copy

_FLUSH_NBYTES = 32 << 20  # start writeback after so many bytes of a file


@dataclass(frozen=True, slots=True)
class CopyResult:
    """The result of a copy. `nbytes`: bytes written, 0 if an existing checkpoint was kept.

    `save_id` is that of the checkpoint at the target; `is_other_save`: it is not the source's.
    """

    save_id: str
    nbytes: int
    is_other_save: bool = False


def copy_checkpoint(
    source: str,
    storage: LocalStorage,
    name: str,
    *,
    if_exists: str,
    fsync: bool,
    on_progress: ProgressCallback,
) -> CopyResult:
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
        target = commit.PublishTarget(
            name, if_exists, manifest.parts, is_step_path=True
        )  # only the manager copies
        present = commit.check_existing_entries(storage, target)
        existing = commit.resolve_copy_if_exists(storage, target, save_id=manifest.save_id)
        if existing is not None:
            return CopyResult(
                existing.save_id, 0, is_other_save=existing.save_id != manifest.save_id
            )
        staging = commit.create(
            storage, name, save_id=None, existing_entries=present
        )  # its own id: an interrupted copy may be there
        try:
            commit.check_free_space(storage, staging, sum(_file_sizes(source)))
            nbytes = _copy_files(
                folder, manifest, storage, staging.folder, fsync=fsync, on_progress=on_progress
            )
            storage.put(f"{staging.folder}/{names.MANIFEST}", manifest_bytes, fsync=fsync)
            published = commit.publish(storage, staging, target, fsync=fsync)
        except BaseException:
            commit.abort(storage, staging)
            raise
        clean_up(storage, published, fsync=fsync)
        return CopyResult(manifest.save_id, nbytes)
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
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise IntegrityError(f"{root}: cannot be copied: {problems[0]}{more}")
    return manifest, manifest_bytes


def _copy_files(
    folder: Folder,
    manifest: Manifest,
    storage: LocalStorage,
    target_folder: str,
    *,
    fsync: bool,
    on_progress: ProgressCallback,
) -> int:
    """Copy everything but the manifest; return the number of bytes."""
    copier = FolderCopier(folder, storage, target_folder, fsync, on_progress)
    for auxiliary in manifest.auxiliary_files():
        copier.copy_auxiliary(auxiliary.file, auxiliary.nbytes, auxiliary.crc)
    for part in folder.parts:
        if (record := manifest.parts[part].index) is not None:
            copier.copy_auxiliary(names.index_name(part), record.nbytes, record.crc)
        for file, file_record in manifest.parts[part].files.items():
            copier.copy_part_file(part, file, file_record.header_crc)
    copier.copy_extra_files("", engine_files(manifest) - {names.REPLICAS})
    storage.remove_file(f"{target_folder}/{names.MARKER}")
    return copier.nbytes


class FolderCopier:
    """Copies one folder to another, file by file, with a buffer of one block."""

    def __init__(
        self,
        folder: Folder,
        storage: LocalStorage,
        target_folder: str,
        fsync: bool,
        on_progress: ProgressCallback,
    ) -> None:
        self._folder, self._source = folder, folder.storage
        self._storage, self._target_folder = storage, target_folder
        self._fsync, self._on_progress = fsync, on_progress
        self._buffer = memoryview(bytearray(digests.BLOCK_NBYTES))
        self.nbytes = 0

    def copy_auxiliary(self, file: str, nbytes: int, expected_crc: str) -> None:
        """Copy a file that has one CRC of all its bytes."""
        crc = 0
        for start, stop in _block_ranges(0, nbytes):
            crc = digests.crc(self._copy_range(file, start, stop), crc)
        if f"{crc:016x}" != expected_crc:
            raise IntegrityError(
                f"{self._path(file)}: has CRC {crc:016x}, expected {expected_crc}: it is not copied"
            )
        self._finish_file(file)

    def copy_part_file(self, part: str, file: str, header_crc: str) -> None:
        """Copy a file of a part, verifying its header and every block of its tensors."""
        entries = self._folder.header(file)
        digests_by_key = self._folder.block_digests([(part, name) for name in entries])
        data_start = min(
            (entry.start for entry in entries.values()), default=self._source.size(file) or 0
        )
        crc, flushed = 0, 0
        for start, stop in _block_ranges(0, data_start):
            crc = digests.crc(self._copy_range(file, start, stop), crc)
        if f"{crc:016x}" != header_crc:
            raise IntegrityError(
                f"{self._path(file)}: its header has CRC {crc:016x}, expected {header_crc}: "
                "it is not copied"
            )
        for name, entry in entries.items():
            expected = digests_by_key[part, name]
            if expected is None or len(expected) != digests.block_count(entry.stop - entry.start):
                raise IntegrityError(
                    f"{self._path(file)}: {part}:{name} has no digests, expected one for each block"
                )
            for block, (start, stop) in enumerate(_block_ranges(entry.start, entry.stop)):
                actual = digests.crc(self._copy_range(file, start, stop))
                if actual != expected[block]:
                    raise IntegrityError(
                        f"{self._path(file)}: block {block} of {part}:{name} has CRC "
                        f"{actual:016x}, expected {expected[block]:016x}: it is not copied"
                    )
                if stop - flushed >= _FLUSH_NBYTES:
                    self._storage.start_flush(
                        f"{self._target_folder}/{file}", flushed, stop - flushed
                    )
                    flushed = stop
        self._finish_file(file)

    def copy_extra_files(self, subfolder: str, copied: set[str]) -> None:
        """Copy files that a trainer or a user added, which have no digests."""
        for name, path, is_folder in _scan_folder(
            os.path.join(self._source.root, subfolder), subfolder
        ):
            is_interrupted_repair = (
                not subfolder and not is_folder and name.startswith(names.REPAIR_TMP)
            )
            if name in copied or is_interrupted_repair:
                continue
            if is_folder:
                self._storage.make_folder(f"{self._target_folder}/{name}")
                self.copy_extra_files(name, copied)
                if self._fsync:
                    self._storage.sync_folder(f"{self._target_folder}/{name}")
                continue
            size = os.path.getsize(path)
            for start, stop in _block_ranges(0, size):
                self._copy_range(name, start, stop)
            if size == 0:
                self._storage.resize(f"{self._target_folder}/{name}", 0)
            self._finish_file(name)

    def _copy_range(self, file: str, start: int, stop: int) -> memoryview:
        """Read a range, write it and return it; valid until the next call.

        A damaged range is written as well, but never published.
        """
        view = self._buffer[: stop - start]
        self._source.read_at(file, start, view)
        self._write(file, start, view)
        return view

    def _write(self, file: str, start: int, view: memoryview) -> None:
        self._storage.write_at(f"{self._target_folder}/{file}", start, [view])
        self.nbytes += len(view)
        self._on_progress(len(view))

    def _finish_file(self, file: str) -> None:
        self._source.close()  # keep one file open at a time
        if self._fsync:
            self._storage.sync(f"{self._target_folder}/{file}")
            self._on_progress(0)

    def _path(self, file: str) -> str:
        return f"{self._source.root}/{file}"


def _block_ranges(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Split [start, stop) into blocks; a tensor's blocks begin at its first byte."""
    for low in range(start, stop, digests.BLOCK_NBYTES):
        yield low, min(low + digests.BLOCK_NBYTES, stop)


def _scan_folder(folder: str, subfolder: str) -> Iterator[tuple[str, str, bool]]:
    """Yield (name below the checkpoint, path, is folder) of files, links to files, and folders."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda item: item.name):
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder or entry.is_file():
                yield (
                    os.path.join(subfolder, entry.name) if subfolder else entry.name,
                    entry.path,
                    is_folder,
                )


def _file_sizes(source: str) -> Iterator[int]:
    for folder, _, files in os.walk(source):
        for path in (os.path.join(folder, file) for file in files):
            if os.path.exists(path):
                yield os.stat(path).st_size
