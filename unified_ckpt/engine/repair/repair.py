"""A damaged checkpoint folder, mended from copies of the same save: file by file, each proved whole before it is put in.

How data could be lost, each of which is a test in tests/test_repair.py:
- good bytes go under bad ones, of a damaged source or of another save. Every byte that is written has the CRC that the folder's own
  manifest leads to, and is written from the memory in which it was compared; a source of another save is refused;
- the wrong manifest is put in, and by it the right files are overwritten. A folder's own valid manifest is never replaced, one that
  differs from that of its copy is refused, and a folder without one takes a copy's only where its own digests, or all that is there, prove
  whose it is; it is then written last;
- a crash or a full disk leaves half a file. It is written beside the old one as `.mending-…`, made durable, and renamed over it;
- the folder is replaced by a newer save meanwhile, and old bytes are put into that. The rename is inside the folder that was examined;
- a part that was deleted on purpose comes back, a save under construction is taken for damage, two repairs undo each other: none of it
  is done;
- what cannot be mended is touched. A file is mended whole or stays as it is.

Readers need not stop: a file that is put in is the one that they had to find. Nobody removes it meanwhile: it is held as by a reader.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

from unified_ckpt.core.text import SHOWN, short
from unified_ckpt.engine.folder.commit import PROBE
from unified_ckpt.engine.repair.expected import Copy, Truth, look, prove, settle
from unified_ckpt.engine.repair.recover import Goods
from unified_ckpt.engine.repair.scan import Fault, Progress, examine
from unified_ckpt.errors import FormatError, IntegrityError, NotFoundError, StorageError
from unified_ckpt.format import digests, names
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.runtime.storage.locks import mending, reading
from unified_ckpt.runtime.storage.storage import LocalStorage, Reader, absolute, reader, writable

Path = str | os.PathLike[str]

_HEADROOM_NBYTES = 1 << 20
_ASK_FIRST_BLOCKS = (
    256  # of a file: with fewer that are bad, all are looked for before anything is written
)


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a repair found and did, in sentences. `damage`: what was wrong; `mended`: files that were put in; `problems`: what is wrong
    still, and what that needs; `notes`: what was wrong with the sources, and what was left alone. `nbytes`: written."""

    path: str
    save_id: str
    damage: tuple[str, ...]
    mended: tuple[str, ...]
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
    """Mends the checkpoint folder at a local path from other folders of the same save, local or behind fsspec URLs, each as damaged as it
    may be. Without sources, mends what the folder itself proves: indexes, digests. `progress` is called with bytes examined, and with 0 for
    blocks written.

    NotFoundError, FormatError, StorageError, MismatchError, IntegrityError or IncompleteError where nothing was changed; after a
    StorageError files may have been mended, and none is worse than it was.
    """
    storage = LocalStorage(os.path.realpath(writable(os.fspath(path))))
    _check_folder(storage)
    with ExitStack() as held:
        held.callback(storage.close)
        folder = held.enter_context(mending(storage.root))
        held.enter_context(reading(storage.root))
        readers: list[Reader] = []
        for source in [os.fspath(one) for one in sources]:
            found = reader(absolute(source))
            held.callback(found.close)
            if isinstance(found, LocalStorage):
                _check_folder(found)
                if os.path.samefile(found.root, storage.root):
                    raise StorageError(
                        f"{found.root}: is the folder that is to be mended; needed another copy of it"
                    )
                held.enter_context(reading(found.root))
            readers.append(found)
        return mend(storage, readers, folder=folder, progress=progress)


def _check_folder(storage: LocalStorage) -> None:
    if not os.path.isdir(storage.root):
        what = (
            "is a file; needed a checkpoint folder"
            if storage.kind("")
            else "there is no such folder"
        )
        raise NotFoundError(f"{storage.root}: {what}")


def mend(
    storage: LocalStorage,
    sources: Sequence[Reader],
    *,
    folder: os.stat_result,
    progress: Progress | None = None,
) -> RepairReport:
    """`repair` of a folder that nobody else mends or removes meanwhile; `folder`: what tells it from another one of its name."""
    target = look(storage)
    there = storage.names()
    if names.is_staging(os.path.split(storage.root)[1]) or PROBE in there:
        raise FormatError(
            f"{storage.root}: is an unfinished save, which nothing can prove; needed a committed checkpoint"
        )
    copies = [look(source) for source in sources]
    settled = settle(target, copies)
    truth = prove(settled.manifest, storage, copies)
    goods = Goods(truth, target, copies)
    goods.redigest()
    faults = list(examine(storage, truth, progress or (lambda _: None)))
    if not settled.sure:
        _check_sure(target, truth, faults)
    if target.manifest is None:
        faults.append(Fault(names.MANIFEST, [target.why], gone=target.body is None))
        truth.singles[names.MANIFEST] = settled.body
    work = _Mending(
        storage,
        truth,
        goods,
        folder,
        _needed(settled.manifest, copies),
        progress or (lambda _: None),
    )
    work.clear(there)
    for fault in faults:
        if fault.file == names.MANIFEST and work.problems:
            work.problems.append(f"{fault.file}: is put in once all that it speaks of is right")
            continue
        work.mend(fault)
    damage = tuple(text for fault in faults for text in fault.texts)
    notes = (*_notes(target, copies, truth), *goods.damage)
    return RepairReport(
        storage.root,
        truth.manifest.save_id,
        damage,
        tuple(work.mended),
        tuple(work.problems),
        notes,
        work.nbytes,
    )


