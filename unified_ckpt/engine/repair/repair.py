"""A damaged checkpoint folder, mended from copies of the same save: file by file, each proved whole
before it is put in.

How data could be lost, each of which is a test in tests/test_repair.py:
- good bytes go under bad ones, of a damaged source or of another save. Every byte that is written
  has the CRC that the folder's own manifest leads to, and is written from the memory in which it
  was compared; a source of another save is refused;
- the wrong manifest is put in, and by it the right files are overwritten. A folder's own valid
  manifest is never replaced, one that differs from that of its copy is refused, and a folder
  without one takes a copy's only where its own digests, or all that is there, prove whose it is; it
  is then written last;
- a crash or a full disk leaves half a file. It is written beside the old one as `.mending-…`,
  made durable, and renamed over it;
- the folder is replaced by a newer save meanwhile, and old bytes are put into that. The rename is
  inside the folder that was examined;
- a part that was deleted on purpose comes back, a save under construction is taken for damage,
  two repairs undo each other: none of it is done;
- what cannot be mended is touched. A file is mended whole or stays as it is.

Readers need not stop: a file that is put in is the one that they had to find. Nobody removes it
meanwhile: it is held as by a reader.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

from unified_ckpt.core.text import MAX_SHOWN, format_ranks
from unified_ckpt.engine.folder.commit import MARKER
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
_PRECHECK_BLOCKS = (
    256  # of a file: with fewer that are bad, all are looked for before anything is written
)


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a repair found and did, in sentences. `damage`: what was wrong; `repaired`: files that
    were put in; `problems`: what is wrong still, and what that needs; `notes`: what was wrong with
    the sources, and what was left alone. `nbytes`: written.
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
    """Mends the checkpoint folder at a local path from other folders of the same save, local or
    behind fsspec URLs, each as damaged as it may be. Without sources, mends what the folder itself
    proves: indexes, digests. `progress` is called with bytes examined, and with 0 for blocks
    written.

    NotFoundError, FormatError, StorageError, MismatchError, IntegrityError or IncompleteError where
    nothing was changed; after a StorageError files may have been mended, and none is worse than it
    was.
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
                        f"{opened.root}: is the folder that is to be mended; needed another copy of it"
                    )
                resources.enter_context(shared_lock(opened.root))
            readers.append(opened)
        return repair_folder(storage, readers, folder=folder, progress=progress)


def _check_folder(storage: LocalStorage) -> None:
    if not os.path.isdir(storage.root):
        problem = (
            "is a file; needed a checkpoint folder"
            if storage.kind("")
            else "there is no such folder"
        )
        raise NotFoundError(f"{storage.root}: {problem}")


