"""Opens PaddleNLP Unified Checkpoints and older `.pdparams` folders as Sources.

A Unified Checkpoint has indexed safetensors of the model or an adapter, the master weights and the
optimizer. The optimizer may be merged or one file per rank, and quantized or not; master weights or
model weights may be left out.

How wrong state could be read: a file or slice is missing, quantized bytes are used as they are, or
master weights replace the model's. Indexes, headers and rank numbers are therefore compared before
any tensor is read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from unified_ckpt.core.recipes import External, Recipe
from unified_ckpt.core.text import format_list, raise_if_any
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError, IncompleteError, NotFoundError, error_prefix
from unified_ckpt.foreign.files.json import read_json_object
from unified_ckpt.foreign.paddle.contents import (
    FolderContents,
    build_source,
    read_model_config,
)
from unified_ckpt.foreign.paddle.detect import PEFT, is_legacy, part_file
from unified_ckpt.foreign.paddle.files import FlatPiecesError, open_indexed, open_tensors
from unified_ckpt.foreign.paddle.legacy import read_legacy_state
from unified_ckpt.foreign.paddle.names import PADDLEFORMERS_VERSION, ModelConfig
from unified_ckpt.foreign.paddle.quantized_moments import (
    MAX_SCALES,
    MIN_SCALES,
    SCALES,
    dequantize_o1,
    dequantize_o2,
)
from unified_ckpt.foreign.paddle.ranks import is_sharded, rank_files
from unified_ckpt.foreign.paddle.slices import dtype_of
from unified_ckpt.foreign.paddle.tensors import (
    STATE_NAMES,
    PaddleTensors,
    empty_slices,
    join_slices,
)
from unified_ckpt.format import names
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.regular_files import list_folder
from unified_ckpt.views.select import SelectedSource

_FIRST_MOMENT, _SECOND_MOMENT = "moment1_0", "moment2_0"
_FLAT_PIECES = (
    "is sharded by PaddleFormers, like the master weights, in flat pieces whose "
    "places no file has; read the model alone, with parts=('model',), or save again with "
    "save_checkpoint_format='flex_checkpoint'"
)
_HALF_DTYPES = {"bfloat16": "BF16", "float16": "F16"}


def open_paddle(root: str, options: SourceOptions) -> Source:
    """Open a PaddleNLP folder. Raises FormatError, or IncompleteError naming what is missing."""
    return read_paddle(root, options, compare_masters=True)


def read_paddle(root: str, options: SourceOptions, *, compare_masters: bool) -> Source:
    """Do what `open_paddle` does. `compare_masters`: with the model; an export has the source's."""
    entries = frozenset(list_folder(root))
    config, model = read_model_config(root, options)
    pickled, refused = dict[str, Any](), dict[str, str]()
    unified = not entries.isdisjoint(_INDICES)
    if unified:
        _check_written_by_paddle(root, entries, config, model)
        _check_indexed(root, entries)
        state, refused = _read_state(root, entries, model)
    elif is_legacy(entries):
        state, pickled = read_legacy_state(root, entries, model)
    else:
        raise NotFoundError(
            f"{root}: got no PaddleNLP index and no model_state*.pdparams, expected one of "
            f"{', '.join(_INDICES)}"
        )
    contents = FolderContents(
        "paddle" if unified else "paddle-legacy",
        entries,
        replace(state, compare_masters=compare_masters),
        pickled,
        refused,
        left_out=[MASTER] if refused else [],
    )
    skips_model = bool(state.masters) and state.model is state.masters
    if skips_model and model.dtype is None:
        raise FormatError(
            f"{root}: the model is stored as its master weights; add its config.json, whose dtype "
            "it is cast to"
        )
    source = build_source(root, contents, model, options)
    if skips_model and model.dtype in _HALF_DTYPES:
        return SelectedSource(source, parts=None, model_dtype=_HALF_DTYPES[model.dtype])
    return source


_INDICES = tuple(names.index_name(part) for part in (MODEL, PEFT, MASTER))


