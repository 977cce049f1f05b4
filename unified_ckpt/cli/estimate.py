"""The verb `estimate`: says what the saves of a run will need, before it starts."""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import asdict

import unified_ckpt as uc
from unified_ckpt.cli.display.progress import progress_bar
from unified_ckpt.cli.option_values import source_options


def run(arguments: Namespace) -> int:
    """Print what saves of a run from `arguments.path` will need; return 0."""
    minutes = arguments.every_minutes
    with ExitStack() as stack:
        stack.enter_context(progress_bar("estimate", "none"))
        source = stack.enter_context(uc.open(arguments.path, options=source_options(arguments)))
        estimate = uc.estimate(
            source,
            arguments.optimizer,
            root=arguments.root,
            manager_options=uc.ManagerOptions(
                keep_latest=arguments.keep_latest, interval_steps=arguments.every_steps
            ),
            interval_seconds=60 * minutes if minutes else None,
            steps=arguments.steps,
            master_weights=arguments.master_weights or None,
            options=uc.SaveOptions(
                compression=arguments.compression, model_dtype=arguments.model_dtype
            ),
        )
    if not arguments.json:
        print(estimate)
        return 0
    totals = "nbytes", "room_nbytes", "seconds", "bytes_per_day", "run_nbytes", "run_seconds"
    print(json.dumps(asdict(estimate) | {name: getattr(estimate, name) for name in totals}))
    return 0
