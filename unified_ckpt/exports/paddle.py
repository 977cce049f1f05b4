"""Any source as a PaddleNLP Unified Checkpoint: its names, its orientation, its optimizer states, its indices. One process writes.

How state could be lost: a tensor has no place in PaddleNLP's format, or is turned the wrong way. All is planned before the first byte; the
folder that was written is read back and compared with the source, and only then gets its name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any
from uuid import uuid4

import torch

from unified_ckpt.core.planning.file_layout import split_files
from unified_ckpt.core.sharding.boxes import Box, whole
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import listed
from unified_ckpt.engine.source.diff import compare
from unified_ckpt.engine.source.protocol import Source, read_box
from unified_ckpt.errors import CheckpointError, FormatError, IntegrityError, StorageError
from unified_ckpt.format import names
from unified_ckpt.format.header import encode_header, file_order
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.storage.write_calls import ALONE
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES, as_bytes, dense
from unified_ckpt.sources.detect.paddle import PEFT
from unified_ckpt.sources.paddle.beta_powers import power_after
from unified_ckpt.sources.paddle.files import BF16
from unified_ckpt.sources.paddle.names import (
    Model,
    check_shape,
    is_turned,
    layer_of,
    model_of,
    paddle_name,
)
from unified_ckpt.sources.paddle.source import config_at, open_paddle
from unified_ckpt.sources.paddle.tensors import BETAS, POWERS, STATES

_TILE_NBYTES = 32 << 20
_DTYPES = {"BF16": BF16, "F16": "F16", "F32": "F32"}
_FOR_TORCH = {theirs: ours for ours, theirs in STATES.items()}


@dataclass(frozen=True, slots=True)
class _Out:
    """A tensor to write: from a stored one, `turned` or as it is, or `power`, one number."""

    name: str
    spec: TensorSpec  # as PaddleNLP has it
    stored: Key | None = None
    turned: bool = False
    power: float = 0.0


def write_paddle(
    source: Source, folder: str, options: SourceOptions, *, max_file_bytes: int
) -> None:
    """Writes model, master weights and optimizer to a new folder. `options.config`: the model's config.json, or a folder that has it.

    FormatError for what PaddleNLP's format has no place for, StorageError where something is at `folder`: nothing is written then.
    IntegrityError where what was written is not what the source has.
    """
    config = config_at(options.config) if options.config else None
    if config is None:
        raise FormatError(
            "PaddleNLP's names and orientation follow from the model's config.json; needed options.config"
        )
    if os.path.lexists(folder):
        raise StorageError(f"{folder}: exists; needed a free name")
    model = model_of(config)
    stems = _stems(source)
    outs = {stem: _planned(source, part, model) for part, stem in stems.items()}
    parent, name = os.path.split(os.path.abspath(folder))
    os.makedirs(parent, exist_ok=True)
    staging = names.staging_name(name, uuid4().hex)
    with LocalStorage(parent, how=ALONE) as storage:
        storage.make_folder(staging)
        try:
            for stem, found in outs.items():
                weight_map = _write_files(
                    source, storage, staging, stem, found, max_file_bytes=max_file_bytes
                )
                _put_json(
                    storage,
                    staging,
                    names.index_name(stem),
                    _index(stem, found, weight_map, masters=MASTER in stems),
                )
            _put_json(
                storage,
                staging,
                "config.json",
                _config(config, source, adapter=stems[MODEL] == PEFT),
            )
            trained = source.said().extra
            if isinstance(trained, dict) and isinstance(trained.get("trainer_state"), dict):
                _put_json(storage, staging, "trainer_state.json", trained["trainer_state"])
            _prove(source, storage.path(staging), stems, model)
            storage.sync_folder(staging)
            storage.rename(staging, name)
            storage.sync_folder("")
        except BaseException:
            shutil.rmtree(storage.path(staging), ignore_errors=True)
            raise


def _stems(source: Source) -> dict[str, str]:
    """Part -> how its files are called. FormatError for a part that PaddleNLP has not."""
    stray = sorted(set(source.parts) - {MODEL, MASTER, OPTIMIZER})
    if stray or MODEL not in source.parts:
        raise FormatError(
            listed(
                "PaddleNLP's format has model, master_weights and optimizer, and the first of these; the source has",
                list(source.parts),
            )
        )
    adapters = [name for name in source.names(MODEL) if ".lora_" in name]
    if adapters and len(adapters) < len(source.names(MODEL)):
        raise FormatError("the model has LoRA's weights and others; needed one of the two")
    return {
        part: PEFT if part == MODEL and adapters else part
        for part in (MODEL, MASTER, OPTIMIZER)
        if part in source.parts
    }


# ---- what to write


def _planned(source: Source, part: str, model: Model) -> list[_Out]:
    """The tensors of a part in their natural order, those that are tied under both names. FormatError listing what has no place."""
    stored = {**{name: name for name in source.names(part)}, **source.aliases(part)}
    specs = source.specs(part, set(stored.values()))
    said = source.said()
    others = said.extra.get(BETAS) if isinstance(said.extra, dict) else None
    betas = {
        name: group["options"].get("betas", others)
        for group in said.groups
        for name in group["names"]
    }
    found: list[_Out] = []
    wrong = (
        [f"{name}: has {', '.join(one)} that is no tensor" for name, one in said.scalars.items()]
        if part == OPTIMIZER
        else []
    )
    for name, one in stored.items():
        try:
            if part == OPTIMIZER:
                found += _state(
                    source, name, one, specs[one], betas.get(one.rpartition("/")[0]), model
                )
            else:
                found.append(_tensor(name, "", (part, one), specs[one], model))
        except CheckpointError as error:
            wrong.append(f"{part}:{name}: {error}")
    if wrong:
        raise FormatError(listed("PaddleNLP's format has no place for", wrong))
    return sorted(found, key=lambda out: _natural(out.name))


def _tensor(name: str, kind: str, stored: Key, spec: TensorSpec, model: Model) -> _Out:
    known = _DTYPES if stored[0] == MODEL else ("F32",)
    theirs = paddle_name(name, model)
    turned = is_turned(theirs, spec.shape, layer_of(theirs), tied=model.tied)
    shape = spec.shape[::-1] if turned else spec.shape
    check_shape(theirs, shape, model)
    if spec.dtype not in known:
        raise FormatError(f"has dtype {spec.dtype}; needed {', '.join(known)}")
    return _Out(theirs + kind, TensorSpec(_DTYPES[spec.dtype], shape), stored, turned)


def _state(
    source: Source, name: str, stored: str, spec: TensorSpec, betas: object, model: Model
) -> list[_Out]:
    """One state of a parameter; the step count as powers of the betas."""
    owner, _, kind = name.rpartition("/")
    if kind in _FOR_TORCH:
        return [_tensor(owner, f"/{_FOR_TORCH[kind]}", (OPTIMIZER, stored), spec, model)]
    if kind != "step":
        raise FormatError(
            f"is optimizer state that Paddle has not; needed {', '.join(_FOR_TORCH)}, step"
        )
    if (
        not isinstance(betas, tuple | list)
        or len(betas) != len(POWERS)
        or not all(isinstance(beta, float | None) for beta in betas)
    ):
        raise FormatError(
            "Paddle keeps powers of the betas for the step; needed the betas in its param group"
        )
    held = torch.frombuffer(
        bytearray(source.read(OPTIMIZER, stored, whole(spec.shape))), dtype=TORCH_DTYPES[spec.dtype]
    )
    steps = int(held[0])
    return [
        _Out(
            f"{paddle_name(owner, model)}/{power}",
            TensorSpec("F32", (1,)),
            power=power_after(beta, steps),
        )
        for power, beta in zip(POWERS, betas, strict=True)
    ]


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", name)]


# ---- writing


def _write_files(
    source: Source,
    storage: LocalStorage,
    staging: str,
    stem: str,
    outs: Sequence[_Out],
    *,
    max_file_bytes: int,
) -> dict[str, str]:
    """The numbered files of a part; gives their weight map."""
    weight_map: dict[str, str] = {}
    ranges = split_files([out.spec.nbytes for out in outs], max_file_bytes=max_file_bytes)
    for number, positions in enumerate(ranges, 1):
        file = f"{stem}-{number:05d}-of-{len(ranges):05d}.safetensors"  # a number even where it is one, as PaddleNLP has it
        here = {outs[position].name: outs[position] for position in positions}
        items = file_order((name, out.spec.dtype, out.spec.shape) for name, out in here.items())
        head, entries = encode_header(items, metadata={"format": "np"})
        path = f"{staging}/{file}"
        storage.write_at(path, 0, [memoryview(head)])
        for name, entry in entries.items():
            at = entry.start
            for tile in _tiles(source, here[name]):
                storage.write_at(path, at, [tile])
                at += len(tile)
        storage.sync(path)
        weight_map |= dict.fromkeys(here, file)
    return weight_map


def _tiles(source: Source, out: _Out) -> Iterator[memoryview]:
    """A tensor's bytes in Paddle's orientation, some rows at a time."""
    if out.stored is None:
        yield as_bytes(torch.tensor([out.power], dtype=torch.float32, device="cpu"))
        return
    catalog, spec = (
        source.catalog([out.stored]),
        source.specs(out.stored[0], [out.stored[1]])[out.stored[1]],
    )
    shape = out.spec.shape
    line = itemsize(spec.dtype) * prod(shape[1:])
    step = max(1, _TILE_NBYTES // max(1, line))
    for first in range(0, shape[0] if shape else 1, step):
        rows = (
            Box((first, *(0,) * (len(shape) - 1)), (min(step, shape[0] - first), *shape[1:]))
            if shape
            else whole(())
        )
        box = Box(rows.offsets[::-1], rows.shape[::-1]) if out.turned else rows
        held = bytearray(read_box(catalog.storage, catalog.locations[out.stored], spec, box))
        if not held:
            continue
        tensor = torch.frombuffer(held, dtype=TORCH_DTYPES[spec.dtype]).view(box.shape)
        yield as_bytes(dense(tensor.t()) if out.turned else tensor)


def _index(
    stem: str, outs: Sequence[_Out], weight_map: Mapping[str, str], *, masters: bool
) -> dict[str, Any]:
    index = {
        "metadata": {"total_size": sum(out.spec.nbytes for out in outs)},
        "weight_map": dict(weight_map),
    }
    if stem == OPTIMIZER:
        return {**index, "master_weights": masters}
    return {**index, "type": "lora"} if stem == PEFT else index


def _config(config: Mapping[str, Any], source: Source, *, adapter: bool) -> dict[str, Any]:
    """As PaddleNLP has it: weights of no rank alone, the dtype of what is stored; an adapter's says the base model's."""
    kept = {key: value for key, value in config.items() if key != "tensor_parallel_degree"}
    dtypes = {spec.dtype for spec in source.specs(MODEL, source.names(MODEL)).values()}
    if adapter or len(dtypes) > 1:
        return kept
    stored = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    return {
        **{key: value for key, value in kept.items() if key != "torch_dtype"},
        "dtype": stored[dtypes.pop()],
    }


def _put_json(storage: LocalStorage, staging: str, file: str, value: Mapping[str, Any]) -> None:
    storage.put(f"{staging}/{file}", json.dumps(value, indent=4).encode(), fsync=True)


def _prove(source: Source, written: str, stems: Mapping[str, str], model: Model) -> None:
    """Reads all of it back, as the checkpoint that it is now. IntegrityError for what differs."""
    named_alike = all(paddle_name(name, model) == name for name in source.names(MODEL))
    made = open_paddle(written, SourceOptions(names="own" if named_alike else "auto"))
    report = compare(source, made, parts=list(stems))
    made.close()
    if report.differences:
        wrong = [
            f"{one.part}:{one.name}: {one.elements or 'all'} elements" for one in report.differences
        ]
        raise IntegrityError(
            listed(f"{written}: what was written is not what the source has", wrong)
        )
