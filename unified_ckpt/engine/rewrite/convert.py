"""A checkpoint of any format written anew: as a unified folder, or as a Hugging Face model folder.
All ranks write, in bounded memory.

How data could be lost or be wrong:
- fragments were put together in the wrong order: where the source has two copies of the weights,
  they are compared (`engine/witness.py`);
- bytes of the source are damaged: those that it has digests of are compared with them;
- ranks see different sources: what they see is compared before anything is written;
- a tensor is left out: names, shapes and counts of what was written are compared with the
  source's at the end;
- a crash, a full disk: the target has its name only after all checks, by one rename; what was
  there stays until then.
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
from unified_ckpt.core.text import format_list
from unified_ckpt.engine.folder import commit
from unified_ckpt.engine.folder.backup import clean_up
from unified_ckpt.engine.folder.manifest import versions, write_manifest
from unified_ckpt.engine.rewrite.metadata import write_indexes, write_metadata
from unified_ckpt.engine.rewrite.tensors import (
    Output,
    Rewrite,
    WrittenFiles,
    check_free_space,
    check_sizes,
    nodes_that_see,
    plan_files,
    tensor_sizes,
    write_tensors,
)
from unified_ckpt.engine.rewrite.weights_check import MasterCheck
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError, IntegrityError, RankError, StorageError
from unified_ckpt.format import digests
from unified_ckpt.format.manifest import ConvertedFrom, Manifest
from unified_ckpt.format.names import check_part_name
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.flatten import WITHOUT_MASTERS


@dataclass(frozen=True, slots=True)
class ConvertRequest:
    """How to convert. `source_path`: where the source is, for people; `recorded_options`: options
    of the caller, for the record. `attach(folder)` adds files on rank 0 before the commit.
    `progress(nbytes, of)`: so many more of about `of` bytes that this rank writes.
    `without_manifest`: no more than Hugging Face's files, no manifest. `compare_masters`: two
    copies of the weights.
    """

    source_path: str
    recorded_options: Mapping[str, object]
    max_file_bytes: int
    if_exists: str
    fsync: bool
    timeout_seconds: float
    without_manifest: bool = False
    compare_masters: bool = True
    uncast_source: Source | None = (
        None  # whose copies are compared: of what is written one may be made of the other
    )
    attach: Callable[[str], object] = lambda _: None
    progress: Callable[[int, int], object] = lambda _, of: None  # noqa: ARG005


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion did and proved. `tensors`, `nbytes`: by part, of all ranks together.
    `compared`: tensors whose second copy in the source was compared and is equal; `verified`:
    tensors whose bytes the source's own digests proved. `id`: None of a bare folder.
    `left_out`: entries of the source folder that were neither read nor copied. `existed`: a
    checkpoint was there already and nothing was written.
    """

    path: str
    format: str
    id: str | None
    step: int | None
    seconds: float
    tensors: Mapping[str, int] = field(default_factory=dict)
    nbytes: Mapping[str, int] = field(default_factory=dict)
    compared: int = 0
    verified: int = 0
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    existed: bool = False


def convert(
    comm: Comm,
    source: Source | Exception,
    storage: LocalStorage,
    name: str,
    request: ConvertRequest,
    *,
    nodes: Sequence[int],
) -> ConvertReport:
    """Collective. Writes the source to `name` under the storage's root. An error that a rank met in
    opening it is told to all.

    IntegrityError where a check fails, and then nothing is there; what was at `name` is as it was
    after any error.
    """
    start_time, path = time.monotonic(), storage.path(name)
    operation, common_args = (
        f"conversion of {request.source_path} to {path}",
        {**request.recorded_options, "if_exists": request.if_exists, "fsync": request.fsync},
    )
    collective = comm.begin_collective(
        operation, cached=False, timeout_seconds=request.timeout_seconds, arguments=common_args
    )
    with storage, collective.propagating_errors():
        with collective.step("open"):
            if isinstance(source, Exception):
                raise source
            sizes = _check_same_tensors(collective, source, request.source_path)
        commit_target = commit.PublishTarget(
            name, "error" if request.without_manifest else request.if_exists
        )
        staging, existing = commit.create_collectively(
            collective,
            storage,
            commit_target,
            partial(commit.resolve_if_exists, storage, commit_target),
            leader=0,
        )
        if staging is None:
            return ConvertReport(
                path,
                source.format,
                existing["id"],
                existing["step"],
                time.monotonic() - start_time,
                existed=True,
            )
        try:
            writers = nodes_that_see(collective, storage, staging, nodes, leader=0)
            file_plan = plan_files(
                collective,
                sizes,
                {},
                writer_nodes=writers,
                max_file_bytes=request.max_file_bytes,
                leader=0,
            )
            rewrite = Rewrite(
                collective, source, storage, staging, 0, tuple(nodes), file_plan, sizes
            )
            record = _write_and_publish(rewrite, commit_target, request, start_time)
        except BaseException as error:
            commit.abort_collectively(collective, storage, staging, error, leader=0)
            raise
    log = source.catalog(
        ()
    ).verification_log  # of folders that are joined: damage that was read around
    damage = log.damage if log is not None else ()
    return ConvertReport(
        path=path,
        format=source.format,
        id=None if request.without_manifest else staging.save_id,
        step=source.metadata().step,
        seconds=time.monotonic() - start_time,
        tensors=record.tensors,
        nbytes=record.nbytes,
        compared=record.compared,
        verified=record.verified,
        notes=tuple(dict.fromkeys((*record.notes, *damage))),
    )


