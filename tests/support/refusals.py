"""Shared by tests of bad input: one error for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

import unified_ckpt as uc

HARD = 60.0  # seconds; no rank may take longer


def same_error(
    errors: Sequence[object], kind: type[uc.CheckpointError], match: str
) -> uc.CheckpointError:
    """Check that every rank raised this class with one text."""
    for error in errors:
        assert type(error) is kind, f"{error!r}"
        with pytest.raises(kind, match=match):
            raise error
    assert len({str(error) for error in errors}) == 1
    assert isinstance(errors[0], uc.CheckpointError)
    return errors[0]


def error_of(act: Callable[[], object]) -> uc.CheckpointError | None:
    """Return the package's error that a call raises, or None."""
    try:
        act()
    except uc.CheckpointError as error:
        return error
    return None


# Formats that are recognized but not read: entry of a folder, or file -> text of the error.
REFUSED = {
    "model.gguf": r"GGUF .*is not supported(.|\n)*gguf_file=",
    "megatron.nemo": r"NeMo is not supported(.|\n)*export_ckpt",
    "model.pdparams": r"a paddle.save pickle is not supported(.|\n)*model_state\*\.pdparams",
    "flax_model.msgpack": r"Flax is not supported(.|\n)*from_flax=True",
    "tf_model.h5": r"TensorFlow is not supported(.|\n)*from_tf=True",
    "model.ckpt.index": r"TensorFlow is not supported(.|\n)*from_tf=True",
    "model_index.json": r"a diffusers pipeline is not supported(.|\n)*each component",
    "model.onnx": r"ONNX.*is not supported(.|\n)*exported from",
}
