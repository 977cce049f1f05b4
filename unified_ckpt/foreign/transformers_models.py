"""Classes and models of transformers that a config.json names, and the order of their parameters.

Models are built on the meta device. Code of a checkpoint is never executed: models that
transformers does not contain are refused.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from unified_ckpt.engine.source.protocol import Order
from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.foreign.files.json import CONFIG
from unified_ckpt.runtime.packages import missing_package
from unified_ckpt.runtime.storage.regular_files import is_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

# The Trainer applies no weight decay to these names and to parameters of LayerNorm
# (transformers, `Trainer.get_decay_parameter_names`).
_NO_DECAY = [
    re.compile(pattern)
    for pattern in (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
]


def pretrained_class(path: str | os.PathLike[str]) -> tuple[Any, Any]:
    """Return the class of the model of a config.json, or of a folder with one, and its config.

    NotFoundError if transformers has no such model, FormatError if it cannot read the config.
    """
    folder = _folder(path)
    if not is_file(os.path.join(folder, CONFIG)):
        raise NotFoundError(f"{folder}: no {CONFIG} that names the model; pass model=...")
    try:
        import transformers
    except ImportError as error:
        raise missing_package(
            f"{folder}/{CONFIG}: building the model", error, extra="transformers"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
        architecture = next(iter(config.architectures or ()), "")
        model_class = getattr(transformers, architecture, None)
    except Exception as error:  # a malformed config may raise anything
        raise _unbuildable(folder, error) from error
    # Only models: a config could name anything that transformers exports.
    if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
        return model_class, config
    raise NotFoundError(
        f"{folder}/{CONFIG}: got architectures {config.architectures}, "
        "expected one of transformers; name the class there, or pass model=..."
    )


def meta_model(path: str | os.PathLike[str]) -> torch.nn.Module:
    """Build the model of a config.json, or of a folder with one, on the meta device.

    Same errors as `pretrained_class`.
    """
    model_class, config = pretrained_class(path)
    import torch

    try:
        with torch.device("meta"):
            model: torch.nn.Module = model_class(config)
    except Exception as error:  # a malformed config may raise anything
        raise _unbuildable(_folder(path), error) from error
    return model


def _folder(path: str | os.PathLike[str]) -> str:
    """Return the folder of a config.json, given either."""
    folder = os.fspath(path)
    return (os.path.dirname(folder) or ".") if is_file(folder) else folder


def _unbuildable(folder: str, error: Exception) -> FormatError:
    import transformers

    return FormatError(
        f"{folder}/{CONFIG}: transformers {transformers.__version__} cannot build a model "
        f"from it: {type(error).__name__}: {error}; fix the config, or pass model=..."
    )


def config_order(path: str, group_count: int) -> Order:
    """Return the likely parameter order of an optimizer with `group_count` groups.

    Same errors as `meta_model`.
    """
    return model_order(meta_model(path), group_count)


def model_order(model: torch.nn.Module, group_count: int) -> Order:
    """Return the likely parameter order of an optimizer of this model with `group_count` groups.

    One group has all parameters. Others are the Trainer's: with weight decay, then without.
    """
    parameters = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    if group_count == 1:
        return [parameters]
    decayed_names = set(_decayed_names(model))
    return [
        [entry for entry in parameters if (entry[0] in decayed_names) == decayed]
        for decayed in (True, False)
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
