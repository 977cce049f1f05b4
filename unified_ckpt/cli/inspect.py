"""The verb `inspect`: what a checkpoint holds, from its manifest, indexes and headers. Starts without torch, and reads no tensor."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from unified_ckpt.cli.source_args import source_options
from unified_ckpt.cli.tensor_tree import Line, collapse, natural, spec_text, table, tree
from unified_ckpt.cli.text import count, extra_text, human, options_text, plain
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import short
from unified_ckpt.engine.folder.reader import Folder
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.sources import open_any
from unified_ckpt.sources.detect.names import title_of

_FORMATS = {
    "megatron": "Megatron-LM, folders of ranks",
    "megatron-core": "Megatron-Core, torch_dist",
    "dcp": "torch.distributed.checkpoint",
    "orbax": "Orbax",
    "paddle": "PaddleNLP Unified Checkpoint",
    "paddle-legacy": "PaddleNLP: .pdparams and .pdopt of each rank",
    "torch": "a file of torch.save: weights, and what is plain beside them",
    "huggingface-bin": "Hugging Face model folder of pickles: weights only",
}
_FIRST = ("model", "master_weights", "optimizer")  # then the others by name


@dataclass(frozen=True, slots=True)
class _Part:
    """A part as far as it is shown. `total`: tensors that it has; `files`: file -> bytes."""

    name: str
    total: int
    specs: dict[str, TensorSpec]
    files: dict[str, int]
    file_of: dict[str, str]
    aliases: dict[str, str]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())


def run(arguments: Namespace) -> int:
    """Takes `path`, `match`, `all`, `json`, and how to read it."""
    folder = open_any(arguments.path, source_options(arguments))
    try:
        parts, refused = _parts(folder, arguments.match)
        if arguments.json:
            print(
                json.dumps(
                    _as_json(arguments.path, folder, parts)
                    | ({"refused": refused} if refused else {}),
                    indent=2,
                )
            )
            return 0
        print("\n".join(_head(arguments.path, folder)))
        for part in parts:
            if part.specs or part.aliases or arguments.match is None:
                print(
                    "\n".join(
                        ["", _title(part), *(_every(part) if arguments.all else _branches(part))]
                    )
                )
        for reason in refused.values():
            print(f"\nnot read: {reason}")
        if arguments.match is not None and not any(part.specs or part.aliases for part in parts):
            print(f"\nno tensor matches {arguments.match}")
    finally:
        folder.close()
    return 0


def _rank(part: str) -> tuple[int, str]:
    return (_FIRST.index(part) if part in _FIRST else len(_FIRST)), part


def _parts(folder: Source, match: str | None) -> tuple[list[_Part], dict[str, str]]:
    """The parts, and why some of a checkpoint that others wrote are not read."""
    parts, refused = [], {}
    for part in sorted(folder.parts, key=_rank):
        try:
            parts.append(_part(folder, part, match))
        except FormatError as error:
            if isinstance(folder, Folder):
                raise
            refused[part] = str(error)
    return parts, refused


def _part(folder: Source, part: str, match: str | None) -> _Part:
    def wanted(name: str) -> bool:
        return match is None or fnmatchcase(name, match) or fnmatchcase(f"{part}:{name}", match)

    names = sorted(filter(wanted, folder.names(part)), key=natural)
    specs = folder.specs(part, names)
    file_of = {
        name: folder.file_of(part, name) if isinstance(folder, Folder) else "" for name in names
    }
    files = (
        {file: folder.storage.size(file) or 0 for file in sorted(set(file_of.values()))}
        if isinstance(folder, Folder)
        else {}
    )
    aliases = {alias: name for alias, name in folder.aliases(part).items() if wanted(alias)}
    return _Part(
        part,
        len(folder.names(part)),
        {name: specs[name] for name in names},
        files,
        file_of,
        aliases,
    )


def _as_json(path: str, folder: Source, parts: list[_Part]) -> dict[str, Any]:
    manifest = folder.manifest if isinstance(folder, Folder) else None
    told: dict[str, Any] = {"path": _root(path, folder), "format": folder.format}
    if not isinstance(folder, Folder):
        told["step"] = folder.said().step
    if manifest is not None:
        told |= {
            key: getattr(manifest, key)
            for key in (
                "format_version",
                "save_id",
                "step",
                "created",
                "world_size",
                "mesh",
                "versions",
                "omitted_parts",
            )
        }
        told["param_groups"] = (
            [group.model_dump() for group in manifest.optimizer.groups]
            if manifest.optimizer
            else []
        )
        told["extra"] = manifest.extra
        told["island"] = manifest.island.model_dump() if manifest.island is not None else None
        told["rank_extra"] = manifest.rank_extra.world_size if manifest.rank_extra else 0
    told["parts"] = {
        part.name: {
            "nbytes": part.nbytes,
            "files": part.files,
            "aliases": part.aliases,
            "tensors": {
                name: {
                    "dtype": spec.dtype,
                    "shape": list(spec.shape),
                    "nbytes": spec.nbytes,
                    "file": part.file_of[name],
                }
                for name, spec in part.specs.items()
            },
        }
        for part in parts
    }
    return told


def _root(path: str, folder: Source) -> str:
    return folder.storage.root if isinstance(folder, Folder) else os.path.abspath(path)


def _head(path: str, folder: Source) -> list[str]:
    """What is said of the checkpoint as a whole."""
    if not isinstance(folder, Folder):
        return [
            _root(path, folder),
            *table([(f"  {key}", (plain(text),)) for key, text in _told(folder)]),
        ]
    manifest = folder.manifest
    if manifest is None:
        return [
            folder.storage.root,
            "  format  Hugging Face model folder: weights only, no manifest",
        ]
    rows = [
        ("format", f"unified checkpoint {manifest.format_version}"),
        ("step", "none" if manifest.step is None else str(manifest.step)),
        ("save id", manifest.save_id),
        ("created", manifest.created),
        ("mesh", _mesh_text(manifest)),
        ("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        ("extra", extra_text(manifest.extra)),
        (
            "rank extra",
            f"of {count(manifest.rank_extra.world_size, 'rank')}"
            if manifest.rank_extra
            else "none",
        ),
    ]
    if manifest.island is not None:
        island = manifest.island
        rows.append(
            (
                "machine",
                f"folder {island.number} of {island.count}, of rank(s) {short(island.ranks)}",
            )
        )
        rows.append(("copies", f"of folder(s) {short(island.copies)}" if island.copies else "none"))
    for number, group in enumerate(manifest.optimizer.groups if manifest.optimizer else ()):
        rows.append(
            (
                f"param group {number}",
                f"{count(len(group.names), 'parameter')}: {options_text(group.options)}",
            )
        )
    if manifest.omitted_parts:
        rows.append(("left out", ", ".join(manifest.omitted_parts)))
    gone = sorted(set(manifest.parts) - set(folder.parts))
    if gone:
        rows.append(("deleted", ", ".join(gone)))
    return [folder.storage.root, *table([(f"  {key}", (plain(text),)) for key, text in rows])]


def _told(source: Source) -> list[tuple[str, str]]:
    """What a checkpoint of another format says of itself."""
    said = source.said()
    rows = [
        ("format", _FORMATS.get(source.format) or title_of(source.format)),
        ("step", "none" if said.step is None else str(said.step)),
    ]
    rows.append(
        ("extra", ", ".join(map(str, said.extra)) if isinstance(said.extra, dict) else "none")
    )
    groups = enumerate(said.groups)
    return [
        *rows,
        *(
            (
                f"param group {n}",
                f"{count(len(one['names']), 'parameter')}: {options_text(one['options'])}",
            )
            for n, one in groups
        ),
    ]


def _mesh_text(manifest: Manifest) -> str:
    """`4 ranks; dp 2 x tp 2`. The record is free in its form: what is not known is shown as it is."""
    texts = [count(manifest.world_size, "rank")]
    for key, value in manifest.mesh.items():
        match key, value:
            case "layout", dict():
                texts.append(
                    "Layout " + " x ".join(f"{name} {size}" for name, size in value.items())
                )
            case "device_meshes", dict():
                for names, sizes in value.items():
                    texts.append(
                        " x ".join(
                            f"{name} {size}"
                            for name, size in zip(names.split(), sizes, strict=False)
                        )
                    )
            case "world_size", _:
                continue
            case _:
                texts.append(f"{key} {json.dumps(value)}")
    return "; ".join(texts)


def _title(part: _Part) -> str:
    shown = f"{len(part.specs)} of " if len(part.specs) < part.total else ""
    text = f"{part.name}  {shown}{count(part.total, 'tensor')}, {human(part.nbytes)}"
    if not part.files:
        return text
    first = next(iter(part.files))
    return f"{text} in {first if len(part.files) == 1 else f'{len(part.files)} files: {first} …'}"


def _branches(part: _Part) -> list[str]:
    lines = collapse(part.specs)
    lines += [Line(tuple(alias.split(".")), (f"= {name}",)) for alias, name in part.aliases.items()]
    return table(tree(lines))


def _every(part: _Part) -> list[str]:
    rows = [
        (f"  {plain(name)}", (spec_text(spec), human(spec.nbytes), part.file_of[name]))
        for name, spec in part.specs.items()
    ]
    return table(
        [
            *rows,
            *((f"  {plain(alias)}", (f"= {plain(name)}",)) for alias, name in part.aliases.items()),
        ]
    )
