"""torch.distributed.checkpoint: a folder with `.metadata`, a pickle, and `.distcp` files in which each shard is an archive of torch.save.

Read: what `dcp.save` writes of a state dict, nested or flat, of torchtitan, of Accelerate and the Trainer under FSDP. What wraps the whole
state is taken off. The tensors under "model", or under no name, are the model; of "optimizer", those under "state" are the optimizer;
those under another name are a part of it.
"""

from __future__ import annotations

import operator
import os
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import listed
from unified_ckpt.engine.source.protocol import Said
from unified_ckpt.errors import CheckpointError, FormatError, IncompleteError
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.torch_state.flatten import MODEL, OPTIMIZER
from unified_ckpt.runtime.torch_state.modules import is_extra_state
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES
from unified_ckpt.sources.detect.names import DCP_METADATA
from unified_ckpt.sources.restricted_pickle.archive import Mapped
from unified_ckpt.sources.restricted_pickle.load import load_pickle, load_torch_bytes
from unified_ckpt.sources.restricted_pickle.stubs import Fields, Stub, stub
from unified_ckpt.views.shards import Assembled, Assembly, Fragment, assembly

_ROOT = "torch.distributed.checkpoint"
_MANY = [
    f"{_ROOT}.metadata.MetadataIndex",
    f"{_ROOT}.metadata.ChunkStorageMetadata",
    f"{_ROOT}.filesystem._StorageInfo",
]
_STUBS = [
    *(
        f"{_ROOT}.metadata.{name}"
        for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")
    ),
    *(
        f"{_ROOT}.metadata.{name}"
        for name in ("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")
    ),
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib._local.PosixPath",
    "pathlib._local.PurePosixPath",
]
_OPTIMIZERS = ("optimizer", "optim")
_COUNTS = (
    "step",
    "global_step",
    "epoch",
    "iteration",
    "iter",
    "lr",
    "loss",
    "best_loss",
)  # beside a model, what is none of it
_MODELS = (MODEL, "state_dict")  # the latter is Lightning's
_DTYPES = {
    f"torch.{one}": getattr(torch, one)
    for one in dir(torch)
    if isinstance(getattr(torch, one), torch.dtype)
}

_BY_POSITION = (
    "is by position, as `optimizer.state_dict()` gives it, and of which parameters is not known; needed what "
    "torch.distributed.checkpoint.state_dict.get_state_dict gives; the other parts can be read without it"
)

Path = tuple[str | int, ...]
_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True)
class Shard:
    """Of one entry: a box of a tensor, None for an object; where it lies."""

    box: Box | None
    file: str
    start: int
    nbytes: int


@dataclass(slots=True)
class Entry:
    """What a flat key of the state dict stands for. `dtype`, `shape`: of a tensor."""

    path: Path
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    shards: list[Shard] = field(default_factory=list)


def open_dcp(root: str, _options: SourceOptions, *, prefix: Path = ()) -> Assembled:
    """FormatError for a folder that is damaged, IncompleteError naming the files that are missing or cut short.

    `prefix`: goes before every path, for folders that hold one part.
    """
    entries = read_entries(root)
    if not prefix:
        _unwrap(entries)
    files = map_files(root, entries)
    bare = any(
        one.dtype is not None and one.shape and len(one.path) == 1 for one in entries.values()
    )  # the model has no name of its own
    tensors: dict[Key, Assembly] = {}
    objects: dict[Path, Any] = {}
    for key, one in entries.items():
        path = (*prefix, *one.path)
        if one.dtype is None:
            objects[path] = _object(files, root, key, one)
            continue
        place = (
            None
            if _module_of(path)
            else place_of(path, scalar=not one.shape and not (bare and path[0] not in _COUNTS))
        )
        made = assemble(files, root, key, one, one.dtype)
        if place is None:
            objects[path] = _joined(made)
        elif place in tensors:
            raise FormatError(
                f"{root}: {key}: is {place[1]} of {place[0]}, as another of its tensors is; needed names that differ"
            )
        else:
            tensors[place] = made
    said, refused = _said(objects), {}
    if any(not isinstance(name, str) for group in said.groups for name in group["names"]):
        tensors = {key: made for key, made in tensors.items() if key[0] != OPTIMIZER}
        said, refused = replace(said, groups=[]), {OPTIMIZER: _BY_POSITION}
    return Assembled(root, tensors, format="dcp", said=said, refused=refused)


