"""Writes any source as a Unified Checkpoint, of PaddleNLP or of PaddleFormers.

One process writes, in chunks; `safetensors.serialize_file` needs the tensors of a file in memory.
The folder is read back and compared with the source.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from unified_ckpt.core.planning.split_files import file_limit, split_files
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import raise_if_any
from unified_ckpt.engine.rewrite.tensors import OnProgress
from unified_ckpt.engine.source.diff import diff_sources
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError, IntegrityError
from unified_ckpt.foreign.files.json import CONFIG, read_config
from unified_ckpt.foreign.huggingface.detect import TRAINER_STATE
from unified_ckpt.foreign.paddle.detect import PEFT
from unified_ckpt.foreign.paddle.export.paddleformers import as_paddleformers, paddleformers_config
from unified_ckpt.foreign.paddle.export.plan import (
    PADDLEFORMERS,
    PADDLENLP,
    NameStyle,
    check_parts,
    plan_part,
)
from unified_ckpt.foreign.paddle.export.quantize import QuantStage
from unified_ckpt.foreign.paddle.export.tensors import Unit, file_units, readable_moments
from unified_ckpt.foreign.paddle.export.trainer_files import (
    PADDLENLP_KEYS,
    trainer_state,
    write_pickled_files,
)
from unified_ckpt.foreign.paddle.names import (
    PADDLEFORMERS_VERSION,
    ModelConfig,
    paddle_name,
    parse_config,
)
from unified_ckpt.foreign.paddle.source import read_paddle
from unified_ckpt.format import names
from unified_ckpt.format.header import encode_header, file_order
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.options import ConvertOptions, SourceOptions
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.storage.write_calls import BULK
from unified_ckpt.runtime.torch_state.tensors import torch_dtype
from unified_ckpt.views.derived import DerivedSource, Expr

_PARTS = (MODEL, MASTER, OPTIMIZER)


def write_paddle(
    source: Source, folder: str, options: ConvertOptions, _progress: OnProgress
) -> None:
    """Write PaddleNLP's model, master weights and optimizer to a new folder.

    `options.source.config` is the model's config.json, or a folder that has one. A `compression`
    quantizes moments like PaddleNLP's `ckpt_quant_stage`. FormatError for what PaddleNLP's format
    cannot hold. IntegrityError if the written tensors differ from the source.
    """
    config, compression = model_config(options), options.compression
    config.pop(PADDLEFORMERS_VERSION, None)  # what is written is PaddleNLP's
    quant_stage: QuantStage | None = compression if compression in ("O1", "O2") else None
    model, stems = parse_config(config), _file_stems(source)
    exprs = {part: plan_part(source, part, model, PADDLENLP) for part in stems}
    view = DerivedSource(source, exprs, aliases={})
    os.mkdir(folder)
    with LocalStorage(folder, write_policy=BULK) as storage:
        for part, stem in stems.items():
            stage = quant_stage if part == OPTIMIZER else None
            part_files = _PartFiles(stem, PADDLENLP, options.max_file_bytes, stage)
            _write_part(storage, view, part, part_files, masters=MASTER in stems)
        _write_json(storage, CONFIG, _config(config, source, adapter=stems[MODEL] == PEFT))
        state = trainer_state(source.metadata(), PADDLENLP_KEYS)
        if state:
            _write_json(storage, TRAINER_STATE, state)
    _verify(source, folder, exprs, model, quant_stage if OPTIMIZER in stems else None)


def write_paddleformers(
    source: Source, folder: str, options: ConvertOptions, _progress: OnProgress
) -> None:
    """Write the Unified Checkpoint of PaddleFormers 1.2 to a new folder.

    Its model is a Hugging Face model. Master weights and moments are in Paddle's orientation. A
    part has one file: PaddleFormers in one process reads no other, without an error. Otherwise as
    `write_paddle`.
    """
    config = model_config(options)
    if options.max_file_bytes is not None:
        raise FormatError(
            f"max_file_bytes: got {options.max_file_bytes}, expected none; one process of "
            "PaddleFormers reads only one file of a part. Export to 'paddle-flex' for more files"
        )
    model = replace(parse_config(config), vocab_first=True)
    source = as_paddleformers(source, model, parts=_PARTS, whole_masters=True)
    parts = [part for part in _PARTS if part in source.parts]
    exprs = {part: plan_part(source, part, model, PADDLEFORMERS) for part in parts}
    view = DerivedSource(source, exprs, aliases={})
    os.mkdir(folder)
    with LocalStorage(folder, write_policy=BULK) as storage:
        for part in parts:
            part_files = _PartFiles(part, PADDLEFORMERS, max_file_bytes=sys.maxsize)
            _write_part(storage, view, part, part_files, masters=MASTER in parts)
        _write_json(storage, CONFIG, paddleformers_config(config, source))
    write_pickled_files(folder, source.metadata())
    _verify(source, folder, exprs, model, None)


def model_config(options: ConvertOptions) -> dict[str, Any]:
    """Return the model's config.json. FormatError if there is none."""
    if options.source.config is None:
        raise FormatError(
            "Paddle's names and orientation depend on the model's config.json; set "
            "SourceOptions(config=...)"
        )
    return dict(read_config(options.source.config))


