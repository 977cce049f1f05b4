"""Checkpoints of Megatron, nanotron, Orbax and PaddleNLP for the conformance suite."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import unified_ckpt as uc
from tests.foreign.conformance_cases import Tensors, keyed
from tests.support.foreign import (
    flexes,
    maxtexts,
    megatron_core,
    megatron_models,
    megatrons,
    nanotrons,
    orbaxes,
    paddleformers,
    paddles,
)
from tests.support.foreign.source_cases import Case, Key


def megatron_tensors(hub: Mapping[str, Tensors], *, optimizer: bool) -> dict[Key, torch.Tensor]:
    half = {name: tensor.bfloat16() for name, tensor in hub["param"].items()}
    moments = {f"{n}/{key}": t for key in ("exp_avg", "exp_avg_sq") for n, t in hub[key].items()}
    steps = {f"{name}/step": torch.tensor(7.0) for name in half}
    state = keyed(master_weights=hub["param"], optimizer=moments | steps)
    return keyed(model=half) | (state if optimizer else {})


LAYOUT_OF_MEGATRON = (
    "*metadata.json: *",
    "*: checkpoint_version",
    "*: args: rank",
    "*: buckets_coalesced",
    "*: numel_unpadded",
)


def megatron(root: Path, *, name: str) -> Case:
    kind, job, more = megatron_models.JOBS[name]
    _, hub = megatron_models.drawn(kind, job, root)
    megatrons.write(root / "job", job, hub, **more)
    expected = megatron_tensors(hub, optimizer=job.optimizer != "none")
    tie = {"lm_head.weight": "model.embed_tokens.weight"} if job.tied else {}
    aliases = dict.fromkeys(("model", "master_weights"), tie)
    return Case(
        root / "job",
        expected,
        format="megatron",
        aliases=aliases,
        lazy_nbytes=1 << 20,  # many small tensors
        no_state=LAYOUT_OF_MEGATRON,
    )


def megatron_dist(root: Path, *, form: Any) -> Case:
    hub = megatron_core.drawn()
    megatron_core.write(root / "c", hub, form=form)
    return Case(
        root / "c",
        megatron_tensors(hub, optimizer=True),
        format="megatron-core",
        optional=("*/metadata.json",),  # without it, the folder is one of DCP
        metadata={"step": 7},
        no_state=LAYOUT_OF_MEGATRON,
    )


def nanotron(root: Path, *, dp: int, zero: bool) -> Case:
    expected: dict[Any, torch.Tensor] = {
        tuple(name.split(":")): tensor
        for name, tensor in nanotrons.write(root, dp=dp, zero=zero).items()
    }
    names = {"*/optimizer/*.pt": "files of (pp, dp, tp, exp) are missing"}
    options = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.01}
    metadata = {"step": 20, "options": options, "extra": {"lr_scheduler": {"last_epoch": 20}}}
    return Case(root, expected, format="nanotron", words_by_file=names, metadata=metadata)


ARRAYS = {
    "layer.kernel": torch.randn(8, 12),
    "layer.bias": torch.zeros(12),
    "half": torch.randn(7, 16).to(torch.bfloat16),
    "ids": torch.arange(20, dtype=torch.int32).reshape(5, 4),
    "mask": torch.tensor([True, False, True, True]),
    "small": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "temperature": torch.tensor(0.5),
    "wide": torch.randn(1030, 300),
}
EMA, TRACE = torch.full((8, 12), 2.0), torch.ones(64, 64)
VALUES = {"seed": 17, "rate": 0.25, "note": "a run"}
ITEMS = {"meta": {"epoch": 2, "names": ["a"]}, "custom": {"scan_layers": True}}
DRIVERS: dict[str, dict[str, Any]] = {
    "ocdbt, zarr3": {"ocdbt": True, "zarr3": True, **ITEMS},
    "ocdbt, zarr2": {"ocdbt": True, "zarr3": False, **ITEMS},
    "files, zarr3": {"ocdbt": False, "zarr3": True, **ITEMS},
    "files, zarr2": {"ocdbt": False, "zarr3": False, **ITEMS},
    "v1": {"api": "v1"},
    "bare": {"api": "bare"},
}
MAXTEXT = {"llama3": True, "mixtral": False}  # kind -> whether its layers are stacked
SMOKE = ("ocdbt, zarr3", "llama3")  # what the default tests read


@cache
def orbax_folders(root: Path, *, smoke: bool) -> dict[str, maxtexts.HubModel]:
    """Write many of them at once: JAX needs seconds to start."""
    arrays = {name: orbaxes.as_numpy(tensor) for name, tensor in ARRAYS.items()}
    layer = {name.partition(".")[2]: arrays.pop(name) for name in list(arrays) if "." in name}
    tree = {
        "params": {"layer": layer, **arrays},
        "opt_state": [
            {"adam": (np.int32(3), {"layer": layer}, {"layer": layer})},
            {"trace": {"wide": TRACE.numpy()}},
            None,
            (),
        ],
        "ema": {"layer": {"kernel": EMA.numpy()}},
        "step": np.int32(3),
        **VALUES,
    }
    drivers, kinds = (
        [name for name in names if (name in SMOKE) == smoke] for names in (DRIVERS, MAXTEXT)
    )
    models = {kind: maxtexts.make(kind, root / "models" / kind) for kind in kinds}
    orbaxes.write(
        [orbaxes.job(root / name, tree, **{"steps": [3], **DRIVERS[name]}) for name in drivers]
        + [
            orbaxes.job(root / kind, maxtexts.tree_of(model, stacked=MAXTEXT[kind], trained=True))
            for kind, model in models.items()
        ],
        root / "jobs",
    )
    return models


def orbax(root: Path, *, driver: str) -> Case:
    orbax_folders(root.parent, smoke=driver in SMOKE)
    state = {
        f"{name}/{key}": ARRAYS[name] if key != "step" else torch.tensor(3.0)
        for name in ("layer.kernel", "layer.bias")
        for key in ("exp_avg", "exp_avg_sq", "step")
    }
    names = {"meta": "meta", "custom": "custom_metadata"}
    extra = {names[key]: value for key, value in DRIVERS[driver].items() if key in names}
    others = {"ema": {"layer.kernel": EMA}, "opt_state": {"1.trace.wide": TRACE}}
    return Case(
        root.parent / driver,
        keyed(model=ARRAYS, optimizer=state, **others),
        format="orbax",
        metadata={"step": 3, "extra": {**VALUES, **extra}},
        lazy_nbytes=3 << 19,
    )


def maxtext(root: Path, *, kind: str) -> Case:
    model = orbax_folders(root.parent, smoke=kind in SMOKE)[kind]
    steps = {f"{name}/step": torch.tensor(7.0) for name in model.state}
    expected = keyed(model=model.state, optimizer={**model.moments, **steps})
    options = uc.SourceOptions(config=str(model.folder))
    return Case(root.parent / kind, expected, options, format="orbax")


OF_PADDLE = ("*beta?_pow_acc_0", "*@@: *")  # the step, and names
MOMENTS = {"moment1_0": "exp_avg", "moment2_0": "exp_avg_sq"}
TRAINED_BY_PADDLE = {
    "step": 2,
    "extra": {"scheduler": {"last_epoch": 2, "last_lr": 0.001}},
    "options": {"lr": 0.001, "betas": (0.9, 0.999)},
}


WITHOUT_CONFIG = ("*/config.json",)  # names are then Paddle's own


def paddle_tensors(
    folder: Path, *, weights: str = "model-", name_of: Callable[[str], str] = paddles.torch_name
) -> dict[Key, torch.Tensor]:
    """What a folder's safetensors hold, in torch's names and layout."""
    stems = {"model": weights, "master_weights": "master_weights", "optimizer": "optimizer"}
    expected: dict[Key, torch.Tensor] = {}
    for part, stem in stems.items():
        for name, tensor in paddles.stored(folder, stem).items():
            owner, _, state = name.partition("/")
            values = (tensor.t() if "lora" in name else paddles.as_torch(name, tensor)).clone()
            if part != "optimizer":
                expected[part, name_of(owner)] = values
            elif state in MOMENTS:
                expected[part, f"{name_of(owner)}/{MOMENTS[state]}"] = values
                expected[part, f"{name_of(owner)}/step"] = torch.tensor(2.0)
    return expected


def paddle(root: Path, *, fixture: str) -> Case:
    """The fixtures are one state: whole, of two ranks, and without the model."""
    expected = paddle_tensors(paddles.FIXTURES / "single_bf16")
    folder = paddles.copied(fixture, root / "c")
    return Case(
        folder,
        expected,
        format="paddle",
        optional=WITHOUT_CONFIG,
        metadata=TRAINED_BY_PADDLE,
        no_state=OF_PADDLE,
    )


def paddle_tied(root: Path) -> Case:
    """The embedding is stored as the head."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    folder = paddles.copied("single_tied", root / "c")
    stored = {
        (part, name.replace(head, embedding)): tensor.t()
        if head in name and tensor.dim()
        else tensor
        for (part, name), tensor in paddle_tensors(folder).items()
    }
    states = {f"{head}/{key}": f"{embedding}/{key}" for key in (*MOMENTS.values(), "step")}
    weights = {part: {head: embedding} for part in ("model", "master_weights")}
    aliases = {**weights, "optimizer": states}
    return Case(
        folder,
        stored,
        format="paddle",
        optional=WITHOUT_CONFIG,
        aliases=aliases,
        metadata=TRAINED_BY_PADDLE,
        no_state=OF_PADDLE,
    )


