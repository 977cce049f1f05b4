"""The verb `watch`: shows the list of a run and what changes in it, until Ctrl-C."""

from __future__ import annotations

import sys
import time
from argparse import Namespace

from unified_ckpt.cli.display.form import StepForms
from unified_ckpt.cli.display.step_table import runs_text
from unified_ckpt.cli.list import list_runs
from unified_ckpt.cli.option_values import check_metric, existing_root

_CLEAR = "\x1b[H\x1b[2J\x1b[3J"


def run(arguments: Namespace) -> int:
    """Show `arguments.root` every `arguments.interval` seconds; return 0 after Ctrl-C.

    A terminal is redrawn. Elsewhere each line is printed when it first appears.
    """
    root = existing_root(arguments)
    shown, forms, metric_checked = set[str](), StepForms(), False
    try:
        while True:
            runs = list_runs(root, arguments, forms)
            if not metric_checked:  # later checkpoints may have others
                records = [record for listing in runs for record in listing.scan.steps]
                metric_checked = check_metric(arguments, records)
            text = runs_text(runs) or f"{root}: no checkpoints yet"
            if sys.stdout.isatty():
                hint = f"every {arguments.interval:g} s; Ctrl-C ends"
                print(f"{_CLEAR}{text}\n\n{time.strftime('%H:%M:%S')}, {hint}", flush=True)
            else:
                lines = [line for line in text.splitlines() if line not in shown]
                shown.update(lines)
                if lines:
                    print("\n".join(lines), flush=True)
            time.sleep(arguments.interval)
    except KeyboardInterrupt:
        return 0
