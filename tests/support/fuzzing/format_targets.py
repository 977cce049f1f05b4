"""Parsers of our own format, each as a function of bytes.

A CheckpointError means that the bytes are refused, which is always right. Each function raises an
AssertionError for a result that is wrong; any other exception is an error too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from safetensors import SafetensorError
from safetensors import deserialize as safetensors_deserialize

import unified_ckpt as uc
from unified_ckpt.engine.folder.completeness import present_parts
from unified_ckpt.engine.plan.sharding_records import decode_rule
from unified_ckpt.errors import CheckpointError
from unified_ckpt.foreign.orbax.options import from_maxtext
from unified_ckpt.foreign.paddle.options import from_paddle
from unified_ckpt.format import codec, events, header, index, manifest, outliers, renames
from unified_ckpt.format.json_text import parse_json

FILE = "f"
_NO_CRC = b'"crc": "' + b"0" * 16 + b'"\n}\n'
_SHAPES = {"wide": (3, 130), "lone": (70,), "narrow": (5, 33), "tiny": (3, 4)}
_OPTIONS = (
    uc.SaveOptions,
    uc.LoadOptions,
    uc.ManagerOptions,
    uc.SourceOptions,
    uc.ConvertOptions,
)


def check_header(data: bytes) -> None:
    """A file is a whole safetensors file: what we accept, the safetensors package reads alike."""
    entries = header.parse_header(data, file_size=len(data), file=FILE)
    try:
        expected = dict(safetensors_deserialize(data))
    except SafetensorError as error:
        raise AssertionError(f"safetensors refuses what we accept: {error}") from error
    assert entries.keys() == expected.keys()
    for name, entry in entries.items():
        other = expected[name]
        assert (entry.dtype, list(entry.shape)) == (other["dtype"], list(other["shape"]))
        assert data[entry.start : entry.stop] == bytes(other["data"])
    head, encoded = header.encode_header(
        (name, entry.dtype, entry.shape) for name, entry in entries.items()
    )
    sizes = {name: entry.stop - entry.start for name, entry in entries.items()}
    assert {name: entry.stop - entry.start for name, entry in encoded.items()} == sizes
    parsed = header.parse_header(head, file_size=len(head) + sum(sizes.values()), file=FILE)
    assert parsed == encoded


def check_sealed_manifest(data: bytes) -> None:
    """The fields of a manifest, as if it had been written so: its CRC is made right."""
    fields = parse_json(data, file=FILE)
    if not isinstance(fields, dict):
        return
    fields.pop("crc", None)
    check_manifest(manifest.add_crc(json.dumps(fields).encode()[:-1] + b"," + _NO_CRC))


def check_manifest(data: bytes) -> None:
    """A manifest that is accepted has a right CRC, and stays the same when it is written again."""
    valid = manifest.has_valid_crc(data)
    parsed = manifest.parse_manifest(data, file=FILE)
    assert valid, "a manifest without a valid CRC is accepted"
    again = manifest.encode_manifest(parsed)
    assert manifest.parse_manifest(again, file=FILE) == parsed
    assert len(set(parsed.files())) == len(parsed.files())
    for file in parsed.files():
        index.check_file_name(file)
    present_parts(parsed, dict.fromkeys(parsed.files(), 0))
    parsed.outlier_records()
    if parsed.rank_mesh is not None:
        assert parsed.rank_mesh.mesh().world <= 1 << 20
    for rule in parsed.shardings.rules if parsed.shardings else ():
        decode_rule(rule)
    for tree in (parsed.extra, parsed.modules, parsed.optimizer and parsed.optimizer.scalars):
        _check_tree(tree, {})


def check_index(data: bytes) -> None:
    """An index that is accepted stays the same when it is written again; no file leaves."""
    weight_map = index.parse_index(data, file=FILE)
    assert not any(set(file) & set("/\\:\0") or file in ("", "..") for file in weight_map.values())
    try:
        encoded = index.encode_index(total_size=0, weight_map=weight_map)
    except UnicodeEncodeError:
        return
    assert index.parse_index(encoded, file=FILE) == weight_map


def check_values(data: bytes) -> None:
    """A tree of `codec` with its blobs: what is accepted stays the same when it is encoded."""
    content = parse_json(data, file=FILE)
    if isinstance(content, dict) and isinstance(content.get("blobs"), dict):
        blobs = {
            name: str(text).encode("latin1", "replace") for name, text in content["blobs"].items()
        }
        _check_tree(content.get("tree"), blobs)
    else:
        _check_tree(content, {})


def check_packed(data: bytes) -> None:
    """Values of a rank as one byte string."""
    _check_again(codec.unpack(data))


def _check_tree(tree: Any, blobs: Mapping[str, bytes]) -> None:
    _check_again(codec.decode(tree, blobs))


def _check_again(value: Any) -> None:
    """What was decoded is encoded, and decodes to what gives the same bytes."""
    packed = codec.pack(value)
    assert codec.pack(codec.unpack(packed)) == packed


def check_outliers(data: bytes) -> None:
    """Outliers that are accepted are elements of the tensors, ascending, and stay the same."""
    elements = outliers.parse_outliers(data, _SHAPES, file=FILE)
    for fqn, (indices, values) in elements.items():
        numbers = indices.tolist()
        assert numbers == sorted(set(numbers))
        assert len(values) == len(numbers)
        assert not numbers or (numbers[0] >= 0 and numbers[-1] < prod(_SHAPES[fqn]))
    again = outliers.parse_outliers(outliers.encode_outliers(elements), _SHAPES, file=FILE)
    assert again.keys() == elements.keys()
    for fqn in elements:
        for first, second in zip(again[fqn], elements[fqn], strict=True):
            assert first.tobytes() == second.tobytes()


def check_events(data: bytes) -> None:
    """Lines that are events stay the same when they are written again; others are skipped."""
    for event in events.parse_events(data.split(b"\n")):
        assert list(events.parse_events([events.encode_event(event)])) == [event]


def check_renames(data: bytes) -> None:
    """Rules for names, and what they do with some names."""
    for file in ("r.json", "r.toml"):
        try:
            rules = renames.parse_renames(data, file=file).rules
        except CheckpointError:
            continue
        for rule in rules[:20]:
            rule.model_dump()


def check_options(data: bytes) -> None:
    """Options by keyword, as the command line and the configurations of others pass them."""
    values = parse_json(data, file=FILE, constants=True)
    if not isinstance(values, dict):
        return
    calls: tuple[Callable[..., Any], ...] = (*_OPTIONS, from_maxtext, from_paddle)
    for call in calls:
        try:
            options = call(**values)
        except (CheckpointError, TypeError) as error:
            if isinstance(error, TypeError) and ": got " not in str(error):
                raise  # a wrong type of a keyword is a TypeError, as of any function
            continue
        if isinstance(options, _OPTIONS):
            assert (
                type(options)(**{name: getattr(options, name) for name in options.model_fields_set})
                == options
            )


TARGETS: dict[str, Callable[[bytes], None]] = {
    "header": check_header,
    "manifest": check_manifest,
    "sealed-manifest": check_sealed_manifest,
    "index": check_index,
    "values": check_values,
    "packed": check_packed,
    "outliers": check_outliers,
    "events": check_events,
    "renames": check_renames,
    "options": check_options,
}
