"""What one checkpoint holds: its tensors with sizes, their layers, and what differs from another.

Reads headers and digests, never tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.source.decoded import DecodedSource
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.report.slices import PlacedTensor, SliceMap, map_slices

_NUMBER = re.compile(r"^(.*?\.\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor as files have it. `layer`: its name up to the first number, or its module."""

    part: str
    name: str
    layer: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class LayerChange:
    """What differs in one layer of a part: bytes of all blocks, and of those that changed."""

    part: str
    layer: str
    tensors: int
    nbytes: int
    changed_nbytes: int


def layer_of(name: str) -> str:
    """Return the layer of a tensor: `model.layers.3` of `model.layers.3.mlp.up.weight/exp_avg`."""
    module = name.partition("/")[0]
    numbered = _NUMBER.match(module)
    return numbered.group(1) if numbered else module.rpartition(".")[0] or module


def list_tensors(source: Source) -> list[TensorRow]:
    """Return the stored tensors of a checkpoint of any format."""
    return [
        TensorRow(part, name, layer_of(name), spec.dtype, spec.shape, spec.nbytes)
        for part in source.parts
        for name, spec in sorted(source.specs(part, source.names(part)).items())
    ]


def stored_source(source: Source) -> Source:
    """Return the source that has the bytes of files, below one that decodes them."""
    return source.stored if isinstance(source, DecodedSource) else source


def locate_slices(folder: Folder) -> SliceMap | None:
    """Return where the ranks' slices lie; None if the manifest does not say how ranks held them."""
    manifest = folder.manifest
    if manifest is None or manifest.shardings is None:
        return None
    records, tensors, start = manifest.shardings, list[PlacedTensor](), 0
    for part in folder.parts:
        if part not in records.parts:
            return None
        runs = records.parts[part]
        rules = [rule for rule, count in runs for _ in range(min(count, len(folder.names(part))))]
        if len(rules) != len(folder.names(part)) or max(rules, default=0) >= len(records.rules):
            return None
        rule_of = dict(zip(sorted(folder.names(part)), rules, strict=True))
        for file in sorted(folder.tensors_by_file(part)):
            entries = sorted(folder.header(file).items(), key=lambda item: item[1].start)
            for name, entry in entries:
                nbytes = entry.stop - entry.start
                tensors.append(PlacedTensor(part, tuple(entry.shape), start, nbytes, rule_of[name]))
                start += nbytes
    return map_slices(records, tensors, world_size=manifest.world_size)


def compare_digests(before: Folder, after: Folder) -> list[LayerChange] | None:
    """Return what changed from one checkpoint to another, by part and layer, from the digests of
    1 MiB blocks. None if one of them has no digests.
    """
    if not all(f.manifest is not None and f.manifest.digests is not None for f in (before, after)):
        return None
    changes: dict[tuple[str, str], LayerChange] = {}
    for part, name, nbytes, changed in _compared(before, after):
        layer = layer_of(name)
        old = changes.get((part, layer), LayerChange(part, layer, 0, 0, 0))
        changes[part, layer] = LayerChange(
            part, layer, old.tensors + 1, old.nbytes + nbytes, old.changed_nbytes + changed
        )
    return list(changes.values())


def _compared(before: Folder, after: Folder) -> Iterator[tuple[str, str, int, int]]:
    """Yield part, name, bytes and changed bytes of each tensor of `after`."""
    for part in after.parts:
        specs = after.specs(part, after.names(part))
        common = set(before.names(part)) & set(specs)
        new = after.block_digests([(part, name) for name in common])
        old = before.block_digests([(part, name) for name in common])
        old_specs = before.specs(part, common)
        for name, spec in sorted(specs.items()):
            blocks, old_blocks = new.get((part, name)), old.get((part, name))
            if blocks is None or old_blocks is None or old_specs[name] != spec:
                yield part, name, spec.nbytes, spec.nbytes
                continue
            differing = sum(a != b for a, b in zip(blocks, old_blocks, strict=True))
            yield part, name, spec.nbytes, spec.nbytes * differing // max(len(blocks), 1)
