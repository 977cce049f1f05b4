"""A checkpoint of any format written anew: as a unified folder, or as a Hugging Face model folder. All ranks write, in bounded memory.

How data could be lost or be wrong:
- fragments were put together in the wrong order: where the source has two copies of the weights, they are compared (`engine/witness.py`);
- bytes of the source are damaged: those that it has digests of are compared with them;
- ranks see different sources: what they see is compared before anything is written;
- a tensor is left out: names, shapes and counts of what was written are compared with the source's at the end;
- a crash, a full disk: the target has its name only after all checks, by one rename; what was there stays until then.
"""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import listed
from unified_ckpt.engine.folder import commit
from unified_ckpt.engine.folder.backup import clean_up
from unified_ckpt.engine.folder.manifest import versions, write_manifest
from unified_ckpt.engine.rewrite.metadata import seal_anew, write_indexes
from unified_ckpt.engine.rewrite.tensors import (
    Output,
    Rewrite,
    Written,
    check_room,
    check_sizes,
    plan_files,
    sizes_of,
    who_sees,
    write_tensors,
)
from unified_ckpt.engine.rewrite.weights_check import Witness
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError, IntegrityError, RankError, StorageError
from unified_ckpt.format import digests
from unified_ckpt.format.manifest import ConvertedFrom, Manifest
from unified_ckpt.format.names import check_part_name
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.flatten import WITHOUT_MASTERS


