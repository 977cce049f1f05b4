"""TODO docstring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from unified_ckpt.engine.folder.reader import Folder, open_folder
from unified_ckpt.engine.source.protocol import Location
from unified_ckpt.errors import CheckpointError, FormatError, IncompleteError, IntegrityError
from unified_ckpt.format import digests, names
from unified_ckpt.runtime.storage.storage import Reader, reader


def _block_text(part: str, name: str, file: str, block: int, found: int, needed: int) -> str:
    low = block * digests.BLOCK_NBYTES
    return f"{part}:{name}: block {block} (from byte {low} of the tensor, in {file}) has CRC {found:016x}; needed {needed:016x}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a check found. `problems`: one sentence each, empty when all is well; `tensors`, `nbytes`: how much was looked at; `notes`: what
    could not be, in sentences."""

    path: str
    problems: tuple[str, ...]
    tensors: int
    nbytes: int
    deep: bool
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


def unopened(path: str, error: IntegrityError, *, deep: bool) -> VerifyReport:
    """Of a checkpoint whose manifest or index is not the one that was written: nothing else can be looked at."""
    return VerifyReport(path, (str(error),), 0, 0, deep)


def verify_folder(
    folder: Folder, *, deep: bool, progress: Callable[[int], object] | None = None
) -> VerifyReport:
    """Checks files, sizes and headers against manifest and indexes; with `deep` every digest. Collects problems, raises none.

    `progress` is called with the bytes of each tensor done.
    """
    problems: list[str] = []
    tensors = nbytes = 0
    try:
        folder.said()
    except CheckpointError as error:
        problems.append(str(error))
    others = list(_check_others(folder, deep=deep))
    problems += others + list(_check_aliases(folder))
    digested = deep and not any(names.DIGESTS in problem for problem in others)
    for part in folder.parts:
        for file, members in sorted(folder.members(part).items()):
            try:
                folder.check_files([file])
            except CheckpointError as error:
                why = f"{file} is missing" if isinstance(error, IncompleteError) else str(error)
                problems.extend(f"{part}:{name}: cannot be read: {why}" for name in sorted(members))
                continue
            for name in sorted(members):
                found, size = _check_tensor(folder, part, name, deep=digested)
                problems.extend(found)
                tensors, nbytes = tensors + 1, nbytes + size
                if progress is not None:
                    progress(size)
    none = deep and tensors and (folder.manifest is None or folder.manifest.digests is None)
    notes = ("there are no digests: sizes and headers are all that was compared",) if none else ()
    return VerifyReport(folder.storage.root, tuple(problems), tensors, nbytes, deep, notes)


def verify_copies(
    folder: Folder, *, deep: bool, progress: Callable[[int], object] | None = None
) -> VerifyReport:
    """`verify_folder`, also of what the folder keeps of other machines' folders."""
    found = verify_folder(folder, deep=deep, progress=progress)
    island = folder.manifest.island if folder.manifest is not None else None
    for number in island.copies if island is not None else ():
        place = names.replica_name(number)
        try:
            copy = open_folder(reader(f"{folder.storage.root}/{place}"))
        except CheckpointError as error:
            found = replace(found, problems=(*found.problems, f"{place}: cannot be read: {error}"))
            continue
        try:
            more = verify_folder(copy, deep=deep, progress=progress)
            problems = [
                f"{place}: {text}" for text in (*_strange(copy, folder, number), *more.problems)
            ]
            notes = (*found.notes, *(f"{place}: {text}" for text in more.notes))
        finally:
            copy.close()
        tensors, nbytes = found.tensors + more.tensors, found.nbytes + more.nbytes
        found = replace(
            found,
            problems=(*found.problems, *problems),
            tensors=tensors,
            nbytes=nbytes,
            notes=notes,
        )
    return found


def _strange(copy: Folder, folder: Folder, number: int) -> Iterator[str]:
    """A copy that is of another save, or of another machine."""
    there, here = copy.manifest, folder.manifest
    if (
        there is None
        or here is None
        or there.island is None
        or (there.save_id, there.island.number) != (here.save_id, number)
    ):
        yield f"is not what machine {number} wrote of this save"


def _check_aliases(folder: Folder) -> Iterator[str]:
    """Tied names whose tensor no index names."""
    manifest = folder.manifest
    if (
        manifest is None or manifest.island is not None
    ):  # in the latter case another node group may have it
        return
    for part in folder.parts:
        for alias, stored in manifest.parts[part].aliases.items():
            if stored not in folder.names(part):
                yield f"{part}:{alias}: is tied to {stored}, which {names.index_name(part)} does not name"


def _check_tensor(folder: Folder, part: str, name: str, *, deep: bool) -> tuple[list[str], int]:
    try:
        spec = folder.specs(part, [name])[name]
        saved = folder.block_digests([(part, name)])[part, name] if deep else None
        if saved is None:
            return [], spec.nbytes
        if len(saved) != digests.block_count(spec.nbytes):
            return [
                f"{part}:{name}: has {len(saved)} digests; needed {digests.block_count(spec.nbytes)}"
            ], spec.nbytes
        bad = list(_bad_blocks(folder, part, name, spec.nbytes, saved))
    except CheckpointError as error:
        return [str(error)], 0
    return bad, spec.nbytes


def _bad_blocks(
    folder: Folder, part: str, name: str, nbytes: int, saved: Sequence[int]
) -> Iterator[str]:
    location = folder.catalog([(part, name)]).locations[part, name]
    for block, needed in enumerate(saved):
        found = read_block(folder.storage, location, block, nbytes)
        if found != needed:
            yield _block_text(part, name, location.file, block, found, needed)


def _check_others(folder: Folder, *, deep: bool) -> Iterator[str]:
    """Files of the manifest that are no part's. Digests are read whole in any case: without them nothing is loaded, and they are small."""
    manifest = folder.manifest
    if manifest is None:
        return
    if manifest.digests is None and folder.storage.size(names.DIGESTS) is not None:
        yield f"{names.DIGESTS}: is there, and the manifest names no digests; needed the manifest that was written with it"
    if deep:
        try:
            folder.proof()
        except FormatError as error:
            yield str(error)
    for record in (manifest.digests, manifest.rank_extra):
        if record is None:
            continue
        try:
            size = folder.storage.size(record.file)
            if size != record.nbytes:
                yield f"{record.file}: {'is missing' if size is None else f'has {size} bytes'}; the manifest says {record.nbytes} bytes"
            elif deep or record is manifest.digests:
                if f"{digests.crc(folder.storage.read(record.file)):016x}" != record.crc:
                    yield f"{record.file}: is not the file that was written; needed CRC {record.crc}"
            else:
                folder.check_rank_extra()
        except CheckpointError as error:
            yield str(error)


def read_block(storage: Reader, location: Location, block: int, nbytes: int) -> int:
    """CRC of one whole block of a tensor of `nbytes`."""
    start = block * digests.BLOCK_NBYTES
    body = bytearray(min(digests.BLOCK_NBYTES, nbytes - start))
    storage.read_at(location.file, location.start + start, memoryview(body))
    return digests.crc(body)
