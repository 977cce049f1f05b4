"""`convert`: a checkpoint in any format that is read, to any that is written."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from unified_ckpt.core.text import listed
from unified_ckpt.engine.folder.commit import committed_at
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.folder.verify import verify_folder
from unified_ckpt.engine.nodes.discover import machine_numbers
from unified_ckpt.engine.rewrite.convert import ConvertReport, How
from unified_ckpt.engine.rewrite.convert import convert as write_anew
from unified_ckpt.engine.rewrite.tensors import sizes_of
from unified_ckpt.engine.rewrite.weights_check import compare_copies
from unified_ckpt.errors import FormatError, IntegrityError, NotFoundError, StorageError
from unified_ckpt.exports.maxtext import maxtext_view
from unified_ckpt.exports.side_files import SideFiles, attach, check_modules, main_dtype, side_files
from unified_ckpt.options import ConvertOptions, LoadOptions
from unified_ckpt.runtime.comm import comm as comms
from unified_ckpt.runtime.comm.topology import machine_id
from unified_ckpt.runtime.storage.storage import LocalStorage, absolute, is_url, place_of
from unified_ckpt.runtime.storage.write_calls import ALONE
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES
from unified_ckpt.sources.files.json import CONFIG, config_file, read_config
from unified_ckpt.sources.open import find_any
from unified_ckpt.sources.orbax.maxtext import UNKNOWN, is_maxtext
from unified_ckpt.views.model import with_model, without_model
from unified_ckpt.views.select import Chosen

if TYPE_CHECKING:
    import torch.distributed as dist

    from unified_ckpt.engine.source.protocol import Source

Path = str | os.PathLike[str]

_LOG = logging.getLogger("unified_ckpt")
_BARE = ("huggingface", "maxtext")  # tensors, their indexes and what goes along: no manifest
_EXPORTS = ("torch", "dcp", "paddle")
FORMATS = ("unified", *_BARE, *_EXPORTS)


def convert(
    src: Path | Sequence[Path],
    dst: Path,
    *,
    group: dist.ProcessGroup | None = None,
    progress: Callable[[int, int], object] | None = None,
    **options: Any,
) -> ConvertReport:
    """Writes the checkpoint at `src`, of any format, to `dst`, and proves what it wrote. Every rank of a process group calls and writes its
    share; one process needs none. In a few MiB of memory beside what the source's format costs. `src` may name several folders: those that
    machines without a common folder wrote of one save.

    `options`: the fields of ConvertOptions. `progress(nbytes, of)`: so many more of about `of` bytes that this rank writes.
    Raises NotFoundError, FormatError, IncompleteError or MismatchError for a source that cannot be read whole, IntegrityError where a check
    fails, StorageError, RankError: the same on every rank, and nothing is then at `dst` that was not there.
    """
    chosen = ConvertOptions(**options)
    _check_options(chosen, os.fspath(dst))
    bare = chosen.to in _BARE
    comm, sources = (
        comms.from_torch(group),
        [os.fspath(one) for one in ([src] if isinstance(src, (str, os.PathLike)) else src)],
    )
    where, places = ", ".join(sources), [absolute(one) for one in sources]
    place = next(
        (one for one in places if not is_url(one) and committed_at(one) is not None),
        places[0] if places else "",
    )
    parent, name = place_of(os.fspath(dst))
    storage = LocalStorage(parent, how=ALONE)
    for one in places:
        _check_apart(one, storage.path(name))
    parts = (
        chosen.parts
        if chosen.parts is not None
        else ((MODEL,) if chosen.to == "huggingface" else None)
    )
    timeout = chosen.timeout_seconds
    with ExitStack() as owned:
        machines = (
            machine_numbers(comm, f"conversion of {where}", machine_id(), timeout_seconds=timeout)
            if comm.world > 1
            else [0]
        )
        source = find_any(
            comm,
            where,
            places,
            machines,
            owned,
            LoadOptions(source=chosen.source, timeout_seconds=timeout),
        )
        source = _with_model(source, chosen)
        how = How(
            path=", ".join(places),
            told=chosen.model_dump(
                mode="json",
                exclude_defaults=True,
                exclude={"timeout_seconds", "fsync", "if_exists"},
            ),
            max_file_bytes=chosen.max_file_bytes,
            if_exists=chosen.if_exists,
            fsync=chosen.fsync,
            timeout_seconds=timeout,
            bare=bare,
            compare=chosen.to == "unified" and _compares(chosen),
            original=None if isinstance(source, Exception) or chosen.to != "unified" else source,
            progress=progress or (lambda *_: None),
        )
        source = _proved_first(comm, source, chosen, places)
        source = _chosen(source, parts, chosen, place)
        source, side, dtype = _with_side_files(source, chosen, place, weights_only=bare)
        if chosen.to in _EXPORTS:
            report = _export(comm, source, chosen, storage.path(name), how, place)
            side = _not_exported(side, chosen.to)
        else:
            how = replace(
                how,
                attach=partial(
                    attach,
                    source=place,
                    copied=side.copied,
                    config=chosen.source.config,
                    dtype=dtype,
                ),
            )
            report = write_anew(comm, source, storage, name, how, machines=machines)
    if report.stays or not side.left_out:
        return report
    if comm.rank == 0:
        _LOG.warning(
            listed(
                f"conversion of {where}: entries of the source were neither read nor copied",
                side.left_out,
            )
        )
    return replace(report, left_out=side.left_out)


def _check_options(chosen: ConvertOptions, target: str) -> None:
    """FormatError for options that do not go together."""
    if chosen.to not in FORMATS:
        raise FormatError(
            f"{chosen.to}: is no format that is written; known are {', '.join(FORMATS)}"
        )
    if chosen.to == "torch" and not target.endswith((".pt", ".pth", ".bin")):
        raise FormatError(
            f"{target}: is to be a file of torch.save; needed a name that ends in .pt, .pth or .bin"
        )
    if chosen.to == "huggingface" and chosen.parts is not None and MODEL not in chosen.parts:
        raise FormatError(
            f"huggingface: is the model alone; the parts asked for are {', '.join(chosen.parts)}"
        )


def _proved_first(
    comm: comms.Comm, source: Source | Exception, chosen: ConvertOptions, places: Sequence[str]
) -> Source | Exception:
    """The source, or on rank 0 what is wrong with it: of what is cast, turned or made anew on the way, and of what others' formats get, the
    copies and the digests cannot be compared as it passes by. Several folders are compared with their digests as they are read."""
    how = chosen.source
    exported = chosen.to not in ("unified", "huggingface")
    made_anew = (
        chosen.model_dtype is not None
        or how.rename is not None
        or how.layers is not None
        or how.conversion_fn is not None
    )
    if comm.rank or isinstance(source, Exception) or not (exported or made_anew):
        return source
    try:
        (place, *more) = places
        if not more and not is_url(place) and committed_at(place) is not None:
            with closing(open_path(place, hold=False)) as folder:
                problems = verify_folder(folder, deep=True).problems
            if problems:
                raise IntegrityError(
                    listed(f"{place}: is damaged; nothing is written", list(problems))
                )
        if chosen.compare and chosen.to != "unified":
            compare_copies(source, ", ".join(places))
    except Exception as error:  # told to every rank in the conversion
        return error
    return source


def _with_side_files(
    source: Source | Exception, chosen: ConvertOptions, place: str, *, weights_only: bool
) -> tuple[Source | Exception, SideFiles, str | None]:
    """The files beside the weights, and the model's dtype; or in place of the source, why these cannot go along."""
    if isinstance(source, Exception):
        return source, SideFiles(), None
    config = chosen.source.config
    try:
        if config is not None and not os.path.isfile(config_file(config)):
            raise NotFoundError(
                f"{config}: is not there; needed a config.json, or a folder that has one"
            )
        _check_names(source, chosen, place)
        side = side_files(place, source.format, weights_only=weights_only)
        if chosen.to not in ("unified", "huggingface"):
            check_modules(place, chosen.to)
        dtype = (
            main_dtype(source.specs(MODEL, source.names(MODEL))) if MODEL in source.parts else None
        )
        return source, side, dtype
    except Exception as error:  # raised on every rank in the conversion
        return error, SideFiles(), None


