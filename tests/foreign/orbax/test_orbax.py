"""Orbax pytrees of any model are read bitwise from every kind of folder; damage is rejected."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore
import torch

import unified_ckpt as uc
from tests.support.foreign.orbaxes import job, train_state, write
from unified_ckpt.foreign.formats import detect_format
from unified_ckpt.foreign.orbax.arrays import chunk_boxes, open_arrays
from unified_ckpt.foreign.orbax.tree import classify_leaves
from unified_ckpt.options import SourceOptions

RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "layer_0": {
        "kernel": RANDOM.standard_normal((8, 12), np.float32),
        "bias": np.zeros(12, np.float32),
    },
    "wide": RANDOM.standard_normal((64, 64), np.float32),
}
MOMENTS = {"kernel": RANDOM.standard_normal((8, 12), np.float32), "bias": np.zeros(12, np.float32)}
DRIVERS = {
    "ocdbt-zarr3": (True, True),
    "files-zarr3": (False, True),
    "files-zarr2": (False, False),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("orbax")
    jobs = [
        job(
            root / name,
            {"params": WEIGHTS, "step": np.int32(3)},
            ocdbt=ocdbt,
            zarr3=zarr3,
            meta={"epoch": 2},
            steps=[3],
        )
        for name, (ocdbt, zarr3) in DRIVERS.items()
    ]
    jobs += [
        job(
            root / "linen",
            train_state({"layer_0": MOMENTS}, {"layer_0": MOMENTS}, {"layer_0": MOMENTS}),
        ),
        job(root / "plain", {"a": {"b": MOMENTS["kernel"]}, "step": np.int32(5)}, api="bare"),
        job(root / "apart" / "params", {"layer_0": MOMENTS}, api="bare"),
        job(
            root / "apart" / "opt_state",
            [{"adam": (np.int32(3), {"layer_0": MOMENTS}, {"layer_0": MOMENTS})}],
            api="bare",
        ),
        job(root / "steps", {"params": MOMENTS}, steps=[5, 9, 10]),
        job(
            root / "cut",
            {"params": {"wide": RANDOM.standard_normal((512, 512), np.float32)}},
            steps=[1],
            file_nbytes=100_000,
        ),
    ]
    write(jobs, root / "jobs")
    return root


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(written / "ocdbt-zarr3", tmp_path / "c")
    return tmp_path / "c" / "3"


def equal(tensor: torch.Tensor, array: Any) -> bool:
    array = np.asarray(array)
    tensor_bytes = (
        tensor.contiguous().view(torch.uint8)
        if tensor.ndim
        else tensor.reshape(1).view(torch.uint8)
    )
    return tensor.shape == array.shape and tensor_bytes.numpy().tobytes() == array.tobytes()


LAYER = {f"layer_0.{name}": array for name, array in MOMENTS.items()}


def adam(step: int) -> dict[str, Any]:
    """The optimizer's state by our names; both moments are `MOMENTS`."""
    moments = {f"{name}/{key}": a for name, a in LAYER.items() for key in ("exp_avg", "exp_avg_sq")}
    return moments | {f"{name}/step": np.float32(step) for name in LAYER}


@pytest.mark.parametrize(
    ("name", "step", "parts"),
    [
        ("linen", 7, {"model": LAYER, "optimizer": adam(7)}),  # which nests params in params
        ("plain", 5, {"model": {"a.b": MOMENTS["kernel"]}}),  # without params, it is the model
        ("apart", None, {"model": LAYER, "optimizer": adam(3)}),  # in several items
    ],
)
def test_trees_become_parts(
    written: Path, name: str, step: int | None, parts: dict[str, dict[str, Any]]
) -> None:
    with uc.open(written / name) as source:
        assert (source.parts, source.step) == (tuple(parts), step)
        for part, arrays in parts.items():
            assert set(source[part]) == set(arrays)
            assert all(equal(source[part][key][...], array) for key, array in arrays.items())


