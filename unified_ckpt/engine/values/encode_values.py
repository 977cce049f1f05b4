"""Encodes what one rank holds beside tensors: JSON, and the tensors, arrays and bytes inside it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unified_ckpt.engine.source.value_paths import EXTRA, MODULES, OPTIMIZER_STATE, PARAM_GROUPS
from unified_ckpt.engine.values.caller_extra import CallerExtra
from unified_ckpt.format import blobs as blob_format
from unified_ckpt.format import codec, digests
from unified_ckpt.runtime.torch_state.flatten import FlatState
from unified_ckpt.runtime.torch_state.optimizers import FlatOptimizer


@dataclass(frozen=True, slots=True)
class EncodedValues:
    """Some of what one rank holds beside tensors.

    `body`: everything but the bytes of blobs, as JSON. `blobs`: by name, without those that are too
    large to be copied. `has_blobs`: whether there are any.
    """

    body: bytes
    blobs: Mapping[str, Any]
    has_blobs: bool


def encode_state(
    state: FlatState,
    caller_extra: CallerExtra,
    *,
    with_optimizer: bool,
    copies_nbytes: int | None,
) -> list[EncodedValues]:
    """Encode the state of this rank. FormatError naming the path of a value that cannot be stored.

    It is divided so that what differs between many ranks is sent without the names of parameters.

    Blobs alias the caller's memory. `copies_nbytes`: copy them instead, those of `extra` up to so
    many bytes, the small ones first.
    """
    optimizer = state.optimizer if with_optimizer else FlatOptimizer()
    groups = [{key: group[key] for key in group if key != "names"} for group in optimizer.groups]
    paths = [p for p in caller_extra.object_paths if all(isinstance(step, str) for step in p)]
    return [
        _encode_values(
            {EXTRA: caller_extra.extra},
            {"objects": caller_extra.objects, "object_paths": paths},
            copies_nbytes,
        ),
        _encode_values(
            {MODULES: state.extra_states(), OPTIMIZER_STATE: optimizer.scalars},
            {},
            None if copies_nbytes is None else sys.maxsize,
        ),
        _encode_values(
            {PARAM_GROUPS: groups},
            {
                "names": [group["names"] for group in optimizer.groups],
                "aliases": state.aliases,
                "has_optimizer": bool(optimizer.groups or optimizer.scalars),
            },
            None if copies_nbytes is None else sys.maxsize,
        ),
    ]


def _encode_values(
    values: Mapping[str, Any], fields: Mapping[str, Any], copies_nbytes: int | None
) -> EncodedValues:
    """Encode values by root, beside other fields. `copies_nbytes`: as of `encode_state`."""
    trees, blobs = dict[str, Any](), dict[str, Any]()
    for root, value in values.items():
        trees[root], blobs_of_root = codec.encode(value, root)
        blobs |= blobs_of_root
    views = {name: blob_format.raw_bytes(blob) for name, blob in blobs.items()}
    sums = {name: [digests.crc(view), view.nbytes] for name, view in views.items()}
    content = {"trees": trees, "digests": sums, **fields}
    body = json.dumps(content, separators=(",", ":")).encode()
    if copies_nbytes is not None:
        blobs = dict(_copies(views, copies_nbytes))
    return EncodedValues(body, blobs, has_blobs=bool(views))


def _copies(views: Mapping[str, memoryview], nbytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield copies of the smallest blobs that have together so many bytes."""
    for name, view in sorted(views.items(), key=lambda item: item[1].nbytes):
        nbytes -= view.nbytes
        if nbytes >= 0:
            yield name, bytes(view)