def _unwrap(entries: Mapping[str, Entry]) -> None:
    """Takes off what wraps the whole state: PyTorch's recipe saves {"app": {"model": ..., "optim": ...}}.

    A wrapper holds every tensor, and a model or an optimizer under its usual name. A path that is taken without it stays as it is.
    """
    tensors = [one.path for one in entries.values() if one.dtype is not None and one.shape]
    wrappers, inside = {path[0] for path in tensors}, {path[1] for path in tensors if len(path) > 2}
    known = {*_MODELS, *_OPTIMIZERS}
    if (
        len(wrappers) != 1
        or wrappers & known
        or not inside & known
        or any(len(path) < 3 for path in tensors)
    ):
        return
    taken = {one.path for one in entries.values()}
    for one in entries.values():
        if one.path[0] in wrappers and len(one.path) > 1 and one.path[1:] not in taken:
            one.path = one.path[1:]


def _joined(made: Assembly) -> torch.Tensor:
    found = torch.empty(made.spec.shape, dtype=TORCH_DTYPES[made.spec.dtype], device="cpu")
    for one in made.fragments:
        found[
            tuple(
                slice(low, low + count)
                for low, count in zip(one.box.offsets, one.box.shape, strict=True)
            )
        ] = one.load()
    return found


def map_files(root: str, entries: Mapping[str, Entry]) -> dict[str, Mapped]:
    """The files that the entries lie in. IncompleteError naming those that are missing or cut short, and what was in them."""
    ends: dict[str, dict[str, int]] = {}  # of each file: how far each entry needs it
    for key, one in entries.items():
        for shard in one.shards:
            of_file = ends.setdefault(shard.file, {})
            of_file[key] = max(of_file.get(key, 0), shard.start + shard.nbytes)
    return {name: _mapped(root, name, ends[name]) for name in sorted(ends)}


def place_of(path: Path, *, scalar: bool) -> Key | None:
    """The part and the name of a tensor by where it stood in the state dict; None for one that is no part's, such as a step count."""
    first, rest = str(path[0]), path[1:]
    if not rest:
        return None if scalar and "." not in first else (MODEL, first)
    if first in _OPTIMIZERS:
        if rest[0] == "state" and len(rest) == 3:
            return OPTIMIZER, f"{rest[1]}/{rest[2]}"
        flat = ".".join(map(str, rest))
        if flat.startswith("state."):
            fqn, _, name = flat.removeprefix("state.").rpartition(".")
            return OPTIMIZER, f"{fqn}/{name}"
        return None
    return first, ".".join(map(str, rest))


def _module_of(path: Path) -> str:
    """Whose extra state it is, or a part of: DCP takes dicts apart, whatever they are. Empty for what is none."""
    name = str(path[1] if path[0] in _MODELS and len(path) > 1 else path[0])
    return name if is_extra_state(name) else ""


def _listed_again(tree: Any) -> Any:
    """Lists where paths have numbers, as DCP itself puts together what it took apart."""
    if not isinstance(tree, dict):
        return tree
    found = {key: _listed_again(one) for key, one in tree.items()}
    return (
        [found[key] for key in sorted(found)]
        if found and all(isinstance(key, int) for key in found)
        else found
    )


