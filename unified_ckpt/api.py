"""The public calls: a `Checkpointer` that keeps what repeated saves share, and its one-shot forms."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from unified_ckpt.core.layout import Layout
from unified_ckpt.engine.checkpoint import Folder, open_path
from unified_ckpt.engine.load import LoadReport, LoadRequest
from unified_ckpt.engine.load import load as _load
from unified_ckpt.engine.match import saved_state
from unified_ckpt.engine.prove import VerifyReport, verify_folder
from unified_ckpt.engine.save import Kept, SaveReport, SaveRequest
from unified_ckpt.engine.save import save as _save
from unified_ckpt.engine.view import SourceView
from unified_ckpt.errors import FormatError, LayoutError, StorageError
from unified_ckpt.options import LoadOptions, SaveOptions
from unified_ckpt.runtime import comm as comms
from unified_ckpt.runtime.modules import Model
from unified_ckpt.runtime.optimizers import Optimizers, as_list, prepare_optimizer
from unified_ckpt.runtime.placements import Placer, mesh_for_people
from unified_ckpt.runtime.state import MASTER, MODEL, OPTIMIZER, flatten_state, place_targets
from unified_ckpt.runtime.storage import LocalStorage, is_url
from unified_ckpt.runtime.windows import Windows

if TYPE_CHECKING:
    import torch.distributed as dist

Path = str | os.PathLike[str]


class Checkpointer:
    """Saves and loads for one set of ranks. Keeps the plan of the last layout and the shared buffers between calls.

    `root`: what relative paths are relative to. `group`: the ranks of every call, None for all; a single process needs no group.
    `options`: for saves, where a call gives none. A context manager; `close` gives the buffers back.
    """

    def __init__(self, root: Path | None = None, *, group: dist.ProcessGroup | None = None, options: SaveOptions | None = None) -> None:
        self._root, self._group, self._options = root, group, options or SaveOptions()
        self._comm: comms.Comm | None = None
        self._kept = Kept(Windows())

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Gives back the shared buffers and forgets the plan. The next call makes them anew."""
        self._kept.windows.close()
        if self._comm is not None:
            self._comm.leave()
        self._kept, self._comm = Kept(Windows()), None

    def save(
        self,
        path: Path,
        *,
        model: Model | None = None,
        optimizer: Optimizers | None = None,
        master_weights: Optimizers | None = None,
        parts: Mapping[str, Model] | None = None,
        extra: Any = None,
        rank_extra: Any = None,
        layout: Layout | None = None,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        attach: Callable[[str], object] | None = None,
        options: SaveOptions | None = None,
    ) -> SaveReport:
        """Writes a checkpoint folder. Every rank calls; each tensor of every part is whole in the folder.

        `model`: a module, a list of them, or {fqn: tensor}. `optimizer`: one with the model's parameters, a list, or
        {"fqn/state": tensor}. `master_weights`: a dict, or an optimizer that holds them. `parts`: further parts by name. `extra`:
        rank 0's is stored; `rank_extra`: every rank's. `metrics`: rank 0's, finite numbers by name, for people and retention.
        `attach(folder)` adds files on rank 0 before the commit.

        Raises LayoutError, MismatchError, FormatError, StorageError or RankError, the same on every rank; what was at `path` is
        then as it was.
        """
        options = options or self._options
        comm = self._ranks()
        storage, name, request = LocalStorage("/"), "", None  # type: LocalStorage, str, SaveRequest | Exception | None
        try:
            storage, name = self._place(path)
            if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
                raise FormatError(f"step is {step!r}; needed an int of 0 or more")
            measured = _metrics(metrics)
            placer = _placer(comm, layout)
            state = flatten_state(
                placer,
                model=model,
                optimizer=optimizer,
                master_weights=master_weights,
                further=parts,
                model_dtype=options.model_dtype,
            )
            request = SaveRequest(
                state, extra, rank_extra, layout, placer.matched, mesh_for_people(placer), step, measured, attach, options
            )
        except Exception as error:  # told to every rank in the save
            request = error
        return _save(comm, storage, name, request, self._kept, timeout_seconds=options.timeout_seconds)

    def load(
        self,
        path: Path,
        *,
        model: Model | None = None,
        optimizer: Optimizers | None = None,
        master_weights: Optimizers | None = None,
        parts: Mapping[str, Model] | None = None,
        layout: Layout | None = None,
        strict: bool = True,
        options: LoadOptions | None = None,
    ) -> LoadReport:
        """Fills state of any shape in place from a checkpoint, a unified folder or a Hugging Face model folder. Every rank calls.

        Optimizer state that does not exist yet is made from the checkpoint, never by a step; what the checkpoint lacks is cleared.

        Raises MismatchError listing every name, shape and dtype that differs, IncompleteError, IntegrityError or FormatError; before
        the first byte is written, but for an IntegrityError of a digest, which says that the target is unusable.
        """
        options = options or LoadOptions()
        comm = self._ranks()
        folder: Folder | None = None
        request: LoadRequest | Exception
        try:
            folder = open_path(self._resolve(path))
            request = _load_request(
                folder, _placer(comm, layout), model, optimizer, master_weights, parts, layout, strict=strict, options=options
            )
        except Exception as error:  # told to every rank in the load
            request = error
        try:
            return _load(comm, os.fspath(path), request, self._kept.windows, timeout_seconds=options.timeout_seconds)
        finally:
            if folder is not None:
                folder.close()

    def _ranks(self) -> comms.Comm:
        if self._comm is None:
            self._comm = comms.from_torch(self._group)
        return self._comm

    def _resolve(self, path: Path) -> str:
        path = os.fspath(path)
        if is_url(path):
            return path
        path = path.removeprefix("file://")
        return os.path.abspath(path if self._root is None else os.path.join(self._root, path))

    def _place(self, path: Path) -> tuple[LocalStorage, str]:
        """The folder beside which a checkpoint is built, and the checkpoint's name in it."""
        found = self._resolve(path)
        if is_url(found):
            raise StorageError(f"{found}: fsspec URLs are read, not written, by this version; needed a local folder")
        parent, name = os.path.split(found)
        if not name:
            raise StorageError(f"{found}: is no name for a checkpoint; needed a folder name")
        try:
            os.makedirs(parent, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{parent}: cannot be made: {error.strerror}; needed a folder that can be written to") from error
        return LocalStorage(os.path.realpath(parent)), name


def _metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    found = {str(name): float(value) for name, value in (metrics or {}).items()}
    wrong = [name for name, value in found.items() if not math.isfinite(value)]
    if wrong:
        raise FormatError(f"metrics[{wrong[0]!r}] is {found[wrong[0]]}; needed a finite number")
    return found


def _placer(comm: comms.Comm, layout: Layout | None) -> Placer:
    if layout is not None:
        layout.check_world(comm.world)
    return Placer(comm.rank, comm.ranks, layout)


def _load_request(
    folder: Folder,
    placer: Placer,
    model: Model | None,
    optimizer: Optimizers | None,
    master_weights: Optimizers | None,
    parts: Mapping[str, Model] | None,
    layout: Layout | None,
    *,
    strict: bool,
    options: LoadOptions,
) -> LoadRequest:
    """The targets of a load. Nothing of the caller's is changed."""
    objects = as_list(optimizer)
    state = flatten_state(
        placer,
        model=model,
        optimizer=None if objects else optimizer,
        master_weights=None if isinstance(master_weights, Optimizer) else master_weights,
        further=parts,
        model_dtype=None,
    )
    target = None
    if objects or isinstance(master_weights, Optimizer):
        if model is None:
            raise LayoutError("optimizer: parameters have no names without their model; needed `model` too")
        of = objects or as_list(master_weights)
        names = state.model.names()
        saved = saved_state(_held(of, names), folder, state.aliases) if objects else {}
        shapes = {part.row.fqn: part.row.spec.shape for part in state.parts if part.row.part == MODEL}
        target = prepare_optimizer(of, names, saved, shapes=shapes, wanted=bool(objects))
        if objects:
            state.asked.add(OPTIMIZER)
            state.parts += place_targets(placer, OPTIMIZER, target.tensors, state.model)
        if isinstance(master_weights, Optimizer):
            state.asked.add(MASTER)
            state.parts += place_targets(placer, MASTER, target.masters, state.model)
    return LoadRequest(folder, state, folder.said(), target, layout, placer.matched, strict, options)


def _held(optimizers: list[Optimizer], names: Mapping[int, str]) -> set[str]:
    return {names[id(p)] for o in optimizers for group in o.param_groups for p in group["params"] if id(p) in names}


def save(path: Path, *, group: dist.ProcessGroup | None = None, **what: Any) -> SaveReport:
    """One-shot form of `Checkpointer.save`, which takes the same arguments."""
    with Checkpointer(group=group) as checkpointer:
        return checkpointer.save(path, **what)


def load(path: Path, *, group: dist.ProcessGroup | None = None, **what: Any) -> LoadReport:
    """One-shot form of `Checkpointer.load`, which takes the same arguments."""
    with Checkpointer(group=group) as checkpointer:
        return checkpointer.load(path, **what)


def open(path: Path) -> SourceView:  # noqa: A001  # uc.open, never imported bare
    """A checkpoint, lazily: no process group, nothing read but what is asked for. Raises NotFoundError or FormatError."""
    return SourceView(open_path(os.fspath(path)))


def verify(path: Path, deep: bool = False, *, progress: Callable[[int], object] | None = None) -> VerifyReport:
    """Checks that every byte is there: files, sizes, headers; with `deep` every digest. Problems are in the report.

    Raises NotFoundError or FormatError where there is no checkpoint to check. `progress` is called with bytes checked.
    """
    folder = open_path(os.fspath(path))
    try:
        return verify_folder(folder, deep=deep, progress=progress)
    finally:
        folder.close()
