"""FlexCheckpoint folders that Paddle wrote are read bit for bit, in torch's names and layout.

Damaged, mixed and ambiguous ones are rejected by name.
"""

from __future__ import annotations

import json
import logging
import pickle
import random
import shutil
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import unified_ckpt as uc
from tests.support.equality import same
from tests.support.foreign import flex_files
from tests.support.foreign.flex_files import OLD_MODULE, STATIC_NAMES, Part
from tests.support.foreign.flexes import BY_API, FIXTURES, SPECIAL, TRAINER, copied, expected
from tests.support.harness import make_checkpointer, run_ranks
from unified_ckpt.foreign.open import open_source
from unified_ckpt.foreign.step_names import list_steps, read_step
from unified_ckpt.runtime.comm.comm import Comm

Tensors = dict[tuple[str, str], torch.Tensor]
STEP = FIXTURES / "trainer" / "single_flex" / "checkpoint-2"
SHARDED = FIXTURES / "trainer" / "sharding2_flex" / "checkpoint-2"
TP = FIXTURES / "by_api" / "tp2"


def read(path: Path, *, parts: tuple[str, ...] = (), **options: Any) -> Tensors:
    with uc.open(path, options=uc.SourceOptions(**options)) as source:
        return {
            (part, name): source[part][name][...]
            for part in parts or source.parts
            for name in source[part]
        }


def assert_equal(actual: Tensors, oracle: Tensors) -> None:
    assert actual.keys() == oracle.keys()
    for key, tensor in oracle.items():
        assert same(actual[key], tensor), key


@pytest.mark.parametrize(
    "path", [*BY_API, *SPECIAL, *TRAINER], ids=lambda path: "/".join(path.parts[-2:])
)
def test_folder_equals_what_was_written(path: Path) -> None:
    assert_equal(read(path), expected(path))


@pytest.mark.parametrize(
    "path", [*BY_API, *SPECIAL, *TRAINER], ids=lambda path: "/".join(path.parts[-2:])
)
def test_three_ranks_load_their_rows(path: Path) -> None:
    oracle = expected(path)
    shapes = {name: tuple(tensor.shape) for (_, name), tensor in oracle.items() if tensor.dim()}
    by_owner = {name.rpartition("/")[0] if "/" in name else name: s for name, s in shapes.items()}

    def load(comm: Comm) -> Tensors:
        targets: dict[str, dict[str, torch.Tensor]] = {}
        for (part, name), tensor in oracle.items():
            rows = tensor.chunk(3)[comm.rank : comm.rank + 1] if tensor.dim() else (tensor,)
            shape = rows[0].shape if rows else (0, *tensor.shape[1:])
            targets.setdefault(part, {})[name] = torch.zeros(shape, dtype=tensor.dtype)
        others = {part: targets[part] for part in targets.keys() & {"ema"}}
        layout = uc.Layout(
            mesh={"dp": 3}, rules={name: {"dp": 0} for name in by_owner}, shapes=by_owner
        )
        arguments: dict[str, Any] = {part: targets[part] for part in targets if part != "ema"}
        with make_checkpointer(comm) as checkpointer:
            checkpointer.load(path, **arguments, parts=others, layout=layout)
        return {(part, name): t for part in targets for name, t in targets[part].items()}

    for rank, actual in enumerate(run_ranks(3, load)):
        for key, tensor in oracle.items():
            rows = tensor.chunk(3)[rank : rank + 1] if tensor.dim() else (tensor,)
            assert all(same(actual[key], row) for row in rows), key


@pytest.mark.parametrize("seed", range(3))
def test_random_pieces_equal_the_arrays(tmp_path: Path, seed: int) -> None:
    """Boxes, flattened ranges of boxes, replicas, and ranks without tensors."""
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    world = 6
    arrays: dict[str, np.ndarray] = {}
    for number in range(20):
        shape = tuple(draw.randint(1, 9) for _ in range(number % 4))
        array = numbers.integers(0, 2**15, shape, dtype=np.uint16)
        arrays[f"t.{number}"] = draw.choice([array, array.astype(np.float32), array.astype(bool)])
    parts = {key: flex_files.drawn_parts(draw, array.shape, world) for key, array in arrays.items()}
    flex_files.write_group(tmp_path / "c", arrays, parts, world=world)
    actual = read(tmp_path / "c")
    assert len(actual) == len(arrays)
    for key, array in arrays.items():
        tensor = torch.from_numpy(array.copy())
        oracle = tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
        assert same(actual["model", key], oracle), parts[key]


