"""Unified, sharded-safetensors checkpoints for PyTorch training: saved merged, loaded resliced.

`import unified_ckpt as uc`; the names below are all there is. They load on first use, so that `inspect` starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unified_ckpt.errors import (
    CheckpointError,
    FormatError,
    IncompleteError,
    IntegrityError,
    LayoutError,
    MismatchError,
    NotFoundError,
    RankError,
    StorageError,
)

if TYPE_CHECKING:
    from unified_ckpt.api import Checkpointer, load, open, save, save_async, verify  # noqa: A004
    from unified_ckpt.core.layout import Layout, Strided
    from unified_ckpt.engine.build import SaveReport
    from unified_ckpt.engine.convert import ConvertReport
    from unified_ckpt.engine.load import LoadReport
    from unified_ckpt.engine.pending import PendingSave
    from unified_ckpt.engine.prove import VerifyReport
    from unified_ckpt.engine.repair import RepairReport, repair
    from unified_ckpt.exports.convert import convert
    from unified_ckpt.manager.foreign import from_maxtext, from_paddle
    from unified_ckpt.manager.manager import CheckpointManager
    from unified_ckpt.options import ConvertOptions, LoadOptions, ManagerOptions, SaveOptions, SourceOptions
    from unified_ckpt.runtime.randomness import RandomStates
    from unified_ckpt.runtime.sampler import ElasticSampler

_LAZY = {
    "CheckpointManager": "manager.manager",
    "Checkpointer": "api",
    "ConvertOptions": "options",
    "ConvertReport": "engine.convert",
    "ElasticSampler": "runtime.sampler",
    "Layout": "core.layout",
    "LazyTensor": "engine.view",
    "LoadOptions": "options",
    "LoadReport": "engine.load",
    "ManagerOptions": "options",
    "PendingSave": "engine.pending",
    "RandomStates": "runtime.randomness",
    "RepairReport": "engine.repair",
    "SaveOptions": "options",
    "SaveReport": "engine.build",
    "SourceOptions": "options",
    "Strided": "core.layout",
    "VerifyReport": "engine.prove",
    "convert": "exports.convert",
    "from_maxtext": "manager.foreign",
    "from_paddle": "manager.foreign",
    "load": "api",
    "open": "api",
    "repair": "engine.repair",
    "save": "api",
    "save_async": "api",
    "verify": "api",
}

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "Checkpointer",
    "ConvertOptions",
    "ConvertReport",
    "ElasticSampler",
    "FormatError",
    "IncompleteError",
    "IntegrityError",
    "Layout",
    "LayoutError",
    "LazyTensor",
    "LoadOptions",
    "LoadReport",
    "ManagerOptions",
    "MismatchError",
    "NotFoundError",
    "PendingSave",
    "RandomStates",
    "RankError",
    "RepairReport",
    "SaveOptions",
    "SaveReport",
    "SourceOptions",
    "StorageError",
    "Strided",
    "VerifyReport",
    "convert",
    "from_maxtext",
    "from_paddle",
    "load",
    "open",
    "repair",
    "save",
    "save_async",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
