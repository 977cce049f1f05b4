from __future__ import annotations

import functools
import json
import math
import random
import struct
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from enum import IntEnum
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from unified_ckpt.errors import FormatError
from unified_ckpt.format import blobs as blob_format
from unified_ckpt.format.codec import MAX_DEPTH, decode, encode, pack, unpack


def through_json(tree: Any) -> Any:
    return json.loads(json.dumps(tree, allow_nan=False))


def same(left: Any, right: Any) -> bool:
    """Return whether values and types are equal, including the bits of floats."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return bool(
            left.dtype == right.dtype and left.shape == right.shape
        ) and blob_format.raw_bytes(left) == blob_format.raw_bytes(right)
    if isinstance(left, np.ndarray):
        return (
            bool(left.dtype == right.dtype and left.shape == right.shape)
            and left.tobytes() == right.tobytes()
        )
    if type(left) is float:
        return struct.pack(">d", left) == struct.pack(">d", right)
    if type(left) is complex:
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, np.generic):
        return bool(left.dtype == right.dtype) and left.tobytes() == right.tobytes()
    if isinstance(left, list | tuple | deque):
        return (
            len(left) == len(right)
            and all(map(same, left, right))
            and getattr(left, "maxlen", 0) == getattr(right, "maxlen", 0)
        )
    if isinstance(left, dict):
        factories = getattr(left, "default_factory", None) is getattr(
            right, "default_factory", None
        )
        return (
            factories
            and same(list(left), list(right))
            and same(list(left.values()), list(right.values()))
        )
    return bool(left == right)


def check(value: Any) -> None:
    tree, blobs = encode(value)
    assert same(decode(through_json(tree), blobs), value)
    assert same(
        decode(tree, {name: bytes(blob_format.raw_bytes(blob)) for name, blob in blobs.items()}),
        value,
    )
    assert same(unpack(pack(value)), value)


NAN_WITH_PAYLOAD = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
SIMPLE = [
    None,
    True,
    False,
    0,
    -(2**63),
    2**64,
    -(10**40),
    0.1,
    -0.0,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
    NAN_WITH_PAYLOAD,
    "",
    "é\n\0🙂",
    "\ud800 of os.fsdecode",
    complex(-0.0, math.nan),
    complex(math.inf, 1.5),
    range(1, 10**30, 3),
    b"",
    b"\xff" * 1024,
    b"\xff" * 1025,
    bytearray(b"abc"),
    bytearray(5000),
    PurePosixPath("/a/../b"),
    PureWindowsPath("C:\\a"),
    Path("x"),
    datetime(2026, 1, 2, 3, 4, 5, 6),
    datetime(2026, 1, 2, tzinfo=UTC),
    datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=5, seconds=1))),
    date(2026, 1, 2),
    timedelta(days=-3, microseconds=1),
    np.float32(0.1),
    np.float64(math.nan),
    np.int8(-3),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.datetime64("2026-01-02T03:04:05", "ns"),
    np.str_("a\0"),
    np.str_(""),
    np.bytes_(b"a\0"),
    np.dtype(">i4"),
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.device("cuda", 3),
    torch.device("cpu"),
    torch.Size([2, 0]),
]
CONTAINERS = [
    [],
    (),
    {},
    set(),
    [1, (2, [3, ()])],
    {"a": 1, "": 2, "$type": "tuple"},
    {"$type": {"$type": 3}},
    {3: 1, "3": 2, None: 3, (1, (2,)): 4, b"k": 5, 2.5: 6, frozenset({1}): 7, True: 8},
    {True: 1, False: 0},
    {1: True, 0: False},
    {"\ud800": 1},
    {b"k" * 2000: 1},
    {1, "a", (2, None), b"x", 2.5},
    frozenset({frozenset(), frozenset({1})}),
    Counter({3: 1, "a": -2, (1,): 0.5}),
    OrderedDict([("b", 1), ("a", {"c": ()})]),
    defaultdict(list, {"a": [1]}),
    defaultdict(None, {1: 2}),
    defaultdict(int),
    deque([1, (2,)], maxlen=3),
    deque(),
]
ARRAYS: list[Any] = [
    np.arange(6, dtype=">i2").reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(10)[::-2],
    np.array(3.5),
    np.zeros((0, 3), np.float16),
    np.array(["ab", "c"]),
    np.array([b"ab", b""]),
    np.array(["2026-01-01"], "datetime64[D]"),
    np.array([True, False]),
    np.array([1 + 2j]),
]
TENSORS: list[Any] = [
    torch.arange(6).reshape(2, 3).t(),
    torch.tensor(1.5, dtype=torch.bfloat16),
    torch.zeros(0, 3),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j]).conj(),
    torch.ones(3).to(torch.float8_e5m2),
    torch.tensor([2**64 - 1], dtype=torch.uint64),
    torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
]


@pytest.mark.parametrize("value", [*SIMPLE, *CONTAINERS], ids=lambda value: type(value).__name__)
def test_values_round_trip(value: Any) -> None:
    check(value)
    check([{"a": (value,)}])


def test_a_path_of_another_system_is_pure() -> None:
    stored = {"$type": "pathlib", "value": ["WindowsPath", "C:\\a"]}
    assert decode(stored, {}) == PureWindowsPath("C:\\a")


def test_integers_that_have_too_many_digits_for_json() -> None:
    check([10**5000, {-(10**5000): range(10**5000)}])


@pytest.mark.parametrize(
    "value", ARRAYS + TENSORS, ids=lambda value: f"{type(value).__name__}-{value.dtype}"
)
def test_arrays_and_tensors(value: Any) -> None:
    check({"a": [value]})
    dtype, shape = blob_format.spec(value)
    assert (dtype, shape) == ("U8", (value.nbytes,)) or shape == tuple(value.shape)


def test_specs_are_typed_where_safetensors_has_the_dtype() -> None:
    assert blob_format.spec(np.zeros((2, 3), np.float32)) == ("F32", (2, 3))
    assert blob_format.spec(np.zeros(2, np.bool_)) == ("BOOL", (2,))
    assert blob_format.spec(np.zeros(2, ">f4")) == ("U8", (8,))
    assert blob_format.spec(torch.zeros(2, dtype=torch.bfloat16)) == ("BF16", (2,))
    assert blob_format.spec(b"abc") == ("U8", (3,))


KEYS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.tuples(st.integers()),
)
LEAVES = KEYS | st.floats() | st.complex_numbers() | st.binary(min_size=1020, max_size=1030)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(deque),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.sampled_from(["a", "b", "$type"]), inner, max_size=3),
        st.sets(KEYS, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        st.dictionaries(KEYS, st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


@given(VALUES)
def test_any_value_round_trips(value: Any) -> None:
    check(value)
    again = unpack(pack(value))
    assert json.dumps(encode(again)[0]) == json.dumps(encode(value)[0]), "equal trees"


def test_the_states_of_random_generators() -> None:
    generators = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "numpy_generator": np.random.default_rng(1).bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    check(generators)
    tree, blobs = encode(generators)
    assert set(blobs) == {"extra/numpy/1", "extra/torch"}
    random.setstate(decode(through_json(tree), blobs)["python"])


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [4, 4])], [2]
    ),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(o, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, mode="exp_range"),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


def test_all_schedulers_of_torch_are_covered() -> None:
    ours = {name for name in lr_scheduler.__all__ if name not in ("LRScheduler", "_LRScheduler")}
    assert ours <= set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_state_of_every_scheduler_round_trips(name: str) -> None:
    first = optimizer()
    scheduler = SCHEDULERS[name](first)
    for _ in range(3):
        first.step()
        scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
    groups = [{k: v for k, v in group.items() if k != "params"} for group in first.param_groups]
    check({"scheduler": scheduler.state_dict(), "groups": groups})


@pytest.mark.incident("ultralytics#22189")
def test_the_state_of_a_grad_scaler() -> None:
    check(torch.amp.GradScaler("cpu", init_scale=2.0**10).state_dict())


class Color(IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


class Zone(tzinfo):
    def utcoffset(self, _: datetime | None) -> timedelta:
        return timedelta(0)

    dst = utcoffset

    def tzname(self, _: datetime | None) -> str:
        return "here"


class Half(np.float64):
    pass


Point = namedtuple("Point", "x")


@pytest.mark.parametrize(
    ("value", "description"),
    [
        (lambda: 1, "a function"),
        (print, "a builtin_function_or_method"),
        (int, "a type"),
        (object(), "an object"),
        (Color.RED, "a tests.format.test_codec.Color"),
        (Text("a"), r"a .*test_codec.Text"),
        (Point(1), r"a .*test_codec.Point"),
        (Half(1), r"a .*test_codec.Half"),
        (UserDict(), "a collections.UserDict"),
        (functools.partial(int), "a functools.partial"),
        (slice(1), "a slice"),
        (..., "an ellipsis"),
        (memoryview(b""), "a memoryview"),
        (torch.Generator(), "a torch"),
        (torch.nn.Parameter(torch.zeros(1)), "a torch.nn.parameter.Parameter"),
        (torch.strided, "a torch.layout"),
        (np.float32, "a type"),
        (np.ma.masked_array([1]), "a numpy.*MaskedArray"),
        (np.array([object()]), "numpy dtype 'object'"),
        (np.zeros(1, [("a", "i4")]), "numpy dtype"),
        (np.zeros(1, [("a", "i4")])[0], "numpy dtype"),
        (np.longlong(1), "a numpy longlong"),
        (torch.zeros(2).to_sparse(), "a tensor that is sparse"),
        (
            torch.zeros(2, device="meta"),
            "a tensor that is sparse, quantized, nested or on the meta device",
        ),
        (datetime(2026, 1, 1, tzinfo=Zone()), "a datetime with tzinfo"),
        (defaultdict(lambda: 1), "a defaultdict with factory"),
        ({torch.zeros(1)}, "a tensor in a key or a set"),
        ({(1, torch.zeros(1)): 1}, "a tensor in a key or a set"),
    ],
)
def test_values_that_cannot_be_restored_are_refused_by_path(value: Any, description: str) -> None:
    with pytest.raises(
        FormatError, match=rf"extra\.scheduler\.lr_lambdas\[0\]: got ({description})"
    ):
        encode({"scheduler": {"lr_lambdas": [value]}})


def test_paths_name_any_key() -> None:
    with pytest.raises(FormatError, match=r"rank_extra\['a b'\]\[3\]\.c\[\(1,\)\]: got an object"):
        encode({"a b": {3: {"c": {(1,): object()}}}}, "rank_extra")
    with pytest.raises(FormatError, match=r"^extra: got an object.*remove it from extra"):
        encode(object())
    with pytest.raises(FormatError, match=r"extra\[.*Text'?>?.*got a|extra\.a: got a .*Text"):
        encode({Text("a"): 1})


def test_cycles_and_depths_are_refused() -> None:
    ring: list[Any] = [1]
    ring.append({"a": ring})
    with pytest.raises(FormatError, match=r"extra\[1\]\.a: got a list that contains itself"):
        encode(ring)
    deep: Any = 0
    for _ in range(MAX_DEPTH):
        deep = {1: deep}
    check(deep)
    with pytest.raises(FormatError, match=f"nested deeper than {MAX_DEPTH} levels"):
        encode([deep])
    tree: Any = 0
    for _ in range(MAX_DEPTH + 1):
        tree = [tree]
    with pytest.raises(FormatError, match=f"nested deeper than {MAX_DEPTH} levels"):
        decode(tree, {})


def test_one_object_in_two_places_is_not_a_cycle() -> None:
    shared = [1]
    check([shared, shared, {"a": shared}])


def test_blob_names_are_paths_and_never_clash() -> None:
    value = {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2), 3: b"x" * 2000}}
    blobs = encode(value)[1]
    assert list(blobs) == ["extra/a/b", "extra/a/b~2", "extra/a/3"]
    assert blobs["extra/a/b"] is value["a/b"]
    check(value)


def test_requires_grad_round_trips() -> None:
    assert unpack(pack(torch.ones(2, requires_grad=True) * 2)).requires_grad


@pytest.mark.parametrize("dims", [(1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_transposed_tensors_keep_their_strides(dims: tuple[int, ...]) -> None:
    """Kernels of other strides round differently: a resumed SOAP would drift."""
    value = torch.arange(24.0).reshape(2, 3, 4).permute(dims)
    restored = unpack(pack(value))
    assert torch.equal(restored, value)
    assert restored.stride() == value.stride()
    assert unpack(pack(torch.ones(4, 6)[:, ::2])).is_contiguous(), "gaps are not kept"


def test_tensors_made_from_bytes_own_their_memory() -> None:
    packed = pack([torch.ones(2), np.ones(2)])
    first = unpack(packed)
    first[0].zero_()
    first[1][:] = 0
    assert unpack(packed)[0].tolist() == [1, 1]
    assert unpack(packed)[1].tolist() == [1, 1]


HOSTILE = [
    {"$type": "os.system", "value": "ls"},
    {"$type": 3},
    {"$type": ["tuple"]},
    {"$type": None, "items": []},
    {"$type": "tuple"},
    {"$type": "tuple", "items": {"a": 1}},
    {"$type": "set", "items": [1, 1]},
    {"$type": "set", "items": [[1]]},
    {"$type": "dict", "items": [[1, 2], [1, 3]]},
    {"$type": "dict", "items": [[1]]},
    {"$type": "dict", "items": [[[], 1]]},
    {"$type": "deque", "items": [1, 2], "maxlen": 1},
    {"$type": "deque", "items": [], "maxlen": "a"},
    {"$type": "defaultdict", "items": [], "factory": "eval"},
    {"$type": "defaultdict", "items": []},
    {"$type": "int", "value": "zz"},
    {"$type": "int", "value": 3},
    {"$type": "float", "value": "zz"},
    {"$type": "float", "value": None},
    {"$type": "complex", "value": ["0x1p0"]},
    {"$type": "str", "value": "!"},
    {"$type": "range", "value": ["0x1", "0x2", "0x0"]},
    {"$type": "bytes", "base64": "***"},
    {"$type": "bytes", "blob": "missing"},
    {"$type": "bytes", "blob": []},
    {"$type": "bytes"},
    {"$type": "date", "value": "yesterday"},
    {"$type": "timedelta", "value": [10**30]},
    {"$type": "pathlib", "value": ["Popen", "ls"]},
    {"$type": "numpy.dtype", "value": "O"},
    {"$type": "numpy.dtype", "value": "2,,i4"},  # numpy parses it as Python
    {"$type": "numpy.dtype", "value": "f4"},
    {"$type": "numpy.dtype", "value": "(((((1,)))))f4"},
    {"$type": "numpy.dtype", "value": "i4,i4"},
    {"$type": "numpy.scalar", "value": ["<f4", "AAA="]},
    {"$type": "numpy.scalar", "value": ["O", "AAAAAAAAAAA="]},
    {"$type": "torch.dtype", "value": "Tensor"},
    {"$type": "torch.dtype", "value": 3},
    {"$type": "torch.device", "value": "moon"},
    {"$type": "torch.Size", "items": ["a"]},
    {"$type": "numpy.ndarray", "blob": "four", "dtype": "O", "shape": []},
    {"$type": "numpy.ndarray", "blob": "four", "dtype": "<f4", "shape": [2]},
    {"$type": "numpy.ndarray", "blob": "four", "dtype": "<f4", "shape": [-1]},
    {"$type": "numpy.ndarray", "blob": "four", "dtype": "<f4", "shape": [1.0]},
    {"$type": "numpy.ndarray", "blob": "four", "dtype": 4, "shape": [1]},
    {"$type": "numpy.ndarray", "blob": "none", "dtype": "<f4", "shape": [0, 2**62, 2**62]},
    {"$type": "numpy.ndarray", "blob": "tensor", "dtype": "<f4", "shape": [1]},
    {"$type": "torch.Tensor", "blob": "four", "dtype": "float32", "shape": [2**40]},
    {"$type": "torch.Tensor", "blob": "four", "dtype": "float32", "shape": [1], "order": [1]},
    {"$type": "torch.Tensor", "blob": "four", "dtype": "float32", "shape": [1], "order": 0},
    {"$type": "torch.Tensor", "blob": "four", "dtype": "load", "shape": [1]},
    {"$type": "torch.Tensor", "blob": "four", "dtype": "float32"},
    {"$type": "torch.Tensor", "blob": "none", "dtype": "float32", "shape": [0, 2**62, 2**62]},
    {"$type": "torch.Tensor", "blob": "tensor", "dtype": "float32", "shape": [2]},
    {"$type": "torch.Tensor", "blob": "tensor", "dtype": "float64", "shape": [1]},
]


@pytest.mark.parametrize("node", HOSTILE, ids=str)
def test_trees_not_written_by_encode_are_refused_by_path(node: Any) -> None:
    with pytest.raises(FormatError, match=r"^extra\.a\[0\](\.|\[|:)"):
        decode({"a": [node]}, {"four": bytes(4), "none": b"", "tensor": torch.zeros(1)})


def repacked(head: object, rest: bytes = b"") -> bytes:
    text = json.dumps(head).encode()
    return b"UCPACK01" + struct.pack("<Q", len(text)) + text + rest


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (b"", "expected a packed value"),
        (b"UCPACK02" + bytes(8), "expected a packed value"),
        (b"UCPACK01" + bytes(7), "expected a packed value"),
        (b"UCPACK01" + bytes(8), "header of the packed value"),
        (b"UCPACK01" + b"\xff" * 8 + b"{}", "header of the packed value"),
        (repacked([]), "header of the packed value"),
        (repacked({"tree": 1}), "header of the packed value"),
        (repacked({"tree": 1, "blobs": []}), "header of the packed value"),
        (repacked({"tree": 1, "blobs": {"a": -1}}), "blob 'a': got size -1"),
        (repacked({"tree": 1, "blobs": {"a": True}}), "blob 'a': got size True"),
        (repacked({"tree": 1, "blobs": {"a": 3}}, b"xx"), "from its header"),
        (repacked({"tree": 1, "blobs": {}}, b"xx"), "from its header"),
        (pack(b"x" * 2000)[:-1], "from its header"),
    ],
)
def test_invalid_packed_values_are_refused(packed: bytes, reason: str) -> None:
    with pytest.raises(FormatError, match=f"rank_extra: .*{reason}"):
        unpack(packed)


@given(st.binary(max_size=60))
def test_any_bytes_are_unpacked_or_refused(rest: bytes) -> None:
    for packed in (rest, b"UCPACK01" + rest):
        with pytest.raises(FormatError, match="rank_extra: "):
            unpack(packed)
