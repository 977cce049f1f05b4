"""Encodes a Source for a rewrite: all ranks look for what the encodings cannot hold."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.encoded import EncodedSource, OnBytes, find_exceptions
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.format import codec
from unified_ckpt.format.encoded_tensors import Encoding
from unified_ckpt.format.exceptions import Elements, is_too_many
from unified_ckpt.runtime.comm.collective import Collective


def encode_source(
    collective: Collective, source: Source, encodings: Mapping[Key, Encoding], on_bytes: OnBytes
) -> EncodedSource:
    """Return the source with these encodings, without tensors of too many exceptions. Collective.

    Each rank reads some of the tensors; `on_bytes` sees their bytes. The exceptions are known on
    rank 0.
    """
    rank, world = collective.rank, collective.world
    specs = {key: source.specs(key[0], [key[1]])[key[1]] for key in encodings}
    found: dict[Key, Elements] = {}
    plain: list[Key] = []
    with collective.step("find-exceptions"):
        for key in sorted(encodings, key=lambda key: (-specs[key].nbytes, key))[rank::world]:
            elements, count = list[Elements](), 0
            for run_elements in find_exceptions(source, key, encodings[key], on_bytes):
                count += len(run_elements[0])
                if len(run_elements[0]) and not is_too_many(count, specs[key].shape):
                    elements.append(run_elements)
                collective.heartbeat()
            if is_too_many(count, specs[key].shape):
                plain.append(key)
            elif elements:
                indices, values = zip(*elements, strict=True)
                found[key] = np.concatenate(indices), np.concatenate(values)
        plain_by_rank = collective.all_gather_json("plain", plain)
        bodies = collective.collect(
            "exceptions", codec.pack(list(found.items()), "exceptions"), dst=0, ranks=range(world)
        )
    all_found = {key: elements for body in bodies for key, elements in _unpack(body)}
    all_plain = {(part, name) for keys in plain_by_rank for part, name in keys}
    chosen = {key: encoding for key, encoding in encodings.items() if key not in all_plain}
    return EncodedSource(source, chosen, all_found)


def _unpack(body: bytes) -> list[tuple[Key, Elements]]:
    found: list[tuple[Key, Elements]] = codec.unpack(body, "exceptions")
    return found
