"""PaddleNLP's Unified Checkpoints: safetensors with indices, of the model or an adapter, master weights and the optimizer; merged or a
file for each rank, compressed or not, with master weights, without, or with nothing else.

How wrong state could be read: a file or a slice is missing, compressed bytes are taken as they are, master weights for the model's. The
indices, the headers and the numbers of ranks are compared before anything is read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.text import listed
from unified_ckpt.engine.source.protocol import Said
from unified_ckpt.errors import FormatError, IncompleteError, NotFoundError
from unified_ckpt.format import names
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER
from unified_ckpt.sources.detect.paddle import PEFT, is_legacy, part_file
from unified_ckpt.sources.files.json import config_file
from unified_ckpt.sources.paddle.files import held_in, indexed, json_at
from unified_ckpt.sources.paddle.legacy import legacy_state
from unified_ckpt.sources.paddle.names import GATE_UP, Model, layer_of, model_of, split_axis
from unified_ckpt.sources.paddle.quantized_moments import (
    HIGHEST,
    LOWEST,
    SCALES,
    first_of_o1,
    first_of_o2,
    second_of_o1,
    second_of_o2,
)
from unified_ckpt.sources.paddle.ranks import is_spread, rank_files
from unified_ckpt.sources.paddle.slices import Held, joined, lone
from unified_ckpt.sources.paddle.tensors import BETAS, STATES, Slabs, State, translated
from unified_ckpt.sources.paddle.trainer_state import beside, with_scheduler
from unified_ckpt.views.shards import Assembled

_FIRST, _SECOND = "moment1_0", "moment2_0"
_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def open_paddle(root: str, options: SourceOptions) -> Assembled:
    """A Unified Checkpoint, or a folder of `.pdparams`. FormatError, or IncompleteError naming what is missing."""
    entries = frozenset(os.listdir(root)) if os.path.isdir(root) else frozenset()
    config = config_at(options.config or root)
    if options.config and config is None:
        raise NotFoundError(f"{options.config}: is no config.json, nor a folder that has one")
    model, told = model_of(config or {}), beside(root, entries)
    if options.names == "huggingface" and not model.alike:
        raise FormatError(
            f"{root}: Hugging Face's names are not known for model_type {model.kind!r}; needed a config.json, or names='own'"
        )
    unified = not entries.isdisjoint(_INDICES)
    if unified:
        _check_written_by_paddle(root, entries, config or {}, model)
        _check_indexed(root, entries)
        state = _state(root, entries, model)
    elif is_legacy(entries):
        state, more = legacy_state(root, entries, model)
        told = with_scheduler(told, more)
    else:
        raise NotFoundError(
            f"{root}: has no index of PaddleNLP's and no model_state*.pdparams; needed one of {', '.join(_INDICES)}"
        )
    found = translated(
        root, state, model, rename=model.alike and options.names != "own", steps=told.step
    )
    known = None not in found.betas
    groups = (
        [
            {
                "names": found.names,
                "options": {**told.options, **({"betas": found.betas} if known else {})},
            }
        ]
        if found.names
        else []
    )
    some = (
        {BETAS: found.betas} if found.counts and not known else {}
    )  # for who writes Paddle's powers again
    said = Said(step=told.step, extra={**told.extra, **some} or None, groups=groups)
    return Assembled(
        root,
        found.tensors,
        format="paddle" if unified else "paddle-legacy",
        said=said,
        aliases=found.aliases,
    )


_INDICES = tuple(names.index_name(part) for part in (MODEL, PEFT, MASTER))


def config_at(path: str) -> Mapping[str, Any] | None:
    """A model's config.json: a file, or in a folder; None where there is none."""
    folder, name = os.path.split(config_file(path))
    return _object(folder, name) if os.path.isfile(config_file(path)) else None


def _check_written_by_paddle(
    root: str, entries: Collection[str], config: Mapping[str, Any], model: Model
) -> None:
    """Names that Hugging Face's folders have too are no proof that weights are [in, out]: then the config's sizes must show it."""
    own = {names.index_name(OPTIMIZER), names.index_name(MASTER), names.index_name(PEFT)}
    if (
        own.isdisjoint(entries)
        and "paddlenlp_version" not in config
        and not (model.alike and model.hidden and model.intermediate)
    ):
        raise FormatError(
            f"{root}: nothing but headers says that PaddleNLP wrote it; needed its config.json, or --from huggingface if its weights are "
            "[out, in]"
        )


