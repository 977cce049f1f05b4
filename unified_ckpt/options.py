"""The options of every call, with their defaults. Only this module validates them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.functional_validators import BeforeValidator, field_validator, model_validator

from unified_ckpt.base_options import BaseOptions
from unified_ckpt.core.keywords import as_text, check_options, options_or_default
from unified_ckpt.errors import FormatError
from unified_ckpt.format.encoded_tensors import Compression
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.format.renames import Rule, check_renames
from unified_ckpt.storage_options import StorageOptions

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
    """How to save."""

    model_dtype: ModelDtype | None = None
    """The dtype in which floating-point tensors of the model are stored. Tensors of another dtype
    are also stored in `master_weights`, unchanged.
    """
    parts: tuple[str, ...] | None = None
    """Stores only these parts; see also `omit`. The model may be left out if master weights are
    stored. Model tensors that do not equal their rounded master weight are then stored too.
    """
    omit: tuple[str, ...] = ()
    """Stores all parts but these. Set `parts` or `omit`, not both."""
    max_file_bytes: Annotated[int, Field(ge=1)] | None = None
    """The tensors of a file have at most this many bytes. A larger tensor gets its own file. None
    is 1/64 of the part, within 512 MB and 5 GB, and one file for a part of up to 1 GB.
    """
    check_replicas: Literal["first", "always", "warn", "never"] = "first"
    """What ranks that share tensors compare. "always" compares all at every save, "never" none.
    "first" refuses differences at the first save of a layout, and records most of the later ones;
    "warn" only records. "always" also makes other values that differ between ranks an error.
    """
    fsync: bool = True
    """Syncs files before the commit, so that the checkpoint survives a power failure. Without it, a
    power failure may lose the checkpoint, after what it replaced. A load of what is left then fails
    or gives right values.
    """
    if_exists: IfExists = "error"
    """What to do if `path` holds a checkpoint: "error" raises, "keep" saves nothing, "replace"
    replaces it. "keep_complete" keeps only a complete one with the parts to be saved.
    """
    timeout_seconds: Timeout = 600.0
    """Seconds without a heartbeat of any rank after which the save fails on all ranks."""
    write_alignment: Annotated[int, Field(ge=0)] | None = None
    """The size in bytes of a file's blocks, each of which one node writes, for folders that several
    nodes share: 1 for no limit, 0 for whole files, None for what the file system needs.
    """
    compression: Compression = "none"
    """How master weights and Adam's moments are stored; the model is not compressed. "lossless"
    stores float32 master weights in 16 bits beside a bfloat16 model, without loss. "O1" also stores
    moments in 8 bits each, "O2" in 6 and 4 bits.
    """
    host_bytes: Annotated[int, Field(ge=0)] | None = None
    """The snapshot of a background save takes at most this many bytes of host memory per rank; None
    for no limit. The buffers of `save` are not included. Bytes that do not fit are written before
    the call returns, see `SaveReport.blocked_seconds`.
    """
    node_copies: Count = 1
    """Each byte is stored on at least this many nodes, if each node has its own folder. One node
    fewer may then be lost. Has no effect if all ranks see one folder.
    """

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

    `rename`, `layers` and `conversion_fn` apply to any format, in this order.
    """

    _REQUIRES: ClassVar = {"layer_dim": ("layers",)}
    _REMOVED: ClassVar = {
        "layer_lists": "layers= detects the lists; stack others by rename= or conversion_fn="
    }

    format: str | None = None
    """The format's name as in `unified-ckpt convert --help`; None detects it."""
    config: PathText | None = None
    """The path of a Hugging Face `config.json` or of a folder with one, for formats whose names or
    shapes depend on the model's.
    """
    names: Literal["auto", "huggingface", "own"] = "auto"
    """Tensor names: "huggingface" for those of Hugging Face, an error if the model is unknown;
    "own" for those of the format; "auto" for Hugging Face names if the model is known.
    """
    optimizer_order: tuple[tuple[str, ...], ...] | None = None
    """The parameter names of each param group in the order of the saved optimizer, for optimizer
    state that is stored by position.
    """
    rename: PathText | tuple[Rule, ...] | None = None
    """Rules as mappings, or the path of a TOML or JSON file with rules."""
    layers: Literal["stacked", "unstacked"] | None = None
    """How to show identical layers: "stacked" stacks their tensors along dim `layer_dim`,
    "unstacked" splits them. The lists of layers are detected by their names.
    """
    layer_dim: int = 0
    """The dim along which layers are stacked or split."""
    conversion_fn: str | None = None
    """A function, as "package.module:function". It is imported and called with {part: {name: tensor
    that is read when indexed}}, tied tensors under all their names, and returns the same structure.
    """

    @field_validator("rename", mode="before")
    @classmethod
    def _rules(cls, value: object) -> object:
        """Parse rules as from a file, with the same FormatError."""
        if value is None or isinstance(value, str | os.PathLike):
            return value
        return check_renames({"rules": value}, file="SourceOptions(rename=...)").rules