def _said(objects: Mapping[Path, Any]) -> Said:
    """Param groups and optimizer state by name, modules' extra state, and all other objects as one tree."""
    options: dict[object, dict[str, Any]] = {}
    scalars: dict[str, dict[str, Any]] = {}
    modules: dict[Any, Any] = {}
    tree: dict[Any, Any] = {}
    for path, value in objects.items():
        state = _state_of(path)
        if state is not None:
            _put(scalars, state, value)
            continue
        if str(path[0]) in _OPTIMIZERS and len(path) > 1:
            rest = path[1:] if len(path) > 2 else tuple(str(path[1]).split("."))
            if rest[0] == "param_groups" and len(rest) > 2:
                owner = (
                    rest[1]
                    if len(rest) == 3 and isinstance(rest[1], int)
                    else ".".join(map(str, rest[1:-1]))
                )
                options.setdefault(owner, {})[str(rest[-1])] = value
                continue
        module = _module_of(path)
        _put(modules if module else tree, path[path.index(module) :] if module else path, value)
    step = tree.get("step")
    return Said(
        step=step if isinstance(step, int) and not isinstance(step, bool) else None,
        extra=tree or None,
        modules={name: _listed_again(one) for name, one in modules.items()},
        groups=_groups(options),
        scalars=scalars,
    )


def _state_of(path: Path) -> Path | None:
    """Of what is no tensor in an optimizer's state: the parameter, and the keys below it. None for anything else."""
    if str(path[0]) in _OPTIMIZERS:
        if len(path) > 3 and path[1] == "state":
            return str(path[2]), *map(str, path[3:])
        if len(path) == 2 and str(path[1]).startswith("state."):
            fqn, _, key = str(path[1]).removeprefix("state.").rpartition(".")
            return fqn, key
    return None


def _put(tree: dict[Any, Any], path: Path, value: Any) -> None:
    for one in path[:-1]:
        tree = tree.setdefault(one, {})
    tree[path[-1]] = value


