"""A committed checkpoint, copied to another root as a commit of its own: the same save, proved byte by byte on the way.

What is written is what was checked: each range is read once, compared with the manifest's digests, and that very memory is written.
Knows one whole folder and one target; not when to copy, and nothing of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from unified_ckpt.engine.folder import commit
from unified_ckpt.engine.folder.backup import clean_up, own_files
from unified_ckpt.engine.folder.reader import Folder, open_path
from unified_ckpt.engine.folder.verify import verify_folder
from unified_ckpt.errors import IncompleteError, IntegrityError
from unified_ckpt.format import digests, names
from unified_ckpt.format.manifest import Manifest, parse_manifest
from unified_ckpt.runtime.storage.storage import LocalStorage

Beat = Callable[
    [int], object
]  # called with the bytes of each range that was written; what it raises ends the copy

_FLUSH_NBYTES = (
    32 << 20
)  # of a file, after which the kernel is asked to begin writing them to the disk


@dataclass(frozen=True, slots=True)
class Transferred:
    """`nbytes` written; 0 where the name holds a checkpoint already, which stays: `save_id` is that one's, `other`: of another save."""

    save_id: str
    nbytes: int
    other: bool = False


def transfer(
    source: str, storage: LocalStorage, name: str, *, if_exists: str, fsync: bool, beat: Beat
) -> Transferred:
    """Copies the checkpoint folder `source` to `name` under the storage's root, in a few MiB of memory. Any rank, any thread.

    Every file of the folder goes with it, a link to a file as that file, a link to a folder not; nor what is added after it has begun.
    Where the same save is committed there, nothing is done; `if_exists` is for another one. Nobody who asks removes the source meanwhile.

    IntegrityError or IncompleteError where the source is not whole: it is never committed then. NotFoundError where it is gone,
    StorageError where it cannot be read or written. What was at `name` is as it was after any error, and nothing is left beside it.
    """
    folder = open_path(source, hold=True)
    try:
        manifest, written = _check_source(folder)
        target = commit.Target(
            name, if_exists, manifest.parts, step_name=True
        )  # only a manager copies
        present = commit.check_way(storage, target)
        stays = commit.check_copy_target(storage, target, save_id=manifest.save_id)
        if stays is not None:
            return Transferred(stays.save_id, 0, other=stays.save_id != manifest.save_id)
        construction = commit.begin(
            storage, name, save_id=None, present=present
        )  # an id of its own: a copy that was cut off may lie there
        try:
            commit.check_room(storage, construction, sum(_sizes(source)))
            nbytes = _fill(folder, manifest, storage, construction.folder, fsync=fsync, beat=beat)
            storage.put(f"{construction.folder}/{names.MANIFEST}", written, fsync=fsync)
            published = commit.publish(storage, construction, target, fsync=fsync)
        except BaseException:
            commit.abandon(storage, construction)
            raise
        clean_up(storage, published, fsync=fsync)
        return Transferred(manifest.save_id, nbytes)
    finally:
        folder.close()
        storage.close()


def _check_source(folder: Folder) -> tuple[Manifest, bytes]:
    """The manifest and its bytes, of a folder that is whole as far as sizes, headers and names tell."""
    root = folder.storage.root
    written = folder.storage.read(names.MANIFEST)
    manifest = parse_manifest(written, file=f"{root}/{names.MANIFEST}")
    if folder.manifest is None or manifest != folder.manifest:
        raise IntegrityError(f"{root}: changed while it was opened; needed a committed checkpoint")
    if manifest.island is not None:
        raise IncompleteError(
            f"{root}: holds what one machine wrote of {manifest.island.count}; needed a folder with all of the save"
        )
    problems = verify_folder(folder, deep=False).problems
    if problems:
        raise IntegrityError(
            f"{root}: is not copied: {problems[0]}{f' (and {len(problems) - 1} more)' if len(problems) > 1 else ''}"
        )
    return manifest, written


def _fill(
    folder: Folder, manifest: Manifest, storage: LocalStorage, into: str, *, fsync: bool, beat: Beat
) -> int:
    """Writes everything but the manifest; returns the bytes."""
    copy = Copy(folder, storage, into, fsync, beat)
    for single in manifest.singles():
        copy.single(single.file, single.nbytes, single.crc)
    for part in folder.parts:
        if (record := manifest.parts[part].index) is not None:
            copy.single(names.index_name(part), record.nbytes, record.crc)
        for file, of in manifest.parts[part].files.items():
            copy.tensors(part, file, of.header_crc)
    copy.others("", own_files(manifest) - {names.REPLICAS})
    storage.remove_file(f"{into}/{commit.PROBE}")
    return copy.nbytes


