"""Tensors, arrays and byte strings as raw row-major bytes, and back.

Imports torch and numpy only when a value of theirs must be created.
"""

from __future__ import annotations

import io
import re
import sys
from math import prod
from typing import Any

from unified_ckpt.core.sharding.dtypes import TORCH_NAMES
from unified_ckpt.errors import FormatError

Buffer = bytes | bytearray | memoryview

# Without F4, of which a file has another shape than memory.
_TORCH_TO_FILE = {torch_name: name for name, torch_name in TORCH_NAMES.items() if name != "F4"}
_NUMPY_TO_FILE = {
    **{
        f"<{kind}{size}": f"{name}{8 * size}"
        for kind, name in (("i", "I"), ("u", "U"), ("f", "F"))
        for size in (2, 4, 8)
    },
    "|i1": "I8",
    "|u1": "U8",
    "|b1": "BOOL",
    "<c8": "C64",
}
# Bools, numbers, dates and fixed-width text: their bytes are their value, unlike object and record
# arrays.
_NUMPY_KINDS = frozenset("biufcmMSU")
_BYTES = {kind.__name__: kind for kind in (bytes, bytearray, io.BytesIO)}
_NUMPY_NAME = re.compile(
    r"[<>|=][a-zA-Z][0-9]{1,10}(\[[0-9]{0,10}[a-zA-Z]{1,7}\])?"
)  # of `dtype.str`


def if_imported(module: str) -> Any:
    """Return a module if it is imported already, else None: no value can then be of its types."""
    return sys.modules.get(module)


def describe(value: Any) -> dict[str, Any] | None:
    """Return what `restore` needs besides the bytes of a tensor, array or byte string.

    None for any other value. Raises FormatError if the bytes are not the value (object arrays;
    sparse, quantized or meta tensors).
    """
    kind = type(value)
    if kind in (bytes, bytearray, io.BytesIO):
        return {"$type": kind.__name__}
    numpy, torch = if_imported("numpy"), if_imported("torch")
    if numpy is not None and kind is numpy.ndarray:
        check_numpy_dtype(value.dtype)
        return {"$type": "numpy.ndarray", "dtype": value.dtype.str, "shape": list(value.shape)}
    if torch is not None and kind is torch.Tensor:
        if (
            value.layout != torch.strided
            or value.is_quantized
            or value.is_nested
            or value.device.type == "meta"
        ):
            raise FormatError(
                "got a tensor that is sparse, quantized, nested or on the meta device, "
                "expected a dense tensor with values"
            )
        grad = {"requires_grad": True} if value.requires_grad else {}
        return {
            "$type": "torch.Tensor",
            "dtype": torch_name(value.dtype),
            "shape": list(value.shape),
            **grad,
            **_memory_order(value),
        }
    return None


def _memory_order(tensor: Any) -> dict[str, list[int]]:
    """Return the dims of a transposed tensor from the outermost in memory; else nothing.

    Kernels of other strides may round differently.
    """
    if tensor.is_contiguous():
        return {}
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return {"order": order} if tensor.permute(order).is_contiguous() else {}


def raw_bytes(blob: Any) -> memoryview:
    """Return the row-major bytes of a blob; shares memory with a contiguous CPU value."""
    if isinstance(blob, bytes | bytearray | memoryview):
        return memoryview(blob)
    if isinstance(blob, io.BytesIO):
        return memoryview(blob.getvalue())  # of `getbuffer`, the owner could not be resized
    torch = if_imported("torch")
    if torch is not None and isinstance(blob, torch.Tensor):
        flat = blob.detach().resolve_conj().resolve_neg().cpu().contiguous()
        # One element is contiguous whatever its stride, but `view` refuses strides other than 1.
        flat = flat.as_strided((flat.numel(),), (1,))
        return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
    numpy = if_imported("numpy")
    flat = numpy.ascontiguousarray(blob).reshape(-1)
    return memoryview(flat.view(numpy.uint8)) if flat.nbytes else memoryview(b"")


