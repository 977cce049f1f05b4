"""`convert`: from any format that can be read to any format that can be written."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_args

from unified_ckpt.core.keywords import checked_path, checked_paths, show_keywords
from unified_ckpt.core.text import format_list, raise_if_any
from unified_ckpt.engine.cluster.discover import OpenRequest
from unified_ckpt.engine.folder.manifest import read_manifest_at
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.folder.verify import verify_folder
from unified_ckpt.engine.rewrite.convert import ConvertReport, ConvertRequest, convert_source
from unified_ckpt.engine.rewrite.weights_check import compare_masters
from unified_ckpt.engine.source.protocol import ReadPolicy, SourceMetadata
from unified_ckpt.errors import FormatError, IntegrityError, StorageError, result_or_error
from unified_ckpt.foreign.export.adapters import (
    adapter_part_of,
    check_file_names,
    open_and_merge,
    part_as,
    read_adapter_config,
)
from unified_ckpt.foreign.export.export import WRITERS, export_source
from unified_ckpt.foreign.export.selection import (
    check_maxtext_names,
    select_parts,
    with_state_names,
    written_parts,
)
from unified_ckpt.foreign.export.side_files import (
    SideFiles,
    check_modules,
    copy_names,
    copy_side_files,
    main_dtype,
    side_files,
)
from unified_ckpt.foreign.export.unwritten import (
    WEIGHTS_ONLY,
    folders_of_other_saves,
    unwritten_state,
)
from unified_ckpt.foreign.files.json import CONFIG, write_json
from unified_ckpt.foreign.huggingface.adapters import ADAPTER_PART
from unified_ckpt.foreign.huggingface.detect import ADAPTER_CONFIG
from unified_ckpt.foreign.huggingface.hub_layout import in_hub_layout
from unified_ckpt.foreign.open_on_ranks import open_on_all_ranks
from unified_ckpt.foreign.paddle.export.trainer_files import PADDLE_FORMATS
from unified_ckpt.format.encoded_tensors import Compression
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.format.names import MASTER, MODEL
from unified_ckpt.options import ConvertOptions
from unified_ckpt.runtime.comm import comm as comms
from unified_ckpt.runtime.comm.topology import gather_topology
from unified_ckpt.runtime.objects.registry import is_bucket_url, split_url, use_storage_options
from unified_ckpt.runtime.storage.paths import absolute_path, is_url
from unified_ckpt.runtime.storage.protocol import Storage
from unified_ckpt.runtime.storage.roots import open_parent
from unified_ckpt.runtime.storage.write_calls import BULK
from unified_ckpt.storage_options import StorageOptions
from unified_ckpt.views.model import with_model

if TYPE_CHECKING:
    import torch.distributed as dist

    from unified_ckpt.engine.source.protocol import Source

Path = str | os.PathLike[str]

_LOG = logging.getLogger("unified_ckpt")
_WITHOUT_MANIFEST = ("huggingface", "maxtext", "peft")  # tensors, indexes and side files only
_HUB_FILE_NBYTES = 5_000_000_000  # as Hugging Face divides models
FORMATS = ("unified", *_WITHOUT_MANIFEST, *WRITERS)


@show_keywords(ConvertOptions, **dict(ConvertOptions()))
def convert(
    src: Path | Sequence[Path],
    dst: Path,
    *,
    group: dist.ProcessGroup | None = None,
    progress: Callable[[int, int], object] | None = None,
    storage_options: StorageOptions | None = None,
    **options: Any,
) -> ConvertReport:
    """Convert the checkpoint at `src`, of any format, to `dst`, and verify the result.

    `src`: a checkpoint, or the folders of one save on several nodes.
    `options`: the fields of ConvertOptions.
    `progress`: called with the bytes that this rank has written, and about how many it will write.
    `storage_options`: as in `save`, for all buckets.

    Every rank of a process group calls this and writes its share; a single process needs no group.
    A rank uses a few MiB of memory, plus the needs of the source format. Raises NotFoundError,
    FormatError, IncompleteError or MismatchError for a source that cannot be read completely,
    IntegrityError if a check fails, StorageError or RankError, the same on every rank. After an
    error, `dst` is unchanged.
    """
    convert_options, dst = ConvertOptions(**options), checked_path(dst, "dst")
    _check_options(convert_options, dst)
    comm = comms.from_torch(group)
    sources = checked_paths(src, "src")
    source_names, paths = ", ".join(sources), [absolute_path(path) for path in sources]
    use_storage_options([*paths, absolute_path(dst)], storage_options)
    located = result_or_error(partial(_locate, paths, dst, convert_options))
    operation, timeout = f"conversion of {source_names}", convert_options.timeout_seconds
    with ExitStack() as resources:
        failure = located if isinstance(located, Exception) else None
        topology = gather_topology(comm, operation, timeout_seconds=timeout, failure=failure)
        assert not isinstance(located, Exception), "all ranks have raised it"
        manifests, storage, target_name = located
        main_path = next(
            (path for path in paths if manifests[path] is not None), "".join(paths[:1])
        )
        main_folder = main_path
        if is_bucket_url(main_path):
            main_folder = resources.enter_context(TemporaryDirectory(prefix="unified_ckpt-"))
        located_sources = _Sources(manifests, main_path, main_folder)
        opening = OpenRequest(source_names, paths, topology, timeout, ReadPolicy())
        source = open_on_all_ranks(comm, opening, convert_options.source, resources)
        if convert_options.adapter is not None:
            source = open_and_merge(comm, source, convert_options.adapter, opening, resources)
        without_manifest = convert_options.to in _WITHOUT_MANIFEST
        request = ConvertRequest(
            source_path=", ".join(paths),
            recorded_options=convert_options.model_dump(
                mode="json",
                exclude_defaults=True,
                exclude={"timeout_seconds", "fsync", "if_exists"},
            ),
            compression=convert_options.compression,
            max_file_bytes=convert_options.max_file_bytes
            or (_HUB_FILE_NBYTES if without_manifest else None),
            if_exists=convert_options.if_exists,
            timeout_seconds=convert_options.timeout_seconds,
            without_manifest=without_manifest,
            compare_masters=convert_options.to == "unified" and _compares_masters(convert_options),
            progress=progress or (lambda *_: None),
        )
        prepared = _Prepared(request, source)
        try:
            if not isinstance(source, Exception):
                prepared = _prepare(
                    request, source, convert_options, located_sources, is_first=comm.rank == 0
                )
        except Exception as error:  # every rank raises it in the conversion
            prepared = replace(prepared, source=error)
        request, source, files = prepared.request, prepared.source, prepared.files
        if convert_options.to in WRITERS:
            report = export_source(
                comm, source, convert_options, storage.path(target_name), request, main_folder
            )
            # Exported formats take no side files, except config.json for Paddle.
            written = {CONFIG} if convert_options.to in PADDLE_FORMATS else set[str]()
            not_copied = set(files.copied) - written
            files = SideFiles(left_out=tuple(sorted(not_copied.union(files.left_out))))
        else:
            report = convert_source(comm, source, storage, target_name, request, topology=topology)
    metadata = prepared.metadata
    if report.existed:
        return report
    other_saves = folders_of_other_saves(manifests, metadata.save_id)
    lost = {*files.left_out, *other_saves}
    if convert_options.to not in WEIGHTS_ONLY:
        lost |= {*prepared.unwritten}
    if lost and comm.rank == 0:
        title = f"{operation}: these entries of the source were neither read nor copied"
        _LOG.warning(format_list(title, sorted(lost)))
    left_out = {*lost, *prepared.unwritten, *metadata.left_out} - set(files.copied)
    notes = (*prepared.notes, *report.notes)
    return replace(report, left_out=tuple(sorted(left_out)), notes=notes)


@dataclass(frozen=True, slots=True)
class _Sources:
    """The manifests of all sources, by path, and the main source, whose side files are copied.

    `main_folder`: the local folder of these files; of a source in a bucket, an empty one.
    """

    manifests: Mapping[str, Manifest | None]
    main_path: str
    main_folder: str


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A conversion that is ready to run.

    `source`: as it is to be written, or this rank's error. `unwritten`: names of what the target
    has no place for. `metadata`: of the source.
    """

    request: ConvertRequest
    source: Source | Exception
    files: SideFiles = field(default_factory=SideFiles)
    notes: Sequence[str] = ()
    unwritten: Sequence[str] = ()
    metadata: SourceMetadata = field(default_factory=SourceMetadata)


