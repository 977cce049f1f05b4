"""What a rank of the cluster machine holds, and its saves: right ones and mistaken ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import unified_ckpt as uc
from tests.support.machines.cluster_model import (
    Bytes,
    Split,
    Tensor,
    as_torch,
    global_array,
    local_array,
)
from tests.support.machines.cluster_plans import (
    NAMES,
    OF_ROWS,
    OWN,
    ROWS,
    SCALE,
    SECONDS,
    SHARED,
    Save,
    Session,
)

Model = tuple[Tensor, ...]


def param(tensor: Tensor) -> str:
    return tensor.name.partition("/")[0]


def split_of(plan: Session, tensor: Tensor) -> Split:
    """How the mesh cuts a tensor; with a stage, only by mesh dim 1."""
    if tensor in (SCALE, ROWS, OF_ROWS):
        return Split(((0, 0), (1, 1)) if tensor == ROWS else ())
    split, ndim = plan.splits[int(tensor.name.split(".")[1])], len(tensor.shape)
    return Split(
        tuple(
            (mesh_dim, dim % ndim)
            for mesh_dim, dim in split.splits
            if ndim and (split.stage is None or mesh_dim != 0)
        ),
        split.stage,
    )


def local(model: Model, plan: Session, rank: int, seed: int) -> dict[Tensor, Bytes]:
    """What a rank holds."""
    arrays = {
        tensor: local_array(global_array(tensor, seed), split_of(plan, tensor), plan.mesh, rank)
        for tensor in model
    }
    return {tensor: array for tensor, array in arrays.items() if array is not None}


def arguments(model: Model, plan: Session, tensors: dict[Tensor, torch.Tensor]) -> dict[str, Any]:
    """The state as `save` and `load` take it."""
    trees: dict[str, dict[str, torch.Tensor]] = {tensor.part: {} for tensor in model}
    for tensor, value in tensors.items():
        trees[tensor.part][tensor.name] = value
    mesh_names, rules, shapes = ("tp", "dp"), {}, {}
    for tensor in model:
        cuts = split_of(plan, tensor).splits
        if cuts:
            rules[param(tensor)] = {mesh_names[mesh_dim]: dim for mesh_dim, dim in cuts}
            shapes[param(tensor)] = tensor.shape
    given: dict[str, Any] = {
        "model": trees["model"],
        "layout": uc.Layout(dict(zip(mesh_names, plan.mesh, strict=True)), rules, shapes),
    }
    for part in ("optimizer", "master_weights"):
        if part in trees:
            given[part] = trees[part]
    if "ema" in trees:
        given["parts"] = {"ema": trees["ema"]}
    return given


def save_rank(
    model: Model,
    plan: Session,
    call: Save,
    *,
    serial: int,
    rank: int,
    root: Path,
    checkpointer: uc.Checkpointer,
) -> object:
    tensors = {
        tensor: as_torch(array, tensor.dtype)
        for tensor, array in local(model, plan, rank, call.seed).items()
    }
    place = SHARED if call.shared else OWN[plan.nodes[rank]]
    path = root / place / NAMES[call.name]
    options = uc.SaveOptions(
        fsync=False,
        timeout_seconds=SECONDS,
        if_exists=call.if_exists,  # type: ignore[arg-type]
        compression=call.compression,  # type: ignore[arg-type]
        node_copies=min(call.copies, len(set(plan.nodes))),
        max_file_bytes=200 if call.seed % 2 else 1 << 30,
    )
    given: dict[str, Any] = {
        "step": call.step,
        "extra": extra_of(serial, call.values[rank]) | {"state": Stateful(call.values[rank])},
        "rank_extra": [rank, serial],
        "options": options,
    }
    if rank and rank == len(plan.nodes) - 1:
        if call.mistake == "call":
            return checkpointer.load(path, model={})
        if call.mistake == "name":
            path = path.with_name("checkpoint-9")
        make_mistake(call.mistake, tensors, given)
    given |= arguments(model, plan, tensors)
    if not call.background:
        return checkpointer.save(path, **given)
    pending = checkpointer.save_async(path, **given)
    for tensor in tensors.values():
        tensor.zero_()  # the job trains on
    try:
        return pending.result(SECONDS)
    except TimeoutError as error:
        raise AssertionError("the save hangs") from error


class Stateful:
    """An object whose state has a tensor."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value, "codes": torch.tensor([7, self.value])}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def extra_of(serial: int, value: int) -> dict[str, object]:
    """What a load returns besides tensors; the bytes get a file of their own. `value`: of this
    rank.
    """
    return {
        "serial": serial,
        "seen": bytes([serial % 250]) * 2000,
        "of rank": {"value": value},
        "state": Stateful(value).state_dict(),
    }


def make_mistake(kind: str, tensors: dict[Tensor, torch.Tensor], arguments: dict[str, Any]) -> None:
    """Change a rank's tensors or arguments so that all ranks must refuse the save."""
    scale = {
        "shape": torch.ones(3),
        "dtype": tensors[SCALE].bfloat16(),
        "meta": torch.ones(2, device="meta"),
    }
    if kind in scale:
        tensors[SCALE] = scale[kind]
    elif kind == "bytes":
        tensors[OF_ROWS] = -tensors[OF_ROWS]  # other bits even if it is huge or no number
    elif kind == "step":
        arguments["step"] += 1
    elif kind == "option":
        arguments["options"] = arguments["options"].model_copy(update={"max_file_bytes": 9})
    elif kind == "extra":
        arguments["rank_extra"] = object()
    elif kind == "missing":
        del tensors[ROWS]