class Copy:
    """Of one folder to another, file by file. Holds one buffer of a block. `beat`: called for each block that is written."""

    def __init__(
        self, folder: Folder, storage: LocalStorage, into: str, fsync: bool, beat: Beat
    ) -> None:
        self._folder, self._source, self._storage, self._into = (
            folder,
            folder.storage,
            storage,
            into,
        )
        self._fsync, self._beat = fsync, beat
        self._buffer = memoryview(bytearray(digests.BLOCK_NBYTES))
        self.nbytes = 0

    def single(self, file: str, nbytes: int, needed: str) -> None:
        """A file that has one CRC of all its bytes."""
        crc = 0
        for start, stop in _ranges(0, nbytes):
            crc = digests.crc(self._move(file, start, stop), crc)
        if f"{crc:016x}" != needed:
            raise IntegrityError(
                f"{self._where(file)}: has CRC {crc:016x}; needed {needed}: it is not copied"
            )
        self._end(file)

    def tensors(self, part: str, file: str, header_crc: str) -> None:
        """A file of a part: its header by its CRC, its tensors by those of their blocks. Together they are all of its bytes."""
        entries = self._folder.header(file)
        saved = self._folder.block_digests([(part, name) for name in entries])
        first = min(
            (entry.start for entry in entries.values()), default=self._source.size(file) or 0
        )
        crc, flushed = 0, 0
        for start, stop in _ranges(0, first):
            crc = digests.crc(self._move(file, start, stop), crc)
        if f"{crc:016x}" != header_crc:
            raise IntegrityError(
                f"{self._where(file)}: its header has CRC {crc:016x}; needed {header_crc}: it is not copied"
            )
        for name, entry in entries.items():
            needed = saved[part, name]
            if needed is None or len(needed) != digests.block_count(entry.stop - entry.start):
                raise IntegrityError(
                    f"{self._where(file)}: {part}:{name} has no digests to check it by; needed those of every block"
                )
            for block, (start, stop) in enumerate(_ranges(entry.start, entry.stop)):
                found = digests.crc(self._move(file, start, stop))
                if found != needed[block]:
                    raise IntegrityError(
                        f"{self._where(file)}: block {block} of {part}:{name} has CRC {found:016x}; needed {needed[block]:016x}: "
                        "it is not copied"
                    )
                if stop - flushed >= _FLUSH_NBYTES:
                    self._storage.start_flush(f"{self._into}/{file}", flushed, stop - flushed)
                    flushed = stop
        self._end(file)

    def others(self, below: str, done: set[str]) -> None:
        """What a trainer or a person has added, which nothing proves."""
        for name, path, is_folder in _entries(os.path.join(self._source.root, below), below):
            if name in done or (
                not below and not is_folder and name.startswith(names.MENDING)
            ):  # the latter: of a repair that was cut off
                continue
            if is_folder:
                self._storage.make_folder(f"{self._into}/{name}")
                self.others(name, done)
                if self._fsync:
                    self._storage.sync_folder(f"{self._into}/{name}")
                continue
            size = os.path.getsize(path)
            for start, stop in _ranges(0, size):
                self._move(name, start, stop)
            if size == 0:
                self._storage.resize(f"{self._into}/{name}", 0)
            self._end(name)

    def _move(self, file: str, start: int, stop: int) -> memoryview:
        """Reads a range and writes it; returns it, until the next one. A damaged one is written too, and never published."""
        held = self._buffer[: stop - start]
        self._source.read_at(file, start, held)
        self._write(file, start, held)
        return held

    def _write(self, file: str, start: int, held: memoryview) -> None:
        self._storage.write_at(f"{self._into}/{file}", start, [held])
        self.nbytes += len(held)
        self._beat(len(held))

    def _end(self, file: str) -> None:
        self._source.close()  # one file is open at a time
        if self._fsync:
            self._storage.sync(f"{self._into}/{file}")
            self._beat(0)

    def _where(self, file: str) -> str:
        return f"{self._source.root}/{file}"


def _ranges(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Block by block, from `start`: a tensor's blocks begin at its first byte."""
    for low in range(start, stop, digests.BLOCK_NBYTES):
        yield low, min(low + digests.BLOCK_NBYTES, stop)


def _entries(folder: str, below: str) -> Iterator[tuple[str, str, bool]]:
    """(name below the checkpoint, path, whether a folder) of files, and of links to files, and of folders. Sockets and the like are not."""
    with os.scandir(folder) as found:
        for entry in sorted(found, key=lambda one: one.name):
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder or entry.is_file():
                yield (
                    os.path.join(below, entry.name) if below else entry.name,
                    entry.path,
                    is_folder,
                )


def _sizes(source: str) -> Iterator[int]:
    for folder, _, files in os.walk(source):
        for path in (os.path.join(folder, file) for file in files):
            if os.path.exists(path):
                yield os.stat(path).st_size
