"""Compares replicas at every save, which finds what no sharding shows: replicas that diverged.

A rank's state would be lost if a save stored another rank's instead without a word. Each rank sends
one digest for each set of replicas. Only if some differ, ranks exchange more, which is bounded: it
grows neither with the ranks that hold a tensor nor, per rank, with the tensors that differ.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from operator import itemgetter
from typing import NamedTuple

import torch

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.text import format_list, format_ranks
from unified_ckpt.engine.plan.chunks import CHUNK_NBYTES
from unified_ckpt.engine.plan.replica_sets import BATCH_NBYTES, Batch, ReplicaSet, is_always_equal
from unified_ckpt.engine.save.write.extents import ChunkBuffer
from unified_ckpt.engine.save.write.snapshot import SnapshotMemory
from unified_ckpt.errors import LayoutError
from unified_ckpt.format import codec, digests
from unified_ckpt.format.manifest_fields import ReplicaDifference
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.torch_state.tensors import (
    LocalTensor,
    as_bytes,
    as_contiguous,
    from_bytes,
    max_difference,
    pack_runs,
)

KEPT_NBYTES = 32 << 20  # of packed tensors, for the names and values of those that differ
_ALIGN_NBYTES = 64  # of a batch in the memory
_MAX_NAMED = 32  # tensors that differ, of which a save names the first ones
_MAX_COPIES, _MAX_RANKS = 8, 32  # listed for each of them
_VALUES_NBYTES = 256 << 10  # of a set, sent to the ranks that differ

_ANY = (
    "expected equal bytes; average them before the save, declare slices with a "
    'Layout, or store one of them with check_replicas="never"'
)
_ALWAYS_EQUAL = (
    "expected equal bytes: only one of them would be stored. Declare what differs: tensors of "
    "`parts` as DTensors or with a rule of a Layout, state of a shard as a DTensor that is sharded "
    "like its parameter"
)

# (number of the set, position in the names of its first holder)
_Place = tuple[int, int]


class _Conflict(NamedTuple):
    """A set of replicas that differ, and the first rank that holds it."""

    key: str
    first: int


class _Named(NamedTuple):
    """A tensor that differs. `ranks_by_copy`: the ranks of each copy, the first holder's first."""

    set_number: int
    position: int
    name: str
    ranks_by_copy: list[list[int]]

    @property
    def place(self) -> _Place:
        return self.set_number, self.position


def is_large_due(mode: str, *, comparisons: int) -> bool:
    """Whether a save compares large replicas. `comparisons`: earlier saves of the layout."""
    number = comparisons + 1
    return mode == "always" or number & (number - 1) == 0  # 1, 2, 4, 8, …


@dataclass(frozen=True, slots=True)
class _BatchDigest:
    """The digest of a batch; `packed`: its bytes if they are kept, otherwise the CRCs of all."""

    crc: int
    packed: memoryview | None
    crcs: tuple[int, ...] = ()