def repair_folder(
    storage: LocalStorage,
    sources: Sequence[Reader],
    *,
    folder: os.stat_result,
    progress: Progress | None = None,
) -> RepairReport:
    """`repair` of a folder that nobody else mends or removes meanwhile; `folder`: what tells it
    from another one of its name.
    """
    target = inspect_copy(storage)
    file_names = storage.names()
    if names.is_staging(os.path.split(storage.root)[1]) or MARKER in file_names:
        raise FormatError(
            f"{storage.root}: is an unfinished save, which nothing can prove; needed a committed checkpoint"
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
                f"{damaged_file.file}: is put in once all that it speaks of is right"
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
    """A folder without manifest and digests is a save's if all that is there is that save's,
    tensors among it.
    """
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
        reason = messages[0] if messages else "no file of tensors is there and right"
        raise IntegrityError(
            f"{target.problem}; nothing proves that this folder is of save {expected.manifest.save_id}: {reason}; needed its {names.DIGESTS}, or "
            "files that are all right; nothing was changed"
        )


def _missing_source_advice(manifest: Manifest, copies: Sequence[FolderCopy]) -> str:
    """Who would have what nobody has."""
    node_group, searched = manifest.node_group, ", ".join(copy.storage.root for copy in copies)
    text = f"needed another copy of save {manifest.save_id} (step {manifest.step})"
    if node_group is not None:
        text = (
            f"needed a copy of this folder, number {node_group.number} of {node_group.count} of save {manifest.save_id} (step {manifest.step}), by "
            f"rank(s) {format_ranks(node_group.ranks)}, or folders of other machines that hold the same elements"
        )
    return f"{text}; asked: {searched or 'nobody'}"


def _notes(target: FolderCopy, copies: Sequence[FolderCopy], expected: Expected) -> Iterator[str]:
    for part, record in expected.manifest.parts.items():
        if record.files and part not in expected.parts:
            yield f"part {part}: neither its index nor any of its files is there: it was deleted, and stays so"
    for copy in copies:
        if copy.manifest is None:
            yield f"{copy.problem}; only bytes of it that {target.storage.root} proves are taken"
    if expected.manifest.digests is None or not expected.manifest.digests.is_supported:
        yield "the save has no digests that this version knows: sizes and headers are all that was looked at"


# putting right


class _FolderRepair:
    """Puts files in. Stops at a StorageError; what is lacking goes to `problems`."""

    def __init__(
        self,
        storage: LocalStorage,
        expected: Expected,
        recovery: BlockRecovery,
        folder: os.stat_result,
        advice: str,
        progress: Progress,
    ) -> None:
        (
            self._storage,
            self._expected,
            self._recovery,
            self._folder,
            self._advice,
            self._progress,
        ) = (
            storage,
            expected,
            recovery,
            folder,
            advice,
            progress,
        )
        self.repaired: list[str] = []
        self.problems: list[str] = []
        self.nbytes = 0

    def remove_stale(self, file_names: Sequence[str]) -> None:
        """Removes what a repair that was cut off has left."""
        for name in file_names:
            if name.startswith(names.REPAIR_TMP) and self._storage.kind(name) == "file":
                self._storage.remove_file(name)

    def repair_file(self, damaged_file: Damage) -> None:
        try:
            self._replace_file(damaged_file.file, self._verified_ranges(damaged_file))
        except _UnavailableError as error:
            self.problems.append(f"{damaged_file.messages[0]}; {error}; {self._advice}")
            return
        self.repaired.append(damaged_file.file)

    def _verified_ranges(self, damaged_file: Damage) -> Iterator[tuple[int, bytes]]:
        """(first byte, bytes) of the file as it must be, proved. _LackingError where that is not to
        be had.
        """
        file, part, expected = damaged_file.file, damaged_file.part, self._expected
        if part is None:
            if file not in expected.auxiliary_files:
                raise _UnavailableError("no copy of it has that CRC")
            yield 0, expected.auxiliary_files[file]
        elif file not in expected.headers:
            raise _UnavailableError("no copy of its header is right")
        elif any(
            (part, name) not in expected.block_crcs
            for name, entry in expected.headers[file].entries.items()
            if entry.stop > entry.start
        ):
            raise _UnavailableError("there are no digests that could prove its bytes")
        else:
            if len(damaged_file.blocks) <= _PRECHECK_BLOCKS:
                self._check_available(damaged_file, part)
            yield 0, expected.headers[file].body
            for name, entry in expected.headers[file].entries.items():
                for block in range(digests.block_count(entry.stop - entry.start)):
                    body = self._recovery.block(part, name, file, block)
                    if body is None:
                        self._check_available(damaged_file, part)
                        raise _UnavailableError(f"block {block} of {part}:{name} is not to be had")
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
        """Writes the file beside the old one, and gives it the name once it is on the disk."""
        storage, tmp_name, nbytes = (
            self._storage,
            f"{names.REPAIR_TMP}{file}-{secrets.token_hex(4)}",
            0,
        )
        first_range = next(ranges)  # nothing is written where nothing is to be had
        file_sizes = {
            name: record.nbytes
            for part in self._expected.manifest.parts.values()
            for name, record in part.files.items()
        }
        free, needed_nbytes = (
            storage.free_nbytes(),
            file_sizes.get(file, len(first_range[1])) + _HEADROOM_NBYTES,
        )
        if free < needed_nbytes:
            raise StorageError(
                f"{storage.path(file)}: {free} bytes free; needed {needed_nbytes} to write it anew beside the old one"
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
        storage.close()  # the next to read opens the new one
        self._recovery.close()
        self.nbytes += nbytes


class _UnavailableError(Exception):
    """No folder has what a file needs."""
