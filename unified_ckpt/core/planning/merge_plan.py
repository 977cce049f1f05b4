"""Which tensors go into which file when a save's folders on several machines become one, and who writes which bytes. Pure.

What could lose bytes: two writers of one byte, or none. So every border is a function of sizes alone, and every rank computes all shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from unified_ckpt.core.planning.file_layout import split_files
from unified_ckpt.core.sharding.declarations import Key


@dataclass(frozen=True, slots=True)
class MergedFile:
    """A file of the merged checkpoint: number `number` (from 1) of `count` of its part. All of it is written by ranks of one machine."""

    part: str
    number: int
    count: int
    keys: tuple[Key, ...]
    machine: int


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, stop) of a tensor in file number `file` of a list. Borders inside the tensor are borders of digest blocks."""

    file: int
    key: Key
    start: int
    stop: int


def plan_merge(
    sizes: Mapping[Key, int],
    held: Mapping[Key, Mapping[int, int]],
    *,
    writers: Sequence[int],
    max_file_bytes: int,
) -> list[MergedFile]:
    """The files. `sizes`: bytes of each tensor; `held`: of these how many lie on which machines' own disks, none left out but with 0;
    `writers`: machines that may write.

    Tensors that the same machines have whole share files, so that most files are read where they are written; a file goes to the
    machine that has most of its bytes, of several such to the one with the least to write.
    """
    homes = {
        key: tuple(sorted(m for m, n in held.get(key, {}).items() if n == sizes[key]))
        for key in sizes
        if sizes[key]
    }
    most = {
        key: min(((-n, m) for m, n in held.get(key, {}).items()), default=(0, -1)) for key in sizes
    }
    first: dict[str, tuple[int, ...]] = {}  # of each part: where tensors without bytes go along
    for (part, _), where in homes.items():
        first[part] = min(first.get(part, where), where)
    group = {key: (key[0], homes.get(key, first.get(key[0], ()))) for key in sizes}
    cut: list[tuple[str, tuple[Key, ...]]] = []
    for (part, _), members in groupby(
        sorted(sizes, key=lambda key: (group[key], most[key][1], key[1])),
        key=lambda key: group[key],
    ):
        keys = list(members)
        cut += [
            (part, tuple(keys[i] for i in span))
            for span in split_files([sizes[k] for k in keys], max_file_bytes=max_file_bytes)
        ]
    counts = Counter(part for part, _ in cut)
    numbers: Counter[str] = Counter()
    load = dict.fromkeys(writers, 0)
    files = []
    for part, keys_of_file in cut:
        there: Counter[int] = Counter()
        for key in keys_of_file:
            there.update(held.get(key, {}))
        chosen = max(writers, key=lambda machine: (there[machine], -load[machine], -machine))
        load[chosen] += sum(sizes[key] for key in keys_of_file)
        numbers[part] += 1
        files.append(MergedFile(part, numbers[part], counts[part], keys_of_file, chosen))
    return files


def share(
    files: Sequence[MergedFile],
    sizes: Mapping[Key, int],
    *,
    machine: int,
    index: int,
    count: int,
    block_nbytes: int,
) -> Iterator[Span]:
    """What rank `index` of the `count` ranks of a machine writes of its files: an even part of the bytes, in the order of the files."""
    return (
        span
        for rank, span in shares(
            files, sizes, machine=machine, count=count, block_nbytes=block_nbytes
        )
        if rank == index
    )


def shares(
    files: Sequence[MergedFile],
    sizes: Mapping[Key, int],
    *,
    machine: int,
    count: int,
    block_nbytes: int,
) -> Iterator[tuple[int, Span]]:
    """Of all ranks of a machine, in the order of the bytes, each with its index. Goes through the tensors once."""
    total = sum(nbytes for _, _, nbytes in _own(files, sizes, machine))
    first = index = 0
    for number, key, nbytes in _own(files, sizes, machine):
        start = _cut(total * index // count, first, nbytes, block_nbytes)
        while True:
            high = total * (index + 1) // count
            stop = _cut(high, first, nbytes, block_nbytes)
            if start < stop:
                yield index, Span(number, key, start, stop)
            if high > first + nbytes or index + 1 == count:
                break  # this rank goes on with the next tensor
            start, index = stop, index + 1
        first += nbytes


def _own(
    files: Sequence[MergedFile], sizes: Mapping[Key, int], machine: int
) -> Iterator[tuple[int, Key, int]]:
    return (
        (number, key, sizes[key])
        for number, file in enumerate(files)
        if file.machine == machine
        for key in file.keys
    )


def _cut(border: int, first: int, nbytes: int, block_nbytes: int) -> int:
    """Where a border of bytes of the machine cuts a tensor that begins at byte `first`: before a block of it, or at its end."""
    return min(-(-max(border - first, 0) // block_nbytes) * block_nbytes, nbytes)
