"""Finds the boxes of tensors that say themselves which boxes of a larger one they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from unified_ckpt.core.sharding.boxes import chunk
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding
from unified_ckpt.errors import LayoutError
from unified_ckpt.runtime.comm.comm import group_ranks
from unified_ckpt.runtime.torch_state.shards.flat_parameters import is_flattened
from unified_ckpt.runtime.torch_state.shards.shards import Shards
from unified_ckpt.runtime.torch_state.tensors import is_dense, local_tensor, memory_key

# Attributes of torch.distributed.checkpoint's CheckpointableTensor, which may be any tensor.
_BOXES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
_PLAIN = (torch.Tensor, nn.Parameter)
_CHUNKS = ("__create_chunk_list__", "__get_tensor_shard__")  # methods of DCP's own protocol


def shards_of(tensor: Any) -> tuple[Shards, ...] | None:
    """Return the boxes that a tensor of some kind declares; None for one that a rule describes.

    At least one `Shards`, without boxes if this rank holds nothing, so that dtype and global shape
    are known. LayoutError for boxes outside of either tensor, and for kinds that do not say theirs.
    """
    local: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    kind = type(local)
    if kind in _PLAIN and not local.__dict__:
        return None  # most tensors: to ask one for an attribute that it lacks takes a microsecond
    if isinstance(tensor, Shards):
        return (tensor,)
    if hasattr(local, _BOXES[0]) and all(hasattr(local, name) for name in _BOXES):
        return (_checkpointable(local),)
    if _is_sharded_tensor(tensor):
        pairs = [(each.tensor, each.metadata.shard_offsets) for each in tensor.local_shards()]
        metadata = tensor.metadata()  # to ask the tensor itself is deprecated, and warns
        return _of_pairs(pairs, metadata.size, metadata.tensor_properties.dtype)
    if all(hasattr(kind, name) for name in _CHUNKS):
        if local is tensor and hasattr(kind, "local_shards"):
            raise LayoutError(
                f"got a {kind.__name__}, whose boxes are of a tensor of unknown shape, expected a "
                "DTensor of it; pass DTensor.from_local(..., shape=, stride=)"
            )
        return _of_pairs(_chunks(local), tensor.size(), tensor.dtype)
    if is_flattened(local):
        raise LayoutError(
            "got a parameter that FSDP1 flattens, expected the module; pass that which "
            "FullyShardedDataParallel returns"
        )
    return None


def named_shards(fqn: str, tensor: Any) -> tuple[Shards, ...] | None:
    """Return what `shards_of` does. Its errors name the tensor."""
    try:
        return shards_of(tensor)
    except LayoutError as error:
        raise LayoutError(f"{fqn}: {error}") from error


def _checkpointable(local: Any) -> Shards:
    lists = [list(getattr(local, name)) for name in _BOXES[1:]]
    if len({len(each) for each in lists}) != 1:
        counts = ", ".join(
            f"{len(each)} {name}" for each, name in zip(lists, _BOXES[1:], strict=True)
        )
        raise LayoutError(f"got {counts}, expected as many of each; one for each box")
    return Shards(local, local.global_shape, list(zip(*lists, strict=True)))


def _is_sharded_tensor(tensor: Any) -> bool:
    names = ("sharding_spec", "local_shards")  # imported by few programs
    return isinstance(tensor, torch.Tensor) and all(hasattr(type(tensor), n) for n in names)


def _chunks(local: Any) -> Iterator[tuple[torch.Tensor, Sequence[int]]]:
    """Yield the chunks of DCP's own protocol that have elements, with their offsets."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    for number, each in enumerate(local.__create_chunk_list__()):
        if 0 not in each.sizes:
            index = MetadataIndex("", each.offsets, number)
            yield local.__get_tensor_shard__(index), each.offsets


def _of_pairs(
    pairs: Iterable[tuple[torch.Tensor, Sequence[int]]],
    global_shape: Sequence[int],
    dtype: torch.dtype,
) -> tuple[Shards, ...]:
    """Return boxes that each fill a local tensor. `pairs`: local tensors, and their offsets."""
    shards = tuple(
        Shards(local, global_shape, [(offsets, [0] * local.dim(), local.shape)])
        for local, offsets in pairs
    )
    nothing = torch.empty(0, dtype=dtype, device="cpu")
    return shards or (Shards(nothing, global_shape, ()),)


