"""The training arguments of PaddleNLP and PaddleFormers that are about checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from unified_ckpt.core.keywords import check_type, checked_path, suggestion
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.option_flags import (
    KnownFlags,
    Refusal,
    changed,
    changed_rules,
    is_on,
)
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.options import LoadOptions, ManagerOptions, RunOptions, SaveOptions
from unified_ckpt.runtime.storage.paths import absolute_path

# A flag -> what it leaves out; the first one decides.
_OMITTED = {
    "remove_master_weight": MASTER,
    "skip_save_model_weight": MODEL,
    "enable_all_options": MODEL,
}
_FLAGS = ("async_save", "master_weight_compatible", *_OMITTED)
_REFUSED_FLAGS = {
    "ignore_merge_optimizer": "the optimizer is always merged while it is written",
    "gather_split_param": "split parameters are always gathered",
}
_STAGES = {"O0": "none", "O1": "O1", "O2": "O2"}  # our name of each `ckpt_quant_stage`
_SWITCH, _CONFIG = "unified_checkpoint", "unified_checkpoint_config"
_STAGE, _ROOT = "ckpt_quant_stage", "output_dir"
_STRATEGY, _STEPS, _LIMIT = "save_strategy", "save_steps", "save_total_limit"
_BEST, _METRIC, _GREATER = "load_best_model_at_end", "metric_for_best_model", "greater_is_better"
_MODEL_ONLY, _RESUME = "ignore_save_lr_and_optim", "resume_from_checkpoint"
_ASYNC, _ZERO_COST = "use_async_save", "enable_zero_cost_checkpoint"
_SIGNALS = "output_signal_dir"
_LAST, _WEIGHTS = "save_last_step", "resume_from_huggingface_ckpt"
_FORMAT_FLAGS = ("save_checkpoint_format", "load_checkpoint_format")
_FORMATS = (_SWITCH, "flex_checkpoint", "sharding_io")
_EMA = "store the average as a part, parts={'ema': ...}"
_TWO_TIERS = "pass manager=ManagerOptions(local_directory=..., local_interval_steps=...)"
_NO_WORKERS = "background saves have no worker processes to configure"
_IN_PLACE = "checkpoints are read where they are"
_HUGGING_FACE = "every checkpoint is a Hugging Face folder; "
_KNOWN = KnownFlags(
    accepted=frozenset(
        {
            *(_SWITCH, _CONFIG, _STAGE, _ROOT, _STRATEGY, _STEPS, _LIMIT),
            *(_BEST, _METRIC, _GREATER, _MODEL_ONLY, _RESUME, _ASYNC, _ZERO_COST),
            *(_LAST, _WEIGHTS, *_FORMAT_FLAGS),
        }
    ),
    # A folder on each node is detected; ranks write and read shares, by names, on any layout;
    # files are Hugging Face's; a tokenizer is the trainer's; no average is merged without one.
    always=frozenset(
        {
            *("save_on_each_node", "save_sharded_model", "load_sharded_model"),
            *("save_to_hf", "load_from_hf", "save_sharding_stage1_model_include_freeze_params"),
            *("load_sharded_model_remap_parameter_name", "force_reshard_pp", "load_via_cpu"),
            *("auto_parallel_resume_form_hybrid_parallel", "convert_from_hf", "save_tokenizer"),
            "online_merge_ema",
        }
    ),
    refused={
        "overwrite_output_dir": Refusal("a run starts afresh in an empty folder; use another"),
        "ignore_load_lr_and_optim": Refusal("leave the optimizer out of restore()"),
        "ordered_save_group_size": Refusal("all ranks write at once"),
        "optim_shard_num": Refusal("files are divided by SaveOptions(max_file_bytes=...)", (1,)),
        "aoa_config": Refusal("pass load=LoadOptions(source=SourceOptions(rename=...))"),
        "flex_ckpt_comm_method": Refusal(
            "ranks read their own bytes; set LoadOptions(share_reads=...)", ("auto", "broadcast")
        ),
        "replicate_saved_into_local": Refusal("pass save=SaveOptions(node_copies=...)"),
        "save_rng_states": Refusal("leave RandomStates() out of rank_extra", (True,)),
        "save_hf_steps": Refusal(f"{_HUGGING_FACE}{_STEPS} counts", (-1,)),
        "save_hf_total_limit": Refusal(f"{_HUGGING_FACE}{_LIMIT} counts", (-1,)),
        "save_hf_memory_growth_threshold": Refusal("pass save=SaveOptions(host_bytes=...)", (8,)),
        "flash_device_save_steps": Refusal(_TWO_TIERS),
        "zcc_workers_num": Refusal(_NO_WORKERS, (3,)),
        "zcc_pipeline_hooks_capacity_usage": Refusal(_NO_WORKERS, (0.6,)),
        "zcc_save_ema_coef": Refusal(_EMA),
        "zcc_ema_interval": Refusal(_EMA, (1,)),
        "zcc_ema_loss_threshold": Refusal(_EMA),
        "sharded_model_from_ema": Refusal("pass parts={'ema': ...} to restore()"),
        "pdc_download_ckpt": Refusal(_IN_PLACE),
        "pdc_download_timeout": Refusal(_IN_PLACE, (300,)),
        "disable_ckpt_quant": Refusal("set ckpt_quant_stage to O0"),
        _SIGNALS: Refusal("no signal files are written; a folder with a manifest is complete"),
    },
    synonyms={},
    earlier={},
)


def from_paddle(
    config: str | None = None,
    *,
    manager: ManagerOptions | None = None,
    save: SaveOptions | None = None,
    load: LoadOptions | None = None,
    **arguments: object,
) -> RunOptions:
    """Translate training arguments of PaddleNLP or PaddleFormers, such as all of them.

    The arguments override the options.

    `config` or `unified_checkpoint_config`: flags separated by spaces or commas.
    `ckpt_quant_stage`: "O0", "O1" or "O2", as `SaveOptions(compression=...)`. `output_dir`: the
    root; a relative path starts from the working directory. `load_best_model_at_end`: keeps the
    best checkpoint, see `CheckpointManager.best`. Arguments that are not about checkpoints have no
    effect.

    `master_weight_compatible` is always on here: weights are filled from master weights and the
    reverse. Raises FormatError for an unknown checkpoint argument, flag or stage.
    """
    check_type(config, str, "config")
    if arguments.get(_SIGNALS) == arguments.get(_ROOT):  # what PaddleNLP sets by default
        arguments.pop(_SIGNALS, None)
    values = _KNOWN.select(arguments)
    flags = _config_flags(config, values)
    stage = values.get(_STAGE)
    if stage is not None and str(stage) not in _STAGES:
        raise FormatError(
            f"{_STAGE}: got {stage!r}, expected one of {', '.join(_STAGES)}; "
            "PaddleNLP calls O3 experimental"
        )
    changes: dict[str, object] = {} if stage is None else {"compression": _STAGES[str(stage)]}
    omitted = _omitted_parts(flags, model_only=is_on(values, _MODEL_ONLY))
    if omitted:
        changes["omit"] = tuple(sorted(omitted.union(save.omit if save else ())))
    is_rounded = MASTER in omitted and OPTIMIZER not in omitted
    # The stored model becomes the master weights.
    load_changes: dict[str, object] = {"cast": True} if is_rounded else {}
    is_lazy = is_on(values, _ZERO_COST)
    asynchronous = "async_save" in flags or is_on(values, _ASYNC) or is_lazy
    manager_changes = {"asynchronous": asynchronous, **({"lazy": True} if is_lazy else {})}
    output_dir = arguments.get(_ROOT)
    return RunOptions(
        changed_rules(
            manager or ManagerOptions(),
            {**manager_changes, **_step_rules(values), **_best_rules(values)},
        ),
        changed(save or SaveOptions(), changes),
        changed(load or LoadOptions(), load_changes),
        None if output_dir is None else absolute_path(checked_path(output_dir, _ROOT)),
    )


def _step_rules(values: Mapping[str, object]) -> dict[str, object]:
    """Translate when to save, how many checkpoints to keep, and what to resume from."""
    changes: dict[str, object] = {}
    strategy = values.get(_STRATEGY)
    strategy = "steps" if strategy is None else strategy or "no"  # YAML reads `no` as False
    if strategy not in ("steps", "no"):
        raise FormatError(
            f"{_STRATEGY}: got {strategy!r}, expected steps or no; set {_STEPS}, or save(step, "
            "force=True) where an epoch ends"
        )
    if strategy == "no":
        changes["interval_steps"] = None
    for name, option in ((_STEPS, "interval_steps"), (_LIMIT, "keep_latest")):
        if name in values and option not in changes:  # zero and below: no save, all are kept
            text = str(values[name])
            changes[option] = None if text == "0" or text.startswith("-") else values[name]
    if is_on(values, _LAST):
        changes["on_completion"] = True
    if values.get(_WEIGHTS) is not None:
        changes["load_parameters_path"] = values[_WEIGHTS]
    resume = values.get(_RESUME)
    if resume is not None and str(resume).lower() not in ("true", "false"):
        raise FormatError(
            f"{_RESUME}: got {resume!r}, expected none; restore() resumes from the latest step, "
            "and ManagerOptions(load_full_state_path=...) continues another run; "
            f"{_WEIGHTS} starts from weights alone"
        )
    return changes


def _best_rules(values: Mapping[str, object]) -> dict[str, object]:
    """Translate which checkpoint is the best one, with PaddleNLP's defaults."""
    metric = values.get(_METRIC) or ("loss" if is_on(values, _BEST) else None)
    if metric is None:
        if values.get(_GREATER) is not None:
            raise FormatError(f"{_GREATER}: got no metric, expected one; add {_METRIC}")
        return {}
    greater = metric not in ("loss", "eval_loss")
    if values.get(_GREATER) is not None:
        greater = is_on(values, _GREATER)
    return {"best_metric": metric, "best_mode": "max" if greater else "min"}


