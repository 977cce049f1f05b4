"""Exports to FlexCheckpoint, compared with a folder of PaddleFormers field by field.

The standard library unpickles them. A record replaces each of Paddle's classes.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unified_ckpt as uc
from tests.support.foreign.paddles import llama
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.foreign.paddle.export.pickles import StreamedArray, write_pickle
from unified_ckpt.foreign.paddle.flex import export
from unified_ckpt.options import SourceOptions
from unified_ckpt.views import materialize

STEP = Path(__file__).parents[3] / "fixtures" / "flex" / "trainer" / "single_flex" / "checkpoint-2"
GROUPS = ("master_weight", "model_state", "optimizer_state")
TENSOR_NAMES = "StructuredToParameterName@@"
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MOMENTS = {"exp_avg": "moment1_0", "exp_avg_sq": "moment2_0"}


class Record:
    """Holds the fields of an object of Paddle; equal fields make equal records."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fields = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and (type(self), self.fields) == (
            type(other),
            other.fields,
        )

    def __hash__(self) -> int:
        return id(self).__hash__()


class Unpickler(pickle.Unpickler):
    """Makes a record of each class of Paddle, and lists what the file asks for."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.asked: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module.replace('numpy._core', 'numpy.core')}.{name}"
        if not module.startswith("paddle"):
            self.asked[full_name] = object
            return super().find_class(module, name)
        return self.asked.setdefault(full_name, type(full_name, (Record,), {}))


def unpickled(path: Path) -> tuple[Any, set[str]]:
    """What a file holds, and the names of all classes and functions in it."""
    unpickler = Unpickler(io.BytesIO(path.read_bytes()))
    return unpickler.load(), set(unpickler.asked)


def fields_of_group(folder: Path) -> dict[str, Any]:
    """The fields of a metadata file, and the sets of classes of both kinds of file."""
    metadata, classes = unpickled(folder / "0.metadata")
    boxes = {
        name: [(type(box).__name__, list(box.fields.items())) for box in listed]
        for name, listed in metadata.fields["state_dict_metadata"].items()
    }
    files = {
        index.fields["tensor_key"]: (type(index).__name__, list(index.fields.items()), file)
        for index, file in metadata.fields["storage_metadata"].items()
    }
    arrays = unpickled(folder / "0_0.distcp")
    return {
        "fields": list(metadata.fields),
        "boxes": boxes,
        "files": files,
        "paths": metadata.fields["flat_mapping"],
        "classes": classes,
        "classes of data": arrays[1],
        "last key": list(arrays[0])[-1],
        "named": arrays[0][TENSOR_NAMES].keys(),
    }


def arrays_of(folder: Path) -> dict[str, np.ndarray]:
    """All arrays of a group. Each must be in the file that the metadata names."""
    metadata, _ = unpickled(folder / "0.metadata")
    arrays = {path.name: unpickled(path)[0] for path in folder.glob("*.distcp")}
    for held in arrays.values():  # Paddle makes tensors of arrays that have a name
        assert held.pop(TENSOR_NAMES).keys() == held.keys()
    places = {
        index.fields["tensor_key"]: file
        for index, file in metadata.fields["storage_metadata"].items()
    }
    assert places == {name: file for file, held in arrays.items() for name in held}
    return {name: array for held in arrays.values() for name, array in held.items()}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": False, **SIZES}))
    return path


def convert(source: Path, target: Path, config: Path | None = None, **options: Any) -> Path:
    opening = SourceOptions(config=None if config is None else str(config))
    uc.convert(source, target, to="paddle-flex", source=opening, fsync=False, **options)
    return target


def test_round_trip_reproduces_every_field(tmp_path: Path, config: Path) -> None:
    """PaddleFormers' step, converted to unified and back, differs in names of `Tensor`s only."""
    uc.convert(STEP, tmp_path / "ours", source=SourceOptions(config=str(config)), fsync=False)
    written = convert(tmp_path / "ours", tmp_path / "theirs", config)
    assert {path.name for path in written.iterdir()} == {
        *(path.name for path in STEP.iterdir()),
        "config.json",
    }
    for group in GROUPS:
        assert fields_of_group(written / group) == fields_of_group(STEP / group), group
        arrays, expected = arrays_of(written / group), arrays_of(STEP / group)
        for name, array in expected.items():
            assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape), name
            assert arrays[name].tobytes() == array.tobytes(), name
    for name in ("trainer_state.bin", "scheduler.pdparams"):
        assert repr_of(written / name) == repr_of(STEP / name)
    assert (written / "saved_signal_0").read_text() == (STEP / "saved_signal_0").read_text()


