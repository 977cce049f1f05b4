"""Writes trees of numpy arrays as checkpoints with Orbax itself, on four devices of JAX. Takes a
pickled list of jobs; of several processes, also the number of this one, how many there are, and a
port.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any, NamedTuple

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

if len(sys.argv) > 2:
    jax.distributed.initialize(f"localhost:{sys.argv[4]}", int(sys.argv[3]), int(sys.argv[2]))

import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class ScaleByAdamState(NamedTuple):
    """The state as optax names it."""

    count: Any
    mu: Any
    nu: Any


MESH = Mesh(np.array(jax.devices()), ("fsdp",))


def on_devices(leaf: Any) -> Any:
    """Shard on the last dim that the devices divide, so that an array has several chunks; otherwise
    keep it whole.
    """
    if not isinstance(leaf, np.ndarray | np.generic):
        return leaf
    dims = [dim for dim, size in enumerate(leaf.shape) if size % len(jax.devices()) == 0 and size]
    spec = PartitionSpec(
        *["fsdp" if dims and dim == dims[-1] else None for dim in range(leaf.ndim)]
    )
    return jax.make_array_from_callback(
        leaf.shape, NamedSharding(MESH, spec), lambda index: leaf[index]
    )


def adam(tree: Any) -> Any:
    """Replace each {"adam": (count, mu, nu)} by optax's state."""
    if isinstance(tree, dict):
        return (
            ScaleByAdamState(*map(adam, tree["adam"]))
            if set(tree) == {"adam"}
            else {key: adam(value) for key, value in tree.items()}
        )
    return type(tree)(map(adam, tree)) if isinstance(tree, list | tuple) else tree


def write(job: dict[str, Any]) -> None:
    tree = jax.tree.map(on_devices, adam(job["tree"]))
    path, api = job["path"], job["api"]
    if api == "v1":
        import orbax.checkpoint.experimental.v1 as v1

        v1.save(path, tree)
    elif api == "bare":
        ocp.PyTreeCheckpointer(use_ocdbt=job["ocdbt"], use_zarr3=job["zarr3"]).save(path, tree)
    else:
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=job["ocdbt"], use_zarr3=job["zarr3"])
        with ocp.CheckpointManager(
            path, item_handlers={"items": handler, "meta": ocp.JsonCheckpointHandler()}
        ) as manager:
            for step in job["steps"]:
                items = {
                    "items": ocp.args.PyTreeSave(
                        tree, ocdbt_target_data_file_size=job.get("file_nbytes")
                    )
                }
                if "meta" in job:
                    items["meta"] = ocp.args.JsonSave(job["meta"])
                manager.save(
                    step, args=ocp.args.Composite(**items), custom_metadata=job.get("custom")
                )
            manager.wait_until_finished()


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        for job in pickle.load(file):
            write(job)
