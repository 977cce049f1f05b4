"""ms-swift: `swift sft` with `--external_plugins plugin.py --callbacks unified_ckpt`."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from trainer_runs import check, in_background, run_all, write_inputs  # noqa: E402

OPTIONS = shlex.split(
    """--model model --model_type llama --template chatml --dataset data.jsonl
--tuner_type full --torch_dtype float32 --max_length 256 --add_version false
--per_device_train_batch_size 2 --learning_rate 1e-3 --max_steps 6 --save_steps 2
--logging_steps 1 --use_cpu true --report_to none --check_model false"""
)


def command(output: str, saves: str, processes: int, checkpoint: str) -> list[str]:
    """`swift sft` starts torchrun for several processes."""
    plugins = {"unified": "plugin.py", "background": "background_plugin.py"}
    ranks = [f"NPROC_PER_NODE={processes}", "MASTER_PORT=29614"] if processes > 1 else []
    return [
        *(["env", *ranks] if ranks else []),
        *("swift", "sft", *OPTIONS, "--output_dir", output),
        *(["--ddp_backend", "gloo"] if ranks else []),
        *(["--resume_from_checkpoint", checkpoint] if checkpoint else []),
        *(
            ["--external_plugins", plugins[saves], "--callbacks", "unified_ckpt"]
            if saves in plugins
            else []
        ),
    ]


if __name__ == "__main__":
    write_inputs()
    shutil.copy(FOLDER / "plugin.py", "plugin.py")
    in_background(FOLDER / "plugin.py", "background_plugin.py")
    run_all(command)
    entries = os.listdir("unified-1/checkpoint-6")
    check("args.json" in entries, "a checkpoint has args.json, which `swift infer` reads")
