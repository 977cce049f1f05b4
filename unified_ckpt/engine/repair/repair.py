"""Repairs a damaged checkpoint folder from copies of the same save, one verified file at a time.

How data could be lost; each case has a test in tests/engine/repair:
- Good bytes are overwritten by bad ones, of a damaged source or of another save. Every byte written
  has the CRC that the folder's own manifest leads to, and is written from the memory that was
  compared. A source of another save is refused.
- The wrong manifest is installed and the right files are overwritten by it. A folder's valid
  manifest is never replaced, and one that differs from its copy's is refused. A folder without one
  takes a copy's only if its own digests, or all existing files, prove its origin; it is then
  written last.
- A crash or a full disk leaves half a file. It is written to a temporary file, made durable, and
  renamed.
- A newer save replaces the folder meanwhile. The rename is relative to the folder that was scanned.
- A part that was deleted on purpose comes back, an unfinished save is taken for a damaged one, or
  two repairs interfere: none of this happens.
- A file that cannot be repaired is modified. A file is repaired as a whole or left unchanged.

Readers may continue: a repaired file is the one they expect. The folder is locked against removal.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

from unified_ckpt.core.text import MAX_SHOWN, format_ranks
from unified_ckpt.engine.repair.expected import (
    Expected,
    FolderCopy,
    collect_expected,
    inspect_copy,
    resolve_manifest,
)
from unified_ckpt.engine.repair.recover import BlockRecovery
from unified_ckpt.engine.repair.scan import Damage, Progress, scan_folder
from unified_ckpt.errors import FormatError, IntegrityError, NotFoundError, StorageError
from unified_ckpt.format import digests, names
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.runtime.storage.locks import repair_lock, shared_lock
from unified_ckpt.runtime.storage.storage import (
    LocalStorage,
    Reader,
    absolute_path,
    open_reader,
    writable_path,
)

Path = str | os.PathLike[str]

_HEADROOM_NBYTES = 1 << 20
_PRECHECK_BLOCKS = 256  # up to this many damaged blocks are located before writing


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a repair found and did, in sentences.

    `damage` is what was wrong, `repaired` the files that were replaced, `problems` what is still
    wrong and what would help. `notes` describes damage of the sources and what was left unchanged.
    `nbytes` were written.
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
        """Whether nothing is wrong any more."""
        return not self.problems


def repair(
    path: Path, sources: Sequence[Path] = (), *, progress: Progress | None = None
) -> RepairReport:
    """Repair the checkpoint folder at a local path from other folders of the same save.

    Sources are local paths or fsspec URLs, and may be damaged too. Without sources, repairs what
    the folder itself can restore: indexes and digests. `progress` is called with the bytes scanned.

    NotFoundError, FormatError, StorageError, MismatchError, IntegrityError or IncompleteError if
    nothing was changed. After a StorageError some files may have been repaired; none is worse than
    before.
    """
    storage = LocalStorage(os.path.realpath(writable_path(os.fspath(path))))
    _check_folder(storage)
    with ExitStack() as resources:
        resources.callback(storage.close)
        folder = resources.enter_context(repair_lock(storage.root))
        resources.enter_context(shared_lock(storage.root))
        readers: list[Reader] = []
        for source in [os.fspath(source_path) for source_path in sources]:
            opened = open_reader(absolute_path(source))
            resources.callback(opened.close)
            if isinstance(opened, LocalStorage):
                _check_folder(opened)
                if os.path.samefile(opened.root, storage.root):
                    raise StorageError(
                        f"{opened.root}: is the folder to repair; give another copy of it"
                    )
                resources.enter_context(shared_lock(opened.root))
            readers.append(opened)
        return repair_folder(storage, readers, folder=folder, progress=progress)


def _check_folder(storage: LocalStorage) -> None:
    if not os.path.isdir(storage.root):
        problem = (
            "got a file, expected a checkpoint folder" if storage.kind("") else "does not exist"
        )
        raise NotFoundError(f"{storage.root}: {problem}")


def repair_folder(
    storage: LocalStorage,
    sources: Sequence[Reader],
    *,
    folder: os.stat_result,
    progress: Progress | None = None,
) -> RepairReport:
    """Repair a folder that the caller has locked.

    `folder` identifies it, in case it is replaced.
    """
    target = inspect_copy(storage)
    file_names = storage.names()
    if names.is_staging(os.path.split(storage.root)[1]) or names.MARKER in file_names:
        raise FormatError(
            f"{storage.root}: got an unfinished save, expected a committed checkpoint"
        )
    copies = [inspect_copy(source) for source in sources]
    resolved = resolve_manifest(target, copies)
    expected = collect_expected(resolved.manifest, storage, copies)
    recovery = BlockRecovery(expected, target, copies)
    recovery.rebuild_digests()
    damages = list(scan_folder(storage, expected, progress or (lambda _: None)))
    if not resolved.proven:
        _check_same_save(target, expected, damages)
    if target.manifest is None:
        damages.append(Damage(names.MANIFEST, [target.problem], missing=target.body is None))
        expected.auxiliary_files[names.MANIFEST] = resolved.body
    folder_repair = _FolderRepair(
        storage,
        expected,
        recovery,
        folder,
        _missing_source_advice(resolved.manifest, copies),
        progress or (lambda _: None),
    )
    folder_repair.remove_stale(file_names)
    for damaged_file in damages:
        if damaged_file.file == names.MANIFEST and folder_repair.problems:
            folder_repair.problems.append(
                f"{damaged_file.file}: is written once everything that it describes is intact"
            )
            continue
        folder_repair.repair_file(damaged_file)
    damage = tuple(message for damaged_file in damages for message in damaged_file.messages)
    notes = (*_notes(target, copies, expected), *recovery.damage)
    return RepairReport(
        storage.root,
        expected.manifest.save_id,
        damage,
        tuple(folder_repair.repaired),
        tuple(folder_repair.problems),
        notes,
        folder_repair.nbytes,
    )


def _check_same_save(target: FolderCopy, expected: Expected, damages: Sequence[Damage]) -> None:
    """Check that a folder without manifest and digests has only intact files of this save."""
    messages = [
        message
        for damaged_file in damages
        if not damaged_file.missing
        for message in damaged_file.messages
    ]
    files = {
        file
        for part in expected.parts
        for file in expected.manifest.parts[part].files
        if file in expected.headers
    }
    intact = files - {damaged_file.file for damaged_file in damages}
    if messages or not intact or not expected.block_crcs:
        reason = messages[0] if messages else "no tensor file is intact"
        raise IntegrityError(
            f"{target.problem}; nothing proves that this folder is of save "
            f"{expected.manifest.save_id}: {reason}; restore its {names.DIGESTS}, or "
            "provide intact files; nothing was changed"
        )


def _missing_source_advice(manifest: Manifest, copies: Sequence[FolderCopy]) -> str:
    """Say which source would help."""
    node_group, searched = manifest.node_group, ", ".join(copy.storage.root for copy in copies)
    text = f"add another copy of save {manifest.save_id} (step {manifest.step})"
    if node_group is not None:
        text = (
            f"add a copy of this folder, number {node_group.number} of {node_group.count} of save "
            f"{manifest.save_id} (step {manifest.step}), by "
            f"rank(s) {format_ranks(node_group.ranks)}, or folders of other nodes that have the "
            "same elements"
        )
    return f"{text}; searched: {searched or 'no source'}"


def _notes(target: FolderCopy, copies: Sequence[FolderCopy], expected: Expected) -> Iterator[str]:
    for part, record in expected.manifest.parts.items():
        if record.files and part not in expected.parts:
            yield (
                f"part {part}: neither its index nor any of its files exists: it was deleted, and "
                "is not restored"
            )
    for copy in copies:
        if copy.manifest is None:
            yield f"{copy.problem}; only bytes of it that {target.storage.root} proves are used"
    if expected.manifest.digests is None or not expected.manifest.digests.is_supported:
        yield "the save has no digests of a known algorithm: only sizes and headers were checked"


# repairing


class _FolderRepair:
    """Replaces files.

    A StorageError ends the repair; what is unavailable is listed in `problems`.
    """

    def __init__(
        self,
        storage: LocalStorage,
        expected: Expected,
        recovery: BlockRecovery,
        folder: os.stat_result,
        advice: str,
        progress: Progress,
    ) -> None:
        self._storage = storage
        self._expected = expected
        self._recovery = recovery
        self._folder = folder
        self._advice = advice
        self._progress = progress
        self.repaired: list[str] = []
        self.problems: list[str] = []
        self.nbytes = 0

    def remove_stale(self, file_names: Sequence[str]) -> None:
        """Remove temporary files of an interrupted repair."""
        for name in file_names:
            if name.startswith(names.REPAIR_TMP) and self._storage.kind(name) == "file":
                self._storage.remove_file(name)

    def repair_file(self, damaged_file: Damage) -> None:
        """Replace a damaged file, or record why that is impossible."""
        try:
            self._replace_file(damaged_file.file, self._verified_ranges(damaged_file))
        except _UnavailableError as error:
            self.problems.append(f"{damaged_file.messages[0]}; {error}; {self._advice}")
            return
        self.repaired.append(damaged_file.file)

    def _verified_ranges(self, damaged_file: Damage) -> Iterator[tuple[int, bytes]]:
        """Yield (first byte, bytes) of the intact file. _UnavailableError if there is no copy."""
        file, part, expected = damaged_file.file, damaged_file.part, self._expected
        if part is None:
            if file not in expected.auxiliary_files:
                raise _UnavailableError("no copy has that CRC")
            yield 0, expected.auxiliary_files[file]
        elif file not in expected.headers:
            raise _UnavailableError("no copy of its header is intact")
        elif any(
            (part, name) not in expected.block_crcs
            for name, entry in expected.headers[file].entries.items()
            if entry.stop > entry.start
        ):
            raise _UnavailableError("no digests prove its bytes")
        else:
            if len(damaged_file.blocks) <= _PRECHECK_BLOCKS:
                self._check_available(damaged_file, part)
            yield 0, expected.headers[file].body
            for name, entry in expected.headers[file].entries.items():
                for block in range(digests.block_count(entry.stop - entry.start)):
                    body = self._recovery.block(part, name, file, block)
                    if body is None:
                        self._check_available(damaged_file, part)
                        raise _UnavailableError(f"no copy has block {block} of {part}:{name}")
                    yield entry.start + block * digests.BLOCK_NBYTES, body

    def _check_available(self, damaged_file: Damage, part: str) -> None:
        unavailable = [
            f"{part}:{name} block {block}"
            for name, block in damaged_file.blocks
            if self._recovery.block(part, name, damaged_file.file, block) is None
        ]
        if unavailable:
            more = (
                f" and {len(unavailable) - MAX_SHOWN} more" if len(unavailable) > MAX_SHOWN else ""
            )
            raise _UnavailableError(f"no copy has {', '.join(unavailable[:MAX_SHOWN])}{more}")

    def _replace_file(self, file: str, ranges: Iterator[tuple[int, bytes]]) -> None:
        """Write a temporary file, sync it, and rename it over the old one."""
        storage = self._storage
        tmp_name = f"{names.REPAIR_TMP}{file}-{secrets.token_hex(4)}"
        nbytes = 0
        first_range = next(ranges)  # raises before anything is written
        file_sizes = {
            name: record.nbytes
            for part in self._expected.manifest.parts.values()
            for name, record in part.files.items()
        }
        free = storage.free_nbytes()
        needed_nbytes = file_sizes.get(file, len(first_range[1])) + _HEADROOM_NBYTES
        if free < needed_nbytes:
            raise StorageError(
                f"{storage.path(file)}: {free} bytes free, expected {needed_nbytes} for a new "
                "copy; free some space"
            )
        try:
            for start, body in chain([first_range], ranges):
                storage.write_at(tmp_name, start, [memoryview(body)])
                nbytes += len(body)
                self._progress(0)
            storage.sync(tmp_name)
            storage.replace(tmp_name, file, folder=self._folder)
        except BaseException:
            storage.close()
            if storage.kind(tmp_name) == "file":
                storage.remove_file(tmp_name)
            raise
        storage.sync_folder("")
        storage.close()  # the next reader opens the new file
        self._recovery.close()
        self.nbytes += nbytes


class _UnavailableError(Exception):
    """No folder has what a file needs."""
