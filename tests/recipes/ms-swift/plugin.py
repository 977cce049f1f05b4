"""Gives ms-swift the callback `unified_ckpt`."""

from swift.callbacks import callbacks_map

from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback

callbacks_map["unified_ckpt"] = lambda args, trainer: UnifiedCheckpointCallback()
