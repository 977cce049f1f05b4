"""Saves that must be refused: one error of the tree, the same text on every rank, no hang, and a
disk as it was.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.manifests import edit_manifest
from tests.support.refusals import HARD, same_error
from unified_ckpt import api
from unified_ckpt.manager.option_aliases import from_paddle
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import Buffer, LocalStorage
from unified_ckpt.testing import FullStorage, make_checkpointer, run_ranks, try_ranks

SOON = 1.5  # a time-out that a test waits out
BIG = torch.zeros(8, 40_000)
BY_ROW = uc.Layout({"tp": 2}, {"w": {"tp": 0}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A committed checkpoint."""
    uc.save(tmp_path / "checkpoint-3", model={"w": BIG}, step=3)
    return tmp_path / "checkpoint-3"


# ranks that disagree at a save


def saves_fail(
    tmp_path: Path,
    kind: type[uc.CheckpointError],
    match: str,
    *what: dict[str, object],
    path: Callable[[int], Path] | None = None,
) -> uc.CheckpointError:
    """A save by as many ranks as there are arguments: same error everywhere, and nothing left."""
    before = sorted(tmp_path.rglob("*"))

    def act(comm: Comm) -> None:
        mine = {"options": uc.SaveOptions(timeout_seconds=HARD), **what[comm.rank]}
        make_checkpointer(comm).save(path(comm.rank) if path else tmp_path / "c", **mine)

    error = same_error(list(try_ranks(len(what), act, timeout_seconds=HARD)), kind, match)
    assert sorted(tmp_path.rglob("*")) == before
    return error


def test_gap_between_ranks(tmp_path: Path) -> None:
    one, none = (
        {"model": {"w": BIG, "v": BIG}, "layout": BY_ROW},
        {"model": {"v": BIG}, "layout": BY_ROW},
    )
    text = (
        r"tensors with missing shards \(1\):\n  model:w: no rank holds the shard at \(1,\) "
        r"of \(tp of 2\); ranks 0 declare the tensor"
    )
    saves_fail(tmp_path, uc.LayoutError, text, one, none)


def test_unequal_overlap(tmp_path: Path) -> None:
    half, whole = (
        {"model": {"w": BIG[:4]}, "layout": BY_ROW},
        {"model": {"w": BIG}, "layout": uc.Layout({"tp": 2}, {"v*": {"tp": 0}})},
    )
    whole["model"] = {"w": BIG, "v": torch.zeros(2)}
    half["model"] = {"w": BIG[:4], "v": torch.zeros(2)}
    half["layout"] = uc.Layout({"tp": 2}, {"w": {"tp": 0}, "v*": {"tp": 0}})
    text = (
        r"(?s)ranks disagree on shardings \(1\):.*model:w: got dim 0 over 2 .* on rank 0 and "
        r"a whole copy on each rank on rank 1"
    )
    saves_fail(tmp_path, uc.LayoutError, text, half, whole)


def test_one_name_with_two_shapes(tmp_path: Path) -> None:
    text = (
        r"(?s)ranks disagree on shapes or dtypes \(1\):.*model:w: got F32 \(8, 40000\) on "
        r"rank 0 and F32 \(7, 40000\) on rank 1"
    )
    saves_fail(tmp_path, uc.MismatchError, text, {"model": {"w": BIG}}, {"model": {"w": BIG[:7]}})


def test_one_name_with_two_dtypes(tmp_path: Path) -> None:
    text = r"model:w: got F32 \(8, 40000\) on rank 0 and BF16 \(8, 40000\) on rank 1"
    saves_fail(
        tmp_path, uc.MismatchError, text, {"model": {"w": BIG}}, {"model": {"w": BIG.bfloat16()}}
    )


def test_experts_with_one_name(tmp_path: Path) -> None:
    """Renaming them is the caller's; taking one for the other would lose it."""
    text = (
        r"replicas hold different bytes \(1\):\n  model:expert\.w: rank\(s\) 0 differ from "
        r"rank\(s\) 1"
    )
    saves_fail(
        tmp_path,
        uc.LayoutError,
        text,
        {"model": {"expert.w": BIG}},
        {"model": {"expert.w": BIG + 1}},
    )