def _groups(options: Mapping[object, dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups that are listed, or, of a flat optimizer's, the parameters that have the same options."""
    found: list[dict[str, Any]] = []
    for owner, one in options.items():
        listed_names = one.pop("params", None) if isinstance(owner, int) else [owner]
        if listed_names is None:
            continue
        known = [group for group in found if not isinstance(owner, int) and group["options"] == one]
        if known:
            known[0]["names"].extend(listed_names)
        else:
            found.append({"names": list(listed_names), "options": one})
    return found


def assemble(
    files: Mapping[str, Mapped], root: str, key: str, one: Entry, dtype: torch.dtype
) -> Assembly:
    """The tensor of an entry. FormatError or IncompleteError naming it where its shards do not cover it once."""
    fragments = [
        Fragment(
            shard.box,
            partial(files[shard.file].tensor, shard.start, shard.nbytes),
            files[shard.file].path,
        )
        for shard in one.shards
        if shard.box is not None
    ]
    try:
        return assembly(dtype, one.shape, fragments)
    except CheckpointError as error:
        raise type(error)(f"{root}: {key}: {error}") from error


def _object(files: Mapping[str, Mapped], root: str, key: str, one: Entry) -> Any:
    """FormatError where it holds classes: nothing but plain values and tensors is read."""
    if not one.shards:
        raise IncompleteError(f"{root}: {key}: {DCP_METADATA} does not say where it is")
    shard = one.shards[0]
    where = f"{os.path.join(root, shard.file)}: {key}"
    return load_torch_bytes(files[shard.file].bytes(shard.start, shard.nbytes), where)


def _mapped(root: str, name: str, needed: Mapping[str, int]) -> Mapped:
    """`needed`: how far the file must reach for each entry. IncompleteError naming the entries that it does not reach."""
    path = os.path.join(root, name)
    if os.path.isabs(name) or ".." in name.split("/"):
        raise FormatError(
            f"{root}/{DCP_METADATA}: names the file {name!r}, which leads out of the folder"
        )
    nbytes = os.path.getsize(path) if os.path.isfile(path) else 0
    lost = sorted(key for key, stop in needed.items() if stop > nbytes)
    if lost:
        what = "ends early" if os.path.isfile(path) else "is missing"
        raise IncompleteError(listed(f"{path}: {what}; lost are (at least parts of)", lost))
    return Mapped(path)


# ---- `.metadata`


def read_entries(root: str, *, stubs: Collection[str] = ()) -> dict[str, Entry]:
    """What `.metadata` lists, by flat key. `stubs`: names of further classes that it may hold. FormatError where it is damaged."""
    path = os.path.join(root, DCP_METADATA)
    known: dict[str, Any] = {name: stub(name) for name in (*_STUBS, *stubs)}
    known |= {name: stub(name, base=Fields) for name in _MANY}
    known |= _DTYPES | {"torch.Size": torch.Size, "collections.OrderedDict": OrderedDict}
    told = load_pickle(path, known)
    try:
        listed_keys, storage = _of(told, "state_dict_metadata"), _of(told, "storage_data")
        paths = _of(told, "planner_data") or {}
        found = {key: _entry(paths.get(key, (key,)), one) for key, one in listed_keys.items()}
        chunks = {
            key: _chunks(one) for key, one in listed_keys.items() if found[key].dtype is not None
        }
        for index, place in storage.items():
            told_index = _fields(index)
            key = _one(told_index["fqn"], str)
            found[key].shards.append(_shard(chunks.get(key), told_index, _fields(place)))
    except (
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        ValueError,
        OverflowError,
        StopIteration,
        RecursionError,
    ) as error:
        raise FormatError(
            f"{path}: is not what torch.distributed.checkpoint writes: {error!r}"
        ) from error
    return found


def _entry(path: Any, told: Any) -> Entry:
    steps = tuple(one if isinstance(one, int) else _one(one, str) for one in path)
    if type(told).__name__ != "TensorStorageMetadata":
        return Entry(steps, None, ())
    properties = _of(told, "properties")
    return Entry(steps, _dtype(properties), _numbers(_of(told, "size")))


# Only numbers and text are taken from it: a list may be one of a billion branches, which nobody must print, compare or take a hash of.


def _numbers(found: Any) -> tuple[int, ...]:
    return tuple(map(operator.index, found))


def _one(found: Any, kind: type[_Kind]) -> _Kind:
    if not isinstance(found, kind):
        raise TypeError(f"a {type(found).__name__} in place of a {kind.__name__}")
    return found


def _dtype(properties: Any) -> torch.dtype:
    """`TensorProperties` gives its fields in a tuple (`__getstate__`), the dtype first; others as a dict."""
    state = properties.state
    return _one(state["dtype"] if isinstance(state, dict) else state[0], torch.dtype)


def _chunks(told: Any) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Of a tensor: offsets -> sizes."""
    return {
        _numbers(chunk["offsets"]): _numbers(chunk["sizes"])
        for chunk in map(_fields, _of(told, "chunks"))
    }


def _shard(
    chunks: Mapping[tuple[int, ...], tuple[int, ...]] | None,
    index: Mapping[str, Any],
    place: Mapping[str, Any],
) -> Shard:
    """`chunks`: of a tensor, None for an object."""
    box = None
    if chunks is not None:
        offset = index["offset"]
        at = _numbers(offset) if offset is not None else next(iter(chunks))
        box = Box(at, chunks[at])
    if place.get("transform_descriptors"):
        raise FormatError(
            f"{index['fqn']}: is transformed (transform_descriptors); needed plain bytes"
        )
    return Shard(box, _one(place["relative_path"], str), int(place["offset"]), int(place["length"]))


def _of(one: Any, name: str) -> Any:
    """A field of a stub."""
    return _fields(one)[name]


def _fields(one: Any) -> dict[str, Any]:
    """Of a stub."""
    if isinstance(one, Fields):
        return one.__dict__
    if isinstance(one, Stub) and isinstance(one.state, dict):
        return one.state
    raise TypeError(f"a {type(one).__name__} has no fields")
