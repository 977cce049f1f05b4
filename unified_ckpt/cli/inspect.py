"""The verb `inspect`: shows what a checkpoint holds, from its manifest, indexes and headers.

Reads no tensor. Most formats are read without torch.
"""

from __future__ import annotations

import json
import textwrap
from argparse import Namespace
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from unified_ckpt.cli.display.console import stdout_columns
from unified_ckpt.cli.display.form import form_of
from unified_ckpt.cli.display.progress import progress_bar
from unified_ckpt.cli.display.tensor_tree import Line, collapse, tree, tree_key
from unified_ckpt.cli.display.text import (
    aligned,
    extra_text,
    metrics_text,
    no_match_error,
    printable,
)
from unified_ckpt.cli.option_values import source_options
from unified_ckpt.core.text import MAX_SHOWN, count_text, first_items, format_ranks, human_size
from unified_ckpt.engine.cluster.node_inventory import missing_from_node
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.source.decoded import DecodedSource, stored_source
from unified_ckpt.engine.source.protocol import Source, with_indexes
from unified_ckpt.engine.source.value_paths import value_name
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.formats import format_title
from unified_ckpt.foreign.open import open_source
from unified_ckpt.format.manifest import Manifest, ParamGroup
from unified_ckpt.report.describe import mesh_text, options_text
from unified_ckpt.runtime.storage.paths import absolute_path

_FORMATS = {
    "megatron": "Megatron-LM, folders of ranks",
    "megatron-core": "Megatron-Core, torch_dist",
    "dcp": "torch.distributed.checkpoint",
    "orbax": "Orbax",
    "paddle": "PaddleNLP Unified Checkpoint",
    "paddle-legacy": "PaddleNLP, .pdparams and .pdopt per rank",
    "torch": "torch.save file: weights and plain values",
    "huggingface-bin": "Hugging Face model folder, pickled: weights only",
}
_MANIFEST_FIELDS = (
    "format_version",
    "save_id",
    "step",
    "created",
    "world_size",
    "mesh",
    "versions",
    "omitted_parts",
    "metrics",
)
_FIRST_PARTS = ("model", "master_weights", "optimizer")  # the others follow by name


