"""Runs recipe.py on CPU processes, which torchtune supports only in parts.

With STOCK, without the line that switches it. With KILL, a pattern: the process is SIGKILLed when
it opens a path that matches it to write.
"""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtune import training
from torchtune.training.checkpointing import _checkpointer

RECIPE = Path(__file__).with_name("recipe.py")


def use_cpu() -> None:
    """Replace what names a GPU: memory statistics, and "cpu:gloo,cpu:gloo" as a backend."""
    training.get_distributed_backend = lambda *_, **__: "gloo"
    training.get_memory_stats = lambda *_, **__: {}
    training.log_memory_stats = lambda *_, **__: None
    training.cleanup_before_training = lambda: None  # empties the cache of a GPU


def use_another_group() -> None:
    """Let the stock background save have a gloo group of its own, as it has beside NCCL."""
    stock, groups = _checkpointer.async_save, []

    def async_save(*arguments: Any, process_group: Any, **more: Any) -> Any:
        if not groups:
            groups.append(dist.new_group(backend="gloo"))
        return stock(*arguments, process_group=groups[0], **more)

    _checkpointer.async_save = async_save


def kill_at(pattern: str) -> None:
    def hook(event: str, values: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(values[2], int) and values[2] & os.O_ACCMODE
        if writes and re.search(pattern, str(values[0])):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    use_cpu()
    lines = RECIPE.read_text().splitlines()
    if "STOCK" in os.environ:
        use_another_group()
        lines = [line for line in lines if not re.search(r"\bdcp\b", line)]
    if "KILL" in os.environ:
        kill_at(os.environ["KILL"])
    exec(compile("\n".join(lines), str(RECIPE), "exec"), {"__name__": "__main__"})
