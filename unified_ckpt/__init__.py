"""Distributed checkpoints for PyTorch, written as merged safetensors files that any layout loads.

Use `import unified_ckpt as uc`; `uc.save` and `uc.load` come first. The names in `__all__` are the
public API. They are imported on first use, so that `unified-ckpt inspect` starts without torch.
Where torch is imported before, saves and loads are imported at once: no save waits for that.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from unified_ckpt.errors import (
    CheckpointError,
    FormatError,
    IncompleteError,
    IntegrityError,
    LayoutError,
    MismatchError,
    MissingPackageError,
    NotFoundError,
    OptionError,
    RankError,
    StorageError,
)

if TYPE_CHECKING:
    from unified_ckpt.api import (
        estimate,
        load,
        open,  # noqa: A004
        save,
        save_async,
        verify,
    )
    from unified_ckpt.checkpointer import Checkpointer
    from unified_ckpt.core.sharding.layouts import Layout, Strided
    from unified_ckpt.engine.folder.verify import VerifyReport
    from unified_ckpt.engine.load.report import LoadReport
    from unified_ckpt.engine.repair.repair import RepairReport, repair
    from unified_ckpt.engine.rewrite.convert import ConvertReport
    from unified_ckpt.engine.save.background.pending import PendingSave
    from unified_ckpt.engine.save.report import SaveReport
    from unified_ckpt.engine.source.view import LazyTensor
    from unified_ckpt.estimates.estimate import Estimate
    from unified_ckpt.foreign.export.convert import convert
    from unified_ckpt.foreign.orbax.options import from_maxtext
    from unified_ckpt.foreign.paddle.options import from_paddle
    from unified_ckpt.manager.events.run_events import SaveFailure
    from unified_ckpt.manager.manager import CheckpointManager
    from unified_ckpt.options import (
        ConvertOptions,
        LoadOptions,
        ManagerOptions,
        RunOptions,
        SaveOptions,
        SourceOptions,
    )
    from unified_ckpt.runtime.torch_state.rng import RandomStates
    from unified_ckpt.runtime.torch_state.sampler import ElasticSampler
    from unified_ckpt.runtime.torch_state.shards.shards import Shards
    from unified_ckpt.storage_options import StorageOptions

_LAZY = {
    "CheckpointManager": "manager.manager",
    "Checkpointer": "checkpointer",
    "ConvertOptions": "options",
    "ConvertReport": "engine.rewrite.convert",
    "ElasticSampler": "runtime.torch_state.sampler",
    "Estimate": "estimates.estimate",
    "Layout": "core.sharding.layouts",
    "LazyTensor": "engine.source.view",
    "LoadOptions": "options",
    "LoadReport": "engine.load.report",
    "ManagerOptions": "options",
    "PendingSave": "engine.save.background.pending",
    "RandomStates": "runtime.torch_state.rng",
    "RepairReport": "engine.repair.repair",
    "RunOptions": "options",
    "SaveFailure": "manager.events.run_events",
    "SaveOptions": "options",
    "SaveReport": "engine.save.report",
    "Shards": "runtime.torch_state.shards.shards",
    "SourceOptions": "options",
    "StorageOptions": "storage_options",
    "Strided": "core.sharding.layouts",
    "VerifyReport": "engine.folder.verify",
    "convert": "foreign.export.convert",
    "estimate": "api",
    "from_maxtext": "foreign.orbax.options",
    "from_paddle": "foreign.paddle.options",
    "load": "api",
    "open": "api",
    "repair": "engine.repair.repair",
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
    "Estimate",
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
    "MissingPackageError",
    "NotFoundError",
    "OptionError",
    "PendingSave",
    "RandomStates",
    "RankError",
    "RepairReport",
    "RunOptions",
    "SaveFailure",
    "SaveOptions",
    "SaveReport",
    "Shards",
    "SourceOptions",
    "StorageError",
    "StorageOptions",
    "Strided",
    "VerifyReport",
    "convert",
    "estimate",
    "from_maxtext",
    "from_paddle",
    "load",
    "open",
    "repair",
    "save",
    "save_async",
    "verify",
]


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("unified-ckpt")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


if "torch" in sys.modules:
    import_module(f"{__name__}.api")
