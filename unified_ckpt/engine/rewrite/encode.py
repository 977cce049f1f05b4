"""Encodes a Source for a rewrite: all ranks look for what the encodings cannot hold."""

from __future__ import annotations

from collections.abc import Mapping

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.encode.encoder import LocalOutliers
from unified_ckpt.engine.encode.outliers import collect_outliers
from unified_ckpt.engine.source.encoded import EncodedSource, OnBytes, find_outliers
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.format.encoded_tensors import Encoding
from unified_ckpt.format.outliers import Elements, is_too_many
from unified_ckpt.runtime.comm.collective import Collective


def encode_source(
    collective: Collective, source: Source, encodings: Mapping[Key, Encoding], on_bytes: OnBytes
) -> EncodedSource:
    """Return the source with these encodings, without tensors of too many outliers. Collective.

    Each rank reads some of the tensors; `on_bytes` sees their bytes. The outliers are known on
    rank 0.
    """
    specs = {key: source.specs(key[0], [key[1]])[key[1]] for key in encodings}
    shapes = {key: spec.shape for key, spec in specs.items()}
    by_size = sorted(encodings, key=lambda key: (-specs[key].nbytes, key))
    outliers: LocalOutliers = []
    plain: list[Key] = []
    with collective.step("find-outliers"):
        for key in by_size[collective.rank :: collective.world]:
            pieces, count = list[Elements](), 0
            for elements in find_outliers(source, key, encodings[key], on_bytes):
                count += len(elements[0])
                if not is_too_many(count, shapes[key]):
                    pieces.append(elements)
                collective.heartbeat()
            if is_too_many(count, shapes[key]):
                plain.append(key)
                continue
            outliers += [(key, elements) for elements in pieces]
        plain_by_rank = collective.all_gather_json("plain", plain)
        by_part, _ = collect_outliers(collective, outliers, shapes)
    all_plain = {(part, name) for keys in plain_by_rank for part, name in keys}
    chosen = {key: encoding for key, encoding in encodings.items() if key not in all_plain}
    return EncodedSource(source, chosen, by_part)
