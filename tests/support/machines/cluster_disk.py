"""The folders of the cluster machine: what was committed where, and what has become of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.machines.cluster_model import (
    DTYPES,
    Files,
    Tensor,
    as_bytes,
    global_array,
    read_files,
)
from tests.support.machines.cluster_plans import Folder, Saved

Key = tuple[str, str]  # place, name


@dataclass(frozen=True)
class Damage:
    """What happens to one file. `data`: a flip in the last byte of a file, not in its header."""

    kind: str
    file: int
    position: float
    bit: int


DAMAGES = st.builds(
    Damage,
    st.sampled_from(["flip", "data", "data", "truncate", "delete", "grow"]),
    st.integers(0, 30),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 7),
)


class Disk:
    """`folders`: what was committed at each place and name. The truth is the bytes of the files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders: dict[Key, Folder] = {}

    def path(self, key: Key) -> Path:
        return self.root / key[0] / key[1]

    def files(self) -> Files:
        return read_files(self.root)

    def current(self, key: Key, disk: Files | None = None) -> Files:
        """The files of a folder. `disk`: what `files` has just returned."""
        if disk is None:
            return read_files(self.path(key))
        prefix = f"{key[0]}/{key[1]}/"
        return {
            path.removeprefix(prefix): body
            for path, body in disk.items()
            if path.startswith(prefix)
        }

    def damaged_files(self, key: Key, disk: Files | None = None) -> list[str]:
        """Files that differ from those of the commit, are missing, or are new."""
        now, files = self.current(key, disk), self.folders[key].files
        return sorted(
            name for name in now.keys() | files.keys() if now.get(name) != files.get(name)
        )

    def is_intact(self, key: Key, disk: Files | None = None) -> bool:
        return not self.damaged_files(key, disk)

    def present(self) -> list[Key]:
        return sorted(self.folders)

    def nth(self, number: int) -> Key:
        keys = self.present()
        return keys[number % len(keys)]

    def lacks_a_part(self, key: Key, disk: Files | None = None) -> bool:
        """Whether all files of a part are gone, as if a user had deleted them."""
        files, now = self.folders[key].files, self.current(key, disk)
        return any(
            all(name not in now for name in files if name.startswith(part))
            for part in ("optimizer", "ema", "master_weights")
            if any(name.startswith(part) for name in files)
        )

    def check_verify(self, key: Key) -> None:
        """Check that a deep check finds damage where there is some, and only there."""
        try:
            problems = list(uc.verify(self.path(key), deep=True).problems)
        except uc.CheckpointError as error:
            problems = [str(error)]
        if self.is_intact(key):
            assert not problems, f"{key} is intact: {problems}"
        elif not self.lacks_a_part(key):
            assert problems, f"{key}: the damage was not found"

    def check_others(self, keys: Sequence[Key], before: Files, after: Files) -> None:
        """Check that a save changed only its own folders, and left nothing temporary."""
        own_prefixes = tuple(f"{place}/{name}/" for place, name in keys)
        backup_prefixes = tuple(f"{place}/{name}-before-" for place, name in keys)
        remaining = {
            path: body for path, body in before.items() if not path.startswith(own_prefixes)
        }
        now = {path: body for path, body in after.items() if not path.startswith(own_prefixes)}
        new = {
            path for path in now.keys() - remaining.keys() if not path.startswith(backup_prefixes)
        }
        assert not new, f"left behind: {sorted(new)}"
        assert remaining.items() <= now.items(), "files beside the save were changed"

    def check_aside(self, key: Key, files: Files) -> None:
        """Check that what was no valid checkpoint has another name now."""
        place, name = key
        others = [read_files(path) for path in (self.root / place).glob(f"{name}-before-*")]
        assert files in others, f"{place}/{name} was no checkpoint, and is deleted"

    def check_repaired(self, key: Key, before: Files, after: Files) -> None:
        """Check that each file is the right one, or as it was."""
        prefix, files = f"{key[0]}/{key[1]}/", self.folders[key].files
        now = self.current(key, after)
        for name, body in now.items():
            assert body in (files.get(name), before.get(prefix + name)), f"{prefix}{name}"
            if before.get(prefix + name) == files.get(name):
                assert body == files[name], f"{prefix}{name} was intact"
        assert {f"{prefix}{name}" for name in now} >= {
            path for path in before if path.startswith(prefix)
        }, "a repair deleted files"

    # what happens to folders

    def damage(self, key: Key, damage: Damage) -> None:
        files = sorted(self.current(key))
        if damage.kind == "data":
            content = ("model", "master_weights", "optimizer", "ema", "extra", "rank_")
            files = [
                file for file in files if file.startswith(content) and file.endswith("safetensors")
            ]
        if not files:
            return
        path = self.path(key) / files[damage.file % len(files)]
        size = path.stat().st_size
        if damage.kind == "delete" or not size:
            path.unlink()
        elif damage.kind == "truncate":
            os.truncate(path, int(size * damage.position))
        elif damage.kind == "grow":
            path.write_bytes(path.read_bytes() + b" ")
        else:
            flip(path, -1 if damage.kind == "data" else damage.position, mask=1 << damage.bit)

    def lose(self, key: Key) -> None:
        shutil.rmtree(self.path(key))
        del self.folders[key]

    def copy(self, key: Key, goal: Key) -> None:
        shutil.rmtree(self.path(goal), ignore_errors=True)
        shutil.copytree(self.path(key), self.path(goal))
        self.folders[goal] = self.folders[key]

    def swap(self, first: Key, second: Key) -> None:
        self.path(first).rename(self.root / "swapped")
        self.path(second).rename(self.path(first))
        (self.root / "swapped").rename(self.path(second))
        folders = self.folders
        folders[first], folders[second] = folders[second], folders[first]


def check_content(path: Path, model: Sequence[Tensor], saved: Saved) -> None:
    """Read a whole folder with the safetensors package, or decode it."""
    if saved.compression != "none":
        with uc.open(path) as opened:
            for tensor in model:
                right = global_array(tensor, saved.seed).tobytes()
                value = opened[tensor.part][tensor.name][...]
                assert as_bytes(value) == right, f"{tensor.part}:{tensor.name} holds other bytes"
        return
    for part in {tensor.part for tensor in model}:
        stored: dict[str, torch.Tensor] = {}
        for file in sorted(path.glob(f"{part}*.safetensors")):
            stored |= load_file(file)
        expected = {tensor.name: tensor for tensor in model if tensor.part == part}
        assert stored.keys() == expected.keys(), (part, stored.keys())
        for name, tensor in expected.items():
            assert stored[name].dtype == DTYPES[tensor.dtype][0], name
            assert tuple(stored[name].shape) == tensor.shape, name
            right = global_array(tensor, saved.seed).tobytes()
            assert as_bytes(stored[name]) == right, f"{part}:{name} holds other bytes"