@pytest.mark.parametrize("size", [1, 4])
def test_mesh_of_wrong_size(tmp_path: Path, size: int) -> None:
    mine = {"model": {"w": BIG}, "layout": uc.Layout({"dp": size}, {})}
    saves_fail(
        tmp_path,
        uc.LayoutError,
        rf"Layout mesh dp {size}: got {size} positions, expected 2,",
        mine,
        mine,
    )
    uc.save(tmp_path / "c", model={"w": torch.zeros(8)})
    target = {"w": torch.ones(8)}
    with pytest.raises(uc.LayoutError, match=r"Layout mesh dp 3: got 3 positions, expected 1,"):
        uc.load(tmp_path / "c", model=target, layout=uc.Layout({"dp": 3}, {}))


def test_layout_rule_without_match(tmp_path: Path) -> None:
    mine = {"model": {"w": BIG}, "layout": uc.Layout({"tp": 2}, {"w.weight": {"tp": 0}})}
    saves_fail(
        tmp_path,
        uc.LayoutError,
        r"Layout: rule\(s\) 'w\.weight' match no tensor on any rank",
        mine,
        mine,
    )


def test_shards_that_are_not_chunks(tmp_path: Path) -> None:
    mine = {"layout": uc.Layout({"tp": 2}, {"w": {"tp": 0}}, {"w": (8, 40_000)})}
    text = (
        r"rank 1: w: got a local tensor of shape \(2, 40000\), expected \(4, 40000\) from "
        r"its placements"
    )
    saves_fail(
        tmp_path,
        uc.LayoutError,
        text,
        {"model": {"w": BIG[:4]}, **mine},
        {"model": {"w": BIG[:2]}, **mine},
    )


def test_part_name_with_shard_suffix(tmp_path: Path) -> None:
    """Over several folders its tensors would be taken for pieces."""
    ema = {"parts": {"ema_shards": {"q@0:2/4": torch.ones(2)}}}
    saves_fail(
        tmp_path,
        uc.FormatError,
        "parts: got 'ema_shards', expected a name that does not end in '_shards'",
        ema,
        ema,
    )


MOMENTS = {"w/exp_avg": torch.zeros(8, 40_000)}
ADAPTERS = {"parts": {"lora": {"w": BIG}}, "optimizer": {"lora.w/exp_avg": BIG}}
SKIP_MODEL = from_paddle("skip_save_model_weight").save.parts


@pytest.mark.parametrize(
    ("parts", "state", "match"),
    [
        (
            ("modle", "optimizer"),
            {"model": {"w": BIG}, "optimizer": MOMENTS},
            r"got 'modle', expected .* master_weights, model, optimizer",
        ),
        (
            ("modle",),
            {"parts": {"ema": {"w": BIG}}},
            "got 'modle', expected parts of this state: ema",
        ),
        (
            ("model", "optimizer"),
            {"model": {"w": BIG}},
            "got 'optimizer', expected parts of this state: master_weights, model",
        ),
        (
            ("model_without_masters",),
            {"model": {"w": BIG}},
            "got 'model_without_masters', expected",
        ),
        (None, {}, "nothing to save"),
        (
            SKIP_MODEL,
            {"parts": {"lora": {"w": BIG}}, "optimizer": {"lora.w/exp_avg": BIG}},
            "leaves out lora, which the stored",
        ),
        (
            ("optimizer",),
            {"parts": {"lora": {"w": BIG}}, "optimizer": {"lora.w/exp_avg": BIG}},
            "leaves out lora, which the stored",
        ),
        ((), {"parts": {"ema": {"w": BIG}}}, "nothing to save"),
        (
            SKIP_MODEL,
            {"model": {"w": BIG}, "optimizer": MOMENTS},
            "leaves out the model, and this state has no master weights",
        ),
        (
            SKIP_MODEL,
            {"model": {"w": BIG.bfloat16()}, "optimizer": MOMENTS},
            "leaves out the model, and this state has no master weights",
        ),
        (
            ("optimizer",),
            {"model": {"w": BIG}, "master_weights": {"w": BIG}, "optimizer": MOMENTS},
            "leaves out master_weights too",
        ),
        (
            ("ema",),
            {"model": {"w": BIG}, "parts": {"ema": {"w": BIG}}, "extra": 1},
            "leaves out the model",
        ),
    ],
)
def test_parts_that_cannot_be_resumed(
    tmp_path: Path, parts: tuple[str, ...] | None, state: dict[str, object], match: str
) -> None:
    mine = {**state, "options": uc.SaveOptions(parts=parts, timeout_seconds=HARD)}
    saves_fail(tmp_path, uc.FormatError, match, mine, mine)
    uc.save(tmp_path / "extra", extra={"step": 1})


