"""What a checkpoint holds beside the parts: what is said of modules and optimizers, the caller's
`extra`, and each rank's own.
"""

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
from unified_ckpt.runtime.exchange.shared_files import FileWriter
from unified_ckpt.runtime.torch_state.flatten import FlatState
from unified_ckpt.runtime.torch_state.optimizers import FlatOptimizer


@dataclass(frozen=True, slots=True)
class ExtraState:
    """What the caller gave beside tensors. `rank_extra`: packed, or empty. `objects`: the labels of
    this rank's objects.
    """

    extra: Any
    rank_extra: bytes
    objects: tuple[str, ...] = ()


def encode_extra(extra: Any, rank_extra: Any, *, is_first: bool, freeze: bool) -> ExtraState:
    """FormatError naming the path, before anything is written, for what cannot be stored. `freeze`:
    copy what the caller may change.

    Objects give their state on every rank, for their own calls may be collective; of `extra` only
    the `is_first` rank's is kept.
    """
    objects = tuple(
        named.label
        for named in (
            *stateful_objects(extra, "extra"),
            *stateful_objects(rank_extra, "rank_extra"),
        )
    )
    extra, rank_extra = (
        replace_with_states(extra, "extra"),
        replace_with_states(rank_extra, "rank_extra"),
    )
    if not is_first:
        extra = None
    elif freeze:
        extra = codec.unpack(codec.pack(extra, "extra"), "extra")
    else:
        codec.encode(extra, "extra")
    return ExtraState(
        extra, b"" if rank_extra is None else codec.pack(rank_extra, "rank_extra"), objects
    )


def encode_non_tensor_state(state: FlatState, *, with_optimizer: bool) -> bytes:
    """What this rank says for all ranks that hold the same tensors. `with_optimizer`: whether the
    optimizer is stored at all.
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
    """Joins what the speakers said: groups with equal options become one, in the order in which
    they were first named.
    """
    merged = NonTensorState()
    by_options: dict[bytes, dict[str, Any]] = {}
    for encoded in states:
        state = codec.unpack(encoded, "state")
        for part, aliases in state["aliases"].items():
            merged.aliases.setdefault(part, {}).update(aliases)
        merged.modules.update(state["modules"])
        merged.scalars.update(state["scalars"])
        merged.has_optimizer |= state["optimizer"]
        groups_of_rank: dict[bytes, dict[str, Any]] = {}
        for index, group in enumerate(state["groups"]):
            # Groups of one rank stay apart even where their options are equal now.
            kinds = {kind: group.get(kind) for kind in ("optimizer", "masters")}
            key = codec.pack(
                [
                    group["options"],
                    kinds,
                    sum(
                        earlier["options"] == group["options"]
                        for earlier in state["groups"][:index]
                    ),
                ],
                "options",
            )
            groups_of_rank[key] = group
        for key, group in groups_of_rank.items():
            joined = by_options.setdefault(key, {**group, "names": []})
            joined_names = set(joined["names"])
            joined["names"].extend(fqn for fqn in group["names"] if fqn not in joined_names)
    merged.groups = list(by_options.values())
    return merged


def write_rank_extra(
    collective: Collective, file_writer: FileWriter, packed: bytes
) -> RankExtraFile | None:
    """Collective. Each rank's value to its place in one file; returns its record on rank 0, None
    where no rank has one.
    """
    entries = collective.collect(
        "rank-extra",
        json.dumps([len(packed), digests.crc(packed)]).encode(),
        dst=0,
        ranks=range(collective.world),
    )
    record = None
    if collective.rank == 0:
        sizes = [json.loads(entry) for entry in entries]
        total = sum(nbytes for nbytes, _ in sizes)
        sections = [
            ("crcs", "U64", (collective.world,)),
            ("offsets", "U64", (collective.world + 1,)),
        ]
        header_bytes, _ = header.encode_header([*sections, ("blobs", "U8", (total,))])
        offsets = [0]
        for nbytes, _ in sizes:
            offsets.append(offsets[-1] + nbytes)
        table = struct.pack(
            f"<{collective.world + len(offsets)}Q", *(crc for _, crc in sizes), *offsets
        )
        for rank in range(collective.world):
            collective.put(
                f"rank-extra-at/{rank}",
                str(len(header_bytes) + len(table) + offsets[rank] if total else -1).encode(),
            )
        if total:
            file_writer.write_at(names.RANK_EXTRA, 0, [memoryview(header_bytes), memoryview(table)])
            streams = [
                (digests.crc(header_bytes + table), len(header_bytes) + len(table)),
                *((crc, nbytes) for nbytes, crc in sizes),
            ]
            crc, nbytes = digests.combine_all(streams)
            record = RankExtraFile(
                file=names.RANK_EXTRA,
                nbytes=nbytes,
                header_crc=f"{digests.crc(header_bytes):016x}",
                crc=f"{crc:016x}",
                world_size=collective.world,
                table_crc=f"{digests.crc(header_bytes + table):016x}",
            )
    start = int(collective.get(f"rank-extra-at/{collective.rank}"))
    if packed and start >= 0:
        file_writer.write_at(names.RANK_EXTRA, start, [memoryview(packed)])
    return record
