"""Plans the files, and the writer of each byte, when a checkpoint is merged or converted.

Bytes would be lost if one had two writers or none. Every border is therefore a function of sizes
alone, and every rank computes the spans of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from unified_ckpt.core.planning.split_files import file_limits, split_files
from unified_ckpt.core.sharding.declarations import Key


@dataclass(frozen=True, slots=True)
class MergedFile:
    """File `number` (from 1) of `count` of a part; ranks of one node write all of it."""

    part: str
    number: int
    count: int
    keys: tuple[Key, ...]
    node: int


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, stop) of a tensor in file `file` of a list.

    Borders inside the tensor are borders of digest blocks.
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
    max_file_bytes: int | None,
) -> list[MergedFile]:
    """Plan the files of the merged checkpoint.

    `sizes`: bytes of each tensor. `stored_nbytes`: how many of them are on each node's own disk.
    `writers`: the nodes that may write. `max_file_bytes`: as in `file_limit`.

    Tensors that are complete on the same nodes share files, so most files are read on the node that
    writes them. The node with most of a file's bytes writes it; of equals, the one with the least
    to write.
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
    first_nodes: dict[str, tuple[int, ...]] = {}  # by part: the files that empty tensors join
    for (part, _), nodes in complete_nodes.items():
        first_nodes[part] = min(first_nodes.get(part, nodes), nodes)
    group_keys = {
        key: (key[0], complete_nodes.get(key, first_nodes.get(key[0], ()))) for key in sizes
    }
    limits = file_limits(
        ((part, nbytes) for (part, _), nbytes in sizes.items()), max_file_bytes=max_file_bytes
    )
    keys_by_file: list[tuple[str, tuple[Key, ...]]] = []
    for (part, _), members in groupby(
        sorted(sizes, key=lambda key: (group_keys[key], main_node[key][1], key[1])),
        key=lambda key: group_keys[key],
    ):
        keys = list(members)
        keys_by_file += [
            (part, tuple(keys[i] for i in span))
            for span in split_files([sizes[k] for k in keys], max_file_bytes=limits[part])
        ]
    counts = Counter(part for part, _ in keys_by_file)
    numbers: Counter[str] = Counter()
    load_nbytes = dict.fromkeys(writers, 0)
    files = []
    for part, keys_of_file in keys_by_file:
        nbytes_by_node: Counter[int] = Counter()
        for key in keys_of_file:
            nbytes_by_node.update(stored_nbytes.get(key, {}))
        node = max(writers, key=lambda n: (nbytes_by_node[n], -load_nbytes[n], -n))
        load_nbytes[node] += sum(sizes[key] for key in keys_of_file)
        numbers[part] += 1
        files.append(MergedFile(part, numbers[part], counts[part], keys_of_file, node))
    return files


def file_writers(
    files: Sequence[MergedFile],
    sizes: Mapping[Key, int],
    *,
    ranks_by_node: Sequence[Sequence[int]],
) -> list[int]:
    """Return the one rank that writes each file: of its node's, the one with the least to write.

    Larger files are assigned first.
    """
    nbytes_by_file = [sum(sizes[key] for key in file.keys) for file in files]
    load_nbytes = Counter[int]()
    writers = [0] * len(files)
    for index in sorted(range(len(files)), key=lambda index: -nbytes_by_file[index]):
        ranks = ranks_by_node[files[index].node]
        writers[index] = min(ranks, key=lambda rank: (load_nbytes[rank], rank))
        load_nbytes[writers[index]] += nbytes_by_file[index]
    return writers


def node_spans(
    files: Sequence[MergedFile],
    sizes: Mapping[Key, int],
    *,
    node: int,
    count: int,
    block_nbytes: int,
) -> Iterator[tuple[int, Span]]:
    """Yield (rank index, span) for all `count` ranks of a node, in the order of the bytes."""
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
                break  # the same rank continues with the next tensor
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
    """Return where a border, in bytes of the node, falls in a tensor that starts at `tensor_start`.

    It is rounded up to the start of a digest block, or to the tensor's end.
    """
    return min(-(-max(border - tensor_start, 0) // block_nbytes) * block_nbytes, nbytes)