class LoadOptions(BaseOptions):
    """How to load."""

    parts: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Loads only these parts; other targets are left unchanged."""
    source: SourceOptions = SourceOptions()
    """How to read a checkpoint of another engine."""
    verify: Literal["read", "full", "off"] = "read"
    """Which digests of 1 MiB blocks are compared: "read" of blocks that are read whole, "full" of
    all blocks from which anything is needed, "off" none. Sizes and headers are always checked
    first.
    """
    cast: bool = False
    """Allows targets whose dtype cannot hold every stored value, which is rounded. A wider float,
    or a wider integer, needs no permission.
    """
    hyperparameters: Literal["checkpoint", "current"] = "checkpoint"
    """Whether the optimizer gets the saved hyperparameters ("checkpoint") or keeps its own."""
    max_over_read: Annotated[float, Field(ge=1)] = 1.25
    """A node reads at most this multiple of what it needs, besides short gaps in declared boxes."""
    share_reads: Literal["auto", "always", "never"] = "auto"
    """On a folder of several nodes, whether one node reads each byte for the others. "auto" does so
    on network file systems if they need the same bytes.
    """
    data_dims: tuple[str, ...] | None = None
    """The mesh dims along which ranks read different data, by which `rank_extra` is placed on
    another mesh. None recognizes them by their names.
    """
    timeout_seconds: Timeout = 600.0
    """Seconds without a heartbeat of any rank after which the load fails on all ranks."""

    @model_validator(mode="after")
    def _check(self) -> LoadOptions:
        if self.hyperparameters != "checkpoint" and not self.loads(OPTIMIZER):
            raise ValueError(f"hyperparameters requires {OPTIMIZER} in parts={self.parts}")
        return self

    def loads(self, part: str) -> bool:
        """Return whether a load into this part reads it."""
        return self.parts is None or part in self.parts


class ConvertOptions(BaseOptions):
    """How to convert."""

    to: str = "unified"
    """The format to write; "unified" is the format of `save`."""
    source: SourceOptions = SourceOptions()
    """How to read."""
    parts: tuple[str, ...] | None = None
    """Writes only these parts."""
    model_dtype: ModelDtype | None = None
    """The dtype in which the model's floating-point tensors are written."""
    adapter: PathText | None = None
    """The path of a LoRA adapter to merge into the model. Only the model is then written."""
    compression: Compression = "none"
    """As in `SaveOptions`; "none" decompresses. Formats other than "unified" take only "none".
    "paddle" also takes "O1" and "O2", PaddleNLP's own quantization of moments.
    """
    compare: bool = True
    """Checks that rounded master weights equal the model, if the source has both."""
    max_file_bytes: Annotated[int, Field(ge=1)] | None = None
    """As in `SaveOptions`; 5 GB for "huggingface" and "maxtext". "paddleformers" takes none."""
    if_exists: IfExists = "error"
    """As in `SaveOptions`. For formats other than "unified", the target must not exist."""
    fsync: bool = True
    """As in `SaveOptions`."""
    timeout_seconds: Timeout = 600.0
    """As in `SaveOptions`."""

    @model_validator(mode="after")
    def _check(self) -> ConvertOptions:
        parts = self.parts if self.adapter is None else (MODEL,)
        _check_compression(self.compression, parts is None or {MASTER, OPTIMIZER} & set(parts))
        return self


