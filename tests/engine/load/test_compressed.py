"""What a compressed save gives back: the same state on any layout, any number of times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.compressed_cases import MOMENTS, compressed_cases, stored_tensors
from tests.support.oracles import Array
from tests.support.reshard_cases import Case, bits, root
from tests.support.simulated_nodes import SAVE, load_case, save_case, states
from tests.support.torch_training import train
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
@settings(max_examples=15)
def test_generations_on_other_layouts_store_the_same_bytes(
    root: Path, case: Case, compression: str
) -> None:
    check_generations(root, case, compression)


@pytest.mark.slow
@given(compressed_cases(max_world=6, loads=9), st.sampled_from(["lossless", "O1", "O2"]))
@settings(max_examples=40)
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


@given(compressed_cases(max_world=4))
@settings(max_examples=10)
def test_nodes_with_folders_of_their_own_store_plain_tensors(root: Path, case: Case) -> None:
    if case.saved.world < 2:
        return
    nodes = [int(rank > 0) for rank in range(case.saved.world)]
    with TemporaryDirectory(dir=root) as name:
        options = SAVE.model_copy(update={"compression": "O2"})
        reports = save_case(case, Path(name), nodes, options=options)
        assert {report.encoded_nbytes for report in reports} == {0}
        paths = [Path(name) / f"node-{node}" / "checkpoint-1" for node in (0, 1)]
        for report in load_case(case, case.saved, nodes, {0: paths, 1: paths}):
            assert isinstance(report, uc.LoadReport), report


# training goes on


def small_net(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    attention = torch.nn.TransformerEncoderLayer(32, 4, 80, dropout=0.0, batch_first=True)
    linear = torch.nn.Sequential(torch.nn.Linear(32, 96), torch.nn.Tanh(), torch.nn.LayerNorm(96))
    body, length = (attention, 32) if kind == "attention" else (linear, 96)
    net = torch.nn.Sequential(body, torch.nn.Linear(length, 4))
    return net, torch.optim.AdamW(net.parameters(), lr=3e-3)


def loss_of(net: torch.nn.Module, draw: torch.Generator) -> torch.Tensor:
    inputs = torch.randn(4, 8, 32, generator=draw)
    return (net(inputs) - torch.sin(inputs[..., :4])).square().mean()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small matrices take ten times longer on several threads of a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("compression", "deviation"), [("lossless", 0.0), ("O1", 0.01), ("O2", 0.03)]
)
@pytest.mark.parametrize("kind", ["linear", "attention"])
def test_training_resumes(tmp_path: Path, kind: str, compression: str, deviation: float) -> None:
    """The loss curve is that of uninterrupted training, or near it."""
    net, optimizer = small_net(kind)
    train(net, optimizer, loss_of, 0, 60)
    options = uc.SaveOptions(model_dtype="bfloat16", compression=compression)
    uc.save(tmp_path / "c", model=net, optimizer=optimizer, options=options)
    expected = train(net, optimizer, loss_of, 60, 200)
    net, optimizer = small_net(kind)
    uc.load(tmp_path / "c", model=net, optimizer=optimizer)
    losses = train(net, optimizer, loss_of, 60, 200)
    assert np.abs(np.divide(losses, expected) - 1).max() <= deviation
