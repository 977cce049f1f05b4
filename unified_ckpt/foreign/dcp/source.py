"""Opens torch.distributed.checkpoint folders: `.metadata`, a pickle, and `.distcp` files.

Each shard in a `.distcp` file is an archive of torch.save. Reads what `dcp.save` writes of a
nested or flat state dict: torchtitan, Accelerate and the Trainer under FSDP.

A single key around the whole state is removed. Tensors under "model", else "state_dict", or under
no key, are the model; in "optimizer" or "optimizer_<n>", those under "state" are the optimizer;
any other key is a part, or an object in `extra` if it has other values too.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import format_list
from unified_ckpt.engine.source.protocol import SourceMetadata
from unified_ckpt.errors import FormatError, IncompleteError, error_prefix
from unified_ckpt.foreign.dcp.detect import DCP_METADATA
from unified_ckpt.foreign.dcp.metadata import Entry, KeyPath, read_entries
from unified_ckpt.foreign.files.parsing import set_nested
from unified_ckpt.foreign.pytorch.exported import restore_entries
from unified_ckpt.foreign.pytorch.optimizer_groups import groups_by_options, param_group
from unified_ckpt.foreign.restricted_pickle.archive import MappedFile
from unified_ckpt.foreign.restricted_pickle.load import load_torch_part
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.regular_files import file_size
from unified_ckpt.runtime.torch_state.names import is_extra_state, strip_wrappers
from unified_ckpt.views.sharded_source import ShardedSource, SourceExtras
from unified_ckpt.views.shards import ShardedTensor, TensorShard, sharded_tensor

_OPTIMIZER_KEY = re.compile(r"optimizer(_\d+)?|optim")  # with a number in Lightning
# 0-d tensors of these names belong to the training loop, not to a model without a key.
_SCALAR_KEYS = ("step", "global_step", "epoch", "iteration", "iter", "lr", "loss", "best_loss")
_LIGHTNING_MODEL = "state_dict"
_MODEL_KEYS = (MODEL, _LIGHTNING_MODEL)
_MAX_OBJECT_NBYTES = 64 << 20  # of the tensors in one object of `extra`, which are read at once
GroupKey = tuple[str, str | int]  # an optimizer's key, and a group's number or a parameter's name
_INDEXED_REFUSAL = (
    "got optimizer state by position, as from optimizer.state_dict(), expected state by name as "
    "from torch.distributed.checkpoint.state_dict.get_state_dict; load the other parts without it"
)


def open_dcp(root: str, _options: SourceOptions) -> ShardedSource:
    """Open a DCP folder.

    FormatError if the folder is damaged, IncompleteError names missing and truncated files.
    """
    return read_dcp(root, "dcp", restore_entries)


def read_dcp(
    root: str,
    format_name: str,
    adapt: Callable[[SourceMetadata], tuple[SourceMetadata, Callable[[int], Any]]],
) -> ShardedSource:
    """Open a folder in a format that is based on DCP. Same errors as `open_dcp`.

    `adapt`: returns the metadata of that format, and its `rank_extra` by rank.
    """
    entries = read_entries(root)
    _strip_wrapper(entries)
    if not any(entry.path[0] == MODEL for entry in entries.values()):
        for entry in entries.values():
            if entry.path[0] == _LIGHTNING_MODEL and len(entry.path) > 1:
                entry.path = MODEL, *entry.path[1:]
    files = map_files(root, entries)
    # The model then has no key of its own.
    model_at_root = any(
        entry.dtype is not None and entry.shape and len(entry.path) == 1
        for entry in entries.values()
    )
    object_keys = _object_keys(entries)
    tensors: dict[Key, ShardedTensor] = {}
    aliases: dict[str, dict[str, str]] = {}
    names_by_place: dict[object, str] = {}
    objects: dict[KeyPath, Any] = {}
    for key, entry in entries.items():
        path = entry.path
        if entry.dtype is None:
            objects[path] = load_object(files, root, key, entry)
            continue
        scalar = not entry.shape and not (model_at_root and path[0] not in _SCALAR_KEYS)
        in_object = _module_key(path) or (len(path) > 1 and path[0] in object_keys)
        tensor_key = None if in_object else key_for_path(path, scalar=scalar)
        tensor = build_tensor(files, root, key, entry, entry.dtype)
        if tensor_key is None:
            from unified_ckpt.views.shard_assembler import assemble  # imports torch

            objects[path] = assemble(tensor)
        elif tensor_key in tensors:
            raise FormatError(
                f"{root}: {key}: maps to {tensor_key[0]}:{tensor_key[1]}, as another tensor does; "
                "expected unique names"
            )
        else:
            part, name = tensor_key
            chunks = [(chunk.file, chunk.start) for chunk in entry.chunks]
            place = (part, entry.shape, entry.dtype, *chunks) if chunks else tensor_key
            stored_name = names_by_place.setdefault(place, name)  # of an export's tied tensors
            if stored_name == name:
                tensors[tensor_key] = tensor
            else:
                aliases.setdefault(part, {})[name] = stored_name
    metadata, refused = _build_metadata(objects), {}
    if any(not isinstance(name, str) for group in metadata.groups for name in group["names"]):
        tensors = {key: tensor for key, tensor in tensors.items() if key[0] != OPTIMIZER}
        metadata, refused = replace(metadata, groups=[]), {OPTIMIZER: _INDEXED_REFUSAL}
    metadata, rank_extra = adapt(metadata)
    return ShardedSource(
        root,
        tensors,
        format=format_name,
        metadata=metadata,
        aliases=aliases,
        extras=SourceExtras(refused, rank_extra),
    )


def _strip_wrapper(entries: Mapping[str, Entry]) -> None:
    """Remove one key around the whole state: PyTorch's recipe saves {"app": {"model": ..., ...}}.

    A wrapper contains every tensor, and a model or an optimizer under a known key. A path stays
    if the shorter path exists already.
    """
    paths = [entry.path for entry in entries.values() if entry.dtype is not None and entry.shape]
    wrappers = {path[0] for path in paths}
    inner_keys = {path[1] for path in paths if len(path) > 2}
    if (
        len(wrappers) != 1
        or any(map(_is_known_key, wrappers))
        or not any(map(_is_known_key, inner_keys))
    ):
        return
    if any(len(path) < 3 for path in paths):
        return
    existing_paths = {entry.path for entry in entries.values()}
    for entry in entries.values():
        wrapper, *inner = entry.path
        if wrapper in wrappers and inner and tuple(inner) not in existing_paths:
            entry.path = tuple(inner)


def _object_keys(entries: Mapping[str, Entry]) -> set[str | int]:
    """Return keys whose tensors belong to an object: of a data loader, random states, an EMA.

    They have other values too. The tensors of large ones are a part.
    """
    values, nbytes = set[str | int](), Counter[str | int]()
    for entry in entries.values():
        first = entry.path[0]
        if _is_known_key(first) or first == MASTER or len(entry.path) < 2:
            continue
        if entry.dtype is not None:
            nbytes[first] += sum(chunk.nbytes for chunk in entry.chunks)
        elif not is_extra_state(str(entry.path[-1])):
            values.add(first)
    return {key for key in values if nbytes[key] <= _MAX_OBJECT_NBYTES}


def _is_known_key(key: str | int) -> bool:
    return key in _MODEL_KEYS or _is_optimizer(key)


def _is_optimizer(key: str | int) -> bool:
    return _OPTIMIZER_KEY.fullmatch(str(key)) is not None


def map_files(root: str, entries: Mapping[str, Entry]) -> dict[str, MappedFile]:
    """Map the entries' files. IncompleteError names missing and truncated files, and entries."""
    ends: dict[str, dict[str, int]] = {}  # file -> key -> byte at which the entry ends
    for key, entry in entries.items():
        for chunk in entry.chunks:
            entry_ends = ends.setdefault(chunk.file, {})
            entry_ends[key] = max(entry_ends.get(key, 0), chunk.start + chunk.nbytes)
    return {name: _map_file(root, name, ends[name]) for name in sorted(ends)}


