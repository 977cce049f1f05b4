"""Decodes the folder of a compressed checkpoint, written from `docs/format.md` alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

Bits = np.ndarray
_MAX_CODE = {"signed-sqrt-8": 127, "signed-sqrt-6": 31, "log-8": 255, "log-4": 15}


def decode_master(low: Bits, model: Bits) -> Bits:
    """int16 and bfloat16 bits -> float32 bits."""
    return ((model.astype(np.int64) << 16) + low.astype(np.int16)).astype(np.uint32)


def unpack(codes: Bits, bits: int, count: int) -> Bits:
    """The codes of one block, least significant bit first."""
    number = int.from_bytes(codes.tobytes(), "little")
    return np.array([number >> bits * i & 2**bits - 1 for i in range(count)])


def decode_block(name: str, codes: Bits, scales: Bits) -> Bits:
    """Codes of one block and the bits of its scales -> float32 bits."""
    last = _MAX_CODE[name]
    if name.startswith("signed"):
        scale = (scales.astype(np.uint32) << 16).view(np.float32)[0]
        relative = (codes - last - 1).astype(np.float32) / np.float32(last)
        return (relative * np.abs(relative) * scale).view(np.uint32)
    low, high = ((int(bits) & 0x7FFF) << 16 for bits in scales)
    first = int(scales[0]) >> 15
    numbers = low + np.rint((codes - first) * ((high - low) / (last - first)))
    return np.where(codes < first, 0, numbers).astype(np.uint32)


def decode_moment(name: str, codes: Bits, scales: Bits, length: int) -> Bits:
    """Rows of packed codes and rows of scales -> float32 bits."""
    bits, per_block = int(name.rpartition("-")[2]), 1 if name.startswith("signed") else 2
    rows = np.zeros((len(codes), length), np.uint32)
    for row, column in np.ndindex(len(codes), -(-length // 64)):
        count = min(64, length - 64 * column)
        packed = codes[row, 8 * bits * column :][: -(-count * bits // 8)]
        of_block = scales[row, per_block * column :][:per_block]
        unpacked = unpack(packed, bits, count)
        rows[row, 64 * column : 64 * column + count] = decode_block(name, unpacked, of_block)
    return rows


def decode_folder(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Return every tensor of a folder whose parts have one file each, decoded."""
    parts = json.loads((folder / "unified_checkpoint.json").read_text())["parts"]
    stored = {part: load_file(folder / f"{part}.safetensors") for part in parts}
    decoded = {
        (part, name): tensor.clone() for part in parts for name, tensor in stored[part].items()
    }
    for part, record in parts.items():
        exceptions = {}
        if record["exceptions"]:
            exceptions = load_file(folder / record["exceptions"]["file"])
        for name, tensor in stored[part].items():
            state = name.rpartition("/")[2] if part == "optimizer" else ""
            encoding = record["encodings"].get(state)
            if encoding is None or tensor.dtype not in (torch.int16, torch.uint8):
                continue
            if encoding["name"] == "masters-16":
                model = stored["model"][name].view(torch.int16).numpy().view(np.uint16)
                bits = decode_master(tensor.numpy(), model)
            else:
                scales = stored[part][f"{name}.scale"].view(torch.int16).numpy().view(np.uint16)
                codes, length = tensor.numpy(), encoding["row_lengths"].get(name)
                width = int(encoding["name"].rpartition("-")[2])
                length = length or codes.shape[-1] * 8 // width
                rows = codes.reshape(-1, codes.shape[-1]), scales.reshape(-1, scales.shape[-1])
                bits = decode_moment(encoding["name"], *rows, length)
                bits = bits.reshape(*codes.shape[:-1], length)
                del decoded[part, f"{name}.scale"]
            if f"{name}.index" in exceptions:
                index = exceptions[f"{name}.index"].numpy()
                bits.reshape(-1)[index] = exceptions[f"{name}.value"].numpy().view(np.uint32)
            decoded[part, name] = torch.from_numpy(bits.view(np.float32))
    return decoded
