"""Runs of a framework that is built on Hugging Face's Trainer, in the current folder: of the stock
Trainer, and with unified checkpoints killed during a save and resumed, on one process and two.

Model, tokenizer and data are tiny and made here, so nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import unified_ckpt as uc

SENTENCES = [f"What is {a} plus {b}? It is {a + b}." for a in range(8) for b in range(8)]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A process that opens a file of this name kills itself.
KILLER = """import fnmatch, os, signal, sys
def kill(event, arguments):
    if event == "open" and fnmatch.fnmatch(str(arguments[0]), os.environ["KILL_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
"""
KILLED_STEP, LAST_STEP = 4, 6  # saved every 2 steps

Command = Callable[..., Sequence[str]]


def write_inputs() -> None:
    """Write the folder `model` with a tokenizer, and the conversations `data.jsonl`."""
    special, letters = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = letters(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=letters.alphabet()
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    ends = {"bos_token": special[0], "pad_token": special[0], "eos_token": special[2]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=fast.bos_token_id,
        pad_token_id=fast.pad_token_id,
        eos_token_id=fast.eos_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained("model")
    conversations = [
        [{"role": "user", "content": f"{question}?"}, {"role": "assistant", "content": answer}]
        for question, answer in (sentence.split("? ") for sentence in SENTENCES)
    ]
    lines = [json.dumps({"messages": messages}) + "\n" for messages in conversations]
    Path("data.jsonl").write_text("".join(lines))
    for folder in ("killer", "logs"):
        Path(folder).mkdir()
    Path("killer", "sitecustomize.py").write_text(KILLER)


def in_background(source: Path, name: str) -> None:
    """Copy a user's file, with background saves."""
    text = source.read_text()
    changed = text.replace(
        "UnifiedCheckpointCallback()", "UnifiedCheckpointCallback(async_save=True)"
    )
    check(changed != text, f"{source.name} makes the callback")
    Path(name).write_text(changed)


def run(command: Sequence[str], name: str, *, kill_at: str = "") -> str:
    """Run a command and return what it prints. `kill_at`: a process that opens a file of this name,
    with wildcards, kills itself.
    """
    paths = [*(["killer"] if kill_at else []), os.getcwd()]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "KILL_AT": kill_at,
    }
    start, log = time.monotonic(), Path("logs", name)
    with log.open("wb") as file:
        code = subprocess.run(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    text = log.read_text(errors="replace")
    print(f"{name}: exit code {code} after {time.monotonic() - start:.0f} s", flush=True)
    if (code == 0) == bool(kill_at):
        sys.exit(f"{text[-8000:]}\n{name}: exit code {code}: {' '.join(command)}")
    return text


def check(holds: bool, text: str) -> None:
    """Exit with code 1 unless `holds`."""
    print("holds:" if holds else "DOES NOT HOLD:", text, flush=True)
    if not holds:
        sys.exit(1)


def steps(output: str) -> list[int]:
    """The steps whose checkpoints are in a folder."""
    folders = Path(output).glob("checkpoint-*")
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folders)


def is_unified(folder: str) -> bool:
    """Whether a folder is a unified checkpoint: a stock one can be verified, too."""
    return Path(folder, "unified_checkpoint.json").is_file() and uc.verify(folder, deep=True).ok


def weights(folder: str) -> dict[str, torch.Tensor]:
    """The weights that `from_pretrained` gets from a checkpoint."""
    state: dict[str, Any] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return state


def check_equal(output: str, expected: str) -> None:
    """The last checkpoint is ours, is whole, and has the weights of the stock run."""
    folders = [f"{name}/checkpoint-{LAST_STEP}" for name in (output, expected)]
    check(is_unified(folders[0]), f"{folders[0]} is a whole unified checkpoint")
    ours, stock = map(weights, folders)
    same = ours.keys() == stock.keys() and all(ours[name].equal(stock[name]) for name in ours)
    check(same, f"its weights equal those of {folders[1]}, bit for bit")


def run_all(command: Command) -> None:
    """Train, kill, resume, and compare. `command(output, saves, processes, checkpoint)`: trains
    into `output` and resumes `checkpoint`, with `saves` "stock", "unified" or "background".
    """
    cases = [("unified", 1, "optimizer.safetensors"), ("background", 2, "unified_checkpoint.json")]
    for saves, processes, file in cases:
        stock, output = f"stock-{processes}", f"{saves}-{processes}"
        run(command(stock, "stock", processes, ""), stock)
        check(not is_unified(f"{stock}/checkpoint-{LAST_STEP}"), f"{stock} has stock checkpoints")
        kill_at = f"*-checkpoint-{KILLED_STEP}/{file}"
        run(command(output, saves, processes, ""), f"{output}-killed", kill_at=kill_at)
        check(steps(output) == [2], f"{output} has step 2, and no step {KILLED_STEP}")
        shutil.copytree(output, f"{output}-copy", symlinks=True)
        run(command(output, saves, processes, f"{output}/checkpoint-2"), f"{output}-resumed")
        check_equal(output, stock)
    output = "background-2-copy"
    run(command(output, "unified", 1, f"{output}/checkpoint-2"), "on-one-process")
    last = max(steps(output))
    check(is_unified(f"{output}/checkpoint-{last}"), f"one process went on to step {last}")
