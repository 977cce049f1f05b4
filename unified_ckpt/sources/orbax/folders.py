"""Which folders of Orbax hold what: a root of steps, a step, an item of one. Knows names and small JSON files, no tensors.

A checkpoint is complete where its name is a final one, and it says so itself: `commit_success.txt` where its items have one, a time of
commit in `_CHECKPOINT_METADATA`. The newest complete step of a root is taken.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unified_ckpt.core.text import listed
from unified_ckpt.errors import FormatError, IncompleteError, NotFoundError
from unified_ckpt.sources.detect.names import ORBAX_STEP, ORBAX_TREE, ORBAX_UNFINISHED, orbax_items
from unified_ckpt.sources.files.json import read_json

COMMITTED = "commit_success.txt"
_NUMBER = re.compile(r"(?:^|[_-])(\d+)$")
_EMPTY = ("None", "Dict", "List", "Tuple", "NamedTuple")
_STRINGS = "_strings.json"
_PROCESS = re.compile(r"process_(\d+)-of-(\d+)\.json")


@dataclass(frozen=True, slots=True)
class Step:
    """`items`: trees of arrays by name, as folders. `told`: what `_CHECKPOINT_METADATA` says, {} without one. `plain`: items that are a
    JSON file. `positions`: of each process's data iterator, the file."""

    path: str
    number: int | None
    items: Mapping[str, str]
    told: Mapping[str, Any]
    plain: Mapping[str, str]
    positions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """Of one item. `arrays`: path -> name on the disk. `strings`: leaves that are text. `filled`: all zeros may not be stored."""

    root: str
    arrays: Mapping[tuple[str, ...], str]
    strings: Mapping[tuple[str, ...], str]
    zarr3: bool
    filled: bool


def find_step(root: str) -> Step:
    """The checkpoint at a path. IncompleteError where it was not finished, or lacks items or files of processes."""
    root = root.rstrip("/")
    if os.path.isfile(os.path.join(root, ORBAX_TREE)):
        above = os.path.dirname(root)
        inner = os.path.isfile(os.path.join(above, ORBAX_STEP)) and not os.path.isfile(
            os.path.join(root, ORBAX_STEP)
        )
        return _step(above if inner else root, {_last(root): root})
    items = orbax_items(root, os.listdir(root))
    if items or os.path.isfile(os.path.join(root, ORBAX_STEP)):
        return _step(root, {name: os.path.join(root, name) for name in items})
    return _newest(root)


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _newest(root: str) -> Step:
    """Of a root of steps. IncompleteError where no step is complete, with what is wrong with each."""
    names = sorted(os.listdir(root))
    numbered = {
        name: int(found[1])
        for name in names
        if (found := _NUMBER.search(name)) and os.path.isdir(os.path.join(root, name))
    }
    wrong = [
        f"{os.path.join(root, name)}: was not finished"
        for name in names
        if ORBAX_UNFINISHED in name
    ]
    for name in sorted(numbered, key=lambda one: numbered[one], reverse=True):
        path = os.path.join(root, name)
        try:
            return _step(
                path,
                {item: os.path.join(path, item) for item in orbax_items(path, os.listdir(path))},
            )
        except IncompleteError as error:
            wrong.append(str(error))
    raise IncompleteError(
        listed(f"{root}: holds no complete step of Orbax", wrong or ["none is there"])
    )


def _step(path: str, items: Mapping[str, str]) -> Step:
    for folder in (path, *items.values()):
        if ORBAX_UNFINISHED in _last(folder):
            raise IncompleteError(
                f"{folder}: was not finished: its name has {ORBAX_UNFINISHED}; needed a checkpoint that was committed"
            )
    if not os.path.isfile(os.path.join(path, COMMITTED)):
        inner = {name: os.listdir(folder) for name, folder in items.items() if folder != path}
        done = [
            name for name, files in inner.items() if COMMITTED in files and ORBAX_STEP not in files
        ]  # else it was saved by itself
        if done:
            raise IncompleteError(
                f"{path}: was not committed: {COMMITTED} is in {', '.join(done)}, and not in the step's folder"
            )
    told = (
        read_json(os.path.join(path, ORBAX_STEP))
        if os.path.isfile(os.path.join(path, ORBAX_STEP))
        else {}
    )
    if not isinstance(told, dict):
        raise FormatError(
            f"{os.path.join(path, ORBAX_STEP)}: holds a {type(told).__name__}; needed an object"
        )
    if told and not told.get("commit_timestamp_nsecs"):
        raise IncompleteError(f"{path}: was not committed: {ORBAX_STEP} has no time of commit")
    named = told.get("item_handlers")
    lost = (
        [name for name in named if not os.path.isdir(os.path.join(path, name))]
        if isinstance(named, dict)
        else []
    )
    if lost:
        raise IncompleteError(
            listed(f"{path}: items are missing that {ORBAX_STEP} names", sorted(lost))
        )
    if not items:
        raise FormatError(
            f"{path}: has no item with {ORBAX_TREE}; needed a tree of arrays as PyTreeSave or StandardSave write it"
        )
    number = _NUMBER.search(_last(path))
    plain = {
        name: os.path.join(path, name, "metadata")
        for name in sorted(os.listdir(path))
        if name not in items
    }
    plain = {name: file for name, file in plain.items() if os.path.isfile(file)}
    return Step(path, int(number[1]) if number else None, items, told, plain, _positions(path))


def _positions(path: str) -> tuple[str, ...]:
    """MaxText's data iterators: `iter/process_<i>-of-<n>.json`."""
    folder = os.path.join(path, "iter")
    found = [
        one
        for name in (os.listdir(folder) if os.path.isdir(folder) else [])
        if (one := _PROCESS.fullmatch(name))
    ]
    if not found:
        return ()
    counts = {int(one[2]) for one in found}
    if len(counts) > 1:
        raise FormatError(
            f"{folder}: has files of {' and of '.join(map(str, sorted(counts)))} processes; needed one count"
        )
    count = counts.pop()
    files = [f"process_{process}-of-{count}.json" for process in range(count)]
    lost = sorted(set(files) - {one[0] for one in found})
    if lost:
        raise IncompleteError(listed(f"{folder}: files are missing", lost))
    return tuple(os.path.join(folder, file) for file in files)


def read_tree(root: str) -> Tree:
    """What `_METADATA` says. FormatError where it is damaged."""
    path = os.path.join(root, ORBAX_TREE)
    told = read_json(path)
    try:
        leaves: dict[tuple[str, ...], str] = {}
        for one in told["tree_metadata"].values():
            value = one["value_metadata"]
            if value["value_type"] not in _EMPTY and not value.get("skip_deserialize"):
                leaves[tuple(str(key["key"]) for key in one["key_metadata"])] = value["value_type"]
        texts: Any = read_json(os.path.join(root, _STRINGS)) if "string" in leaves.values() else {}
        strings = {at: texts[".".join(at)] for at, kind in leaves.items() if kind == "string"}
        arrays = {at: ".".join(at) for at, kind in leaves.items() if kind != "string"}
        return Tree(
            root,
            arrays,
            strings,
            bool(told.get("use_zarr3")),
            not told.get("store_array_data_equal_to_fill_value"),
        )
    except (KeyError, TypeError, AttributeError, NotFoundError) as error:
        raise FormatError(f"{path}: is not what Orbax writes: {error!r}") from error
