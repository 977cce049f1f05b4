"""What callers choose, with every default in one place. Parsed here; trusted everywhere else."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from unified_ckpt.format.renames import Rule, check_renames

Timeout = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Delay = Annotated[float, Field(ge=0, allow_inf_nan=False)]


ModelDtype = Literal["float32", "bfloat16", "float16", "float64"]
IfExists = Literal["error", "keep", "keep_complete", "replace"]


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SaveOptions(_Options):
    """How to save.

    `model_dtype`: floating-point tensors of the model are stored in it, and what that changes is
    kept whole in `master_weights`.
    `parts`: only these of the state are written. The model may be left out where master weights are
    written; beside these are then the tensors of the model that are not their master, rounded.
    `max_file_bytes`: bound of one file; a larger tensor has a file of its own.
    `check_replicas`: compare what replicas hold at the first save of a layout, at every save, or
    never. `if_exists`: what to do where a committed checkpoint is in the way; "keep_complete" keeps
    one of which all files are there and which has the parts that are being saved, and replaces
    another. `timeout_seconds`: without word from a rank for this long, the save fails on all of
    them.
    `write_alignment`: where several machines write to one folder, no two of them write in one block
    of so many bytes of a file; 0: nor in one file; None: what the kind of file system needs. The
    first save to a folder decides. `node_copies`: where machines have folders of their own, each
    byte is stored on at least so many of them, so that all but one of those may be lost; means
    nothing where all ranks see one folder.
    """

    model_dtype: ModelDtype | None = None
    parts: tuple[str, ...] | None = None
    max_file_bytes: Annotated[int, Field(ge=1)] = 5_000_000_000
    check_replicas: Literal["first", "always", "never"] = "first"
    fsync: bool = True
    if_exists: IfExists = "error"
    timeout_seconds: Timeout = 600.0
    write_alignment: Annotated[int, Field(ge=0)] | None = None
    node_copies: Count = 1

    @field_validator("model_dtype", mode="before")
    @classmethod
    def _dtype_name(cls, value: object) -> object:
        return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


def with_default_if_exists(options: SaveOptions, *, if_exists: IfExists) -> SaveOptions:
    """The options with this `if_exists`, where they do not say one themselves."""
    return (
        options
        if "if_exists" in options.model_fields_set
        else options.model_copy(update={"if_exists": if_exists})
    )


class SourceOptions(_Options):
    """How to read a checkpoint: one that others wrote, or any under other names.

    `format`: its name, as `unified-ckpt convert --help` lists them, where it is not to be found
    out. `config`: a Hugging Face
    `config.json`, or a folder that has one, for formats whose names or shapes need the model's.
    `names`: Hugging Face's names of tensors ("huggingface"; an error where the model is not known),
    the format's own, or the former where that can be.
    `optimizer_order`: for optimizer state by position, the names of each param group's parameters
    in the order of that optimizer.

    What is read may then be changed, whoever wrote it, in this order. `rename`: a TOML or JSON file
    with rules, or rules: mappings with the keys that they have in such a file. `layers`: the
    tensors of identical layers "stacked" along dim `layer_dim`, or such tensors "unstacked", in
    lists called `layer_lists` where they are not to be found out. `conversion_fn`:
    "package.module:function" of your own, which is imported and called with {part: {name: tensor,
    read when indexed}} and gives the same anew.
    """

    format: str | None = None
    config: str | None = None
    names: Literal["auto", "huggingface", "own"] = "auto"
    optimizer_order: tuple[tuple[str, ...], ...] | None = None
    rename: str | tuple[Rule, ...] | None = None
    layers: Literal["stacked", "unstacked"] | None = None
    layer_dim: int = 0
    layer_lists: tuple[str, ...] | None = None
    conversion_fn: str | None = None

    @field_validator("rename", mode="before")
    @classmethod
    def _rules(cls, value: object) -> object:
        """FormatError as for the rules of a file."""
        if value is None or isinstance(value, str | os.PathLike):
            return None if value is None else os.fspath(value)
        return check_renames({"rules": value}, file="SourceOptions(rename=...)").rules


class LoadOptions(_Options):
    """How to load.

    `parts`: only these are read; the others are left as they are, and tell names. `verify`: "read"
    checks the digests of the blocks that were read whole, "full" also reads the rest of the others,
    "off" none; sizes and headers are always checked first. `cast`: whether a tensor may be read
    into another dtype. `hyperparameters`: those of the checkpoint, or the optimizer's own.
    `max_over_read`: bytes read on this machine over bytes wanted on it. `share_reads`: where
    several machines see one folder, each byte is read by one of them and sent to the others: "auto"
    where they want the same bytes and the file system may be the bound. `timeout_seconds`: without
    word from a rank for this long, the load fails on all of them. `source`: of a checkpoint that
    others wrote, how to read it.
    """

    parts: tuple[str, ...] | None = None
    source: SourceOptions = SourceOptions()
    verify: Literal["read", "full", "off"] = "read"
    cast: bool = False
    hyperparameters: Literal["checkpoint", "current"] = "checkpoint"
    max_over_read: Annotated[float, Field(ge=1)] = 1.25
    share_reads: Literal["auto", "always", "never"] = "auto"
    timeout_seconds: Timeout = 600.0


class ConvertOptions(_Options):
    """How to convert.

    `to`: the format to write; "unified" is ours. `source`: how to read. `parts`: only these are
    written. `model_dtype`: of the model's floating-point tensors, as written. `compare`: whether
    master weights must be the model when cast down, where the source has both.
    `max_file_bytes`, `if_exists`, `fsync`, `timeout_seconds`: as in SaveOptions; what is written in
    another format than ours needs a free name.
    """

    to: str = "unified"
    source: SourceOptions = SourceOptions()
    parts: tuple[str, ...] | None = None
    model_dtype: ModelDtype | None = None
    compare: bool = True
    max_file_bytes: Annotated[int, Field(ge=1)] = 5_000_000_000
    if_exists: IfExists = "error"
    fsync: bool = True
    timeout_seconds: Timeout = 600.0


class ManagerOptions(_Options):
    """When to save, what to keep, what to do about a failure, and where to load from.

    When, each on its own and all united: `interval_steps`: at multiples of it, not at step 0.
    `interval_seconds`: so long after the last save, by rank 0's clock. `steps`: at these.
    `on_start`: at the first step that a fresh run asks about. `on_completion`: in
    `finish`. `continuous`: as soon as the last save is done, at least `interval_seconds` apart
    where that is set. `on_preemption`: on SIGTERM, SIGINT or `request_stop`, at a step on which all
    ranks agree. `enabled`: False saves nothing and loads nothing.

    What to keep, united; none set keeps all: `keep_latest`, `keep_every_steps`,
    `keep_every_seconds`, and `keep_best` by `best_metric` count full and model-only checkpoints
    apart; `keep_latest_model_only` and `keep_every_steps_model_only` are for model-only ones, in
    place of the common limit. The newest, the newest full one and the best always stay.

    `asynchronous`: save in the background; `lazy`: copy on the way, see `save_async`. `in_flight`:
    a save that comes while another runs waits for it, or is skipped. `retries` of a failed save,
    after `retry_seconds`, twice that, and so on; `raise_after` that many saves have failed in a
    row. `notice_seconds`: how often a rank looks whether another one wants to stop; longer by
    itself in large worlds. `margin_steps`: how far ahead the agreed step lies; more than the steps
    that one rank can be ahead of another.

    Two tiers: `local_directory`, on a local disk or in memory, gets a save every
    `local_interval_steps`, and first each one that is due by the options above, which is then
    copied to the root in the background. `keep_latest_local`: what stays there, with what is still
    to be copied. Both or neither are set. One run at a time uses a local directory.

    `load_parameters_path`: start from these weights with a fresh optimizer; `load_full_state_path`:
    from another run's whole state; both only where the own root holds nothing valid. `step_prefix`:
    of the folders' names.
    """

    enabled: bool = True
    interval_steps: Count | None = None
    interval_seconds: Timeout | None = None
    steps: frozenset[Annotated[int, Field(ge=0)]] = frozenset()
    on_start: bool = False
    on_completion: bool = True
    continuous: bool = False
    on_preemption: bool = True

    keep_latest: Count | None = None
    keep_every_steps: Count | None = None
    keep_every_seconds: Timeout | None = None
    keep_best: Count | None = None
    best_metric: str | None = None
    best_mode: Literal["min", "max"] = "min"
    keep_latest_model_only: Count | None = None
    keep_every_steps_model_only: Count | None = None

    asynchronous: bool = True
    lazy: bool = False
    in_flight: Literal["wait", "skip"] = "wait"
    retries: Annotated[int, Field(ge=0)] = 2
    retry_seconds: Delay = 1.0
    raise_after: Count = 3
    notice_seconds: Timeout = 1.0
    margin_steps: Count = 2

    local_directory: str | None = None
    local_interval_steps: Count | None = None
    keep_latest_local: Count = 1

    load_parameters_path: str | None = None
    load_full_state_path: str | None = None
    step_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")] = "checkpoint-"

    @model_validator(mode="after")
    def _check(self) -> ManagerOptions:
        if self.load_parameters_path and self.load_full_state_path:
            raise ValueError(
                "At most one of load_parameters_path or load_full_state_path should be set."
            )
        if (self.load_parameters_path or self.load_full_state_path) and not self.enabled:
            raise ValueError("You must set enable_checkpointing=True to load a checkpoint.")
        if self.keep_best is not None and self.best_metric is None:
            raise ValueError(
                "keep_best needs best_metric: the name of a metric that is passed to save"
            )
        if self.lazy and not self.asynchronous:
            raise ValueError("lazy is a way to save in the background; needed asynchronous=True")
        if (self.local_directory is None) != (self.local_interval_steps is None):
            raise ValueError(
                "local_directory and local_interval_steps are two tiers together; needed both, or neither"
            )
        return self