def _check_written_by_paddle(
    root: str, entries: Collection[str], config: Mapping[str, Any], model: ModelConfig
) -> None:
    """Require proof that weights are [in, out] if all file names could also be Hugging Face's.

    The sizes of the config are such a proof.
    """
    paddle_indexes = {names.index_name(OPTIMIZER), names.index_name(MASTER), names.index_name(PEFT)}
    if (
        paddle_indexes.isdisjoint(entries)
        and not {"paddlenlp_version", PADDLEFORMERS_VERSION} & config.keys()
        and not (model.has_hf_names and model.hidden and model.intermediate)
    ):
        raise FormatError(
            f"{root}: only headers show that PaddleNLP wrote it; add its config.json, or pass "
            "--from huggingface if its weights are [out, in]"
        )


def _check_indexed(root: str, entries: Collection[str]) -> None:
    """Raise IncompleteError for parts with files but without an index, as those would not be read.

    Master weights of ranks are covered by the optimizer's index.
    """
    indexed_parts = {
        part for part in (MODEL, PEFT, OPTIMIZER, MASTER) if names.index_name(part) in entries
    }
    exempt = {MODEL} if PEFT in indexed_parts else set()  # the adapter's base model is not read
    if OPTIMIZER in indexed_parts and "weight_map" not in read_json_object(
        os.path.join(root, names.index_name(OPTIMIZER))
    ):
        exempt |= {MASTER}
    for part in (MODEL, PEFT, OPTIMIZER, MASTER):
        files = sorted(entry for entry in entries if part_file(part).fullmatch(entry))
        if files and part not in indexed_parts | exempt:
            raise IncompleteError(
                format_list(
                    f"{root}: {names.index_name(part)} is missing, the index of these", files
                )
            )


def _read_state(
    root: str, entries: Collection[str], model: ModelConfig
) -> tuple[PaddleTensors, dict[str, str]]:
    """Return the folder's tensors, and the parts that cannot be read, with the reason."""
    is_adapter, peft_index = names.index_name(PEFT) in entries, names.index_name(PEFT)
    if is_adapter and read_json_object(os.path.join(root, peft_index)).get("type") != "lora":
        raise FormatError(f"{root}: {peft_index} is not of a LoRA adapter, expected type 'lora'")
    part, weights = PEFT if is_adapter else MODEL, dict[str, Recipe]()
    if names.index_name(part) in entries:
        weights = open_indexed(root, names.index_name(part)).weights(model)
    try:
        return _read_optimizer(root, entries, weights, model), {}
    except FlatPiecesError:  # the model may be read, so nothing may ask for master weights
        return PaddleTensors(weights), {OPTIMIZER: _FLAT_PIECES}


def _read_optimizer(
    root: str, entries: Collection[str], weights: Mapping[str, Recipe], model: ModelConfig
) -> PaddleTensors:
    """Add the master weights and the optimizer to the model's weights."""
    optimizer_index = None
    if names.index_name(OPTIMIZER) in entries:
        optimizer_index = read_json_object(os.path.join(root, names.index_name(OPTIMIZER)))
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    masters: Mapping[str, Recipe] = {}
    if names.index_name(MASTER) in entries:
        masters = open_indexed(root, names.index_name(MASTER)).states(shapes)
    states: Mapping[str, Mapping[str, Recipe]] = {}
    if optimizer_index is not None and "weight_map" in optimizer_index:
        stage = _quant_stage(root, optimizer_index)
        absent = (f"/{_FIRST_MOMENT}",) if stage == "O2" else ()
        tensors = open_indexed(root, names.index_name(OPTIMIZER)).states(shapes, absent=absent)
        states = _group_by_state(root, tensors, stage)
    elif optimizer_index is not None:
        masters, states = _unmerged_states(root, entries, shapes, model, optimizer_index)
    if optimizer_index is not None and optimizer_index.get("master_weights") and not masters:
        masters = weights
        if any(dtype_of(tensor) != "F32" for tensor in weights.values()):
            raise IncompleteError(
                f"{root}: {names.index_name(MASTER)} is missing, and the model's weights are not "
                "float32"
            )
    weights = weights or masters  # `skip_save_model_weight`: the master weights stand for both
    is_unmerged = optimizer_index is not None and "weight_map" not in optimizer_index
    files = rank_files(root, entries, OPTIMIZER, "safetensors") if is_unmerged else []
    return PaddleTensors(weights, masters, states, is_sharded=is_sharded(files))


def _quant_stage(root: str, optimizer_index: Mapping[str, Any]) -> str:
    stage = optimizer_index.get("ckpt_quant_stage", "O0")
    if stage not in ("O0", "O1", "O2"):
        raise FormatError(f"{root}: got ckpt_quant_stage {stage!r}, expected O0, O1 or O2")
    return str(stage)


