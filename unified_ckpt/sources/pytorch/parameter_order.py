"""Parameter order of a transformers model from its config.json, and the Trainer's param groups.

The model is built on the meta device. Code of a checkpoint is never executed: models that
transformers does not contain are refused.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from unified_ckpt.engine.source.protocol import Order
from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.runtime.storage.regular_files import is_file
from unified_ckpt.sources.files.json import CONFIG

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

# The Trainer applies no weight decay to these names and to parameters of LayerNorm
# (transformers, `Trainer.get_decay_parameter_names`).
_NO_DECAY = [
    re.compile(pattern)
    for pattern in (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
]


def meta_model(path: str | os.PathLike[str]) -> torch.nn.Module:
    """Build the model of a config.json, or of a folder with one, on the meta device.

    NotFoundError or FormatError if transformers has no such model.
    """
    folder = os.fspath(path)
    folder = (os.path.dirname(folder) or ".") if is_file(folder) else folder
    if not is_file(os.path.join(folder, CONFIG)):
        raise NotFoundError(f"{folder}: no {CONFIG} that names the model; pass model=...")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise NotFoundError(
            f"{folder}/{CONFIG}: building the model requires transformers: {error}"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
        architecture = next(iter(config.architectures or ()), "")
        model_class = getattr(transformers, architecture, None)
        # Only models: a config could name anything that transformers exports.
        if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
            with torch.device("meta"):
                return model_class(config)
    except Exception as error:  # a malformed config may raise anything
        raise FormatError(
            f"{folder}/{CONFIG}: transformers {transformers.__version__} cannot build a model "
            f"from it: {type(error).__name__}: {error}; fix the config, or pass model=..."
        ) from error
    raise NotFoundError(
        f"{folder}/{CONFIG}: got architectures {config.architectures}, "
        "expected one of transformers; pass model=..."
    )


def config_order(path: str, group_count: int) -> Order:
    """Return the likely parameter order of an optimizer with `group_count` groups.

    Same errors as `meta_model`.
    """
    model = meta_model(path)
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
