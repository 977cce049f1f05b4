"""Gives Axolotl the plugin `unified_plugin.UnifiedCheckpoints`."""

from axolotl.integrations.base import BasePlugin

from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback


class UnifiedCheckpoints(BasePlugin):
    """Saves and resumes unified checkpoints."""

    def add_callbacks_pre_trainer(self, cfg, model):
        """Return the callback."""
        return [UnifiedCheckpointCallback()]
