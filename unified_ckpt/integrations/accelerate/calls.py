"""Unified checkpoints for Accelerate: `save_state(accelerator, path)` and `load_state(accelerator,
path)`.

Everything that the accelerator has prepared or registered goes into one folder.
`attach(accelerator)` replaces `accelerator.save_state` and `accelerator.load_state`, for scripts
that cannot be changed.

How state could be lost: an older checkpoint is removed before the newer one is committed (removal
follows the commit); an incomplete one counts as the latest; a folder with other files is taken for
a checkpoint; an object of the accelerator is missing from the checkpoint and silently keeps its
fresh value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, overload

from unified_ckpt.runtime.packages import missing_package

try:
    import accelerate  # noqa: F401
except ImportError as error:
    raise missing_package(__package__, error, extra="accelerate") from error

from unified_ckpt.engine.load.report import LoadReport
from unified_ckpt.engine.save.background.pending import PendingSave
from unified_ckpt.engine.save.report import SaveReport
from unified_ckpt.engine.save.request import SaveArguments
from unified_ckpt.errors import LayoutError
from unified_ckpt.integrations.accelerate import folders
from unified_ckpt.integrations.accelerate import state as states
from unified_ckpt.integrations.accelerate.dataloaders import follow_loops
from unified_ckpt.integrations.accelerate.folder_io import load_folder, save_arguments
from unified_ckpt.integrations.accelerate.run import AcceleratorRun, attached_run
from unified_ckpt.integrations.run_options import with_bucket_root
from unified_ckpt.manager.manager import CheckpointManager
from unified_ckpt.options import (
    LoadOptions,
    ManagerOptions,
    RunOptions,
    SaveOptions,
    combine_options,
    with_default_if_exists,
)
from unified_ckpt.runtime.storage.paths import absolute_path
from unified_ckpt.session import Session

_Path = str | os.PathLike[str]
_SESSION_ATTR = "_unified_session"  # keeps plans and buffers between saves
_ATTACHED_ATTR = "_unified_attached"


def save_state(
    accelerator: Any,
    path: _Path | None = None,
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    attach: Callable[[str], object] | None = None,
    options: SaveOptions | None = None,
) -> SaveReport:
    """Save everything that the accelerator has prepared or registered. Every process calls it.

    Without a path the folder is the project's next, `checkpoints/checkpoint_<n>`, with step n, and
    `total_limit` applies after the commit. The other arguments are those of `uc.save`. Raises
    LayoutError for DeepSpeed, Megatron-LM and XLA.
    """
    path, arguments = _begin_save(
        accelerator, path, {"step": step, "metrics": metrics, "attach": attach, "options": options}
    )
    report = _session(accelerator).save(path, arguments)
    accelerator.project_configuration.iteration += 1
    folders.rotate_project(accelerator, os.fspath(path))
    return report


def save_state_async(
    accelerator: Any,
    path: _Path | None = None,
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    attach: Callable[[str], object] | None = None,
    options: SaveOptions | None = None,
) -> PendingSave:
    """Start `save_state` and return once this process's bytes are copied. The next save or load
    waits for it and raises its error.
    """
    target, arguments = _begin_save(
        accelerator, path, {"step": step, "metrics": metrics, "attach": attach, "options": options}
    )
    pending = _session(accelerator).begin_save(
        target,
        arguments,
        after_commit=lambda _: folders.rotate_project(accelerator, os.fspath(target)),
    )
    accelerator.project_configuration.iteration += 1
    return pending


def load_state(
    accelerator: Any,
    path: _Path | None = None,
    *,
    strict: bool = True,
    options: LoadOptions | None = None,
) -> LoadReport:
    """Restore everything, on any number of processes and any layout. Every process calls it, after
    `accelerator.prepare`.

    Without a path it loads the project's latest complete checkpoint, and logs the newer ones it
    skipped. Raises MismatchError, before anything is changed, if the accelerator has something that
    the checkpoint lacks; `strict=False` loads what fits. What only the checkpoint has is logged.

    A checkpoint of another engine, of another trainer or of `uc.save` needs models and optimizers
    only; one line of the log says what else it has. Raises NotFoundError if the path is no
    checkpoint.
    """
    options, session = options or LoadOptions(), _session(accelerator)
    session.wait()
    collective = session.comm.begin_collective(
        "load_state", timeout_seconds=options.timeout_seconds
    )
    with collective.step("folder"):
        states.check_supported(accelerator)
        folder = (
            folders.latest_path(collective, accelerator)
            if path is None
            else absolute_path(os.path.expanduser(os.fspath(path)))
        )
    return load_folder(accelerator, session, folder, strict=strict, options=options)


@overload
def attach(
    accelerator: Any,
    *,
    manager_options: None = None,
    save_options: SaveOptions | None = None,
    load_options: LoadOptions | None = None,
    root: _Path | None = None,
) -> None: ...


@overload
def attach(
    accelerator: Any,
    *,
    manager_options: ManagerOptions | RunOptions,
    save_options: SaveOptions | None = None,
    load_options: LoadOptions | None = None,
    root: _Path | None = None,
) -> CheckpointManager: ...


def attach(
    accelerator: Any,
    *,
    manager_options: ManagerOptions | RunOptions | None = None,
    save_options: SaveOptions | None = None,
    load_options: LoadOptions | None = None,
    root: _Path | None = None,
) -> CheckpointManager | None:
    """Replace `accelerator.save_state` and `accelerator.load_state`. Calling it again does nothing.

    As in Accelerate, a save replaces a checkpoint at its path (unless `save_options` says
    otherwise), and automatic naming overrides a path. Accelerate loads the folders that it wrote.
    Arguments for other formats are ignored.

    `manager_options`: adds a `CheckpointManager`, which is returned: retries, background saves, a
    local directory, more rules of retention, intervals, a stop of all processes after a signal, and
    a save after an exception in the manager's `with` block. The last three need calls of
    `after_step`. `accelerator.save_state` then takes `metrics`, and returns None if a save failed.
    `accelerator.end_training` closes the manager.

    `root`: the URL of a prefix in a bucket, such as "s3://bucket/run", for checkpoints with
    automatic names. The project's folder stays local. `RunOptions.root` is the same setting.

    ProjectConfiguration decides names and how many to keep. Raises CheckpointError for options that
    contradict it.
    """
    states.check_supported(accelerator)
    follow_loops(accelerator)
    attached = attached_run(accelerator)
    if vars(accelerator).get(_ATTACHED_ATTR):
        return attached.checkpoints if attached is not None else None
    run, url = with_bucket_root(
        combine_options(manager_options, save=save_options, load=load_options), root
    )
    if url is not None:
        folders.set_bucket_root(accelerator, url)
    if manager_options is not None:
        attached = AcceleratorRun(accelerator, run)
        setattr(accelerator, _SESSION_ATTR, attached.run.session)
    save_options = with_default_if_exists(save_options or SaveOptions(), if_exists="replace")
    # Functions of the module: an accelerator can be pickled and copied.
    accelerator.save_state = partial(_save_attached, accelerator, save_options)
    accelerator.load_state = partial(_load_attached, accelerator, load_options)
    setattr(accelerator, _ATTACHED_ATTR, True)
    return attached.checkpoints if attached is not None else None


def _save_attached(
    accelerator: Any,
    options: SaveOptions,
    output_dir: _Path | None = None,
    *_: Any,
    metrics: Mapping[str, float] | None = None,
    **__: Any,
) -> Path | None:
    """Replace `accelerator.save_state`."""
    attached = attached_run(accelerator)
    automatic = accelerator.project_configuration.automatic_checkpoint_naming
    path = None if automatic else output_dir
    if attached is not None:
        return attached.save(path, metrics)
    if automatic:
        options = options.model_copy(update={"if_exists": "error"})
    return Path(save_state(accelerator, path, metrics=metrics, options=options).path)


def _load_attached(
    accelerator: Any,
    options: LoadOptions | None,
    input_dir: _Path | None = None,
    load_kwargs: dict[str, Any] | None = None,
    strict: bool = True,
    **kwargs: Any,
) -> None:
    """Replace `accelerator.load_state`."""
    attached = attached_run(accelerator)
    if _is_native(accelerator, input_dir):
        kwargs |= {} if strict else {"strict": False}
        type(accelerator).load_state(accelerator, input_dir, load_kwargs, **kwargs)
        folders.advance_iteration(
            accelerator, None if input_dir is None else os.path.expanduser(input_dir)
        )
    elif attached is not None:
        attached.load(input_dir, strict=strict)
    else:
        load_state(accelerator, input_dir, strict=strict, options=options)


def _session(accelerator: Any) -> Session:
    session: Session = vars(accelerator).setdefault(_SESSION_ATTR, Session())
    return session


def _begin_save(
    accelerator: Any,
    path: _Path | None,
    caller: SaveArguments,
) -> tuple[_Path, SaveArguments]:
    """Return the target and the arguments of a save. Collective.

    `caller`: the arguments that the caller passes on.
    """
    options, session = caller["options"] or SaveOptions(), _session(accelerator)
    step, number = caller["step"], accelerator.project_configuration.iteration
    session.wait()
    collective = session.comm.begin_collective(
        "save_state", timeout_seconds=options.timeout_seconds
    )
    with collective.step("state"):
        states.check_supported(accelerator)
        if path is None and step is not None:
            raise LayoutError(
                "save_state: got step= without a path, but automatic naming "
                "uses its number as the step; pass a path, or no step"
            )
        target = folders.resolve_save_path(accelerator, path, if_exists=options.if_exists)
    state = save_arguments(collective, accelerator, target, caller["attach"])
    return target, {**caller, **state, "step": number if path is None else step}


def _is_native(accelerator: Any, path: _Path | None) -> bool:
    """Whether Accelerate's own load applies, as rank 0 sees it. Collective."""
    attached, comm = attached_run(accelerator), _session(accelerator).comm
    collective = comm.begin_collective("load_state", timeout_seconds=LoadOptions().timeout_seconds)
    with collective.step("kind"):
        if collective.rank != 0:
            is_native = False
        elif path is not None:
            is_native = folders.is_native(os.path.expanduser(os.fspath(path)))
        else:
            is_native = folders.has_only_native(
                accelerator, attached.run if attached is not None else None
            )
        return bool(collective.broadcast_json("native", is_native))
