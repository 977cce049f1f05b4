"""`torch.distributed.checkpoint` with folders of this library: change one import.

`import unified_ckpt.dcp as dcp` replaces `import torch.distributed.checkpoint as dcp`. Here are
`save`, `async_save` and `load`; every other name is torch's own.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch.distributed.checkpoint as torch_dcp

from unified_ckpt.dcp.exceptions import DcpError
from unified_ckpt.dcp.state_dict_loader import load, load_state_dict
from unified_ckpt.dcp.state_dict_saver import async_save, save, save_state_dict

__all__ = [
    "DcpError",
    "async_save",
    "load",
    "load_state_dict",
    "save",
    "save_state_dict",
]
# Names of torch that read or write its own format, and what to use.
_REFUSED = {
    "format_utils": "convert folders with `unified-ckpt convert`",
    "load_sharded_optimizer_state_dict": "load it with get_optimizer_state_dict and `load`",
}


def __dir__() -> list[str]:
    return sorted({*__all__, *dir(torch_dcp)} - _REFUSED.keys())


def __getattr__(name: str) -> Any:
    if name in _REFUSED:
        raise AttributeError(
            f"{name}: is for folders of torch.distributed.checkpoint, expected one of ours; "
            f"{_REFUSED[name]}, or import it from torch"
        )
    if not hasattr(torch_dcp, name) and not name.startswith("_"):
        try:
            return import_module(f"torch.distributed.checkpoint.{name}")  # such as `state_dict`
        except ModuleNotFoundError:
            pass
    return getattr(torch_dcp, name)
