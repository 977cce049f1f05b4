"""What tests of bad input share: one error for all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import unified_ckpt as uc

HARD = 60.0  # seconds; no rank may take longer


def same_error(
    found: Sequence[object], kind: type[uc.CheckpointError], match: str
) -> uc.CheckpointError:
    """Every rank raised this very class, with one text."""
    for error in found:
        assert type(error) is kind, f"{error!r}"
        with pytest.raises(kind, match=match):
            raise error
    assert len({str(error) for error in found}) == 1
    assert isinstance(found[0], uc.CheckpointError)
    return found[0]


# Formats that are known and not read: an entry of a folder, or a file -> what the error says of it.
REFUSED = {
    "model.gguf": r"is GGUF(.|\n)*gguf_file=",
    "megatron.nemo": r"is NeMo(.|\n)*export_ckpt",
    "model.pdparams": r"is a pickle of paddle.save(.|\n)*model_state\*\.pdparams",
    "flax_model.msgpack": r"is Flax(.|\n)*from_flax=True",
    "tf_model.h5": r"is TensorFlow(.|\n)*from_tf=True",
    "model.ckpt.index": r"is TensorFlow(.|\n)*from_tf=True",
    "model_index.json": r"is a pipeline of diffusers(.|\n)*each component",
    "model.onnx": r"is ONNX(.|\n)*exported from",
}
