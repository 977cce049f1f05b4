"""Reads checkpoints with other libraries, and prints what they read. Imports nothing of ours.

`python program.py` reads JSON from its input, {"file": paths, "folder": paths, "adapter": paths},
and prints {call: {"versions": text, "read": {path: {name: [dtype, shape, SHA-256 of the row-major
bytes]}, or the text of an error}}}. Libraries that are not installed are left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Read = dict[str, list[Any]]
SUFFIX = ".safetensors"


def described(tensors: Iterable[tuple[str, Any]]) -> Read:
    """Describe tensors of torch or anything that numpy takes."""
    return {name: _description(tensor) for name, tensor in tensors}


def _description(tensor: Any) -> list[Any]:
    import numpy

    if type(tensor).__module__.startswith("torch"):
        import torch

        data = tensor.detach().contiguous().reshape(-1)
        body = data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
    else:
        body = numpy.ascontiguousarray(numpy.asarray(tensor)).tobytes()
    return [_dtype_name(tensor), list(tensor.shape), _digest(body)]


def _dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).rpartition(".")[2].removesuffix("_")


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


# files


def safetensors_torch(path: str) -> Read:
    from safetensors.torch import load_file

    return described(load_file(path).items())


def safetensors_slices(path: str) -> Read:
    """By slices, as tensor parallelism reads them."""
    import torch
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        names = list(file.keys())
        halves = {}
        for name in names:
            part = file.get_slice(name)
            shape = part.get_shape()
            if not shape:
                halves[name] = file.get_tensor(name)
                continue
            half = shape[0] // 2
            halves[name] = torch.cat([part[:half], part[half:]])
    return described(halves.items())


def safetensors_numpy(path: str) -> Read:
    from safetensors.numpy import load_file

    return described(load_file(path).items())


def safetensors_flax(path: str) -> Read:
    import jax

    jax.config.update("jax_enable_x64", True)
    from safetensors.flax import load_file

    return described(load_file(path).items())


def mlx(path: str) -> Read:
    import mlx.core as mx
    import numpy

    read = {}
    for name, array in mx.load(path).items():
        raw = numpy.array(array.reshape(-1).view(mx.uint8)) if array.size else numpy.zeros(0)
        read[name] = [_dtype_name(array), list(array.shape), _digest(raw.tobytes())]
    return read


def fastsafetensors(path: str) -> Read:
    from fastsafetensors import fastsafe_open

    with fastsafe_open(path, nogds=True, device="cpu") as file:
        return described((name, file.get_tensor(name).clone()) for name in list(file.keys()))


def diffusers(path: str) -> Read:
    from diffusers.models.model_loading_utils import load_state_dict

    return described(load_state_dict(path).items())


# folders


def huggingface_hub(folder: str) -> Read:
    import huggingface_hub as hub

    model = _module(folder)
    hub.load_torch_model(model, folder, strict=True)
    return described(model.state_dict().items())


def accelerate(folder: str) -> Read:
    from accelerate import load_checkpoint_in_model

    model = _module(folder)
    load_checkpoint_in_model(model, folder)
    return described(model.state_dict().items())


def transformers(folder: str) -> Read:
    from transformers import PretrainedConfig, PreTrainedModel

    tree = _module(folder)

    class Model(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self._modules.update(tree._modules)
            self._parameters.update(tree._parameters)
            self._buffers.update(tree._buffers)
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            """Leave what the checkpoint fills."""

    model, info = Model.from_pretrained(folder, config=PretrainedConfig(), output_loading_info=True)
    problems = {kind: names for kind, names in info.items() if names}
    if problems:
        raise ValueError(f"{problems}")
    return described(model.state_dict().items())


def dcp_huggingface(folder: str) -> Read:
    """Files come in the order in which the file system lists them; here the last name is first."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    reader = HuggingFaceStorageReader(folder)
    reader.fs.ls = lambda path: [
        os.path.join(path, name) for name in sorted(os.listdir(path))[::-1]
    ]
    state = _module(folder).state_dict()
    dcp.load(state, storage_reader=reader, no_dist=True)
    return described(state.items())


