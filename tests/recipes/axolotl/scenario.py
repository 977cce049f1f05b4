"""Axolotl: the plugin of `unified_plugin.py` in the list `plugins` of the configuration."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from trainer_runs import check, in_background, is_unified, run, run_all, write_inputs  # noqa: E402

PLUGINS = {
    "stock": "[]",
    "unified": "[unified_plugin.UnifiedCheckpoints]",
    "background": "[background_plugin.UnifiedCheckpoints]",
    "missing": "[misspelled_plugin.UnifiedCheckpoints]",
}


def command(output: str, saves: str, processes: int, checkpoint: str) -> list[str]:
    """Axolotl finds the checkpoint in `output` by itself: `auto_resume_from_checkpoints`."""
    launcher = ["--launcher", "python"]
    if processes > 1:
        launcher = ["--launcher", "torchrun", "--"]
        launcher += ["--nproc-per-node", str(processes), "--master-port", "29615"]
    return ["axolotl", "train", f"{saves}.yaml", "--output-dir", output, *launcher]


if __name__ == "__main__":
    os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
    write_inputs()
    shutil.copy(FOLDER / "unified_plugin.py", "unified_plugin.py")
    in_background(FOLDER / "unified_plugin.py", "background_plugin.py")
    for saves, plugins in PLUGINS.items():
        text = (FOLDER / "train.yaml").read_text()
        Path(f"{saves}.yaml").write_text(f"{text}plugins: {plugins}\n")
    run_all(command)
    log = run(command("missing", "missing", 1, ""), "missing")
    check("Failed to load plugin: misspelled_plugin" in log, "a missing plugin is only logged")
    check(not is_unified("missing/checkpoint-6"), "training then goes on with stock checkpoints")
