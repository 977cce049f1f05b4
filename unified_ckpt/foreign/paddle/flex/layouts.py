"""Decides which tensors of a FlexCheckpoint folder torch stores transposed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unified_ckpt.errors import error_prefix
from unified_ckpt.foreign.paddle.names import ModelConfig, check_shape, is_transposed, layer_kind


def transposed_tensors(
    root: str,
    shapes: Mapping[str, tuple[int, ...]],
    class_names: Mapping[str, str],
    model: ModelConfig,
    *,
    is_model: bool,
) -> tuple[dict[str, bool], Sequence[str]]:
    """Return which parameters are transposed, and those of unknown layers that are not.

    Arrays of more than two dims, such as stacked experts, keep their layout, and so do 2-D weights
    of layers that Paddle names but that are neither linear nor embedding. `is_model`: the folder is
    a model's, so other 2-D weights raise FormatError. They also do if any layer is known.
    """
    transposed: dict[str, bool] = {}
    unknown: list[str] = []
    with error_prefix(root):
        for name, shape in shapes.items():
            check_shape(name, shape, model)
            class_name = class_names.get(name)
            layer = layer_kind(name, internal_name=class_name)
            is_model = is_model or layer is not None
            if len(shape) > 2 or (len(shape) == 2 and layer is None):
                transposed[name] = False
                unknown += [name] if len(shape) > 2 or class_name is None else []
            else:
                transposed[name] = is_transposed(name, shape, layer, vocab_first=model.vocab_first)
        for name in unknown if is_model else ():
            if len(shapes[name]) == 2:
                is_transposed(name, shapes[name], None, vocab_first=None)  # raises
    return transposed, unknown