def test_everything_in_a_step_is_read_or_named(folder: Path, tmp_path: Path) -> None:
    """Metrics of Orbax's manager, metadata of a tree; an item of another kind is left out."""
    (folder / "metrics").mkdir()
    (folder / "metrics" / "metrics").write_text('{"loss": 0.5}')
    path = folder / "items" / "_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"custom_metadata": {"by": "me"}}))
    (folder / "keys").mkdir()
    (folder / "keys" / "array.npy").write_bytes(b"x")
    assert uc.convert(folder, tmp_path / "new", fsync=False).left_out == ("keys",)
    with uc.open(tmp_path / "new") as source:
        assert source.extra["metrics"] == {"loss": 0.5}
        assert source.extra["custom_metadata"] == {"items": {"by": "me"}}


def test_names_of_other_models_are_kept(written: Path) -> None:
    with pytest.raises(uc.FormatError, match=r"has no MaxText names(.|\n)*names='own' or 'auto'"):
        uc.open(written / "linen", options=SourceOptions(names="huggingface"))


def test_step_of_two_processes(tmp_path: Path) -> None:
    """Each process has a file of its own, which the tree points into."""
    write(
        [job(tmp_path / "c", {"params": {"wide": WEIGHTS["wide"]}, "step": np.int32(7)})],
        tmp_path / "jobs",
        processes=2,
    )
    files = list((tmp_path / "c" / "7" / "items").glob("ocdbt.process_*/d/*"))
    assert {path.parts[-3] for path in files} == {"ocdbt.process_0", "ocdbt.process_1"}
    with uc.open(tmp_path / "c") as source:
        assert source.step == 7
        assert equal(source["model"]["wide"][...], WEIGHTS["wide"])
    shutil.rmtree(tmp_path / "c" / "7" / "items" / "ocdbt.process_1")
    with pytest.raises(
        uc.IncompleteError, match=r"ocdbt.process_1/d/\w+ is missing, with params.wide/c/"
    ):
        uc.open(tmp_path / "c")


# ---- choosing the folder


def test_item_step_and_root_open_the_same_checkpoint(written: Path) -> None:
    for path in (
        written / "steps",
        written / "steps" / "10",
        written / "steps" / "10" / "items",
        f"{written}/steps/10/items/",
    ):
        with uc.open(path) as source:
            assert source.step == 10
            assert equal(source["model"]["kernel"][...], MOMENTS["kernel"])


def steps(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written / "steps", tmp_path / "steps")
    return tmp_path / "steps"


def test_root_skips_an_incomplete_latest_step(written: Path, tmp_path: Path) -> None:
    root = steps(written, tmp_path)
    (root / "10").rename(root / "10.orbax-checkpoint-tmp-1")
    shutil.copytree(root / "9", root / "11")
    (root / "11" / "commit_success.txt").unlink()
    shutil.copytree(root / "9", root / "12")
    metadata = json.loads((root / "12" / "_CHECKPOINT_METADATA").read_text())
    (root / "12" / "_CHECKPOINT_METADATA").write_text(
        json.dumps({**metadata, "commit_timestamp_nsecs": None})
    )
    shutil.copytree(root / "9", root / "13")
    shutil.rmtree(root / "13" / "items")
    with uc.open(root) as source:
        assert source.step == 9


def test_root_without_a_complete_step_lists_problems(written: Path, tmp_path: Path) -> None:
    root = steps(written, tmp_path)
    shutil.rmtree(root / "5")
    (root / "10").rename(root / "10.orbax-checkpoint-tmp")
    (root / "9" / "commit_success.txt").unlink()
    with pytest.raises(
        uc.IncompleteError,
        match=r"no complete Orbax step(.|\n)*10.orbax-checkpoint-tmp(.|\n)*9: is not committed",
    ):
        uc.open(root)


def test_uncommitted_step_is_rejected(folder: Path) -> None:
    """Also its items. Older versions write no commit_success.txt at all."""
    marks = list(folder.rglob("commit_success.txt"))
    (folder / "commit_success.txt").unlink()
    for path in (folder, folder / "items"):
        with pytest.raises(
            uc.IncompleteError, match=r"is not committed: commit_success.txt is in items"
        ):
            uc.open(path)
    for mark in marks:
        mark.unlink(missing_ok=True)
    with uc.open(folder) as source:
        assert source.step == 3
    unfinished = folder.with_name("3.orbax-checkpoint-tmp-123")
    folder.rename(unfinished)
    for path in (unfinished, unfinished / "items"):
        with pytest.raises(
            uc.IncompleteError, match=r"is unfinished: its name has .orbax-checkpoint-tmp"
        ):
            uc.open(path)


