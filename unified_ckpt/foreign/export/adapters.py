"""Writes adapters for PEFT, and merges a LoRA adapter into its base model.

How wrong weights could result: an adapter has tensors that are left out, has kinds of updates that
are not B @ A, or is that of another model. All of these are refused by name before anything is
written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

import torch

from unified_ckpt.core.recipes import External
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.text import format_list, raise_if_any
from unified_ckpt.engine.cluster.discover import OpenRequest
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError, NotFoundError, result_or_error
from unified_ckpt.foreign.files.json import read_json_object
from unified_ckpt.foreign.huggingface.adapters import ADAPTER_PART, adapter_folders, changes_base
from unified_ckpt.foreign.huggingface.detect import ADAPTER_CONFIG
from unified_ckpt.foreign.open_on_ranks import open_on_all_ranks
from unified_ckpt.format.names import MODEL
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.paths import absolute_path
from unified_ckpt.runtime.storage.regular_files import is_file
from unified_ckpt.runtime.torch_state.flatten import CASTABLE_DTYPES
from unified_ckpt.runtime.torch_state.tensors import torch_dtype
from unified_ckpt.views.derived import DerivedSource, Expr, ExternalTensor, Renamed
from unified_ckpt.views.materialize import read_tensor
from unified_ckpt.views.model import with_model

_PADDLE_CONFIG = "lora_config.json"
_PREFIX = "base_model.model."
_LORA = re.compile(re.escape(_PREFIX) + r"(?P<module>.+)\.lora_(?P<kind>[AB])\.weight")
_ADAPTER_NAME = re.compile(r"\.lora_\w+\.(?!(?:weight|bias)$)")  # in names in memory
# Options of an adapter whose update is not scaling * B @ A, unless they have these values.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "alora_invocation_tokens": (None,),  # the update depends on the input
    "arrow_config": (None,),
    "monteclora_config": (None,),
    "kasa_config": (None,),
    "use_qalora": (None, False),
    "use_bdlora": (None,),
    "layer_replication": (None, []),  # the numbers of layers are not those of the base
}
_PADDLE_PLAIN = ("loraga", "lora_use_mixer", "pissa", "use_mora", "trainable_bias")


def part_as(source: Source, part: str, new_part: str) -> Source:
    """Return a source with one part, under another name."""
    exprs = {new_part: {name: Renamed((part, name)) for name in source.names(part)}}
    return DerivedSource(source, exprs, aliases={new_part: source.aliases(part)})


def adapter_part_of(source: Source, parts: tuple[str, ...] | None) -> str:
    """Return the part that holds the adapter to use. FormatError if there is none, or several."""
    found = [
        part
        for part in source.parts
        if part.startswith(ADAPTER_PART) and (parts is None or part in parts)
    ]
    if not found and any(map(_LORA.fullmatch, source.names(MODEL))):
        return MODEL  # PaddleNLP's
    if len(found) == 1:
        return found[0]
    if not found:
        raise FormatError(f"got parts {', '.join(source.parts)}, expected an adapter among them")
    raise FormatError(format_list("got several adapters, expected one; choose a part", found))


def read_adapter_config(path: str, source: Source, part: str) -> dict[str, Any]:
    """Return the PEFT configuration of an adapter. NotFoundError if the folder has none."""
    folder = adapter_folders(path).get(ADAPTER_PART if part == MODEL else part)
    if folder is not None:
        return read_json_object(os.path.join(folder, ADAPTER_CONFIG))
    paddle_path = os.path.join(path, _PADDLE_CONFIG)
    if is_file(paddle_path):
        return _from_paddle(read_json_object(paddle_path), source, label=paddle_path)
    extra = source.metadata().extra
    configs = extra.get("adapters") if isinstance(extra, dict) else None
    if isinstance(configs, dict) and part in configs:  # it was converted from PEFT's folder
        return dict(configs[part])
    raise NotFoundError(f"{path}: got neither {ADAPTER_CONFIG} nor {_PADDLE_CONFIG} beside {part}")


def _from_paddle(config: Mapping[str, Any], source: Source, *, label: str) -> dict[str, Any]:
    """Return PEFT's form of PaddleNLP's configuration; modules by their full names."""
    raise_if_any(
        FormatError,
        f"{label}: PEFT has no option for",
        [f"{name}={config[name]!r}" for name in _PADDLE_PLAIN if config.get(name)],
    )
    matches = map(_LORA.fullmatch, source.names(MODEL))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.get("base_model_name_or_path"),
        "r": config["r"],
        "lora_alpha": config["lora_alpha"],
        "lora_dropout": config.get("lora_dropout", 0.0),
        "use_rslora": bool(config.get("rslora")),
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted({match["module"] for match in matches if match is not None}),
        "inference_mode": True,
    }


def check_file_names(source: Source, part: str, config: Mapping[str, Any]) -> None:
    """FormatError for names that PEFT does not find in a file of a LoRA: it starts a fresh one."""
    is_lora = config.get("peft_type") == "LORA"
    raise_if_any(
        FormatError,
        f"{part}: PEFT does not read these names; rename them as get_peft_model_state_dict does, "
        f"{_PREFIX}….lora_A.weight",
        [
            name
            for name in sorted(source.names(part))
            if is_lora and (not name.startswith(_PREFIX) or _ADAPTER_NAME.search(name))
        ],
    )


def open_and_merge(
    comm: Comm,
    source: Source | Exception,
    adapter: str,
    opening: OpenRequest,
    resources: ExitStack,
) -> Source | Exception:
    """Return the model with the adapter merged, or this rank's error for all to share."""
    path = absolute_path(adapter)
    adapter_opening = replace(opening, label=adapter, paths=[path])
    opened = open_on_all_ranks(comm, adapter_opening, SourceOptions(), resources)
    if isinstance(source, Exception) or isinstance(opened, Exception):
        return source if isinstance(source, Exception) else opened
    return result_or_error(partial(_merge_opened, source, opened, path))


