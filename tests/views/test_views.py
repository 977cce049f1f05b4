"""Views of a source: loaded by any ranks, on several nodes, from damaged files, nested."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.refusals import same_error
from tests.support.simulated_nodes import folder_of, save_all
from unified_ckpt.engine.source.protocol import SourceMetadata
from unified_ckpt.engine.source.view import SourceView
from unified_ckpt.format.renames import Renames, Rule
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES
from unified_ckpt.testing import make_checkpointer, run_ranks, try_ranks
from unified_ckpt.views.derived_storage import CHUNK_NBYTES
from unified_ckpt.views.rename_rules import apply_renames
from unified_ckpt.views.shards import ShardedSource, TensorShard, sharded_tensor

QUICK = uc.SaveOptions(fsync=False)
TURN = '[[rules]]\nmatch = "w"\nto = "v"\nsteps = [{permute = [1, 0]}]\n'


def through(path: Path, rules: str) -> uc.LoadOptions:
    path.write_text(rules)
    return uc.LoadOptions(source=uc.SourceOptions(rename=str(path)), timeout_seconds=30)


@pytest.mark.parametrize("rule", [{"tp": 0}, {"tp": 1}, {}])
def test_any_ranks_load_slices_of_derived_tensors(tmp_path: Path, rule: dict[str, int]) -> None:
    w = torch.randn(1200, 700)
    uc.save(tmp_path / "c", model={"w": w}, options=QUICK)
    options, layout = (
        through(tmp_path / "r.toml", TURN),
        uc.Layout(mesh={"dp": 2, "tp": 2}, rules={"v": rule}),
    )

    def act(comm: Comm) -> None:
        expected = w.T.chunk(2, rule["tp"])[comm.rank % 2] if rule else w.T
        target = torch.zeros(expected.shape)
        with make_checkpointer(comm) as checkpointer:
            checkpointer.load(tmp_path / "c", model={"v": target}, layout=layout, options=options)
        assert torch.equal(target, expected)

    run_ranks(4, act)


def test_rules_missing_on_one_rank_fail_all_ranks(tmp_path: Path) -> None:
    uc.save(tmp_path / "c", model={"w": torch.ones(3, 2)}, options=QUICK)
    options = [
        through(tmp_path / "r.toml", TURN),
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


def test_checkpoint_on_several_nodes(tmp_path: Path) -> None:
    w = torch.randn(400, 900)
    layout = uc.Layout(mesh={"tp": 2}, rules={"w": {"tp": 0}})
    save_all(tmp_path, [0, 1], lambda rank: {"w": w.chunk(2)[rank].clone()}, layout=layout)
    target = torch.zeros(900, 400)
    uc.load(
        [folder_of(tmp_path, 0), folder_of(tmp_path, 1)],
        model={"v": target},
        options=through(tmp_path / "r.toml", TURN),
    )
    assert torch.equal(target, w.T)


@pytest.mark.parametrize(
    "rules", [TURN, TURN.replace("permute = [1, 0]", "reshape = [-1]")], ids=["made", "in place"]
)
def test_damage_is_found_through_a_view(tmp_path: Path, rules: str) -> None:
    uc.save(tmp_path / "c", model={"w": torch.randn(600, 700)}, options=QUICK)
    file = next((tmp_path / "c").glob("model*.safetensors"))
    with file.open("r+b") as opened:
        opened.seek(-1_000_000, os.SEEK_END)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 1]))
    with pytest.raises(uc.IntegrityError, match=r"model:[wv]"):
        uc.load(
            tmp_path / "c",
            model={"v": torch.zeros(700, 600).reshape((700, 600) if rules == TURN else (-1,))},
            options=through(tmp_path / "r.toml", rules),
        )


def test_nested_views_have_distinct_virtual_files() -> None:
    """Each view has virtual files, whose names the view below may use too."""
    tensors = {name: torch.randn(4, 6) for name in "ab"}
    sharded = {
        ("model", name): sharded_tensor(
            torch.float32,
            (4, 6),
            [TensorShard(uc.core.sharding.boxes.full_box((4, 6)), lambda t=t: t, name)],
        )
        for name, t in tensors.items()
    }
    source = ShardedSource("folder", sharded, format="test", metadata=SourceMetadata())
    swap = Renames(
        rules=(
            Rule(match=("a",), to="b", steps=({"permute": (1, 0)},)),
            Rule(match=("b",), to="a", steps=({"permute": (1, 0)},)),
        )
    )
    view = apply_renames(apply_renames(apply_renames(source, swap), Renames()), swap)
    target = {name: torch.zeros(4, 6) for name in "ab"}
    uc.load(SourceView(view), model=target)
    assert all(torch.equal(target[name], tensors[name]) for name in "ab")
    both = apply_renames(
        apply_renames(source, Renames(rules=(Rule(match=("a", "b"), concat=1, to="a"),))),
        Renames(rules=(Rule(match=("a",), split={"dim": 1}, to=("a", "b")),)),
    )
    assert all(
        torch.equal(SourceView(both)["model"][name][1:3], tensors[name][1:3]) for name in "ab"
    )


def test_several_chunks_and_any_byte_range(tmp_path: Path) -> None:
    rows = CHUNK_NBYTES // 4 // 1000 + 13
    w = torch.arange(rows * 1000, dtype=torch.int32).view(rows, 1000)
    uc.save(tmp_path / "c", model={"w": w}, options=QUICK)
    through(tmp_path / "r.toml", TURN)
    with uc.open(
        tmp_path / "c", options=uc.SourceOptions(rename=str(tmp_path / "r.toml"))
    ) as opened:
        catalog = opened.source.catalog([("model", "v")])
        location, expected = catalog.locations["model", "v"], w.T.contiguous().numpy().tobytes()
        for start, count in [
            (0, 9),
            (len(expected) - 5, 5),
            (CHUNK_NBYTES - 6, 13),
            (4001, 100_000),
        ]:
            buffer = bytearray(count)
            catalog.storage.read_at(location.file, location.start + start, memoryview(buffer))
            assert bytes(buffer) == expected[start : start + count]
        assert opened["model"]["v"][7, 5:8].tolist() == [5007, 6007, 7007]


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_dtype_is_permuted_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    kind = TORCH_DTYPES[dtype]
    w = torch.randint(0, 2, (6, 10 * kind.itemsize), dtype=torch.uint8).view(kind)
    uc.save(tmp_path / "c", model={"w": w}, options=QUICK)
    target = torch.zeros(10, 6 * kind.itemsize, dtype=torch.uint8).view(kind)
    options = through(tmp_path / "r.toml", TURN)
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
        uc.load(opened, model={"v": target}, options=through(tmp_path / "r.toml", TURN))
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
        options=through(tmp_path / "r.toml", TURN.replace('"w"', '"weight"')),
    )
    assert torch.equal(target["v"], model.weight.T)
    assert fresh.param_groups[0]["lr"] == 0.5
