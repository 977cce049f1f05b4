"""The options of every call, with their defaults. Only this module validates them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.functional_validators import BeforeValidator, field_validator, model_validator

from unified_ckpt.base_options import BaseOptions
from unified_ckpt.core.keywords import as_text, options_or_default
from unified_ckpt.errors import FormatError
from unified_ckpt.format.encoded_tensors import Compression
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.format.renames import Rule, check_renames

Timeout = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Delay = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_PATHS = ("load_parameters_path", "load_full_state_path", "load_adapters_path")
_STEP_PREFIX = r"^(?:[A-Za-z_]|[A-Za-z0-9_][A-Za-z0-9_.-]*[A-Za-z_.-])?$"
PathText = Annotated[str, Field(strict=True, min_length=1), BeforeValidator(as_text)]

ModelDtype = Literal["float32", "bfloat16", "float16", "float64"]
IfExists = Literal["error", "keep", "keep_complete", "replace"]


def _check_compression(compression: Compression, is_used: object) -> None:
    if compression != "none" and not is_used:
        raise ValueError(f"compression={compression!r} requires {MASTER} or {OPTIMIZER}; omit it")


class SaveOptions(BaseOptions):
    """How to save.

    `model_dtype`: the dtype in which floating-point tensors of the model are stored. Tensors of
    another dtype are also stored in `master_weights`, unchanged.

    `parts`: stores only these parts. `omit`: stores all parts but these. Set one of the two. The
    model may be left out if master weights are stored. Model tensors that do not equal their
    rounded master weight are then stored too.

    `max_file_bytes`: the size limit of a file. A larger tensor gets its own file.

    `check_replicas`: "always" compares tensors that ranks share at every save, "never" compares
    none. "first" refuses differences at the first save of a layout, and records most of the later
    ones. "always" also makes other values that differ between ranks an error.

    `fsync`: syncs files before the commit, so that the checkpoint survives a power failure.

    `if_exists`: if `path` holds a checkpoint, "error" raises, "keep" saves nothing and "replace"
    replaces it. "keep_complete" keeps only a complete one with the parts to be saved.

    `timeout_seconds`: the save fails on all ranks after this time without a heartbeat of any rank.

    `write_alignment`: the bytes of a block of a file that only one node writes, for folders that
    several nodes share: 1 for no limit, 0 for whole files, None for what the file system needs.

    `compression`: how master weights and Adam's moments are stored; the model is not compressed.
    "lossless" stores float32 master weights in 16 bits beside a bfloat16 model, without loss. "O1"
    also stores moments in 8 bits each, "O2" in 6 and 4 bits.

    `host_bytes`: the limit of host memory for the snapshot of a background save, in bytes per rank;
    None for no limit. The buffers of `save` are not included. Bytes that do not fit are written
    before the call returns, see `SaveReport.blocked_seconds`.

    `node_copies`: if each node has its own folder, stores each byte on at least this many nodes.
    One node fewer may then be lost. Has no effect if all ranks see one folder.
    """

    model_dtype: ModelDtype | None = None
    parts: tuple[str, ...] | None = None
    omit: tuple[str, ...] = ()
    max_file_bytes: Annotated[int, Field(ge=1)] = 5_000_000_000
    check_replicas: Literal["first", "always", "never"] = "first"
    fsync: bool = True
    if_exists: IfExists = "error"
    timeout_seconds: Timeout = 600.0
    write_alignment: Annotated[int, Field(ge=0)] | None = None
    compression: Compression = "none"
    host_bytes: Annotated[int, Field(ge=0)] | None = None
    node_copies: Count = 1

    @field_validator("model_dtype", mode="before")
    @classmethod
    def _dtype_name(cls, value: object) -> object:
        return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value

    @model_validator(mode="after")
    def _check(self) -> SaveOptions:
        if self.parts is not None and self.omit:
            raise ValueError(f"got parts={self.parts} and omit={self.omit}, expected one of them")
        _check_compression(self.compression, self.stores(MASTER) or self.stores(OPTIMIZER))
        return self

    def stores(self, part: str) -> bool:
        """Return whether a save of this part stores it."""
        return part not in self.omit and (self.parts is None or part in self.parts)


def with_default_if_exists(options: SaveOptions, *, if_exists: IfExists) -> SaveOptions:
    """Return the options with this `if_exists` unless they set one."""
    if "if_exists" in options.model_fields_set:
        return options
    return options.model_copy(update={"if_exists": if_exists})


class SourceOptions(BaseOptions):
    """How to read a checkpoint of another engine, or any checkpoint under other names.

    `format`: the format's name as in `unified-ckpt convert --help`; None detects it.

    `config`: a Hugging Face `config.json` or a folder with one, for formats whose names or shapes
    depend on the model's.

    `names`: "huggingface" for the tensor names of Hugging Face, an error if the model is unknown;
    "own" for the names of the format; "auto" for Hugging Face names if the model is known.

    `optimizer_order`: for optimizer state stored by position, the parameter names of each param
    group in the order of that optimizer.

    The options below apply to any format, in this order.

    `rename`: rules as mappings, or the path of a TOML or JSON file with rules.

    `layers`: "stacked" stacks the tensors of identical layers along dim `layer_dim`, "unstacked"
    splits them. `layer_lists` names the lists of layers; None detects them.

    `conversion_fn`: "package.module:function". It is imported and called with
    {part: {name: tensor that is read when indexed}}, tied tensors under all their names, and
    returns the same structure.
    """

    _REQUIRES: ClassVar = {"layer_dim": ("layers",), "layer_lists": ("layers",)}

    format: str | None = None
    config: PathText | None = None
    names: Literal["auto", "huggingface", "own"] = "auto"
    optimizer_order: tuple[tuple[str, ...], ...] | None = None
    rename: PathText | tuple[Rule, ...] | None = None
    layers: Literal["stacked", "unstacked"] | None = None
    layer_dim: int = 0
    layer_lists: tuple[str, ...] | None = None
    conversion_fn: str | None = None

    @field_validator("rename", mode="before")
    @classmethod
    def _rules(cls, value: object) -> object:
        """Parse rules as from a file, with the same FormatError."""
        if value is None or isinstance(value, str | os.PathLike):
            return value
        return check_renames({"rules": value}, file="SourceOptions(rename=...)").rules


class LoadOptions(BaseOptions):
    """How to load.

    `parts`: loads only these parts; other targets are left unchanged. `source`: how to read a
    checkpoint of another engine.

    `verify`: "read" verifies the digests of 1 MiB blocks that are read whole. "full" reads and
    verifies all blocks from which anything is needed. "off" verifies none. Sizes and headers are
    always checked first.

    `cast`: allows targets whose dtype cannot hold every stored value, which is rounded. A wider
    float, or a wider integer, needs no permission.

    `hyperparameters`: "checkpoint" loads those of the checkpoint, "current" keeps those of the
    optimizer.

    `max_over_read`: the limit of the bytes that a node reads, as a multiple of those it needs.

    `share_reads`: on a folder of several nodes, whether one node reads each byte for the others.
    "auto" does so on network file systems if they need the same bytes.

    `data_dims`: the mesh dims along which ranks read different data, by which `rank_extra` is
    placed on another mesh. None goes by their names.

    `timeout_seconds`: the load fails on all ranks after this time without a heartbeat of any rank.
    """

    parts: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    source: SourceOptions = SourceOptions()
    verify: Literal["read", "full", "off"] = "read"
    cast: bool = False
    hyperparameters: Literal["checkpoint", "current"] = "checkpoint"
    max_over_read: Annotated[float, Field(ge=1)] = 1.25
    share_reads: Literal["auto", "always", "never"] = "auto"
    data_dims: tuple[str, ...] | None = None
    timeout_seconds: Timeout = 600.0

    @model_validator(mode="after")
    def _check(self) -> LoadOptions:
        if self.hyperparameters != "checkpoint" and not self.loads(OPTIMIZER):
            raise ValueError(f"hyperparameters requires {OPTIMIZER} in parts={self.parts}")
        return self

    def loads(self, part: str) -> bool:
        """Return whether a load into this part reads it."""
        return self.parts is None or part in self.parts


class ConvertOptions(BaseOptions):
    """How to convert.

    `to`: the format to write; "unified" is the format of `save`. `source`: how to read. `parts`:
    writes only these parts.

    `model_dtype`: the dtype in which the model's floating-point tensors are written.

    `compare`: checks that rounded master weights equal the model, if the source has both.

    `adapter`: the path of a LoRA adapter to merge into the model. Only the model is then written.

    `compression`: how master weights and Adam's moments are stored, as in `SaveOptions`. "none"
    decompresses them. Formats other than "unified" take only "none". "paddle" also takes "O1" and
    "O2", PaddleNLP's own quantization of moments.

    `max_file_bytes`, `if_exists`, `fsync`, `timeout_seconds`: as in `SaveOptions`. For formats
    other than "unified", the target must not exist.
    """

    to: str = "unified"
    source: SourceOptions = SourceOptions()
    parts: tuple[str, ...] | None = None
    model_dtype: ModelDtype | None = None
    adapter: PathText | None = None
    compression: Compression = "none"
    compare: bool = True
    max_file_bytes: Annotated[int, Field(ge=1)] = 5_000_000_000
    if_exists: IfExists = "error"
    fsync: bool = True
    timeout_seconds: Timeout = 600.0

    @model_validator(mode="after")
    def _check(self) -> ConvertOptions:
        parts = self.parts if self.adapter is None else (MODEL,)
        _check_compression(self.compression, parts is None or {MASTER, OPTIMIZER} & set(parts))
        return self


class ManagerOptions(BaseOptions):
    """When to save, what to keep, how to handle failures, and where to load from.

    **When to save.** A step is saved if any of these options requests it.
    `interval_steps`: at its multiples, but not at step 0.
    `interval_seconds`: this time after the last save, by rank 0's clock.
    `steps`: at these steps.
    `on_start`: at the first step of a fresh run.
    `on_completion`: in `finish`.
    `continuous`: as soon as the last save has ended, at least `interval_seconds` apart if set.
    `on_preemption`: on SIGTERM, SIGINT, `request_stop`, or SLURM's SIGUSR1 if the program has no
    handler for it. All ranks save at the same step.
    `save_on_exception`: after an exception, if all ranks have completed the same step.
    `enabled`: False disables all saves and loads.

    **What to keep.** A step is kept if any of these options keeps it. If none is set, all are kept.
    `keep_latest`, `keep_every_steps`, `keep_every_seconds` and `keep_best` (by `best_metric`) count
    full and model-only checkpoints separately. `keep_latest_model_only` and
    `keep_every_steps_model_only` are the limits of model-only ones. The latest, the latest full and
    the best checkpoint are always kept.
    `trash_directory`: a folder on the root's file system to which other checkpoints are moved
    instead of being deleted. A relative path is below the root.

    **How to save.**
    `asynchronous`: saves in the background. `lazy`: see `Checkpointer.save_async`.
    `in_flight`: a save that is due during another one waits for it ("wait") or is skipped ("skip").
    `retries`: the number of retries of a failed save, after `retry_seconds`, twice that, and so on.
    `raise_after`: raises the error after this many failed saves in a row.
    `notice_seconds`: how often a rank checks for stop requests; less often in large jobs.
    `margin_steps`: the steps from a stop request to the step at which all ranks stop. It must
    exceed the number of steps that one rank can be ahead of another.

    **Two tiers.** Set both `local_directory` and `local_interval_steps`, or neither.
    `local_directory`: a folder on a local disk or in memory, used by one run at a time. It gets a
    save every `local_interval_steps`. Saves to the root are written there first, and copied to the
    root in the background.
    `keep_latest_local`: the number of saves that stay there, beside those still to be copied.

    **Where to load from**, if the root has no valid step.
    `load_parameters_path`: weights to start from with a fresh optimizer.
    `load_full_state_path`: the whole state of another run.
    `load_adapters_path`: a PEFT folder, or the parent folder of several. It fills the parts
    `adapter_model…`, also beside `load_parameters_path`.
    `load_source`: how to read the first two paths; None for the `source` of the load options.

    `step_prefix`: the prefix of the folder names, which ends in no digit. "" for bare numbers.
    """

    _REQUIRES: ClassVar = {
        **dict.fromkeys(_PATHS, ("enabled",)),
        **dict.fromkeys(("keep_best", "best_mode"), ("best_metric",)),
        **dict.fromkeys(("lazy", "in_flight"), ("asynchronous",)),
        "retry_seconds": ("retries",),
        "local_directory": ("local_interval_steps",),
        **dict.fromkeys(("local_interval_steps", "keep_latest_local"), ("local_directory",)),
    }

    enabled: bool = True
    interval_steps: Count | None = None
    interval_seconds: Timeout | None = None
    steps: frozenset[Annotated[int, Field(ge=0)]] = frozenset()
    on_start: bool = False
    on_completion: bool = True
    continuous: bool = False
    on_preemption: bool = True
    save_on_exception: bool = False

    keep_latest: Count | None = None
    keep_every_steps: Count | None = None
    keep_every_seconds: Timeout | None = None
    keep_best: Count | None = None
    best_metric: str | None = None
    best_mode: Literal["min", "max"] = "min"
    keep_latest_model_only: Count | None = None
    keep_every_steps_model_only: Count | None = None
    trash_directory: PathText | None = None

    asynchronous: bool = True
    lazy: bool = False
    in_flight: Literal["wait", "skip"] = "wait"
    retries: Annotated[int, Field(ge=0)] = 2
    retry_seconds: Delay = 1.0
    raise_after: Count = 3
    notice_seconds: Timeout = 1.0
    margin_steps: Count = 2

    local_directory: PathText | None = None
    local_interval_steps: Count | None = None
    keep_latest_local: Count = 1

    load_parameters_path: PathText | None = None
    load_full_state_path: PathText | None = None
    load_adapters_path: PathText | None = None
    load_source: SourceOptions | None = None
    step_prefix: Annotated[str, Field(pattern=_STEP_PREFIX)] = "checkpoint-"

    @model_validator(mode="after")
    def _check(self) -> ManagerOptions:
        if self.load_parameters_path and self.load_full_state_path:
            raise ValueError("set load_parameters_path or load_full_state_path, not both")
        if self.load_adapters_path and self.load_full_state_path:
            raise ValueError("load_adapters_path goes with load_parameters_path, not a full state")
        return self


@dataclass(frozen=True, slots=True)
class RunOptions:
    """All options of a run as one value, such as the result of `from_paddle`.

    `root`: the absolute path of the folder for the checkpoints; None if it is not configured.
    """

    manager: ManagerOptions = field(default_factory=ManagerOptions)
    save: SaveOptions = field(default_factory=SaveOptions)
    load: LoadOptions = field(default_factory=LoadOptions)
    root: str | None = None

    @property
    def source(self) -> SourceOptions:
        """How to read the paths that a fresh run starts from."""
        return self.manager.load_source or self.load.source


def combine_options(
    options: ManagerOptions | RunOptions | None,
    *,
    save: SaveOptions | None,
    load: LoadOptions | None,
) -> RunOptions:
    """Return separate options as one value. Raises FormatError for what is given twice."""
    if not isinstance(options, RunOptions):
        return RunOptions(
            options_or_default(options, ManagerOptions),
            options_or_default(save, SaveOptions, "save_options"),
            options_or_default(load, LoadOptions, "load_options"),
        )
    if save is not None or load is not None:
        name = "save_options" if save is not None else "load_options"
        raise FormatError(
            f"{name}: got it beside the options of a whole run, expected one of them; pass "
            f"{name.removesuffix('_options')}= to from_maxtext or from_paddle"
        )
    return options


def with_root(options: RunOptions, root: str | None) -> RunOptions:
    """Return the options with this root. Raises FormatError for no root, or for two."""
    if root == "" or not (root or options.root):
        raise FormatError("root: got none, expected the folder of the checkpoints")
    if root is not None and options.root not in (None, os.path.abspath(root)):
        raise FormatError(f"root: got {root}, expected {options.root} as configured; pass one")
    return replace(options, root=root or options.root)