@dataclass(frozen=True, slots=True)
class How:
    """How to convert. `path`: where the source is, for people; `told`: options of the caller, for the record. `attach(folder)` adds files
    on rank 0 before the commit. `progress(nbytes, of)`: so many more of about `of` bytes that this rank writes. `bare`: no more than
    Hugging Face's files, no manifest. `compare`: two copies of the weights."""

    path: str
    told: Mapping[str, object]
    max_file_bytes: int
    if_exists: str
    fsync: bool
    timeout_seconds: float
    bare: bool = False
    compare: bool = True
    original: Source | None = (
        None  # whose copies are compared: of what is written one may be made of the other
    )
    attach: Callable[[str], object] = lambda _: None
    progress: Callable[[int, int], object] = lambda _, of: None  # noqa: ARG005


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion did and proved. `tensors`, `nbytes`: by part, of all ranks together. `compared`: tensors whose second copy in the
    source was compared and is equal; `proved`: tensors whose bytes the source's own digests proved. `id`: None of a bare folder.
    `left_out`: entries of the source folder that were neither read nor copied. `stays`: a checkpoint was there already and nothing was
    written."""

    path: str
    format: str
    id: str | None
    step: int | None
    seconds: float
    tensors: Mapping[str, int] = field(default_factory=dict)
    nbytes: Mapping[str, int] = field(default_factory=dict)
    compared: int = 0
    proved: int = 0
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    stays: bool = False


def convert(
    comm: Comm,
    source: Source | Exception,
    storage: LocalStorage,
    name: str,
    how: How,
    *,
    machines: Sequence[int],
) -> ConvertReport:
    """Collective. Writes the source to `name` under the storage's root. An error that a rank met in opening it is told to all.

    IntegrityError where a check fails, and then nothing is there; what was at `name` is as it was after any error.
    """
    began, path = time.monotonic(), storage.path(name)
    what, terms = (
        f"conversion of {how.path} to {path}",
        {**how.told, "if_exists": how.if_exists, "fsync": how.fsync},
    )
    meeting = comm.meet(what, same=False, timeout_seconds=how.timeout_seconds, terms=terms)
    with storage, meeting.telling():
        with meeting.phase("open"):
            if isinstance(source, Exception):
                raise source
            sizes = _agreed(meeting, source, how.path)
        target = commit.Target(name, "error" if how.bare else how.if_exists)
        construction, told = commit.begin_together(
            meeting, storage, target, partial(commit.check_target, storage, target), lead=0
        )
        if construction is None:
            return ConvertReport(
                path, source.format, told["id"], told["step"], time.monotonic() - began, stays=True
            )
        try:
            writers = who_sees(meeting, storage, construction, machines, lead=0)
            files = plan_files(
                meeting, sizes, {}, writers=writers, max_file_bytes=how.max_file_bytes, lead=0
            )
            work = Rewrite(meeting, source, storage, construction, 0, tuple(machines), files, sizes)
            record = _build(work, target, how, began)
        except BaseException as error:
            commit.abandon_together(meeting, storage, construction, error, lead=0)
            raise
    ledger = source.catalog(()).ledger  # of folders that are joined: damage that was read around
    damage = ledger.damage if ledger is not None else ()
    return ConvertReport(
        path=path,
        format=source.format,
        id=None if how.bare else construction.save_id,
        step=source.said().step,
        seconds=time.monotonic() - began,
        tensors=record.tensors,
        nbytes=record.nbytes,
        compared=record.compared,
        proved=record.proved,
        notes=tuple(dict.fromkeys((*record.notes, *damage))),
    )


def _agreed(meeting: Meeting, source: Source, path: str) -> dict[Key, int]:
    """Collective. Bytes of every tensor. RankError where ranks see different tensors."""
    sizes = sizes_of(source)
    if not sizes:
        raise FormatError(f"{path}: has no tensor; needed a checkpoint that has some")
    for part in source.parts:
        check_part_name(part)
    seen = f"{_names_crc(source, sizes):016x}"
    if meeting.broadcast("seen", seen.encode() if meeting.rank == 0 else None).decode() != seen:
        raise RankError(
            f"{path}: rank {meeting.rank} sees other tensors there than rank 0; needed one checkpoint that all ranks see"
        )
    return sizes


def _names_crc(source: Source, sizes: Mapping[Key, int]) -> int:
    crc, specs = 0, {part: source.specs(part, source.names(part)) for part in source.parts}
    for part, name in sorted(sizes):
        spec = specs[part][name]
        crc = digests.crc(f"{part}:{name}:{spec.dtype}:{spec.shape}\n".encode(), crc)
    return crc


def _build(work: Rewrite, target: commit.Target, how: How, began: float) -> ConvertedFrom:
    """Collective. Fills the folder, proves it and publishes it; what there is to say of it."""
    meeting, storage, construction = work.meeting, work.storage, work.construction
    own = sum(stop - start for _, _, start, stop in work.share())

    def beaten(nbytes: int) -> None:
        meeting.beat()
        how.progress(nbytes, own)

    output = Output(storage, construction.folder, fsync=how.fsync, beat=beaten)
    with meeting.phase("room"):
        if meeting.rank == 0:
            check_room(work)
        witness = Witness(how.original or work.source) if how.compare else None
    with meeting.phase("write"):
        written = write_tensors(work, output, witness.look if witness is not None else None)
        pairs = _check_copies(meeting, witness, how.path) if witness is not None else 0
    with meeting.phase("complete"):
        if written is not None:
            record = _record(work, how, written, pairs)
            _complete(work, how, output, written, record, began)
            meeting.put("record", record.model_dump_json().encode())
    with meeting.phase("publish"):
        if meeting.rank == 0:
            published = commit.publish(storage, construction, target, fsync=how.fsync)
            clean_up(storage, published, fsync=how.fsync)
    return ConvertedFrom.model_validate_json(meeting.get("record"))


def _check_copies(meeting: Meeting, witness: Witness, path: str) -> int:
    """Collective. IntegrityError on rank 0 where two copies of the weights differ; there, how many were compared."""
    told = meeting.collect("copies", witness.tell(), at=0, ranks=range(meeting.world))
    if meeting.rank:
        return 0
    witness.hear(told)
    return witness.check(path)


def _record(work: Rewrite, how: How, written: Written, pairs: int) -> ConvertedFrom:
    """Rank 0. IntegrityError where what was written is not what the source has."""
    source = work.source
    lost = sorted(
        f"{part}:{name}"
        for part, name in work.sizes
        if name not in written.weight_maps.get(part, {})
    )
    more = sum(map(len, written.weight_maps.values())) - len(work.sizes)
    if lost or more:
        raise IntegrityError(
            listed(
                f"{how.path}: written were {more} more tensors than the source has, and not", lost
            )
        )
    specs = {part: source.specs(part, source.names(part)) for part in source.parts}
    theirs, proved, wrong = source.block_digests(list(work.sizes)), 0, []
    tensors, nbytes, crcs = Counter[str](), Counter[str](), dict[str, int]()
    for (part, name), blocks in sorted(written.blocks.items()):
        needed = theirs[part, name]
        if needed is not None:
            proved += 1
            wrong += [f"{part}:{name}"] if list(needed) != list(blocks) else []
        spec = specs[part][name]
        tensors[part] += 1
        nbytes[part] += spec.nbytes
        body = f"{name}:{spec.dtype}:{spec.shape}\n".encode() + struct.pack(
            f"<{len(blocks)}Q", *blocks
        )
        crcs[part] = digests.crc(body, crcs.get(part, 0))
    if wrong:
        raise IntegrityError(
            listed(f"{how.path}: is damaged: bytes that are not those of its digests, in", wrong)
        )
    return ConvertedFrom(
        format=source.format,
        path=how.path,
        save_id=source.said().save_id,
        options=dict(how.told),
        tensors=dict(tensors),
        nbytes=dict(nbytes),
        digests={part: f"{crc:016x}" for part, crc in crcs.items()},
        compared=pairs,
        proved=proved,
        notes=[],
    )


def _complete(
    work: Rewrite, how: How, output: Output, written: Written, record: ConvertedFrom, began: float
) -> None:
    """Rank 0: what is not tensors, the proof, and the manifest."""
    storage, folder, source = work.storage, work.construction.folder, work.source
    before = {name: storage.stamp(f"{folder}/{name}") for name in storage.entries(folder)}
    try:
        how.attach(storage.path(folder))
    except OSError as error:
        raise StorageError(f"{error.filename}: cannot be taken along: {error.strerror}") from error
    changed = [name for name, stamp in before.items() if storage.stamp(f"{folder}/{name}") != stamp]
    if changed:
        raise StorageError(
            f"{storage.path(folder)}: attached files changed {changed[0]}, which is the checkpoint's own"
        )
    if how.fsync:
        for name in sorted(set(storage.entries(folder)) - before.keys()):
            storage.sync_tree(f"{folder}/{name}")
    if how.bare:
        tied = sorted(
            f"{part}:{a} ({b})" for part in source.parts for a, b in source.aliases(part).items()
        )
        record.notes.extend(
            [listed("names of tied tensors that are not written", tied)] if tied else []
        )
        write_indexes(written, output, record.nbytes)
        output.flush()
        check_sizes(storage, folder, written.records)
        storage.remove_file(f"{folder}/{commit.PROBE}")
        return
    said = source.said()
    fields = seal_anew(
        source,
        storage,
        folder,
        output,
        written,
        has_optimizer=bool(said.groups or said.scalars or "optimizer" in source.parts),
        empty_parts=(),
        rank_extras=said.rank_extras,
        notes=record.notes,
        fsync=how.fsync,
    )
    check_sizes(storage, folder, written.records)
    storage.remove_file(f"{folder}/{commit.PROBE}")
    manifest = Manifest(
        save_id=work.construction.save_id,
        step=said.step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        world_size=work.meeting.world,
        seconds=round(time.monotonic() - began, 3),
        versions=versions(),
        omitted_parts=sorted(
            {*said.omitted_parts, *(how.original or source).parts}
            - {*source.parts, WITHOUT_MASTERS}
        ),
        converted_from=record,
        metrics=dict(said.metrics),
        **fields,
    )
    write_manifest(storage, folder, manifest, fsync=how.fsync)
