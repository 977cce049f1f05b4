"""Parameter order of a transformers model from its config.json, and the Trainer's param groups."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from unified_ckpt.engine.source.protocol import Order
from unified_ckpt.foreign.pytorch.transformers_models import meta_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

# The Trainer applies no weight decay to these names and to parameters of LayerNorm
# (transformers, `Trainer.get_decay_parameter_names`).
_NO_DECAY = [
    re.compile(pattern)
    for pattern in (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
]


def config_order(path: str, group_count: int) -> Order:
    """Return the likely parameter order of an optimizer with `group_count` groups.

    Same errors as `meta_model`.
    """
    return model_order(meta_model(path), group_count)


def model_order(model: torch.nn.Module, group_count: int) -> Order:
    """Return the likely parameter order of an optimizer of this model with `group_count` groups."""
    return single_group_order(model) if group_count == 1 else trainer_order(model)


def single_group_order(model: torch.nn.Module) -> Order:
    """Return one group of all parameters, as `optimizer(model.parameters())` has it."""
    return [[(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]]


def trainer_order(model: torch.nn.Module) -> Order:
    """Return the Trainer's two groups: parameters with weight decay, then those without."""
    decayed_names = set(_decayed_names(model))
    (parameters,) = single_group_order(model)
    return [
        [entry for entry in parameters if entry[0] in decayed_names],
        [entry for entry in parameters if entry[0] not in decayed_names],
    ]


def _decayed_names(module: torch.nn.Module) -> Iterator[str]:
    """Yield names of parameters with weight decay.

    The Trainer tests a name relative to each enclosing module: `norm` alone matches, `self.norm1`
    does not.
    """
    from torch.nn import LayerNorm  # only where there is a model: it imports torch

    for name, child in module.named_children():
        if not isinstance(child, LayerNorm):
            yield from (
                fqn
                for inner in _decayed_names(child)
                if _has_weight_decay(fqn := f"{name}.{inner}")
            )
    yield from filter(_has_weight_decay, module._parameters)


def _has_weight_decay(name: str) -> bool:
    return not any(pattern.search(name.lower()) for pattern in _NO_DECAY)
