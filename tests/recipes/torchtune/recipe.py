"""torchtune's full finetuning, with distributed checkpoints of `unified_ckpt`.

tune run --nproc_per_node 2 recipe.py --config config.yaml enable_async_checkpointing=True
"""

import runpy
from pathlib import Path

import torchtune
from torchtune.training.checkpointing import _checkpointer

from unified_ckpt import dcp

vars(_checkpointer).update(save=dcp.save, async_save=dcp.async_save, load=dcp.load)  # the line

RECIPES = Path(torchtune.__file__).parents[1] / "recipes"
runpy.run_path(str(RECIPES / "full_finetune_distributed.py"), run_name="__main__")