class _Tensor(NamedTuple):
    """What is shown of a tensor. `nbytes`: as it is stored. `encoding`: None if it is plain."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    encoding: str | None
    file: str

    @property
    def text(self) -> str:
        """Its dtype, shape and encoding: `F32 [256, 256] as log-8`."""
        encoding = f" as {self.encoding}" if self.encoding else ""
        return f"{self.dtype} {list(self.shape)}{encoding}"


@dataclass(frozen=True, slots=True)
class _PartListing:
    """What is shown of a part. `total` counts all of its tensors; `files` maps files to bytes."""

    name: str
    total: int
    tensors: dict[str, _Tensor]
    files: dict[str, int]
    aliases: dict[str, str]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def run(arguments: Namespace) -> int:
    """Print what `arguments.path` holds; return 0."""
    with ExitStack() as stack:
        with progress_bar("inspect", "none"):
            opened = open_source(arguments.path, source_options(arguments))
            source = opened if arguments.config is not None else with_indexes(opened)
            folder = stored_source(source)
            stack.callback(folder.close)
            parts, unreadable = _list_parts(source, arguments.match)
        if arguments.match is not None and not any(part.tensors or part.aliases for part in parts):
            raise no_match_error(arguments.match, arguments.path)
        if arguments.json:
            result = _as_json(arguments.path, folder, parts)
            if unreadable:
                result["unreadable"] = unreadable
            print(json.dumps(result, indent=2))
            return 0
        print("\n".join(_header_lines(arguments.path, folder)))
        for part in parts:
            if part.tensors or part.aliases or arguments.match is None:
                lines = _table_lines(part) if arguments.all else _tree_lines(part)
                print("\n".join(["", _part_title(part), *lines]))
        if source is not opened:
            print("\noptimizer state is stored by position; --config PATH names its parameters")
        for reason in unreadable.values():
            print(f"\nunreadable: {reason}")
    return 0


def _list_parts(folder: Source, match: str | None) -> tuple[list[_PartListing], dict[str, str]]:
    """Return the parts, and why some parts of a foreign checkpoint cannot be read."""
    parts, unreadable = [], {}
    others = sorted(set(folder.parts) - set(_FIRST_PARTS))
    for part in [*(part for part in _FIRST_PARTS if part in folder.parts), *others]:
        try:
            parts.append(_list_part(folder, part, match))
        except FormatError as error:
            if isinstance(folder, Folder | DecodedSource):
                raise
            unreadable[part] = str(error)
    return parts, unreadable


def _list_part(source: Source, part: str, match: str | None) -> _PartListing:
    def is_shown(name_or_alias: str) -> bool:
        candidates = (name_or_alias, f"{part}:{name_or_alias}")
        return match is None or any(fnmatchcase(candidate, match) for candidate in candidates)

    names = sorted(filter(is_shown, source.names(part)), key=tree_key)
    specs = source.specs(part, names)
    folder = stored_source(source)
    tensors, files = dict[str, _Tensor](), dict[str, int]()
    for name in names:
        spec, nbytes, encoding = specs[name], specs[name].nbytes, None
        encoded = source.encoded((part, name)) if isinstance(source, DecodedSource) else None
        if encoded is not None:
            encoding, stored = encoded[0].name, encoded[0].stored_specs(name, spec.shape)
            nbytes = sum(each.nbytes for each in stored.values())
        file = folder.file_of(part, name) if isinstance(folder, Folder) else ""
        tensors[name] = _Tensor(spec.dtype, spec.shape, nbytes, encoding, file)
    if isinstance(folder, Folder):
        stored_in = sorted({tensor.file for tensor in tensors.values()})
        files = {file: folder.storage.size(file) or 0 for file in stored_in}
    aliases = {alias: name for alias, name in source.aliases(part).items() if is_shown(alias)}
    return _PartListing(part, len(source.names(part)), tensors, files, aliases)


def _as_json(path: str, folder: Source, parts: list[_PartListing]) -> dict[str, Any]:
    result: dict[str, Any] = {"path": _root(path, folder), "format": folder.format}
    if not isinstance(folder, Folder):
        result["step"] = folder.metadata().step
    elif (manifest := folder.manifest) is not None:
        group, form = manifest.node_group, form_of(folder)
        result |= {key: getattr(manifest, key) for key in _MANIFEST_FIELDS}
        result |= {
            "replica_differences": [d.model_dump() for d in manifest.replica_differences],
            **(asdict(form) if form is not None else {}),
            "missing_from_node": missing_from_node(folder),
            "param_groups": [g.model_dump() for g in _param_groups(manifest)],
            "extra": manifest.extra,
            "node_group": group.model_dump() if group is not None else None,
            "rank_extra": manifest.rank_extra.world_size if manifest.rank_extra else 0,
            "differing_values": _differing_values(manifest),
        }
    result["parts"] = {
        part.name: {
            "nbytes": part.nbytes,
            "files": part.files,
            "aliases": part.aliases,
            "tensors": {name: tensor._asdict() for name, tensor in part.tensors.items()},
        }
        for part in parts
    }
    return result


def _root(path: str, folder: Source) -> str:
    return folder.path if isinstance(folder, Folder) else absolute_path(path)


def _header_lines(path: str, folder: Source) -> list[str]:
    """Return the lines about the checkpoint as a whole, wrapped at the width of a terminal."""
    if not isinstance(folder, Folder):
        rows = _source_rows(folder)
    elif folder.manifest is not None:
        rows = _manifest_rows(folder.manifest, folder)
    else:
        rows = [("format", "Hugging Face model folder: weights only, no manifest")]
    width = max(stdout_columns() - max(len(key) for key, _ in rows) - 4, 20)
    lines = []
    for key, text in rows:
        first, *others = textwrap.wrap(printable(text), width, break_on_hyphens=False) or [""]
        lines += [(f"  {key}", first), *(("", line) for line in others)]
    return [_root(path, folder), *aligned(lines)]


def _differing_values(manifest: Manifest) -> list[str]:
    """Return the names of values beside tensors that differed between the ranks of the save."""
    record = manifest.rank_values
    return [value_name(tuple(path)) for path in record.paths] if record is not None else []


def _manifest_rows(manifest: Manifest, folder: Folder) -> list[tuple[str, str]]:
    world_size = manifest.rank_extra.world_size if manifest.rank_extra else 0
    differing = first_items(_differing_values(manifest), MAX_SHOWN)
    tensors = [difference.tensor for difference in manifest.replica_differences]
    deleted = sorted(set(manifest.parts) - set(folder.parts))
    rows = [
        ("format", f"unified checkpoint {manifest.format_version}"),
        ("step", "none" if manifest.step is None else str(manifest.step)),
        ("save id", manifest.save_id),
        ("created", manifest.created),
        ("form", str(form_of(folder))),
        ("mesh", mesh_text(manifest)),
        ("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        ("extra", "none" if manifest.extra is None else extra_text(manifest.extra)),
        ("rank extra", f"of {count_text(world_size, 'rank')}" if world_size else "none"),
        ("metrics", metrics_text(manifest.metrics)),
        ("differing", f"each rank has its own {differing}" if differing else ""),
        *_node_group_rows(manifest, folder),
        *_group_rows((len(group.names), group.options) for group in _param_groups(manifest)),
        ("differed", f"between ranks: {first_items(tensors, MAX_SHOWN)}" if tensors else ""),
        ("omitted", ", ".join(manifest.omitted_parts)),
        ("deleted", ", ".join(deleted)),
    ]
    return [(key, text) for key, text in rows if text]


def _node_group_rows(manifest: Manifest, folder: Folder) -> list[tuple[str, str]]:
    group = manifest.node_group
    if group is None:
        return []
    number = f"folder {group.number} of {group.count}, of rank(s) {format_ranks(group.ranks)}"
    missing = missing_from_node(folder)
    return [
        ("node group", number),
        ("replicas", f"of folder(s) {format_ranks(group.replicas)}" if group.replicas else "none"),
        ("status", f"partial: {missing}" if missing else "complete on this node"),
    ]


def _param_groups(manifest: Manifest) -> Sequence[ParamGroup]:
    return manifest.optimizer.groups if manifest.optimizer is not None else ()


def _group_rows(groups: Iterable[tuple[int, Any]]) -> list[tuple[str, str]]:
    return [
        (f"param group {number}", f"{count_text(size, 'parameter')}: {options_text(options)}")
        for number, (size, options) in enumerate(groups)
    ]


def _source_rows(source: Source) -> list[tuple[str, str]]:
    """Return what a foreign checkpoint's metadata says."""
    metadata = source.metadata()
    extra = ", ".join(map(str, metadata.extra)) if isinstance(metadata.extra, dict) else "none"
    return [
        ("format", _FORMATS.get(source.format) or format_title(source.format)),
        ("step", "none" if metadata.step is None else str(metadata.step)),
        ("extra", extra),
        *_group_rows((len(group["names"]), group["options"]) for group in metadata.groups),
    ]


def _part_title(part: _PartListing) -> str:
    shown = f"{len(part.tensors)} of " if len(part.tensors) < part.total else ""
    count = f"{shown}{count_text(part.total, 'tensor')}"
    text = f"{printable(part.name)}  {count}, {human_size(part.nbytes)}"
    if not part.files:
        return text
    first, *others = part.files
    return f"{text} in {len(part.files)} files: {first} …" if others else f"{text} in {first}"


def _tree_lines(part: _PartListing) -> list[str]:
    lines = collapse({name: (tensor.text, tensor.nbytes) for name, tensor in part.tensors.items()})
    aliases = (
        Line((*alias.split("."),), (f"= {printable(name)}",))
        for alias, name in part.aliases.items()
    )
    return aligned([*tree([*lines, *aliases])])


def _table_lines(part: _PartListing) -> list[str]:
    rows: list[tuple[str, ...]] = [
        (f"  {printable(name)}", tensor.text, human_size(tensor.nbytes), tensor.file)
        for name, tensor in part.tensors.items()
    ]
    rows += [(f"  {printable(a)}", f"= {printable(name)}") for a, name in part.aliases.items()]
    return aligned(rows)