def paddle_lora(root: Path) -> Case:
    folder = paddles.copied("lora_tp2", root / "c")
    expected = paddle_tensors(
        folder,
        weights="peft_model",
        name_of=lambda name: f"base_model.model.{paddles.torch_name(name)}.weight",
    )
    # without config.json, names are those of PaddleNLP
    return Case(folder, expected, format="paddle", optional=WITHOUT_CONFIG, no_state=OF_PADDLE)


def paddle_formers(root: Path, *, fixture: str, tied: bool = False) -> Case:
    """Model weights are in torch's layout, the rest in Paddle's."""
    states = (*MOMENTS.values(), "step")
    head, embedding = paddleformers.HEAD, paddleformers.EMBEDDING
    ties = {
        **{part: {head: embedding} for part in ("model", "master_weights")},
        "optimizer": {f"{head}/{state}": f"{embedding}/{state}" for state in states},
    }
    return Case(
        paddleformers.copied(fixture, root / "c"),
        paddleformers.expected_tensors(fixture, tied=tied),
        format="paddle",
        aliases=ties if tied else {},
        metadata={"step": paddleformers.STEPS, "options": {"lr": 0.0, "betas": (0.9, 0.999)}},
        no_state=OF_PADDLE,
    )


def paddle_flex(root: Path, *, fixture: Path) -> Case:
    """Each part in a folder of its own, or all in one."""
    is_step = fixture in flexes.TRAINER
    metadata = {"step": 2, "options": {"lr": 0.0, "betas": (0.9, 0.999)}} if is_step else {}
    return Case(
        flexes.copied(fixture, root / fixture.name),
        flexes.expected(fixture),
        format="paddle-flex",
        metadata=metadata,
        no_state=OF_PADDLE,
        optional=("*/ema_state/0.metadata",),  # without it, as of older versions
    )


