"""Which entries of a run's folder are steps, by the names that each engine gives them. Starts without torch; only `read_step` needs it.

A new naming is a line in `NAMINGS`. Formats whose checkpoints have no step in their names are read by path only.
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
from unified_ckpt.runtime.storage.regular_files import open_file
from unified_ckpt.sources import open_any, problem_of
from unified_ckpt.sources.detect.names import (
    DCP_METADATA,
    DEEPSPEED_LATEST,
    MEGATRON_TRACKER,
    NANOTRON_LATEST,
    NANOTRON_META,
    ORBAX_STEP,
    ORBAX_TREE,
    TRAINER_STATE,
    format_at,
    has_safetensors,
    look,
    orbax_items,
)
from unified_ckpt.sources.orbax.folders import COMMITTED

UNIFIED, WEIGHTS = "unified", "huggingface"
ORBAX_ROOT = "_ROOT_METADATA"
_SUBFOLDERS = ("checkpoints", "checkpoint")  # of Accelerate, MaxText and Lightning; of torchtitan
_LIGHTNING = re.compile(
    r"(?:(?:.*[^a-zA-Z])?step=([0-9]{1,18})(?![0-9]).*|.*epoch=[0-9].*|last(?:-v[0-9]+)?|hpc_ckpt_[0-9]+)\.ckpt"
)
_LIGHTNING_LOGS = "lightning_logs"
_VERSION = re.compile(r"version_([0-9]{1,9})")
_POINTER_NBYTES = 4096
_CONVERTED = "_universal"  # ends the name of what was made of DeepSpeed's step of the same number
_NUMBERED = frozenset({UNIFIED, "orbax", "nanotron", "dcp"})


@dataclass(frozen=True, slots=True)
class Naming:
    """A pattern of names; its first group is the number of the step, and may be missing.

    `formats`: those that use it, empty for any. `distinct`: nothing but a checkpoint is called so; other names need the content as well.
    """

    pattern: re.Pattern[str]
    formats: frozenset[str] = frozenset()
    distinct: bool = True

    def number(self, name: str) -> int | None:
        match = self.pattern.fullmatch(name)
        return int(match[1]) if match is not None and match[1] is not None else None


NAMINGS = (
    Naming(re.compile(r"checkpoint[-_]([0-9]{1,18})")),  # ours, Trainer, PaddleNLP; Accelerate
    Naming(re.compile(r"global_step([0-9]{1,18})(?:_universal)?")),  # DeepSpeed
    Naming(re.compile(r"iter_([0-9]{7,18})")),  # Megatron
    Naming(_LIGHTNING),  # Lightning
    Naming(
        re.compile(r"step[-_]([0-9]{1,18})"),
        frozenset({*_NUMBERED, WEIGHTS, "huggingface-shards"}),
        distinct=False,
    ),  # torchtitan
    Naming(
        re.compile(r"([0-9]{1,18})"), _NUMBERED, distinct=False
    ),  # MaxText and Orbax, nanotron, torch.distributed.checkpoint
)
_WRITTEN_LAST = {
    "trainer": TRAINER_STATE,
    "accelerate": "random_states_0.pkl",
}  # a step without it was cut off
# A pointer file names the step that its engine resumes from: file -> the entry's name, from what the file says.
_POINTERS: Mapping[str, str] = {
    **dict.fromkeys(DEEPSPEED_LATEST, "{}"),
    MEGATRON_TRACKER: "iter_{:0>7}",
    NANOTRON_LATEST: "{}",
}


@dataclass(frozen=True, slots=True)
class StepEntry:
    """An entry with the name of a step. `name`: its path below the root. `number`: the step in its name, None where it has none.

    `format`: its name in `FORMATS`, "unified", or "huggingface" for weights alone; empty where the files are of no format that is read.
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
    """The entries with names of steps in a run's folder, the one to resume from last. Empty where there is no folder; StorageError where it
    cannot be listed.

    Looks into the folder, `checkpoints` or `checkpoint` in it, and Lightning's newest `lightning_logs/version_<n>/checkpoints`. `prefix`
    begins the names of the run's own steps. Folders that are empty, and those of unfinished saves, are not listed.
    """
    own = Naming(re.compile(f"{re.escape(prefix)}([0-9]{{1,18}})"))
    found = [one for folder in _folders(root) for one in _steps_in(root, folder, (own, *NAMINGS))]
    return newest_first(found)[::-1]


def newest_first(steps: list[StepEntry]) -> list[StepEntry]:
    """In the order in which to try them: highest number first; what a pointer names comes before the others in its folder."""
    highest: dict[str, int] = {}
    for one in steps:
        folder = os.path.dirname(one.path)
        highest[folder] = max(highest.get(folder, -1), -1 if one.number is None else one.number)

    def order(one: StepEntry) -> tuple[int, bool, int, bool, bool, int, str]:
        number = -1 if one.number is None else one.number
        rank = highest[os.path.dirname(one.path)] if one.pointer else number
        # of one number: ours, not what was made of another, and Lightning's `…-v1.ckpt`, which is later
        same = (one.format == UNIFIED, not one.name.endswith(_CONVERTED), len(one.name), one.name)
        return rank, bool(one.pointer), number, *same

    return sorted(steps, key=order, reverse=True)


