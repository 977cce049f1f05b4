"""Rewrites any Source as a unified folder or as a Hugging Face model folder.

All ranks write, in bounded memory. How data could be lost or be wrong, and what prevents it:
- Slices are assembled in the wrong order. If the source holds the weights twice, as model and as
  master weights, the two are compared (`weights_check.py`).
- The source is damaged. It verifies the bytes that it has digests of while they are read.
- Ranks see different sources. A fingerprint of names, dtypes and shapes is compared before any
  write.
- A tensor is left out. Names, shapes and counts of what was written are compared with the source's.
- A crash or a full disk. One rename, or a commit record in a bucket, publishes the target after all
  checks; until then, whatever was at the target stays.
"""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import count_text, human_size
from unified_ckpt.engine.folder.finalize import finalize_checkpoint, finalize_files, manifest_fields
from unified_ckpt.engine.folder.if_exists import PublishTarget, resolve_if_exists
from unified_ckpt.engine.folder.transaction import Transaction
from unified_ckpt.engine.rewrite.encode import encode_source
from unified_ckpt.engine.rewrite.metadata import write_rank_extra, write_state
from unified_ckpt.engine.rewrite.tensors import (
    Rewrite,
    WrittenFiles,
    plan_files,
    tensor_sizes,
    unwritten_names_notes,
    write_tensors,
)
from unified_ckpt.engine.rewrite.weights_check import MasterCheck
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import (
    CheckpointError,
    FormatError,
    RankError,
    StorageError,
)
from unified_ckpt.format import digests
from unified_ckpt.format.encoded_tensors import Compression, choose_encodings
from unified_ckpt.format.manifest import ConvertedFrom
from unified_ckpt.format.manifest_fields import rank_mesh_record
from unified_ckpt.format.names import OPTIMIZER, check_part_name
from unified_ckpt.runtime.comm.call import Call
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.storage.protocol import Storage


@dataclass(frozen=True, slots=True)
class ConvertRequest:
    """Arguments of a conversion, resolved.

    `source_path` and `recorded_options` are for messages and for the manifest's record.
    `attach(folder)` adds files on rank 0 before the commit. `progress(nbytes, total)` reports bytes
    written by this rank and the approximate total of the rank. `without_manifest` writes only the
    files of Hugging Face's format.
    """

    source_path: str
    recorded_options: Mapping[str, object]
    max_file_bytes: int | None
    if_exists: str
    timeout_seconds: float
    compression: Compression = "none"
    without_manifest: bool = False
    compare_masters: bool = True
    # compared in place of the source, whose model may be cast from its masters
    uncast_source: Source | None = None
    attach: Callable[[str], object] = lambda _: None
    progress: Callable[[int, int], object] = lambda *_: None


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion wrote and verified.

    `tensors`, `nbytes`: numbers by part, over all ranks. `compared`: tensors that equal a second
    copy in the source. `verified`: tensors that match digests in the source. `id`: None for a
    folder without a manifest. `left_out`: what the target lacks: entries of the source
    folder, parts that were not written, and state that the target's format cannot store. `existed`:
    true if a checkpoint was kept and nothing was written.
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

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        verb = "was there already and stays" if self.existed else "written"
        tensors = count_text(sum(self.tensors.values()), "tensor")
        size = f"{tensors}, {human_size(sum(self.nbytes.values()))} in {self.seconds:.2f} s"
        return f"{self.path}\n  {verb}, from {self.format}{step}\n  {size}"


def convert_source(
    comm: Comm,
    source: Source | Exception,
    storage: Storage,
    name: str,
    request: ConvertRequest,
    *,
    topology: Topology,
) -> ConvertReport:
    """Write the source to `name` under the storage's root. Collective.

    `source` may be the exception that opening it raised on this rank; every rank then raises it.
    IntegrityError if a check fails. After any error, `name` is as it was before.
    """
    start_time, path = time.monotonic(), storage.path(name)
    operation = f"conversion of {request.source_path} to {path}"
    common_args = {
        "name": name,
        **request.recorded_options,
        "if_exists": request.if_exists,
        "fsync": storage.fsync,
    }
    collective = comm.begin_collective(
        Call(operation, common_args), timeout_seconds=request.timeout_seconds
    )
    with storage, collective.propagating_errors():
        with collective.step("open"):
            if isinstance(source, Exception):
                raise source
            sizes = _check_same_tensors(collective, source, request.source_path)
            step = source.metadata().step  # nothing may fail once the folder has its name
        target = PublishTarget(name, "error" if request.without_manifest else request.if_exists)
        with Transaction(collective, storage, target) as transaction:
            existing = transaction.begin(partial(resolve_if_exists, storage, target))
            if existing is not None:
                return ConvertReport(
                    path,
                    source.format,
                    existing["id"],
                    existing["step"],
                    time.monotonic() - start_time,
                    existed=True,
                )
            masters = MasterCheck(request.uncast_source or source, enabled=request.compare_masters)
            encodings = choose_encodings(source.all_specs(), request.compression)
            if encodings:
                source = encode_source(collective, source, encodings, masters.update)
                sizes, masters.compared = tensor_sizes(source), encodings.keys()
            rewrite = Rewrite(
                transaction, source, topology, sizes, lambda _: collective.heartbeat()
            )
            rewrite = plan_files(rewrite, {}, max_file_bytes=request.max_file_bytes)
            record = _write_and_publish(rewrite, request, masters, start_time)
    # of several folders of one save: damage that other copies made up for
    damage = source.verification.damage
    return ConvertReport(
        path=path,
        format=source.format,
        id=None if request.without_manifest else transaction.save_id,
        step=step,
        seconds=time.monotonic() - start_time,
        tensors=record.tensors,
        nbytes=record.nbytes,
        compared=record.compared,
        verified=record.verified,
        notes=tuple(dict.fromkeys((*record.notes, *damage))),
    )