def key_for_path(path: KeyPath, *, scalar: bool) -> Key | None:
    """Return a tensor's part and name from its path; None if it is in no part, such as a step."""
    first, rest = str(path[0]), path[1:]
    if not rest:
        return None if scalar and "." not in first else (MODEL, strip_wrappers(first))
    if _is_optimizer(first):
        state = _state_path(path)  # longer for a tensor in a container, which is no tensor state
        return (OPTIMIZER, "/".join(map(str, state))) if state and len(state) == 2 else None
    return first, strip_wrappers(".".join(map(str, rest)))


def _module_key(path: KeyPath) -> str:
    """Return the module extra state key on the path; "" if none. DCP flattens the dicts in it."""
    name = str(path[1] if path[0] in _MODEL_KEYS and len(path) > 1 else path[0])
    return name if is_extra_state(name) else ""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A stored value in a tree of paths. Unlike the paths, it has lists where it had some."""

    value: Any


def _restore_lists(tree: Any) -> Any:
    """Return the tree with lists where keys are positions, as DCP restores what it flattened.

    A list whose tensors are in a part stays a dict of its other items.
    """
    if isinstance(tree, _Stored):
        return tree.value
    restored = {key: _restore_lists(child) for key, child in tree.items()}
    positions = range(len(restored))
    is_list = restored and restored.keys() == set(positions)
    return [restored[position] for position in positions] if is_list else restored


def _restore_values(tree: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: _restore_lists(child) for key, child in tree.items()}


def _build_metadata(objects: Mapping[KeyPath, Any]) -> SourceMetadata:
    """Return param groups, scalars, modules' extra state, and a tree of other objects."""
    options: dict[GroupKey, dict[str, Any]] = {}
    scalars: dict[str, dict[str, Any]] = {}
    modules: dict[Any, Any] = {}
    tree: dict[Any, Any] = {}
    for path, value in objects.items():
        state = _state_path(path)
        if state is not None:
            set_nested(scalars, state, _Stored(value))
            continue
        if _is_optimizer(path[0]) and len(path) > 1:
            inner_path = path[1:] if len(path) > 2 else tuple(str(path[1]).split("."))
            if inner_path[0] == "param_groups" and len(inner_path) > 2:
                owner, keys = inner_path[1], inner_path[2:]
                if not isinstance(owner, int):
                    owner, keys = ".".join(map(str, inner_path[1:-1])), inner_path[-1:]
                group = options.setdefault((str(path[0]), owner), {})
                set_nested(group, keys, _Stored(value))
                continue
        module = _module_key(path)
        if module:
            keys = strip_wrappers(module), *path[path.index(module) + 1 :]
            set_nested(modules, keys, _Stored(value))
        else:
            set_nested(tree, path, _Stored(value))
    extra = _restore_values(tree)
    step = extra.get("step")
    return SourceMetadata(
        step=step if isinstance(step, int) and not isinstance(step, bool) else None,
        extra=extra or None,
        modules=_restore_values(modules),
        groups=_param_groups({owner: _restore_values(group) for owner, group in options.items()}),
        scalars={fqn: _restore_values(state) for fqn, state in scalars.items()},
    )