@pytest.mark.parametrize("name", ["auto_parallel", "dtypes"])
def test_folders_of_paddle_3_0(tmp_path: Path, name: str) -> None:
    """Another module, and neither global shapes nor flattened ranges."""
    path = copied(FIXTURES / "special" / name, tmp_path / name)
    metadata = path / "0.metadata"
    flex_files.dump(flex_files.load(metadata), metadata, module=OLD_MODULE)
    assert_equal(read(path), expected(FIXTURES / "special" / name))


# Damage


def test_missing_file_is_named(tmp_path: Path) -> None:
    path = copied(SHARDED, tmp_path / "checkpoint-2")
    (path / "optimizer_state" / "1_0.distcp").unlink()
    with pytest.raises(uc.IncompleteError, match=r"optimizer_state: data files.*\n  1_0\.distcp"):
        read(path)


def test_truncated_file_is_named(tmp_path: Path) -> None:
    path = copied(SHARDED, tmp_path / "checkpoint-2")
    file = path / "model_state" / "0_0.distcp"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(uc.CheckpointError, match=r"model_state/0_0\.distcp"):
        read(path)


@pytest.mark.parametrize("number", [0, 1, -1])
@pytest.mark.parametrize("group", ["model_state", "master_weight"])
def test_hole_in_the_metadata_is_named(tmp_path: Path, group: str, number: int) -> None:
    """Paddle reads a smaller tensor, or zeros. The array of the piece is gone too."""
    folder = copied(FIXTURES / "by_api" / "tp2_sharding2", tmp_path / "c") / group
    metadata = flex_files.load(folder / "0.metadata")
    key = next(key for key in metadata.state_dict_metadata if "down_proj" in key)
    piece = metadata.state_dict_metadata[key].pop(number)
    index, file = next(
        (index, file)
        for index, file in metadata.storage_metadata.items()
        if index.tensor_key == key
        and index.global_offset == piece.global_offset
        and index.flattened_range == piece.flattened_range
    )
    del metadata.storage_metadata[index]
    flex_files.dump(metadata, folder / "0.metadata")
    content = pickle.loads((folder / file).read_bytes())
    del content[key]
    (folder / file).write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(uc.IncompleteError, match=rf"{group}: {key}: no shard has box"):
        read(folder.parent)


