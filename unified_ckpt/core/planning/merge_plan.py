"""Which tensors go into which file when a save's folders on several machines become one, and who
writes which bytes. Pure.

What could lose bytes: two writers of one byte, or none. So every border is a function of sizes
alone, and every rank computes all shares.
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
    """A file of the merged checkpoint: number `number` (from 1) of `count` of its part. All of it
    is written by ranks of one machine.
    """

    part: str
    number: int
    count: int
    keys: tuple[Key, ...]
    node: int


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, stop) of a tensor in file number `file` of a list. Borders inside the tensor
    are borders of digest blocks.
    """

    file: int
    key: Key
    start: int
    stop: int


def plan_merge(
    sizes: Mapping[Key, int],
    stored_nbytes: Mapping[Key, Mapping[int, int]],
    *,
    writers: Sequence[int],
    max_file_bytes: int,
) -> list[MergedFile]:
    """The files. `sizes`: bytes of each tensor; `stored_nbytes`: of these how many lie on which
    machines' own disks, none left out but with 0;
    `writers`: machines that may write.

    Tensors that the same machines have whole share files, so that most files are read where they
    are written; a file goes to the machine that has most of its bytes, of several such to the one
    with the least to write.
    """
    complete_nodes = {
        key: tuple(sorted(m for m, n in stored_nbytes.get(key, {}).items() if n == sizes[key]))
        for key in sizes
        if sizes[key]
    }
    main_node = {
        key: min(((-n, m) for m, n in stored_nbytes.get(key, {}).items()), default=(0, -1))
        for key in sizes
    }
    first_nodes: dict[
        str, tuple[int, ...]
    ] = {}  # of each part: where tensors without bytes go along
    for (part, _), nodes in complete_nodes.items():
        first_nodes[part] = min(first_nodes.get(part, nodes), nodes)
    group_keys = {
        key: (key[0], complete_nodes.get(key, first_nodes.get(key[0], ()))) for key in sizes
    }
    keys_by_file: list[tuple[str, tuple[Key, ...]]] = []
    for (part, _), members in groupby(
        sorted(sizes, key=lambda key: (group_keys[key], main_node[key][1], key[1])),
        key=lambda key: group_keys[key],
    ):
        keys = list(members)
        keys_by_file += [
            (part, tuple(keys[i] for i in span))
            for span in split_files([sizes[k] for k in keys], max_file_bytes=max_file_bytes)
        ]
    counts = Counter(part for part, _ in keys_by_file)
    numbers: Counter[str] = Counter()
    load_nbytes = dict.fromkeys(writers, 0)
    files = []
    for part, keys_of_file in keys_by_file:
        nbytes_by_node: Counter[int] = Counter()
        for key in keys_of_file:
            nbytes_by_node.update(stored_nbytes.get(key, {}))
        node = max(
            writers, key=lambda machine: (nbytes_by_node[machine], -load_nbytes[machine], -machine)
        )
        load_nbytes[node] += sum(sizes[key] for key in keys_of_file)
        numbers[part] += 1
        files.append(MergedFile(part, numbers[part], counts[part], keys_of_file, node))
    return files


def rank_spans(
    files: Sequence[MergedFile],
    sizes: Mapping[Key, int],
    *,
    node: int,
    index: int,
    count: int,
    block_nbytes: int,
) -> Iterator[Span]:
    """What rank `index` of the `count` ranks of a machine writes of its files: an even part of the
    bytes, in the order of the files.
    """
    return (
        span
        for rank, span in node_spans(
            files, sizes, node=node, count=count, block_nbytes=block_nbytes
        )
        if rank == index
    )


def node_spans(
    files: Sequence[MergedFile],
    sizes: Mapping[Key, int],
    *,
    node: int,
    count: int,
    block_nbytes: int,
) -> Iterator[tuple[int, Span]]:
    """Of all ranks of a machine, in the order of the bytes, each with its index. Goes through the
    tensors once.
    """
    total = sum(nbytes for _, _, nbytes in _tensors_of_node(files, sizes, node))
    tensor_start = index = 0
    for file_index, key, nbytes in _tensors_of_node(files, sizes, node):
        start = _align_border(total * index // count, tensor_start, nbytes, block_nbytes)
        while True:
            high = total * (index + 1) // count
            stop = _align_border(high, tensor_start, nbytes, block_nbytes)
            if start < stop:
                yield index, Span(file_index, key, start, stop)
            if high > tensor_start + nbytes or index + 1 == count:
                break  # this rank goes on with the next tensor
            start, index = stop, index + 1
        tensor_start += nbytes


def _tensors_of_node(
    files: Sequence[MergedFile], sizes: Mapping[Key, int], node: int
) -> Iterator[tuple[int, Key, int]]:
    return (
        (file_index, key, sizes[key])
        for file_index, file in enumerate(files)
        if file.node == node
        for key in file.keys
    )


def _align_border(border: int, tensor_start: int, nbytes: int, block_nbytes: int) -> int:
    """Where a border of bytes of the machine cuts a tensor that begins at byte `tensor_start`:
    before a block of it, or at its end.
    """
    return min(-(-max(border - tensor_start, 0) // block_nbytes) * block_nbytes, nbytes)