def _check_sure(target: Copy, truth: Truth, faults: Sequence[Fault]) -> None:
    """A folder without manifest and digests is a save's if all that is there is that save's, tensors among it."""
    wrong = [text for fault in faults if not fault.gone for text in fault.texts]
    files = {
        file
        for part in truth.parts
        for file in truth.manifest.parts[part].files
        if file in truth.heads
    }
    right = files - {fault.file for fault in faults}
    if wrong or not right or not truth.blocks:
        why = wrong[0] if wrong else "no file of tensors is there and right"
        raise IntegrityError(
            f"{target.why}; nothing proves that this folder is of save {truth.manifest.save_id}: {why}; needed its {names.DIGESTS}, or "
            "files that are all right; nothing was changed"
        )


def _needed(manifest: Manifest, copies: Sequence[Copy]) -> str:
    """Who would have what nobody has."""
    island, asked = manifest.island, ", ".join(one.storage.root for one in copies)
    text = f"needed another copy of save {manifest.save_id} (step {manifest.step})"
    if island is not None:
        text = (
            f"needed a copy of this folder, number {island.number} of {island.count} of save {manifest.save_id} (step {manifest.step}), by "
            f"rank(s) {short(island.ranks)}, or folders of other machines that hold the same elements"
        )
    return f"{text}; asked: {asked or 'nobody'}"


def _notes(target: Copy, copies: Sequence[Copy], truth: Truth) -> Iterator[str]:
    for part, record in truth.manifest.parts.items():
        if record.files and part not in truth.parts:
            yield f"part {part}: neither its index nor any of its files is there: it was deleted, and stays so"
    for one in copies:
        if one.manifest is None:
            yield f"{one.why}; only bytes of it that {target.storage.root} proves are taken"
    if truth.manifest.digests is None or not truth.manifest.digests.is_known:
        yield "the save has no digests that this version knows: sizes and headers are all that was looked at"


# putting right


class _Mending:
    """Puts files in. Stops at a StorageError; what is lacking goes to `problems`."""

    def __init__(
        self,
        storage: LocalStorage,
        truth: Truth,
        goods: Goods,
        folder: os.stat_result,
        needed: str,
        beat: Progress,
    ) -> None:
        self._storage, self._truth, self._goods, self._folder, self._needed, self._beat = (
            storage,
            truth,
            goods,
            folder,
            needed,
            beat,
        )
        self.mended: list[str] = []
        self.problems: list[str] = []
        self.nbytes = 0

    def clear(self, there: Sequence[str]) -> None:
        """Removes what a repair that was cut off has left."""
        for name in there:
            if name.startswith(names.MENDING) and self._storage.kind(name) == "file":
                self._storage.remove_file(name)

    def mend(self, fault: Fault) -> None:
        try:
            self._put(fault.file, self._pieces(fault))
        except _LackingError as error:
            self.problems.append(f"{fault.texts[0]}; {error}; {self._needed}")
            return
        self.mended.append(fault.file)

    def _pieces(self, fault: Fault) -> Iterator[tuple[int, bytes]]:
        """(first byte, bytes) of the file as it must be, proved. _LackingError where that is not to be had."""
        file, part, truth = fault.file, fault.part, self._truth
        if part is None:
            if file not in truth.singles:
                raise _LackingError("no copy of it has that CRC")
            yield 0, truth.singles[file]
        elif file not in truth.heads:
            raise _LackingError("no copy of its header is right")
        elif any(
            (part, name) not in truth.blocks
            for name, entry in truth.heads[file].entries.items()
            if entry.stop > entry.start
        ):
            raise _LackingError("there are no digests that could prove its bytes")
        else:
            if len(fault.blocks) <= _ASK_FIRST_BLOCKS:
                self._check_there(fault, part)
            yield 0, truth.heads[file].body
            for name, entry in truth.heads[file].entries.items():
                for block in range(digests.block_count(entry.stop - entry.start)):
                    body = self._goods.block(part, name, file, block)
                    if body is None:
                        self._check_there(fault, part)
                        raise _LackingError(f"block {block} of {part}:{name} is not to be had")
                    yield entry.start + block * digests.BLOCK_NBYTES, body

    def _check_there(self, fault: Fault, part: str) -> None:
        lacking = [
            f"{part}:{name} block {b}"
            for name, b in fault.blocks
            if self._goods.block(part, name, fault.file, b) is None
        ]
        if lacking:
            more = f" and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else ""
            raise _LackingError(f"no copy has {', '.join(lacking[:SHOWN])}{more}")

    def _put(self, file: str, pieces: Iterator[tuple[int, bytes]]) -> None:
        """Writes the file beside the old one, and gives it the name once it is on the disk."""
        storage, beside, nbytes = self._storage, f"{names.MENDING}{file}-{secrets.token_hex(4)}", 0
        first = next(pieces)  # nothing is written where nothing is to be had
        files = {
            name: of.nbytes
            for part in self._truth.manifest.parts.values()
            for name, of in part.files.items()
        }
        free, wanted = storage.free_nbytes(), files.get(file, len(first[1])) + _HEADROOM_NBYTES
        if free < wanted:
            raise StorageError(
                f"{storage.path(file)}: {free} bytes free; needed {wanted} to write it anew beside the old one"
            )
        try:
            for start, body in chain([first], pieces):
                storage.write_at(beside, start, [memoryview(body)])
                nbytes += len(body)
                self._beat(0)
            storage.sync(beside)
            storage.replace(beside, file, folder=self._folder)
        except BaseException:
            storage.close()
            if storage.kind(beside) == "file":
                storage.remove_file(beside)
            raise
        storage.sync_folder("")
        storage.close()  # the next to read opens the new one
        self._goods.close()
        self.nbytes += nbytes


class _LackingError(Exception):
    """No folder has what a file needs."""
