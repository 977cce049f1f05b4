"""Writes the first inputs of each target: from golden folders, and from each other format.

`python -m tests.support.fuzzing.seeds FOLDER`
"""

from __future__ import annotations

import argparse
import json
import pickle
import struct
import tempfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

import unified_ckpt as uc
from tests.foreign.conformance_cases import PYTORCH
from tests.foreign.conformance_frameworks import FRAMEWORKS
from tests.support.format.golden import EXTRA, GOLDEN
from tests.support.fuzzing import containers
from tests.support.fuzzing.targets import add_input
from unified_ckpt.format import codec

MAX_NBYTES = 48_000  # of an input; most of the larger folders only have more layers
MAX_PICKLE_NBYTES = 8_000
_VALUES = {
    **EXTRA,
    "list": [1, 2.5, None, True, "é", 2**80, 1j, float("nan"), b"bytes", Path("/a")],
    "dtypes": (np.dtype("<f4"), torch.bfloat16, np.float32(2), torch.Size([2, 3])),
    "tensor": torch.arange(6.0).reshape(2, 3).t(),
    "set": {1, "a"},
}
_RULES = {
    "rules": [
        {"from": "model.{name}.weight", "to": "{name}.w"},
        {"from": "*", "to": "x.*", "transpose": [0, 1]},
    ],
    "unmatched": "keep",
}
_OPTIONS = (
    {"model_dtype": "bfloat16", "parts": ["model"], "max_file_bytes": 100, "compression": "O1"},
    {"verify": "off", "strict": True, "timeout_seconds": 3.5},
    {"keep_latest": 3, "interval_steps": 2, "keep_best": 1, "best_metric": "loss"},
    {"format": "megatron", "config": "c", "layers": "x.*", "optimizer_order": [["a"]]},
    {"enable_checkpointing": "true", "checkpoint_period": "10", "max_num_checkpoints_to_keep": 2},
    {"unified_checkpoint": True, "save_steps": 500, "ckpt_quant_stage": "O1", "output_dir": "o"},
)


def write_seeds(corpus: Path) -> None:
    """Write the inputs of all targets."""
    _write_format_seeds(corpus)
    _write_golden_folders(corpus)
    for name, make in {**PYTORCH, **FRAMEWORKS}.items():
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            case = make(Path(folder))
            bodies = {
                str(path.relative_to(case.path.parent)): path.read_bytes() for path in case.files()
            }
            options = case.options.model_dump(exclude_defaults=True, mode="json")
            _write_folder(corpus, bodies, options)
            print(name, len(bodies))


def _write_format_seeds(corpus: Path) -> None:
    for path in GOLDEN.rglob("*"):
        if path.suffix == ".safetensors":
            add_input("header", path.read_bytes(), corpus)
        if path.name.endswith(".index.json"):
            add_input("index", path.read_bytes(), corpus)
        if path.name.endswith(".exceptions.safetensors"):
            add_input("outliers", path.read_bytes(), corpus)
        if path.name == "unified_checkpoint.json":
            add_input("manifest", path.read_bytes(), corpus)
            add_input("sealed-manifest", path.read_bytes(), corpus)
    packed = codec.pack(_VALUES)
    add_input("packed", packed, corpus)
    header = packed[16 : 16 + struct.unpack("<Q", packed[8:16])[0]]
    tree = json.loads(header)["tree"]
    add_input("values", json.dumps(tree).encode(), corpus)
    for name, node in tree.items():
        add_input("values", json.dumps({name: node}).encode(), corpus)
    blobs = {"extra/b": "01234567"}
    node = {"$type": "numpy.ndarray", "dtype": "<f4", "shape": [2], "blob": "extra/b"}
    add_input("values", json.dumps({"tree": {"b": node}, "blobs": blobs}).encode(), corpus)
    add_input("renames", json.dumps(_RULES).encode(), corpus)
    for options in _OPTIONS:
        add_input("options", json.dumps(options).encode(), corpus)
    with tempfile.TemporaryDirectory() as root:
        with uc.CheckpointManager(
            root, options=uc.ManagerOptions(interval_steps=1, keep_latest=1)
        ) as manager:
            for step in (1, 2):
                manager.save(step, model={"w": torch.ones(2)}, metrics={"loss": 0.5})
        add_input("events", (Path(root) / "unified_events.jsonl").read_bytes(), corpus)
    for protocol in (0, 2, 4):
        value = {"a": [1, 2.5, b"b", None, (1, 2, "x")], 3: OrderedDict(x={1, 2})}
        add_input("pickle", pickle.dumps(value, protocol), corpus)
        add_input("pickle", pickle.dumps({"w": np.arange(6.0)}, protocol), corpus)


def _write_golden_folders(corpus: Path) -> None:
    for path in GOLDEN.rglob("unified_checkpoint.json"):
        if "replicas" not in path.parts:
            folder = path.parent
            files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
            bodies = {f"c/{file.relative_to(folder)}": file.read_bytes() for file in files}
            add_input("folder", containers.pack(bodies), corpus)


def _write_folder(corpus: Path, bodies: dict[str, bytes], options: dict[str, object]) -> None:
    for body in bodies.values():
        _write_pickles(corpus, body)
    files = {name: containers.without_values(body) for name, body in bodies.items()}
    if options:
        files["options.json"] = json.dumps(options).encode()
    packed = containers.pack(files)
    if len(packed) <= MAX_NBYTES:
        add_input("folder", packed, corpus)


def _write_pickles(corpus: Path, body: bytes) -> None:
    if body.startswith(b"\x80") and len(body) < MAX_PICKLE_NBYTES:
        add_input("pickle", body, corpus)
    for name, entry in containers.unpack(body).items() if body.startswith(b"PK") else ():
        if name.endswith("/data.pkl") and len(entry) < MAX_PICKLE_NBYTES:
            add_input("archived-pickle", entry, corpus)
            if len(body) < MAX_PICKLE_NBYTES:
                add_input("archive", containers.without_values(body), corpus)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write_seeds(parser.parse_args().folder)
