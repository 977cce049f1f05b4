"""LLaMA-Factory: `train.py` instead of `llamafactory-cli train`, and `train_v1.py` for the trainer
of v1. The stock runs call the same functions of LLaMA-Factory.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from filecmp import cmp
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from trainer_runs import SENTENCES, check, in_background, run, run_all, write_inputs  # noqa: E402

TORCHRUN = ["torchrun", "--nproc-per-node", "2", "--master-port", "29613"]
# v1 waits for an accelerator after each step, also if there is none.
ON_CPU = """import runpy, sys, torch
if not torch.accelerator.is_available():
    torch.accelerator.synchronize = lambda *_: None
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
DATA = {
    "file_name": "data.jsonl",
    "formatting": "sharegpt",
    "columns": {"messages": "messages"},
    "tags": {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
    },
}


def command(output: str, saves: str, processes: int, checkpoint: str) -> list[str]:
    """LLaMA-Factory finds the checkpoint in `output` by itself."""
    scripts = {"unified": "train.py", "background": "train_in_background.py", "stock": "stock.py"}
    arguments = [scripts[saves], "train.yaml", f"output_dir={output}"]
    return [*(TORCHRUN if processes > 1 else ["python"]), *arguments]


def run_v1() -> None:
    """Two processes with FSDP2: kill in a save, resume; and go on from the stock trainer."""

    def command(script: str, output: str, *arguments: str) -> list[str]:
        return [*TORCHRUN, "on_cpu.py", script, "train_v1.yaml", f"output_dir={output}", *arguments]

    def check_equal(output: str, text: str) -> None:
        check(cmp("v1-stock/model.safetensors", f"{output}/model.safetensors", shallow=False), text)

    resume, manifest = "resume_from_checkpoint=auto", "unified_checkpoint.json"
    run(command("stock_v1.py", "v1-stock"), "v1-stock")
    kill_at = f"*/checkpoint-4/*-optimizer/{manifest}"
    run(command("train_v1.py", "v1"), "v1-killed", kill_at=kill_at)
    check(not Path("v1/checkpoint-4/CHECKPOINT_COMPLETE").exists(), "step 4 of v1 is unfinished")
    check(Path("v1/checkpoint-2/model", manifest).exists(), "v1 has unified checkpoints")
    run(command("train_v1.py", "v1", resume), "v1-resumed")
    check_equal("v1", "the resumed weights equal those of stock v1, bit for bit")
    shutil.copytree("v1-stock/checkpoint-4", "v1-switched/checkpoint-4")
    run(command("train_v1.py", "v1-switched", resume), "v1-switched")
    check_equal("v1-switched", "so do those that went on from step 4 of stock v1")


def prepare() -> None:
    """Write all files that the commands name."""
    write_inputs()
    for name in ("train.py", "train.yaml", "train_v1.py", "train_v1.yaml"):
        shutil.copy(FOLDER / name, name)
    in_background(FOLDER / "train.py", "train_in_background.py")
    Path("stock.py").write_text("from llamafactory.train.tuner import run_exp\nrun_exp()\n")
    pairs = [
        dict(zip(("instruction", "output"), text.split("? "), strict=True)) for text in SENTENCES
    ]
    Path("pairs.jsonl").write_text(
        "".join(json.dumps(pair | {"input": ""}) + "\n" for pair in pairs)
    )
    Path("stock_v1.py").write_text(
        "from llamafactory.v1.trainers.sft_trainer import run_sft\nrun_sft()\n"
    )
    Path("on_cpu.py").write_text(ON_CPU)
    Path("pairs.yaml").write_text("pairs: {path: pairs.jsonl, source: local, converter: alpaca}\n")
    Path("dataset_info.json").write_text(json.dumps({"sums": DATA}))
    if importlib.util.find_spec("torchaudio") is None:
        # Imported by LLaMA-Factory, used for audio only. PyPI has no build for CPU.
        Path("torchaudio.py").touch()


if __name__ == "__main__":
    prepare()
    run_all(command)
    run_v1()
