"""What a save under options must store, and what a load under options must give, by the words of
the documentation. Imports nothing of the package but the classes of the options.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

import unified_ckpt as uc
from tests.support.equality import same
from tests.support.options.states import FLOATS, Tensors, WholeState

WEIGHTS = ("model", "model_without_masters", "master_weights")
HOLDS = {  # float dtype -> those whose every value it holds
    "float64": {"float64", "float32", "float16", "bfloat16"},
    "float32": {"float32", "float16", "bfloat16"},
    "float16": {"float16"},
    "bfloat16": {"bfloat16"},
}


def holds(target: torch.dtype, stored: torch.dtype) -> bool:
    names = [str(dtype).removeprefix("torch.") for dtype in (target, stored)]
    return names[0] == names[1] or names[1] in HOLDS.get(names[0], ())


@dataclass(frozen=True)
class Stored:
    """What a checkpoint holds. `omitted`: parts of the state that the save left out."""

    parts: Mapping[str, Tensors]
    omitted: frozenset[str] = frozenset()
    compression: str = "none"


def selects(options: uc.SaveOptions | uc.ConvertOptions, part: str) -> bool:
    omit = getattr(options, "omit", ())
    return part not in omit and (options.parts is None or part in options.parts)


def masters_of(state: WholeState, model_dtype: str | None) -> Tensors:
    """Return the masters of a save: the caller's, and tensors that `model_dtype` would change."""
    cast = {
        name: tensor
        for name, tensor in state.parts["model"].items()
        if model_dtype and tensor.is_floating_point() and tensor.dtype != FLOATS[model_dtype]
    }
    return {**cast, **state.masters}


def refusals_of_save(state: WholeState, options: uc.SaveOptions, *, has_extra: bool) -> list[str]:
    """Return words of the documented errors of options that do not fit a state."""
    masters = masters_of(state, options.model_dtype)
    available = set(state.parts) | ({"master_weights"} if masters else set())
    known = available | {"master_weights"}
    if options.omit:
        known |= {"model", "optimizer"}
    refusals = []
    if set(options.omit or options.parts or ()) - known:
        refusals.append("expected parts of this state")
    stored = {part for part in available if selects(options, part)}
    if not stored and not has_extra:
        refusals.append("nothing to save")
    if not stored & {"model", "master_weights"}:
        refusals.append("leaves out the model")
    return refusals


def stored_by_save(state: WholeState, options: uc.SaveOptions) -> Stored:
    """Return what a save that is not refused stores."""
    model, masters = state.parts["model"], masters_of(state, options.model_dtype)
    parts = {**state.parts, "master_weights": masters}
    parts = {part: tensors for part, tensors in parts.items() if tensors}
    omitted = frozenset(part for part in parts if not selects(options, part))
    stored = {part: tensors for part, tensors in parts.items() if part not in omitted}
    if "model" in stored and options.model_dtype:
        dtype = FLOATS[options.model_dtype]
        stored["model"] = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in model.items()
        }
    if "model" in omitted:
        different = {
            name: tensor
            for name, tensor in model.items()
            if name not in masters or not same(masters[name].to(tensor.dtype), tensor)
        }
        stored |= {"model_without_masters": different} if different else {}
    return Stored(stored, omitted, options.compression)


def viewed(stored: Stored, source: uc.SourceOptions) -> Stored:
    """Return the checkpoint as the options show it: under other names, with stacked layers."""
    parts = {part: dict(tensors) for part, tensors in stored.parts.items()}
    if source.rename:
        parts = {
            part: {
                f"{name.removesuffix(key)}weight{key[1:]}" if "layers." in name else name: tensor
                for name, tensor in tensors.items()
                for key in ["/".join(["w", *name.split("/")[1:]])]
            }
            for part, tensors in parts.items()
        }
    if source.layers == "stacked":
        for tensors in parts.values():
            pairs = [(name, name.replace(".0.", ".1.")) for name in tensors if ".0." in name]
            for first, second in pairs:
                pair, key = (tensors.pop(first), tensors.pop(second)), first.replace(".0.", ".")
                is_count = pair[0].dim() == 0
                tensors[key] = pair[0] if is_count else torch.stack(pair, source.layer_dim)
    return Stored(parts, stored.omitted, stored.compression)


@dataclass(frozen=True)
class Target:
    """What a load must give: `values` by part; `refusals`: words of errors, any of which may be
    raised before a target changes.
    """

    values: Mapping[str, Tensors]
    refusals: tuple[str, ...] = ()


