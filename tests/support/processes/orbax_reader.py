"""Restores a step with Orbax itself, as numpy arrays and onto devices of JAX, and pickles both
trees. Takes the root, the step and the path of the pickle.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import orbax.checkpoint as ocp

root, step, target = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
plain = ocp.PyTreeCheckpointer().restore(f"{root}/{step}/items")
sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
abstract = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), plain
)
handler = ocp.PyTreeCheckpointHandler()
with ocp.CheckpointManager(
    root, item_names=("items",), item_handlers={"items": handler}
) as manager:
    assert manager.latest_step() == step
    restore = ocp.args.PyTreeRestore(
        item=abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract)
    )
    on_devices = manager.restore(step, args=ocp.args.Composite(items=restore))["items"]
assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(on_devices))
target.write_bytes(pickle.dumps((plain, jax.tree.map(np.asarray, on_devices))))
