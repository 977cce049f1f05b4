"""Encodes what the caller of a save passes as `extra` and `rank_extra`, and writes the latter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unified_ckpt.engine.folder.rank_extra_index import encode_rank_extra_index
from unified_ckpt.engine.source.stateful import replace_with_states, stateful_objects
from unified_ckpt.format import codec, digests, names
from unified_ckpt.format.manifest_fields import RankExtraFile
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.exchange.file_writer import FileWriter


@dataclass(frozen=True, slots=True)
class CallerExtra:
    """The caller's `extra` and `rank_extra`, the latter encoded or empty.

    `objects` are the labels of this rank's objects with a `state_dict`.
    """

    extra: Any
    rank_extra: bytes
    objects: tuple[str, ...] = ()


def encode_extra(extra: Any, rank_extra: Any, *, keeps_extra: bool, copy: bool) -> CallerExtra:
    """Replace objects by their states and encode them.

    FormatError naming the path of a value that cannot be stored.

    `state_dict` is called on every rank because it may be collective. Only a rank that
    `keeps_extra` stores `extra`; `copy` copies it, as the caller may change it.
    """
    objects = (*stateful_objects(extra, "extra"), *stateful_objects(rank_extra, "rank_extra"))
    labels = tuple(named.label for named in objects)
    extra = replace_with_states(extra, "extra")
    rank_extra = replace_with_states(rank_extra, "rank_extra")
    if not keeps_extra:
        extra = None
    elif copy:
        extra = codec.unpack(codec.pack(extra, "extra"), "extra")
    else:
        codec.encode(extra, "extra")
    encoded = b"" if rank_extra is None else codec.pack(rank_extra, "rank_extra")
    return CallerExtra(extra, encoded, labels)


def write_rank_extra(
    collective: Collective, file_writer: FileWriter, encoded: bytes
) -> RankExtraFile | None:
    """Collective. Write each rank's `rank_extra` to its place in one file.

    Returns the file's record on rank 0, None if no rank has any.
    """
    world = collective.world
    summary = [len(encoded), digests.crc(encoded)]
    summaries = collective.collect_json("rank-extra", summary, dst=0, ranks=range(world))
    record = None
    if collective.rank == 0:
        index = encode_rank_extra_index(summaries)
        if index is not None:
            file_writer.write_at(names.RANK_EXTRA, 0, [memoryview(index.prefix)])
            record = index.record
        for rank in range(world):
            start = index.starts[rank] if index is not None else 0
            collective.put_json(f"rank-extra-start/{rank}", start)
    start = collective.get_json(f"rank-extra-start/{collective.rank}")
    if encoded:
        file_writer.write_at(names.RANK_EXTRA, start, [memoryview(encoded)])
    return record