def _check_indexed(root: str, entries: Collection[str]) -> None:
    """Every part that has files has its index, without which none of them would be read; ranks' master weights go by the optimizer's."""
    told = {part for part in (MODEL, PEFT, OPTIMIZER, MASTER) if names.index_name(part) in entries}
    passed = {MODEL} if PEFT in told else set()  # the adapter's base, which is not read
    if OPTIMIZER in told and "weight_map" not in _object(root, names.index_name(OPTIMIZER)):
        passed |= {MASTER}
    for part in (MODEL, PEFT, OPTIMIZER, MASTER):
        files = sorted(entry for entry in entries if part_file(part).fullmatch(entry))
        if files and part not in told | passed:
            raise IncompleteError(
                listed(
                    f"{root}: {names.index_name(part)} is missing, which tells what these files hold",
                    files,
                )
            )


def _state(root: str, entries: Collection[str], model: Model) -> State:
    told = (
        _object(root, names.index_name(OPTIMIZER))
        if names.index_name(OPTIMIZER) in entries
        else None
    )
    adapter = names.index_name(PEFT) in entries
    if adapter and _object(root, names.index_name(PEFT)).get("type") != "lora":
        raise FormatError(
            f"{root}: {names.index_name(PEFT)} is of another adapter than LoRA; needed type 'lora'"
        )
    weights, masters = (
        {name: lone(held) for name, held in indexed(root, names.index_name(part)).items()}
        if names.index_name(part) in entries
        else {}
        for part in (PEFT if adapter else MODEL, MASTER)
    )
    states: Mapping[str, Mapping[str, Slabs]] = {}
    if told is not None and "weight_map" in told:
        states = _merged_states(root, told)
    elif told is not None:
        masters, states = _unmerged(root, entries, weights, model, told)
    if told is not None and told.get("master_weights") and not masters:
        masters = weights
        if any(slabs[0].held.dtype != torch.float32 for slabs in weights.values()):
            raise IncompleteError(
                f"{root}: {names.index_name(MASTER)} is missing, and the model's weights are not float32 in its place"
            )
    if masters and (
        not weights or masters is weights
    ):  # `skip_save_model_weight`: the master weights stand for both
        half = _HALVES.get(model.dtype or "")
        weights = (
            {name: lone(_cast(slabs[0].held, half)) for name, slabs in masters.items()}
            if half
            else masters
        )
    return State(
        weights,
        masters,
        states,
        spread=told is not None and "weight_map" not in told and _spread(root, entries),
    )


def _object(root: str, name: str) -> Mapping[str, Any]:
    found = json_at(root, name)
    if not isinstance(found, dict):
        raise FormatError(f"{os.path.join(root, name)}: is no JSON object")
    return found


def _cast(held: Held, dtype: torch.dtype) -> Held:
    return Held(dtype, held.shape, held.where, partial(_loaded_as, held, dtype), costs=True)


def _loaded_as(held: Held, dtype: torch.dtype, box: Box) -> torch.Tensor:
    return held.copy(box).to(dtype)


def _merged_states(root: str, told: Mapping[str, Any]) -> dict[str, dict[str, Slabs]]:
    """By state, by parameter."""
    stage = _stage(root, told)
    held = indexed(
        root, names.index_name(OPTIMIZER), absent=(f"/{_FIRST}",) if stage == "O2" else ()
    )
    return {
        kind: {name: lone(one) for name, one in named.items()}
        for kind, named in _by_state(root, held, stage).items()
    }


def _stage(root: str, told: Mapping[str, Any]) -> str:
    stage = told.get("ckpt_quant_stage", "O0")
    if stage not in ("O0", "O1", "O2"):
        raise FormatError(f"{root}: ckpt_quant_stage is {stage!r}; needed O0, O1 or O2")
    return str(stage)


def _by_state(root: str, held: Mapping[str, Held], stage: str) -> dict[str, dict[str, Held]]:
    """Tensors of an optimizer's file or files by state and parameter, decompressed."""
    plain = {name: one for name, one in held.items() if "@" not in name.rpartition("/")[2]}
    wrong = sorted(name for name in plain if name.count("/") != 1)
    if wrong:
        raise FormatError(
            listed(f"{root}: names of optimizer state that are no parameter/state", wrong)
        )
    found: dict[str, dict[str, Held]] = {}
    for name, one in plain.items():
        owner, _, kind = name.partition("/")
        try:
            found.setdefault(kind, {})[owner] = _decompressed(name, one, held, stage)
            if stage == "O2" and kind == _SECOND and one.dtype == torch.int8:
                found.setdefault(_FIRST, {})[owner] = first_of_o2(
                    one, held[f"{owner}/{_FIRST}{SCALES}"]
                )
        except KeyError as error:
            raise IncompleteError(
                f"{root}: {name}: is compressed, and {error.args[0]} is in no file"
            ) from None
        if kind in STATES and found[kind][owner].dtype != torch.float32:
            raise FormatError(
                f"{one.where}: {name}: is {one.dtype} under ckpt_quant_stage {stage}; needed float32, or what that writes"
            )
    return found


