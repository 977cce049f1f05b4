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
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from unified_ckpt.core.planning.split_files import file_limit, split_files
from unified_ckpt.core.recipes import External
from unified_ckpt.core.sharding.boxes import Box, full_box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import format_list, natural_key, raise_if_any
from unified_ckpt.engine.rewrite.tensors import OnProgress
from unified_ckpt.engine.source.diff import diff_sources
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.errors import CheckpointError, FormatError, IntegrityError
from unified_ckpt.foreign.files.json import CONFIG, read_config
from unified_ckpt.foreign.huggingface.detect import TRAINER_STATE
from unified_ckpt.foreign.paddle.beta_powers import beta_power
from unified_ckpt.foreign.paddle.detect import PEFT
from unified_ckpt.foreign.paddle.export.quantize import QuantStage
from unified_ckpt.foreign.paddle.export.tensors import DTYPES, Unit, file_units, readable_moments
from unified_ckpt.foreign.paddle.names import (
    PADDLEFORMERS_VERSION,
    ModelConfig,
    check_shape,
    is_transposed,
    layer_kind,
    paddle_name,
    parse_config,
)
from unified_ckpt.foreign.paddle.source import open_paddle
from unified_ckpt.foreign.paddle.tensors import BETAS, POWER_STATES, STATE_NAMES
from unified_ckpt.format import names
from unified_ckpt.format.header import encode_header, file_order
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.options import ConvertOptions, SourceOptions
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.storage.write_calls import BULK
from unified_ckpt.runtime.torch_state.tensors import torch_dtype
from unified_ckpt.views.derived import DerivedSource, Expr, ExternalTensor, Renamed
from unified_ckpt.views.materialize import read_tensor

_PADDLE_STATES = {torch_state: paddle_state for paddle_state, torch_state in STATE_NAMES.items()}

# The fields of `TrainerState` of PaddleNLP 2.6 to 3.0.
_TRAINER_KEYS = frozenset(
    {
        "best_metric",
        "best_model_checkpoint",
        "consumed_samples",
        "epoch",
        "global_step",
        "is_local_process_zero",
        "is_world_process_zero",
        "last_saved_step",
        "log_history",
        "max_steps",
        "num_train_epochs",
        "total_flos",
        "trial_name",
        "trial_params",
    }
)


def write_paddle(
    source: Source, folder: str, options: ConvertOptions, _progress: OnProgress
) -> None:
    """Write model, master weights and optimizer to a new folder, which the caller syncs.

    `options.source.config` is the model's config.json, or a folder that has one. A `compression`
    quantizes moments like PaddleNLP's `ckpt_quant_stage`. FormatError for what PaddleNLP's format
    cannot hold. IntegrityError if the written tensors differ from the source.
    """
    if options.source.config is None:
        raise FormatError(
            "PaddleNLP's names and orientation depend on the model's config.json; set "
            "SourceOptions(config=...)"
        )
    config, compression = dict(read_config(options.source.config)), options.compression
    config.pop(PADDLEFORMERS_VERSION, None)  # what is written is PaddleNLP's
    quant_stage: QuantStage | None = compression if compression in ("O1", "O2") else None
    model = parse_config(config)
    stems = _file_stems(source)
    exprs = {part: _plan_part(source, part, model) for part in stems}
    view = DerivedSource(source, exprs, aliases={})
    os.mkdir(folder)
    with LocalStorage(folder, write_policy=BULK) as storage:
        for part, stem in stems.items():
            stage = quant_stage if part == OPTIMIZER else None
            units = file_units(view, part, stage)
            weight_map = _write_files(storage, stem, units, max_file_bytes=options.max_file_bytes)
            specs = view.specs(part, view.names(part)).values()
            index = _index(stem, specs, weight_map, masters=MASTER in stems, stage=stage)
            _write_json(storage, names.index_name(stem), index)
        _write_json(storage, CONFIG, _config(config, source, adapter=stems[MODEL] == PEFT))
        metadata = source.metadata()
        trainer_state = {
            key: value
            for key, value in _saved_trainer_state(metadata).items()
            if key in _TRAINER_KEYS
        }
        if metadata.step is not None:  # where Paddle's Trainer resumes
            trainer_state["global_step"] = metadata.step
        if trainer_state:
            _write_json(storage, TRAINER_STATE, trainer_state)
    _verify(source, folder, exprs, model, quant_stage if OPTIMIZER in stems else None)


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


