"""Two real ranks of Lightning, SIGKILLed at random moments of a run that saves at every step: what
has a name is whole.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.processes.launch import HERE, environment

pytestmark = pytest.mark.slow  # a minute
WORLD = 2
CHECKPOINTS = {"every_n_train_steps": 1, "save_top_k": 1, "save_last": True}
ENDLESS = {"checkpoints": CHECKPOINTS, "max_epochs": 10_000}


def start(root: Path, port: int, asked: dict[str, Any]) -> list[subprocess.Popen[bytes]]:
    """As torchrun would, but for its own process: who kills it has not killed them."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "0",
        "GROUP_RANK": "0",
    }
    shared |= {
        "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(WORLD),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    runs = json.dumps([["2x1", str(root / "run"), asked]])
    command = [sys.executable, str(HERE / "worker_lightning.py"), str(root / "told"), runs]
    with open(root / "output.txt", "ab") as output:
        return [
            subprocess.Popen(
                command,
                env={**environment(), **shared, "RANK": str(r), "LOCAL_RANK": str(r)},
                stdout=output,
                stderr=output,
            )
            for r in range(WORLD)
        ]


def step_of(path: Path) -> int:
    with uc.open(path) as source:
        return source.step or 0


def free_port() -> int:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return int(store.port)


def test_killed_while_it_saves(tmp_path: Path) -> None:
    """L#688, L#19970: a checkpoint that is cut off is the newest."""
    moments, last, reached = random.Random(0), tmp_path / "run" / "last.ckpt", 0
    for _ in range(2):
        ranks = start(
            tmp_path,
            free_port(),
            {"trainer": ENDLESS, **({"ckpt_path": "last"} if reached else {})},
        )
        try:
            deadline = time.monotonic() + 120
            while not (last.exists() and step_of(last) > reached + 2):
                assert time.monotonic() < deadline, (tmp_path / "output.txt").read_text()
                assert all(rank.poll() is None for rank in ranks), (
                    tmp_path / "output.txt"
                ).read_text()
                time.sleep(0.05)
            time.sleep(moments.random())
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.wait()
        found = [
            path
            for path in (tmp_path / "run").iterdir()
            if path.suffix == ".ckpt" and not path.name.startswith(".")
        ]
        assert all(uc.verify(path, deep=True).ok for path in found), "what has a name is whole"
        assert step_of(last) > reached
        reached = step_of(last)
    ranks = start(
        tmp_path,
        free_port(),
        {
            "ckpt_path": "last",
            "trainer": {"checkpoints": CHECKPOINTS, "max_epochs": -1, "max_steps": reached + 4},
        },
    )
    assert [rank.wait(120) for rank in ranks] == [0] * WORLD, (tmp_path / "output.txt").read_text()
    assert step_of(last) == reached + 4
    assert len([path for path in os.listdir(last.parent) if path.startswith("step=")]) <= 1 + 2, (
        "at most one more for each that was killed"
    )