def _state_path(path: KeyPath) -> KeyPath | None:
    """Return the parameter and keys of optimizer state; None for other entries."""
    if _is_optimizer(path[0]):
        if len(path) > 3 and path[1] == "state":
            return strip_wrappers(str(path[2])), str(path[3]), *path[4:]
        if len(path) > 1 and str(path[1]).startswith("state."):
            fqn, _, key = str(path[1]).removeprefix("state.").rpartition(".")
            return strip_wrappers(fqn), key, *path[2:]
    return None


def _param_groups(options: Mapping[GroupKey, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the listed groups; of a flat optimizer, group parameters with equal options."""
    listed = {key: group for key, group in options.items() if isinstance(key[1], int)}
    groups = [param_group(listed[key]) for key in sorted(listed)]
    for group in groups:  # positions are refused later
        group["names"] = [strip_wrappers(n) if isinstance(n, str) else n for n in group["names"]]
    return [
        *groups,
        *groups_by_options(
            (strip_wrappers(str(name)), group)
            for (key, name), group in options.items()
            if (key, name) not in listed
        ),
    ]


def build_tensor(
    files: Mapping[str, MappedFile], root: str, key: str, entry: Entry, dtype: str
) -> ShardedTensor:
    """Return the tensor of an entry.

    FormatError or IncompleteError names it if its chunks do not cover it exactly once.
    """
    shards = []
    for chunk in entry.chunks:
        if chunk.box is not None:
            file = files[chunk.file]
            load = partial(file.tensor, chunk.start, chunk.nbytes)
            shards.append(TensorShard(chunk.box, load, file.path))
    with error_prefix(f"{root}: {key}"):
        return sharded_tensor(dtype, entry.shape, shards)


def load_object(
    files: Mapping[str, MappedFile],
    root: str,
    key: str,
    entry: Entry,
    *,
    placeholders: Collection[str] = (),
) -> Any:
    """Load an object of plain values and tensors. FormatError if it contains classes."""
    if not entry.chunks:
        raise IncompleteError(f"{root}: {key}: {DCP_METADATA} does not give its location")
    chunk = entry.chunks[0]
    label = f"{os.path.join(root, chunk.file)}: {key}"
    return load_torch_part(
        files[chunk.file], chunk.start, chunk.nbytes, label=label, placeholders=placeholders
    )


def _map_file(root: str, name: str, entry_ends: Mapping[str, int]) -> MappedFile:
    """Map one file. `entry_ends`: the byte at which each entry ends.

    IncompleteError names the entries that end beyond the file.
    """
    path = os.path.join(root, name)
    if os.path.isabs(name) or ".." in name.split("/"):
        raise FormatError(
            f"{root}/{DCP_METADATA}: got the file {name!r}, expected a file in the folder"
        )
    nbytes = file_size(path)
    missing = sorted(key for key, stop in entry_ends.items() if stop > (nbytes or 0))
    if missing:
        problem = "is missing" if nbytes is None else "is truncated"
        raise IncompleteError(format_list(f"{path}: {problem}; affected entries", missing))
    return MappedFile(path)
