"""What one checkpoint holds: its tensors with sizes, and their layers. Reads headers only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from unified_ckpt.engine.folder.folder import Folder
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