def test_overlap_is_an_error(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    parts = {"w": [Part((0, 0), (2, 4), None, [0]), Part((1, 0), (2, 4), (2, 8), [1])]}
    flex_files.write_group(tmp_path / "c", {"w": array}, parts)
    with pytest.raises(uc.FormatError, match="w: shards overlap"):
        read(tmp_path / "c")


def test_stale_metadata_is_an_error() -> None:
    """Paddle keeps the metadata of an earlier save into a folder."""
    stale = FIXTURES / "trainer" / "stale_metadata_flex" / "checkpoint-2"
    with pytest.raises(uc.FormatError, match=r"optimizer_state.*files of one save.*\(84\)"):
        read(stale)
    with pytest.raises(uc.FormatError, match=r"model_state.*files of one save"):
        read(FIXTURES / "special" / "resave_other_layout")


def test_array_of_another_shape_is_an_error(tmp_path: Path) -> None:
    """It has as many elements as its piece."""
    path = copied(TP, tmp_path / "c")
    file = path / "model_state" / "0_0.distcp"
    content = pickle.loads(file.read_bytes())
    key = next(key for key in content if "down_proj" in key)
    content[key] = content[key].reshape(content[key].shape[::-1])
    file.write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(uc.FormatError, match=rf"{key}: got BF16 \(8, 6\), expected BF16 \(6, 8\)"):
        read(path)


def test_optimizer_file_of_another_step(tmp_path: Path) -> None:
    """Its beta powers show it; the model is still read."""
    path = copied(SHARDED, tmp_path / "checkpoint-2")
    file = path / "optimizer_state" / "1_0.distcp"
    content = pickle.loads(file.read_bytes())
    for key in content:
        for power, beta in (("beta1_pow_acc_0", 0.9), ("beta2_pow_acc_0", 0.999)):
            if key.endswith(power):
                content[key] = np.array([beta * beta], dtype=np.float32)
    file.write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(uc.FormatError, match="after 1 steps, expected 2"):
        read(path)
    assert read(path, parts=("model",))


@pytest.mark.parametrize("group", ["model_state", "master_weight"])
def test_weights_of_another_step(tmp_path: Path, group: str) -> None:
    """A master weight must round to the model's weight."""
    path = copied(SHARDED, tmp_path / "checkpoint-2")
    file = path / group / "0_0.distcp"
    content = pickle.loads(file.read_bytes())
    for array in content.values():
        if isinstance(array, np.ndarray):
            array += 1 if array.dtype == np.uint16 else 0.5  # the lowest bit of bfloat16
    file.write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(uc.IntegrityError, match="does not round to the weight"):
        read(path)
    assert read(path, parts=("model", "optimizer"))


HOSTILE: dict[str, dict[str, Any]] = {
    "negative size": {"local_shape": (-1, 4)},
    "huge size": {"local_shape": (2**80, 4)},
    "outside": {"global_offset": (1, 0)},
    "no number": {"local_shape": ("3", 4)},
    "other dims": {"global_offset": (0,)},
    "many dims": {"local_shape": (1,) * 99, "global_offset": (0,) * 99},
    "unknown dtype": {"dtype": "object"},
    "dtype of no text": {"dtype": 3},
    "other dtype": {"dtype": "int64"},
    "flag of no bool": {"is_flattened": "yes"},
    "range outside": {"is_flattened": True, "flattened_range": (0, 99)},
    "range reversed": {"is_flattened": True, "flattened_range": (5, 2)},
    "range of one": {"is_flattened": True, "flattened_range": (5,)},
    "smaller tensor": {"global_shape": (2, 4)},
}


@pytest.mark.parametrize("change", HOSTILE)
def test_damaged_piece_is_an_error(tmp_path: Path, change: str) -> None:
    array, parts = np.zeros((3, 4), np.float32), {"w": [Part((0, 0), (3, 4), None, [0])]}
    metadata = flex_files.write_group(tmp_path / "c", {"w": array}, parts)
    values = HOSTILE[change]
    metadata.state_dict_metadata["w"] = [
        replace(piece, **values) for piece in metadata.state_dict_metadata["w"]
    ]
    metadata.storage_metadata = {
        replace(index, **{name: values[name] for name in values if hasattr(index, name)}): file
        for index, file in metadata.storage_metadata.items()
    }
    flex_files.dump(metadata, tmp_path / "c" / "0.metadata")
    with pytest.raises(uc.CheckpointError, match=r"/c(/0\.metadata)?: "):
        read(tmp_path / "c")


@pytest.mark.parametrize("file", ["/etc/passwd", "../0_0.distcp", "0_1.distcp", "0_10.distcp", 3])
def test_file_outside_of_the_save_is_refused(tmp_path: Path, file: Any) -> None:
    array, parts = np.zeros(3, np.float32), {"w": [Part((0,), (3,), None, [0])]}
    metadata = flex_files.write_group(tmp_path / "c", {"w": array}, parts)
    metadata.storage_metadata = dict.fromkeys(metadata.storage_metadata, file)
    flex_files.dump(metadata, tmp_path / "c" / "0.metadata")
    with pytest.raises(uc.FormatError, match=r"0\.metadata: .*(data file of id 0|expected str)"):
        read(tmp_path / "c")


def test_two_entries_of_one_piece_are_refused(tmp_path: Path) -> None:
    array, parts = np.zeros(3, np.float32), {"w": [Part((0,), (3,), None, [0])]}
    metadata = flex_files.write_group(tmp_path / "c", {"w": array}, parts)
    index = next(iter(metadata.storage_metadata))
    metadata.storage_metadata[replace(index, replica_id=0)] = "1_0.distcp"
    flex_files.dump(metadata, tmp_path / "c" / "0.metadata")
    with pytest.raises(uc.FormatError, match=r"w: got 0_0\.distcp and 1_0\.distcp for one piece"):
        read(tmp_path / "c")


def test_other_classes_are_refused(tmp_path: Path) -> None:
    path = copied(TP, tmp_path / "c")
    (path / "model_state" / "0.metadata").write_bytes(pickle.dumps(random.Random(1), protocol=4))
    with pytest.raises(uc.FormatError, match=r"0\.metadata: asks for classes[^$]*random\.Random"):
        read(path)


# Several saves, and files that are not read


def test_highest_id_with_data_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for unique_id in (1, 11):
        array = np.full(3, unique_id, np.float32)
        parts = {"w": [Part((0,), (3,), None, [0])]}
        flex_files.write_group(tmp_path / "c", {"w": array}, parts, unique_id=unique_id, world=1)
    shutil.copy(tmp_path / "c" / "11.metadata", tmp_path / "c" / "12.metadata")  # without data
    target = {"w": torch.zeros(3)}
    with caplog.at_level(logging.WARNING):
        uc.load(tmp_path / "c", model=target)
    assert same(target["w"], torch.full((3,), 11.0))
    assert "not read (3):\n  0_1.distcp\n  1.metadata\n  12.metadata" in caplog.text


def test_interrupted_save_is_incomplete(tmp_path: Path) -> None:
    path = copied(STEP, tmp_path / "checkpoint-2")
    group = path / "optimizer_state"
    (group / "0.metadata").rename(group / "0.metadata.lock")
    with pytest.raises(uc.IncompleteError, match=r"0\.metadata\.lock shows an interrupted save"):
        read(path)
    shutil.rmtree(path / "master_weight")
    shutil.copy(STEP / "optimizer_state" / "0.metadata", group)
    with pytest.raises(uc.IncompleteError, match="got no master_weight"):
        read(path)


def test_replica_stands_in_for_a_missing_file(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32)
    parts = {"w": [Part((0,), (6,), (0, 4), [0, 1]), Part((0,), (6,), (4, 6), [2])]}
    flex_files.write_group(tmp_path / "c", {"w": array}, parts)
    (tmp_path / "c" / "0_0.distcp").unlink()
    assert same(read(tmp_path / "c")["model", "w"], torch.from_numpy(array))


def test_unlisted_keys_are_named(tmp_path: Path) -> None:
    """Zero-cost checkpoints have more keys than the metadata; state that it lacks is an error."""
    path = copied(STEP, tmp_path / "checkpoint-2")
    file = path / "model_state" / "0_0.distcp"
    content = pickle.loads(file.read_bytes())
    for key, is_state in (("model.routed_scaling_factor_param", False), ("more.weight", True)):
        changed = {**content, key: np.zeros(3, np.float32)}
        file.write_bytes(pickle.dumps(changed, protocol=4))
        if is_state:
            with pytest.raises(uc.FormatError, match=r"more\.weight: is in 0_0\.distcp"):
                read(path)
        else:
            with closing(open_source(str(path))) as source:
                assert source.metadata().left_out == [f"model_state/{key}"]


def test_ema_without_metadata_is_named(tmp_path: Path) -> None:
    path = copied(STEP, tmp_path / "checkpoint-2")
    (path / "ema_state").mkdir()
    shutil.copy(STEP / "master_weight" / "0_0.distcp", path / "ema_state")
    target = {("model", "model.norm.weight"): torch.zeros(16, dtype=torch.bfloat16)}
    assert read(path, parts=("model",)).keys() >= target.keys()
    report = uc.convert(path, tmp_path / "converted", fsync=False)
    assert "ema_state" in report.left_out


# Names and layouts


def test_group_folder_alone_has_its_part() -> None:
    oracle = expected(STEP)
    for name, part in (("optimizer_state", "optimizer"), ("master_weight", "master_weights")):
        assert_equal(
            read(STEP / name), {key: tensor for key, tensor in oracle.items() if key[0] == part}
        )


def test_own_names_without_a_map_are_refused(tmp_path: Path) -> None:
    """As with safetensors. The layout of the model's weights is unknown, too."""
    path = copied(FIXTURES / "special" / "real_model_nested", tmp_path / "c")
    content = pickle.loads((path / "0_0.distcp").read_bytes())
    names = content.pop(STATIC_NAMES)
    (path / "0_0.distcp").write_bytes(pickle.dumps({**content, STATIC_NAMES: {}}, protocol=4))
    with pytest.raises(uc.FormatError, match=r"0\.weight: got shape .* pass names='own'"):
        uc.open(path)
    with uc.open(path, options=uc.SourceOptions(names="own")) as source:
        assert set(source["model"]) == {
            key.removeprefix("model.") for key in names if "model" in key
        }
        assert source["model"]["0.weight"].shape == (4, 6)
        with pytest.raises(uc.FormatError, match=r"do not map to one parameter each: layer_norm_0"):
            list(source["optimizer"])


def test_config_splits_fused_weights(tmp_path: Path) -> None:
    """Each tensor-parallel rank stores its gates, then its ups."""
    config = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 2}
    config |= {"model_type": "llama", "intermediate_size": 12, "vocab_size": 20}
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = expected(TP)["model", "llama.layers.0.mlp.up_gate_proj.weight"]
    for name, slices in (("single", [0, 12]), ("tp2", [0, 6, 12, 18])):
        tensors = read(FIXTURES / "by_api" / name, config=str(tmp_path))
        bounds = [*slices, 24]
        rows = [whole[a:b] for a, b in pairwise(bounds)]
        prefix = "model.layers.0.mlp"
        assert same(tensors["model", f"{prefix}.gate_proj.weight"], torch.cat(rows[::2]))
        assert same(tensors["model", f"{prefix}.up_proj.weight"], torch.cat(rows[1::2]))


