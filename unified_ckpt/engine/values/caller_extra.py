"""Encodes what the caller of a save passes as `extra` and `rank_extra`, and writes the latter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unified_ckpt.engine.folder.entries_index import encode_entries_index
from unified_ckpt.engine.source.stateful_objects import replace_with_states, stateful_objects
from unified_ckpt.format import codec, digests, names
from unified_ckpt.format.codec import Path
from unified_ckpt.format.manifest_fields import RankExtraFile
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.exchange.file_writer import ContiguousWrite, FileWriter


@dataclass(frozen=True, slots=True)
class CallerExtra:
    """The caller's `extra` with the states of objects, and `rank_extra`, encoded or empty.

    `objects`: labels of this rank's objects with a `state_dict`; `object_paths`: the paths of those
    in `extra`.
    """

    extra: Any
    rank_extra: bytes
    objects: tuple[str, ...] = ()
    object_paths: tuple[Path, ...] = ()


def encode_extra(extra: Any, rank_extra: Any, *, copy: bool) -> CallerExtra:
    """Replace objects by their states; encode `rank_extra`, and copy `extra` if `copy`.

    FormatError naming the path of a value that cannot be stored. `state_dict` is called on every
    rank because it may be collective.
    """
    in_extra = stateful_objects(extra, "extra")
    objects = (*in_extra, *stateful_objects(rank_extra, "rank_extra"))
    extra = replace_with_states(extra, "extra")
    rank_extra = replace_with_states(rank_extra, "rank_extra")
    if copy:
        extra = codec.unpack(codec.pack(extra, "extra"), "extra")
    return CallerExtra(
        extra,
        b"" if rank_extra is None else codec.pack(rank_extra, "rank_extra"),
        tuple(named.label for named in objects),
        tuple(named.path for named in in_extra),
    )


def write_rank_extra(
    collective: Collective, file_writer: FileWriter, encoded: bytes
) -> RankExtraFile | None:
    """Collective. Write each rank's `rank_extra` to its place in one file.

    Returns the file's record on rank 0, None if no rank has any.
    """
    world = collective.world
    summaries = collective.collect_json(
        "rank-extra", [len(encoded), digests.crc(encoded)], dst=0, ranks=range(world)
    )
    record = None
    if collective.rank == 0:
        index = encode_entries_index(summaries)
        if index is not None:
            prefix = memoryview(index.prefix)
            file_writer.write(ContiguousWrite(names.RANK_EXTRA, 0, [prefix]))
            record = RankExtraFile(file=names.RANK_EXTRA, world_size=world, **index.fields)
        for rank in range(world):
            start = index.starts[rank] if index is not None else 0
            collective.put_json(f"rank-extra-start/{rank}", start)
    start = collective.get_json(f"rank-extra-start/{collective.rank}")
    if encoded:
        file_writer.write(ContiguousWrite(names.RANK_EXTRA, start, [memoryview(encoded)]))
    return record