def _with_model(source: Source | Exception, chosen: ConvertOptions) -> Source | Exception:
    """The source, with the model where that is to be written."""
    wanted = chosen.to != "unified" or MODEL in (chosen.parts or ())
    return with_model(source) if wanted and not isinstance(source, Exception) else source


def _compares(chosen: ConvertOptions) -> bool:
    """Whether masters are compared with the model as they pass by: always where they are all that is left of it."""
    parts = chosen.parts
    return chosen.compare if parts is None or {MODEL, MASTER} <= set(parts) else MASTER in parts


def _not_exported(side: SideFiles, to: str) -> SideFiles:
    """Nothing goes along with these formats, but for the config.json that PaddleNLP's has."""
    rest = [name for name in side.copied if not (to == "paddle" and name == CONFIG)]
    return SideFiles(left_out=tuple(sorted({*rest, *side.left_out})))


def _check_names(source: Source, chosen: ConvertOptions, place: str) -> None:
    """Refuses MaxText's own names where nobody asked for them: opened for a look they are right, written for good they are not."""
    names = (
        source.names(MODEL)
        if source.format == "orbax" and chosen.source.names == "auto" and MODEL in source.parts
        else ()
    )
    if is_maxtext(names) and chosen.to != "maxtext":
        raise FormatError(f"{place}: {UNKNOWN}")


