"""FlexCheckpoint folders for tests, and the values that were written.
`fixtures/flex/README.md` names their origin.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import torch

FIXTURES = Path(__file__).parents[2] / "fixtures" / "flex"
_REFUSED = {"resave_other_layout", "stale_metadata_flex"}
BY_API = [path for path in sorted((FIXTURES / "by_api").iterdir()) if path.is_dir()]
SPECIAL = [
    path
    for path in sorted((FIXTURES / "special").iterdir())
    if path.is_dir() and path.name not in _REFUSED
]
TRAINER = [
    path / "checkpoint-2"
    for path in sorted((FIXTURES / "trainer").glob("*_flex"))
    if path.name not in _REFUSED
]
LINEAR = {
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("qkv_proj", "up_gate_proj"),
    *("0", "2"),  # of `real_model_nested`
}
_PARTS = {
    "model_state": "model",
    "optimizer_state": "optimizer",
    "master_weight": "master_weights",
    "ema_state": "ema",
}
_MOMENTS = {"moment1_0": "exp_avg", "moment2_0": "exp_avg_sq"}
# Paddle's own names of the parameters in `real_model_nested`.
_POWERS = ("beta1_pow_acc_0", "beta2_pow_acc_0")
_KINDS = {"w_0": "weight", "b_0": "bias"}
_STATIC = {"linear_0": "0", "layer_norm_0": "1", "linear_1": "2"}


def copied(path: Path, to: Path) -> Path:
    """Copy a fixture to change."""
    return Path(shutil.copytree(path, to))


def expected(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Return a folder's tensors, from its oracle, by part and name in torch's form."""
    if path.parent.name == "by_api":
        arrays, step = _oracle(path.parent / "expected"), 3.0
    elif path.name == "checkpoint-2":
        arrays, step = _oracle(path.parents[1] / f"{path.parent.name}.expected"), 2.0
    else:
        arrays, step = _oracle(path.parent / f"{path.name}.expected"), 2.0
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    for key, tensor in arrays.items():
        if key == "empty":  # Paddle does not store it
            continue
        part, name = _split_part(key)
        if path.name == "checkpoint-2" and part == "model":
            tensor = tensor.bfloat16()  # the oracle widened it
        if part == "optimizer":
            name, state = _split_state(name)
            if "pow_acc" in state:
                tensors["optimizer", f"{name}/step"] = torch.tensor(step)
                continue
            tensors["optimizer", f"{name}/{_MOMENTS[state]}"] = _as_torch(name, tensor)
        else:
            tensors[part, name] = _as_torch(name, tensor)
    return tensors


def _split_part(key: str) -> tuple[str, str]:
    part, slash, name = key.partition("/")
    if slash and name.endswith(".w_0"):
        return "ema" if part == "ema_state" else "master_weights", name.removesuffix(".w_0")
    if slash:
        return {"optim": "optimizer", **_PARTS}.get(part, part), name
    part, _, name = key.partition(".")
    if part == "optimizer" and name.startswith("master_weights."):
        return "master_weights", _structured(name.removeprefix("master_weights."))
    return (part, name) if part in ("model", "optimizer") else ("model", key)


def _split_state(name: str) -> tuple[str, str]:
    state = next(state for state in (*_MOMENTS, *_POWERS) if name.endswith(state))
    owner = name.removesuffix(state).rstrip("._").removesuffix("_fp32_master_0")
    return _structured(owner), state


def _structured(name: str) -> str:
    """Return the parameter of `real_model_nested` that has Paddle's own name."""
    layer, _, kind = name.partition(".")
    return f"{_STATIC[layer]}.{_KINDS[kind]}" if layer in _STATIC else name


def _as_torch(name: str, tensor: torch.Tensor) -> torch.Tensor:
    layer = name.split(".")[-2] if "." in name else ""
    is_head = layer == "lm_head" and tensor.shape[0] < tensor.shape[1]  # [hidden, vocab]
    return tensor.t() if tensor.dim() == 2 and (layer in LINEAR or is_head) else tensor


@cache
def _oracle(stem: Path) -> dict[str, torch.Tensor]:
    """Return the arrays of an oracle with their dtypes, which numpy may lack."""
    dtypes_file = stem.with_name(f"{stem.name.replace('.expected', '')}.expected_dtypes.json")
    if not dtypes_file.is_file():
        dtypes_file = stem.with_name("expected_dtypes.json")
    dtypes = json.loads(dtypes_file.read_text()) if dtypes_file.is_file() else {}
    with np.load(f"{stem}.npz") as arrays:
        return {
            name: torch.from_numpy(np.array(array)).view(getattr(torch, dtypes[name]))
            if name in dtypes
            else torch.from_numpy(np.array(array))
            for name, array in arrays.items()
        }
