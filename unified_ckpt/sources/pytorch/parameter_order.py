"""A transformers model by its config.json, without memory: which parameters it has, in which order,
and how a Trainer groups them.

No code of a checkpoint is run: a model that transformers itself does not have is none.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import torch

from unified_ckpt.engine.source.by_position import Order
from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.sources.files.json import CONFIG

if TYPE_CHECKING:
    from collections.abc import Iterator

# What the Trainer gives no weight decay: these names, and what is in a LayerNorm (transformers,
# `Trainer.get_decay_parameter_names`).
_NO_DECAY = [
    re.compile(pattern)
    for pattern in (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
]


def meta_model(path: str | os.PathLike[str]) -> torch.nn.Module:
    """The model that a config.json names, or that of a folder. NotFoundError, FormatError where
    there is none that transformers has.
    """
    folder = os.fspath(path)
    folder = (os.path.dirname(folder) or ".") if os.path.isfile(folder) else folder
    if not os.path.isfile(os.path.join(folder, CONFIG)):
        raise NotFoundError(
            f"{folder}: has no {CONFIG}, which says what model it is; needed model=..."
        )
    try:
        import transformers
    except ImportError as error:
        raise NotFoundError(
            f"{folder}/{CONFIG}: needs transformers to say what model it is: {error}"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
        architecture = next(iter(config.architectures or ()), "")
        model_class = getattr(transformers, architecture, None)
        if isinstance(model_class, type) and issubclass(
            model_class, transformers.PreTrainedModel
        ):  # not just any name that transformers has
            with torch.device("meta"):
                return model_class(config)
    except Exception as error:  # a config that is not as its model expects may raise anything
        reason = f"transformers {transformers.__version__} makes no model of it: {type(error).__name__}: {error}"
        raise FormatError(
            f"{folder}/{CONFIG}: {reason}; needed a config of one of its models, or model=..."
        ) from error
    raise NotFoundError(
        f"{folder}/{CONFIG}: names the architectures {config.architectures}; needed one of transformers', or model=..."
    )


def config_order(path: str, group_count: int) -> Order:
    """The parameters of the model that a config.json names, as an optimizer with so many groups is
    likely to have them. Same errors.
    """
    model = meta_model(path)
    return single_group_order(model) if group_count == 1 else trainer_order(model)


def single_group_order(model: torch.nn.Module) -> Order:
    """One group of all parameters, as `optimizer(model.parameters())` makes."""
    return [[(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]]


def trainer_order(model: torch.nn.Module) -> Order:
    """The Trainer's two groups: what has weight decay, then the rest."""
    decayed_names = set(_decayed_names(model))
    (parameters,) = single_group_order(model)
    return [
        [entry for entry in parameters if entry[0] in decayed_names],
        [entry for entry in parameters if entry[0] not in decayed_names],
    ]


def _decayed_names(module: torch.nn.Module) -> Iterator[str]:
    """A name is looked at from each module that it is in, as far as it goes there: `norm` alone
    counts, `self.norm1` does not.
    """
    for name, child in module.named_children():
        if not isinstance(child, torch.nn.LayerNorm):
            yield from (
                fqn
                for inner in _decayed_names(child)
                if _has_weight_decay(fqn := f"{name}.{inner}")
            )
    yield from filter(_has_weight_decay, module._parameters)


def _has_weight_decay(name: str) -> bool:
    return not any(pattern.search(name.lower()) for pattern in _NO_DECAY)