def _check_same_tensors(collective: Collective, source: Source, path: str) -> dict[Key, int]:
    """Collective. Bytes of every tensor. RankError where ranks see different tensors."""
    sizes = tensor_sizes(source)
    if not sizes:
        raise FormatError(f"{path}: has no tensor; needed a checkpoint that has some")
    for part in source.parts:
        check_part_name(part)
    fingerprint = f"{_tensor_fingerprint(source, sizes):016x}"
    if (
        collective.broadcast(
            "seen", fingerprint.encode() if collective.rank == 0 else None
        ).decode()
        != fingerprint
    ):
        raise RankError(
            f"{path}: rank {collective.rank} sees other tensors there than rank 0; needed one checkpoint that all ranks see"
        )
    return sizes


def _tensor_fingerprint(source: Source, sizes: Mapping[Key, int]) -> int:
    crc, specs_by_part = 0, {part: source.specs(part, source.names(part)) for part in source.parts}
    for part, name in sorted(sizes):
        spec = specs_by_part[part][name]
        crc = digests.crc(f"{part}:{name}:{spec.dtype}:{spec.shape}\n".encode(), crc)
    return crc


def _write_and_publish(
    rewrite: Rewrite,
    commit_target: commit.PublishTarget,
    request: ConvertRequest,
    start_time: float,
) -> ConvertedFrom:
    """Collective. Fills the folder, proves it and publishes it; what there is to say of it."""
    collective, storage, staging = rewrite.collective, rewrite.storage, rewrite.staging
    rank_nbytes = sum(stop - start for _, _, start, stop in rewrite.rank_spans())

    def on_write(nbytes: int) -> None:
        collective.heartbeat()
        request.progress(nbytes, rank_nbytes)

    output = Output(storage, staging.folder, fsync=request.fsync, on_progress=on_write)
    with collective.step("room"):
        if collective.rank == 0:
            check_free_space(rewrite)
        master_check = (
            MasterCheck(request.uncast_source or rewrite.source)
            if request.compare_masters
            else None
        )
    with collective.step("write"):
        written = write_tensors(
            rewrite, output, master_check.update if master_check is not None else None
        )
        compared = (
            _check_masters(collective, master_check, request.source_path)
            if master_check is not None
            else 0
        )
    with collective.step("complete"):
        if written is not None:
            record = _conversion_record(rewrite, request, written, compared)
            _finalize(rewrite, request, output, written, record, start_time)
            collective.put("record", record.model_dump_json().encode())
    with collective.step("publish"):
        if collective.rank == 0:
            published = commit.publish(storage, staging, commit_target, fsync=request.fsync)
            clean_up(storage, published, fsync=request.fsync)
    return ConvertedFrom.model_validate_json(collective.get("record"))


def _check_masters(collective: Collective, master_check: MasterCheck, source_path: str) -> int:
    """Collective. IntegrityError on rank 0 where two copies of the weights differ; there, how many
    were compared.
    """
    encoded_by_rank = collective.collect(
        "copies", master_check.encode(), dst=0, ranks=range(collective.world)
    )
    if collective.rank:
        return 0
    master_check.merge(encoded_by_rank)
    return master_check.check(source_path)