class ReplicaDigests:
    """The digests of one save, of tensors as they are when `add` is called.

    `memory`: the digests of the next save overwrite it.
    """

    def __init__(
        self,
        sets: Sequence[ReplicaSet],
        tensors: Sequence[LocalTensor],
        memory: SnapshotMemory,
    ) -> None:
        self.sets = {replica_set.key: replica_set for replica_set in sets}
        self._tensors = tensors
        self._digests: dict[str, dict[int, _BatchDigest]] = {key: {} for key in self.sets}
        packed = [b for replica_set in sets for b in replica_set.batches if b.is_packed]
        nbytes = min(sum(map(_aligned_nbytes, packed)), KEPT_NBYTES) + BATCH_NBYTES
        pinned = any(tensors[batch.runs[0][0]].local.is_cuda for batch in packed)
        self._memory = memory.reserve(nbytes if packed else 0, pinned=pinned)
        self._used_nbytes = BATCH_NBYTES  # its first bytes serve batches that are not kept

    @torch.no_grad()
    def add(self, *, deferrable: bool = True) -> None:
        """Digest what is not digested yet; unless `deferrable`, only what more than steps change.

        Tensors that have been digested may change.
        """
        for key, replica_set in self.sets.items():
            of_set = self._digests[key]
            for number, batch in enumerate(replica_set.batches):
                if number not in of_set and (deferrable or not batch.is_deferrable):
                    of_set[number] = self._digest(batch)

    def release_tensors(self) -> None:
        """Drop references to the tensors, which are all digested."""
        self._tensors = [tensor.without_memory() for tensor in self._tensors]

    def _digest(self, batch: Batch) -> _BatchDigest:
        if not batch.is_packed:
            crc = _digest_large(self._tensors[batch.runs[0][0]])
            return _BatchDigest(crc, None, (crc,))
        nbytes, start = sum(batch.nbytes), self._used_nbytes
        is_kept = start + nbytes <= KEPT_NBYTES + BATCH_NBYTES
        memory = self._memory[start : start + nbytes] if is_kept else self._memory[:nbytes]
        pack_runs([[self._tensors[index].local for index in run] for run in batch.runs], memory)
        packed = as_bytes(memory)
        if is_kept:
            self._used_nbytes += _aligned_nbytes(batch)
            return _BatchDigest(digests.crc(packed), packed)
        return _BatchDigest(digests.crc(packed), None, tuple(_crcs(packed, batch.nbytes)))

    def summary(self) -> dict[str, int]:
        """Return one CRC for each set, by key."""
        return {
            key: digests.crc(
                struct.pack(f"<{len(of_set)}Q", *(of_set[n].crc for n in sorted(of_set)))
            )
            for key, of_set in self._digests.items()
        }

    def names_crc(self, key: str) -> int:
        """Return the CRC of the names of a set, in their order."""
        return digests.crc(json.dumps(self.sets[key].names).encode())

    def tensor_crcs(self, key: str) -> list[int]:
        """Return the CRC of each tensor of a set, in the order of its names."""
        crcs: list[int] = []
        for number, batch in enumerate(self.sets[key].batches):
            digest = self._digests[key][number]
            crcs += digest.crcs if digest.packed is None else _crcs(digest.packed, batch.nbytes)
        return crcs

    def value(self, key: str, name: str) -> torch.Tensor | None:
        """Return a digested tensor of a set by name; None if its bytes are not kept."""
        batches, position = self.sets[key].batches, self.sets[key].names.index(name)
        stops = list(accumulate(len(batch.nbytes) for batch in batches))
        number = bisect_right(stops, position)
        packed, batch = self._digests[key][number].packed, batches[number]
        if packed is None:
            return None
        position -= stops[number] - len(batch.nbytes)
        local = self._tensors[list(chain.from_iterable(batch.runs))[position]].local
        start = sum(batch.nbytes[:position])
        data = packed[start : start + batch.nbytes[position]]
        return from_bytes(data, local.dtype, local.shape)


