"""Steps of other frameworks are found by name, restored, listed, and never removed."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

import unified_ckpt as uc
from tests.foreign.conformance_cases import PYTORCH
from tests.support.foreign import paddleformers
from tests.support.foreign.megatron_models import drawn
from tests.support.foreign.megatrons import Job
from tests.support.foreign.megatrons import write as megatron_root
from tests.support.foreign.nanotrons import write as write_nanotron
from tests.support.foreign.orbaxes import job, train_state
from tests.support.foreign.orbaxes import write as write_orbax
from tests.support.foreign.paddles import copied
from tests.support.harness import run_ranks, try_ranks
from tests.support.manager.managers import (
    delete_file,
    delete_manifest,
    manager_of,
    save_steps,
    state,
    zero_file,
)
from tests.support.refusals import same_error
from unified_ckpt.cli.main import main
from unified_ckpt.foreign.step_names import list_steps
from unified_ckpt.runtime.comm.comm import Comm

pytestmark = pytest.mark.filterwarnings(
    r"ignore::UserWarning:(pytorch_)?lightning\b",
    "ignore:.*LeafSpec:FutureWarning",
    "ignore::DeprecationWarning:(pytorch_)?lightning",
)

# format -> the entry of a step, and the files in it that identify the format; an entry without
# files is a file itself
ENTRIES: dict[str, tuple[str, list[str]]] = {
    "trainer": ("checkpoint-{}", ["trainer_state.json", "optimizer.pt"]),
    "paddle": ("checkpoint-{}", ["model_state.pdparams"]),
    "paddle-flex": ("checkpoint-{}", ["model_state/0_0.distcp"]),
    "accelerate": ("checkpoints/checkpoint_{}", ["optimizer.bin"]),
    "lightning": ("lightning_logs/version_1/checkpoints/epoch=1-step={}.ckpt", []),
    "lightning-sharded": ("epoch=1-step={}.ckpt", [".metadata", "meta.pt"]),
    "deepspeed": ("global_step{}", ["mp_rank_00_model_states.pt"]),
    "megatron": ("iter_{:0>7}", ["metadata.json", ".metadata"]),
    "orbax": ("checkpoints/{}", ["_CHECKPOINT_METADATA"]),
    "nanotron": ("{}", ["checkpoint_metadata.json"]),
    "dcp": ("step-{}", [".metadata"]),
}


def touch_step(root: Path, kind: str, step: int) -> Path:
    """Create an entry that has the names of a step, and no content."""
    name, files = ENTRIES[kind]
    path = root / name.format(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not files:
        path.touch()
    for file in files:
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).touch()
    return path


@pytest.mark.parametrize("kind", ENTRIES)
def test_list_steps_of_each_framework(tmp_path: Path, kind: str) -> None:
    paths = {step: touch_step(tmp_path, kind, step) for step in (8, 10, 9)}
    entries = list_steps(str(tmp_path))
    assert [(entry.number, entry.path, entry.format) for entry in entries] == [
        (step, str(paths[step]), kind) for step in (8, 9, 10)
    ]
    assert [str(tmp_path / entry.name) for entry in entries] == [entry.path for entry in entries]


@pytest.mark.parametrize(
    ("kind", "pointer", "text"),
    [
        ("deepspeed", "latest", "global_step8"),
        ("megatron", "latest_checkpointed_iteration.txt", "8\n"),
        ("nanotron", "latest.txt", "8"),
    ],
)
def test_list_steps_ends_with_the_pointed_step(
    tmp_path: Path, kind: str, pointer: str, text: str
) -> None:
    for step in (7, 8, 9):
        touch_step(tmp_path, kind, step)
    (tmp_path / pointer).write_text(text)
    assert [(entry.number, entry.pointer) for entry in list_steps(str(tmp_path))] == [
        (7, ""),
        (9, ""),
        (8, pointer),
    ]
    shutil.rmtree(touch_step(tmp_path, kind, 8))
    assert [(entry.number, entry.format) for entry in list_steps(str(tmp_path))] == [
        (7, kind),
        (9, kind),
        (8, ""),
    ]


def test_list_steps_includes_a_tag_named_by_latest(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "mp_rank_00_model_states.pt").touch()
    assert list_steps(str(tmp_path)) == []
    (tmp_path / "latest").write_text("best")
    assert [(entry.name, entry.number, entry.format) for entry in list_steps(str(tmp_path))] == [
        ("best", None, "deepspeed")
    ]


def test_list_steps_includes_unified_and_broken_steps(tmp_path: Path) -> None:
    save_steps(tmp_path, 7)
    (tmp_path / "checkpoint-7").rename(tmp_path / "step-7")
    (tmp_path / "checkpoint-8").mkdir()
    (tmp_path / "checkpoint-8" / "rng_state.pth").touch()
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "__0_0.distcp").touch()
    assert [(entry.name, entry.format) for entry in list_steps(str(tmp_path))] == [
        ("step-7", "unified"),
        ("checkpoint-8", ""),
        ("9", ""),
    ]


# ---- checkpoints that the frameworks write


def of_megatron(top: Path) -> Path:
    job = Job(tp=2)
    return megatron_root(top / "job", job, drawn("Llama", job, top)[1]) / "iter_0000007"


def of_orbax(top: Path) -> Path:
    weights = {"kernel": np.ones((8, 12), np.float32)}
    write_orbax(
        [job(top / "run", train_state(weights, weights, weights), ocdbt=False)], top / "jobs"
    )
    return top / "run" / "7"


def of_nanotron(top: Path) -> Path:
    write_nanotron(top)
    return top / "20"


def case(name: str) -> Callable[[Path], Path]:
    """Write the checkpoint of a conformance case."""
    return lambda top: PYTORCH[name](top).path


@dataclass(frozen=True)
class Engine:
    """How a framework names its steps.

    `write` returns the path of a complete step. `name` is the pattern of a step in a run. `pointer`
    is the file that names the latest step, with its text. `without` lists parts whose state is
    stored by position.
    """

    write: Callable[[Path], Path]
    name: str
    pointer: tuple[str, str] | None = None
    without: tuple[str, ...] = ()


ENGINES = {
    "trainer": Engine(case("trainer"), "checkpoint-{}"),
    "accelerate": Engine(case("accelerate"), "checkpoints/checkpoint_{}", without=("optimizer",)),
    "lightning": Engine(
        case("lightning"), "lightning_logs/version_0/checkpoints/epoch=1-step={}.ckpt"
    ),
    "dcp": Engine(case("dcp"), "{}"),
    "megatron": Engine(of_megatron, "iter_{:0>7}", ("latest_checkpointed_iteration.txt", "{}")),
    "orbax": Engine(of_orbax, "checkpoints/{}"),
    "nanotron": Engine(of_nanotron, "{}", ("latest.txt", "{}")),
    "paddle": Engine(lambda top: copied("single_bf16", top / "checkpoint-2"), "checkpoint-{}"),
    "paddle-flex": Engine(
        lambda top: paddleformers.copied("sharding2_flex", top / "checkpoint-2"), "checkpoint-{}"
    ),
}


@pytest.fixture(scope="module")
def whole_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda kind: ENGINES[kind].write(tmp_path_factory.mktemp(kind)))


def add_step(root: Path, kind: str, whole: Path, step: int) -> Path:
    path = root / ENGINES[kind].name.format(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(whole, path) if whole.is_dir() else shutil.copyfile(whole, path)
    if (pointer := ENGINES[kind].pointer) is not None:
        (root / pointer[0]).write_text(pointer[1].format(step))
    return path


def truncate(path: Path) -> None:
    """Halve the largest file, as an interrupted save or copy would."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    largest = max(
        (file for file in files if not file.name.startswith("random")),
        key=lambda file: file.stat().st_size,
    )
    os.truncate(largest, largest.stat().st_size // 2)


def targets_of(path: Path, *, without: tuple[str, ...] = ()) -> dict[str, dict[str, torch.Tensor]]:
    with uc.open(path) as source:
        parts = [part for part in source.parts if part not in without]
        return {
            part: {name: torch.zeros_like(view[...]) for name, view in source[part].items()}
            for part in parts
        }


@pytest.mark.parametrize("kind", ENGINES)
def test_restore_uses_the_latest_usable_foreign_step(
    tmp_path: Path, whole_of: Callable[[str], Path], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Both steps are healthy; then the latest is broken; then both are."""
    whole = whole_of(kind)
    targets = targets_of(whole, without=ENGINES[kind].without)
    older, newer = add_step(tmp_path, kind, whole, 8), add_step(tmp_path, kind, whole, 9)
    with manager_of(None, tmp_path) as manager:
        assert manager.restore(**targets) is not None
        assert f"{newer} is of another format ({kind})" in caplog.text
        assert any(tensor.any() for tensor in targets["model"].values())
        truncate(newer)
        caplog.clear()
        assert manager.restore(**targets) is not None
        assert f"{older} is of another format ({kind})" in caplog.text
        assert f"{newer} is skipped: " in caplog.text
        truncate(older)
        names = "|".join(re.escape(str(path.relative_to(tmp_path))) for path in (older, newer))
        with pytest.raises(
            uc.IncompleteError,
            match=rf"none of its steps can be loaded \(2\):\n  ({names}): .*\n  ({names}): ",
        ):
            manager.restore(**targets)
        caplog.clear()
        assert manager.restore(allow_fresh=True, **targets) is None
        assert [str(path.relative_to(tmp_path)) in caplog.text for path in (older, newer)] == [
            True,
            True,
        ]


@pytest.mark.parametrize("kind", ENGINES)
def test_list_shows_foreign_steps_and_prune_keeps_them(
    tmp_path: Path, whole_of: Callable[[str], Path], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = (add_step(tmp_path, kind, whole_of(kind), step) for step in (8, 9))
    truncate(older)
    save_steps(tmp_path, 3, 4)
    capsys.readouterr()  # what the framework printed
    assert main(["list", str(tmp_path), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    listed = {entry["path"]: entry for entry in run["steps"]}
    assert (
        listed[str(newer)]["format"],
        listed[str(newer)]["status"],
        listed[str(newer)]["problem"],
    ) == (kind, "complete", "")
    assert listed[str(older)]["status"] == "incomplete"
    assert listed[str(older)]["problem"]
    sizes = [
        entry.stat().st_size
        for entry in ([newer] if newer.is_file() else newer.rglob("*"))
        if entry.is_file()
    ]
    assert (listed[str(newer)]["nbytes"], listed[str(newer)]["files"]) == (sum(sizes), len(sizes))
    assert (
        main(
            [
                "prune",
                str(tmp_path),
                "--keep-latest",
                "1",
                "--incomplete",
                "--stale",
                "--older-than-hours",
                "0",
            ]
        )
        == 0
    )
    assert not (tmp_path / "checkpoint-3").exists()
    assert (tmp_path / "checkpoint-4").exists()
    assert older.exists()
    assert newer.exists()


# ---- which step is loaded, and when a run starts fresh


@pytest.mark.parametrize("kind", ["nanotron", "megatron"])
def test_restore_prefers_the_pointed_step(
    tmp_path: Path, whole_of: Callable[[str], Path], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The pointer wins over a later step, as in the framework itself."""
    named, newer = (
        add_step(tmp_path, kind, whole_of(kind), 8),
        add_step(tmp_path, kind, whole_of(kind), 9),
    )
    pointer, text = ENGINES[kind].pointer or ("", "")
    (tmp_path / pointer).write_text(text.format(8))
    targets = targets_of(named)
    with manager_of(None, tmp_path) as manager:
        assert manager.restore(**targets) is not None
        assert (
            f"{newer} is skipped: {pointer} names {named.name}, which is loaded; "
            "restore(9) loads this one" in caplog.text
        )
        shutil.rmtree(named)
        caplog.clear()
        assert manager.restore(**targets) is not None
    assert f"{named} is skipped: {pointer} names it, but it does not exist" in caplog.text
    assert f"{newer} is of another format" in caplog.text


def test_restore_opens_unified_steps_under_other_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`step_prefix` or the root has changed since the saves."""
    save_steps(tmp_path / "checkpoints", 7)
    save_steps(tmp_path, 8)
    (tmp_path / "checkpoint-8").rename(tmp_path / "step-8")
    with manager_of(None, tmp_path, step_prefix="ours-") as manager:
        assert manager.restore(**state(0)).step == 8  # type: ignore[union-attr]
        shutil.rmtree(tmp_path / "step-8")
        assert manager.restore(**state(0)).step == 7  # type: ignore[union-attr]
    assert f"{tmp_path}/checkpoints/checkpoint-7 is of another format (unified)" in caplog.text


def test_restore_reads_the_step_from_the_file(
    tmp_path: Path, whole_of: Callable[[str], Path]
) -> None:
    """Lightning's last.ckpt is of step 4; the older step has a number in its name."""
    whole = whole_of("lightning")
    for name in ("last.ckpt", "epoch=0-step=2.ckpt"):
        shutil.copyfile(whole, tmp_path / name)
    targets = targets_of(whole)
    with manager_of(None, tmp_path) as manager:
        assert manager.restore(**targets).step == 4  # type: ignore[union-attr]
        truncate(tmp_path / "last.ckpt")
        assert manager.restore(**targets) is not None


def test_restore_ignores_folders_that_are_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Logs, configuration, a trainer's final model in the root and beside it, interrupted saves,
    and the local tier of another run.
    """
    root, local = tmp_path / "run", tmp_path / "local"
    for name in (
        "logs",
        "2024",
        "lightning_logs/version_0",
        "checkpoint-5",
        ".unified-0123-checkpoint-7",
        "runs/8",
        "step-3",
        "8.orbax-checkpoint-tmp-1",
        "version_0",
        "checkpoint-10",
        "final_model",
    ):
        (root / name).mkdir(parents=True)
    for name in (
        "config.json",
        "model.safetensors",
        "pytorch_model.bin",
        "final_model/model.safetensors",
        "2024/events.out",
        ".unified-0123-checkpoint-7/model.safetensors",
        "latest.log",
        "latest",
        "step-3/sample.png",
        "checkpoint-10/checkpoint-is-incomplete.txt",
    ):
        (root / name).touch()
    assert list_steps(str(root)) == list_steps(str(root / "none")) == []
    save_steps(local, 9, 10)
    zero_file(local / "checkpoint-10" / "unified_checkpoint.json")
    with manager_of(None, root, local_directory=str(local), local_interval_steps=1) as manager:
        assert manager.restore(**state(0)) is None
    assert "none can be used" not in caplog.text


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (delete_manifest, "it has no unified_checkpoint.json"),
        (delete_file, "optimizer.safetensors is missing"),
        (lambda folder: zero_file(folder / "unified_checkpoint.json"), "unified_checkpoint.json"),
        (
            lambda folder: folder.rename(folder.with_name("checkpoint-9")),
            "its manifest has step 8",
        ),
    ],
)
def test_restore_raises_if_unified_steps_are_unusable(
    tmp_path: Path, damage: Callable[[Path], object], why: str
) -> None:
    save_steps(tmp_path / "run", 8)
    save_steps(tmp_path / "other", 5)
    damage(tmp_path / "run" / "checkpoint-8")

    def act(comm: Comm) -> object:
        with manager_of(comm, tmp_path / "run") as manager:
            return manager.restore(**state(0))

    error = same_error(
        try_ranks(2, act), uc.IncompleteError, r"none of its steps can be loaded \(1\)"
    )
    assert why in str(error)
    with manager_of(None, tmp_path / "run") as manager:
        assert manager.restore(allow_fresh=True, **state(0)) is None
    with manager_of(
        None, tmp_path / "run", load_full_state_path=str(tmp_path / "other" / "checkpoint-5")
    ) as manager:
        assert manager.restore(**state(0)).step == 5  # type: ignore[union-attr]


def test_restore_raises_on_all_ranks_if_one_node_lacks_a_step(
    tmp_path: Path, whole_of: Callable[[str], Path]
) -> None:
    """Each node has a root of its own, and only the second one holds the step."""
    path = add_step(tmp_path / "node-1", "dcp", whole_of("dcp"), 8)

    def act(comm: Comm, **more: bool) -> object:
        with manager_of(comm, tmp_path / f"node-{comm.rank}", node=f"node {comm.rank}") as manager:
            return manager.restore(**targets_of(path), **more)

    same_error(try_ranks(2, act), uc.IncompleteError, r"8: rank 0's node does not have it")
    assert run_ranks(2, partial(act, allow_fresh=True)) == [None, None]
    add_step(tmp_path / "node-0", "dcp", whole_of("dcp"), 8)
    assert None not in run_ranks(2, act)


# ---- complete checkpoints under other names


@pytest.mark.parametrize(
    "name",
    ["latest", "last", "best", "epoch_5", "ckpt-5", "model", "checkpoints/final", "last-before-1"],
)
def test_restore_raises_beside_a_checkpoint_of_any_name(tmp_path: Path, name: str) -> None:
    """`step_prefix` has changed, or the user's own loop named it."""
    uc.save(tmp_path / name, step=5, **state(5))

    def act(comm: Comm, **more: bool) -> object:
        with manager_of(comm, tmp_path) as manager:
            return manager.restore(**state(0), **more)

    problem = f"{name}: its manifest has step 5; rename it to checkpoint-5"
    same_error(try_ranks(2, act), uc.IncompleteError, problem)
    assert run_ranks(2, partial(act, allow_fresh=True)) == [None, None]
    with manager_of(None, tmp_path) as manager:
        manager.save(7, force=True, **state(7))
        assert manager.restore(**state(0)).step == 7  # type: ignore[union-attr]
    shutil.rmtree(tmp_path / "checkpoint-7")
    (tmp_path / name).rename(tmp_path / "checkpoint-5")
    with manager_of(None, tmp_path) as manager:
        assert manager.restore(**state(0)).step == 5  # type: ignore[union-attr]


def test_restore_raises_beside_a_damaged_checkpoint_of_any_name(tmp_path: Path) -> None:
    uc.save(tmp_path / "latest", step=5, **state(5))
    uc.save(tmp_path / "weights", **state(5, full=False))
    delete_file(tmp_path / "latest")
    with (
        manager_of(None, tmp_path) as manager,
        pytest.raises(
            uc.IncompleteError,
            match=r"\(2\):\n  latest: optimizer.* is missing\n  weights: its manifest has no step",
        ),
    ):
        manager.restore(**state(0))


def test_links_to_known_steps_are_no_further_steps(tmp_path: Path) -> None:
    save_steps(tmp_path, 5)
    save_steps(tmp_path / "other", 9)
    for link, target in (("latest", "checkpoint-5"), ("best", "none")):
        (tmp_path / link).symlink_to(target)
    with manager_of(None, tmp_path) as manager:
        assert manager.restore(**state(0)).step == 5  # type: ignore[union-attr]
        delete_file(tmp_path / "checkpoint-5")
        with pytest.raises(uc.IncompleteError, match=r"\(1\):\n  checkpoint-5: "):
            manager.restore(**state(0))
        (tmp_path / "last").symlink_to("other/checkpoint-9")
        with pytest.raises(uc.IncompleteError, match=r"\n  last: its manifest has step 9"):
            manager.restore(**state(0))


def test_paths_of_the_options_are_no_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uc.save(tmp_path / "base", step=5, **state(5))
    options = {"load_parameters_path": str(tmp_path / "base")}
    with manager_of(None, tmp_path, **options) as manager:
        assert manager.restore(**state(0)) is not None
    assert "none of its steps" not in caplog.text
    uc.save(tmp_path / "latest", step=6, **state(6))
    with manager_of(None, tmp_path, **options) as manager:
        assert manager.restore(**state(0)) is not None
    assert "latest: its manifest has step 6; rename it to checkpoint-6" in caplog.text


def test_restore_raises_if_another_node_has_a_checkpoint_of_any_name(tmp_path: Path) -> None:
    uc.save(tmp_path / "node-1" / "latest", step=5, **state(5))
    (tmp_path / "node-0").mkdir()

    def act(comm: Comm, **more: bool) -> object:
        with manager_of(comm, tmp_path / f"node-{comm.rank}", node=f"node {comm.rank}") as manager:
            return manager.restore(**state(0), **more)

    same_error(try_ranks(2, act), uc.IncompleteError, "latest: its manifest has step 5; rename it")
    assert run_ranks(2, partial(act, allow_fresh=True)) == [None, None]


@pytest.mark.parametrize("allow_fresh", [False, True])
def test_root_that_is_a_checkpoint_raises(tmp_path: Path, allow_fresh: bool) -> None:
    """The path of a step was passed in place of the run's: nothing is written into it."""
    save_steps(tmp_path, 5)
    root = tmp_path / "checkpoint-5"
    before = sorted(root.iterdir())

    def restore(comm: Comm) -> object:
        with manager_of(comm, root) as manager:
            return manager.restore(**state(0), allow_fresh=allow_fresh)

    def save(comm: Comm) -> object:
        with manager_of(comm, root) as manager:
            return manager.save(6, force=True, **state(6))

    for act in (restore, save):
        same_error(try_ranks(2, act), uc.OptionError, f"checkpoint-5: got a chec.*pass {tmp_path}$")
    assert sorted(root.iterdir()) == before


@pytest.mark.parametrize("kind", [kind for kind in ENGINES if kind != "lightning"])
def test_root_that_is_a_checkpoint_of_another_engine_raises(
    tmp_path: Path, whole_of: Callable[[str], Path], kind: str
) -> None:
    root = Path(shutil.copytree(whole_of(kind), tmp_path / "run"))
    targets = targets_of(root, without=ENGINES[kind].without)
    with manager_of(None, root) as manager:
        with pytest.raises(uc.IncompleteError, match=r"\(1\):\n  \.: the folder itself is a chec"):
            manager.restore(**targets)
        assert manager.restore(allow_fresh=True, **targets) is None
    with manager_of(None, root, load_full_state_path=str(root)) as manager:
        assert manager.restore(**targets) is not None