def _file_stems(source: Source) -> dict[str, str]:
    """Return the file stem of each part. FormatError for a part that PaddleNLP does not have."""
    check_parts(source, _PARTS)
    adapters = [name for name in source.names(MODEL) if ".lora_" in name]
    if adapters and len(adapters) < len(source.names(MODEL)):
        raise FormatError("got a model with both LoRA and other weights, expected one of the two")
    return {
        part: PEFT if part == MODEL and adapters else part
        for part in _PARTS
        if part in source.parts
    }


@dataclass(frozen=True, slots=True)
class _PartFiles:
    """How the files of a part are written. `stage`: by which moments are quantized."""

    stem: str
    style: NameStyle
    max_file_bytes: int | None
    stage: QuantStage | None = None


def _write_part(
    storage: LocalStorage, view: Source, part: str, files: _PartFiles, *, masters: bool
) -> None:
    """Write the files of a part, and their index. `masters`: whether there are master weights."""
    units = file_units(view, part, files.style.dtypes, files.stage)
    nbytes = sum(spec.nbytes for spec in view.specs(part, view.names(part)).values())
    limit = file_limit(nbytes, files.max_file_bytes)
    header_format = "pt" if part in files.style.torch_parts else "np"
    weight_map = _write_files(storage, files.stem, units, limit=limit, header_format=header_format)
    index = _index(files.stem, nbytes, weight_map, masters=masters, stage=files.stage)
    _write_json(storage, names.index_name(files.stem), index)


def _write_files(
    storage: LocalStorage, stem: str, units: Sequence[Unit], *, limit: int, header_format: str
) -> dict[str, str]:
    """Write the numbered files of a part; return their weight map.

    `limit`: bytes of a file's tensors. `header_format`: "pt" for torch's orientation.
    """
    weight_map: dict[str, str] = {}
    sizes = [sum(tensor.spec.nbytes for tensor in tensors) for _, tensors in units]
    ranges = split_files(sizes, max_file_bytes=limit)
    for number, positions in enumerate(ranges, 1):
        # numbered even if there is one file, as in PaddleNLP
        file = f"{stem}-{number:05d}-of-{len(ranges):05d}.safetensors"
        file_units = [units[position] for position in positions]
        file_outputs = {tensor.name: tensor for _, tensors in file_units for tensor in tensors}
        items = file_order(
            (name, output.spec.dtype, output.spec.shape) for name, output in file_outputs.items()
        )
        header_bytes, entries = encode_header(items, metadata={"format": header_format})
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
    nbytes: int,
    weight_map: Mapping[str, str],
    *,
    masters: bool,
    stage: QuantStage | None,
) -> dict[str, Any]:
    """The index; like PaddleNLP's, it has names and sizes from before moments are quantized."""
    index = {
        "metadata": {"total_size": nbytes},
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


def _write_json(storage: LocalStorage, file: str, value: Mapping[str, Any]) -> None:
    storage.put(file, json.dumps(value, indent=4).encode())


def _verify(
    source: Source,
    written: str,
    exprs: Mapping[str, Mapping[str, Expr]],
    model: ModelConfig,
    stage: QuantStage | None,
) -> None:
    """Read everything back and compare it with the source.

    `exprs`: what was written. Moments that are quantized for `stage` must be what PaddleNLP reads.
    """
    same_names = all(paddle_name(name, model) == name for name in source.names(MODEL))
    options = SourceOptions(names="own" if same_names else "auto")
    with closing(read_paddle(written, options, compare_masters=False)) as written_source:
        quantized = set[Key]()
        if stage is not None:
            view, written_view = (
                DerivedSource(opened, exprs, aliases={}) for opened in (source, written_source)
            )
            readable = readable_moments(view, written_view, stage)
            quantized = {key for name in readable for key in exprs[OPTIMIZER][name].stored}
        check_written(source, written_source, exprs, written, exempt=quantized)


def check_written(
    source: Source,
    written: Source,
    parts: Collection[str],
    path: str,
    *,
    exempt: Collection[Key] = (),
) -> None:
    """Raise IntegrityError if tensors of these parts differ, apart from exempt ones."""
    present = [part for part in parts if part in source.parts]
    differences = diff_sources(source, written, parts=present).differences
    problems = [
        f"{difference.part}:{difference.name}: {difference.elements or 'all'} elements"
        for difference in differences
        if (difference.part, difference.name) not in exempt
    ]
    raise_if_any(IntegrityError, f"{path}: the written tensors differ from the source", problems)
