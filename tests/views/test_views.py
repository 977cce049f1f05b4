"""Views of a source: loaded by any ranks, on several nodes, from damaged files, nested."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.harness import make_checkpointer, try_ranks
from tests.support.refusals import same_error
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES
from unified_ckpt.views.materialize import CHUNK_NBYTES

QUICK = uc.SaveOptions(fsync=False)
TRANSPOSE = '[[rules]]\nmatch = "w"\nto = "v"\nsteps = [{permute = [1, 0]}]\n'


def load_options(path: Path, rules: str) -> uc.LoadOptions:
    path.write_text(rules)
    return uc.LoadOptions(source=uc.SourceOptions(rename=str(path)), timeout_seconds=30)


def test_rules_missing_on_one_rank_fail_all_ranks(tmp_path: Path) -> None:
    uc.save(tmp_path / "c", model={"w": torch.ones(3, 2)}, options=QUICK)
    options = [
        load_options(tmp_path / "r.toml", TRANSPOSE),
        uc.LoadOptions(
            source=uc.SourceOptions(rename=str(tmp_path / "none.toml")), timeout_seconds=30
        ),
    ]
    targets = [torch.zeros(2, 3) for _ in options]

    def act(comm: Comm) -> None:
        with make_checkpointer(comm) as checkpointer:
            checkpointer.load(
                tmp_path / "c", model={"v": targets[comm.rank]}, options=options[comm.rank]
            )

    same_error(try_ranks(2, act), uc.NotFoundError, r"none.toml: cannot be read")
    assert not any(target.any() for target in targets)


def test_several_chunks_and_any_byte_range(tmp_path: Path) -> None:
    rows = CHUNK_NBYTES // 4 // 1000 + 13
    w = torch.arange(rows * 1000, dtype=torch.int32).view(rows, 1000)
    uc.save(tmp_path / "c", model={"w": w}, options=QUICK)
    load_options(tmp_path / "r.toml", TRANSPOSE)
    with uc.open(
        tmp_path / "c", options=uc.SourceOptions(rename=str(tmp_path / "r.toml"))
    ) as opened:
        expected = w.T.contiguous().numpy().tobytes()
        for start, count in [
            (0, 9),
            (len(expected) - 5, 5),
            (CHUNK_NBYTES - 6, 13),
            (4001, 100_000),
        ]:
            buffer = bytearray(count)
            opened.source.read_into(("model", "v"), start, memoryview(buffer))
            assert bytes(buffer) == expected[start : start + count]
        assert opened["model"]["v"][7, 5:8].tolist() == [5007, 6007, 7007]


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_dtype_is_permuted_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    kind = TORCH_DTYPES[dtype]
    w = torch.randint(0, 2, (6, 10 * kind.itemsize), dtype=torch.uint8).view(kind)
    uc.save(tmp_path / "c", model={"w": w}, options=QUICK)
    target = torch.zeros(10, 6 * kind.itemsize, dtype=torch.uint8).view(kind)
    options = load_options(tmp_path / "r.toml", TRANSPOSE)
    if dtype == "F4":
        with pytest.raises(uc.FormatError, match="dtype F4 has two elements in a byte"):
            uc.load(tmp_path / "c", model={"v": target}, options=options)
        return
    uc.load(tmp_path / "c", model={"v": target}, options=options)
    bits = w.view(torch.uint8).view(6, 10, kind.itemsize)
    assert torch.equal(target.view(torch.uint8).view(10, 6, kind.itemsize), bits.transpose(0, 1))


def test_open_checkpoint_is_loaded_under_its_options(tmp_path: Path) -> None:
    w = torch.randn(3, 2)
    uc.save(tmp_path / "c", model={"w": w}, options=QUICK)
    target = torch.zeros(2, 3)
    with uc.open(tmp_path / "c") as opened:
        uc.load(opened, model={"v": target}, options=load_options(tmp_path / "r.toml", TRANSPOSE))
    assert torch.equal(target, w.T)


def test_optimizer_without_state_stays_empty(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3, bias=False)
    uc.save(
        tmp_path / "c",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        options=QUICK,
    )
    target = torch.nn.ParameterDict({"v": torch.zeros(2, 3)})
    fresh = torch.optim.SGD(target.parameters(), lr=0.1)
    uc.load(
        tmp_path / "c",
        model=target,
        optimizer=fresh,
        options=load_options(tmp_path / "r.toml", TRANSPOSE.replace('"w"', '"weight"')),
    )
    assert torch.equal(target["v"], model.weight.T)
    assert fresh.param_groups[0]["lr"] == 0.5