def _plan_part(source: Source, part: str, model: ModelConfig) -> dict[str, Expr]:
    """Return the tensors of a part by Paddle's names in natural order, tied ones under all names.

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
    exprs: dict[str, Expr] = {}
    problems = (
        [
            f"{name}: has non-tensor state {', '.join(states)}"
            for name, states in metadata.scalars.items()
        ]
        if part == OPTIMIZER
        else []
    )
    for name, stored_name in stored.items():
        key, spec = (part, stored_name), specs[stored_name]
        owner, _, state = name.rpartition("/") if part == OPTIMIZER else (name, "", "")
        try:
            if state == "step":
                powers = _powers(source, key, spec, betas.get(stored_name.rpartition("/")[0]))
                exprs |= {f"{paddle_name(owner, model)}/{power}": powers[power] for power in powers}
            elif part == OPTIMIZER and state not in _PADDLE_STATES:
                raise FormatError(
                    "is optimizer state that Paddle does not have; expected "
                    f"{', '.join(_PADDLE_STATES)}, step"
                )
            else:
                suffix = f"/{_PADDLE_STATES[state]}" if state else ""
                new_name = paddle_name(owner, model)
                exprs[new_name + suffix] = _weight(new_name, key, spec, model)
        except CheckpointError as error:
            problems.append(f"{part}:{name}: {error}")
    raise_if_any(FormatError, "PaddleNLP's format has no place for", problems)
    return {name: exprs[name] for name in sorted(exprs, key=natural_key)}


def _weight(name: str, key: Key, spec: TensorSpec, model: ModelConfig) -> Expr:
    """Return a weight, or state of its shape, in Paddle's orientation. `name` is Paddle's."""
    dtypes = DTYPES if key[0] == MODEL else ("F32",)
    transposed = is_transposed(name, spec.shape, layer_kind(name), vocab_first=model.vocab_first)
    check_shape(name, spec.shape[::-1] if transposed else spec.shape, model)
    if spec.dtype not in dtypes:
        raise FormatError(f"got dtype {spec.dtype}, expected {', '.join(dtypes)}")
    return Renamed(key, transposed=transposed)


def _powers(source: Source, key: Key, spec: TensorSpec, betas: object) -> dict[str, Expr]:
    """Return what Paddle stores instead of a step count: powers of the betas."""
    if (
        not isinstance(betas, tuple | list)
        or len(betas) != len(POWER_STATES)
        or not all(isinstance(beta, float | None) for beta in betas)
    ):
        raise FormatError(
            "Paddle stores powers of the betas instead of the step; expected betas in the param "
            "group"
        )
    steps = int(read_tensor(source, key, full_box(spec.shape)).flatten()[0])
    return {
        power: ExternalTensor(External("F32", (1,), partial(_number, beta_power(beta, steps))))
        for power, beta in zip(POWER_STATES, betas, strict=True)
    }


def _number(value: float, _: Box) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float32, device="cpu")


# ---- writing


def _write_files(
    storage: LocalStorage, stem: str, units: Sequence[Unit], *, max_file_bytes: int | None
) -> dict[str, str]:
    """Write the numbered files of a part; return their weight map."""
    weight_map: dict[str, str] = {}
    sizes = [sum(tensor.spec.nbytes for tensor in tensors) for _, tensors in units]
    ranges = split_files(sizes, max_file_bytes=file_limit(sum(sizes), max_file_bytes))
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
            for chunk in file_outputs[name].chunks():
                storage.write_at(file, offset, [chunk])
                offset += len(chunk)
        storage.close()
        weight_map |= dict.fromkeys((name for names, _ in file_units for name in names), file)
    return weight_map


def _index(
    stem: str,
    specs: Collection[TensorSpec],
    weight_map: Mapping[str, str],
    *,
    masters: bool,
    stage: QuantStage | None,
) -> dict[str, Any]:
    """The index; like PaddleNLP's, it has names and sizes from before moments are quantized."""
    index = {
        "metadata": {"total_size": sum(spec.nbytes for spec in specs)},
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
    return {
        **{key: value for key, value in fields.items() if key != "torch_dtype"},
        "dtype": str(torch_dtype(dtypes.pop())).removeprefix("torch."),
    }


def unread_trainer_keys(metadata: SourceMetadata) -> list[str]:
    """Return the keys of a Trainer's state that Paddle's Trainer refuses."""
    return [key for key in _saved_trainer_state(metadata) if key not in _TRAINER_KEYS]


def _saved_trainer_state(metadata: SourceMetadata) -> dict[str, Any]:
    extra = metadata.extra if isinstance(metadata.extra, dict) else {}
    state = extra.get("trainer_state")
    return state if isinstance(state, dict) else {}


def _write_json(storage: LocalStorage, file: str, value: Mapping[str, Any]) -> None:
    storage.put(file, json.dumps(value, indent=4).encode())


def _verify(
    source: Source,
    written: str,
    exprs: Mapping[str, Mapping[str, Expr]],
    model: ModelConfig,
    stage: QuantStage | None,
) -> None:
    """Read everything back and compare it with the source. IntegrityError for differences.

    `exprs`: what was written. Moments that are quantized for `stage` must be what PaddleNLP reads.
    """
    same_names = all(paddle_name(name, model) == name for name in source.names(MODEL))
    written_source = open_paddle(written, SourceOptions(names="own" if same_names else "auto"))
    report = diff_sources(source, written_source, parts=exprs)
    quantized = set[Key]()
    if stage is not None:
        view, written_view = (
            DerivedSource(opened, exprs, aliases={}) for opened in (source, written_source)
        )
        readable = readable_moments(view, written_view, stage)
        quantized = {key for name in readable for key in exprs[OPTIMIZER][name].stored}
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