def orbax(folder: str) -> Read:
    import jax

    jax.config.update("jax_enable_x64", True)
    from orbax.checkpoint import v1 as ocp

    with ocp.Context(checkpoint_layout=ocp.options.CheckpointLayout.SAFETENSORS):
        return described(ocp.load_pytree(os.path.abspath(folder)).items())


def peft(folder: str) -> Read:
    from peft.utils import load_peft_weights

    return described(load_peft_weights(folder, device="cpu").items())


def _module(folder: str) -> Any:
    """Return a module with the names, shapes and dtypes of a folder's model, filled with zeros.

    Integers and bools are buffers.
    """
    import torch
    from torch import nn

    class Tree(nn.Module):
        def __getattribute__(self, name: str) -> Any:
            """Prefer a tensor to a method of the same name, such as `bfloat16`."""
            fields = object.__getattribute__(self, "__dict__")
            for kind in ("_parameters", "_buffers"):
                if name in fields.get(kind, {}):
                    return fields[kind][name]
            return super().__getattribute__(name)

    root = Tree()
    for name, entry in _entries(folder).items():
        *path, last = name.split(".")
        parent = root
        for step in path:
            parent = parent._modules.setdefault(step, Tree())
        tensor = torch.zeros(entry["shape"], dtype=getattr(torch, _TORCH[entry["dtype"]]))
        if tensor.is_floating_point():
            parent._parameters[last] = nn.Parameter(tensor)
        else:
            parent._buffers[last] = tensor
    return root


_TORCH = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "BOOL": "bool",
}


def _entries(folder: str) -> dict[str, Any]:
    """Return the header entries of a folder's model."""
    entries: dict[str, Any] = {}
    for file in sorted(os.listdir(folder)):
        if file.endswith(SUFFIX) and (file.startswith(("model.", "model-0"))):
            with open(os.path.join(folder, file), "rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                entries |= json.loads(stream.read(size))
    entries.pop("__metadata__", None)
    return entries


@dataclass(frozen=True)
class Reader:
    """A call of another library. `packages`: whose versions matter. `subject`: what it opens."""

    call: str
    packages: tuple[str, ...]
    subject: str  # "file", "folder" or "adapter"
    read: Callable[[str], Read]


READERS = (
    Reader("safetensors.torch.load_file", ("safetensors",), "file", safetensors_torch),
    Reader("safe_open(…).get_slice", ("safetensors",), "file", safetensors_slices),
    Reader("safetensors.numpy.load_file", ("safetensors",), "file", safetensors_numpy),
    Reader("safetensors.flax.load_file", ("safetensors", "jax"), "file", safetensors_flax),
    Reader("mlx.core.load", ("mlx",), "file", mlx),
    Reader("fastsafetensors.fastsafe_open", ("fastsafetensors",), "file", fastsafetensors),
    Reader("diffusers: load_state_dict", ("diffusers",), "file", diffusers),
    Reader("transformers: from_pretrained", ("transformers",), "folder", transformers),
    Reader("accelerate.load_checkpoint_in_model", ("accelerate",), "folder", accelerate),
    Reader("huggingface_hub.load_torch_model", ("huggingface_hub",), "folder", huggingface_hub),
    Reader("DCP's HuggingFaceStorageReader", ("torch", "safetensors"), "folder", dcp_huggingface),
    Reader("orbax: CheckpointLayout.SAFETENSORS", ("orbax-checkpoint",), "folder", orbax),
    Reader("peft: load_peft_weights", ("peft",), "adapter", peft),
)


def main(paths: Mapping[str, Sequence[str]]) -> None:
    """Print what each installed library reads of these paths, by the subject that they are."""
    results: dict[str, Any] = {}
    for reader in READERS:
        try:
            versions = [f"{name} {version(name)}" for name in reader.packages]
        except PackageNotFoundError:
            continue
        read = {path: _outcome(reader.read, path) for path in paths[reader.subject]}
        results[reader.call] = {"versions": ", ".join(versions), "read": read}
    print(json.dumps(results))


def _outcome(read: Callable[[str], Read], path: str) -> Read | str:
    try:
        with warnings.catch_warnings(action="ignore"):
            return read(path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the libraries raise what they like
        return f"{type(error).__name__}: {str(error)[:300]}"


if __name__ == "__main__":
    main(json.load(sys.stdin))
