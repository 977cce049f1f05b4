"""Writes a source as an Orbax checkpoint: a pytree of arrays, for MaxText its train state.

How data could be lost: an array is written in part, or a chunk does not arrive. So every chunk is
read back and compared before the checkpoint gets its name. tensorstore writes, a few chunks at a
time.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from itertools import pairwise
from math import prod
from typing import Any
from zlib import crc32

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import raise_if_any
from unified_ckpt.engine.rewrite.tensors import OnProgress
from unified_ckpt.engine.source.protocol import Source, SourceMetadata, read_box
from unified_ckpt.errors import FormatError, IntegrityError
from unified_ckpt.foreign.orbax.arrays import chunk_boxes, import_tensorstore, kvstore_spec
from unified_ckpt.foreign.orbax.detect import ORBAX_STEP, ORBAX_TREE
from unified_ckpt.foreign.orbax.folders import COMMITTED
from unified_ckpt.foreign.orbax.source import open_orbax
from unified_ckpt.foreign.orbax.tree import Path
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.options import ConvertOptions, SourceOptions
from unified_ckpt.runtime.torch_state.tensors import torch_dtype
from unified_ckpt.views.materialize import read_tensor

_ITEM = "items"  # MaxText's name of the tree in a step
_CHUNK_NBYTES = 32 << 20
_MAX_IN_FLIGHT, _MAX_IN_FLIGHT_NBYTES = 256, 128 << 20  # chunks
_MOMENTS = {"exp_avg": "mu", "exp_avg_sq": "nu"}  # torch's name -> optax's
_PARAMS: Path = ("params", "params")
_ADAM: Path = ("opt_state", "0")
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_DICT_KEY, _SEQUENCE_KEY = 2, 1  # of Orbax


def write_orbax(source: Source, path: str, _options: ConvertOptions, progress: OnProgress) -> None:
    """Write `<path>/<step>/items`, which `load_full_state_path` of MaxText takes.

    `params` are the master weights where there are some, else the model. Adam's moments become the
    state of `optax.adamw` with a schedule. Other parts are trees of their own. What is not a
    tensor is not written, apart from the step. FormatError for state that optax's Adam lacks.
    """
    metadata = source.metadata()
    keys, counts = _tree(source, metadata)
    step = metadata.step or 0
    item = os.path.join(path, str(step), _ITEM)
    os.makedirs(item)
    started = time.time_ns()
    values = {**counts, ("step",): step}
    specs = {key_path: _spec(source, key) for key_path, key in keys.items()}
    shapes = {key_path: spec.shape for key_path, spec in specs.items()} | dict.fromkeys(values, ())
    # Concurrent operations share a commit of OCDBT, which writes a file.
    futures = {
        key_path: _create_array(
            item, ".".join(key_path), shape, specs[key_path].dtype if key_path in specs else "I32"
        )
        for key_path, shape in shapes.items()
    }
    stores = {key_path: future.result() for key_path, future in futures.items()}
    writes = [stores[key_path].write(value) for key_path, value in values.items()]
    digests = _write_arrays(source, keys, specs, stores, progress)
    for write in writes:
        write.result()
    _write_json(os.path.join(item, ORBAX_TREE), _tree_metadata(shapes, with_adam=bool(counts)))
    step_metadata = {
        "item_handlers": {_ITEM: _HANDLER},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": started,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": {},
    }
    _write_json(os.path.join(os.path.dirname(item), ORBAX_STEP), step_metadata)
    for folder in (item, os.path.dirname(item)):
        with open(os.path.join(folder, COMMITTED), "x") as file:
            file.write("Checkpoint commit was successful\n")
    _check_written(path, keys, specs, digests)


def _tree(source: Source, metadata: SourceMetadata) -> tuple[dict[Path, Key], dict[Path, int]]:
    """Return where each tensor goes in the tree, and the counts of optax."""
    masters = set(source.names(MASTER)) if MASTER in source.parts else set[str]()
    keys: dict[Path, Key] = {}
    for part in source.parts:
        if part in (MASTER, OPTIMIZER):
            continue
        top = _PARAMS if part == MODEL else (part,)
        for name in source.names(part):
            stored = MASTER if part == MODEL and name in masters else part
            keys[*top, *name.split(".")] = stored, name
    model_names = set(source.names(MODEL)) if MODEL in source.parts else set[str]()
    for name in masters - model_names:
        keys[*_PARAMS, *name.split(".")] = MASTER, name
    unknown, steps = [], set[float]()
    state_names = source.names(OPTIMIZER) if OPTIMIZER in source.parts else ()
    for name in state_names:
        fqn, _, state = name.rpartition("/")
        if state in _MOMENTS:
            keys[*_ADAM, _MOMENTS[state], "params", *fqn.split(".")] = OPTIMIZER, name
        elif state == "step" and _spec(source, (OPTIMIZER, name)).shape == ():
            steps.add(float(read_tensor(source, (OPTIMIZER, name), Box((), ()))))
        else:
            unknown.append(f"{OPTIMIZER}:{name}")
    for name, scalars in metadata.scalars.items():
        steps |= {float(value) for state, value in scalars.items() if state == "step"}
        unknown += [f"{OPTIMIZER}:{name}/{state}" for state in scalars if state != "step"]
    raise_if_any(FormatError, "orbax: optax's Adam has no name for", unknown)
    raise_if_any(FormatError, "orbax: optax's Adam lacks a moment", _missing_moments(state_names))
    if len(steps) > 1:
        raise FormatError(f"orbax: got parameters with steps {sorted(steps)}, expected one step")
    paths = sorted(keys)
    raise_if_any(
        FormatError,
        "orbax: these names are also folders of others in the tree",
        [".".join(upper) for upper, lower in pairwise(paths) if lower[: len(upper)] == upper],
    )
    if not any(key_path[:2] == _ADAM for key_path in keys):
        return keys, {}
    if not any(key_path[:2] == _PARAMS for key_path in keys):
        parts = ", ".join(source.parts)
        raise FormatError(
            f"orbax: got parts {parts}, expected the model among them: optax's Adam mirrors it"
        )
    count = int(steps.pop()) if steps else metadata.step or 0
    return keys, {(*_ADAM, "count"): count, ("opt_state", "2", "count"): count}


def _missing_moments(names: Collection[str]) -> list[str]:
    """Return what the parameters with only one of the two moments lack."""
    fqns = {fqn for fqn, _, state in (name.rpartition("/") for name in names) if state in _MOMENTS}
    moments = [f"{fqn}/{state}" for fqn in sorted(fqns) for state in _MOMENTS]
    return [f"{OPTIMIZER}:{name}" for name in moments if name not in names]


def _spec(source: Source, key: Key) -> TensorSpec:
    return source.specs(key[0], [key[1]])[key[1]]


def _create_array(item: str, name: str, shape: tuple[int, ...], dtype: str) -> Any:
    """Create an array in the OCDBT store of the item; return a future. Chunks of zeros are stored
    like others.
    """
    data_type = str(torch_dtype(dtype)).removeprefix("torch.")
    itemsize = torch_dtype(dtype).itemsize
    (chunk, *_) = [*_boxes(shape, itemsize), Box((), ())]
    spec = {
        "driver": "zarr3",
        "kvstore": kvstore_spec(item, name, ocdbt=True),
        "metadata": {
            "shape": list(shape),
            "data_type": data_type,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [max(1, size) for size in chunk.shape or shape]},
            },
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "zstd", "configuration": {"level": 3}},
            ],
        },
        "store_data_equal_to_fill_value": True,
    }
    return import_tensorstore().open(spec, create=True)


def _boxes(shape: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """Return the chunks of an array. Those at its end may be smaller."""
    yield from chunk_boxes(shape, shape, itemsize, axes=range(len(shape)), nbytes=_CHUNK_NBYTES)


def _write_arrays(
    source: Source,
    keys: Mapping[Path, Key],
    specs: Mapping[Path, TensorSpec],
    stores: Mapping[Path, Any],
    progress: OnProgress,
) -> dict[Path, dict[Box, int]]:
    """Write every tensor; return the CRC of each chunk, by tensor."""
    import numpy as np

    digests: dict[Path, dict[Box, int]] = {key_path: {} for key_path in keys}
    in_flight: deque[tuple[Any, int]] = deque()
    nbytes = 0
    for key_path, key in keys.items():
        store = stores[key_path]
        for box in _boxes(specs[key_path].shape, torch_dtype(specs[key_path].dtype).itemsize):
            if not prod(box.shape):
                continue
            body = read_box(source, key, box)
            digests[key_path][box] = crc32(body)
            values = np.frombuffer(body, dtype=store.dtype.numpy_dtype).reshape(box.shape)
            in_flight.append((store[box.slices].write(values), len(body)))
            nbytes += len(body)
            while nbytes > _MAX_IN_FLIGHT_NBYTES or len(in_flight) > _MAX_IN_FLIGHT:
                future, done_nbytes = in_flight.popleft()
                future.result()
                nbytes -= done_nbytes
            progress(len(body))
    for future, _ in in_flight:
        future.result()
    return digests


def _tree_metadata(shapes: Mapping[Path, tuple[int, ...]], *, with_adam: bool) -> object:
    """Return the content of `_METADATA`. Values are read as arrays of numpy, unless the caller of
    Orbax has others.
    """
    leaves: dict[Path, dict[str, object]] = {
        key_path: {
            "value_type": "np.ndarray",
            "skip_deserialize": False,
            "write_shape": list(shape),
        }
        for key_path, shape in shapes.items()
    }
    if with_adam:  # weight decay has no state
        leaves["opt_state", "1"] = {"value_type": "None", "skip_deserialize": True}
    return {
        "tree_metadata": {
            str(key_path): {
                "key_metadata": [
                    {
                        "key": name,  # of a dict, or of the chain of optax's states
                        "key_type": _SEQUENCE_KEY
                        if key_path[0] == "opt_state" and index == 1
                        else _DICT_KEY,
                    }
                    for index, name in enumerate(key_path)
                ],
                "value_metadata": value,
            }
            for key_path, value in leaves.items()
        },
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _write_json(path: str, value: object) -> None:
    with open(path, "x") as file:
        json.dump(value, file)


def _check_written(
    path: str,
    keys: Mapping[Path, Key],
    specs: Mapping[Path, TensorSpec],
    digests: Mapping[Path, Mapping[Box, int]],
) -> None:
    """IntegrityError unless every tensor is read back as it was written."""
    problems = []
    with closing(open_orbax(path, SourceOptions(names="own"))) as opened:
        written = {part: opened.specs(part, opened.names(part)) for part in opened.parts}
        for key_path, (part, name) in keys.items():
            read_key = (MODEL if part == MASTER else part), name
            spec = written.get(read_key[0], {}).get(name)
            if spec is None:
                problems.append(f"{part}:{name}: is missing")
            elif spec != specs[key_path]:
                problems.append(f"{part}:{name}: got {spec}, expected {specs[key_path]}")
            else:
                problems += [
                    f"{part}:{name}: box {box.offsets} has other bytes"
                    for box, digest in digests[key_path].items()
                    if crc32(read_box(opened, read_key, box)) != digest
                ]
    raise_if_any(
        IntegrityError, "the tensors written differ from the source; this is a bug", problems
    )
