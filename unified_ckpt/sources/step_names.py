"""Which entries of a run's folder are steps, by the names that each engine gives them. Starts
without torch; only `read_step` needs it.

A new naming is a line in `STEP_NAME_PATTERNS`. Formats whose checkpoints have no step in their
names are read by path only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

from unified_ckpt.engine.folder.backup import JIT_MARKER
from unified_ckpt.errors import CheckpointError, StorageError
from unified_ckpt.format import names
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.regular_files import open_binary
from unified_ckpt.sources import open_error, open_source
from unified_ckpt.sources.detect.names import (
    DCP_METADATA,
    DEEPSPEED_LATEST,
    MEGATRON_TRACKER,
    NANOTRON_LATEST,
    NANOTRON_META,
    ORBAX_STEP,
    ORBAX_TREE,
    TRAINER_STATE,
    has_safetensors,
    list_orbax_items,
    list_path,
    match_format,
)
from unified_ckpt.sources.orbax.folders import COMMITTED

UNIFIED, WEIGHTS = "unified", "huggingface"
ORBAX_ROOT = "_ROOT_METADATA"
_SUBFOLDERS = ("checkpoints", "checkpoint")  # of Accelerate, MaxText and Lightning; of torchtitan
_LIGHTNING_NAME = re.compile(
    r"(?:(?:.*[^a-zA-Z])?step=([0-9]{1,18})(?![0-9]).*|.*epoch=[0-9].*|last(?:-v[0-9]+)?|hpc_ckpt_[0-9]+)\.ckpt"
)
_LIGHTNING_LOGS = "lightning_logs"
_VERSION = re.compile(r"version_([0-9]{1,9})")
_POINTER_NBYTES = 4096
_CONVERTED_SUFFIX = (
    "_universal"  # ends the name of what was made of DeepSpeed's step of the same number
)
_NUMBERED_FORMATS = frozenset({UNIFIED, "orbax", "nanotron", "dcp"})


@dataclass(frozen=True, slots=True)
class StepNamePattern:
    """A pattern of names; its first group is the number of the step, and may be missing.

    `formats`: those that use it, empty for any. `unambiguous`: nothing but a checkpoint is called
    so; other names need the content as well.
    """

    pattern: re.Pattern[str]
    formats: frozenset[str] = frozenset()
    unambiguous: bool = True

    def number(self, name: str) -> int | None:
        match = self.pattern.fullmatch(name)
        return int(match[1]) if match is not None and match[1] is not None else None


STEP_NAME_PATTERNS = (
    StepNamePattern(
        re.compile(r"checkpoint[-_]([0-9]{1,18})")
    ),  # ours, Trainer, PaddleNLP; Accelerate
    StepNamePattern(re.compile(r"global_step([0-9]{1,18})(?:_universal)?")),  # DeepSpeed
    StepNamePattern(re.compile(r"iter_([0-9]{7,18})")),  # Megatron
    StepNamePattern(_LIGHTNING_NAME),  # Lightning
    StepNamePattern(
        re.compile(r"step[-_]([0-9]{1,18})"),
        frozenset({*_NUMBERED_FORMATS, WEIGHTS, "huggingface-shards"}),
        unambiguous=False,
    ),  # torchtitan
    StepNamePattern(
        re.compile(r"([0-9]{1,18})"), _NUMBERED_FORMATS, unambiguous=False
    ),  # MaxText and Orbax, nanotron, torch.distributed.checkpoint
)
_LAST_WRITTEN_FILE = {
    "trainer": TRAINER_STATE,
    "accelerate": "random_states_0.pkl",
}  # a step without it was cut off
# A pointer file names the step that its engine resumes from: file -> the entry's name, from what
# the file says.
_POINTER_FILES: Mapping[str, str] = {
    **dict.fromkeys(DEEPSPEED_LATEST, "{}"),
    MEGATRON_TRACKER: "iter_{:0>7}",
    NANOTRON_LATEST: "{}",
}


@dataclass(frozen=True, slots=True)
class StepEntry:
    """An entry with the name of a step. `name`: its path below the root. `number`: the step in its
    name, None where it has none.

    `format`: its name in `FORMATS`, "unified", or "huggingface" for weights alone; empty where the
    files are of no format that is read.
    `pointer`: the engine's own file that names this entry as the one to resume from.
    """

    name: str
    path: str
    number: int | None
    format: str
    pointer: str = ""

    @property
    def readable(self) -> bool:
        """Whether it is in a format that a run can resume from."""
        return self.format not in ("", WEIGHTS)


def list_steps(root: str, *, prefix: str = "checkpoint-") -> list[StepEntry]:
    """The entries with names of steps in a run's folder, the one to resume from last. Empty where
    there is no folder; StorageError where it cannot be listed.

    Looks into the folder, `checkpoints` or `checkpoint` in it, and Lightning's newest
    `lightning_logs/version_<n>/checkpoints`. `prefix` begins the names of the run's own steps.
    Folders that are empty, and those of unfinished saves, are not listed.
    """
    own_pattern = StepNamePattern(re.compile(f"{re.escape(prefix)}([0-9]{{1,18}})"))
    entries = [
        entry
        for folder in _step_folders(root)
        for entry in _list_folder(root, folder, (own_pattern, *STEP_NAME_PATTERNS))
    ]
    return newest_first(entries)[::-1]


def newest_first(steps: list[StepEntry]) -> list[StepEntry]:
    """In the order in which to try them: highest number first; what a pointer names comes before
    the others in its folder.
    """
    highest: dict[str, int] = {}
    for entry in steps:
        folder = os.path.dirname(entry.path)
        highest[folder] = max(highest.get(folder, -1), -1 if entry.number is None else entry.number)

    def sort_key(entry: StepEntry) -> tuple[int, bool, int, bool, bool, int, str]:
        number = -1 if entry.number is None else entry.number
        effective_number = highest[os.path.dirname(entry.path)] if entry.pointer else number
        # of one number: ours, not what was made of another, and Lightning's `…-v1.ckpt`, which is
        # later
        tie_breakers = (
            entry.format == UNIFIED,
            not entry.name.endswith(_CONVERTED_SUFFIX),
            len(entry.name),
            entry.name,
        )
        return effective_number, bool(entry.pointer), number, *tie_breakers

    return sorted(steps, key=sort_key, reverse=True)


def _step_folders(root: str) -> Iterator[str]:
    """Where steps may lie, as paths below the root."""
    yield ""
    for name in _SUBFOLDERS:
        if os.path.isdir(os.path.join(root, name)):
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
    try:
        return [name for name in os.listdir(path) if not name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError(f"{path}: cannot be listed: {error.strerror}") from error


def _list_folder(root: str, folder: str, patterns: tuple[StepNamePattern, ...]) -> list[StepEntry]:
    path = os.path.join(root, folder) if folder else root
    entries = _visible_entries(path)
    pointers, in_orbax_root = _read_pointers(path, entries), ORBAX_ROOT in entries
    steps: list[StepEntry] = []
    for name in (candidate for candidate in entries if not names.is_backup(candidate)):
        name_pattern = next(
            (candidate for candidate in patterns if candidate.pattern.fullmatch(name)), None
        )
        if name_pattern is None and name not in pointers:
            continue
        is_step_by_name = name_pattern is not None and (
            name_pattern.unambiguous or name in pointers or in_orbax_root
        )
        format_name = _detect_entry_format(
            os.path.join(path, name), name_pattern, is_step_by_name=is_step_by_name
        )
        if format_name is not None:
            number = None if name_pattern is None else name_pattern.number(name)
            steps.append(
                StepEntry(
                    os.path.join(folder, name),
                    os.path.join(path, name),
                    number,
                    format_name,
                    pointers.get(name, ""),
                )
            )
    for name in pointers.keys() - set(entries):
        name_pattern = next(
            (candidate for candidate in patterns if candidate.pattern.fullmatch(name)), None
        )
        if name_pattern is not None:
            entry = StepEntry(
                os.path.join(folder, name),
                os.path.join(path, name),
                name_pattern.number(name),
                "",
                pointers[name],
            )
            steps.append(entry)
    return steps


def _read_pointers(folder: str, entries: list[str]) -> dict[str, str]:
    """Names of entries that a pointer file in the folder names -> the pointer file."""
    pointers: dict[str, str] = {}
    for file in reversed([name for name in _POINTER_FILES if name in entries]):
        path = os.path.join(folder, file)
        if not os.path.isfile(path):
            continue
        with open_binary(path) as pointer_file:
            text = pointer_file.read(_POINTER_NBYTES).decode(errors="replace").strip()
        name = (
            text
            if file == MEGATRON_TRACKER and text == "release"
            else _POINTER_FILES[file].format(text)
        )
        if text and os.path.split(name)[1] == name and name not in (".", ".."):
            pointers[name] = file
    return pointers


def _detect_entry_format(
    path: str, name_pattern: StepNamePattern | None, *, is_step_by_name: bool
) -> str | None:
    """The format of an entry; empty where it is broken, or of no format that is read; None where it
    is no step.

    `is_step_by_name`: the name alone says that it is a step.
    """
    try:
        listing = list_path(path)
        detected = match_format(listing)
    except OSError:
        return "" if is_step_by_name else None  # who opens it says why
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
        format_name = ""  # a folder of steps, not a step
    if format_name and (not name_pattern.formats or format_name in name_pattern.formats):
        return format_name
    step_files = {DCP_METADATA, ORBAX_STEP, COMMITTED, NANOTRON_META, names.MANIFEST, names.DIGESTS}
    is_broken = entries & step_files or any(name.endswith(".distcp") for name in entries)
    return "" if is_step_by_name or is_broken else None


@dataclass(frozen=True, slots=True)
class StepContents:
    """`step`: what the checkpoint says of itself, else the number in its name. `parts`: those that
    it has. `problem`: why a run cannot resume from it, empty where it can.
    """

    step: int | None
    parts: frozenset[str] = frozenset()
    problem: str = ""


# it is frozen
def read_step(entry: StepEntry, options: SourceOptions = SourceOptions()) -> StepContents:  # noqa: B008
    """Opens a step as a load does, which reads no tensor."""
    if not entry.readable:
        return StepContents(entry.number, problem=_one_line(_unreadable_reason(entry), entry))
    last_file = _LAST_WRITTEN_FILE.get(entry.format)
    if last_file is not None and not os.path.isfile(os.path.join(entry.path, last_file)):
        return StepContents(
            entry.number, problem=f"it is half-written: {last_file}, which comes last, is missing"
        )
    try:
        with closing(open_source(entry.path, options)) as source:
            metadata, parts = source.metadata(), set(source.parts)
    except CheckpointError as error:
        return StepContents(entry.number, problem=_one_line(str(error), entry))
    if metadata.groups or metadata.scalars:
        parts.add("optimizer")  # SGD's has no tensors
    return StepContents(entry.number if metadata.step is None else metadata.step, frozenset(parts))


def _one_line(problem: str, entry: StepEntry) -> str:
    """On one line, without the path: who shows it names the step."""
    return " ".join(problem.split()).removeprefix(f"{entry.path}: ").removeprefix(f"{entry.path}/")


def _unreadable_reason(entry: StepEntry) -> str:
    if entry.pointer and not os.path.lexists(entry.path):
        return f"it is not there, and {entry.pointer} names it"
    if entry.format == WEIGHTS:
        return "it has weights alone: it is half-written, or was saved without training state; load_parameters_path reads it"
    return (
        open_error(entry.path)
        or "it is half-written, damaged, or of another format than its name says"
    )