def paddle_pickles(root: Path) -> Case:
    """Files of .pdparams and .pdopt, unpickled by Python."""
    folder = paddles.copied("half_legacy", root / "c")
    weights, state = (
        pickle.loads((folder / file).read_bytes(), encoding="latin1")
        for file in ("model_state.pdparams", "optimizer.pdopt")
    )
    statics, expected = weights.pop("StructuredToParameterName@@"), {}
    for name, array in weights.items():
        static, torch_name = statics[name], paddles.torch_name(name)
        arrays = {
            ("model", torch_name): array,
            ("master_weights", torch_name): state["master_weights"][static],
            **{
                ("optimizer", f"{torch_name}/{state_name}"): state[f"{static}_fp32_master_0_{key}"]
                for key, state_name in MOMENTS.items()
            },
        }
        for key, value in arrays.items():
            value = torch.from_numpy((value[1] if isinstance(value, tuple) else value).copy())
            value = value.view(torch.bfloat16) if value.dtype == torch.uint16 else value
            expected[key] = paddles.as_torch(name, value)
        expected["optimizer", f"{torch_name}/step"] = torch.tensor(2.0)
    optional = ("*.pdopt", *WITHOUT_CONFIG)
    return Case(folder, expected, format="paddle-legacy", optional=optional, no_state=OF_PADDLE)


FRAMEWORKS: dict[str, Callable[[Path], Case]] = {
    **{f"megatron, {name}": partial(megatron, name=name) for name in megatron_models.JOBS},
    "megatron-core, stacked": partial(megatron_dist, form=megatron_core.stacked),
    "megatron-core, apart": partial(megatron_dist, form=lambda tensors, _: tensors),
    "nanotron": partial(nanotron, dp=1, zero=False),
    **{f"nanotron, zero, {dp}": partial(nanotron, dp=dp, zero=True) for dp in (2, 3, 12)},
    **{f"orbax, {driver}": partial(orbax, driver=driver) for driver in DRIVERS},
    **{f"maxtext, {kind}": partial(maxtext, kind=kind) for kind in MAXTEXT},
    **{
        f"paddle, {name}": partial(paddle, fixture=name)
        for name in ("single_bf16", "tp2_nomerge", "tp2_skip")
    },
    "paddle, tied": paddle_tied,
    "paddle, lora": paddle_lora,
    "paddle, pickles": paddle_pickles,
    "paddleformers": partial(paddle_formers, fixture="single_unified"),
    **{
        f"paddle-flex, {fixture.parts[-2]}": partial(paddle_flex, fixture=fixture)
        for fixture in (
            flexes.FIXTURES / "trainer" / "sharding2_flex" / "checkpoint-2",
            flexes.FIXTURES / "by_api" / "sharding2_safetensors",
            flexes.FIXTURES / "special" / "real_model_nested",
        )
    },
    "paddleformers, tied": partial(paddle_formers, fixture="single_tied_unified", tied=True),
}
