"""What callers choose, with every default in one place. Parsed here; trusted everywhere else."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Timeout = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SaveOptions(_Options):
    """How to save.

    `model_dtype`: floating-point tensors of the model are stored in it, and what that changes is kept whole in `master_weights`.
    `parts`: only these are written. `max_file_bytes`: bound of one file; a larger tensor has a file of its own. `check_replicas`:
    compare what replicas hold at the first save of a layout, at every save, or never. `if_exists`: what to do where a committed
    checkpoint is in the way. `timeout_seconds`: without word from a rank for this long, the save fails on all of them.
    """

    model_dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    parts: tuple[str, ...] | None = None
    max_file_bytes: Annotated[int, Field(ge=1)] = 5_000_000_000
    check_replicas: Literal["first", "always", "never"] = "first"
    fsync: bool = True
    if_exists: Literal["error", "keep", "replace"] = "error"
    timeout_seconds: Timeout = 600.0

    @field_validator("model_dtype", mode="before")
    @classmethod
    def _dtype_name(cls, value: object) -> object:
        return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


class LoadOptions(_Options):
    """How to load.

    `verify`: "read" checks the digests of the blocks that were read whole, "full" also reads the rest of the others, "off" none;
    sizes and headers are always checked first. `cast`: whether a tensor may be read into another dtype. `hyperparameters`: those of
    the checkpoint, or the optimizer's own. `max_over_read`: bytes read on this machine over bytes wanted on it.
    """

    verify: Literal["read", "full", "off"] = "read"
    cast: bool = False
    hyperparameters: Literal["checkpoint", "current"] = "checkpoint"
    max_over_read: Annotated[float, Field(ge=1)] = 1.25
    timeout_seconds: Timeout = 600.0
