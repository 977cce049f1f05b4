"""Paddle's own code reads what is exported: `-m long`, minutes to build its environment.

PADDLE_PYTHON names a Python that has paddlepaddle 3.3.1 and paddleformers 1.2.0 already.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import venv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unified_ckpt as uc
from tests.support.foreign.paddles import FIXTURES, llama

pytestmark = pytest.mark.long
LOADER = Path(__file__).parents[2] / "support" / "foreign" / "paddle_loads.py"
PACKAGES = ("paddlepaddle==3.3.1", "paddleformers==1.2.0")
NUMPY = "numpy==2.2.6"  # the resolver takes 1.26, with which pyarrow does not import
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MOMENTS = {"exp_avg": "moment1_0", "exp_avg_sq": "moment2_0"}
BETAS = (0.9, 0.999)
STEPS, RATE = 2, 1e-3
SWITCHES = {"paddle-flex": "flex_checkpoint", "paddleformers": "unified_checkpoint"}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with Paddle."""
    known = os.environ.get("PADDLE_PYTHON")
    if known is not None:
        return known
    faulthandler.cancel_dump_traceback_later()  # pytest's limit; an environment takes longer
    folder = tmp_path_factory.mktemp("paddle") / "environment"
    venv.create(folder, with_pip=True)
    built = folder / "bin" / "python"
    install = [built, "-m", "pip", "install", "-q"]
    subprocess.run([*install, *PACKAGES], check=True)
    subprocess.run([*install, "--no-deps", NUMPY], check=True)
    return str(built)


def run(command: list[str]) -> None:
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("PYTHON")}
    environment["PYTHONSAFEPATH"] = "1"  # beside the loader is a module named paddleformers
    process = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-5000:]


def resumed(python: str, to: str, folder: Path, *, processes: int = 1) -> dict[str, np.ndarray]:
    """What PaddleFormers has in memory at its first step, the pieces of all processes joined."""
    out, launcher = folder.with_suffix(".loaded"), list[str]()
    if processes > 1:
        logs = str(folder.with_suffix(".logs"))
        launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(processes)]
        launcher += ["--backend", "gloo", "--log_dir", logs]
    run([python, *launcher, str(LOADER), "resume", SWITCHES[to], str(folder), str(out)])
    return joined([np.load(f"{out}.{rank}.npz") for rank in range(processes)])


def joined(files: list[Any]) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        for key in file.files:
            name, *place = key.split("|")
            if not place:
                tensors[name] = file[key]
                continue
            start, stop = map(int, place[0].split(":"))
            shape = [int(size) for size in place[1].split("x")]
            whole = tensors.setdefault(name, np.full(shape, np.nan, np.float32))
            whole.reshape(-1)[start:stop] = file[key].reshape(-1)[: stop - start]
    return tensors


def as_paddle(name: str, tensor: torch.Tensor) -> np.ndarray:
    is_linear = tensor.dim() == 2 and name.split(".")[-2] in LINEAR
    return (tensor.t() if is_linear else tensor).float().numpy()


def expected(source: Path) -> dict[str, np.ndarray]:
    """A source's tensors by the names and in the orientation of PaddleFormers."""
    tensors: dict[str, np.ndarray] = {}
    with uc.open(source) as opened:
        model = opened["model"]
        masters = opened["master_weights"] if "master_weights" in opened.parts else {}
        for name in model:
            tensors[name] = as_paddle(name, model[name][...])
            if model[name].dtype != torch.float32:
                tensors[f"{name}.w_0"] = as_paddle(name, masters.get(name, model[name])[...])
        for name in opened["optimizer"] if "optimizer" in opened.parts else ():
            owner, _, state = name.rpartition("/")
            tensor = opened["optimizer"][name][...]
            if state in MOMENTS:
                tensors[f"{owner}.{MOMENTS[state]}"] = as_paddle(owner, tensor)
                continue
            for number, beta in enumerate(BETAS, 1):
                power = np.multiply.accumulate(np.full(int(tensor) + 1, beta, np.float32))[-1:]
                tensors[f"{owner}.beta{number}_pow_acc_0"] = power
    tied = {name for name in tensors if name.startswith(EMBEDDING)}
    if HEAD not in tensors:  # the model has both names, the optimizer the first
        tensors |= {name.replace(EMBEDDING, HEAD): tensors[name] for name in tied}
        tensors = {name: tensors[name] for name in tensors if name not in tied - {EMBEDDING}}
    return tensors


def assert_equal(actual: dict[str, np.ndarray], source: Path, *, trained: bool = True) -> None:
    wanted = expected(source)
    if trained:
        wanted["step"] = np.float32(STEPS)
        wanted["scheduler"] = np.float32([STEPS, RATE])
    assert wanted.keys() - actual.keys() == set()
    if trained:
        assert actual.keys() == wanted.keys()
    different = [name for name in wanted if not np.array_equal(actual[name], wanted[name])]
    assert different == []


def torch_checkpoint(folder: Path, kind: str) -> Path:
    torch.manual_seed(0)
    model = llama(tied=kind == "tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
    if kind == "half":
        uc.save(folder, model=model.bfloat16(), attach=model.config.save_pretrained)
    else:
        save = {"optimizer": optimizer, "step": STEPS}
        uc.save(folder, model=model, **save, attach=model.config.save_pretrained)
    return folder


@pytest.mark.parametrize("to", SWITCHES)
@pytest.mark.parametrize("origin", ["single_bf16", "single_tied", "untied", "tied", "half"])
def test_paddleformers_resumes_an_export(python: str, tmp_path: Path, to: str, origin: str) -> None:
    """Model, master weights, moments, powers, step and learning rate, bit for bit."""
    source = FIXTURES / origin
    if not source.exists():
        source = torch_checkpoint(tmp_path / "ours", origin)
    uc.convert(source, tmp_path / "theirs", to=to)
    actual = resumed(python, to, tmp_path / "theirs")
    if origin == "half" and to == "paddleformers":  # it takes masters from the model later
        wanted = {name for name in expected(source) if not name.endswith(".w_0")}
        assert all(np.array_equal(actual[name], expected(source)[name]) for name in wanted)
        return
    assert_equal(actual, source, trained=origin != "half")


@pytest.mark.parametrize("to", SWITCHES)
def test_two_processes_shard_the_optimizer(python: str, tmp_path: Path, to: str) -> None:
    source = FIXTURES / "single_bf16"
    options = {"max_file_bytes": 20_000} if to == "paddle-flex" else {}
    uc.convert(source, tmp_path / "theirs", to=to, **options)
    actual = resumed(python, to, tmp_path / "theirs", processes=2)
    assert_equal(actual, source)


def test_paddle_loads_the_group_folders(python: str, tmp_path: Path) -> None:
    source = FIXTURES / "single_bf16"
    uc.convert(source, tmp_path / "theirs", to="paddle-flex", max_file_bytes=20_000)
    actual: dict[str, np.ndarray] = {}
    for group in ("model_state", "optimizer_state", "master_weight"):
        out = tmp_path / group
        run([python, str(LOADER), "load", str(tmp_path / "theirs" / group), str(out)])
        actual |= dict(np.load(f"{out}.0.npz"))
    wanted = expected(source)
    assert actual.keys() == wanted.keys()
    assert all(np.array_equal(actual[name], wanted[name]) for name in wanted)
