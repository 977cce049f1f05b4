"""Which folders of Orbax hold what: a root of steps, a step, an item of one. Knows names and small
JSON files, no tensors.

A checkpoint is complete where its name is a final one, and it says so itself: `commit_success.txt`
where its items have one, a time of commit in `_CHECKPOINT_METADATA`. The newest complete step of a
root is taken.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unified_ckpt.core.text import format_list
from unified_ckpt.errors import FormatError, IncompleteError, NotFoundError
from unified_ckpt.sources.detect.names import (
    ORBAX_STEP,
    ORBAX_TREE,
    ORBAX_UNFINISHED,
    list_orbax_items,
)
from unified_ckpt.sources.files.json import read_json

COMMITTED = "commit_success.txt"
_NUMBER = re.compile(r"(?:^|[_-])(\d+)$")
_EMPTY_TYPES = ("None", "Dict", "List", "Tuple", "NamedTuple")
_STRINGS_FILE = "_strings.json"
_PROCESS_FILE = re.compile(r"process_(\d+)-of-(\d+)\.json")


@dataclass(frozen=True, slots=True)
class OrbaxStep:
    """`items`: trees of arrays by name, as folders. `metadata`: what `_CHECKPOINT_METADATA` says,
    {} without one. `json_items`: items that are a JSON file. `iterator_states`: of each process's
    data iterator, the file.
    """

    path: str
    number: int | None
    items: Mapping[str, str]
    metadata: Mapping[str, Any]
    json_items: Mapping[str, str]
    iterator_states: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OrbaxTree:
    """Of one item. `arrays`: path -> name on the disk. `strings`: leaves that are text.
    `zeros_omitted`: all zeros may not be stored.
    """

    root: str
    arrays: Mapping[tuple[str, ...], str]
    strings: Mapping[tuple[str, ...], str]
    zarr3: bool
    zeros_omitted: bool


def resolve_step(root: str) -> OrbaxStep:
    """The checkpoint at a path. IncompleteError where it was not finished, or lacks items or files
    of processes.
    """
    root = root.rstrip("/")
    if os.path.isfile(os.path.join(root, ORBAX_TREE)):
        parent = os.path.dirname(root)
        is_item = os.path.isfile(os.path.join(parent, ORBAX_STEP)) and not os.path.isfile(
            os.path.join(root, ORBAX_STEP)
        )
        return _open_step(parent if is_item else root, {_basename(root): root})
    items = list_orbax_items(root, os.listdir(root))
    if items or os.path.isfile(os.path.join(root, ORBAX_STEP)):
        return _open_step(root, {name: os.path.join(root, name) for name in items})
    return _latest_complete_step(root)


def _basename(path: str) -> str:
    return path.rpartition("/")[2]


def _latest_complete_step(root: str) -> OrbaxStep:
    """Of a root of steps. IncompleteError where no step is complete, with what is wrong with each."""
    names = sorted(os.listdir(root))
    numbered = {
        name: int(match[1])
        for name in names
        if (match := _NUMBER.search(name)) and os.path.isdir(os.path.join(root, name))
    }
    problems = [
        f"{os.path.join(root, name)}: was not finished"
        for name in names
        if ORBAX_UNFINISHED in name
    ]
    for name in sorted(numbered, key=lambda step_name: numbered[step_name], reverse=True):
        path = os.path.join(root, name)
        try:
            return _open_step(
                path,
                {
                    item: os.path.join(path, item)
                    for item in list_orbax_items(path, os.listdir(path))
                },
            )
        except IncompleteError as error:
            problems.append(str(error))
    raise IncompleteError(
        format_list(f"{root}: holds no complete step of Orbax", problems or ["none is there"])
    )


def _open_step(path: str, items: Mapping[str, str]) -> OrbaxStep:
    for folder in (path, *items.values()):
        if ORBAX_UNFINISHED in _basename(folder):
            raise IncompleteError(
                f"{folder}: was not finished: its name has {ORBAX_UNFINISHED}; needed a checkpoint that was committed"
            )
    if not os.path.isfile(os.path.join(path, COMMITTED)):
        item_entries = {
            name: os.listdir(folder) for name, folder in items.items() if folder != path
        }
        committed = [
            name
            for name, files in item_entries.items()
            if COMMITTED in files and ORBAX_STEP not in files
        ]  # else it was saved by itself
        if committed:
            raise IncompleteError(
                f"{path}: was not committed: {COMMITTED} is in {', '.join(committed)}, and not in the step's folder"
            )
    metadata = (
        read_json(os.path.join(path, ORBAX_STEP))
        if os.path.isfile(os.path.join(path, ORBAX_STEP))
        else {}
    )
    if not isinstance(metadata, dict):
        raise FormatError(
            f"{os.path.join(path, ORBAX_STEP)}: holds a {type(metadata).__name__}; needed an object"
        )
    if metadata and not metadata.get("commit_timestamp_nsecs"):
        raise IncompleteError(f"{path}: was not committed: {ORBAX_STEP} has no time of commit")
    item_handlers = metadata.get("item_handlers")
    missing = (
        [name for name in item_handlers if not os.path.isdir(os.path.join(path, name))]
        if isinstance(item_handlers, dict)
        else []
    )
    if missing:
        raise IncompleteError(
            format_list(f"{path}: items are missing that {ORBAX_STEP} names", sorted(missing))
        )
    if not items:
        raise FormatError(
            f"{path}: has no item with {ORBAX_TREE}; needed a tree of arrays as PyTreeSave or StandardSave write it"
        )
    number = _NUMBER.search(_basename(path))
    json_items = {
        name: os.path.join(path, name, "metadata")
        for name in sorted(os.listdir(path))
        if name not in items
    }
    json_items = {name: file for name, file in json_items.items() if os.path.isfile(file)}
    return OrbaxStep(
        path,
        int(number[1]) if number else None,
        items,
        metadata,
        json_items,
        _list_iterator_states(path),
    )


def _list_iterator_states(path: str) -> tuple[str, ...]:
    """MaxText's data iterators: `iter/process_<i>-of-<n>.json`."""
    folder = os.path.join(path, "iter")
    matches = [
        match
        for name in (os.listdir(folder) if os.path.isdir(folder) else [])
        if (match := _PROCESS_FILE.fullmatch(name))
    ]
    if not matches:
        return ()
    counts = {int(match[2]) for match in matches}
    if len(counts) > 1:
        raise FormatError(
            f"{folder}: has files of {' and of '.join(map(str, sorted(counts)))} processes; needed one count"
        )
    count = counts.pop()
    files = [f"process_{process}-of-{count}.json" for process in range(count)]
    missing = sorted(set(files) - {match[0] for match in matches})
    if missing:
        raise IncompleteError(format_list(f"{folder}: files are missing", missing))
    return tuple(os.path.join(folder, file) for file in files)