def _omitted_parts(flags: frozenset[str], *, model_only: bool) -> frozenset[str]:
    omitted = next((part for flag, part in _OMITTED.items() if flag in flags), None)
    if not model_only:
        return frozenset() if omitted is None else frozenset({omitted})
    if omitted == MODEL:
        raise FormatError(
            f"{_MODEL_ONLY}: got it beside a {_CONFIG} that leaves out the model, which leaves no "
            "weights; remove one"
        )
    return frozenset({MASTER, OPTIMIZER})


def _formats(values: Mapping[str, object]) -> set[object]:
    """Return the formats to save and load, all of which are ours here."""
    for name in _FORMAT_FLAGS:
        if values.get(name) not in (None, *_FORMATS):
            raise FormatError(
                f"{name}: got {values[name]!r}, expected one of {', '.join(_FORMATS)}; remove it"
            )
    return {values.get(name) for name in _FORMAT_FLAGS}


def _config_flags(config: str | None, values: Mapping[str, object]) -> frozenset[str]:
    """Return the flags of the configuration, which go together.

    `remove_master_weight` beside `enable_all_options` keeps the model and leaves out its masters,
    as the page of PaddleNLP has it.
    """
    if config is not None and _CONFIG in values:
        raise FormatError(f"{_CONFIG}: got it twice, expected it once")
    formats = _formats(values)
    text = values.get(_CONFIG) if config is None else config
    if isinstance(text, list):  # what PaddleNLP makes of the text
        text = " ".join(map(str, text))
    check_type(text, str, _CONFIG)
    flags = dict.fromkeys(str(text or "").replace(",", " ").split())
    if flags and _SWITCH in values and not is_on(values, _SWITCH) and _SWITCH not in formats:
        raise FormatError(f"{_CONFIG}: got flags, which need {_SWITCH}; add {_SWITCH}=True")
    for flag in flags:
        if flag in _REFUSED_FLAGS:
            raise FormatError(
                f"{_CONFIG}: {flag} is not supported: {_REFUSED_FLAGS[flag]}; remove it"
            )
        if flag not in _FLAGS:
            raise FormatError(
                f"{_CONFIG}: got unknown flag {flag!r}, "
                f"expected one of {', '.join(_FLAGS)}{suggestion(flag, _FLAGS)}"
            )
    if flags.keys() >= {"skip_save_model_weight", "remove_master_weight"}:
        raise FormatError(
            f"{_CONFIG}: skip_save_model_weight and remove_master_weight together "
            "leave no weights; remove one"
        )
    return frozenset(flags)