class ManagerOptions(BaseOptions):
    """When to save, what to keep, how to handle failures, and where to load from.

    A step is saved if any option requests it, and kept if any `keep_...` option keeps it. Without
    such an option all steps are kept. Full and model-only checkpoints are counted separately. The
    latest, the latest full and the best checkpoint are always kept.

    The `load_...` options apply if the root has no valid step.
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
    """False disables all saves and loads."""
    interval_steps: Count | None = None
    """Saves at multiples of this number of steps, but not at step 0."""
    interval_seconds: Timeout | None = None
    """Seconds after the last save, by rank 0's clock."""
    steps: frozenset[Annotated[int, Field(ge=0)]] = frozenset()
    """Saves at these steps."""
    on_start: bool = False
    """Saves at the first step of a fresh run."""
    on_completion: bool = True
    """Saves in `finish`."""
    continuous: bool = False
    """Saves as soon as the last save has ended, at least `interval_seconds` apart if set."""
    on_preemption: bool = True
    """Saves on SIGTERM, SIGINT, `request_stop`, or SLURM's SIGUSR1 if the program has no handler
    for it. All ranks save at the same step.
    """
    save_on_exception: bool = False
    """Saves after an exception, if all ranks have completed the same step."""

    keep_latest: Count | None = None
    """The number of latest checkpoints to keep."""
    keep_every_steps: Count | None = None
    """Keeps the steps that are multiples of this number."""
    keep_every_seconds: Timeout | None = None
    """Seconds between kept checkpoints."""
    keep_best: Count | None = None
    """The number of best checkpoints to keep, by `best_metric`."""
    best_metric: str | None = None
    """A name in the `metrics` of saves."""
    best_mode: Literal["min", "max"] = "min"
    """Whether lower or higher values of `best_metric` are better."""
    keep_latest_model_only: Count | None = None
    """`keep_latest` of checkpoints without an optimizer; None for the same number."""
    keep_every_steps_model_only: Count | None = None
    """`keep_every_steps` of checkpoints without an optimizer; None for the same number."""
    trash_directory: PathText | None = None
    """A folder on the root's file system to which other checkpoints are moved instead of being
    deleted. A relative path is below the root.
    """

    asynchronous: bool = True
    """Saves in the background."""
    lazy: bool = False
    """Copies tensors during the next forward and backward pass, see `Checkpointer.save_async`."""
    in_flight: Literal["wait", "skip"] = "wait"
    """A save that is due during another one waits for it ("wait") or is skipped ("skip")."""
    retries: Annotated[int, Field(ge=0)] = 2
    """The number of retries of a failed save, after `retry_seconds`, twice that, and so on."""
    retry_seconds: Delay = 1.0
    """Seconds before the first retry."""
    raise_after: Count = 3
    """The number of failed saves in a row after which the error is raised."""
    notice_seconds: Timeout = 1.0
    """Seconds between a rank's checks for stop requests; more in large jobs."""
    margin_steps: Count = 2
    """Steps from a stop request to the step at which all ranks stop. It must exceed the number of
    steps that one rank can be ahead of another.
    """

    local_directory: PathText | None = None
    """A folder on a local disk or in memory, used by one run at a time. It gets a save every
    `local_interval_steps`. Saves to the root are written there first, and copied to the root in the
    background.
    """
    local_interval_steps: Count | None = None
    """Steps between saves to `local_directory`. Set both or neither."""
    keep_latest_local: Count = 1
    """The number of saves that stay in `local_directory`, beside those still to be copied."""

    load_parameters_path: PathText | None = None
    """Weights to start from with a fresh optimizer."""
    load_full_state_path: PathText | None = None
    """The whole state of another run."""
    load_adapters_path: PathText | None = None
    """A PEFT folder, or the parent folder of several. It fills the parts `adapter_model…`, also
    beside `load_parameters_path`.
    """
    load_source: SourceOptions | None = None
    """How to read `load_parameters_path` or `load_full_state_path`; None for the `source` of the
    load options.
    """
    step_prefix: Annotated[str, Field(pattern=_STEP_PREFIX)] = "checkpoint-"
    """The prefix of the folder names, which ends in no digit. "" for bare numbers."""

    @model_validator(mode="after")
    def _check(self) -> ManagerOptions:
        if self.load_parameters_path and self.load_full_state_path:
            raise ValueError("set load_parameters_path or load_full_state_path, not both")
        if self.load_adapters_path and self.load_full_state_path:
            raise ValueError("load_adapters_path goes with load_parameters_path, not a full state")
        return self


@dataclass(frozen=True, slots=True)
class RunOptions:
    """All options of a run as one value, such as the result of `from_paddle`."""

    manager: ManagerOptions = field(default_factory=ManagerOptions)
    save: SaveOptions = field(default_factory=SaveOptions)
    load: LoadOptions = field(default_factory=LoadOptions)
    root: str | None = None
    """The absolute path or URL of the folder for the checkpoints; None if it is not configured."""
    storage: StorageOptions | None = None
    """How to reach the buckets of the run."""

    @property
    def source(self) -> SourceOptions:
        """How to read the paths that a fresh run starts from."""
        return self.manager.load_source or self.load.source


def combine_options(
    options: ManagerOptions | RunOptions | None,
    *,
    save: SaveOptions | None,
    load: LoadOptions | None,
    storage: StorageOptions | None = None,
) -> RunOptions:
    """Return separate options as one value. Raises FormatError for what is given twice."""
    check_options(storage, StorageOptions, "storage_options")
    if not isinstance(options, RunOptions):
        return RunOptions(
            options_or_default(options, ManagerOptions),
            options_or_default(save, SaveOptions, "save_options"),
            options_or_default(load, LoadOptions, "load_options"),
            storage=storage,
        )
    if save is not None or load is not None:
        name = "save_options" if save is not None else "load_options"
        raise FormatError(
            f"{name}: got it beside the options of a whole run, expected one of them; pass "
            f"{name.removesuffix('_options')}= to from_maxtext or from_paddle"
        )
    return options if storage is None else replace(options, storage=storage)


def with_root(options: RunOptions, root: str | None) -> RunOptions:
    """Return the options with this root. Raises FormatError for no root, or for two."""
    if root == "" or not (root or options.root):
        raise FormatError("root: got none, expected the folder of the checkpoints")
    absolute = root if root is None or "://" in root else os.path.abspath(root)
    if root is not None and options.root not in (None, absolute):
        raise FormatError(f"root: got {root}, expected {options.root} as configured; pass one")
    return replace(options, root=root or options.root)