def _conversion_record(
    rewrite: Rewrite, request: ConvertRequest, written: WrittenFiles, compared: int
) -> ConvertedFrom:
    """Rank 0. IntegrityError where what was written is not what the source has."""
    source = rewrite.source
    missing = sorted(
        f"{part}:{name}"
        for part, name in rewrite.sizes
        if name not in written.weight_maps.get(part, {})
    )
    extra_count = sum(map(len, written.weight_maps.values())) - len(rewrite.sizes)
    if missing or extra_count:
        raise IntegrityError(
            format_list(
                f"{request.source_path}: written were {extra_count} more tensors than the source has, and not",
                missing,
            )
        )
    specs = {part: source.specs(part, source.names(part)) for part in source.parts}
    source_digests, verified, corrupt = source.block_digests(list(rewrite.sizes)), 0, []
    tensors, nbytes, crc_by_part = Counter[str](), Counter[str](), dict[str, int]()
    for (part, name), blocks in sorted(written.block_crcs.items()):
        expected = source_digests[part, name]
        if expected is not None:
            verified += 1
            corrupt += [f"{part}:{name}"] if list(expected) != list(blocks) else []
        spec = specs[part][name]
        tensors[part] += 1
        nbytes[part] += spec.nbytes
        line = f"{name}:{spec.dtype}:{spec.shape}\n".encode() + struct.pack(
            f"<{len(blocks)}Q", *blocks
        )
        crc_by_part[part] = digests.crc(line, crc_by_part.get(part, 0))
    if corrupt:
        raise IntegrityError(
            format_list(
                f"{request.source_path}: is damaged: bytes that are not those of its digests, in",
                corrupt,
            )
        )
    return ConvertedFrom(
        format=source.format,
        path=request.source_path,
        save_id=source.metadata().save_id,
        options=dict(request.recorded_options),
        tensors=dict(tensors),
        nbytes=dict(nbytes),
        digests={part: f"{crc:016x}" for part, crc in crc_by_part.items()},
        compared=compared,
        verified=verified,
        notes=[],
    )


def _finalize(
    rewrite: Rewrite,
    request: ConvertRequest,
    output: Output,
    written: WrittenFiles,
    record: ConvertedFrom,
    start_time: float,
) -> None:
    """Rank 0: what is not tensors, the proof, and the manifest."""
    storage, folder, source = rewrite.storage, rewrite.staging.folder, rewrite.source
    stamps_before = {
        name: storage.version_token(f"{folder}/{name}") for name in storage.entries(folder)
    }
    try:
        request.attach(storage.path(folder))
    except OSError as error:
        raise StorageError(f"{error.filename}: cannot be taken along: {error.strerror}") from error
    changed = [
        name
        for name, stamp in stamps_before.items()
        if storage.version_token(f"{folder}/{name}") != stamp
    ]
    if changed:
        raise StorageError(
            f"{storage.path(folder)}: attached files changed {changed[0]}, which is the checkpoint's own"
        )
    if request.fsync:
        for name in sorted(set(storage.entries(folder)) - stamps_before.keys()):
            storage.sync_tree(f"{folder}/{name}")
    if request.without_manifest:
        tied_names = sorted(
            f"{part}:{a} ({b})" for part in source.parts for a, b in source.aliases(part).items()
        )
        record.notes.extend(
            [format_list("names of tied tensors that are not written", tied_names)]
            if tied_names
            else []
        )
        write_indexes(written, output, record.nbytes)
        output.flush()
        check_sizes(storage, folder, written.file_records)
        storage.remove_file(f"{folder}/{commit.MARKER}")
        return
    metadata = source.metadata()
    manifest_fields = write_metadata(
        source,
        storage,
        folder,
        output,
        written,
        has_optimizer=bool(metadata.groups or metadata.scalars or "optimizer" in source.parts),
        empty_parts=(),
        rank_extras=metadata.rank_extras,
        notes=record.notes,
        fsync=request.fsync,
    )
    check_sizes(storage, folder, written.file_records)
    storage.remove_file(f"{folder}/{commit.MARKER}")
    manifest = Manifest(
        save_id=rewrite.staging.save_id,
        step=metadata.step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        world_size=rewrite.collective.world,
        seconds=round(time.monotonic() - start_time, 3),
        versions=versions(),
        omitted_parts=sorted(
            {*metadata.omitted_parts, *(request.uncast_source or source).parts}
            - {*source.parts, WITHOUT_MASTERS}
        ),
        converted_from=record,
        metrics=dict(metadata.metrics),
        **manifest_fields,
    )
    write_manifest(storage, folder, manifest, fsync=request.fsync)
