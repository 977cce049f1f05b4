"""The proof: block digests joined from all writers, the indexes, and the manifest, which is written
last.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from unified_ckpt.engine.folder.extra_state import EncodedExtra, NonTensorState
from unified_ckpt.engine.folder.manifest import versions
from unified_ckpt.engine.plan.chunks import BlockCrcs
from unified_ckpt.engine.plan.save_plan import GlobalPlan, GroupPlan
from unified_ckpt.errors import IntegrityError
from unified_ckpt.format import digests, index, names
from unified_ckpt.format.manifest import (
    DigestFile,
    IndexFile,
    Manifest,
    NodeGroupRecord,
    Part,
    RankExtraFile,
)
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.exchange.shared_files import FileWriter
from unified_ckpt.runtime.storage.storage import LocalStorage


def write_digests(
    collective: Collective,
    file_writer: FileWriter,
    groups: Sequence[GroupPlan],
    crcs_by_group: Sequence[BlockCrcs],
    global_plan: GlobalPlan | None,
) -> DigestFile | None:
    """Collective. Each group's lead joins what its members digested and writes it at its place;
    returns the record on rank 0.
    """
    for group, local_crcs in zip(groups, crcs_by_group, strict=True):
        if group.leader != collective.rank:
            collective.collect(
                f"digests/{group.index}",
                b"." + digests.serialize(local_crcs),
                dst=group.leader,
                ranks=group.holders,
            )
    for group, local_crcs in zip(groups, crcs_by_group, strict=True):
        if group.leader == collective.rank:
            packed_crcs = collective.collect(
                f"digests/{group.index}", b".", dst=group.leader, ranks=group.holders
            )
            remote_packed = [packed[1:] for packed in packed_crcs]
            section = _combine_blocks(
                group,
                [
                    *local_crcs,
                    *(
                        block_crc
                        for packed in remote_packed
                        for block_crc in digests.deserialize(packed)
                    ),
                ],
            )
            file_writer.write_at(names.DIGESTS, group.digest_start, [memoryview(section)])
            collective.put(
                f"section/{group.index}", json.dumps([digests.crc(section), len(section)]).encode()
            )
    if global_plan is None:
        return None
    file_writer.write_at(names.DIGESTS, 0, [memoryview(global_plan.digest_header)])
    sections = [
        json.loads(collective.get(f"section/{index}"))
        for index in range(len(global_plan.digest_sections))
    ]
    crc, nbytes = digests.combine_all(
        [(digests.crc(global_plan.digest_header), len(global_plan.digest_header)), *sections]
    )
    return DigestFile(
        file=names.DIGESTS,
        algorithm=digests.ALGORITHM,
        block_nbytes=digests.BLOCK_NBYTES,
        nbytes=nbytes,
        crc=f"{crc:016x}",
    )


def _combine_blocks(group: GroupPlan, block_crcs: BlockCrcs) -> bytes:
    """The digests of all blocks of the group's tensors, row by row. IntegrityError where a byte was
    digested twice or never.
    """
    crcs_by_decl: dict[int, list[digests.BlockCrc]] = {}
    for n, block_crc in block_crcs:
        crcs_by_decl.setdefault(n, []).append(block_crc)
    blocks: list[int] = []
    for number, decl in enumerate(group.decls):
        complete, partial = digests.combine_blocks(
            crcs_by_decl.get(number, ()), nbytes=decl.spec.nbytes
        )
        count = digests.block_count(decl.spec.nbytes)
        if partial or len(complete) != count:
            raise IntegrityError(
                f"{decl.part}:{decl.fqn}: {count - len(complete)} of {count} blocks were not written whole; this is a bug"
            )
        blocks.extend(complete[index] for index in range(count))
    return struct.pack(f"<{len(blocks)}Q", *blocks)


def write_indexes(
    storage: LocalStorage, folder: str, global_plan: GlobalPlan
) -> dict[str, IndexFile]:
    """One index for each part, also for a part of one file; the records by part."""
    records = {}
    for part, weight_map in global_plan.weight_maps.items():
        encoded = index.encode_index(
            total_size=global_plan.part_nbytes[part], weight_map=weight_map
        )
        storage.put(f"{folder}/{names.index_name(part)}", encoded, fsync=False)
        records[part] = IndexFile.from_bytes(encoded)
    return records


def make_manifest(
    *,
    save_id: str,
    step: int | None,
    seconds: float,
    metrics: Mapping[str, float],
    world_size: int,
    mesh: Mapping[str, object],
    part_names: Sequence[str],
    omitted: Sequence[str],
    global_plan: GlobalPlan,
    indexes: Mapping[str, IndexFile],
    non_tensor_state: NonTensorState,
    extra: EncodedExtra,
    objects: Sequence[str],
    digest_file: DigestFile | None,
    rank_extra: RankExtraFile | None,
    node_group: NodeGroupRecord | None,
) -> Manifest:
    """The commit record. A part that was asked for and holds no tensor is named with no files."""
    parts = {
        part: Part(
            files=dict(global_plan.records.get(part, {})),
            index=indexes.get(part),
            total_nbytes=global_plan.part_nbytes.get(part, 0),
            aliases=non_tensor_state.aliases.get(part, {}),
        )
        for part in part_names
    }
    return Manifest(
        save_id=save_id,
        step=step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        world_size=world_size,
        seconds=round(seconds, 3),
        metrics=dict(metrics),
        versions=versions(),
        mesh=dict(mesh),
        parts=parts,
        omitted_parts=list(omitted),
        digests=digest_file,
        extra_file=extra.file,
        rank_extra=rank_extra,
        node_group=node_group,
        optimizer=extra.optimizer,
        modules=extra.modules,
        extra=extra.extra,
        objects=list(objects),
    )