def _locate(
    paths: Sequence[str], dst: str, options: ConvertOptions
) -> tuple[dict[str, Manifest | None], Storage, str]:
    """Return the manifests of the sources by path, and the storage and name of the target."""
    manifests = {
        path: read_manifest_at(path) if is_bucket_url(path) or not is_url(path) else None
        for path in paths
    }
    storage, name = open_parent(absolute_path(dst), write_policy=replace(BULK, fsync=options.fsync))
    for path, manifest in manifests.items():
        _check_disjoint(path, storage.path(name), is_unified=manifest is not None)
    return manifests, storage, name


def _check_options(options: ConvertOptions, target_path: str) -> None:
    """FormatError for options that do not go together."""
    if options.to not in FORMATS:
        raise FormatError(f"to: got {options.to!r}, expected one of {', '.join(FORMATS)}")
    by_format = {"unified": get_args(Compression), "paddle": ("none", "O1", "O2")}
    known = by_format.get(options.to, ("none",))
    if options.compression not in known:
        raise FormatError(
            f"compression: got {options.compression!r} for {options.to!r}, expected one of "
            f"{', '.join(known)}"
        )
    if options.to != "unified" and is_url(absolute_path(target_path)):
        raise FormatError(
            f"{target_path}: got a URL for {options.to!r}, expected a local path; only unified "
            "checkpoints are written to a bucket"
        )
    if options.to == "torch" and not target_path.endswith((".pt", ".pth", ".bin")):
        raise FormatError(
            f"{target_path}: got this name for a torch.save file, expected one that ends in .pt, "
            ".pth or .bin"
        )
    parts = options.parts or ()
    if options.to == "huggingface" and len(parts) > 1:
        raise FormatError(
            f"parts: got {', '.join(parts)}, expected one of them; huggingface has one model"
        )
    if options.adapter is not None and (options.parts is not None or options.to == "peft"):
        raise FormatError(
            "adapter: got it with parts or a target of PEFT, expected it alone; a merged model has "
            "no other parts"
        )


