"""Writes any source as a PaddleNLP Unified Checkpoint: names, orientation, optimizer states,
indexes.

One process writes, in chunks; `safetensors.serialize_file` needs the tensors of a file in memory.

How state could be lost: a tensor has no place in PaddleNLP's format, or is
wrongly transposed. So everything is planned before the first byte is written, and the folder is
read back and compared with the source.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from unified_ckpt.core.planning.file_layout import split_files
from unified_ckpt.core.sharding.boxes import Box, chunk_boxes, full_box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import format_list, natural_key, raise_if_any
from unified_ckpt.engine.source.diff import diff_sources
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import CheckpointError, FormatError, IntegrityError
from unified_ckpt.exports.paddle_quantize import QuantizedTensor, QuantStage
from unified_ckpt.exports.paddle_tensors import OutputTensor, Unit, file_units, readable_moments
from unified_ckpt.format import names
from unified_ckpt.format.header import encode_header, file_order
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.options import ConvertOptions, SourceOptions
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.storage.write_calls import BULK
from unified_ckpt.runtime.torch_state.tensors import as_bytes, as_contiguous
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
from unified_ckpt.views.materialize import read_tensor

_CHUNK_NBYTES = 32 << 20
_DTYPES = {"BF16": BFLOAT16_AS_UINT16, "F16": "F16", "F32": "F32"}
_PADDLE_STATES = {torch_state: paddle_state for paddle_state, torch_state in STATE_NAMES.items()}


def write_paddle(source: Source, folder: str, options: ConvertOptions) -> None:
    """Write model, master weights and optimizer to a new folder, which the caller syncs.

    `options.source.config` is the model's config.json, or a folder that has one. A `compression`
    quantizes moments like PaddleNLP's `ckpt_quant_stage`. FormatError for what PaddleNLP's format
    cannot hold. IntegrityError if the written tensors differ from the source.
    """
    config_path, compression = options.source.config, options.compression
    quant_stage: QuantStage | None = compression if compression in ("O1", "O2") else None
    config = read_optional_config(config_path) if config_path else None
    if config is None:
        raise FormatError(
            "PaddleNLP's names and orientation depend on the model's config.json; set "
            "SourceOptions(config=...)"
        )
    model = parse_config(config)
    stems = _file_stems(source)
    outputs_by_stem = {stem: _plan_part(source, part, model) for part, stem in stems.items()}
    os.mkdir(folder)
    with LocalStorage(folder, write_policy=BULK) as storage:
        for stem, outputs in outputs_by_stem.items():
            stage = quant_stage if stem == OPTIMIZER else None
            units = file_units(source, outputs, stage)
            weight_map = _write_files(
                source, storage, stem, units, max_file_bytes=options.max_file_bytes
            )
            index = _index(stem, outputs, weight_map, masters=MASTER in stems, stage=stage)
            _write_json(storage, names.index_name(stem), index)
        _write_json(storage, "config.json", _config(config, source, adapter=stems[MODEL] == PEFT))
        extra = source.metadata().extra
        if isinstance(extra, dict) and isinstance(extra.get("trainer_state"), dict):
            _write_json(storage, "trainer_state.json", extra["trainer_state"])
    quantized = outputs_by_stem.get(OPTIMIZER, []) if quant_stage else []
    _verify(source, folder, stems, model, quantized, quant_stage)


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


def _plan_part(source: Source, part: str, model: ModelConfig) -> list[OutputTensor]:
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
    outputs: list[OutputTensor] = []
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
    raise_if_any(FormatError, "PaddleNLP's format has no place for", problems)
    return sorted(outputs, key=lambda out: natural_key(out.name))


def _weight_tensor(
    name: str, suffix: str, stored: Key, spec: TensorSpec, model: ModelConfig
) -> OutputTensor:
    dtypes = _DTYPES if stored[0] == MODEL else ("F32",)
    new_name = paddle_name(name, model)
    transposed = is_transposed(new_name, spec.shape, layer_kind(new_name), tied=model.tied)
    shape = spec.shape[::-1] if transposed else spec.shape
    check_shape(new_name, shape, model)
    if spec.dtype not in dtypes:
        raise FormatError(f"got dtype {spec.dtype}, expected {', '.join(dtypes)}")
    return OutputTensor(
        new_name + suffix, TensorSpec(_DTYPES[spec.dtype], shape), stored, transposed
    )


def _state_tensors(
    source: Source, name: str, stored: str, spec: TensorSpec, betas: object, model: ModelConfig
) -> list[OutputTensor]:
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
    steps = int(read_tensor(source, (OPTIMIZER, stored), full_box(spec.shape)).flatten()[0])
    return [
        OutputTensor(
            f"{paddle_name(owner, model)}/{power}",
            TensorSpec("F32", (1,)),
            power=beta_power(beta, steps),
        )
        for power, beta in zip(POWER_STATES, betas, strict=True)
    ]


# ---- writing


def _write_files(
    source: Source,
    storage: LocalStorage,
    stem: str,
    units: Sequence[Unit],
    max_file_bytes: int,
) -> dict[str, str]:
    """Write the numbered files of a part; return their weight map."""
    weight_map: dict[str, str] = {}
    sizes = [sum(tensor.spec.nbytes for tensor in tensors) for _, tensors in units]
    ranges = split_files(sizes, max_file_bytes=max_file_bytes)
    for number, positions in enumerate(ranges, 1):
        # numbered even if there is one file, as in PaddleNLP
        file = f"{stem}-{number:05d}-of-{len(ranges):05d}.safetensors"
        file_units = [units[position] for position in positions]
        file_outputs = {tensor.name: tensor for _, tensors in file_units for tensor in tensors}
        items = file_order(
            (name, output.spec.dtype, output.spec.shape) for name, output in file_outputs.items()
        )
        header_bytes, entries = encode_header(items, metadata={"format": "np"})
        storage.write_at(file, 0, [memoryview(header_bytes)])
        for name, entry in entries.items():
            offset = entry.start
            for chunk in _chunks(source, file_outputs[name]):
                storage.write_at(file, offset, [chunk])
                offset += len(chunk)
        storage.close()
        weight_map |= dict.fromkeys((name for names, _ in file_units for name in names), file)
    return weight_map


def _chunks(source: Source, output: OutputTensor | QuantizedTensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in Paddle's orientation, in chunks."""
    if isinstance(output, QuantizedTensor):
        yield from output.chunks()
        return
    if output.stored is None:
        yield as_bytes(torch.tensor([output.power], dtype=torch.float32, device="cpu"))
        return
    for chunk in chunk_boxes(output.spec.shape, _CHUNK_NBYTES // itemsize(output.spec.dtype)):
        box = Box(chunk.offsets[::-1], chunk.shape[::-1]) if output.transposed else chunk
        tensor = read_tensor(source, output.stored, box)
        yield as_bytes(as_contiguous(tensor.t()) if output.transposed else tensor)


def _index(
    stem: str,
    outputs: Sequence[OutputTensor],
    weight_map: Mapping[str, str],
    *,
    masters: bool,
    stage: QuantStage | None,
) -> dict[str, Any]:
    """The index; like PaddleNLP's, it has names and sizes from before moments are quantized."""
    index = {
        "metadata": {"total_size": sum(output.spec.nbytes for output in outputs)},
        "weight_map": dict(weight_map),
    }
    if stem == OPTIMIZER:
        quantized = {"ckpt_quant_stage": stage, "quant_ckpt_resume_times": 0} if stage else {}
        return {**index, **quantized, "master_weights": masters}
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


def _write_json(storage: LocalStorage, file: str, value: Mapping[str, Any]) -> None:
    storage.put(file, json.dumps(value, indent=4).encode(), fsync=False)


def _verify(
    source: Source,
    written: str,
    stems: Mapping[str, str],
    model: ModelConfig,
    states: Sequence[OutputTensor],
    stage: QuantStage | None,
) -> None:
    """Read everything back and compare it with the source. IntegrityError for differences.

    `states`: optimizer state in which moments may be quantized. These must be what PaddleNLP reads.
    """
    same_names = all(paddle_name(name, model) == name for name in source.names(MODEL))
    written_source = open_paddle(written, SourceOptions(names="own" if same_names else "auto"))
    report = diff_sources(source, written_source, parts=list(stems))
    quantized = readable_moments(source, written_source, states, stage) if stage else set()
    written_source.close()
    differences = [d for d in report.differences if (d.part, d.name) not in quantized]
    if differences:
        problems = [
            f"{difference.part}:{difference.name}: {difference.elements or 'all'} elements"
            for difference in differences
        ]
        raise IntegrityError(
            format_list(f"{written}: the written tensors differ from the source", problems)
        )
