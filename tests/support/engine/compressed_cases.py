"""Draws mixed-precision states on meshes, and what a compressed save must store of them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open

from tests.support.engine.reshard_cases import INTS, Case, bits
from tests.support.harness import DrawnLayout, drawn_layouts
from tests.support.oracles import Array
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import Sharding, TensorSpec
from unified_ckpt.format.encodings import BlockEncoding, first_moment, second_moment

MOMENT_BITS = {"O1": (8, 8), "O2": (6, 4)}
MOMENTS = ("exp_avg", "exp_avg_sq")
LENGTHS = st.sampled_from([1, 31, 32, 63, 65, 100, 130, 192, 333])
ROWS = st.sampled_from([1, 7, 260, 520])


def rounded(masters: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """Round float32 bits to bfloat16 bits, ties to even."""
    return ((masters + 0x7FFF + (masters >> 16 & 1)) >> 16).astype(np.uint16)


def keys_of(fqn: str) -> list[Key]:
    """The tensors of a parameter."""
    moments = [("optimizer", f"{fqn}/{moment}") for moment in MOMENTS]
    return [("model", fqn), ("master_weights", fqn), *moments]


def arrays_of(fqn: str, shape: tuple[int, ...], seed: int) -> dict[Key, Array]:
    """A parameter's state as bits: trained values, and a few that encodings cannot hold."""
    rng = np.random.default_rng(seed)
    masters = rng.normal(0, 0.02, shape).astype(np.float32).view(np.uint32)
    first = (rng.normal(0, 1e-3, shape) * rng.integers(0, 2, shape)).astype(np.float32)
    second = np.square(rng.normal(0, 1e-4, shape)).astype(np.float32)
    flat = [array.reshape(-1) for array in (masters, first, second)]
    places = rng.permutation(masters.size)[: max(masters.size // 200, 1)]
    flat[0][places[::2]] = flat[0][places[::2]] & 0xFFFF0000 | 0x8000  # ties
    model = rounded(masters)
    model.reshape(-1)[places[1::4]] ^= 1  # a model that is not the rounded master
    if len(places) > 4:
        flat[0][places[0]], flat[1][places[1]], flat[2][places[2]] = 0x7F800001, np.inf, -1.0
        flat[1][places[3]] = np.nan
    arrays = model, masters, first.view(np.uint32), second.view(np.uint32)
    return dict(zip(keys_of(fqn), arrays, strict=True))


@st.composite
def compressed_cases(
    draw: st.DrawFn, *, max_world: int, loads: int = 0, whole_models: bool = False
) -> Case:
    """Parameters with masters and moments, each sharded like its parameter.

    With `whole_models`, ranks may hold some of the parameters whole, as ZeRO-1 does.
    """
    shapes = {}
    for number in range(draw(st.integers(1, 3))):
        outer = draw(st.sampled_from([(), (draw(ROWS),), (draw(ROWS),), (3, draw(ROWS))]))
        shapes[f"layer{number}.w"] = (*outer, draw(LENGTHS))
    seed, arrays = draw(st.integers(0, 99)), dict[Key, Array]()
    for fqn, shape in shapes.items():
        arrays |= arrays_of(fqn, shape, seed)
    params = [(("model", fqn), TensorSpec("BF16", shape)) for fqn, shape in shapes.items()]
    layouts = [
        _of_all_parts(
            draw(drawn_layouts(tensors=params, max_world=max_world, complete=True)),
            {fqn for fqn in shapes if whole_models and draw(st.integers(0, 3)) == 0},
        )
        for _ in range(1 + loads)
    ]
    column_major = frozenset(key for key in arrays if draw(st.integers(0, 4)) == 0)
    return Case(arrays, layouts[0], tuple(layouts[1:]), column_major)


def _of_all_parts(layout: DrawnLayout, whole_models: Collection[str]) -> DrawnLayout:
    """Add masters and moments of the model's tensors; ranks hold `whole_models` whole."""
    tensors = [
        replace(
            tensor,
            decl=tensor.decl._replace(
                part=part,
                fqn=fqn,
                spec=TensorSpec("BF16" if part == "model" else "F32", tensor.decl.spec.shape),
                sharding=Sharding()
                if part == "model" and fqn in whole_models
                else tensor.decl.sharding,
            ),
        )
        for tensor in layout.tensors
        for part, fqn in keys_of(tensor.decl.fqn)
    ]
    return DrawnLayout(layout.world, tuple(tensors))


def _encodes(block_encoding: BlockEncoding, array: Array) -> tuple[dict[str, bytes], Array]:
    """Stored bytes of a moment by suffix, and the flat indices of its exceptions."""
    values = array.view(np.float32).reshape(-1, array.shape[-1]).copy()
    unfit = ~np.isfinite(values)
    if not block_encoding.signed:
        unfit |= np.signbit(values)
    values[unfit] = 0
    encoded = block_encoding.encode(values)
    return {"": encoded.codes.tobytes(), ".scale": encoded.scales.tobytes()}, np.flatnonzero(unfit)


def expected_tensors(
    arrays: Mapping[Key, Array], compression: str
) -> tuple[dict[Key, bytes], dict[str, dict[str, bytes]]]:
    """The stored tensors, and the exceptions files by part, that one encoder of whole tensors
    gives.
    """
    stored: dict[Key, bytes] = {}
    exceptions: dict[str, dict[str, bytes]] = {}
    for (part, fqn), array in arrays.items():
        state, unfit, by_suffix = fqn.rpartition("/")[2], None, {"": array.tobytes()}
        if part == "master_weights":
            model = arrays["model", fqn].astype(np.uint32) << 16
            low = array.astype(np.uint16).view(np.int16)
            unfit = np.flatnonzero(model + low.astype(np.int32).view(np.uint32) != array)
            by_suffix = {"": low.tobytes()}
        elif state in MOMENTS and compression in MOMENT_BITS and array.shape[-1] >= 32:
            number = MOMENTS.index(state)
            make = (first_moment, second_moment)[number]
            by_suffix, unfit = _encodes(make(MOMENT_BITS[compression][number]), array)
        if unfit is not None and len(unfit) > max(array.size // 64, 1):
            unfit, by_suffix = None, {"": array.tobytes()}
        stored |= {(part, fqn + suffix): body for suffix, body in by_suffix.items()}
        if unfit is not None and len(unfit):
            values = array.reshape(-1)[unfit]
            exceptions.setdefault(part, {})[f"{fqn}.index"] = unfit.astype("<i8").tobytes()
            exceptions[part][f"{fqn}.value"] = values.astype("<u4").tobytes()
    return stored, exceptions


def stored_tensors(folder: Path) -> tuple[dict[Key, bytes], dict[str, dict[str, bytes]]]:
    """What a folder stores, as `expected_tensors`. Sizes are those of the manifest."""
    parts = json.loads((folder / "unified_checkpoint.json").read_text())["parts"]
    stored: dict[Key, bytes] = {}
    exceptions: dict[str, dict[str, bytes]] = {}
    for part, record in parts.items():
        for file in record["files"]:
            stored |= {(part, name): body for name, body in _read(folder / file).items()}
        if record["exceptions"] is not None:
            exceptions[part] = _read(folder / record["exceptions"]["file"])
        assert record["total_nbytes"] == sum(
            len(body) for key, body in stored.items() if key[0] == part
        )
    return stored, exceptions


def stored_on_nodes(
    folders: Sequence[Path],
) -> tuple[dict[Key, bytes], dict[str, dict[str, bytes]], dict[Key, set[str]]]:
    """What the folders of all nodes store together, as `expected_tensors`, and the spans of the
    shards of each tensor; "" for a whole one.

    Every folder has the exceptions of all.
    """
    arrays: dict[Key, np.ndarray] = {}
    spans: dict[Key, set[str]] = {}
    exceptions: list[dict[str, dict[str, bytes]]] = []
    for folder in folders:
        parts = json.loads((folder / "unified_checkpoint.json").read_text())["parts"]
        exceptions.append(
            {
                part: _read(folder / record["exceptions"]["file"])
                for part, record in parts.items()
                if record["exceptions"] is not None
            }
        )
        for part, file in ((p, f) for p, record in parts.items() for f in record["files"]):
            with safe_open(folder / file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    value = opened.get_tensor(name)
                    data = value.view(INTS[value.element_size()]).numpy()
                    fqn, _, span = name.partition("@")
                    key = part.removesuffix("_shards"), fqn
                    assert part.endswith("_shards") == bool(span), name
                    spans.setdefault(key, set()).add(span)
                    whole = [f"0:{size}/{size}" for size in data.shape]
                    texts = span.split(",") if span else whole
                    cuts = [[int(n) for n in re.split("[:/]", text)] for text in texts]
                    shape = tuple(size for _, _, size in cuts)
                    array = arrays.setdefault(key, np.zeros(shape, data.dtype))
                    assert array.shape == shape, key
                    array[tuple(slice(low, high) for low, high, _ in cuts)] = data
    assert exceptions == exceptions[:1] * len(folders)
    return {key: array.tobytes() for key, array in arrays.items()}, exceptions[0], spans


def _read(file: Path) -> dict[str, bytes]:
    with safe_open(file, framework="pt") as opened:
        return {name: bits(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118