def _prepare(
    request: ConvertRequest,
    opened: Source,
    options: ConvertOptions,
    sources: _Sources,
    *,
    is_first: bool,
) -> _Prepared:
    """Return what is to be written. The first rank verifies the source beforehand."""
    main_path, manifest = sources.main_folder, sources.manifests[sources.main_path]
    if main_path != sources.main_path:
        copy_names(sources.main_path, manifest, main_path, whole=is_first)
    opened = with_state_names(opened, options)
    source = opened
    if options.to != "unified" or MODEL in (options.parts or ()):
        source = with_model(source)
    if options.to == "unified":
        request = replace(request, uncast_source=source)
    weights_only = request.without_manifest
    files = side_files(main_path, opened.format, manifest, weights_only=weights_only)
    selected, notes = select_parts(source, options, main_path), list[str]()
    in_layout = selected
    if options.to == "unified" and options.source.layers == "stacked":
        notes = ["from_pretrained does not open stacked layers; to='huggingface' unstacks them"]
    if options.to == "huggingface":
        in_layout, notes = in_hub_layout(
            selected,
            main_path if CONFIG in files.copied else options.source.config,
            is_model_folder=opened.format.startswith("huggingface"),
        )
    if is_first:
        _verify_first(source, options, sources.manifests, unstacked=in_layout is not selected)
    check_maxtext_names(in_layout, options, main_path)
    written = written_parts(opened, selected, options)
    unwritten = unwritten_state(
        opened, options.to, selected=options.parts or opened.parts, written=written
    )
    # Read here: nothing may fail once the target has its name.
    prepared = _Prepared(request, in_layout, files, notes, unwritten, in_layout.metadata())
    if options.to == "peft":
        return _prepare_adapter(prepared, in_layout, options, main_path)
    if options.to not in ("unified", "huggingface"):
        check_modules(main_path, options.to)
    specs = in_layout.specs(MODEL, in_layout.names(MODEL)) if MODEL in in_layout.parts else {}
    attach = partial(
        copy_side_files,
        source=main_path,
        copied=files.copied,
        config=options.source.config,
        dtype=main_dtype(specs),
    )
    return replace(prepared, request=replace(request, attach=attach))