def test_extra_only_on_another_rank_is_nothing_to_save(tmp_path: Path) -> None:
    saves_fail(tmp_path, uc.FormatError, "nothing to save", {}, {"extra": 1})


def test_different_name_on_one_rank(tmp_path: Path) -> None:
    mine = {"model": {"w": BIG}}
    saves_fail(
        tmp_path,
        uc.RankError,
        r"rank 1: got name 'c1', expected 'c0' as on rank 0",
        mine,
        mine,
        path=lambda rank: tmp_path / f"c{rank}",
    )


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (
            {"options": uc.SaveOptions(max_file_bytes=9)},
            r"save to .*: rank\(s\) 0, 2: max_file_bytes 5000000000, rank\(s\) 1: max_file_bytes 9",
        ),
        (
            {"options": uc.SaveOptions(check_replicas="always")},
            r'check_replicas "first", rank\(s\) 1: check_replicas "always"; expected',
        ),
        (
            {"options": uc.SaveOptions(parts=("model",))},
            r'parts null, rank\(s\) 1: parts \["model"\]; expected the same on every rank',
        ),
        (
            {"step": 4},
            r"save to .*/c: rank\(s\) 0, 2: step 3, rank\(s\) 1: step 4; expected the same on "
            r"every rank",
        ),
        (
            {"step": None},
            r"rank\(s\) 0, 2: step 3, rank\(s\) 1: step null; expected the same on every rank",
        ),
    ],
)
@pytest.mark.parametrize("before", [False, True])
def test_different_arguments_on_one_rank(
    tmp_path: Path, other: dict[str, object], match: str, before: bool
) -> None:
    """Nothing is written, whether or not the plan is kept; and the same ranks save again."""

    def act(comm: Comm) -> str:
        what: dict[str, object] = {
            "model": {f"w{comm.rank}": BIG, "v": BIG},
            "options": uc.SaveOptions(),
        }
        with make_checkpointer(comm) as checkpointer:
            if before:
                checkpointer.save(tmp_path / "before", **what, step=2)  # type: ignore[arg-type]
            with pytest.raises(uc.RankError, match=match) as caught:
                checkpointer.save(
                    tmp_path / "c", **(what | {"step": 3} | (other if comm.rank == 1 else {}))
                )  # type: ignore[arg-type]
            assert not (tmp_path / "c").exists()
            checkpointer.save(tmp_path / "after", **what, step=3)  # type: ignore[arg-type]
        return str(caught.value)

    assert len(set(run_ranks(3, act, timeout_seconds=HARD))) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "before"][: 1 + before]


def _save(checkpointer: uc.Checkpointer, folder: Path) -> None:
    checkpointer.save(folder.parent / "c", model={"w": BIG}, step=3)


def _save_async(checkpointer: uc.Checkpointer, folder: Path) -> None:
    checkpointer.save_async(folder.parent / "c", model={"w": BIG}, step=3)


def _load(checkpointer: uc.Checkpointer, folder: Path) -> None:
    checkpointer.load(folder, model={"w": BIG.clone()})


def _repair(checkpointer: uc.Checkpointer, folder: Path) -> None:
    checkpointer.repair(folder)


def _idle(checkpointer: uc.Checkpointer, folder: Path) -> None:
    checkpointer.idle()


@pytest.mark.parametrize("other", [_save_async, _load, _repair, _idle])
@pytest.mark.parametrize("before", [False, True])
def test_different_call_on_one_rank(
    folder: Path, other: Callable[[uc.Checkpointer, Path], None], before: bool
) -> None:
    def act(comm: Comm) -> str:
        with make_checkpointer(comm) as checkpointer:
            if before:
                checkpointer.save(folder.parent / "before", model={"w": BIG}, step=2)
            with pytest.raises(
                uc.RankError, match=r"rank\(s\) 0: .*, rank\(s\) 1: .*; expected the same"
            ) as caught:
                (other if comm.rank else _save)(checkpointer, folder)
        return str(caught.value)

    assert len(set(run_ranks(2, act, timeout_seconds=HARD))) == 1
    assert not (folder.parent / "c").exists()


def test_root_that_is_not_shared(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"node-{rank}").mkdir()
    mine = {"model": {"w": BIG}}
    text = (
        r"rank 1: .*: this rank does not see this folder, which rank 0 created; use one "
        r"folder that all ranks see"
    )
    saves_fail(
        tmp_path,
        uc.StorageError,
        text,
        mine,
        mine,
        path=lambda rank: tmp_path / f"node-{rank}" / "c",
    )