def _check_same_tensors(collective: Collective, source: Source, path: str) -> dict[Key, int]:
    """Return the size of every tensor in bytes.

    Collective. RankError if ranks see different tensors.
    """
    sizes = tensor_sizes(source)
    if not sizes:
        raise FormatError(f"{path}: got a checkpoint without tensors, expected at least one tensor")
    for part in source.parts:
        check_part_name(part)
    fingerprint = f"{_tensor_fingerprint(source):016x}".encode()
    if (
        collective.broadcast("fingerprint", fingerprint if collective.rank == 0 else None)
        != fingerprint
    ):
        raise RankError(
            f"{path}: rank {collective.rank} sees other tensors than rank 0; use a path that all "
            "ranks share"
        )
    return sizes


def _tensor_fingerprint(source: Source) -> int:
    crc = 0
    for (part, name), spec in sorted(source.all_specs().items()):
        crc = digests.crc(f"{part}:{name}:{spec.dtype}:{spec.shape}\n".encode(), crc)
    return crc


def _write_and_publish(
    rewrite: Rewrite, request: ConvertRequest, masters: MasterCheck, start_time: float
) -> ConvertedFrom:
    """Write, verify and publish the folder; return its record. Collective."""
    collective, transaction = rewrite.transaction.collective, rewrite.transaction
    rank_nbytes = sum(stop - start for _, _, start, stop in rewrite.rank_spans())

    def on_write(nbytes: int) -> None:
        collective.heartbeat()
        request.progress(nbytes, rank_nbytes)

    rewrite = replace(rewrite, on_progress=on_write)
    with collective.step("write"):
        written = write_tensors(rewrite, masters.update)
        compared = _check_masters(collective, masters, request.source_path)
    with collective.step("finalize"):
        if written is not None:
            record = _conversion_record(rewrite, request, written, compared)
            _finalize(rewrite, request, written, record, start_time)
            collective.put("record", record.model_dump_json().encode())
    transaction.publish_and_clean_up()
    return ConvertedFrom.model_validate_json(collective.get("record"))


def _check_masters(collective: Collective, master_check: MasterCheck, source_path: str) -> int:
    """Return the number of tensors compared, on rank 0.

    Collective. IntegrityError for a mismatch.
    """
    summaries = collective.collect_json(
        "master-check", master_check.summary(), dst=0, ranks=range(collective.world)
    )
    if collective.rank:
        return 0
    master_check.merge(summaries)
    return master_check.check(source_path)


def _conversion_record(
    rewrite: Rewrite, request: ConvertRequest, written: WrittenFiles, compared: int
) -> ConvertedFrom:
    """On rank 0: the manifest's record."""
    source, specs = rewrite.source, rewrite.source.all_specs()
    tensors, nbytes, crc_by_part = Counter[str](), Counter[str](), dict[str, int]()
    for (part, name), blocks in sorted(written.block_crcs.items()):
        spec = specs[part, name]
        tensors[part] += 1
        nbytes[part] += spec.nbytes
        line = f"{name}:{spec.dtype}:{spec.shape}\n".encode() + struct.pack(
            f"<{len(blocks)}Q", *blocks
        )
        crc_by_part[part] = digests.crc(line, crc_by_part.get(part, 0))
    return ConvertedFrom(
        format=source.format,
        path=request.source_path,
        save_id=source.metadata().save_id,
        options=dict(request.recorded_options),
        tensors=dict(tensors),
        nbytes=dict(nbytes),
        digests={part: f"{crc:016x}" for part, crc in crc_by_part.items()},
        compared=compared,
        verified=len(source.keys_with_digests(list(rewrite.sizes))),
        notes=[],
    )


def _finalize(
    rewrite: Rewrite,
    request: ConvertRequest,
    written: WrittenFiles,
    record: ConvertedFrom,
    start_time: float,
) -> None:
    """On rank 0: write everything beside tensors, the manifest last."""
    source, tensors = rewrite.source, written.tensors
    attach = partial(_attach_files, request)
    if request.without_manifest:
        record.notes.extend(unwritten_names_notes(source))
        finalize_files(rewrite.transaction, tensors, attach=attach)
        return
    metadata = source.metadata()
    state = write_state(
        rewrite,
        written,
        has_optimizer=OPTIMIZER in source.parts
        and bool(metadata.groups or metadata.scalars or source.names(OPTIMIZER)),
        rank_extra=write_rank_extra(rewrite, world_size=metadata.rank_extras, notes=record.notes),
    )
    fields = manifest_fields(rewrite.transaction, started=start_time) | {
        "step": metadata.step,
        "omitted_parts": list(metadata.omitted_parts),
        "converted_from": record,
        "metrics": dict(metadata.metrics),
        "rank_mesh": rank_mesh_record(metadata.rank_mesh) if state.rank_extra else None,
    }
    finalize_checkpoint(rewrite.transaction, tensors, state, fields, attach=attach)


def _attach_files(request: ConvertRequest, folder: str) -> None:
    try:
        request.attach(folder)
    except CheckpointError:  # NotFoundError is an OSError
        raise
    except OSError as error:
        raise StorageError(
            f"{error.filename}: cannot copy this side file: {error.strerror}"
        ) from error
