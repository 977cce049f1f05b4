"""Decides which tensors of a FlexCheckpoint folder torch stores transposed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from unified_ckpt.errors import FormatError, error_prefix
from unified_ckpt.foreign.paddle.names import ModelConfig, check_shape, is_transposed, layer_kind

# Paddle's classes other than linear ones and embeddings; their 2-D weights are as torch's.
_KEPT_CLASSES = re.compile(r"(conv\w*|\w*norm|\w*cell|lstm|gru|simple_rnn|bilinear|prelu)_[0-9]+\.")


def transposed_tensors(
    root: str,
    shapes: Mapping[str, tuple[int, ...]],
    static_names: Mapping[str, str],
    model: ModelConfig,
    *,
    is_model: bool,
    keep_unknown: bool,
) -> tuple[dict[str, bool], Sequence[str]]:
    """Return which parameters are transposed, and those of unknown layers that are not.

    Arrays of more than two dims, such as stacked experts, keep their layout, and so do other 2-D
    weights with `keep_unknown` or if no layer is known. Otherwise FormatError names them in a
    model: if `is_model`, or if any layer is known.
    """
    transposed: dict[str, bool] = {}
    unknown: list[str] = []
    with error_prefix(root):
        for name, shape in shapes.items():
            check_shape(name, shape, model)
            static_name = static_names.get(name, "")
            layer = layer_kind(name, static_name=static_name or None)
            is_model = is_model or layer is not None
            if len(shape) > 2 or (len(shape) == 2 and layer is None):
                transposed[name] = False
                unknown += [name] if len(shape) > 2 or not _KEPT_CLASSES.match(static_name) else []
            else:
                transposed[name] = is_transposed(name, shape, layer, vocab_first=model.vocab_first)
        matrices = [name for name in unknown if len(shapes[name]) == 2]
        if matrices and is_model and not keep_unknown:
            raise FormatError(
                f"{matrices[0]}: got shape {shapes[matrices[0]]} of an unknown layer, expected "
                "names of Llama, Qwen2, Mixtral or Gemma, or static names; pass names='own' to "
                "read such weights in Paddle's layout"
            )
    return transposed, unknown
