"""What a checkpoint holds beside the parts: what is said of modules and optimizers, the caller's `extra`, and each rank's own."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unified_ckpt.engine.folder.extra_state import Told
from unified_ckpt.engine.source.stateful import objects_in, with_states
from unified_ckpt.format import codec, digests, header, names
from unified_ckpt.format.manifest import RankExtraFile
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.exchange.shared_files import Files
from unified_ckpt.runtime.torch_state.flatten import State
from unified_ckpt.runtime.torch_state.optimizers import FlatOptimizer


@dataclass(frozen=True, slots=True)
class Words:
    """What the caller gave beside tensors. `rank_extra`: packed, or empty. `objects`: the labels of this rank's objects."""

    extra: Any
    rank_extra: bytes
    objects: tuple[str, ...] = ()


def words_of(extra: Any, rank_extra: Any, *, first: bool, freeze: bool) -> Words:
    """FormatError naming the path, before anything is written, for what cannot be stored. `freeze`: copy what the caller may change.

    Objects give their state on every rank, for their own calls may be collective; of `extra` only the `first` rank's is kept.
    """
    objects = tuple(
        one.label for one in (*objects_in(extra, "extra"), *objects_in(rank_extra, "rank_extra"))
    )
    extra, rank_extra = with_states(extra, "extra"), with_states(rank_extra, "rank_extra")
    if not first:
        extra = None
    elif freeze:
        extra = codec.unpack(codec.pack(extra, "extra"), "extra")
    else:
        codec.encode(extra, "extra")
    return Words(
        extra, b"" if rank_extra is None else codec.pack(rank_extra, "rank_extra"), objects
    )


def tell(state: State, *, with_optimizer: bool) -> bytes:
    """What this rank says for all ranks that hold the same tensors. `with_optimizer`: whether the optimizer is stored at all."""
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


def put_together(said: Sequence[bytes]) -> Told:
    """Joins what the speakers said: groups with equal options become one, in the order in which they were first named."""
    told = Told()
    by_options: dict[bytes, dict[str, Any]] = {}
    for text in said:
        one = codec.unpack(text, "state")
        for part, aliases in one["aliases"].items():
            told.aliases.setdefault(part, {}).update(aliases)
        told.modules.update(one["modules"])
        told.scalars.update(one["scalars"])
        told.has_optimizer |= one["optimizer"]
        own: dict[bytes, dict[str, Any]] = {}
        for i, group in enumerate(one["groups"]):
            # Groups of one rank stay apart even where their options are equal now.
            kinds = {kind: group.get(kind) for kind in ("optimizer", "masters")}
            key = codec.pack(
                [
                    group["options"],
                    kinds,
                    sum(g["options"] == group["options"] for g in one["groups"][:i]),
                ],
                "options",
            )
            own[key] = group
        for key, group in own.items():
            known = by_options.setdefault(key, {**group, "names": []})
            there = set(known["names"])
            known["names"].extend(fqn for fqn in group["names"] if fqn not in there)
    told.groups = list(by_options.values())
    return told


def write_rank_extra(meeting: Meeting, files: Files, packed: bytes) -> RankExtraFile | None:
    """Collective. Each rank's value to its place in one file; returns its record on rank 0, None where no rank has one."""
    told = meeting.collect(
        "rank-extra",
        json.dumps([len(packed), digests.crc(packed)]).encode(),
        at=0,
        ranks=range(meeting.world),
    )
    record = None
    if meeting.rank == 0:
        sizes = [json.loads(text) for text in told]
        total = sum(nbytes for nbytes, _ in sizes)
        words = [("crcs", "U64", (meeting.world,)), ("offsets", "U64", (meeting.world + 1,))]
        head, _ = header.encode_header([*words, ("blobs", "U8", (total,))])
        offsets = [0]
        for nbytes, _ in sizes:
            offsets.append(offsets[-1] + nbytes)
        table = struct.pack(
            f"<{meeting.world + len(offsets)}Q", *(crc for _, crc in sizes), *offsets
        )
        for rank in range(meeting.world):
            meeting.put(
                f"rank-extra-at/{rank}",
                str(len(head) + len(table) + offsets[rank] if total else -1).encode(),
            )
        if total:
            files.write_at(names.RANK_EXTRA, 0, [memoryview(head), memoryview(table)])
            streams = [
                (digests.crc(head + table), len(head) + len(table)),
                *((crc, nbytes) for nbytes, crc in sizes),
            ]
            crc, nbytes = digests.combine_stream(streams)
            record = RankExtraFile(
                file=names.RANK_EXTRA,
                nbytes=nbytes,
                header_crc=f"{digests.crc(head):016x}",
                crc=f"{crc:016x}",
                world_size=meeting.world,
                table_crc=f"{digests.crc(head + table):016x}",
            )
    start = int(meeting.get(f"rank-extra-at/{meeting.rank}"))
    if packed and start >= 0:
        files.write_at(names.RANK_EXTRA, start, [memoryview(packed)])
    return record
