"""Collects what a save stores beside tensors, from the caller, modules and optimizers."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unified_ckpt.engine.folder.extra_state import NonTensorState
from unified_ckpt.engine.source.stateful import replace_with_states, stateful_objects
from unified_ckpt.format import codec, digests, header, names
from unified_ckpt.format.manifest import RankExtraFile
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.exchange.file_writer import FileWriter
from unified_ckpt.runtime.torch_state.flatten import FlatState
from unified_ckpt.runtime.torch_state.optimizers import FlatOptimizer


@dataclass(frozen=True, slots=True)
class ExtraState:
    """The caller's `extra` and `rank_extra`, the latter encoded or empty.

    `objects` are the labels of this rank's objects with a `state_dict`.
    """

    extra: Any
    rank_extra: bytes
    objects: tuple[str, ...] = ()


def encode_extra(extra: Any, rank_extra: Any, *, is_first: bool, freeze: bool) -> ExtraState:
    """Replace objects by their states and encode them.

    FormatError naming the path of a value that cannot be stored.

    `state_dict` is called on every rank because it may be collective. Only the first rank's `extra`
    is kept; `freeze` copies it, as the caller may change it.
    """
    objects = (*stateful_objects(extra, "extra"), *stateful_objects(rank_extra, "rank_extra"))
    labels = tuple(named.label for named in objects)
    extra = replace_with_states(extra, "extra")
    rank_extra = replace_with_states(rank_extra, "rank_extra")
    if not is_first:
        extra = None
    elif freeze:
        extra = codec.unpack(codec.pack(extra, "extra"), "extra")
    else:
        codec.encode(extra, "extra")
    encoded = b"" if rank_extra is None else codec.pack(rank_extra, "rank_extra")
    return ExtraState(extra, encoded, labels)


def encode_non_tensor_state(state: FlatState, *, with_optimizer: bool) -> bytes:
    """Return the state beside tensors, which one rank reports for all ranks with the same tensors.

    `with_optimizer`: whether the optimizer is stored.
    """
    optimizer = state.optimizer if with_optimizer else FlatOptimizer()
    return codec.pack(
        {
            "aliases": state.aliases,
            "modules": state.model.extra_state,
            "groups": optimizer.groups,
            "scalars": optimizer.scalars,
            "optimizer": bool(optimizer.groups or optimizer.scalars),
        },
        "state",
    )


def merge_non_tensor_state(states: Sequence[bytes]) -> NonTensorState:
    """Merge the reported states.

    Param groups with equal options become one; groups keep the order of their first appearance.
    """
    merged = NonTensorState()
    groups_by_key: dict[bytes, dict[str, Any]] = {}
    for body in states:
        state = codec.unpack(body, "state")
        for part, aliases in state["aliases"].items():
            merged.aliases.setdefault(part, {}).update(aliases)
        merged.modules.update(state["modules"])
        merged.scalars.update(state["scalars"])
        merged.has_optimizer |= state["optimizer"]
        groups_of_rank: dict[bytes, dict[str, Any]] = {}
        for index, group in enumerate(state["groups"]):
            # Groups of one rank stay separate even if their options are equal now.
            options = group["options"]
            duplicates = sum(other["options"] == options for other in state["groups"][:index])
            kinds = {kind: group.get(kind) for kind in ("optimizer", "masters")}
            groups_of_rank[codec.pack([options, kinds, duplicates], "options")] = group
        for key, group in groups_of_rank.items():
            merged_group = groups_by_key.setdefault(key, {**group, "names": []})
            merged_names = set(merged_group["names"])
            merged_group["names"].extend(fqn for fqn in group["names"] if fqn not in merged_names)
    merged.groups = list(groups_by_key.values())
    return merged


def write_rank_extra(
    collective: Collective, file_writer: FileWriter, encoded: bytes
) -> RankExtraFile | None:
    """Collective. Write each rank's `rank_extra` to its place in one file.

    Returns the file's record on rank 0, None if no rank has any.
    """
    world = collective.world
    summaries = collective.collect(
        "rank-extra",
        json.dumps([len(encoded), digests.crc(encoded)]).encode(),
        dst=0,
        ranks=range(world),
    )
    record = None
    if collective.rank == 0:
        entries = [json.loads(summary) for summary in summaries]  # (bytes, CRC) of each rank
        total = sum(nbytes for nbytes, _ in entries)
        sections = [("crcs", "U64", (world,)), ("offsets", "U64", (world + 1,))]
        header_bytes, _ = header.encode_header([*sections, ("blobs", "U8", (total,))])
        offsets = [0]
        for nbytes, _ in entries:
            offsets.append(offsets[-1] + nbytes)
        crcs = [crc for _, crc in entries]
        table = struct.pack(f"<{world + len(offsets)}Q", *crcs, *offsets)
        blobs_start = len(header_bytes) + len(table)
        for rank in range(world):
            start = blobs_start + offsets[rank] if total else -1
            collective.put(f"rank-extra-start/{rank}", str(start).encode())
        if total:
            file_writer.write_at(names.RANK_EXTRA, 0, [memoryview(header_bytes), memoryview(table)])
            table_crc = digests.crc(header_bytes + table)
            blobs = [(crc, nbytes) for nbytes, crc in entries]
            crc, nbytes = digests.combine_all([(table_crc, blobs_start), *blobs])
            record = RankExtraFile(
                file=names.RANK_EXTRA,
                nbytes=nbytes,
                header_crc=f"{digests.crc(header_bytes):016x}",
                crc=f"{crc:016x}",
                world_size=world,
                table_crc=f"{table_crc:016x}",
            )
    start = int(collective.get(f"rank-extra-start/{collective.rank}"))
    if encoded and start >= 0:
        file_writer.write_at(names.RANK_EXTRA, start, [memoryview(encoded)])
    return record