def _folders(root: str) -> Iterator[str]:
    """Where steps may lie, as paths below the root."""
    yield ""
    for name in _SUBFOLDERS:
        if os.path.isdir(os.path.join(root, name)):
            yield name
    logs = os.path.join(root, _LIGHTNING_LOGS)
    versions = [int(found[1]) for name in _entries(logs) if (found := _VERSION.fullmatch(name))]
    for version in sorted(versions, reverse=True):
        folder = os.path.join(_LIGHTNING_LOGS, f"version_{version}", _SUBFOLDERS[0])
        if _entries(os.path.join(root, folder)):
            yield folder
            return


def _entries(path: str) -> list[str]:
    try:
        return [name for name in os.listdir(path) if not name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError(f"{path}: cannot be listed: {error.strerror}") from error


def _steps_in(root: str, folder: str, namings: tuple[Naming, ...]) -> list[StepEntry]:
    here = os.path.join(root, folder) if folder else root
    entries = _entries(here)
    pointed, of_orbax = _pointed(here, entries), ORBAX_ROOT in entries
    found: list[StepEntry] = []
    for name in (one for one in entries if not names.is_before(one)):
        naming = next((one for one in namings if one.pattern.fullmatch(name)), None)
        if naming is None and name not in pointed:
            continue
        certain = naming is not None and (naming.distinct or name in pointed or of_orbax)
        kind = _format_in(os.path.join(here, name), naming, certain=certain)
        if kind is not None:
            number = None if naming is None else naming.number(name)
            found.append(
                StepEntry(
                    os.path.join(folder, name),
                    os.path.join(here, name),
                    number,
                    kind,
                    pointed.get(name, ""),
                )
            )
    for name in pointed.keys() - set(entries):
        naming = next((one for one in namings if one.pattern.fullmatch(name)), None)
        if naming is not None:
            entry = StepEntry(
                os.path.join(folder, name),
                os.path.join(here, name),
                naming.number(name),
                "",
                pointed[name],
            )
            found.append(entry)
    return found


def _pointed(folder: str, entries: list[str]) -> dict[str, str]:
    """Names of entries that a pointer file in the folder names -> the pointer file."""
    found: dict[str, str] = {}
    for file in reversed([name for name in _POINTERS if name in entries]):
        path = os.path.join(folder, file)
        if not os.path.isfile(path):
            continue
        with open_file(path) as opened:
            text = opened.read(_POINTER_NBYTES).decode(errors="replace").strip()
        name = (
            text if file == MEGATRON_TRACKER and text == "release" else _POINTERS[file].format(text)
        )
        if text and os.path.split(name)[1] == name and name not in (".", ".."):
            found[name] = file
    return found


def _format_in(path: str, naming: Naming | None, *, certain: bool) -> str | None:
    """The format of an entry; empty where it is broken, or of no format that is read; None where it is no step.

    `certain`: the name alone says that it is a step.
    """
    try:
        at = look(path)
        kind = format_at(at)
    except OSError:
        return "" if certain else None  # who opens it says why
    entries = at.entries - {JIT_MARKER}
    if not at.is_file and not entries:
        return None
    found = (
        kind.name
        if kind is not None
        else UNIFIED
        if names.MANIFEST in entries
        else WEIGHTS
        if has_safetensors(at)
        else ""
    )
    if naming is None:
        return found or None
    if found == "orbax" and not (entries & {ORBAX_TREE, ORBAX_STEP} or orbax_items(path, entries)):
        found = ""  # a folder of steps, not a step
    if found and (not naming.formats or found in naming.formats):
        return found
    traces = {DCP_METADATA, ORBAX_STEP, COMMITTED, NANOTRON_META, names.MANIFEST, names.DIGESTS}
    broken = entries & traces or any(name.endswith(".distcp") for name in entries)
    return "" if certain or broken else None


@dataclass(frozen=True, slots=True)
class StepContents:
    """`step`: what the checkpoint says of itself, else the number in its name. `parts`: those that it has. `problem`: why a run cannot
    resume from it, empty where it can."""

    step: int | None
    parts: frozenset[str] = frozenset()
    problem: str = ""


def read_step(entry: StepEntry, options: SourceOptions = SourceOptions()) -> StepContents:  # noqa: B008  # it is frozen
    """Opens a step as a load does, which reads no tensor."""
    if not entry.readable:
        return StepContents(entry.number, problem=_sentence(_why_unread(entry), entry))
    last = _WRITTEN_LAST.get(entry.format)
    if last is not None and not os.path.isfile(os.path.join(entry.path, last)):
        return StepContents(
            entry.number, problem=f"it is half-written: {last}, which comes last, is missing"
        )
    try:
        with closing(open_any(entry.path, options)) as source:
            said, parts = source.said(), set(source.parts)
    except CheckpointError as error:
        return StepContents(entry.number, problem=_sentence(str(error), entry))
    if said.groups or said.scalars:
        parts.add("optimizer")  # SGD's has no tensors
    return StepContents(entry.number if said.step is None else said.step, frozenset(parts))


def _sentence(problem: str, entry: StepEntry) -> str:
    """On one line, without the path: who shows it names the step."""
    return " ".join(problem.split()).removeprefix(f"{entry.path}: ").removeprefix(f"{entry.path}/")


def _why_unread(entry: StepEntry) -> str:
    if entry.pointer and not os.path.lexists(entry.path):
        return f"it is not there, and {entry.pointer} names it"
    if entry.format == WEIGHTS:
        return "it has weights alone: it is half-written, or was saved without training state; load_parameters_path reads it"
    return (
        problem_of(entry.path)
        or "it is half-written, damaged, or of another format than its name says"
    )