def _check_apart(place: str, target: str) -> None:
    """StorageError where the target holds the source, which would go with what is replaced; or lies in a folder of ours, all of which but
    the engine's files goes along."""
    if is_url(place):
        return
    ours, theirs = os.path.realpath(place), os.path.realpath(target)
    common = os.path.commonpath([ours, theirs])
    if ours != theirs and (
        common == theirs or (common == ours and committed_at(place) is not None)
    ):
        raise StorageError(
            f"{target}: and the source, {place}, lie in each other; needed a target beside the source"
        )


def _export(
    comm: comms.Comm,
    source: Source | Exception,
    chosen: ConvertOptions,
    path: str,
    how: How,
    place: str,
) -> ConvertReport:
    """One process writes."""
    if comm.world > 1:
        raise FormatError(f"{chosen.to}: is written by one process; this is one of {comm.world}")
    if isinstance(source, Exception):
        raise source
    from unified_ckpt.exports.formats import Asked, export

    began, sizes = time.monotonic(), sizes_of(source)
    total = sum(sizes.values())
    asked = Asked(
        chosen.fsync,
        chosen.max_file_bytes,
        _config(chosen, place),
        lambda nbytes: how.progress(nbytes, total),
    )
    export(source, chosen.to, path, asked)
    nbytes, tensors = Counter[str](), Counter(part for part, _ in sizes)
    for (part, _), size in sizes.items():
        nbytes[part] += size
    return ConvertReport(
        path,
        source.format,
        None,
        source.said().step,
        time.monotonic() - began,
        dict(tensors),
        dict(nbytes),
    )


def _config(chosen: ConvertOptions, place: str) -> str | None:
    """Where the model's config is: where the caller says, or beside the source."""
    return chosen.source.config or (place if os.path.isfile(os.path.join(place, CONFIG)) else None)


def _chosen(
    source: Source | Exception, parts: Collection[str] | None, chosen: ConvertOptions, place: str
) -> Source | Exception:
    """The source as it is to be written."""
    try:
        if not isinstance(source, Exception) and source.said().pads:
            raise FormatError(
                "rename: a rule has `pad`, and a conversion has no target whose elements stay; use the rule in the load"
            )
        if not isinstance(source, Exception) and chosen.to == "unified" and parts is not None:
            source, parts = without_model(source, parts)
        if not isinstance(source, Exception) and (
            parts is not None or chosen.model_dtype is not None
        ):
            source = Chosen(
                source,
                parts=parts,
                model_dtype=DTYPE_NAMES[getattr(torch, chosen.model_dtype)]
                if chosen.model_dtype
                else None,
            )
        if not isinstance(source, Exception) and chosen.to == "maxtext":
            config = _config(chosen, place)
            if config is None:
                raise FormatError(
                    "MaxText's names and turns follow from the model's config.json; needed --config, or one in the source"
                )
            source = maxtext_view(source, read_config(config))
        return source
    except Exception as error:  # told to every rank in the conversion
        return error
