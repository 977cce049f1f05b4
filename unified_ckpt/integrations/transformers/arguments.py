"""What TrainingArguments decide about the checkpoints of a run: when to save, how many to keep, and
which is the best.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unified_ckpt.integrations.loggers import PREFIX as SAVE_LOG_PREFIX
from unified_ckpt.integrations.run_options import (
    START_PATHS,
    Setting,
    run_options,
    settings_of_trigger,
    settings_without,
)
from unified_ckpt.integrations.transformers.resume import PREFIX
from unified_ckpt.options import ManagerOptions


def options_of_run(
    args: Any, options: ManagerOptions | None, *, async_save: bool | None
) -> ManagerOptions:
    """Return the options of the manager of a Trainer's run. Raises CheckpointError if `options`
    contradicts the arguments.
    """
    strategy = str(args.save_strategy.value)
    text, interval = f"TrainingArguments(save_strategy={strategy!r})", None
    if strategy == "steps":
        interval = args.save_steps
        text = f"TrainingArguments(save_strategy='steps', save_steps={interval!r})"
    settings = settings_of_trigger(text, interval_steps=interval)
    settings["on_completion"] = Setting(strategy in ("steps", "epoch"), text)
    settings["enabled"] = Setting(True, "UnifiedCheckpointCallback; leave the callback out")
    settings["step_prefix"] = Setting(PREFIX, f"the Trainer's folder names, {PREFIX}<step>")
    settings |= settings_without(START_PATHS, "train(resume_from_checkpoint=...)")
    if args.save_total_limit is not None:
        limit = max(args.save_total_limit, 1)
        text = f"TrainingArguments(save_total_limit={args.save_total_limit})"
        settings["keep_latest"] = Setting(limit, text)
    if args.enable_jit_checkpoint:
        settings["on_preemption"] = Setting(False, "TrainingArguments(enable_jit_checkpoint=True)")
    if options is not None and options.best_metric is not None and args.metric_for_best_model:
        metric = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
        greater = args.greater_is_better
        text = f"TrainingArguments(metric_for_best_model={args.metric_for_best_model!r}"
        settings["best_metric"] = Setting(metric, f"{text})")
        text = f"{text}, greater_is_better={greater})"
        settings["best_mode"] = Setting("max" if greater else "min", text)
    return run_options(options, settings, async_save=async_save)


def step_metrics(state: Any) -> Mapping[str, Any]:
    """Return the metrics that the Trainer has logged at the current step, without those of an
    earlier save.
    """
    logged = [entry for entry in state.log_history if entry.get("step") == state.global_step]
    return {
        name: value
        for entry in logged
        for name, value in entry.items()
        if name not in ("step", "epoch")
        and not name.startswith(SAVE_LOG_PREFIX)
        and isinstance(value, int | float)
    }