def _merge_opened(source: Source, opened: Source, path: str) -> Source:
    part = adapter_part_of(opened, None)
    config = read_adapter_config(path, opened, part)
    return merge_adapter(with_model(source), opened, part, config)


def merge_adapter(base: Source, adapter: Source, part: str, config: Mapping[str, Any]) -> Source:
    """Return the base model with weights W + scaling * B @ A, in the dtypes of the base.

    Closing it closes the base. FormatError if the adapter does not fit the base, or is not a plain
    LoRA.
    """
    updates = _updates(adapter, part, config)
    specs = base.specs(MODEL, base.names(MODEL))
    raise_if_any(
        FormatError,
        "the adapter is not that of this model, which lacks",
        sorted(name for name in updates if name not in specs),
    )
    raise_if_any(
        FormatError,
        "the adapter cannot be merged into quantized weights; dequantize the base first",
        sorted(
            f"{name} {specs[name].dtype}"
            for name in updates
            if torch_dtype(specs[name].dtype) not in CASTABLE_DTYPES
        ),
    )
    a_specs = adapter.specs(part, adapter.names(part))
    raise_if_any(
        FormatError,
        "the adapter is not that of this model; other shapes have",
        [
            f"{name}: got {shape}, expected {specs[name].shape}"
            for name, (a_name, b_name, _) in updates.items()
            if (shape := (a_specs[b_name].shape[0], a_specs[a_name].shape[-1])) != specs[name].shape
        ],
    )
    exprs: dict[str, Expr] = {name: Renamed((MODEL, name)) for name in specs}
    for name, update in updates.items():
        load = partial(_merged, base, name, adapter, part, update)
        exprs[name] = ExternalTensor(External(specs[name].dtype, specs[name].shape, load))
    metadata = base.metadata()
    other_parts = [part for part in base.parts if part != MODEL]
    return DerivedSource(
        base,
        {MODEL: exprs},
        aliases={MODEL: base.aliases(MODEL)},
        metadata=replace(metadata, left_out=(*metadata.left_out, *other_parts)),
    )


def _updates(
    adapter: Source, part: str, config: Mapping[str, Any]
) -> dict[str, tuple[str, str, float]]:
    """Return the names of A and B, and the scaling, by the name of the weight."""
    raise_if_any(
        FormatError,
        "the adapter cannot be merged: expected a plain LoRA, got",
        [
            f"{name}={config.get(name)!r}"
            for name, plain in _PLAIN.items()
            if config.get(name) not in plain
        ],
    )
    init = config.get("init_lora_weights")
    if changes_base(init):
        raise FormatError(
            f"the adapter cannot be merged: init_lora_weights={init!r} also changed the weights of "
            "its base, expected an adapter of the base as it is; save it again with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    matches = {name: _LORA.fullmatch(name) for name in adapter.names(part)}
    raise_if_any(
        FormatError,
        "the adapter cannot be merged: it has more than the pairs of a LoRA",
        sorted(name for name, match in matches.items() if match is None),
    )
    modules = {match["module"] for match in matches.values() if match is not None}
    updates = {}
    for module in sorted(modules):
        a_name, b_name = (f"{_PREFIX}{module}.lora_{kind}.weight" for kind in "AB")
        if a_name not in matches or b_name not in matches:
            raise FormatError(f"{module}: got one of lora_A and lora_B, expected both")
        rank = adapter.specs(part, [a_name])[a_name].shape[0]
        patterns = config.get("alpha_pattern") or {}
        alpha = next(  # of the first pattern that matches the module or the end of its name
            (
                value
                for pattern, value in patterns.items()
                if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module)
            ),
            config["lora_alpha"],
        )
        scaling = alpha / sqrt(rank) if config.get("use_rslora") else alpha / rank
        updates[f"{module}.weight"] = (a_name, b_name, scaling)
    return updates


def _merged(
    base: Source,
    name: str,
    adapter: Source,
    part: str,
    update: tuple[str, str, float],
    box: Box,
) -> torch.Tensor:
    """Return a box of a merged weight; computed in float32 at least."""
    a_name, b_name, scaling = update
    weight = read_tensor(base, (MODEL, name), box)
    (row, column), (rows, columns) = box.offsets, box.shape
    rank = adapter.specs(part, [a_name])[a_name].shape[0]
    a = read_tensor(adapter, (part, a_name), Box((0, column), (rank, columns)))
    b = read_tensor(adapter, (part, b_name), Box((row, 0), (rows, rank)))
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(dtype) + (b.to(dtype) @ a.to(dtype)) * scaling).to(weight.dtype)
