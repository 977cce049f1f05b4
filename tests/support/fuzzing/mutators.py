"""Changes of bytes that know JSON, pickles, safetensors files, archives and folders.

libFuzzer's own changes rarely get past a parser of text. These change values of the tree or opcodes
of the pickle, and leave lengths and CRCs right.
"""

from __future__ import annotations

import copy
import json
import pickle
import pickletools
import random
import struct
from collections.abc import Callable
from typing import Any

from tests.support.format.manifests import resealed
from tests.support.fuzzing import containers

ByteMutator = Callable[[bytes], bytes]

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 255, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30),
    *(
        0.5,
        -0.0,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "a",
        ".",
        "..",
        "/",
        "\0",
        "\ud800",
        "é",
        "F32",
    ),
    *([], {}, [[]], [0], [2**62, 2**62], [0] * 300, {"": 0}, {"$type": "tuple", "items": []}),
)
_GLOBALS = (
    "os system",
    "builtins eval",
    "builtins getattr",
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "torch FloatStorage",
    "torch BFloat16Storage",
    "torch float32",
    "torch Size",
    "numpy dtype",
    "numpy.core.multiarray _reconstruct",
    "numpy.core.multiarray scalar",
    "_codecs encode",
    "argparse Namespace",
)
_OPCODES = tuple(
    ord(opcode.code).to_bytes() for opcode in pickletools.opcodes if opcode.arg is None
)


def mutate(data: bytes, draw: random.Random, mutate_bytes: ByteMutator) -> bytes:
    """Return changed bytes, by what they are."""
    if draw.random() < 0.15:
        return mutate_bytes(data)
    if data.startswith(b"PK"):
        return _mutate_archive(data, draw, mutate_bytes)
    if containers.is_safetensors(data):
        text = containers.header_text(data)
        return containers.with_header(data, _mutate_json(text, draw, mutate_bytes))
    if data.startswith(b"UCPACK01"):
        size = int.from_bytes(data[8:16], "little")
        text = _mutate_json(data[16 : 16 + size], draw, mutate_bytes)
        return data[:8] + struct.pack("<Q", len(text)) + text + data[16 + size :]
    if data.startswith(b"\x80"):
        return _mutate_pickle(data, draw, mutate_bytes)
    return _mutate_json(data, draw, mutate_bytes)


def _mutate_archive(data: bytes, draw: random.Random, mutate_bytes: ByteMutator) -> bytes:
    """Change an entry of `torch.save`'s archive, or a file of a folder."""
    files = containers.unpack(data)
    if not files:
        return mutate_bytes(data)
    name = draw.choice(list(files))
    stored = f"{name.partition('/')[0]}/data.pkl"
    if stored in files and draw.random() < 0.8:
        name = stored
    kind = draw.random()
    if kind < 0.05:
        del files[name]
    elif kind < 0.1:
        files[draw.choice(list(files))] = files[name]
    elif kind < 0.15:
        other = draw.choice(list(files)).split("/")
        files["/".join([*name.split("/")[:-1], other[-1]])] = files.pop(name)
    else:
        files[name] = mutate(files[name], draw, mutate_bytes)
    if draw.random() < 0.8:
        files = resealed(files)
    return containers.pack(files, 0 if stored in files else 8)


# JSON


def _mutate_json(text: bytes, draw: random.Random, mutate_bytes: ByteMutator) -> bytes:
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return mutate_bytes(text)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        tree = _changed(tree, draw)
    try:
        return json.dumps(tree).encode()
    except (ValueError, RecursionError):  # a node is now inside itself
        return mutate_bytes(text)


def _nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Return each place of a tree as its container and key."""
    places, stack = [], [tree]
    while stack and len(places) < 5_000:
        node = stack.pop()
        keys = (
            list(node)
            if isinstance(node, dict)
            else range(len(node))
            if isinstance(node, list)
            else ()
        )
        for key in keys:
            places.append((node, key))
            stack.append(node[key])
    return places


def _changed(tree: Any, draw: random.Random) -> Any:
    places = _nodes(tree)
    if not places:
        return copy.deepcopy(draw.choice(_VALUES))
    node, key = draw.choice(places)
    other, other_key = draw.choice(places)
    match draw.randrange(9):
        case 0:
            del node[key]
        case 1:
            node[key] = json.loads(json.dumps(other[other_key]))
        case 2:
            node[key], other[other_key] = other[other_key], node[key]
        case 3 if isinstance(node, dict):
            new_key = other_key if isinstance(other_key, str) else draw.choice(("", "a", "$type"))
            node[new_key] = node.pop(key)
        case 3 | 4 if isinstance(node, list):
            node.insert(key, copy.deepcopy(draw.choice((node[key], *_VALUES))))
        case 5:
            node[key] = [node[key]] if draw.random() < 0.5 else {str(other_key): node[key]}
        case 6 | 7 if isinstance(node[key], (int, float, str)):
            node[key] = _near(node[key], draw)
        case _:
            node[key] = copy.deepcopy(draw.choice(_VALUES))
    return tree


def _near(value: Any, draw: random.Random) -> Any:
    if isinstance(value, str):
        at = draw.randint(0, len(value))
        character = draw.choice(
            ('"', "/", ".", "*", "{", "0", "9", "\u00e9", "", ":", "-", "x" * 300)
        )
        return value[:at] + character + value[at + draw.randrange(2) :]
    return draw.choice(
        (-value, value + 1, value - 1, value * 2, value * 1000, str(value), float(value))
    )


# pickles


def _mutate_pickle(data: bytes, draw: random.Random, mutate_bytes: ByteMutator) -> bytes:
    try:
        starts = [position for _, _, position in pickletools.genops(data)]
    except Exception:  # as a damaged pickle may raise anything
        return mutate_bytes(data)
    steps = [data[low:high] for low, high in zip(starts, [*starts[1:], len(data)], strict=True)]
    if len(steps) < 4:
        return mutate_bytes(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at, other = draw.randrange(1, len(steps)), draw.randrange(1, len(steps))
        match draw.randrange(6):
            case 0 if len(steps) > 4:
                del steps[at]
            case 1:
                steps[at], steps[other] = steps[other], steps[at]
            case 2:
                steps.insert(at, steps[other])
            case 3:
                steps.insert(at, draw.choice(_OPCODES))
            case 4:
                steps[at : at + draw.randrange(2)] = [_pushed(draw)]
            case _:
                steps[at] = steps[at][:1] + mutate_bytes(steps[at][1:] or b"\0")[: len(steps[at])]
    return b"".join(steps)


def _pushed(draw: random.Random) -> bytes:
    """Return opcodes that push a value or a global, or that refer to the memo."""
    match draw.randrange(4):
        case 0:
            module, _, name = draw.choice(_GLOBALS).partition(" ")
            return f"c{module}\n{name}\n".encode()
        case 1:
            index = draw.choice((0, 1, 2, 255, 2**16, 2**31 - 1))
            return draw.choice((pickle.LONG_BINPUT, pickle.LONG_BINGET)) + struct.pack("<I", index)
        case 2:
            return draw.choice((b"h", b"q", b"K")) + bytes([draw.randrange(256)])
        case _:
            value = draw.choice(_VALUES[:27])
            return pickle.dumps(value, 2)[2:-1]