def chunk_rule(tensor: Any, ranks: Sequence[int]) -> tuple[Sharding, torch.Tensor] | None:
    """Return the sharding of a ShardedTensor whose process group holds one dim as `torch.chunk`
    cuts it, in ascending order, and this rank's shard. None for all others.

    `ranks`: the global rank of each index. Replicas in other process groups have the same rule.
    """
    if not _is_sharded_tensor(tensor):
        return None
    metadata = tensor.metadata()
    shape, dtype = tuple(metadata.size), metadata.tensor_properties.dtype
    members = group_ranks(tensor._process_group)
    stride = _stride_of(members, ranks)
    dim = _chunked_dim(shape, metadata.shards_metadata, members)
    if stride is None or dim is None:
        return None
    local = next((each.tensor for each in tensor.local_shards()), None)
    if local is None:
        empty = [0 if d == dim else n for d, n in enumerate(shape)]
        local = torch.empty(empty, dtype=dtype, device="cpu")
    return Sharding((ShardDim(dim, len(members), stride),)), local.detach()


def _stride_of(members: Sequence[int], ranks: Sequence[int]) -> int | None:
    """Return the stride by which the index of each rank says its place among the members."""
    if not {*members} <= {*ranks}:
        return None
    places = [ranks.index(rank) for rank in members]
    stride = places[1] - places[0] if len(places) > 1 else 1
    is_regular = stride > 0 and all(
        place // stride % len(places) == i for i, place in enumerate(places)
    )
    return stride if is_regular else None


def _chunked_dim(shape: Sequence[int], shards: Sequence[Any], members: Sequence[int]) -> int | None:
    """Return the dim that the members hold in the chunks of `torch.chunk`, None if there is none.

    `shards`: metadata of a ShardedTensor, which may leave out empty ones.
    """
    dims = [d for d, n in enumerate(shape) if any(each.shard_sizes[d] != n for each in shards)]
    by_rank = {each.placement.rank(): each for each in shards if 0 not in each.shard_sizes}
    if len(dims) != 1 or len(by_rank) != sum(0 not in each.shard_sizes for each in shards):
        return None
    (dim,) = dims
    held = {
        rank: (each.shard_offsets[dim], each.shard_offsets[dim] + each.shard_sizes[dim])
        for rank, each in by_rank.items()
    }
    chunks = {rank: chunk(shape[dim], len(members), i) for i, rank in enumerate(members)}
    is_regular = held == {rank: (low, high) for rank, (low, high) in chunks.items() if low < high}
    return dim if is_regular else None


def local_tensors(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield the local memory of a tensor of any kind."""
    shards = shards_of(tensor)
    if shards is None:
        yield local_tensor(tensor)
    else:
        yield from (each.tensor for each in shards)


def address_of(tensor: torch.Tensor, shards: tuple[Shards, ...] | None) -> object:
    """Return a key that is equal for two tensors that view the same memory in the same way.

    `shards`: those of the tensor.
    """
    if shards is not None:
        keys = [(memory_key(e.tensor), e.global_shape, e.boxes) for e in shards if e.boxes]
        return (*keys,) or id(tensor)
    local = local_tensor(tensor)
    if not is_dense(tensor) or local.numel() == 0:
        return id(tensor)
    return memory_key(local), tensor.shape


def is_same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether both tensors, of any kind, have their elements from the same addresses on."""
    pairs = zip_longest(local_tensors(first), local_tensors(second))
    return all(
        a is not None and b is not None and (not a.numel() or a.data_ptr() == b.data_ptr())
        for a, b in pairs
    )


def clone_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor of any kind, with the same boxes."""
    local: Any = local_tensor(tensor)
    if isinstance(tensor, DTensor) and hasattr(type(local), "local_shards"):
        wrapper = type(local)(
            [each.detach().clone() for each in local.local_shards()], local.local_offsets()
        )
        return DTensor.from_local(
            wrapper,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    clone = tensor.detach().clone()
    for name in _BOXES if hasattr(local, _BOXES[0]) else ():
        setattr(local_tensor(clone), name, getattr(local, name))
    return clone


def check_tensors(tensors: Mapping[Any, Any], argument: str) -> None:
    """Raise LayoutError for a key that is not a string, or a value that is not a tensor.

    `argument`: the caller's name of this dict.
    """
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise LayoutError(f"{argument}: got the key {name!r}, expected names of tensors")
        if named_shards(f"{argument}[{name!r}]", tensor) is not None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise LayoutError(
                f"{argument}[{name!r}]: got a {type(tensor).__name__}, expected a torch.Tensor"
            )
        if tensor.is_nested:
            raise LayoutError(f"{argument}[{name!r}]: got a nested tensor, expected a dense one")