def spec(blob: Any) -> tuple[str, tuple[int, ...]]:
    """Return the safetensors dtype and shape of a blob; U8 if safetensors lacks its dtype."""
    if isinstance(blob, bytes | bytearray | memoryview | io.BytesIO):
        return "U8", (raw_bytes(blob).nbytes,)
    torch = if_imported("torch")
    if torch is not None and isinstance(blob, torch.Tensor):
        dtype = _TORCH_TO_FILE.get(torch_name(blob.dtype))
    else:
        dtype = _NUMPY_TO_FILE.get(blob.dtype.str)
    return (dtype, tuple(blob.shape)) if dtype else ("U8", (int(blob.nbytes),))


def restore(node: dict[str, Any], blob: Any) -> Any:
    """Return the value that `describe` described.

    `blob`: its raw bytes, which are copied, or the tensor or array itself. Tensors are on the CPU.
    Raises FormatError, ValueError or TypeError if node and blob do not match.
    """
    kind = node["$type"]
    if kind in _BYTES:
        return _BYTES[kind](raw_bytes(blob))
    dtype, shape = node["dtype"], node["shape"]
    if (
        not isinstance(dtype, str)
        or not isinstance(shape, list)
        or not all(type(dim) is int and dim >= 0 for dim in shape)
    ):
        raise FormatError(f"got dtype {dtype!r} and shape {shape!r}, expected a name and sizes")
    is_raw = isinstance(blob, bytes | bytearray | memoryview)
    if kind == "numpy.ndarray":
        value = _array(blob, dtype, shape) if is_raw else blob
    else:
        value = (
            _tensor(blob, dtype, shape, requires_grad=node.get("requires_grad") is True)
            if is_raw
            else blob
        )
        order = node.get("order")
        if is_raw and order is not None:
            if not isinstance(order, list) or sorted(order) != list(range(len(shape))):
                raise FormatError(f"got order {order!r}, expected the dims of shape {shape!r}")
            permuted = value.detach().permute(order).contiguous()
            inverse = [order.index(dim) for dim in range(len(order))]
            value = permuted.permute(inverse).requires_grad_(value.requires_grad)
    described = describe(value) or {"$type": type(value).__name__}
    if any(described.get(field) != node[field] for field in ("$type", "dtype", "shape")):
        raise FormatError(f"got {described}, expected {node}")
    return value


def check_numpy_dtype(dtype: Any) -> None:
    """Raise FormatError for a dtype whose bytes are not its value."""
    if dtype.kind not in _NUMPY_KINDS:
        raise FormatError(
            f"got numpy dtype {str(dtype)!r}, expected numbers, bools, dates or fixed-width text"
        )


def numpy_dtype(name: Any) -> Any:
    """Return the numpy dtype of a `dtype.str`; raises FormatError or TypeError for other text.

    Of other text numpy evaluates parts as Python literals.
    """
    import numpy

    if not _NUMPY_NAME.fullmatch(str(name)):
        raise FormatError(f"got numpy dtype {str(name)[:80]!r}, expected a name like '<f4'")
    dtype = numpy.dtype(str(name))
    check_numpy_dtype(dtype)
    return dtype


def torch_name(dtype: Any) -> str:
    """Return a dtype's name: `torch.bfloat16` -> `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: Any) -> Any:
    """Return the torch dtype of a name; raises FormatError if torch has none."""
    import torch

    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"got dtype {name!r}, which torch {torch.__version__} does not have")
    return dtype


def _array(stored: Buffer, name: str, shape: list[int]) -> Any:
    import numpy

    dtype = numpy_dtype(name)
    _check_nbytes(stored, dtype.itemsize, shape)
    if not len(stored):
        return numpy.zeros(shape, dtype)
    return numpy.frombuffer(stored, dtype).reshape(shape).copy()


def _tensor(stored: Buffer, name: str, shape: list[int], *, requires_grad: bool) -> Any:
    import torch

    dtype = torch_dtype(name)
    _check_nbytes(stored, dtype.itemsize, shape)
    if not len(stored):
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad, device="cpu")
    tensor = torch.frombuffer(bytearray(stored), dtype=torch.uint8).view(dtype).reshape(shape)
    return tensor.requires_grad_(requires_grad)


def _check_nbytes(stored: Buffer, itemsize: int, shape: list[int]) -> None:
    if len(stored) != itemsize * prod(shape):
        raise FormatError(
            f"got {len(stored)} bytes, expected {itemsize * prod(shape)} for shape {tuple(shape)}"
        )
