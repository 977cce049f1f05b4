"""Every value in the files of a checkpoint, read with the tools of those who wrote them.

No code is shared with the readers. Objects of a framework's own classes become `Unknown`.
"""

from __future__ import annotations

import json
import pickle
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

IMPORTED = (*sys.stdlib_module_names, "__builtin__", "torch", "numpy", "lightning")
PADDLE_FILES = ("*.pdparams", "*.pdopt", "[0-9]*.distcp", "trainer_state.bin")
Stored = tuple[str, str, Any]  # where it lies, the last name of its path, a tensor or a plain value


class Unknown:
    """An object of a framework's own class, with its fields."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    def __hash__(self) -> int:
        return id(self)


class Unpickler(pickle.Unpickler):
    """Replaces classes of frameworks."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in IMPORTED:
            return super().find_class(module, name)
        return type(name, (Unknown,), {})


def stored_values(path: Path, read: Collection[Path]) -> Iterator[Stored]:
    """Yield the tensors and plain values below a path, except those of the files in `read`."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    for file in files:
        if file in read:
            continue
        label = str(file.relative_to(path.parent))
        if file.name == ".metadata":
            state: dict[str, Any] = {}
            reader, planner = FileSystemReader(file.parent), _EmptyStateDictLoadPlanner()
            _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
            yield from leaves(state, label, "")
        elif file.suffix == ".safetensors":
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # it is no dict
                    yield f"{label}: {name}", name, tensors.get_tensor(name)
        elif file.suffix == ".json":
            yield from leaves(json.loads(file.read_text()), label, "")
        elif any(map(file.match, PADDLE_FILES)):
            with file.open("rb") as body:
                yield from leaves(Unpickler(body, encoding="latin1").load(), label, "")
        elif file.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl"):
            module: Any = types.ModuleType("unpickler")
            vars(module).update(Unpickler=Unpickler, load=pickle.load)
            yield from leaves(torch.load(file, "cpu", module, weights_only=False), label, "")


def leaves(tree: Any, label: str, name: str) -> Iterator[Stored]:
    """Yield the tensors and plain values of a tree. Elements of a list have the list's name."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{label}: {key}", key if isinstance(key, str) else name)
    elif isinstance(tree, tuple) and len(tree) == 2 and isinstance(tree[1], np.ndarray):
        yield from leaves(tree[1], label, name)  # Paddle's, after its name
    elif isinstance(tree, list | tuple | set):
        for value in tree:
            yield from leaves(value, label, name)
    elif isinstance(tree, np.ndarray) and tree.dtype.kind in "biuf":
        yield label, name, torch.from_numpy(np.array(tree))
    elif isinstance(tree, torch.Tensor | bool | int | float | str):
        yield label, name, tree
    elif isinstance(tree, Unknown):
        yield from leaves(getattr(tree, "args", ()), label, name)
        yield from leaves({k: v for k, v in vars(tree).items() if k != "args"}, label, name)
    elif hasattr(tree, "__dict__") and not isinstance(tree, type):
        yield from leaves(vars(tree), label, name)


def bits(tensor: torch.Tensor) -> set[tuple[int, int]]:
    """Return the distinct elements of a tensor, as their size and their bits; of wide ones, of each
    8 bytes.
    """
    size, flat = tensor.element_size(), tensor.detach().contiguous().flatten()
    if not flat.numel():
        return set()
    values = flat.view(torch.uint8).numpy().view(f"<u{min(size, 8)}")
    return {(size, value) for value in set(values.tolist())}