def test_fused_weights_of_paddle_itself() -> None:
    """PaddleFormers fused Hugging Face's weights on two tensor-parallel ranks."""
    tensors = read(FIXTURES / "fused" / "model_state", config=str(FIXTURES / "fused"))
    weights = load_file(FIXTURES / "fused" / "model.safetensors")
    assert_equal(tensors, {("model", name): tensor for name, tensor in weights.items()})


def test_weight_of_an_unknown_layer_in_a_model(tmp_path: Path) -> None:
    array = np.zeros((3, 4), np.float32)
    parts = {key: [Part((0, 0), (3, 4), None, [0])] for key in ("m.q_proj.weight", "m.w")}
    flex_files.write_group(tmp_path / "c", dict.fromkeys(parts, array), parts)
    with pytest.raises(uc.FormatError, match=r"m\.w: .*unknown layer"):
        read(tmp_path / "c")


@pytest.mark.parametrize(
    ("paths", "tensor"),
    [
        ([("model", "a.b"), ("model", "a", "b")], "model:a.b"),
        ([("model", "w"), ("model_state", "w")], "model:w"),
        ([("optimizer", "w_moment1_0"), ("optimizer", "w.moment1_0")], "optimizer:w/moment1_0"),
        ([("optimizer", "master_weights", "w"), ("master_weight", "w")], "master_weights:w"),
    ],
)
def test_two_keys_of_one_tensor_are_refused(
    tmp_path: Path, paths: list[tuple[str, ...]], tensor: str
) -> None:
    arrays = dict.fromkeys(("k0", "k1", "k2"), np.zeros(3, np.float32))
    parts = {key: [Part((0,), (3,), None, [0])] for key in arrays}
    metadata = flex_files.write_group(tmp_path / "c", arrays, parts)
    other = ("ema", "w") if paths[0][0] == "model" else ("model", "w")
    metadata.flat_mapping = dict(zip(arrays, [*paths, other], strict=True))
    flex_files.dump(metadata, tmp_path / "c" / "0.metadata")
    with pytest.raises(uc.FormatError, match=f"got 'k0' and 'k1' for {tensor}"):
        uc.open(tmp_path / "c")


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("rows", [4, 40])
def test_arrays_in_other_orders(tmp_path: Path, rows: int, protocol: int) -> None:
    """Column-major, and in memory that protocol 5 names; short and long arrays."""
    path = tmp_path / "c"
    array = np.arange(rows * 50, dtype=np.float32).reshape(rows, 50)
    parts = {"w": [Part((0, 0), array.shape, None, [0])]}
    flex_files.write_group(path, {"w": array}, parts)
    for form in (np.asfortranarray(array), array):
        content = pickle.dumps({"w": form, STATIC_NAMES: {}}, protocol=protocol)
        (path / "0_0.distcp").write_bytes(content)
        assert same(read(path)["model", "w"], torch.from_numpy(array))