# ranks that do not come


def test_save_on_a_subset_of_ranks(tmp_path: Path) -> None:
    def act(comm: Comm) -> None:
        if comm.rank in (0, 2):
            make_checkpointer(comm).save(
                tmp_path / "c", model={"w": BIG}, options=uc.SaveOptions(timeout_seconds=SOON)
            )

    found = list(try_ranks(4, act, timeout_seconds=HARD))
    text = (
        r"save to .*/c: rank\(s\) 1, 3 did not arrive within 1\.5 s; expected the same call "
        r"on all 4 ranks"
    )
    same_error([found[0], found[2]], uc.RankError, text)
    assert list(tmp_path.iterdir()) == []


def test_rank_with_a_local_error(tmp_path: Path) -> None:
    mine, meta = {"model": {"w": BIG}}, {"model": {"w": BIG.to("meta")}}
    saves_fail(
        tmp_path,
        uc.LayoutError,
        r"rank 1: w: is on the meta device; call `to_empty",
        mine,
        meta,
    )


def test_failed_rank_does_not_delay_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time-out is much longer than the test may take."""
    full = threading.local()
    monkeypatch.setattr(
        api,
        "LocalStorage",
        lambda root, **_: (
            FullStorage(root, 1) if getattr(full, "yes", False) else LocalStorage(root)
        ),
    )
    for rank in range(3):

        def act(comm: Comm, rank: int = rank) -> None:
            full.yes = comm.rank == rank
            options = uc.SaveOptions(timeout_seconds=10 * HARD, max_file_bytes=1)
            model = {f"w{n}": BIG for n in range(4)}
            make_checkpointer(comm).save(
                tmp_path / "c", model=model, rank_extra={"rng": comm.rank}, options=options
            )

        same_error(
            list(try_ranks(3, act, timeout_seconds=HARD / 2)),
            uc.StorageError,
            rf"rank {rank}: .*No space left on device",
        )
    assert list(tmp_path.iterdir()) == []


def test_hanging_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its write does not come back, as on a file system that is gone."""
    here, back = threading.local(), threading.Event()

    class Hanging(LocalStorage):
        def write_at(self, name: str, start: int, buffers: Sequence[Buffer]) -> None:
            back.wait(HARD)
            super().write_at(name, start, buffers)

    def storage(root: str, **_: object) -> LocalStorage:
        return Hanging(root) if getattr(here, "hangs", False) else LocalStorage(root)

    monkeypatch.setattr(api, "LocalStorage", storage)

    def act(comm: Comm) -> None:
        here.hangs = comm.rank == 1
        try:
            options = uc.SaveOptions(timeout_seconds=2, max_file_bytes=1)
            make_checkpointer(comm).save(
                tmp_path / "c", model={f"w{n}": BIG for n in range(3)}, options=options
            )
        finally:
            back.set()

    same_error(
        try_ranks(3, act, timeout_seconds=HARD),
        uc.RankError,
        r"rank\(?s?\)? ?1 did not (reach|finish|arrive)",
    )
    assert not (tmp_path / "c").exists()