def _prepare_adapter(
    prepared: _Prepared, source: Source, options: ConvertOptions, main_path: str
) -> _Prepared:
    """Return one adapter as PEFT has it: in one file, with its configuration."""
    part, left_out = adapter_part_of(source, options.parts), prepared.files.left_out
    adapter_config = read_adapter_config(main_path, source, part)
    check_file_names(source, part, adapter_config)
    copied = tuple(
        name for name in prepared.files.copied if name.startswith(("tokenizer", "README"))
    )

    def attach(folder: str) -> None:
        copy_side_files(folder, source=main_path, copied=copied, config=None, dtype=None)
        write_json(os.path.join(folder, ADAPTER_CONFIG), adapter_config)

    return replace(
        prepared,
        request=replace(prepared.request, attach=attach),
        source=part_as(source, part, ADAPTER_PART),
        files=SideFiles(copied, left_out),
    )


def _verify_first(
    source: Source,
    options: ConvertOptions,
    manifests: Mapping[str, Manifest | None],
    *,
    unstacked: bool,
) -> None:
    """Verify a source whose tensors are cast, changed or exported.

    They cannot be compared with their digests and master weights while they are written. Several
    folders are compared with their digests as they are read.
    """
    source_options = options.source
    exported = options.to not in ("unified", "huggingface")
    changed = (
        unstacked
        or options.model_dtype is not None
        or options.adapter is not None
        or source_options.rename is not None
        or source_options.layers is not None
        or source_options.conversion_fn is not None
    )
    if not (exported or changed):
        return
    (path, *other_paths) = manifests
    if not other_paths and manifests[path] is not None:
        with closing(open_path(path, lock=False)) as folder:
            problems = verify_folder(folder, deep=True).problems
        raise_if_any(IntegrityError, f"{path}: is damaged; nothing was written", list(problems))
    if options.compare and options.to != "unified":
        compare_masters(source, ", ".join(manifests))


def _compares_masters(options: ConvertOptions) -> bool:
    """Whether masters are compared with the model: always if they are all that is kept of it."""
    parts = options.parts
    return options.compare if parts is None or {MODEL, MASTER} <= set(parts) else MASTER in parts


def _check_disjoint(source_path: str, target_path: str, *, is_unified: bool) -> None:
    """StorageError if the target contains the source, or lies within a unified folder.

    Replacing the target would delete the source, and side files of a unified folder are copied
    along.
    """
    if is_url(source_path) != is_url(target_path) or not (
        is_bucket_url(source_path) or not is_url(source_path)
    ):
        return
    real_source, real_target = map(_real_path, (source_path, target_path))
    common = os.path.commonpath([real_source, real_target])
    if real_source != real_target and (
        common == real_target or (common == real_source and is_unified)
    ):
        raise StorageError(
            f"{target_path}: target and source ({source_path}) contain one another; choose a "
            "target outside the source"
        )


def _real_path(path: str) -> str:
    """Return an absolute path without links; of a URL, one that begins with the bucket."""
    if is_bucket_url(path):
        bucket, prefix = split_url(path)
        return f"/{bucket.replace('://', '/')}/{prefix}"
    return os.path.realpath(path)
