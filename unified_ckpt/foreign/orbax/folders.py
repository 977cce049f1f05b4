"""Resolves Orbax folders, that is roots of steps, steps and items, from names and small JSON
files.

A checkpoint is complete if its name is final and it is marked as committed: by
`commit_success.txt` if its items have that file, and by a commit time in `_CHECKPOINT_METADATA`.
Of a root, the latest complete step is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unified_ckpt.core.text import format_list, raise_if_any
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.foreign.files.json import read_json, read_json_object
from unified_ckpt.foreign.files.parsing import parsing
from unified_ckpt.foreign.orbax.detect import (
    ORBAX_STEP,
    ORBAX_TREE,
    ORBAX_UNFINISHED,
    list_orbax_items,
)
from unified_ckpt.runtime.storage.regular_files import is_file, is_folder, list_folder

COMMITTED = "commit_success.txt"
_NUMBER = re.compile(r"(?:^|[_-])(\d+)$")
_EMPTY_TYPES = ("None", "Dict", "List", "Tuple", "NamedTuple")
_STRINGS_FILE = "_strings.json"
_MARKERS = (ORBAX_STEP, COMMITTED)
_PROCESS_FILE = re.compile(r"process_(\d+)-of-(\d+)\.json")


@dataclass(frozen=True, slots=True)
class OrbaxStep:
    """A step. `items` maps the names of trees of arrays to their folders.

    `metadata` is the content of `_CHECKPOINT_METADATA`, or {}. `json_items` maps names to JSON
    files. `iterator_states` has the data iterator's file of each process. `left_out` has the names
    of other entries.
    """

    path: str
    number: int | None
    items: Mapping[str, str]
    metadata: Mapping[str, Any]
    json_items: Mapping[str, str]
    iterator_states: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OrbaxTree:
    """The tree of one item. `arrays` maps key paths to names on disk, `strings` to text leaves.

    `zeros_omitted`: chunks of zeros may be missing. `custom`: what the caller of Orbax added.
    """

    root: str
    arrays: Mapping[tuple[str, ...], str]
    strings: Mapping[tuple[str, ...], str]
    zarr3: bool
    zeros_omitted: bool
    custom: Any


def resolve_step(root: str) -> OrbaxStep:
    """Return the step at a path: an item's step, a step, or the latest complete step of a root.

    Raises IncompleteError if it is unfinished, or lacks items or files of processes.
    """
    root = root.rstrip("/")
    if is_file(os.path.join(root, ORBAX_TREE)):
        parent = os.path.dirname(root)
        is_item = is_file(os.path.join(parent, ORBAX_STEP)) and not is_file(
            os.path.join(root, ORBAX_STEP)
        )
        return _open_step(parent if is_item else root, {_basename(root): root})
    items = list_orbax_items(root, list_folder(root))
    if items or is_file(os.path.join(root, ORBAX_STEP)):
        return _open_step(root, {name: os.path.join(root, name) for name in items})
    return _latest_complete_step(root)


def _basename(path: str) -> str:
    return path.rpartition("/")[2]


def _latest_complete_step(root: str) -> OrbaxStep:
    """Return the latest complete step of a root; IncompleteError says why none is complete."""
    names = sorted(list_folder(root))
    numbered = {
        name: int(match[1])
        for name in names
        if (match := _NUMBER.search(name)) and is_folder(os.path.join(root, name))
    }
    problems = [
        f"{os.path.join(root, name)}: is unfinished" for name in names if ORBAX_UNFINISHED in name
    ]
    for name in sorted(numbered, key=lambda step_name: numbered[step_name], reverse=True):
        path = os.path.join(root, name)
        items = list_orbax_items(path, list_folder(path))
        try:
            return _open_step(path, {item: os.path.join(path, item) for item in items})
        except IncompleteError as error:
            problems.append(str(error))
    raise IncompleteError(
        format_list(f"{root}: no complete Orbax step", problems or ["no step at all"])
    )


def _open_step(path: str, items: Mapping[str, str]) -> OrbaxStep:
    for folder in (path, *items.values()):
        if ORBAX_UNFINISHED in _basename(folder):
            raise IncompleteError(
                f"{folder}: is unfinished: its name has {ORBAX_UNFINISHED}; use a committed "
                "checkpoint"
            )
    _check_committed(path, items)
    metadata = _read_step_metadata(path)
    item_handlers = metadata.get("item_handlers")
    item_names = sorted(item_handlers) if isinstance(item_handlers, dict) else []
    raise_if_any(
        IncompleteError,
        f"{path}: items of {ORBAX_STEP} are missing",
        [name for name in item_names if not is_folder(os.path.join(path, name))],
    )
    if not items:
        raise FormatError(
            f"{path}: no item has {ORBAX_TREE}, expected a tree of arrays that PyTreeSave or "
            "StandardSave wrote"
        )
    number, entries = _NUMBER.search(_basename(path)), sorted(list_folder(path))
    json_items = {
        name: file
        for name in entries
        for file in (os.path.join(path, name, json_name) for json_name in ("metadata", name))
        if name not in items and is_file(file)
    }
    iterator_states = _list_iterator_states(path)
    read = {*list_orbax_items(path, entries), *json_items, *_MARKERS}
    read |= {"iter"} if iterator_states else set()
    return OrbaxStep(
        path,
        int(number[1]) if number else None,
        items,
        metadata,
        json_items,
        iterator_states,
        () if path in items.values() else tuple(name for name in entries if name not in read),
    )


def _check_committed(path: str, items: Mapping[str, str]) -> None:
    if is_file(os.path.join(path, COMMITTED)):
        return
    item_entries = {name: list_folder(folder) for name, folder in items.items() if folder != path}
    # An item with ORBAX_STEP is a checkpoint of its own, with its own marker.
    committed = [
        name
        for name, entries in item_entries.items()
        if COMMITTED in entries and ORBAX_STEP not in entries
    ]
    if committed:
        raise IncompleteError(
            f"{path}: is not committed: {COMMITTED} is in {', '.join(committed)}, but not in the "
            "step's folder"
        )


def _read_step_metadata(path: str) -> dict[str, Any]:
    file = os.path.join(path, ORBAX_STEP)
    if not is_file(file):
        return {}
    metadata = read_json_object(file)
    if metadata and not metadata.get("commit_timestamp_nsecs"):
        raise IncompleteError(f"{path}: is not committed: {ORBAX_STEP} has no commit time")
    return metadata


def _list_iterator_states(path: str) -> tuple[str, ...]:
    """List the states of MaxText's data iterators, `iter/process_<i>-of-<n>.json`."""
    folder = os.path.join(path, "iter")
    matches = [match for name in list_folder(folder) if (match := _PROCESS_FILE.fullmatch(name))]
    if not matches:
        return ()
    counts = {int(match[2]) for match in matches}
    if len(counts) > 1:
        raise FormatError(
            f"{folder}: got files of {' and '.join(map(str, sorted(counts)))} processes, expected "
            "one count"
        )
    count = counts.pop()
    files = [f"process_{process}-of-{count}.json" for process in range(count)]
    raise_if_any(
        IncompleteError,
        f"{folder}: files are missing",
        sorted(set(files) - {match[0] for match in matches}),
    )
    return tuple(os.path.join(folder, file) for file in files)


def read_tree(root: str) -> OrbaxTree:
    """Read an item's `_METADATA`. Raises FormatError if it is damaged."""
    path = os.path.join(root, ORBAX_TREE)
    metadata = read_json(path)
    with parsing(path, "valid Orbax metadata"):
        leaves: dict[tuple[str, ...], str] = {}
        for leaf in metadata["tree_metadata"].values():
            value = leaf["value_metadata"]
            if value["value_type"] not in _EMPTY_TYPES and not value.get("skip_deserialize"):
                leaves[tuple(str(key["key"]) for key in leaf["key_metadata"])] = value["value_type"]
        has_strings = "string" in leaves.values()
        texts: Any = read_json(os.path.join(root, _STRINGS_FILE)) if has_strings else {}
        names = {key_path: ".".join(key_path) for key_path in leaves}
        return OrbaxTree(
            root,
            {key_path: name for key_path, name in names.items() if leaves[key_path] != "string"},
            {
                key_path: texts[name]
                for key_path, name in names.items()
                if leaves[key_path] == "string"
            },
            bool(metadata.get("use_zarr3")),
            not metadata.get("store_array_data_equal_to_fill_value"),
            metadata.get("custom_metadata"),
        )
