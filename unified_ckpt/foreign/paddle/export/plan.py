"""Which tensors of a source Paddle stores, under which names, and in which orientation.

How state could be lost: a tensor has no place in Paddle's formats, or is wrongly transposed. So
everything is planned before the first byte is written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from unified_ckpt.core.recipes import External
from unified_ckpt.core.sharding.boxes import Box, full_box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import format_list, natural_key, raise_if_any
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import CheckpointError, FormatError
from unified_ckpt.foreign.paddle.beta_powers import beta_power
from unified_ckpt.foreign.paddle.export.tensors import DTYPES
from unified_ckpt.foreign.paddle.files import BFLOAT16_AS_UINT16
from unified_ckpt.foreign.paddle.flex.detect import EMA
from unified_ckpt.foreign.paddle.master_check import HALF_DTYPES
from unified_ckpt.foreign.paddle.names import (
    ModelConfig,
    check_shape,
    is_transposed,
    layer_kind,
    paddle_name,
)
from unified_ckpt.foreign.paddle.tensors import BETAS, POWER_STATES, STATE_NAMES
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.views.derived import Expr, ExternalTensor, Renamed
from unified_ckpt.views.materialize import read_tensor

_PADDLE_STATES = {torch_state: paddle_state for paddle_state, torch_state in STATE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class NameStyle:
    """How a format names tensors and lays them out.

    `hf_names`: parameters have Hugging Face's names, and lm_head is [vocab, hidden]. `state_mark`:
    stands between a parameter and its state. `master_suffix`: of master weights and averages.
    `torch_parts`: parts in torch's orientation. `dtypes`: names of dtypes that differ in files.
    """

    hf_names: bool
    state_mark: str = "/"
    master_suffix: str = ""
    torch_parts: Collection[str] = ()
    dtypes: Mapping[str, str] = field(default_factory=dict)


PADDLENLP = NameStyle(hf_names=False, dtypes={"BF16": BFLOAT16_AS_UINT16})
PADDLEFORMERS = NameStyle(hf_names=True, torch_parts=(MODEL,))
FLEX = NameStyle(hf_names=True, state_mark=".", master_suffix=".w_0")


def check_parts(source: Source, parts: Collection[str]) -> None:
    """Raise FormatError for a source without a model, or with other parts than these."""
    if MODEL not in source.parts or not set(source.parts) <= set(parts):
        raise FormatError(
            format_list(
                f"expected parts {', '.join(parts)}, with model required; got", list(source.parts)
            )
        )


def plan_part(source: Source, part: str, model: ModelConfig, style: NameStyle) -> dict[str, Expr]:
    """Return the tensors of a part by Paddle's names in natural order, tied ones under all names.

    FormatError listing tensors that have no place.
    """
    stored = {**{name: name for name in source.names(part)}, **source.aliases(part)}
    specs = source.specs(part, set(stored.values()))
    halves = half_names(source) if part == EMA else set[str]()
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
        new_name = owner if style.hf_names else paddle_name(owner, model)
        try:
            if state == "step":
                owner_betas = betas.get(stored_name.rpartition("/")[0], betas.get(owner))
                powers = _powers(source, key, spec, owner_betas)
                exprs |= {f"{new_name}{style.state_mark}{power}": powers[power] for power in powers}
            elif part == OPTIMIZER and state not in _PADDLE_STATES:
                raise FormatError(
                    "is optimizer state that Paddle does not have; expected "
                    f"{', '.join(_PADDLE_STATES)}, step"
                )
            else:
                suffix = f"{style.state_mark}{_PADDLE_STATES[state]}" if state else ""
                if part == MASTER or name in halves:
                    suffix = style.master_suffix
                exprs[new_name + suffix] = _weight(new_name, key, spec, model, style)
        except CheckpointError as error:
            problems.append(f"{part}:{name}: {error}")
    raise_if_any(FormatError, "Paddle's format has no place for", problems)
    return {name: exprs[name] for name in sorted(exprs, key=natural_key)}


def half_names(source: Source) -> set[str]:
    """Return all names of the model's tensors in half precision, for which masters exist."""
    specs = source.specs(MODEL, source.names(MODEL))
    stored = {name for name, spec in specs.items() if spec.dtype in HALF_DTYPES}
    return stored | {alias for alias, name in source.aliases(MODEL).items() if name in stored}


def _weight(name: str, key: Key, spec: TensorSpec, model: ModelConfig, style: NameStyle) -> Expr:
    """Return a weight, or state of its shape, in Paddle's orientation. `name` is Paddle's."""
    dtypes = DTYPES if key[0] == MODEL else ("F32",)
    transposed = is_transposed(name, spec.shape, layer_kind(name), vocab_first=model.vocab_first)
    check_shape(name, spec.shape[::-1] if transposed else spec.shape, model)
    if spec.dtype not in dtypes:
        raise FormatError(f"got dtype {spec.dtype}, expected {', '.join(dtypes)}")
    return Renamed(key, transposed=transposed and key[0] not in style.torch_parts)


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