def repr_of(path: Path) -> str:
    value, classes = unpickled(path)
    return f"{classes} {value.fields if isinstance(value, Record) else value}"


def test_large_parts_have_several_files(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_CHUNK_NBYTES", 301)  # not a multiple of any row
    monkeypatch.setattr(materialize, "CHUNK_NBYTES", 250)
    written = convert(STEP, tmp_path / "theirs", config, max_file_bytes=2000)
    for group in GROUPS:
        arrays, expected = arrays_of(written / group), arrays_of(STEP / group)
        assert arrays.keys() == expected.keys()
        assert all(arrays[name].tobytes() == expected[name].tobytes() for name in expected)
        count = len(list((written / group).glob("*_0.distcp")))
        assert count > 5
        assert (written / group / f"{count - 1}_0.distcp").exists()


def test_long_arrays_lie_between_frames() -> None:
    """The C unpickler, which Paddle uses, reads frames whole."""
    rows = {"short": np.arange(30, dtype="f4").reshape(5, 6), "long": np.ones((300, 99), "u2")}
    arrays = {
        name: StreamedArray(
            TensorSpec({"f4": "F32", "u2": "BF16"}[array.dtype.str[1:]], array.shape),
            lambda array=array: iter([memoryview(row).cast("B") for row in array]),
        )
        for name, array in rows.items()
    }
    file = io.BytesIO()
    write_pickle(file, {**arrays, TENSOR_NAMES: {}}, classes={})
    loaded = pickle.loads(file.getvalue())
    assert all(np.array_equal(loaded[name], rows[name]) for name in rows)
    expected = pickle.dumps({**rows, TENSOR_NAMES: {}}, 4)
    assert frames(file.getvalue()) == frames(expected)


def frames(data: bytes) -> list[str]:
    """The operations that begin a frame or have bytes."""
    return [
        operation.name
        for operation, argument, _ in pickletools.genops(data)
        if operation.name == "FRAME" or isinstance(argument, bytes)
    ]


class Sink:
    """Keeps what is short of what is written."""

    def __init__(self) -> None:
        self.short: list[bytes] = []
        self.nbytes = 0

    def write(self, data: bytes | memoryview) -> int:
        self.nbytes += len(data)
        if len(data) < 100:
            self.short.append(bytes(data))
        return len(data)


def test_arrays_above_4_gib_have_long_sizes() -> None:
    nbytes, chunk = 5 << 30, memoryview(bytearray(64 << 20))
    array = StreamedArray(TensorSpec("F32", (nbytes // 4,)), lambda: iter([chunk] * 80))
    sink = Sink()
    write_pickle(sink, {"w": array}, classes={})  # type: ignore[arg-type]
    assert pickle.BINBYTES8 + nbytes.to_bytes(8, "little") in sink.short
    assert nbytes < sink.nbytes < nbytes + 1000


def trained(folder: Path, *, tied: bool = False, **more: Any) -> Path:
    torch.manual_seed(0)
    model = llama(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
    save = {"model": model, "optimizer": optimizer, "step": 2, **more}
    uc.save(
        folder, **save, attach=model.config.save_pretrained, options=uc.SaveOptions(fsync=False)
    )
    return folder


def as_paddle(name: str, tensor: torch.Tensor) -> np.ndarray:
    """A tensor in Paddle's orientation, by a list of layers independent of the library's."""
    is_linear = tensor.dim() == 2 and name.split(".")[-2] in LINEAR
    return (tensor.t() if is_linear else tensor).float().numpy()


@pytest.mark.parametrize("tied", [False, True])
def test_torch_checkpoints_become_steps(tmp_path: Path, tied: bool) -> None:
    """PaddleFormers looks for a tied tensor, and its state, under either name."""
    source = trained(tmp_path / "ours", tied=tied)
    written = convert(source, tmp_path / "theirs")
    weights, states = arrays_of(written / "model_state"), arrays_of(written / "optimizer_state")
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    with uc.open(source) as opened:
        for name in opened["model"]:
            assert np.array_equal(weights[name], as_paddle(name, opened["model"][name][...]))
        for name in opened["optimizer"]:
            owner, _, state = name.rpartition("/")
            for key in {owner, *([head, embedding] if tied and owner in (head, embedding) else [])}:
                if state in MOMENTS:
                    expected = as_paddle(owner, opened["optimizer"][name][...])
                    assert np.array_equal(states[f"{key}.{MOMENTS[state]}"], expected)
                else:
                    power = np.float32(0.9) * np.float32(0.9) * np.float32(0.9)
                    assert states[f"{key}.beta1_pow_acc_0"].tolist() == [power]
    assert (len(weights), len(states)) == (21, 84)
    if tied:
        assert np.array_equal(weights[head], weights[embedding])
    assert arrays_of(written / "master_weight") == {}  # PaddleFormers needs the empty folder
    assert (written / "master_weight" / "0_0.distcp").stat().st_size == 47
    assert unpickled(written / "scheduler.pdparams")[0] == {"last_epoch": 2, "last_lr": 1e-3}


def test_half_precision_gets_master_weights(tmp_path: Path) -> None:
    """Without them, PaddleFormers would continue from those of its random weights."""
    source = trained(tmp_path / "ours", optimizer=None)
    written = convert(source, tmp_path / "theirs", model_dtype="bfloat16")
    masters, weights = arrays_of(written / "master_weight"), arrays_of(written / "model_state")
    assert {name.removesuffix(".w_0") for name in masters} == weights.keys()
    for name, weight in weights.items():
        bits = weight.astype(np.uint32) << 16
        assert np.array_equal(masters[f"{name}.w_0"], bits.view(np.float32))
    assert arrays_of(written / "optimizer_state") == {}


def test_averages_are_a_group(tmp_path: Path) -> None:
    """Those of tensors in half precision are named like master weights."""
    model = llama().bfloat16()
    model.model.norm.float()
    ema = {name: torch.randn(tensor.shape) for name, tensor in model.state_dict().items()}
    uc.save(tmp_path / "ours", model=model, parts={"ema": ema}, attach=model.config.save_pretrained)
    written = convert(tmp_path / "ours", tmp_path / "theirs")
    arrays = arrays_of(written / "ema_state")
    suffixes = {name: "" if name == "model.norm.weight" else ".w_0" for name in ema}
    assert arrays.keys() == {name + suffix for name, suffix in suffixes.items()}
    for name, suffix in suffixes.items():
        assert np.array_equal(arrays[name + suffix], as_paddle(name, ema[name]))
    with uc.open(written) as opened:
        assert all(torch.equal(opened["ema"][name][...], ema[name]) for name in ema)


UNFIT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another model": ({"model_type": "qwen2"}, {}, "model_type 'qwen2', expected llama"),
    "a missing layer": ({"num_hidden_layers": 3}, {}, r"lacks these(.|\n)*layers\.2\.mlp"),
    "a layer too many": ({"num_hidden_layers": 1}, {}, r"no place for these(.|\n)*layers\.1\.mlp"),
    "no number of layers": ({"num_hidden_layers": None}, {}, "without num_hidden_layers"),
    "another part": ({}, {"parts": {"teacher": {"w": torch.zeros(4)}}}, "expected parts model"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_paddle_would_not_resume_is_refused(tmp_path: Path, case: str) -> None:
    """PaddleFormers only warns of tensors that it does not find."""
    fields, saved, text = UNFIT[case]
    source = trained(tmp_path / "ours", optimizer=None, **saved)
    sizes = json.loads((source / "config.json").read_text())
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**sizes, **fields}))
    with pytest.raises(uc.FormatError, match=text):
        convert(source, tmp_path / "theirs", config)
    assert not (tmp_path / "theirs").exists()


def test_corrupt_steps_are_not_published(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other bytes are written than were read, as with a bad disk or a bug in the writer."""
    real = export.read_chunks

    def corrupt_read(source: Any, key: Any, *args: Any, **options: Any) -> Iterator[memoryview]:
        for chunk in real(source, key, *args, **options):
            chunk[0] ^= key[1] == "lm_head.weight.moment1_0"
            yield chunk

    monkeypatch.setattr(export, "read_chunks", corrupt_read)
    with pytest.raises(uc.IntegrityError, match=r"differ(.|\n)*lm_head.weight/exp_avg: 1 elem"):
        convert(STEP, tmp_path / "theirs", config)
    assert list(tmp_path.iterdir()) == []