def _decompressed(name: str, one: Held, held: Mapping[str, Held], stage: str) -> Held:
    if stage == "O1" and name.endswith(_FIRST) and one.dtype == torch.int8:
        return first_of_o1(one, held[name + SCALES])
    if stage != "O0" and name.endswith(_SECOND) and one.dtype in (torch.uint8, torch.int8):
        made = second_of_o1 if stage == "O1" else second_of_o2
        return made(one, held[name + LOWEST], held[name + HIGHEST])
    return one


# ---- a file for each rank (`ignore_merge_optimizer`)


def _unmerged(
    root: str,
    entries: Collection[str],
    weights: Mapping[str, Slabs],
    model: Model,
    told: Mapping[str, Any],
) -> tuple[dict[str, Slabs], dict[str, dict[str, Slabs]]]:
    """Master weights and optimizer state from the ranks' files; the model's tensors, which are merged, say how large they are."""
    ranks = {part: rank_files(root, entries, part, "safetensors") for part in (OPTIMIZER, MASTER)}
    if not ranks[OPTIMIZER]:
        raise IncompleteError(
            f"{root}: {names.index_name(OPTIMIZER)} says that each rank has a file; found none of {OPTIMIZER}.*.safetensors"
        )
    endings = {one.file.removeprefix(part) for part, found in ranks.items() for one in found}
    absent = [
        part + ending
        for part, found in ranks.items()
        for ending in sorted(endings)
        if found and part + ending not in entries
    ]
    if absent:
        raise IncompleteError(listed(f"{root}: files of some ranks are missing", absent))
    stage, pieces = (
        _stage(root, told),
        {part: dict[tuple[str, str], dict[int, list[Held]]]() for part in ranks},
    )
    for part, found in ranks.items():
        for rank in found:
            held = held_in(os.path.join(root, rank.file))
            for kind, named in (
                _by_state(root, held, stage) if part == OPTIMIZER else {"": held}
            ).items():
                for name, one in named.items():
                    pieces[part].setdefault((kind, name), {}).setdefault(
                        rank.at.get("tp", 0), []
                    ).append(one)
    degree = 1 + max(rank.at.get("tp", 0) for rank in ranks[OPTIMIZER])
    whole_ones = {
        part: {
            key: _whole(root, key, by_rank, degree, weights, model) for key, by_rank in of.items()
        }
        for part, of in pieces.items()
    }
    states: dict[str, dict[str, Slabs]] = {}
    for (kind, name), slabs in whole_ones[OPTIMIZER].items():
        states.setdefault(kind, {})[name] = slabs
    return {name: slabs for (_, name), slabs in whole_ones[MASTER].items()}, states


def _spread(root: str, entries: Collection[str]) -> bool:
    return is_spread(rank_files(root, entries, OPTIMIZER, "safetensors"))


def _whole(
    root: str,
    key: tuple[str, str],
    by_rank: Mapping[int, list[Held]],
    degree: int,
    weights: Mapping[str, Slabs],
    model: Model,
) -> Slabs:
    kind, name = key
    first = by_rank[min(by_rank)][0]
    full = weights[name][0].held.shape if name in weights else None
    if first.shape == full or (kind and kind not in STATES):
        return joined(
            name, [one for rank in sorted(by_rank) for one in by_rank[rank]], None, sections=1
        )
    if len(by_rank) != degree:
        raise IncompleteError(
            f"{root}: {name}: {kind or MASTER} is in files of {len(by_rank)} tensor parallel ranks of {degree}"
        )
    axis = split_axis(name, len(first.shape), layer_of(name), tied=bool(model.tied))
    slices = [joined(name, of, None, sections=1)[0].held for _, of in sorted(by_rank.items())]
    return joined(name, slices, axis, sections=2 if f".{GATE_UP}." in name else 1)