def test_iterator_states_are_per_rank(folder: Path) -> None:
    (folder / "iter").mkdir()
    for process in range(3):
        (folder / "iter" / f"process_{process}-of-3.json").write_text(json.dumps({"seen": process}))
    with uc.open(folder) as source:
        assert list(source.rank_extra) == [{"iter": {"seen": process}} for process in range(3)]
    (folder / "iter" / "process_1-of-3.json").unlink()
    with pytest.raises(uc.IncompleteError, match=r"files are missing(.|\n)*process_1-of-3.json"):
        uc.open(folder)


def test_other_folders_are_not_orbax(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-10" / "model.safetensors").write_bytes(b"")
    (tmp_path / "7").mkdir()
    assert detect_format(str(tmp_path), format_name=None) is None


# ---- damage


def test_truncated_or_missing_file_is_named_with_its_arrays(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "cut", tmp_path / "cut")
    files = sorted(
        (path for path in (tmp_path / "cut" / "1" / "items").rglob("d/*")),
        key=lambda path: path.stat().st_size,
    )
    largest, body = files[-1], files[-1].read_bytes()
    largest.write_bytes(body[:-10])
    with pytest.raises(
        uc.IncompleteError, match=rf"{largest.name} is truncated, with params.wide/c/"
    ):
        uc.load(tmp_path / "cut", model={"wide": torch.zeros(512, 512)})
    largest.unlink()
    with pytest.raises(
        uc.IncompleteError, match=rf"{largest.name} is missing, with params.wide/c/"
    ):
        uc.open(tmp_path / "cut")


def test_chunk_deleted_after_opening_is_an_error(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "files-zarr2", tmp_path / "c")
    with uc.open(tmp_path / "c") as source:
        for path in (tmp_path / "c" / "3" / "items" / "params.wide").glob("[0-9]*"):
            path.unlink()
        with pytest.raises(uc.IncompleteError, match=r"params.wide"):
            source["model"]["wide"][...]


def test_omitted_zero_chunks_of_older_versions(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "files-zarr3", tmp_path / "c")
    items = tmp_path / "c" / "3" / "items"
    metadata = json.loads((items / "_METADATA").read_text())
    (items / "_METADATA").write_text(
        json.dumps({**metadata, "store_array_data_equal_to_fill_value": False})
    )
    shutil.rmtree(items / "params.layer_0.bias" / "c")
    with uc.open(tmp_path / "c") as source:
        assert equal(source["model"]["layer_0.bias"][...], np.zeros(12, np.float32))


def write_tree(body: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "items" / "_METADATA").write_bytes(body)


def point_outside(folder: Path) -> None:
    path = folder / "items" / "_METADATA"
    metadata = json.loads(path.read_text())
    metadata["tree_metadata"]["__import__('os').abort()"] = {
        "key_metadata": [{"key": "../../x", "key_type": 2}],
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
    }
    path.write_text(json.dumps(metadata))


TREE = r"items/_METADATA: (expected |not valid JSON)"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no item": (
        lambda folder: shutil.rmtree(folder / "meta"),
        r"items of _CHECKPOINT_METADATA are missing(.|\n)*meta",
    ),
    "files of processes not merged": (
        lambda folder: (folder / "items" / "manifest.ocdbt").unlink(),
        r"manifest.ocdbt is missing, so the files of the processes were never merged",
    ),
    "a name outside": (point_outside, r"point outside the folder(.|\n)*\.\./\.\./x"),
    **{
        f"tree of {body!r}": (write_tree(body), TREE)
        for body in (
            b"",
            b"{",
            b"[]",
            b'{"tree_metadata": {"a": 1}}',
            b'{"tree_metadata": []}',
            b"\xff\xfe",
        )
    },
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_step_is_rejected(folder: Path, case: str) -> None:
    damage, text = DAMAGE[case]
    damage(folder)
    with pytest.raises((uc.FormatError, uc.IncompleteError), match=text):
        uc.open(folder)


def test_missing_tensorstore_error_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(uc.MissingPackageError, match="run: pip install 'tensorstore>="):
        uc.open(folder)


