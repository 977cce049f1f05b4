"""Which tensors go into which file when a save's folders on several machines become one, and who writes which bytes. Pure.

What could lose bytes: two writers of one byte, or none. So every border is a function of sizes alone, and every rank computes all shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from unified_ckpt.core.files import split_files
from unified_ckpt.core.tables import Key


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
    sizes: Mapping[Key, int], here: Mapping[int, Mapping[Key, int]], *, writers: Sequence[int], max_file_bytes: int
) -> list[MergedFile]:
    """The files. `sizes`: bytes of each tensor; `here`: of these the bytes on each machine's own disk; `writers`: machines that may write.

    Tensors that the same machines have whole share files, so that most files are read where they are written; a file goes to the
    machine that has most of its bytes, of several such to the one with the least to write.
    """
    homes = {key: _homes(key, sizes, here) for key in sizes if sizes[key]}
    first: dict[str, tuple[int, ...]] = {}  # of each part: where tensors without bytes go along
    for (part, _), where in homes.items():
        first[part] = min(first.get(part, where), where)
    order = sorted(sizes, key=lambda key: (key[0], homes.get(key, first.get(key[0], ())), _most(key, here), key[1]))
    cut: list[tuple[str, tuple[Key, ...]]] = []
    for (part, _), members in groupby(order, key=lambda key: (key[0], homes.get(key, first.get(key[0], ())))):
        keys = list(members)
        cut += [(part, tuple(keys[i] for i in span)) for span in split_files([sizes[k] for k in keys], max_file_bytes=max_file_bytes)]
    counts: dict[str, int] = {}
    for part, _ in cut:
        counts[part] = counts.get(part, 0) + 1
    load = dict.fromkeys(writers, 0)
    numbers: dict[str, int] = {}
    files = []
    for part, held in cut:
        chosen = max(writers, key=lambda machine: (sum(here[machine].get(key, 0) for key in held), -load[machine], -machine))
        load[chosen] += sum(sizes[key] for key in held)
        numbers[part] = numbers.get(part, 0) + 1
        files.append(MergedFile(part, numbers[part], counts[part], held, chosen))
    return files


def _homes(key: Key, sizes: Mapping[Key, int], here: Mapping[int, Mapping[Key, int]]) -> tuple[int, ...]:
    """The machines that have it whole; none for one in fragments."""
    return tuple(machine for machine, held in sorted(here.items()) if held.get(key, 0) == sizes[key])


def _most(key: Key, here: Mapping[int, Mapping[Key, int]]) -> int:
    """The first of the machines that have most of it: neighbours in a file lie together."""
    return min(here, key=lambda machine: (-here[machine].get(key, 0), machine))


def share(
    files: Sequence[MergedFile], sizes: Mapping[Key, int], *, machine: int, index: int, count: int, block_nbytes: int
) -> Iterator[Span]:
    """What rank `index` of the `count` ranks of a machine writes of its files: an even part of the bytes, in the order of the files."""
    own = [(number, key) for number, file in enumerate(files) if file.machine == machine for key in file.keys]
    total = sum(sizes[key] for _, key in own)
    low, high = total * index // count, total * (index + 1) // count
    first = 0
    for number, key in own:
        nbytes = sizes[key]
        start, stop = (min(-(-max(border - first, 0) // block_nbytes) * block_nbytes, nbytes) for border in (low, high))
        if start < stop:
            yield Span(number, key, start, stop)
        first += nbytes
