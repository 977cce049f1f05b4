"""Translates the configurations of other libraries, as they stand, to our options.

A flag about checkpoints has an effect here, requests nothing at its default, or is refused by name.
All other flags belong to the trainer. A flag that is not set keeps the default of this library.
"""

from unified_ckpt.manager.option_aliases.maxtext import from_maxtext
from unified_ckpt.manager.option_aliases.paddle import from_paddle

__all__ = ["from_maxtext", "from_paddle"]