def test_dtype_unknown_to_safetensors_is_rejected(tmp_path: Path) -> None:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/a/"}}
    tensorstore.open(spec, dtype="int4", shape=[4], create=True).result().write(
        np.zeros(4, ml_dtypes.int4)
    ).result()
    with pytest.raises(uc.FormatError, match=r"a: dtype int4 does not exist in safetensors"):
        open_arrays(str(tmp_path), ["a"], zarr3=True, zeros_omitted=False)


def test_ocdbt_tree_of_many_nodes(tmp_path: Path) -> None:
    """A very large checkpoint stores its keys in such a tree."""
    kvstore = {
        "driver": "ocdbt",
        "base": f"file://{tmp_path}/",
        "config": {"max_decoded_node_bytes": 300, "max_inline_value_bytes": 50},
    }
    names = [f"params.layers_{number}.x/y" for number in range(5)]
    with tensorstore.Transaction() as writing:
        for name in names:
            spec = {
                "driver": "zarr",
                "kvstore": {**kvstore, "path": f"{name}/"},
                "metadata": {"chunks": [32]},
            }
            store = tensorstore.open(
                spec, dtype="float32", shape=[128], create=True, transaction=writing
            ).result()
            store.write(RANDOM.standard_normal(128, np.float32)).result()
    outcomes = set()
    assert len(open_arrays(str(tmp_path), names, zarr3=False, zeros_omitted=False)) == 5
    with pytest.raises(
        uc.IncompleteError, match=r"arrays of its tree are missing(.|\n)*params.other"
    ):
        open_arrays(str(tmp_path), [*names, "params.other"], zarr3=False, zeros_omitted=False)
    # each file is a value, a node of the tree, or no longer referenced
    for path in (tmp_path / "d").iterdir():
        body = path.read_bytes()
        path.write_bytes(b"")
        try:
            open_arrays(str(tmp_path), names, zarr3=False, zeros_omitted=False)
            outcomes.add("unchanged")
        except uc.IncompleteError as error:
            outcomes.add(re.search("list of arrays|with params.layers_", str(error))[0])
        path.write_bytes(body)
    assert outcomes == {"unchanged", "list of arrays", "with params.layers_"}


# ---- pure


def test_chunk_boxes_follow_chunks_and_the_byte_limit() -> None:
    boxes = list(chunk_boxes((100, 64), (10, 16), 4, axes=(0, 1), nbytes=10 * 32 * 4))
    assert sum(box.numel for box in boxes) == 6400
    assert all(box.shape == (10, 32) for box in boxes)
    assert all(box.numel == 1 for box in chunk_boxes((3, 5), (3, 5), 4, axes=(0, 1), nbytes=1))
    assert [box.shape for box in chunk_boxes((3, 5), (3, 5), 4, axes=(1,), nbytes=1)] == [
        (3, 1)
    ] * 5  # a row is not split
    assert list(chunk_boxes((0, 5), (1, 5), 4, axes=(0, 1), nbytes=1)) == []
    assert [box.shape for box in chunk_boxes((), (), 4, axes=(), nbytes=1)] == [()]


def test_two_states_of_one_weight_are_rejected() -> None:
    shapes: dict[tuple[str, ...], tuple[int, ...]] = {("params", "a"): (2,)}
    for name in ("0", "1"):
        shapes |= {
            ("opt_state", name, "count"): (),
            ("opt_state", name, "mu", "a"): (2,),
            ("opt_state", name, "nu", "a"): (2,),
        }
    with pytest.raises(uc.FormatError, match=r"both are optimizer:a/exp_avg"):
        classify_leaves(shapes)


def test_moments_of_other_shapes_are_not_adam() -> None:
    shapes: dict[tuple[str, ...], tuple[int, ...]] = {
        ("params", "a"): (2,),
        ("opt_state", "count"): (),
    }
    shapes |= {("opt_state", "mu", "a"): (3,), ("opt_state", "nu", "a"): (3,)}
    roles = classify_leaves(shapes)
    assert roles.tensors["opt_state", "mu", "a"] == ("opt_state", "mu.a")
    assert roles.scalars == (("opt_state", "count"),)
