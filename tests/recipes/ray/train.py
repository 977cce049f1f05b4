"""A Ray Train loop that saves and resumes with unified_ckpt, and whose weights are sharded."""

from pathlib import Path

import ray.train
import torch
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchTrainer
from torch.distributed.fsdp import fully_shard

import unified_ckpt as uc

REPLACE = uc.SaveOptions(if_exists="replace")


def save(path, step, **state):
    """Save; Ray learns that the folder is there."""
    uc.save(path, step=step, options=REPLACE, **state)
    ray.train.report(
        {"step": step},
        checkpoint=Checkpoint.from_directory(str(path)),
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )


def save_async(path, step, **state):
    """Save in the background; Ray learns of the folder once it is committed."""
    pending = uc.save_async(path, step=step, options=REPLACE, **state)

    def commit(checkpoint, name):
        pending.result()
        return checkpoint

    ray.train.report(
        {"step": step},
        checkpoint=Checkpoint.from_directory(str(path)),
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=commit,
        delete_local_checkpoint_after_upload=False,  # the default deletes the checkpoint
    )


def build():
    """Return a model whose parameters are sharded over the workers, and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(config):
    """Run on each worker."""
    model, optimizer = build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = {"model": model, "optimizer": optimizer, "extra": {"scheduler": scheduler}}
    root = Path(config["storage_path"], config["name"])
    step = 0
    if checkpoint := ray.train.get_checkpoint():  # after a failure, or in a later fit()
        step = uc.load(checkpoint.path, **state).step
    while step < config["until"]:
        step += 1
        generator = torch.Generator().manual_seed(
            1000 * step + ray.train.get_context().get_world_rank()
        )
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        config["save"](root / f"step-{step}", step, **state)


def fit(loop, config, workers=2, keep=None, failures=0):
    """Run a loop on workers, from the newest checkpoint of this name."""
    trainer = TorchTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            storage_path=config["storage_path"],
            name=config["name"],
            checkpoint_config=CheckpointConfig(num_to_keep=keep),
            failure_config=FailureConfig(max_failures=failures),
        ),
    )
    return trainer.fit()


if __name__ == "__main__":
    storage = str(Path("runs").absolute())
    fit(train, {"storage_path": storage, "name": "run", "save": save, "until": 10}, failures=3)
