"""Finds the checkpoints in a run's folder by the names that each framework gives its steps.

To add a naming scheme, add an entry to `STEP_NAME_PATTERNS`. Formats without a step in their names
are opened by path only. Does not import torch, except in `read_step`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

from unified_ckpt.engine.folder.backup import JIT_MARKER
from unified_ckpt.engine.source.protocol import Source, with_indexes
from unified_ckpt.errors import CheckpointError, FormatError, StorageError
from unified_ckpt.foreign.dcp.detect import DCP_METADATA
from unified_ckpt.foreign.deepspeed.detect import DEEPSPEED_LATEST
from unified_ckpt.foreign.files.listing import list_path
from unified_ckpt.foreign.formats import match_format
from unified_ckpt.foreign.huggingface.detect import TRAINER_STATE, has_safetensors
from unified_ckpt.foreign.megatron.detect import MEGATRON_TRACKER
from unified_ckpt.foreign.nanotron.detect import NANOTRON_LATEST, NANOTRON_META
from unified_ckpt.foreign.open import open_error, open_source
from unified_ckpt.foreign.orbax.detect import ORBAX_STEP, ORBAX_TREE, list_orbax_items
from unified_ckpt.foreign.orbax.folders import COMMITTED
from unified_ckpt.format import names
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.storage.regular_files import (
    is_file,
    is_folder,
    is_shortage,
    open_binary,
    probe,
)
from unified_ckpt.runtime.storage.roots import list_entries, open_root

DEFAULT_PREFIX = "checkpoint-"  # of our steps
UNIFIED, WEIGHTS = "unified", "huggingface"
ORBAX_ROOT = "_ROOT_METADATA"
_SUBFOLDERS = ("checkpoints", "checkpoint")  # Accelerate, MaxText and Lightning; torchtitan
_LIGHTNING_NAME = re.compile(
    r"(?:(?:.*[^a-zA-Z])?step=([0-9]{1,18})(?![0-9]).*"
    r"|.*epoch=[0-9].*|last(?:-v[0-9]+)?|hpc_ckpt_[0-9]+)\.ckpt"
)
_LIGHTNING_LOGS = "lightning_logs"
_VERSION = re.compile(r"version_([0-9]{1,9})")
_POINTER_NBYTES = 4096
_BARE_NUMBER = re.compile(r"([0-9]{1,18})")
_CONVERTED_SUFFIX = "_universal"  # DeepSpeed's conversion of the step of the same number
_NUMBERED_FORMATS = frozenset({UNIFIED, "orbax", "nanotron", "dcp"})


@dataclass(frozen=True, slots=True)
class StepNamePattern:
    """A pattern of step names. Its first group, which may be missing, is the step number.

    Without `formats` it matches nothing but checkpoints, of any format. Names that others use too
    are steps if their contents have one of the `formats`.
    """

    pattern: re.Pattern[str]
    formats: frozenset[str] = frozenset()

    def number(self, name: str) -> int | None:
        """Return the step number in a name, or None if it has none."""
        match = self.pattern.fullmatch(name)
        return int(match[1]) if match is not None and match[1] is not None else None


STEP_NAME_PATTERNS = (
    # "-": unified, Trainer, PaddleNLP; "_": Accelerate
    StepNamePattern(re.compile(r"checkpoint[-_]([0-9]{1,18})")),
    StepNamePattern(re.compile(r"global_step([0-9]{1,18})(?:_universal)?")),  # DeepSpeed
    StepNamePattern(re.compile(r"iter_([0-9]{7,18})")),  # Megatron
    StepNamePattern(_LIGHTNING_NAME),  # Lightning
    # torchtitan
    StepNamePattern(
        re.compile(r"step[-_]([0-9]{1,18})"),
        frozenset({*_NUMBERED_FORMATS, WEIGHTS, "huggingface-shards"}),
    ),
    # MaxText and Orbax, nanotron, torch.distributed.checkpoint
    StepNamePattern(_BARE_NUMBER, _NUMBERED_FORMATS),
)
_STEP_FILES = frozenset(
    {DCP_METADATA, ORBAX_STEP, COMMITTED, NANOTRON_META, names.MANIFEST, names.DIGESTS}
)
# The file that each of these writes last: a step without it is incomplete.
_LAST_WRITTEN_FILE = {"trainer": TRAINER_STATE, "accelerate": "random_states_0.pkl"}
# A pointer file names the step to resume from: file -> template of the entry's name.
_POINTER_FILES: Mapping[str, str] = {
    **dict.fromkeys(DEEPSPEED_LATEST, "{}"),
    MEGATRON_TRACKER: "iter_{:0>7}",
    NANOTRON_LATEST: "{}",
}


@dataclass(frozen=True, slots=True)
class StepEntry:
    """A file or folder named like a step. `name` is its path below the root.

    `number` is the step in the name, or None. `format` is a name of `FORMATS`, "unified",
    "huggingface" for weights alone, or empty if nothing readable is there. `pointer` is the
    framework's own file that names this entry as the one to resume from.
    """

    name: str
    path: str
    number: int | None
    format: str
    pointer: str = ""

    @property
    def readable(self) -> bool:
        """Return whether a run can resume from this format."""
        return self.format not in ("", WEIGHTS)


def detect_prefix(root: str) -> str:
    """Return how the names of our steps in a run's folder start: "" if they are bare numbers.

    Raises StorageError if the folder cannot be listed.
    """
    entries = _visible_entries(root)
    if any(name.startswith(DEFAULT_PREFIX) for name in entries):
        return DEFAULT_PREFIX
    is_bare = any(
        _BARE_NUMBER.fullmatch(name) and _has_manifest(os.path.join(root, name)) for name in entries
    )
    return "" if is_bare else DEFAULT_PREFIX


def list_steps(root: str, *, prefix: str = DEFAULT_PREFIX) -> list[StepEntry]:
    """Return the steps in a run's folder, with the one to resume from last.

    Search the folder itself, its `checkpoints` or `checkpoint`, and `checkpoints` of
    Lightning's latest `lightning_logs/version_<n>`. `prefix` starts the names of the run's own
    steps; bare numbers are steps by their contents. Empty folders and unfinished saves are not
    listed. A missing folder has no steps. Raises StorageError if a folder cannot be listed.
    In a bucket, the root itself is searched, and other formats are listed as unknown ones.
    """
    prefix_pattern = StepNamePattern(re.compile(f"{re.escape(prefix)}([0-9]{{1,18}})"))
    patterns = (prefix_pattern, *STEP_NAME_PATTERNS) if prefix else STEP_NAME_PATTERNS
    if is_bucket_url(root):
        return sort_by_recency(_list_bucket(root, patterns))[::-1]
    entries = [
        entry for folder in _step_folders(root) for entry in _list_folder(root, folder, patterns)
    ]
    return sort_by_recency(entries)[::-1]


def list_unified(root: str) -> list[str]:
    """Return the folders with a manifest of ours in a run's folder, whatever their names.

    They are paths below the root, and may be links. Searches the folder itself, and its
    `checkpoints` or `checkpoint`, with one probe per entry. Raises StorageError like `list_steps`.
    """
    return [
        os.path.join(folder, name)
        for folder in ("", *_SUBFOLDERS)
        for name in sorted(_visible_entries(os.path.join(root, folder)))
        if _has_manifest(os.path.join(root, folder, name))
    ]


def _has_manifest(path: str) -> bool:
    if is_bucket_url(path):
        return open_root(path).version_token(names.MANIFEST) is not None
    return probe(is_file, os.path.join(path, names.MANIFEST))


def sort_by_recency(steps: list[StepEntry]) -> list[StepEntry]:
    """Sort steps in the order in which to try them: highest number first.

    A step that a pointer file names comes before the others in its folder.
    """
    highest: dict[str, int] = {}
    for entry in steps:
        folder = os.path.dirname(entry.path)
        highest[folder] = max(highest.get(folder, -1), -1 if entry.number is None else entry.number)

    def sort_key(entry: StepEntry) -> tuple[int, bool, int, bool, bool, int, str]:
        number = -1 if entry.number is None else entry.number
        effective_number = highest[os.path.dirname(entry.path)] if entry.pointer else number
        # Ties: unified first, conversions last; Lightning's longer `…-v1.ckpt` is later.
        tie_breakers = (
            entry.format == UNIFIED,
            not entry.name.endswith(_CONVERTED_SUFFIX),
            len(entry.name),
            entry.name,
        )
        return effective_number, bool(entry.pointer), number, *tie_breakers

    return sorted(steps, key=sort_key, reverse=True)


def _step_folders(root: str) -> Iterator[str]:
    """Yield the folders that may hold steps, as paths below the root."""
    yield ""
    for name in _SUBFOLDERS:
        if is_folder(os.path.join(root, name)):
            yield name
    logs = os.path.join(root, _LIGHTNING_LOGS)
    versions = [
        int(match[1]) for name in _visible_entries(logs) if (match := _VERSION.fullmatch(name))
    ]
    for version in sorted(versions, reverse=True):
        folder = os.path.join(_LIGHTNING_LOGS, f"version_{version}", _SUBFOLDERS[0])
        if _visible_entries(os.path.join(root, folder)):
            yield folder
            return


def _visible_entries(path: str) -> list[str]:
    return [name for name in list_entries(path) if not name.startswith(".")]


def _list_bucket(root: str, patterns: tuple[StepNamePattern, ...]) -> list[StepEntry]:
    """Return the entries of a root in a bucket that are named like steps, by one listing.

    Names that others use too are steps if their own listing shows files of a step.
    """
    steps: list[StepEntry] = []
    for name in _visible_entries(root):
        pattern = next((item for item in patterns if item.pattern.fullmatch(name)), None)
        if pattern is None:
            continue
        path, format_name = f"{root}/{name}", UNIFIED  # an error of opening it says what it is
        if pattern.formats:
            entries = set(open_root(path).names())
            format_name = UNIFIED if names.MANIFEST in entries else ""
            if not entries & _STEP_FILES:
                continue
        steps.append(StepEntry(name, path, pattern.number(name), format_name))
    return steps


def _list_folder(root: str, folder: str, patterns: tuple[StepNamePattern, ...]) -> list[StepEntry]:
    path = os.path.join(root, folder) if folder else root
    entries = set(_visible_entries(path))
    pointers, in_orbax_root = _read_pointers(path, entries), ORBAX_ROOT in entries
    steps: list[StepEntry] = []
    for name in entries | pointers.keys():
        exists, entry_path = name in entries, os.path.join(path, name)
        name_pattern = next((item for item in patterns if item.pattern.fullmatch(name)), None)
        if name_pattern is None and not (exists and name in pointers):
            continue
        if exists and names.is_backup(name):
            continue
        format_name: str | None = ""  # of a step that a pointer names, but that does not exist
        if exists:
            is_step_by_name = name_pattern is not None and (
                not name_pattern.formats or name in pointers or in_orbax_root
            )
            format_name = _detect_entry_format(
                entry_path, name_pattern, is_step_by_name=is_step_by_name
            )
        if format_name is not None:
            number = None if name_pattern is None else name_pattern.number(name)
            pointer = pointers.get(name, "")
            relative_path = os.path.join(folder, name)
            steps.append(StepEntry(relative_path, entry_path, number, format_name, pointer))
    return steps


def _read_pointers(folder: str, entries: Collection[str]) -> dict[str, str]:
    """Map the entries that pointer files in a folder name to those pointer files."""
    pointers: dict[str, str] = {}
    for file in reversed([name for name in _POINTER_FILES if name in entries]):
        path = os.path.join(folder, file)
        if not is_file(path):
            continue
        with open_binary(path) as pointer_file:
            text = pointer_file.read(_POINTER_NBYTES).decode(errors="replace").strip()
        is_release = file == MEGATRON_TRACKER and text == "release"
        name = text if is_release else _POINTER_FILES[file].format(text)
        if text and os.path.split(name)[1] == name and name not in (".", ".."):
            pointers[name] = file
    return pointers


def _detect_entry_format(
    path: str, name_pattern: StepNamePattern | None, *, is_step_by_name: bool
) -> str | None:
    """Return an entry's format; empty if it is broken or unknown, None if it is no step.

    `is_step_by_name`: the name alone shows that it is a step.
    """
    try:
        listing = list_path(path)
        detected = match_format(listing)
    except (OSError, StorageError) as error:
        if is_shortage(error):
            raise
        return "" if is_step_by_name else None  # opening it reports the error
    entries = listing.entries - {JIT_MARKER}
    if not listing.is_file and not entries:
        return None
    format_name = (
        detected.name
        if detected is not None
        else UNIFIED
        if names.MANIFEST in entries
        else WEIGHTS
        if has_safetensors(listing)
        else ""
    )
    if name_pattern is None:
        return format_name or None
    if format_name == "orbax" and not (
        entries & {ORBAX_TREE, ORBAX_STEP} or list_orbax_items(path, entries)
    ):
        format_name = ""  # a root of steps, not a step
    if format_name and (not name_pattern.formats or format_name in name_pattern.formats):
        return format_name
    is_broken = entries & _STEP_FILES or any(name.endswith(".distcp") for name in entries)
    return "" if is_step_by_name or is_broken else None


@dataclass(frozen=True, slots=True)
class StepContents:
    """What a step holds: its own step number (else that of its name), and its parts.

    `problem` says why a run cannot resume from it; empty if it can.
    """

    step: int | None
    parts: frozenset[str] = frozenset()
    problem: str = ""


def read_step(
    entry: StepEntry,
    options: SourceOptions = SourceOptions(),  # noqa: B008  # frozen
) -> StepContents:
    """Open a step as a load would, without reading any tensor."""
    if not entry.readable:
        return StepContents(entry.number, problem=_single_line(_unreadable_reason(entry), entry))
    last_file = _LAST_WRITTEN_FILE.get(entry.format)
    missing = f"{last_file}, which is written last, is missing"
    try:
        if last_file is not None and not is_file(os.path.join(entry.path, last_file)):
            return StepContents(entry.number, problem=missing)
        with closing(with_indexes(open_source(entry.path, options))) as source:
            metadata = source.metadata()
            parts = {part for part in source.parts if _is_readable(source, part)}
    except CheckpointError as error:
        return StepContents(entry.number, problem=_single_line(str(error), entry))
    if metadata.groups or metadata.scalars:
        parts.add("optimizer")  # SGD without momentum has no tensors
    return StepContents(entry.number if metadata.step is None else metadata.step, frozenset(parts))


def _is_readable(source: Source, part: str) -> bool:
    """Return whether a part can be read; some formats only show that there is one."""
    try:
        source.names(part)
    except FormatError:
        return False
    return True


def _single_line(problem: str, entry: StepEntry) -> str:
    """Return an error on one line without the path, which callers print themselves."""
    return " ".join(problem.split()).removeprefix(f"{entry.path}: ").removeprefix(f"{entry.path}/")


def _unreadable_reason(entry: StepEntry) -> str:
    if entry.pointer and not os.path.lexists(entry.path):
        return f"{entry.pointer} names it, but it does not exist"
    if entry.format == WEIGHTS:
        return (
            "holds weights only: interrupted, or saved without training state; "
            "use load_parameters_path to read the weights"
        )
    return open_error(entry.path) or "damaged, or not the format that its name says"
