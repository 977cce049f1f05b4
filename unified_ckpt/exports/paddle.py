"""Writes any source as a PaddleNLP Unified Checkpoint: names, orientation, optimizer states,
indexes.

One process writes. How state could be lost: a tensor has no place in PaddleNLP's format, or is
wrongly transposed. So everything is planned before the first byte is written, and the folder is
read back and compared with the source before it gets its name.
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
from unified_ckpt.core.sharding.boxes import Box, full_box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import format_list
from unified_ckpt.engine.source.diff import diff_sources
from unified_ckpt.engine.source.protocol import Source, read_box
from unified_ckpt.errors import CheckpointError, FormatError, IntegrityError, StorageError
from unified_ckpt.format import names
from unified_ckpt.format.header import encode_header, file_order
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.storage.write_calls import BULK
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES, as_bytes, as_contiguous
from unified_ckpt.sources.detect.paddle import PEFT
from unified_ckpt.sources.paddle.beta_powers import beta_power
from unified_ckpt.sources.paddle.files import BFLOAT16_AS_UINT16
from unified_ckpt.sources.paddle.names import (
    ModelConfig,
    check_shape,
    is_transposed,
    layer_kind,
    paddle_name,
    parse_config,
)
from unified_ckpt.sources.paddle.source import open_paddle, read_optional_config
from unified_ckpt.sources.paddle.tensors import BETAS, POWER_STATES, STATE_NAMES

_CHUNK_NBYTES = 32 << 20
_DTYPES = {"BF16": BFLOAT16_AS_UINT16, "F16": "F16", "F32": "F32"}
_PADDLE_STATES = {torch_state: paddle_state for paddle_state, torch_state in STATE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class _OutputTensor:
    """A tensor to write: a stored one, possibly transposed, or the number `power`."""

    name: str
    spec: TensorSpec  # in PaddleNLP's orientation
    stored: Key | None = None
    transposed: bool = False
    power: float = 0.0


def write_paddle(
    source: Source, folder: str, options: SourceOptions, *, max_file_bytes: int
) -> None:
    """Write model, master weights and optimizer to a new folder.

    `options.config` is the model's config.json, or a folder that has one. FormatError for what
    PaddleNLP's format cannot hold, StorageError if `folder` exists: nothing is written then.
    IntegrityError if what was written differs from the source.
    """
    config = read_optional_config(options.config) if options.config else None
    if config is None:
        raise FormatError(
            "PaddleNLP's names and orientation depend on the model's config.json; set "
            "SourceOptions(config=...)"
        )
    if os.path.lexists(folder):
        raise StorageError(f"{folder}: exists; choose another name")
    model = parse_config(config)
    stems = _file_stems(source)
    outputs_by_stem = {stem: _plan_part(source, part, model) for part, stem in stems.items()}
    parent, name = os.path.split(os.path.abspath(folder))
    os.makedirs(parent, exist_ok=True)
    staging = names.staging_name(name, uuid4().hex)
    with LocalStorage(parent, write_policy=BULK) as storage:
        storage.make_folder(staging)
        try:
            for stem, outputs in outputs_by_stem.items():
                weight_map = _write_files(
                    source, storage, staging, stem, outputs, max_file_bytes=max_file_bytes
                )
                _write_json(
                    storage,
                    staging,
                    names.index_name(stem),
                    _index(stem, outputs, weight_map, masters=MASTER in stems),
                )
            _write_json(
                storage,
                staging,
                "config.json",
                _config(config, source, adapter=stems[MODEL] == PEFT),
            )
            extra = source.metadata().extra
            if isinstance(extra, dict) and isinstance(extra.get("trainer_state"), dict):
                _write_json(storage, staging, "trainer_state.json", extra["trainer_state"])
            _verify(source, storage.path(staging), stems, model)
            storage.sync_folder(staging)
            storage.rename(staging, name)
            storage.sync_folder("")
        except BaseException:
            shutil.rmtree(storage.path(staging), ignore_errors=True)
            raise


def _file_stems(source: Source) -> dict[str, str]:
    """Return the file stem of each part. FormatError for a part that PaddleNLP does not have."""
    unsupported = sorted(set(source.parts) - {MODEL, MASTER, OPTIMIZER})
    if unsupported or MODEL not in source.parts:
        raise FormatError(
            format_list(
                "expected parts model, master_weights and optimizer, with model required; got",
                list(source.parts),
            )
        )
    adapters = [name for name in source.names(MODEL) if ".lora_" in name]
    if adapters and len(adapters) < len(source.names(MODEL)):
        raise FormatError("got a model with both LoRA and other weights, expected one of the two")
    return {
        part: PEFT if part == MODEL and adapters else part
        for part in (MODEL, MASTER, OPTIMIZER)
        if part in source.parts
    }


# ---- planning


def _plan_part(source: Source, part: str, model: ModelConfig) -> list[_OutputTensor]:
    """Return the tensors of a part in natural order, tied ones under all their names.

    FormatError listing tensors that have no place.
    """
    stored = {**{name: name for name in source.names(part)}, **source.aliases(part)}
    specs = source.specs(part, set(stored.values()))
    metadata = source.metadata()
    default_betas = metadata.extra.get(BETAS) if isinstance(metadata.extra, dict) else None
    betas = {
        name: group["options"].get("betas", default_betas)
        for group in metadata.groups
        for name in group["names"]
    }
    outputs: list[_OutputTensor] = []
    problems = (
        [
            f"{name}: has non-tensor state {', '.join(states)}"
            for name, states in metadata.scalars.items()
        ]
        if part == OPTIMIZER
        else []
    )
    for name, stored_name in stored.items():
        try:
            if part == OPTIMIZER:
                outputs += _state_tensors(
                    source,
                    name,
                    stored_name,
                    specs[stored_name],
                    betas.get(stored_name.rpartition("/")[0]),
                    model,
                )
            else:
                outputs.append(
                    _weight_tensor(name, "", (part, stored_name), specs[stored_name], model)
                )
        except CheckpointError as error:
            problems.append(f"{part}:{name}: {error}")
    if problems:
        raise FormatError(format_list("PaddleNLP's format has no place for", problems))
    return sorted(outputs, key=lambda out: _natural_key(out.name))


def _weight_tensor(
    name: str, suffix: str, stored: Key, spec: TensorSpec, model: ModelConfig
) -> _OutputTensor:
    dtypes = _DTYPES if stored[0] == MODEL else ("F32",)
    new_name = paddle_name(name, model)
    transposed = is_transposed(new_name, spec.shape, layer_kind(new_name), tied=model.tied)
    shape = spec.shape[::-1] if transposed else spec.shape
    check_shape(new_name, shape, model)
    if spec.dtype not in dtypes:
        raise FormatError(f"got dtype {spec.dtype}, expected {', '.join(dtypes)}")
    return _OutputTensor(
        new_name + suffix, TensorSpec(_DTYPES[spec.dtype], shape), stored, transposed
    )


def _state_tensors(
    source: Source, name: str, stored: str, spec: TensorSpec, betas: object, model: ModelConfig
) -> list[_OutputTensor]:
    """One state of a parameter; the step count becomes powers of the betas."""
    owner, _, state = name.rpartition("/")
    if state in _PADDLE_STATES:
        return [
            _weight_tensor(owner, f"/{_PADDLE_STATES[state]}", (OPTIMIZER, stored), spec, model)
        ]
    if state != "step":
        raise FormatError(
            f"is optimizer state that Paddle does not have; expected {', '.join(_PADDLE_STATES)}, "
            "step"
        )
    if (
        not isinstance(betas, tuple | list)
        or len(betas) != len(POWER_STATES)
        or not all(isinstance(beta, float | None) for beta in betas)
    ):
        raise FormatError(
            "Paddle stores powers of the betas instead of the step; expected betas in the param "
            "group"
        )
    step_tensor = torch.frombuffer(
        bytearray(source.read(OPTIMIZER, stored, full_box(spec.shape))),
        dtype=TORCH_DTYPES[spec.dtype],
    )
    steps = int(step_tensor[0])
    return [
        _OutputTensor(
            f"{paddle_name(owner, model)}/{power}",
            TensorSpec("F32", (1,)),
            power=beta_power(beta, steps),
        )
        for power, beta in zip(POWER_STATES, betas, strict=True)
    ]


def _natural_key(name: str) -> list[tuple[int, str]]:
    return [
        (int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)
    ]


# ---- writing


def _write_files(
    source: Source,
    storage: LocalStorage,
    staging: str,
    stem: str,
    outputs: Sequence[_OutputTensor],
    *,
    max_file_bytes: int,
) -> dict[str, str]:
    """Write the numbered files of a part; return their weight map."""
    weight_map: dict[str, str] = {}
    ranges = split_files([output.spec.nbytes for output in outputs], max_file_bytes=max_file_bytes)
    for number, positions in enumerate(ranges, 1):
        # numbered even if there is one file, as in PaddleNLP
        file = f"{stem}-{number:05d}-of-{len(ranges):05d}.safetensors"
        file_outputs = {outputs[position].name: outputs[position] for position in positions}
        items = file_order(
            (name, output.spec.dtype, output.spec.shape) for name, output in file_outputs.items()
        )
        header_bytes, entries = encode_header(items, metadata={"format": "np"})
        path = f"{staging}/{file}"
        storage.write_at(path, 0, [memoryview(header_bytes)])
        for name, entry in entries.items():
            offset = entry.start
            for chunk in _row_chunks(source, file_outputs[name]):
                storage.write_at(path, offset, [chunk])
                offset += len(chunk)
        storage.sync(path)
        weight_map |= dict.fromkeys(file_outputs, file)
    return weight_map


def _row_chunks(source: Source, output: _OutputTensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in Paddle's orientation, some rows at a time."""
    if output.stored is None:
        yield as_bytes(torch.tensor([output.power], dtype=torch.float32, device="cpu"))
        return
    catalog = source.catalog([output.stored])
    spec = source.specs(output.stored[0], [output.stored[1]])[output.stored[1]]
    shape = output.spec.shape
    row_nbytes = itemsize(spec.dtype) * prod(shape[1:])
    rows_per_chunk = max(1, _CHUNK_NBYTES // max(1, row_nbytes))
    for first_row in range(0, shape[0] if shape else 1, rows_per_chunk):
        rows = (
            Box(
                (first_row, *(0,) * (len(shape) - 1)),
                (min(rows_per_chunk, shape[0] - first_row), *shape[1:]),
            )
            if shape
            else full_box(())
        )
        box = Box(rows.offsets[::-1], rows.shape[::-1]) if output.transposed else rows
        data = bytearray(read_box(catalog.storage, catalog.locations[output.stored], spec, box))
        if not data:
            continue
        tensor = torch.frombuffer(data, dtype=TORCH_DTYPES[spec.dtype]).view(box.shape)
        yield as_bytes(as_contiguous(tensor.t()) if output.transposed else tensor)


def _index(
    stem: str, outputs: Sequence[_OutputTensor], weight_map: Mapping[str, str], *, masters: bool
) -> dict[str, Any]:
    index = {
        "metadata": {"total_size": sum(output.spec.nbytes for output in outputs)},
        "weight_map": dict(weight_map),
    }
    if stem == OPTIMIZER:
        return {**index, "master_weights": masters}
    return {**index, "type": "lora"} if stem == PEFT else index


def _config(config: Mapping[str, Any], source: Source, *, adapter: bool) -> dict[str, Any]:
    """The config for PaddleNLP: full weights, and the stored dtype.

    An adapter's config describes the base model.
    """
    fields = {key: value for key, value in config.items() if key != "tensor_parallel_degree"}
    dtypes = {spec.dtype for spec in source.specs(MODEL, source.names(MODEL)).values()}
    if adapter or len(dtypes) > 1:
        return fields
    dtype_names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    return {
        **{key: value for key, value in fields.items() if key != "torch_dtype"},
        "dtype": dtype_names[dtypes.pop()],
    }


def _write_json(storage: LocalStorage, staging: str, file: str, value: Mapping[str, Any]) -> None:
    storage.put(f"{staging}/{file}", json.dumps(value, indent=4).encode(), fsync=True)


def _verify(source: Source, written: str, stems: Mapping[str, str], model: ModelConfig) -> None:
    """Read everything back and compare it with the source. IntegrityError for differences."""
    same_names = all(paddle_name(name, model) == name for name in source.names(MODEL))
    written_source = open_paddle(written, SourceOptions(names="own" if same_names else "auto"))
    report = diff_sources(source, written_source, parts=list(stems))
    written_source.close()
    if report.differences:
        problems = [
            f"{difference.part}:{difference.name}: {difference.elements or 'all'} elements"
            for difference in report.differences
        ]
        raise IntegrityError(
            format_list(f"{written}: what was written differs from the source", problems)
        )
