"""Repairs a damaged checkpoint folder from copies of the same save, one verified file at a time.

How data could be lost; each case has a test in tests/engine/repair:
- Good bytes are overwritten by bad ones, of a damaged source or of another save. Every byte written
  has the CRC that the folder's own manifest leads to, and is written from the memory that was
  compared. A source of another save is refused.
- The wrong manifest is installed and the right files are overwritten by it. A manifest is never
  written: without its own valid one, a folder is not repaired.
- A crash or a full disk leaves half a file. It is written to a temporary file, made durable, and
  renamed.
- A newer save replaces the folder meanwhile. The rename is relative to the folder that was locked.
- A part that was deleted on purpose comes back, an unfinished save is taken for a damaged one, or
  two repairs interfere: none of this happens.
- A file that cannot be repaired is modified. A file is repaired as a whole or left unchanged.

Readers may continue: a repaired file is the one they expect. The folder is locked against removal.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import TypeVar

from unified_ckpt.core.keywords import checked_path
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import (
    MAX_SHOWN,
    count_text,
    first_items,
    format_ranks,
    human_size,
    step_text,
)
from unified_ckpt.engine.cluster.storage import ShardReader
from unified_ckpt.engine.folder.if_exists import check_not_run_folder
from unified_ckpt.engine.folder.publish.commit import finish_commit, read_pending
from unified_ckpt.engine.folder.stored_files import (
    check_free_space,
    check_size,
    error_text,
    read_file,
)
from unified_ckpt.engine.folder.verified_file import (
    Block,
    Header,
    Range,
    blocks_of,
    read_block,
    read_part_header,
    write_ranges,
)
from unified_ckpt.engine.repair.copies import (
    FolderCopy,
    Notes,
    open_source,
    open_target,
    parse_digests,
)
from unified_ckpt.engine.repair.shards import assemble_block, open_shards
from unified_ckpt.errors import CheckpointError, NotFoundError, StorageError
from unified_ckpt.format import digests, index, names
from unified_ckpt.format.manifest import Part
from unified_ckpt.format.manifest_fields import DigestFile, FileRecord, IndexFile, NamedFile
from unified_ckpt.runtime.objects.registry import is_bucket_url, use_storage_options
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.storage.locks import repair_lock, shared_lock
from unified_ckpt.runtime.storage.paths import absolute_path, writable_path
from unified_ckpt.runtime.storage.protocol import Reader
from unified_ckpt.runtime.storage.regular_files import is_folder
from unified_ckpt.runtime.storage.roots import open_parent, open_reader
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.storage_options import StorageOptions

Path = str | os.PathLike[str]
Progress = Callable[[int], object]  # called with the bytes of tensors that were scanned
_Result = TypeVar("_Result")

_HEADROOM_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The result of a repair, in sentences.

    `damage`: damage before the repair. `repaired`: the files that were replaced. `problems`:
    remaining damage, and what would help. `notes`: damage of the sources, and files left unchanged.
    `nbytes`: bytes written.
    """

    path: str
    save_id: str
    damage: tuple[str, ...]
    repaired: tuple[str, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    nbytes: int

    @property
    def ok(self) -> bool:
        """Whether no damage remains."""
        return not self.problems

    def __str__(self) -> str:
        result = "repaired" if self.repaired else "nothing to repair"
        if self.problems:
            result = f"damaged, {count_text(len(self.problems), 'problem')}: {self.problems[0]}"
        found = f"{count_text(len(self.damage), 'problem')} found"
        written = f"{count_text(len(self.repaired), 'file')}, {human_size(self.nbytes)} written"
        return "\n  ".join([self.path, result, f"{found}; {written}"])


def repair(
    path: Path,
    sources: Sequence[Path] = (),
    *,
    progress: Progress | None = None,
    storage_options: StorageOptions | None = None,
) -> RepairReport:
    """Repair the checkpoint folder at a local path from other folders of the same save.

    `sources`: local paths or fsspec URLs. They may be damaged too, but need a valid manifest, as
    does the folder itself. Without sources, only indexes and files of the wrong length can be
    repaired.
    `progress`: called with the number of bytes scanned. `storage_options`: as in `save`.

    Raises NotFoundError, FormatError, StorageError, MismatchError, IntegrityError or
    IncompleteError if nothing was changed. After a StorageError some files may be repaired; no
    other file has changed.

    Files in a bucket are not repaired. There, this call finishes an unfinished commit, or raises
    StorageError.
    """
    source_paths = [absolute_path(checked_path(source, "sources")) for source in sources]
    url = absolute_path(checked_path(path))
    use_storage_options([url, *source_paths], storage_options)
    if is_bucket_url(url):
        return _finish_commit(url)
    storage = LocalStorage(os.path.realpath(writable_path(checked_path(path))))
    _check_folder(storage)
    with ExitStack() as resources:
        resources.callback(storage.close)
        folder = resources.enter_context(repair_lock(storage.root))
        resources.enter_context(shared_lock(storage.root))
        target = open_target(storage)
        copies = []
        for source in source_paths:
            opened = open_reader(source)
            resources.callback(opened.close)
            if isinstance(opened, LocalStorage):
                _check_folder(opened)
                if os.path.samefile(opened.root, storage.root):
                    raise StorageError(
                        f"{opened.root}: is the folder to repair; pass another copy of it"
                    )
                resources.enter_context(shared_lock(opened.root))
            copies.append(open_source(opened, target))
        return FolderRepair(storage, target, copies, folder, progress or (lambda _: None)).run()


def _finish_commit(url: str) -> RepairReport:
    """Finish the unfinished commit of a checkpoint in a bucket. StorageError without one."""
    storage, name = open_parent(url)
    assert isinstance(storage, ObjectStorage)
    pending = read_pending(storage, name)
    if pending is None:
        raise StorageError(
            f"{url}: got a URL, expected a local folder: files in a bucket are not repaired in "
            "place; save or convert the checkpoint again"
        )
    finish_commit(storage, pending)
    damage = f"the commit of save {pending.record.save_id} was unfinished"
    save_id = pending.record.save_id
    return RepairReport(storage.path(name), save_id, (damage,), (names.MANIFEST,), (), (), 0)


def _check_folder(storage: LocalStorage) -> None:
    if not is_folder(storage.root):
        problem = (
            "got a file, expected a checkpoint folder" if storage.kind("") else "does not exist"
        )
        raise NotFoundError(f"{storage.root}: {problem}")
    if storage.kind(names.MANIFEST) is None:
        check_not_run_folder(storage)


class FolderRepair:
    """One repair of a folder that the caller has locked. Runs once.

    `folder` identifies it, in case it is replaced. A StorageError ends the repair; what no copy has
    intact is listed in the report's problems.
    """

    def __init__(
        self,
        storage: LocalStorage,
        target: FolderCopy,
        sources: Sequence[FolderCopy],
        folder: os.stat_result,
        progress: Progress,
    ) -> None:
        self._storage, self._target, self._sources = storage, target, sources
        self._folder, self._progress = folder, progress
        self._block_crcs: Mapping[Key, Sequence[int]] = {}
        self._damage: list[str] = []
        self._repaired: list[str] = []
        self._problems: list[str] = []
        self._notes: Notes = {}
        self._nbytes = 0

    def run(self) -> RepairReport:
        """Replace every damaged file of which all bytes are available."""
        manifest = self._target.manifest
        file_names = set(self._storage.names())
        for name in file_names:  # of an interrupted repair
            if name.startswith(names.REPAIR_TMP) and self._storage.kind(name) == "file":
                with suppress(NotFoundError):  # another node removes its marker
                    self._storage.remove_file(name)
        for record in manifest.auxiliary_files():
            body = self._repair_small_file(record.file, record)
            if isinstance(record, DigestFile) and body is not None:
                self._block_crcs = parse_digests(body, record)
        if manifest.digests is None or not manifest.digests.is_supported:
            reason = "the save has no digests of a known algorithm"
            self._notes[f"{reason}: only sizes and headers were checked"] = None
        for part, part_record in manifest.parts.items():
            if not manifest.is_deleted(part, file_names.__contains__):
                self._repair_part(part, part_record)
            elif part_record.files:
                reason = "neither its index nor any of its files exists"
                self._notes[f"part {part}: {reason}: it was deleted, and is not restored"] = None
        return RepairReport(
            self._storage.root,
            manifest.save_id,
            tuple(self._damage),
            tuple(self._repaired),
            tuple(self._problems),
            tuple(self._notes),
            self._nbytes,
        )

    def _repair_part(self, part: str, record: Part) -> None:
        weight_map: dict[str, str] = {}
        for file, file_record in record.files.items():
            header = self._repair_part_file(part, file, file_record)
            weight_map |= dict.fromkeys(header.entries, file) if header is not None else {}
        rebuilt = index.encode_index(total_size=record.total_nbytes, weight_map=weight_map)
        if record.index is not None:
            self._repair_small_file(names.index_name(part), record.index, rebuilt=rebuilt)
        if record.exceptions is not None:
            self._repair_small_file(record.exceptions.file, record.exceptions)

    def _lookup(self, file: str, read: Callable[[Reader], _Result]) -> tuple[_Result | None, str]:
        """Return what `read` returns of the folder or else of a source, and the folder's damage."""
        try:
            return read(self._storage), ""
        except CheckpointError as error:
            damage = error_text(error, self._storage)
        for source in self._sources:
            if source.crcs.get(file) == self._target.crcs[file]:
                try:
                    return read(source.storage), damage
                except CheckpointError as error:
                    text = error_text(error, source.storage)
                    self._notes[f"{source.storage.root}: is damaged too: {text}"] = None
        return None, damage

    def _repair_small_file(
        self, file: str, record: NamedFile | DigestFile | IndexFile, *, rebuilt: bytes | None = None
    ) -> bytes | None:
        """Repair a file that has one CRC, and return its bytes. `rebuilt`: what they may be."""
        body, damage = self._lookup(file, partial(read_file, file=file, record=record))
        if not damage:
            return body
        self._damage.append(damage)
        if body is None and rebuilt is not None and f"{digests.crc(rebuilt):016x}" == record.crc:
            body = rebuilt
        if body is None:
            self._add_problem(damage, "no copy of it is intact")
        else:
            self._replace_file(file, len(body), [(0, body)])
        return body

    def _repair_part_file(self, part: str, file: str, record: FileRecord) -> Header | None:
        """Repair a file of tensors, and return its header if any copy has it intact."""
        header, header_damage = self._lookup(
            file, partial(read_part_header, file=file, record=record)
        )
        blocks = blocks_of(part, header, self._block_crcs) if header is not None else None
        damage = [header_damage] if header_damage else []
        damaged: list[Block] = []
        for block in blocks or ():
            try:
                read_block(self._storage, file, block)
            except CheckpointError as error:
                damaged.append(block)
                damage.append(error_text(error, self._storage))
            self._progress(block.nbytes)
        try:
            check_size(self._storage, file, record.nbytes)
        except CheckpointError as error:
            damage = [error_text(error, self._storage)]  # which explains the others
        self._damage += damage
        if damage:
            try:
                ranges = self._verified_ranges(file, header, blocks, damaged)
                self._replace_file(file, record.nbytes, ranges)
            except _UnavailableError as error:
                self._add_problem(damage[0], str(error))
        return header

    def _verified_ranges(
        self,
        file: str,
        header: Header | None,
        blocks: Sequence[Block] | None,
        damaged: Sequence[Block],
    ) -> Iterator[Range]:
        """Yield (first byte, bytes) of the intact file; _UnavailableError if a byte is in no copy.

        Damaged blocks come first: mostly, nothing is written if one is unavailable.
        """
        if header is None:
            raise _UnavailableError("no copy of its header is intact")
        if blocks is None:
            raise _UnavailableError("no intact digests prove its bytes")
        excluded = set(damaged)
        for group in (damaged, [block for block in blocks if block not in excluded]):
            unavailable: list[str] = []
            for block in group:
                body = self._intact_block(file, block)
                if body is None:
                    unavailable.append(str(block))
                elif not unavailable:
                    yield block.start, body
            if unavailable:
                raise _UnavailableError(f"no copy has {first_items(unavailable, MAX_SHOWN)}")
        yield 0, header.body

    def _intact_block(self, file: str, block: Block) -> bytearray | None:
        """Return a block of the folder, of a source, or assembled from other nodes' folders."""
        body, _ = self._lookup(file, partial(read_block, file=file, block=block))
        if body is None and self._sharded is not None:
            body = assemble_block(self._sharded, block, self._notes)
        return body if body is not None and digests.crc(body) == block.crc else None

    @cached_property
    def _sharded(self) -> ShardReader | None:
        return open_shards([source.storage for source in self._sources], self._notes)

    def _add_problem(self, damage: str, reason: str) -> None:
        manifest = self._target.manifest
        save = f"save {manifest.save_id} ({step_text(manifest.step)})"
        advice = f"add another copy of {save}"
        if (group := manifest.node_group) is not None:
            advice = (
                f"add a copy of this folder, number {group.number} of {group.count} of {save}, by "
                f"rank(s) {format_ranks(group.ranks)}, or folders of other nodes that have the "
                "same elements"
            )
        searched = ", ".join(copy.storage.root for copy in self._sources) or "no source"
        self._problems.append(f"{damage}; {reason}; {advice}; searched: {searched}")

    def _replace_file(self, file: str, nbytes: int, ranges: Iterable[Range]) -> None:
        """Write a temporary file, and rename it over the old one."""
        storage, iterator = self._storage, iter(ranges)
        first_range = next(iterator)  # raises before anything is written
        check_free_space(storage, file, nbytes + _HEADROOM_NBYTES, "a new copy")
        tmp_name = f"{names.REPAIR_TMP}{file}-{secrets.token_hex(4)}"
        try:
            ranges = chain([first_range], iterator)
            write_ranges(storage, tmp_name, ranges, lambda _: self._progress(0))
            storage.replace(tmp_name, file, folder=self._folder)
        except BaseException:
            with suppress(CheckpointError, OSError):
                storage.close()
            with suppress(CheckpointError, OSError):
                storage.remove_file(tmp_name)
            raise
        storage.close()  # the next reader opens the new file
        self._repaired.append(file)
        self._nbytes += nbytes


class _UnavailableError(Exception):
    """No folder has what a file needs."""