# what the caller gives


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"a": {"b": [1, object()]}}, r"extra\.a\.b\[1\]: got an object"),
        ({"f": lambda: None}, r"extra\.f: got a function"),
        ({"s": torch.optim.lr_scheduler.LambdaLR}, r"extra\.s: got a type"),
        ({"g": torch.utils.data.RandomSampler([1])}, r"extra\.g: got a torch"),
        (
            {"g": random.SystemRandom()},
            r"extra\.g: GeneratorState\.state_dict\(\) raised NotImplementedError",
        ),
    ],
)
def test_extra_that_cannot_be_stored(tmp_path: Path, extra: object, match: str) -> None:
    with pytest.raises(uc.FormatError, match=match):
        uc.save(tmp_path / "c", model={"w": BIG}, extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_extra_that_cannot_be_stored_on_one_rank(tmp_path: Path) -> None:
    mine = {"model": {"w": BIG}}
    saves_fail(
        tmp_path,
        uc.FormatError,
        r"rank 1: rank_extra\.x: got an object",
        mine,
        {**mine, "rank_extra": {"x": object()}},
    )
    saves_fail(
        tmp_path,
        uc.FormatError,
        r"rank 0: extra\.x: got an object",
        {**mine, "extra": {"x": object()}},
        mine,
    )


@pytest.mark.parametrize("step", [-1, True, 1.0, "7"])
def test_invalid_step(tmp_path: Path, step: object) -> None:
    with pytest.raises(uc.FormatError, match=rf"step: got {step!r}, expected an int of 0 or more"):
        uc.save(tmp_path / "c", model={"w": BIG}, step=step)


@pytest.mark.parametrize(
    ("what", "kind", "match"),
    [
        (
            {"model": {"w": [1.0]}},
            uc.LayoutError,
            r"model\['w'\]: got a list, expected a torch\.Tensor",
        ),
        (
            {"model": {"__metadata__": BIG}},
            uc.FormatError,
            r"tensor name: got the reserved name '__metadata__'",
        ),
        (
            {"model": {"w": BIG}, "parts": {"model": {"w": BIG}}},
            uc.LayoutError,
            r"which has its own argument",
        ),
        (
            {"model": {"w": BIG}, "parts": {"../ema": {"w": BIG}}},
            uc.FormatError,
            r"part name: got '\.\./ema'",
        ),
        (
            {"model": {"w": BIG}, "parts": {"extra": {"w": BIG}}},
            uc.FormatError,
            r"part name: got 'extra', which is reserved",
        ),
        (
            {"model": {"w": BIG}, "optimizer": {"w": BIG}},
            uc.LayoutError,
            r"optimizer: got the key 'w', expected names such as 'fqn/state'",
        ),
        (
            {"model": {"w": torch.eye(3).to_sparse()}},
            uc.LayoutError,
            r"w: got a torch\.sparse_coo tensor, expected a dense one",
        ),
        (
            {"model": {"w": torch.zeros(2, dtype=torch.complex128)}},
            uc.MismatchError,
            r"model:w: got dtype torch\.complex128, which safetensors cannot store",
        ),
        (
            {"model": {"w": BIG}, "master_weights": torch.optim.SGD([torch.nn.Parameter(BIG)])},
            uc.LayoutError,
            r"optimizer group 0: has a parameter",
        ),
        ({"parts": {"ema": None}}, uc.LayoutError, r"parts: got \{'ema': NoneType\}, expected"),
        ({"parts": {3: {"w": BIG}}}, uc.LayoutError, r"parts: got \{3: dict\}, expected"),
        ({"parts": [{"w": BIG}]}, uc.LayoutError, r"parts: got a list, expected"),
        ({"model": 5}, uc.LayoutError, "model: got a int, expected an nn.Module"),
        (
            {"model": {"w": BIG}, "optimizer": 5},
            uc.LayoutError,
            "optimizer: got a int, expected optimizers",
        ),
    ],
)
def test_state_that_cannot_be_saved(
    tmp_path: Path, what: dict[str, object], kind: type[uc.CheckpointError], match: str
) -> None:
    with pytest.raises(kind, match=match):
        uc.save(tmp_path / "c", **what)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("argument", ["model", "optimizer", "master_weights", "parts"])
@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        (3, BIG, r": got the key 3, expected names of tensors"),
        (("w",), BIG, r": got the key \('w',\), expected names of tensors"),
        ("w/m", {"v": BIG}, r"\['w/m'\]: got a dict, expected a torch.Tensor"),
        ("w/m", 3.0, r"\['w/m'\]: got a float, expected a torch.Tensor"),
        (
            "w/m",
            torch.nested.nested_tensor([BIG, BIG[:1]], layout=torch.jagged),
            r"\['w/m'\]: got a nested tensor, expected a dense one",
        ),
    ],
)
def test_state_dict_with_non_tensors(
    folder: Path, argument: str, name: object, value: object, match: str
) -> None:
    """Of any argument, at a save and at a load: an error that names it, and nothing is written."""
    what: dict[str, object] = {"model": {"w": BIG}, argument: {name: value}}
    if argument == "parts":
        what["parts"] = {"ema": {name: value}}
    text = (r"parts\['ema'\]" if argument == "parts" else argument) + match
    saves_fail(folder.parent, uc.LayoutError, text, what, what)
    with pytest.raises(uc.LayoutError, match=text):
        uc.load(folder, **what)


# places that cannot be written to


