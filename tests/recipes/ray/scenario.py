"""Runs train.py by Ray Train: saves of both kinds, a worker killed during a save, another number of
workers, and what Ray's defaults do.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}

import ray
import ray.train
import torch
import train as recipe
from ray.train import Checkpoint, CheckpointUploadMode, Result
from safetensors.torch import load_file

import unified_ckpt as uc

STORAGE = Path.cwd() / "storage"
STEPS = 6


def main() -> None:
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200_000_000)
    fit("straight", recipe.train, recipe.save, until=STEPS)
    expected = tensors("straight", STEPS)

    result = fit("killed", killed_in_a_save, recipe.save, until=STEPS, failures=1)
    assert (STORAGE / "killed" / "was-killed").exists()
    assert result.checkpoint.path == str(STORAGE / "killed" / f"step-{STEPS}")
    equal(tensors("killed", STEPS), expected)
    print("worker killed during a save: Ray started all workers again, weights are equal")

    fit("async", recipe.train, recipe.save_async, until=4, keep=2)
    assert steps("async") == [3, 4]
    fit("async", recipe.train, recipe.save_async, until=STEPS, keep=2)
    assert steps("async") == [STEPS - 1, STEPS]
    equal(tensors("async", STEPS), expected)
    print("saved in the background, stopped, resumed by a second fit(): weights are equal")

    fit("async", save_again, recipe.save, until=STEPS, workers=3)
    equal(tensors("again", STEPS), expected)
    fit("async", recipe.train, recipe.save, until=STEPS + 2, workers=3, keep=2)
    assert steps("async") == [STEPS + 1, STEPS + 2]
    print("3 workers instead of 2: loaded weights are equal, and training continued")

    fit("deleted", recipe.train, save_with_default, until=1)
    assert steps("deleted") == []
    print("ASYNC without delete_local_checkpoint_after_upload=False: the checkpoint is deleted")
    ray.shutdown()


def fit(
    name: str,
    loop: Callable[[dict[str, Any]], None],
    save: Callable[..., None],
    *,
    until: int,
    workers: int = 2,
    keep: int | None = None,
    failures: int = 0,
) -> Result:
    config = {"storage_path": str(STORAGE), "name": name, "save": save, "until": until}
    return recipe.fit(loop, config, workers=workers, keep=keep, failures=failures)


def killed_in_a_save(config: dict[str, Any]) -> None:
    """Train; in the first attempt, kill this worker in a save after that of step 2."""
    root = Path(config["storage_path"], config["name"])
    rank = ray.train.get_context().get_world_rank()
    if rank == 1 and not (root / "was-killed").exists():
        threading.Thread(target=partial(kill_in_a_save, root), daemon=True).start()
    recipe.train(config)


def kill_in_a_save(root: Path) -> None:
    while not (root / "step-2").exists() or not any(root.glob(".unified-*")):
        time.sleep(0.0002)
    (root / "was-killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def save_again(config: dict[str, Any]) -> None:
    """Load the newest checkpoint and save it elsewhere."""
    model, optimizer = recipe.build()
    uc.load(ray.train.get_checkpoint().path, model=model, optimizer=optimizer)
    path = Path(config["storage_path"], "again", f"step-{config['until']}")
    uc.save(path, model=model, optimizer=optimizer)


def save_with_default(path: Path, step: int, **state: Any) -> None:
    pending = uc.save_async(path, step=step, **state)

    def commit(checkpoint: Checkpoint, name: str) -> Checkpoint:
        pending.result()
        return checkpoint

    ray.train.report(
        {},
        checkpoint=Checkpoint.from_directory(str(path)),
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=commit,
    )


def steps(name: str) -> list[int]:
    """The steps of a run that are on disk."""
    folders = (STORAGE / name).glob("step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in folders)


def tensors(name: str, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's files."""
    return {
        f"{path.name}: {fqn}": tensor
        for path in (STORAGE / name / f"step-{step}").glob("*.safetensors")
        for fqn, tensor in load_file(path).items()
    }


def equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


if __name__ == "__main__":
    main()