def _group_by_state(
    root: str, tensors: Mapping[str, External], stage: str
) -> dict[str, dict[str, Recipe]]:
    """Group the tensors of optimizer files by state name and parameter, dequantized."""
    values = {
        name: tensor for name, tensor in tensors.items() if "@" not in name.rpartition("/")[2]
    }
    raise_if_any(
        FormatError,
        f"{root}: names of optimizer state are not parameter/state",
        sorted(name for name in values if name.count("/") != 1),
    )
    by_state: dict[str, dict[str, Recipe]] = {}
    for name, tensor in values.items():
        owner, _, state_name = name.partition("/")
        try:
            by_state.setdefault(state_name, {})[owner] = _dequantize(name, tensor, tensors, stage)
            if stage == "O2" and state_name == _SECOND_MOMENT and tensor.dtype == "I8":
                by_state.setdefault(_FIRST_MOMENT, {})[owner] = dequantize_o2(
                    tensor, tensors[f"{owner}/{_FIRST_MOMENT}{SCALES}"]
                )
        except KeyError as error:
            raise IncompleteError(
                f"{root}: {name}: is quantized, but {error.args[0]} is in no file"
            ) from None
        if state_name in STATE_NAMES and dtype_of(by_state[state_name][owner]) != "F32":
            raise FormatError(
                f"{tensor.file}: {name}: got {tensor.dtype} under ckpt_quant_stage {stage}, "
                "expected F32 or a dtype of that stage"
            )
    return by_state


def _dequantize(
    name: str, tensor: External, tensors: Mapping[str, External], stage: str
) -> External:
    if stage == "O1" and name.endswith(_FIRST_MOMENT) and tensor.dtype == "I8":
        return dequantize_o1(tensor, tensors[name + SCALES])
    if stage != "O0" and name.endswith(_SECOND_MOMENT) and tensor.dtype in ("U8", "I8"):
        dequantize = dequantize_o1 if stage == "O1" else dequantize_o2
        return dequantize(tensor, tensors[name + MIN_SCALES], tensors[name + MAX_SCALES])
    return tensor


# ---- One file per rank (`ignore_merge_optimizer`)


def _unmerged_states(
    root: str,
    entries: Collection[str],
    full_shapes: Mapping[str, tuple[int, ...]],
    model: ModelConfig,
    optimizer_index: Mapping[str, Any],
) -> tuple[dict[str, Recipe], dict[str, dict[str, Recipe]]]:
    """Return master weights and optimizer state from rank files.

    `full_shapes` are those of the model's weights, which are merged.
    """
    files_by_part = {
        part: rank_files(root, entries, part, "safetensors") for part in (OPTIMIZER, MASTER)
    }
    if not files_by_part[OPTIMIZER]:
        raise IncompleteError(
            f"{root}: {names.index_name(OPTIMIZER)} requires one file per rank, got no "
            f"{OPTIMIZER}.*.safetensors"
        )
    suffixes = {
        rank_file.file.removeprefix(part)
        for part, part_files in files_by_part.items()
        for rank_file in part_files
    }
    raise_if_any(
        IncompleteError,
        f"{root}: files of some ranks are missing",
        [
            part + suffix
            for part, part_files in files_by_part.items()
            for suffix in sorted(suffixes)
            if part_files and part + suffix not in entries
        ],
    )
    stage = _quant_stage(root, optimizer_index)
    degree = 1 + max(rank_file.tp_rank for rank_file in files_by_part[OPTIMIZER])
    slices = empty_slices()
    for part, part_files in files_by_part.items():
        for rank_file in part_files:
            path = os.path.join(root, rank_file.file)
            with error_prefix(path):
                tensors = open_tensors(path).states(full_shapes)
            by_state: Mapping[str, Mapping[str, Recipe]] = {MASTER: tensors}
            if part == OPTIMIZER:
                by_state = _group_by_state(root, tensors, stage)
            for state_name, by_name in by_state.items():
                for name, tensor in by_name.items():
                    slices[state_name][name][rank_file.tp_rank].append(tensor)
    states = join_slices(root, slices, full_shapes, model, degree)
    return states.pop(MASTER, {}), states