def read_tree(root: str) -> OrbaxTree:
    """What `_METADATA` says. FormatError where it is damaged."""
    path = os.path.join(root, ORBAX_TREE)
    metadata = read_json(path)
    try:
        leaves: dict[tuple[str, ...], str] = {}
        for leaf in metadata["tree_metadata"].values():
            value = leaf["value_metadata"]
            if value["value_type"] not in _EMPTY_TYPES and not value.get("skip_deserialize"):
                leaves[tuple(str(key["key"]) for key in leaf["key_metadata"])] = value["value_type"]
        texts: Any = (
            read_json(os.path.join(root, _STRINGS_FILE)) if "string" in leaves.values() else {}
        )
        strings = {
            key_path: texts[".".join(key_path)]
            for key_path, value_type in leaves.items()
            if value_type == "string"
        }
        arrays = {
            key_path: ".".join(key_path)
            for key_path, value_type in leaves.items()
            if value_type != "string"
        }
        return OrbaxTree(
            root,
            arrays,
            strings,
            bool(metadata.get("use_zarr3")),
            not metadata.get("store_array_data_equal_to_fill_value"),
        )
    except (KeyError, TypeError, AttributeError, NotFoundError) as error:
        raise FormatError(f"{path}: is not what Orbax writes: {error!r}") from error
