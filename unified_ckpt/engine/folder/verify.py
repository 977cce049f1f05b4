"""Verify a whole folder: files, sizes, headers and digests, without loading it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from unified_ckpt.core.text import count_text, human_size
from unified_ckpt.engine.folder.completeness import undecodable_parts
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.folder.stored_files import error_text, read_file, read_range
from unified_ckpt.engine.source.verified_read import check_digest_count
from unified_ckpt.errors import CheckpointError, FormatError, IncompleteError, IntegrityError
from unified_ckpt.format import digests, names
from unified_ckpt.format.manifest_fields import EntriesFile
from unified_ckpt.runtime.storage.protocol import ReadRange


def block_mismatch(part: str, name: str, file: str, block: int, actual: int, expected: int) -> str:
    """Describe a block whose CRC is not the saved one."""
    start = block * digests.BLOCK_NBYTES
    return (
        f"{part}:{name}: block {block} (from byte {start} of the tensor, in {file}) has CRC "
        f"{actual:016x}, expected {expected:016x}"
    )


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a check. `tensors`, `nbytes`: the number of checked tensors and bytes.

    `problems`: a sentence for each missing or damaged file; empty if the folder is intact.
    `damage`: each damaged block or tensor. `notes`: what could not be checked.
    """

    path: str
    problems: tuple[str, ...]
    tensors: int
    nbytes: int
    deep: bool
    notes: tuple[str, ...] = ()
    damage: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    def __str__(self) -> str:
        result = "all digests match" if self.deep else "sizes and headers match"
        if self.problems:
            result = f"damaged, {count_text(len(self.problems), 'problem')}: {self.problems[0]}"
        checked = f"{count_text(self.tensors, 'tensor')}, {human_size(self.nbytes)} checked"
        return "\n  ".join([self.path, result, "; ".join([checked, *self.notes])])


def unreadable_report(path: str, error: IntegrityError, *, deep: bool) -> VerifyReport:
    """Return the report of a checkpoint whose manifest or index is damaged."""
    return VerifyReport(path, (str(error),), 0, 0, deep)


def verify_folder(
    folder: Folder, *, deep: bool, progress: Callable[[int], object] | None = None
) -> VerifyReport:
    """Check files, sizes and headers against manifest and indexes; with `deep`, every digest.

    Collects problems and raises none. `progress` is called with the bytes of each tensor checked.
    """
    problems, damage = list[str](), list[str]()
    tensors = nbytes = 0
    try:
        folder.metadata()
    except CheckpointError as error:
        problems.append(error_text(error, folder.storage))
    auxiliary_problems = list(_check_auxiliary_files(folder, deep=deep))
    problems += auxiliary_problems + list(_check_aliases(folder))
    if folder.manifest is not None and folder.path == folder.storage.root:
        problems += undecodable_parts(folder.manifest, folder.parts)
    check_digests = deep and not any(names.DIGESTS in problem for problem in auxiliary_problems)
    file_errors = _check_files(folder)
    for part in folder.parts:
        for file, tensor_names in sorted(folder.tensors_by_file(part).items()):
            file_error = file_errors.get(file)
            if file_error is not None:
                count = count_text(len(tensor_names), "tensor")
                problems.append(
                    f"{file} is missing, with {count}"
                    if isinstance(file_error, IncompleteError)
                    else f"{error_text(file_error, folder.storage)}; it has {count}"
                )
                continue
            damage_of_file, damaged = list[str](), 0
            entries = folder.header(file)
            if check_digests:
                folder.storage.expect(
                    ReadRange(file, entry.start, entry.stop)
                    for name, entry in entries.items()
                    if name in tensor_names
                )
            unlisted = sorted(set(tensor_names) - entries.keys())
            for name in [*(name for name in entries if name in tensor_names), *unlisted]:
                damage_of_tensor, size = _check_tensor(folder, part, name, deep=check_digests)
                damage_of_file += damage_of_tensor
                damaged += bool(damage_of_tensor)
                tensors, nbytes = tensors + 1, nbytes + size
                if progress is not None:
                    progress(size)
            if damage_of_file:
                count = count_text(len(tensor_names), "tensor")
                problems.append(f"{file}: {damaged} of {count} damaged: {damage_of_file[0]}")
                damage += damage_of_file
    has_no_digests = (
        deep and tensors and (folder.manifest is None or folder.manifest.digests is None)
    )
    notes = ("there are no digests: only sizes and headers were checked",) if has_no_digests else ()
    return VerifyReport(folder.path, tuple(problems), tensors, nbytes, deep, notes, tuple(damage))


def _check_files(folder: Folder) -> dict[str, CheckpointError]:
    """Check the files of all parts; return the errors by file."""
    files = [file for part in folder.parts for file in sorted(folder.tensors_by_file(part))]
    folder.expect_headers(files)
    errors: dict[str, CheckpointError] = {}
    for file in files:
        try:
            folder.check_files([file])
        except CheckpointError as error:
            errors[file] = error
    return errors


def _check_aliases(folder: Folder) -> Iterator[str]:
    """Report tied names whose tensor is in no index."""
    manifest = folder.manifest
    if manifest is None or manifest.node_group is not None:  # another node group may have it
        return
    for part in folder.parts:
        for alias, stored_name in manifest.parts[part].aliases.items():
            if stored_name not in folder.names(part):
                yield (
                    f"{part}:{alias}: is tied to {stored_name}, which {names.index_name(part)} "
                    "does not list"
                )


def _check_tensor(folder: Folder, part: str, name: str, *, deep: bool) -> tuple[list[str], int]:
    try:
        spec = folder.specs(part, [name])[name]
        saved = folder.block_digests([(part, name)])[part, name] if deep else None
        if saved is None:
            return [], spec.nbytes
        check_digest_count((part, name), saved, spec.nbytes)
        return list(_mismatched_blocks(folder, part, name, spec.nbytes, saved)), spec.nbytes
    except CheckpointError as error:
        return [str(error)], 0


def _mismatched_blocks(
    folder: Folder, part: str, name: str, nbytes: int, saved: Sequence[int]
) -> Iterator[str]:
    location = folder.locations([(part, name)]).by_key[part, name]
    for block, expected in enumerate(saved):
        low, high = block * digests.BLOCK_NBYTES, min((block + 1) * digests.BLOCK_NBYTES, nbytes)
        start = location.start + low
        body = read_range(folder.storage, location.file, start, start + high - low)
        actual = digests.crc(body)
        if actual != expected:
            yield block_mismatch(part, name, location.file, block, actual, expected)


def _check_auxiliary_files(folder: Folder, *, deep: bool) -> Iterator[str]:
    """Check the files that hold no tensors of a part.

    Digests and outliers are always read completely: they are small, and nothing loads without
    them.
    """
    manifest = folder.manifest
    if manifest is None:
        return
    if manifest.digests is None and folder.storage.size(names.DIGESTS) is not None:
        yield (
            f"{names.DIGESTS}: exists, but the manifest has no digests; expected the manifest "
            "of the same save"
        )
    if deep:
        try:
            folder.digest_record()
        except FormatError as error:
            yield error_text(error, folder.storage)
    outliers = manifest.outlier_records()
    present = [outliers[part] for part in folder.parts if part in outliers]
    for record in (manifest.digests, manifest.rank_extra, manifest.rank_values, *present):
        if record is None:
            continue
        try:
            if isinstance(record, EntriesFile) and not deep:
                folder.entries(record)
            else:
                read_file(folder.storage, record.file, record)
        except CheckpointError as error:
            yield error_text(error, folder.storage)
