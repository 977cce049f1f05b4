"""A rank of train.py on CPUs, where Accelerate does not allow FSDP: `on_cpu.py ARGUMENTS`.

If `STOCK` is set, the line that switches it is left out, with its import. If `KILL` is set, the
process is SIGKILLed when it opens a path that matches it to write, in its second save. At the end,
it describes its state in RUN/state-RANK.
"""

import hashlib
import os
import re
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path

TRAIN = Path(__file__).with_name("train.py")


def use_cpu() -> None:
    """Let the processes pose as GPUs. FSDP1 compares the device with one that has no index."""
    os.environ["ACCELERATE_USE_CPU"] = "1"
    state = PartialState(cpu=True)
    state.distributed_type, state.device = DistributedType.MULTI_GPU, torch.device("cpu")


def kill_at(pattern: str) -> None:
    """SIGKILL this process when it opens the second path that matches the pattern to write."""
    paths: set[str] = set()

    def hook(event: str, values: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(values[2], int) and values[2] & os.O_ACCMODE
        if not writes or not re.search(pattern, str(values[0])):
            return
        paths.add(values[0])
        if len(paths) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def run_train(arguments: list[str], *, stock: bool) -> dict[str, Any]:
    """Run train.py, and return its names."""
    lines = TRAIN.read_text().splitlines()
    rest = [line for line in lines if not (stock and "unified_ckpt.dcp" in line)]
    assert len(lines) - len(rest) == (2 if stock else 0), "the line and its import"
    sys.argv = [str(TRAIN), *arguments]
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("\n".join(rest), str(TRAIN), "exec"), names)
    return names


def describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    local = value.to_local() if isinstance(value, DTensor) else value
    content = local.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{local.dtype} {tuple(local.shape)} {hashlib.sha256(content).hexdigest()}"


def describe_state(names: dict[str, Any]) -> str:
    """Describe this rank's parameters and optimizer state, and the scheduler."""
    state = [
        {name: parameter.data for name, parameter in names["model"].named_parameters()},
        names["optimizer"].optimizer.state_dict(),
        names["scheduler"].state_dict(),
    ]
    leaves, _ = tree_flatten_with_path(state)
    return "".join(sorted(f"{keystr(path)}: {describe(leaf)}\n" for path, leaf in leaves))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if "KILL" in os.environ:
        kill_at(os.environ["KILL"])
    use_cpu()
    names = run_train(sys.argv[1:], stock="STOCK" in os.environ)
    (names["arguments"].run / f"state-{os.environ['RANK']}").write_text(describe_state(names))