# Steps


def test_steps_are_found_and_left_out_files_named(tmp_path: Path) -> None:
    for number in (2, 4):
        copied(STEP, tmp_path / f"checkpoint-{number}")
    (tmp_path / "checkpoint-4" / "trainer_state.bin").unlink()
    (tmp_path / "checkpoint-4" / "rng_state_0.pth").write_bytes(b"\x80\x04N.")
    entries = list_steps(str(tmp_path))
    assert [(entry.number, entry.format) for entry in entries] == [
        (2, "paddle-flex"),
        (4, "paddle-flex"),
    ]
    contents = [read_step(entry) for entry in entries]
    assert [content.step for content in contents] == [2, 4]
    assert contents[0].parts == {"model", "optimizer", "master_weights"}
    report = uc.convert(tmp_path / "checkpoint-4", tmp_path / "c", fsync=False)
    assert report.left_out == ("rng_state_0.pth",)
    (tmp_path / "checkpoint-4" / "model_state" / "0_0.distcp").unlink()
    assert "data files are missing" in read_step(entries[1]).problem


def test_metadata_beside_a_hugging_face_model(tmp_path: Path) -> None:
    """Paddle's loader writes such a file; the folder is Hugging Face's."""
    from safetensors.torch import save_file

    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "flex-ckpt.auto_generated.metadata").write_bytes(b"")
    with uc.open(tmp_path) as source:
        assert same(source["model"]["w"][...], torch.ones(3))


def test_two_saves_in_one_step_are_refused(tmp_path: Path) -> None:
    path = copied(STEP, tmp_path / "checkpoint-2")
    (path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(uc.FormatError, match="has a Unified Checkpoint and a FlexCheckpoint"):
        read(path)
    assert_equal(read(path, format="paddle-flex"), expected(STEP))