def loaded(
    stored: Stored, targets: Mapping[str, Tensors], options: uc.LoadOptions, *, strict: bool
) -> Target:
    """Return the values of targets after a load. Without `strict`, what differs is left out."""
    selected = {part: targets[part] for part in targets if options.loads(part)}
    is_rounded = "master_weights" in stored.omitted and "optimizer" in selected
    values, refusals = {part: dict(tensors) for part, tensors in targets.items()}, []
    for part, tensors in selected.items():
        for name, target in tensors.items():
            value = _value(stored, part, name, target.dtype, options.cast, is_rounded=is_rounded)
            if isinstance(value, str):
                refusals.append(value)
            else:
                values[part][name] = value
    if options.parts is None and "optimizer" in targets and _drops_masters(stored, targets):
        refusals.append("more precise than the model")
    refusals = refusals if strict else []
    if set(options.parts or ()) - targets.keys():
        refusals.append("has no target in this load")
    return Target(targets, tuple(refusals)) if refusals else Target(values)


def _drops_masters(stored: Stored, targets: Mapping[str, Tensors]) -> bool:
    """Return whether no target can hold some stored master weight of the model."""
    masters = stored.parts.get("master_weights", {})
    return any(
        name in masters
        and masters[name].itemsize > target.itemsize
        and masters[name].itemsize > targets.get("master_weights", {}).get(name, target).itemsize
        for name, target in targets.get("model", {}).items()
    )


def _value(
    stored: Stored, part: str, name: str, dtype: torch.dtype, cast: bool, *, is_rounded: bool
) -> Tensor | str:
    """Return a target's value: of the stored copies of a weight, the most precise one that the
    target can hold.
    """
    order = {"model": WEIGHTS, "master_weights": ("master_weights", *WEIGHTS[:2])}
    copies = [
        (each, stored.parts[each][name])
        for each in order.get(part, (part,))
        if name in stored.parts.get(each, ())
    ]
    if not copies:
        return "is not in the checkpoint"
    exact = [copy for copy in copies if holds(dtype, copy[1].dtype)]
    stored_part, value = max(exact, key=lambda copy: copy[1].itemsize, default=copies[0])
    may_cast = cast or stored_part != part
    if not (is_rounded and stored_part in WEIGHTS):
        may_cast |= holds(dtype, value.dtype)
    return value.to(dtype) if may_cast or value.dtype == dtype else "has dtype"


def check_folder(folder: Path, stored: Stored, max_file_bytes: int | None) -> None:
    """Check each tensor that the files of a merged folder hold, with the safetensors package."""
    for part, tensors in stored.parts.items():
        weight_map = json.loads((folder / f"{part}.safetensors.index.json").read_text())[
            "weight_map"
        ]
        for file in set(weight_map.values()):
            with safe_open(folder / file, framework="pt") as opened:
                found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            file_nbytes = sum(tensor.nbytes for tensor in found.values())
            assert len(found) == 1 or file_nbytes <= (max_file_bytes or 1_000_000_000), file
            if stored.compression == "none":
                assert found.keys() <= tensors.keys(), (part, found.keys())
                for name, tensor in found.items():
                    assert same(tensor, tensors[name]), f"{part}:{name} is not what was saved"
        if stored.compression == "none":
            assert weight_map.keys() == tensors.keys(), (part, weight_map.keys())


def differences(stored: Stored, part: str, right: Tensors, actual: Tensors) -> Iterator[str]:
    """Yield the names of wrong values. Compressed moments may differ by their documented error."""
    for name, tensor in right.items():
        is_moment = part == "optimizer" and name.rpartition("/")[2].startswith("exp_avg")
        is_lossy = is_moment and stored.compression in ("O1", "O2")
        whole = stored.parts[part][name] if is_lossy else tensor
        if not is_lossy or whole.dim() == 0 or whole.shape[-1] < 32 or not whole.numel():
            if not same(actual[name], tensor):
                yield f"{part}:{name}"
        elif not _is_near(actual[name], tensor, whole, name, stored.compression):
            yield f"{part}:{name} beyond the error of {stored.compression}"


def _is_near(actual: Tensor, tensor: Tensor, whole: Tensor, name: str, compression: str) -> bool:
    if actual.dtype != tensor.dtype or actual.shape != tensor.shape:
        return False
    finite = tensor.isfinite()
    if not torch.equal(actual[~finite], tensor[~finite]):
        return False
    actual, tensor, whole = (
        torch.where(value.isfinite(), value, 0.0).double() for value in (actual, tensor, whole)
    )
    error = (actual - tensor).abs()
    if name.endswith("exp_avg"):  # codes of the root of |m| / largest of the block
        steps = {"O1": 127, "O2": 31}[compression]
        return bool((error <= whole.abs().max() * (1.5 / steps + 2**-8)).all())
    positive = whole[whole > 0]
    if not len(positive):
        return not bool(actual.any())
    octaves = float(torch.log2(positive.max() / positive.min())) + 2
    codes = {"O1": 254, "O2": 14}[compression]
    return bool((error <= tensor * (octaves / codes + 2**-6)).all())
