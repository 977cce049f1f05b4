"""torchtune's full finetuning on 1, 2 and 4 processes, switched to `unified_ckpt.dcp` by one line.

A run that begins with an epoch saved by the stock recipe, is killed in a background save and
resumed, ends with the weights of the stock recipe that nothing happened to, bit for bit.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import sentencepiece
import torch
from torchtune.models.llama2 import llama2

import unified_ckpt as uc

WORDS = "red blue green small large tree river stone runs falls sings over under slowly a the"
SIZES = {"vocab_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32}


def make_base(folder: Path) -> None:
    """Create a tokenizer, data and a model."""
    folder.mkdir()
    draw = random.Random(0)
    sentences = [[" ".join(draw.choices(WORDS.split(), k=6)) for _ in range(2)] for _ in range(64)]
    rows = [{"input": first, "output": second} for first, second in sentences]
    (folder / "data.json").write_text(json.dumps(rows))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(text for pair in sentences for text in pair),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=SIZES["vocab_size"],
        model_type="bpe",
        pad_id=3,
        minloglevel=2,
    )
    torch.manual_seed(0)
    torch.save(llama2(max_seq_len=64, **SIZES).state_dict(), folder / "model.pt")


def train(run: Path, world: int, *, resume: bool = False, **environment: str) -> str:
    """Run the recipe. Return its output, which ends with its exit code."""
    command = [Path(sys.executable).with_name("tune"), "run", "--nproc_per_node", str(world)]
    options = [f"output_dir={run}", "base=base", f"resume_from_checkpoint={resume}"]
    ended = subprocess.run(
        [*command, "on_cpu.py", "--config", "config.yaml", *options],
        env={**os.environ, **environment, "HF_HUB_OFFLINE": "1", "HF_HOME": "huggingface"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return f"{ended.stdout}\nexit code {ended.returncode}"


def check(holds: bool, text: str) -> None:
    if not holds:
        raise SystemExit(text)


def epochs(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("dist_epoch_*"))


def weights(run: Path) -> bytes:
    return (run / "epoch_3" / "model-00001-of-00001.bin").read_bytes()


def check_world(world: int) -> None:
    stock, run = Path(f"stock-{world}"), Path(f"run-{world}")
    output = train(stock, world, STOCK="1")
    check(output.endswith("exit code 0"), output)
    shutil.copytree(stock / "dist_epoch_0", run / "dist_epoch_0")
    killed = train(run, world, resume=True, KILL=r"-dist_epoch_2/.*\.safetensors$")
    check("SIGKILL" in killed, killed)
    check(epochs(run) == ["dist_epoch_0", "dist_epoch_1"], f"after the kill: {epochs(run)}")
    output = train(run, world, resume=True)
    check(output.endswith("exit code 0"), output)
    for name in ("dist_epoch_1", "dist_epoch_2"):
        check(uc.verify(run / name, deep=True).ok, f"{name} is damaged")
    check(weights(run) == weights(stock), f"{world} processes: other weights than stock\n{output}")
    files = [len(list((path / "dist_epoch_2").iterdir())) for path in (stock, run)]
    print(
        f"{world} processes: the weights of the stock run; {files[1]} files in place of {files[0]}"
    )


if __name__ == "__main__":
    for name in ("recipe.py", "on_cpu.py", "config.yaml"):  # tune takes paths below its own
        shutil.copy(Path(__file__).with_name(name), name)
    make_base(Path("base"))
    for world in (1, 2, 4):
        check_world(world)