def _aligned_nbytes(batch: Batch) -> int:
    return -(-sum(batch.nbytes) // _ALIGN_NBYTES) * _ALIGN_NBYTES


def _crcs(packed: memoryview, nbytes: Sequence[int]) -> list[int]:
    stops = list(accumulate(nbytes))
    return [digests.crc(packed[stop - n : stop]) for stop, n in zip(stops, nbytes, strict=True)]


def _digest_large(tensor: LocalTensor) -> int:
    """Return the CRC of the local bytes, in the dtype they have in memory."""
    local = as_contiguous(tensor.local)
    if local.device.type == "cpu" or tensor.casts:
        return digests.crc(as_bytes(local.cpu()))
    crc, buffer, contiguous = 0, ChunkBuffer(), LocalTensor(tensor.decl, local)
    nbytes = local.nbytes
    for start in range(0, nbytes, CHUNK_NBYTES):
        chunk = buffer.bytes_of(contiguous, start, min(CHUNK_NBYTES, nbytes - start))
        crc = digests.crc(chunk, crc)
    return crc


class ReplicaCheck:
    """The comparison of one save; `collective` is that of all ranks.

    `any_differs_is_error`: on rank 0, whether every difference is an error, as at the first save of
    a layout. Else only those are that no layout makes right. `only_records`: none is an error.
    """

    def __init__(
        self,
        collective: Collective,
        replica_digests: ReplicaDigests,
        *,
        any_differs_is_error: bool,
        only_records: bool = False,
    ) -> None:
        self.digests, self._sets = replica_digests, replica_digests.sets
        self._collective, self._only_records = collective, only_records
        self._any_differs_is_error = any_differs_is_error
        self._holders: dict[str, list[int]] = {}  # on rank 0: ranks by set

    def send(self) -> None:
        """Send this rank's digests. Rank 0 waits for those of all ranks, and answers."""
        collective = self._collective
        self.digests.add()
        summaries = collective.collect_json(
            "replicas", self.digests.summary(), dst=0, ranks=range(collective.world)
        )
        if collective.rank == 0:
            crcs: dict[str, set[int]] = {}
            for rank, summary in enumerate(summaries):
                for key, crc in summary.items():
                    self._holders.setdefault(key, []).append(rank)
                    crcs.setdefault(key, set()).add(crc)
            # Those that are always an error come first, so that they are named.
            differing = [key for key, of_set in crcs.items() if len(of_set) > 1]
            differing.sort(key=lambda key: (not is_always_equal(key), key))
            answer = [[key, self._holders[key][0]] for key in differing]
            collective.put_json("replica-conflicts", answer)

    def finish(self) -> list[ReplicaDifference]:
        """Collective. Return the tensors whose replicas differ, the first ones by name.

        LayoutError on every rank if that is an error.
        """
        collective, ranks = self._collective, range(self._collective.world)
        conflicts = [_Conflict(*c) for c in collective.get_json("replica-conflicts")]
        if not conflicts:
            return []
        crc_by_place = self._compare_with_first(conflicts)
        # Rank 0 names the first tensors of all; each rank lists as many, so none of them lacks.
        listed = [[*place, crc] for place, crc in sorted(crc_by_place.items())[:_MAX_NAMED]]
        listed_by_rank = collective.collect_json("replica-differing", listed, dst=0, ranks=ranks)
        named = []
        if collective.rank == 0:
            try:
                named = self._name(conflicts, listed_by_rank)
            except LayoutError as error:  # share it at once: all ranks wait for the next message
                collective.share_error(error)
                raise collective.failure(error) from error
        places = [(*item.place, item.name) for item in named]
        names = {(n, i): name for n, i, name in collective.broadcast_json("replica-named", places)}
        distances = self._distances(conflicts, names, crc_by_place)
        by_rank = collective.collect_json("replica-distances", distances, dst=0, ranks=ranks)
        records = []
        for index, item in enumerate(named if by_rank else ()):
            of_ranks = [of_rank[str(index)] for of_rank in by_rank if str(index) in of_rank]
            records.append(_record(item, of_ranks).model_dump())
        records = collective.broadcast_json("replica-differences", records)
        return [ReplicaDifference.model_validate(record) for record in records]

    def _compare_with_first(self, conflicts: Sequence[_Conflict]) -> dict[_Place, int]:
        """Return the CRCs of this rank's tensors that differ from those of the first holders."""
        collective, differing = self._collective, dict[_Place, int]()
        own = [(n, *conflict) for n, conflict in enumerate(conflicts) if conflict.key in self._sets]
        for number, key, first in own:
            if first == collective.rank:
                crcs = self.digests.names_crc(key), *self.digests.tensor_crcs(key)
                collective.put_json(f"replica-names/{number}", self._sets[key].names)
                collective.put(f"replica-crcs/{number}", struct.pack(f"<{len(crcs)}Q", *crcs))
        for number, key, first in own:
            if first == collective.rank:
                continue
            body = collective.get(f"replica-crcs/{number}")
            names_crc, *first_crcs = struct.unpack(f"<{len(body) // 8}Q", body)
            names: Sequence[str] = self._sets[key].names
            crc_by_name = dict(zip(names, self.digests.tensor_crcs(key), strict=True))
            if names_crc != self.digests.names_crc(key):  # the first holder's are in another order
                names = collective.get_json(f"replica-names/{number}")
            for position, (name, first_crc) in enumerate(zip(names, first_crcs, strict=True)):
                if crc_by_name.get(name, first_crc) != first_crc:
                    differing[number, position] = crc_by_name[name]
        return differing

    def _name(
        self,
        conflicts: Sequence[_Conflict],
        listed_by_rank: Sequence[Sequence[Sequence[int]]],
    ) -> list[_Named]:
        """On rank 0: return the first tensors that differ. LayoutError if that is an error."""
        collective = self._collective
        crcs: dict[_Place, dict[int, int]] = {}  # of the ranks that differ from the first holder
        for rank, listed in enumerate(listed_by_rank):
            for number, position, crc in listed:
                crcs.setdefault((number, position), {})[rank] = crc
        named, never_equal = [], []
        for number, places in groupby(sorted(crcs)[:_MAX_NAMED], key=itemgetter(0)):
            key, names = conflicts[number][0], collective.get_json(f"replica-names/{number}")
            for place in places:
                by_crc = group_by_value(
                    (collective.ranks[rank], crcs[place].get(rank)) for rank in self._holders[key]
                )
                item = _Named(*place, names[place[1]], list(by_crc.values()))
                named.append(item)
                if is_always_equal(key) and not self._only_records:
                    never_equal.append(item)
        if never_equal or (named and self._any_differs_is_error):
            remedy = _ALWAYS_EQUAL if never_equal else _ANY
            raise LayoutError(_describe(never_equal or named, remedy))
        return named

    def _distances(
        self,
        conflicts: Sequence[_Conflict],
        names: Mapping[_Place, str],
        differing: Collection[_Place],
    ) -> dict[str, float | None]:
        """Return how far this rank's tensors are from the first holders', by index in `names`.

        None for a tensor whose values are not sent, or if the difference is not a finite number.
        """
        collective, distances = self._collective, dict[str, float | None]()
        for number, (key, first) in enumerate(conflicts):
            of_set = [name for place, name in names.items() if place[0] == number]
            if of_set and first == collective.rank:
                values = self._first_values(key, of_set)
                collective.put(f"replica-values/{number}", codec.pack(values, "replicas"))
        for number, (key, _) in enumerate(conflicts):
            own = {
                index: name
                for index, (place, name) in enumerate(names.items())
                if place in differing and place[0] == number
            }
            if own:
                values = codec.unpack(collective.get(f"replica-values/{number}"), "replicas")
                for index, name in own.items():
                    distances[str(index)] = max_difference(
                        self.digests.value(key, name), values.get(name)
                    )
        return distances

    def _first_values(self, key: str, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the first tensors of these that are kept, as long as they are small together."""
        values, free_nbytes = dict[str, torch.Tensor](), _VALUES_NBYTES
        for name in names:
            value = self.digests.value(key, name)
            if value is not None and value.nbytes <= free_nbytes:
                values[name], free_nbytes = value, free_nbytes - value.nbytes
        return values


def _record(item: _Named, distances: Sequence[float | None]) -> ReplicaDifference:
    """Return the record of a difference; `distances`: of the ranks that differ from the first."""
    known = [distance for distance in distances if distance is not None]
    return ReplicaDifference(
        tensor=item.name,
        copies=len(item.ranks_by_copy),
        ranks=[ranks[:_MAX_RANKS] for ranks in item.ranks_by_copy[:_MAX_COPIES]],
        max_difference=max(known) if len(known) == len(distances) else None,
    )


def describe_differences(differences: Sequence[ReplicaDifference]) -> str:
    """Return the text of the warning about a save that stored tensors that differ."""
    lines = []
    for difference in differences:
        copies = _copies_text(difference.ranks, difference.copies)
        unknown = difference.max_difference is None
        distance = "not computed" if unknown else f"{difference.max_difference:.3g}"
        lines.append(f"{difference.tensor}: {copies}; largest difference: {distance}")
    more = ", and others may" if len(lines) == _MAX_NAMED else ""
    title = f"replicas hold different bytes{more}; the rank that writes a tensor stores its own"
    return f'{format_list(title, lines)}\n  check_replicas="always" makes this an error'


def _copies_text(ranks_by_copy: Sequence[Sequence[int]], count: int) -> str:
    copies = [f"rank(s) {format_ranks(ranks)}" for ranks in ranks_by_copy[:_MAX_COPIES]]
    more = f" (and {count - len(copies)} more)" if count > len(copies) else ""
    return " differ from ".join(copies) + more


def _describe(named: Sequence[_Named], remedy: str) -> str:
    """List the tensors that differ, and between which ranks."""
    lines = [
        f"{item.name}: {_copies_text(item.ranks_by_copy, len(item.ranks_by_copy))}"
        for item in named
    ]
    return f"{format_list('replicas hold different bytes', lines)}\n  {remedy}"
