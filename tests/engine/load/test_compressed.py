"""What a compressed save gives back: the same state on any layout, any number of times."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import SAVE, load_case, save_case, states
from tests.support.engine.compressed import DIGESTS, stored_contents
from tests.support.engine.compressed_cases import (
    MOMENTS,
    compressed_cases,
    expected_tensors,
    stored_on_nodes,
    stored_tensors,
)
from tests.support.engine.reshard_cases import Case, bits, root
from tests.support.oracles import Array
from tests.support.torch_training import sine_loss, small_net, train
from unified_ckpt.core.sharding.declarations import Key

__all__ = ["root", "states"]  # fixtures

MAX_ERROR = {"O1": 1 / 8, "O2": 1}  # of a moment, relative to the largest of its row


def generation(case: Case, folder: Path, compression: str) -> Path:
    """Save the case, and return the checkpoint."""
    nodes = [0] * case.saved.world
    save_case(case, folder, nodes, options=SAVE.model_copy(update={"compression": compression}))
    return folder / "node-0" / "checkpoint-1"


def opened_arrays(path: Path, case: Case) -> dict[Key, Array]:
    """All tensors of a checkpoint as bits, read one by one."""
    arrays = {}
    with uc.open(path) as opened:
        for (part, fqn), array in case.arrays.items():
            data = bits(opened[part][fqn][...])
            arrays[part, fqn] = np.frombuffer(data, array.dtype).reshape(array.shape)
    return arrays


def check_decoded(case: Case, decoded: dict[Key, Array], path: Path, compression: str) -> None:
    """Masters are the same bits. Moments are near, and the same where they are exceptions."""
    _, exceptions = stored_tensors(path)
    for key, array in case.arrays.items():
        part, fqn = key
        if fqn.rpartition("/")[2] not in MOMENTS or compression == "lossless":
            assert np.array_equal(decoded[key], array), key
            continue
        listed = np.frombuffer(exceptions.get(part, {}).get(f"{fqn}.index", b""), "<i8")
        assert np.array_equal(decoded[key].reshape(-1)[listed], array.reshape(-1)[listed])
        values, original = (a.copy().view(np.float32) for a in (decoded[key], array))
        values.reshape(-1)[listed] = original.reshape(-1)[listed] = 0
        if not np.array_equal(decoded[key], array):  # as it is where the tensor is stored plain
            bound = MAX_ERROR[compression] * np.abs(original).max(-1, keepdims=True)
            assert (np.abs(values - original) <= bound).all(), key


@given(compressed_cases(max_world=4, loads=2), st.sampled_from(["lossless", "O1", "O2"]))
@settings(max_examples=8)
def test_generations_on_other_layouts_store_the_same_bytes(
    root: Path, case: Case, compression: str
) -> None:
    check_generations(root, case, compression)


@pytest.mark.slow
@given(compressed_cases(max_world=6, loads=9), st.sampled_from(["lossless", "O1", "O2"]))
@settings(max_examples=12)
def test_ten_generations_store_the_same_bytes(root: Path, case: Case, compression: str) -> None:
    check_generations(root, case, compression)


def check_generations(root: Path, case: Case, compression: str) -> None:
    """Each generation loads the last one into its layout, compares every byte, and saves."""
    with TemporaryDirectory(dir=root) as name:
        path = generation(case, Path(name) / "0", compression)
        first = stored_tensors(path)
        decoded = opened_arrays(path, case)
        check_decoded(case, decoded, path, compression)
        for number, layout in enumerate(case.loaded, 1):
            case = replace(case, arrays=decoded, saved=layout)
            for report in load_case(case, layout, [0] * layout.world, {0: [path]}):
                assert isinstance(report, uc.LoadReport), report
            path = generation(case, Path(name) / str(number), compression)
            assert stored_tensors(path) == first


@given(compressed_cases(max_world=4), st.sampled_from(["lossless", "O1", "O2"]))
@settings(max_examples=10)
def test_a_conversion_stores_the_same_bytes(root: Path, case: Case, compression: str) -> None:
    with TemporaryDirectory(dir=root) as name:
        plain = generation(case, Path(name) / "plain", "none")
        options = {"compression": compression, "fsync": False, "compare": False}
        uc.convert(plain, Path(name) / "converted", **options)
        saved = generation(case, Path(name) / "saved", compression)
        assert stored_tensors(Path(name) / "converted") == stored_tensors(saved)
        converted, contents = map(stored_contents, (Path(name) / "converted", saved))
        assert converted[DIGESTS] == contents[DIGESTS]


# folders of nodes


def is_cut(spans: set[str]) -> bool:
    """Whether a shard has parts of rows."""
    last_dims = [re.split("[:/]", span.rpartition(",")[2]) for span in spans if span]
    return any(low != "0" or high != size for low, high, size in last_dims)


def check_node_folders(case: Case, folders: Sequence[Path], compression: str) -> int:
    """Compare all that the folders store with what one encoder of whole tensors gives, but for
    tensors of which some folder has no whole rows, and masters without equal boxes of the model.
    Return how many tensors these are.
    """
    stored, exceptions, spans = stored_on_nodes(folders)
    expected, expected_exceptions = expected_tensors(case.arrays, compression)
    plain = 0
    for (part, fqn), array in case.arrays.items():
        key, scale = (part, fqn), (part, f"{fqn}.scale")
        if stored[key] == expected[key] and stored.get(scale) == expected.get(scale):
            continue
        assert stored[key] == array.tobytes(), key
        assert scale not in stored
        unlike = part == "master_weights" and (
            spans[key] != spans["model", fqn] or ("" in spans[key] and len(spans[key]) > 1)
        )
        assert is_cut(spans[key]) or unlike, key
        plain += 1
        expected.pop(scale, None)
        expected[key] = array.tobytes()
        for suffix in ("index", "value"):
            expected_exceptions.get(part, {}).pop(f"{fqn}.{suffix}", None)
    assert stored == expected
    assert exceptions == {part: found for part, found in expected_exceptions.items() if found}
    return plain


@st.composite
def cases_on_nodes(draw: st.DrawFn, *, max_world: int) -> tuple[Case, list[int], list[int]]:
    """A case to save and to load, and the node of each rank of both."""
    case = draw(compressed_cases(max_world=max_world, loads=1))
    worlds = case.saved.world, case.loaded[0].world
    nodes, loading = ([draw(st.integers(0, 2)) for _ in range(world)] for world in worlds)
    return case, nodes, loading


@pytest.mark.slow
@given(
    cases_on_nodes(max_world=6),
    st.sampled_from(["lossless", "O1", "O2"]),
    st.sampled_from([1, 2]),
    st.integers(0, 2),
)
@settings(max_examples=25)
def test_nodes_store_the_same_bytes(
    root: Path, drawn: tuple[Case, list[int], list[int]], compression: str, copies: int, away: int
) -> None:
    """Any nodes save compressed folders of their own, and one node may be lost. Merges and loads of
    the rest give the bytes of a save to one folder.
    """
    case, nodes, loading = drawn
    present = sorted(set(nodes))
    if len(present) < 2:
        return
    with TemporaryDirectory(dir=root) as name:
        node_root, update = Path(name) / "nodes", {"compression": compression}
        options = SAVE.model_copy(update={**update, "node_copies": copies})
        reports = save_case(case, node_root, nodes, options=options)
        folders = [node_root / f"node-{node}" / "checkpoint-1" for node in present]
        plain = check_node_folders(case, folders, compression)
        assert {report.plain_tensors for report in reports} == {plain}
        for folder in folders:
            assert uc.verify(folder, deep=True).ok
        shared = generation(case, Path(name) / "shared", compression)
        decoded = opened_arrays(shared, case)
        uc.convert(folders, Path(name) / "merged", compare=False, fsync=False, **update)
        if copies == 2:  # any node may be lost
            shutil.rmtree(folders.pop(away % len(folders)))
        uc.convert(folders, Path(name) / "decoded", compare=False, fsync=False)
        loaded = replace(case, arrays=opened_arrays(Path(name) / "decoded", case))
        for key, array in loaded.arrays.items():
            assert any(np.array_equal(array, a[key]) for a in (decoded, case.arrays)), key
        assert stored_tensors(Path(name) / "merged") == stored_tensors(shared)
        paths = dict.fromkeys(set(loading), folders)
        for report in load_case(loaded, case.loaded[0], loading, paths):
            assert isinstance(report, uc.LoadReport), report


# training goes on


@pytest.mark.parametrize(
    ("compression", "deviation"),
    [("lossless", 0.0), pytest.param("O1", 0.01, marks=pytest.mark.slow), ("O2", 0.03)],
)
@pytest.mark.parametrize("kind", ["linear", pytest.param("attention", marks=pytest.mark.slow)])
def test_training_resumes(tmp_path: Path, kind: str, compression: str, deviation: float) -> None:
    """The loss curve is that of uninterrupted training, or near it."""
    net, optimizer = small_net(kind)
    train(net, optimizer, sine_loss, 0, 60)
    options = uc.SaveOptions(model_dtype="bfloat16", compression=compression)
    uc.save(tmp_path / "c", model=net, optimizer=optimizer, options=options)
    expected = train(net, optimizer, sine_loss, 60, 200)
    net, optimizer = small_net(kind)
    uc.load(tmp_path / "c", model=net, optimizer=optimizer)
    losses = train(net, optimizer, sine_loss, 60, 200)
    assert np.abs(np.divide(losses, expected) - 1).max() <= deviation
