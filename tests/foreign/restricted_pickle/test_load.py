"""Foreign pickles are read if they hold only allowed classes, else rejected; never executed."""

from __future__ import annotations

import io
import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, date, datetime, timedelta
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.damage import flip
from tests.support.foreign.source_cases import Hostile
from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.foreign.dcp.metadata import read_entries
from unified_ckpt.foreign.restricted_pickle.archive import MappedFile
from unified_ckpt.foreign.restricted_pickle.limits import check_tree_size
from unified_ckpt.foreign.restricted_pickle.load import (
    load_pickle,
    load_torch,
    load_torch_part,
    read_torch,
)
from unified_ckpt.foreign.restricted_pickle.opcodes import check_memo_bounds
from unified_ckpt.foreign.restricted_pickle.placeholders import Placeholder, placeholder_class
from unified_ckpt.foreign.restricted_pickle.torch_reader import load_by_torch


class Evaluated:
    def __reduce__(self) -> Any:
        return eval, ("1 + 1",)


@pytest.mark.incident("transformers#43140")
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_hostile_raw_pickle_is_rejected_not_executed(tmp_path: Path, protocol: int) -> None:
    mark, path = tmp_path / "mark", tmp_path / "x.pickle"
    path.write_bytes(
        pickle.dumps({"w": 1, "x": Hostile(mark), "y": [Evaluated(), Hostile(mark)]}, protocol)
    )
    with pytest.raises(FormatError, match=r"not loaded from files(.|\n)*eval(.|\n)*posix.system"):
        load_pickle(str(path), {})
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("value", [{"a": [1]}, {"model": {"a": torch.zeros(2)}}])
def test_error_omits_torch_advice_to_disable_restrictions(tmp_path: Path, value: object) -> None:
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(value))
    with pytest.raises(
        FormatError, match=r"raw.pt: is not a torch.save file(.|\n)*save its tensors with"
    ) as caught:
        load_torch(str(tmp_path / "raw.pt"))
    assert "weights_only" not in str(caught.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_programs_are_rejected_by_name(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    torch.jit.save(torch.jit.script(module), tmp_path / "script.pt")
    with zipfile.ZipFile(tmp_path / "program.pt2", "w") as archive:  # as torch.export.save
        archive.writestr("program/archive_format", "pt2")
    torch.save(module, tmp_path / "module.pt")
    refused = {
        "script.pt": "is TorchScript",
        "program.pt2": "is a torch.export program",
        "module.pt": r"nn\.modules\.linear\.Linear",
    }
    for name, match in refused.items():
        with pytest.raises(
            FormatError, match=rf"{name}: (.|\n)*{match}(.|\n)*save its state_dict"
        ) as caught:
            load_torch(str(tmp_path / name))
        assert "weights_only" not in str(caught.value)


def test_global_name_from_the_memo_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.pickle"
    # "posix" and "system" are put in the memo, used elsewhere, and brought back for STACK_GLOBAL.
    path.write_bytes(b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x940h\x00h\x01\x93\x94.")
    with pytest.raises(FormatError, match=r"posix\.system"):
        load_pickle(str(path), {"builtins.tuple": tuple})


@pytest.mark.parametrize("protocol", [2, 4])
def test_raw_pickle_of_allowed_globals(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "x.pickle"
    value = OrderedDict(a=1, b=OrderedDict(c=(1, 2)))
    path.write_bytes(pickle.dumps(value, protocol))
    assert load_pickle(str(path), {"collections.OrderedDict": OrderedDict}) == value


def test_replaced_unpickler_of_python_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning replaces it while it loads a checkpoint."""
    path = tmp_path / "x.pickle"
    path.write_bytes(pickle.dumps({"a": 1}))
    monkeypatch.setattr(pickle, "Unpickler", type("Other", (pickle._Unpickler,), {}))
    assert load_pickle(str(path), {}) == {"a": 1}


def test_torch_file_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.arange(8.0), "n": np.arange(3), "step": 3}, path)
    value = load_torch(str(path))
    assert value["step"] == 3
    assert np.array_equal(value["n"], np.arange(3))
    with path.open("r+b") as file:  # a mapped tensor shows what is in the file
        file.seek(path.read_bytes().index(torch.arange(8.0).numpy().tobytes()))
        file.write(np.float32(7).tobytes())
    assert value["w"][0] == 7


def packed(path: Path) -> bytes:
    """Return the archive with compressed entries."""
    with (
        zipfile.ZipFile(path) as archive,
        zipfile.ZipFile(path.with_name("packed.pt"), "w", zipfile.ZIP_DEFLATED) as compressed,
    ):
        for info in archive.infolist():
            compressed.writestr(info.filename, archive.read(info))
    return path.with_name("packed.pt").read_bytes()


@pytest.mark.parametrize(
    ("written", "named", "fits"),
    [
        ("rng_state_0.pth", "rng_state_0.pth", True),
        ("rng_state_1.pth", "rng_state_0.pth", False),
        ("optimizer.bin", "optimizer_1.bin", False),
        ("model.pt", "renamed_1.pt", True),  # renamed by a user: no number is replaced by another
        ("optimizer_500.pt", "optimizer.pt", True),  # likewise
        (
            "rng_state_0.pth.tmp",
            "rng_state_0.pth",
            True,
        ),  # written under a temporary name, then renamed
        (None, "rng_state_0.pth", True),  # written to a stream, whose archive has no name
    ],
)
def test_numbered_file_of_another_number_is_rejected(
    tmp_path: Path, written: str | None, named: str, fits: bool
) -> None:
    stream = io.BytesIO()
    torch.save({"a": torch.zeros(2)}, stream if written is None else tmp_path / written)
    (tmp_path / named).write_bytes(
        stream.getvalue() if written is None else (tmp_path / written).read_bytes()
    )
    load_torch(str(tmp_path / named))  # a file of its own may be renamed
    with (
        pytest.raises(FormatError, match=f"{named}: was written as {written}")
        if not fits
        else nullcontext()
    ):
        load_torch(str(tmp_path / named), numbered=True)


def test_compressed_archive_is_rejected(tmp_path: Path) -> None:
    """Compressed bytes were once read as the tensors' values."""
    path = tmp_path / "x.pt"
    torch.save({"w": torch.eye(16), "v": torch.randint(0, 256, (70000,), dtype=torch.uint8)}, path)
    path.write_bytes(packed(path))
    with pytest.raises(
        FormatError,
        match=r"x\.pt: x/data\.pkl: is compressed, expected uncompressed entries",
    ):
        load_torch(str(path))
    with pytest.raises(FormatError, match=r"within y: x/data\.pkl: is compressed"):
        load_torch_part(MappedFile(str(path)), 0, path.stat().st_size, label="within y")


def archive_of(pickled: bytes, storages: dict[str, bytes], path: Path) -> Path:
    """Write an archive as torch.save does, with a pickle of our own."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}/data.pkl", pickled)
        archive.writestr(f"{path.stem}/byteorder", "little")
        archive.writestr(f"{path.stem}/version", "3\n")
        for key, body in storages.items():
            archive.writestr(f"{path.stem}/data/{key}", body)
    return path


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x04tQ"
)


@pytest.mark.parametrize(
    ("view", "is_valid"),
    [
        (b"K\x00(K\x04t(K\x01t\x89N", True),
        (b"K\x01(K\x04t(K\x01t\x89N", False),  # ends beyond the storage
        (b"K\x00(K\x03t(K\x02t\x89N", False),
        (b"J\xff\xff\xff\xff(K\x02t(K\x01t\x89N", False),  # starts before it
    ],
)
def test_views_stay_inside_their_storage(tmp_path: Path, view: bytes, is_valid: bool) -> None:
    pickled = b"\x80\x02}U\x01w" + TENSOR + view + b"tRs."
    body = np.arange(4, dtype="<f4").tobytes()
    path = archive_of(pickled, {"0": body}, tmp_path / "x.pt")
    if is_valid:
        assert read_torch(str(path))["w"].load().tolist() == [0, 1, 2, 3]
        return
    with pytest.raises(FormatError, match=r"x\.pt"):
        read_torch(str(path))


def test_pickle_cannot_set_the_state_of_a_tensor(tmp_path: Path) -> None:
    """Each attempt is left to torch's reader, which knows no state of tensors."""
    pickled = b"\x80\x02}U\x01w" + TENSOR + b"K\x00(K\x04t(K\x01t\x89NtR(U\x03F32(K\x09tNNU\x00tbs."
    path = archive_of(pickled, {"0": bytes(16)}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"x\.pt"):
        read_torch(str(path))


def test_class_of_a_storage_is_not_read_as_text(tmp_path: Path) -> None:
    """No archive of torch.save has such a value; no text may take its place."""
    path = archive_of(b"\x80\x02ctorch\nFloatStorage\n.", {}, tmp_path / "x.pt")
    assert not isinstance(read_torch(str(path)), str)


def test_read_torch_refuses_what_load_torch_refuses(tmp_path: Path) -> None:
    mark, path = tmp_path / "mark", tmp_path / "x.pt"
    torch.save({"w": torch.ones(2), "x": Hostile(mark)}, path)
    for read in (load_torch, read_torch):
        with pytest.raises(FormatError, match=r"not loaded from files(.|\n)*posix\.system"):
            read(str(path))
    assert not mark.exists()


def test_tensors_of_all_kinds_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    path, base = tmp_path / "x.pt", torch.arange(24.0)
    tensors = {
        "view": base.view(4, 6)[1:3, ::2].t(),
        "tied": base,
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "empty": torch.empty(0, 3),
        "complex": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "unsigned": torch.arange(3).to(torch.uint16),
    }
    torch.save({**tensors, "step": 3}, path)
    content = read_torch(str(path))
    assert content.pop("step") == 3
    for name, tensor in tensors.items():
        loaded = content[name].load()
        assert (content[name].shape, loaded.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert loaded.tolist() == tensor.tolist(), name
    assert content["view"].memory[0] == content["tied"].memory[0]


def test_archive_without_checksums_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(8.0)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(load_torch(str(path))["w"], torch.arange(8.0))


def test_bytearray_bomb_is_rejected(tmp_path: Path) -> None:
    """Such a file of 360 bytes once took 4 GiB and 20 s."""
    pickled = (
        b"\x80\x02}(X\x01\x00\x00\x00ac__builtin__\nbytearray\n\x8a\x05"
        + (1 << 20).to_bytes(5, "little")
        + b"\x85Ru."
    )
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name, body in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")):
            archive.writestr(f"x/{name}", body)
    with pytest.raises(
        FormatError,
        match=r"x\.pt: asks for classes .* not loaded from files \(1\):\n  builtins\.bytearray",
    ):
        load_torch(str(path))
    torch.save(
        {"w": torch.zeros(1 << 20), "x": bytearray(3)}, path, _use_new_zipfile_serialization=False
    )
    with pytest.raises(FormatError, match=r"builtins\.bytearray"):
        load_torch(str(path))


def test_archive_with_damaged_end_names_the_file(tmp_path: Path) -> None:
    """A bare zipfile.BadZipFile was once raised."""
    path = tmp_path / "x.pt"
    torch.save({"w": torch.arange(80.0)}, path)
    flip(path, path.read_bytes().rindex(b"PK\x06\x07") + 16, mask=2)  # the number of disks
    with pytest.raises(FormatError, match=r"x\.pt: is damaged, .* multiple disks"):
        load_torch(str(path))


def test_values_that_only_hold_what_they_are_given_are_read(tmp_path: Path) -> None:
    """A job that saves the mean of its losses by numpy could once not continue."""
    values = [
        *(np.mean([1.0, 2.0]), np.float32(0.1), np.int64(-3), np.bool_(True), np.str_("é")),
        *(datetime.now(UTC), timedelta(3, 5), date(2026, 1, 2)),
        *(b"", b"x", frozenset({1, "a"}), range(3, 9, 2), Path("a/b"), PurePosixPath("c")),
    ]
    torch.save({"values": values}, tmp_path / "x.pt")
    loaded = load_torch(str(tmp_path / "x.pt"))["values"]
    assert loaded == values
    assert list(map(type, loaded)) == list(map(type, values))


def test_containers_of_plain_values_are_read(tmp_path: Path) -> None:
    """Such as the window of a loss, which jobs of torch.distributed.checkpoint save."""
    window = deque([1, {"w": torch.arange(3)}], maxlen=4)
    values = [deque(), bytearray(), bytearray(b"\x00\xff"), slice(None), slice(1, None, -2)]
    torch.save({"window": window, "values": values}, tmp_path / "x.pt")
    loaded = load_torch(str(tmp_path / "x.pt"))
    assert loaded["values"] == values
    assert list(map(type, loaded["values"])) == list(map(type, values))
    assert (type(loaded["window"]), loaded["window"].maxlen) == (deque, 4)
    assert loaded["window"][0] == 1
    assert loaded["window"][1]["w"].tolist() == [0, 1, 2]


CONTENT = b"x" * 1000


class Reduced:
    """Pickled as a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "value",
    [
        [Reduced(bytearray, (CONTENT,)) for _ in range(9)],  # one content in the pickle
        Reduced(bytearray, (2_000_000_000,)),
        Reduced(deque, ("items",)),
        Reduced(slice, (["not a number"],)),
    ],
    ids=["bytearray", "length", "deque", "slice"],
)
def test_containers_hold_what_the_pickle_has(tmp_path: Path, value: Any) -> None:
    torch.save({"x": value}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match="not loaded from files"):
        load_torch(str(tmp_path / "x.pt"))


@pytest.mark.parametrize(
    ("make", "argument"),
    [(np.float64(1).__reduce__()[0], np.dtype("V2000000000")), (bytes, 2_000_000_000)],
)
def test_values_without_content_allocate_nothing(tmp_path: Path, make: Any, argument: Any) -> None:
    """The functions themselves would take 2 GB."""

    class Bomb:
        def __reduce__(self) -> Any:
            return make, (argument,)

    torch.save({"x": Bomb()}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"x\.pt: is damaged"):
        load_torch(str(tmp_path / "x.pt"))


def test_placeholders_replace_named_classes(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"args": Namespace(tp=2)}, path)
    with pytest.raises(FormatError, match=r"argparse\.Namespace"):
        load_torch(str(path))
    placeholder = load_torch(str(path), placeholders=["argparse.Namespace"])["args"]
    assert isinstance(placeholder, Placeholder)
    assert placeholder.state == {"tp": 2}


@pytest.mark.parametrize("cut", [0, 10, 100, -10])
def test_damaged_file_names_the_file(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.arange(80.0)}, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(FormatError, match=r"x\.pt"):
        load_torch(str(path))
    with pytest.raises(FormatError, match=r"x\.pt"):
        load_pickle(str(path), {})


def test_globals_that_the_process_allows_are_not_built(tmp_path: Path) -> None:
    """Importing megatron.core allows such classes, under the names of placeholders."""
    classes: list[Any] = [Namespace, SimpleNamespace, PurePosixPath, PosixPath, PureWindowsPath]
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in classes]
    torch.save([*(kind() for kind in classes), torch.ones(1)], tmp_path / "x.pt")
    with torch.serialization.safe_globals(classes):
        before = set(torch.serialization.get_safe_globals())
        loaded = load_torch(str(tmp_path / "x.pt"), placeholders=names)
        assert set(torch.serialization.get_safe_globals()) == before
    assert all(isinstance(item, Placeholder) for item in loaded[:-1])


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"x\.pt"):
        load_torch(str(tmp_path / "x.pt"))


@pytest.mark.parametrize(
    ("put", "why"),
    [
        (b"r\xff\xff\xff\x7f", "got memo index 2147483647"),
        (b"r\xff\xff\xff\0", "got memo index 16777215"),
        (b"p3000000000\n", "got memo index 3000000000"),
        (b"p" + b"9" * 5000 + b"\n", "expected a number"),
        (b"\xff", "byte 3: got 0xff"),
    ],
)
def test_memo_index_bomb_is_rejected(tmp_path: Path, put: bytes, why: str) -> None:
    path = tmp_path / "x.pickle"
    path.write_bytes(b"\x80\x02}" + put + b".")
    with pytest.raises(FormatError, match=rf"x\.pickle: is damaged, or not a pickle: .*{why}"):
        load_pickle(str(path), {})


@pytest.mark.parametrize("protocol", range(6))
def test_check_memo_bounds_accepts_pickles_not_prefixes(protocol: int) -> None:
    value = {
        "a" * 300: [1, -(1 << 70), 1.5, None, True, b"x" * 300, (1, 2, 3, 4), {"b"}],
        "o": OrderedDict(a=Path("x")),
    }
    value |= {str(n): (n,) for n in range(1000)}
    whole = pickle.dumps(value, protocol)
    check_memo_bounds(whole)
    for stop in (0, 1, len(whole) // 2, len(whole) - 1):
        with pytest.raises(FormatError):
            check_memo_bounds(whole[:stop])


@given(st.binary(max_size=60))
def test_check_memo_bounds_of_random_bytes(data: bytes) -> None:
    try:
        check_memo_bounds(data)
    except FormatError:
        return
    assert b"." in data


def shared(levels: int, kind: Callable[[Any, Any], Any]) -> Any:
    """Return a value of which each level contains the previous one twice."""
    nested: Any = "lol"
    for _ in range(levels):
        nested = kind(nested, nested)
    return nested


@pytest.mark.parametrize(
    "kind",
    [lambda a, b: [a, b], lambda a, b: {"a": a, "b": b}, lambda a, b: Namespace(a=a, b=b)],
)
def test_exponential_references_are_rejected(
    tmp_path: Path, kind: Callable[[Any, Any], Any]
) -> None:
    torch.save({"w": torch.ones(2), "x": shared(40, kind)}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"x\.pt: .* branches on .* levels, expected at most"):
        load_torch(str(tmp_path / "x.pt"), placeholders=["argparse.Namespace"])


def test_cycles_are_rejected(tmp_path: Path) -> None:
    cycle: dict[str, Any] = {"w": 1}
    cycle["x"] = [cycle]
    torch.save(cycle, tmp_path / "x.pt")
    with pytest.raises(FormatError, match="contains itself"):
        load_torch(str(tmp_path / "x.pt"))


def test_deep_nesting_is_rejected_sharing_is_not() -> None:
    deep: Any = 1
    for _ in range(300):
        deep = (deep,)
    with pytest.raises(FormatError, match="201 levels"):
        check_tree_size(deep)
    names = [f"name{n}" for n in range(1000)]
    check_tree_size([names, [names, (names, names)]] * 100)
    check_tree_size(shared(20, lambda a, b: [a, b]))


def test_long_shared_list_is_rejected_fast() -> None:
    long = [None] * 1_000_000
    with pytest.raises(FormatError, match="branches"):
        check_tree_size([long] * 1_000_000)


def test_error_does_not_print_the_pickled_value(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(shared(24, lambda a, b: [a, b])))
    with pytest.raises(FormatError) as caught:
        read_entries(str(tmp_path))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("module", ["builtins", "__builtin__"])
def test_members_of_an_enum_by_name(tmp_path: Path, module: str) -> None:
    """As Python 3.11.0 to 3.11.3 pickle them, in raw pickles and in archives."""
    getattr_, path = b"\x80\x02c" + module.encode() + b"\ngetattr\n", tmp_path / "x.pkl"
    member = getattr_ + b"cpkg.mod\nEnum\nU\x04FAST\x86R."
    path.write_bytes(member)
    archive = archive_of(member, {}, tmp_path / "x.pt")
    for loaded in (
        load_pickle(str(path), {"pkg.mod.Enum": placeholder_class("pkg.mod.Enum")}),
        read_torch(str(archive), placeholders=["pkg.mod.Enum"]),
        load_by_torch(str(archive), "x.pt", ["pkg.mod.Enum"]),
    ):
        assert (type(loaded).__name__, loaded.args) == ("Enum", ("FAST",))
    with pytest.raises(FormatError, match=r"pkg\.mod\.Enum"):
        load_pickle(str(path), {})
    other = getattr_ + b"U\x04textU\x05upper\x86R."
    path.write_bytes(other)
    with pytest.raises(FormatError, match="calls getattr, expected only members of an enum"):
        load_pickle(str(path), {})
    with pytest.raises(FormatError, match="calls getattr, expected only members of an enum"):
        read_torch(str(archive_of(other, {}, tmp_path / "y.pt")))