@pytest.mark.parametrize("if_exists", ["error", "replace"])
def test_file_or_link_in_the_way(folder: Path, if_exists: str) -> None:
    options = uc.SaveOptions(if_exists=if_exists)
    (folder.parent / "file").write_bytes(b"mine")
    (folder.parent / "link").symlink_to(folder)
    (folder.parent / "broken").symlink_to(folder.parent / "nowhere")
    for name, kind in (("file", "file"), ("link", "link"), ("broken", "link")):
        with pytest.raises(
            uc.StorageError, match=rf"{name}: got a {kind}, expected a folder or a free name"
        ):
            uc.save(folder.parent / name, model={"w": BIG}, options=options)
    assert (folder.parent / "file").read_bytes() == b"mine"
    assert (folder.parent / "link").is_symlink()
    assert uc.verify(folder, deep=True).ok
    assert not list(folder.parent.glob(".unified-*"))


def test_committed_checkpoint_in_the_way(folder: Path) -> None:
    before = (folder / "unified_checkpoint.json").read_bytes()
    mine = {"model": {"w": BIG}}
    text = (
        r"checkpoint-3: holds a committed checkpoint \(save \w+, step 3\), expected a free "
        r'name; pass if_exists="replace" or if_exists="keep"'
    )
    saves_fail(folder.parent, uc.StorageError, text, mine, mine, path=lambda _: folder)
    assert (folder / "unified_checkpoint.json").read_bytes() == before


@pytest.mark.parametrize("if_exists", ["error", "keep", "replace"])
def test_newer_format_version_in_the_way(folder: Path, if_exists: str) -> None:
    manifest = folder / "unified_checkpoint.json"
    edit_manifest(folder, lambda told: told.update(format_version="2.0"))
    before = manifest.read_bytes()
    mine = {"model": {"w": BIG}, "options": uc.SaveOptions(if_exists=if_exists)}
    saves_fail(
        folder.parent,
        uc.FormatError,
        r"unified_checkpoint\.json: got format version 2\.\d",
        mine,
        mine,
        path=lambda _: folder,
    )
    assert manifest.read_bytes() == before


@pytest.mark.parametrize("path", ["s3://bucket/c", "memory://c", "gs://bucket/c"])
def test_url_is_refused(path: str) -> None:
    with pytest.raises(uc.StorageError, match=rf"{path}: got a URL, expected a local folder"):
        uc.save(path, model={"w": BIG})


def test_parent_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(uc.StorageError, match=r"file.*: (Not a directory|File exists)"):
        uc.save(tmp_path / "file" / "c", model={"w": BIG})
    mine = {"model": {"w": BIG}}
    saves_fail(
        tmp_path,
        uc.StorageError,
        r"rank [01]: .*file",
        mine,
        mine,
        path=lambda _: tmp_path / "file" / "sub" / "c",
    )


@contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    """A file system of its own in memory. Skips where we may not mount."""
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def test_read_only_file_system(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "ro") as disk:
        mine = {"model": {"w": BIG}}
        saves_fail(
            disk,
            uc.StorageError,
            r"rank 0: .*make folder failed: Read-only file system",
            mine,
            mine,
            path=lambda _: disk / "c",
        )
        saves_fail(
            disk, uc.StorageError, r"Read-only file system", mine, path=lambda _: disk / "sub" / "c"
        )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    mine = {"model": {"w": BIG}}
    saves_fail(
        tmp_path, uc.StorageError, r"rank 0: .*make folder failed: Permission denied", mine, mine
    )


def test_disk_without_space_is_refused_early(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m") as disk:
        mine = {"model": {"w": BIG}}
        text = r"rank 0: .*: got \d+ bytes of free space, expected \d+"
        saves_fail(disk, uc.StorageError, text, mine, mine, path=lambda _: disk / "c")
        assert shutil.disk_usage(disk).used < 100_000


def test_disk_fills_up(tmp_path: Path) -> None:
    """Something else takes the room after it was found to be free."""

    def fill(folder: str) -> None:
        with open(f"{disk}/other", "wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass

    with mounted(tmp_path / "disk", "size=19m") as disk:
        model = {"w": BIG}
        with pytest.raises(uc.StorageError, match=r"No space left on device"):
            uc.save(disk / "c", model=model, attach=fill)
        assert [path.name for path in disk.iterdir()] == ["other"]
        (disk / "other").unlink()
        uc.save(disk / "c", model=model)
        assert uc.verify(disk / "c", deep=True).ok


def test_file_size_limit(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
    try:
        mine = {"model": {"w": BIG}}
        saves_fail(
            tmp_path,
            uc.StorageError,
            r"rank [01]: .*model\.safetensors: .* failed: File too large",
            mine,
            mine,
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    uc.save(tmp_path / "c", model={"w": BIG})
