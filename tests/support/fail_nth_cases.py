"""The operations whose requests are refused: what they do, and what must be right after them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import NAME, on_node
from tests.support.engine.compressed import trained_state
from tests.support.fail_nth_runs import (
    SECONDS,
    Mode,
    Operation,
    RankCall,
    check_same_tree,
    read_tree,
)
from tests.support.harness import run_ranks
from tests.support.manager.managers import check_state, manager_of, steps_in
from tests.support.manager.managers import state as manager_state
from unified_ckpt.runtime.comm.comm import Comm

SAVE = uc.SaveOptions(
    fsync=True, if_exists="replace", timeout_seconds=SECONDS, write_alignment=4096
)
LOAD = uc.LoadOptions(timeout_seconds=SECONDS)
FULL = {  # rows are extents, unless many ranks share them; columns and "b" go through tiles
    "w": torch.arange(400 * 90, dtype=torch.float32).reshape(400, 90),
    "o": torch.arange(900.0).reshape(30, 30),
    "b": torch.arange(5.0),
}
CUTS = {"w": 0, "o": 1}
EXTRA = bytes(range(256)) * 8


def tensors_of(rank: int, world: int, step: int) -> dict[str, torch.Tensor]:
    return {
        name: (whole + step).chunk(world, CUTS[name])[rank].clone()
        if name in CUTS
        else whole + step
        for name, whole in FULL.items()
    }


def layout_of(world: int) -> uc.Layout:
    return uc.Layout(
        {"dp": world},
        {name: {"dp": dim} for name, dim in CUTS.items()},
        {name: tuple(FULL[name].shape) for name in CUTS},
    )


def place(root: Path, nodes: Sequence[int], rank: int, *, shared: bool) -> Path:
    return root / ("shared" if shared else f"node-{nodes[rank]}") / NAME


def save_step(
    rank: RankCall, path: Path, step: int, *, background: bool = False, **more: Any
) -> None:
    comm, saver = rank.comm, rank.checkpointer
    call = saver.save_async if background else saver.save
    report = call(
        path,
        model=tensors_of(comm.rank, comm.world, step),
        layout=layout_of(comm.world),
        step=step,
        extra={"step": step, "seen": EXTRA},
        rank_extra=(comm.rank, step),
        **{"options": SAVE, **more},
    )
    if background:
        report.result(SECONDS)


def load_step(rank: RankCall, path: Path, target: dict[str, torch.Tensor]) -> int:
    comm = rank.comm
    report = rank.checkpointer.load(path, model=target, layout=layout_of(comm.world), options=LOAD)
    assert report.extra == {"step": report.step, "seen": EXTRA}
    return report.step or 0


def check_tensors(rank: RankCall, target: dict[str, torch.Tensor], step: int) -> None:
    right = tensors_of(rank.comm.rank, rank.comm.world, step)
    for name in right:
        assert torch.equal(target[name], right[name]), name


class InFolders(Operation):
    """An operation on a checkpoint of ranks: on one node, or on several."""

    save_options = SAVE

    def __init__(self, nodes: Sequence[int], *, shared: bool = True) -> None:
        self.nodes, self.shared = nodes, shared

    def path(self, rank: RankCall) -> Path:
        return place(rank.root, self.nodes, rank.comm.rank, shared=self.shared)

    def prepare(self, root: Path) -> None:
        def act(comm: Comm) -> None:
            with on_node(comm, self.nodes) as checkpointer:
                rank = RankCall(comm, root, checkpointer)
                save_step(rank, self.path(rank), 1, options=self.save_options)

        run_ranks(len(self.nodes), act)


class Save(InFolders):
    """Replace a checkpoint of step 1 by one of step 2."""

    def __init__(
        self, nodes: Sequence[int], *, shared: bool = True, background: bool = False
    ) -> None:
        super().__init__(nodes, shared=shared)
        self.background = background

    def run(self, rank: RankCall) -> None:
        save_step(rank, self.path(rank), 2, background=self.background)

    def check(self, rank: RankCall) -> None:
        target = tensors_of(rank.comm.rank, rank.comm.world, -7)
        assert load_step(rank, self.path(rank), target) == 2
        check_tensors(rank, target, 2)


class Load(InFolders):
    """Load a checkpoint of step 1 in the layout of the save."""

    unknown_cause = "the rank does not answer"

    def start(self, rank: RankCall) -> dict[str, torch.Tensor]:
        return tensors_of(rank.comm.rank, rank.comm.world, -7)

    def run(self, rank: RankCall) -> None:
        load_step(rank, self.path(rank), rank.state)

    def check(self, rank: RankCall) -> None:
        check_tensors(rank, rank.state, 1)

    def check_unchanged(self, rank: RankCall, error: BaseException) -> None:
        if "the target holds a mix of old and new bytes and is unusable" not in str(error):
            check_tensors(rank, rank.state, -7)


class Grow(Operation):
    """Load a linear layer with more rows, and its optimizer state, which does not exist yet."""

    options = LOAD.model_copy(
        update={"source": uc.SourceOptions(rename=[{"match": ["weight", "bias"], "pad": 0}])}
    )

    def prepare(self, root: Path) -> None:
        model = torch.nn.Linear(6, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(6)).sum().backward()
        optimizer.step()
        uc.save(root / NAME, model=model, optimizer=optimizer, step=1)

    def start(self, rank: RankCall) -> Any:
        model = torch.nn.Linear(6, 9)
        optimizer = torch.optim.AdamW(model.parameters())
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return model, optimizer, before

    def run(self, rank: RankCall) -> None:
        model, optimizer, _ = rank.state
        rank.checkpointer.load(
            rank.root / NAME, model=model, optimizer=optimizer, options=self.options
        )

    def check(self, rank: RankCall) -> None:
        model, optimizer, before = rank.state
        with uc.open(rank.root / NAME) as saved:
            weight = saved["model"]["weight"][...]
            moment = saved["optimizer"]["weight/exp_avg"][...]
        grown = optimizer.state[model.weight]["exp_avg"]
        assert torch.equal(model.weight[:4], weight)
        assert torch.equal(model.weight[4:], before["weight"][4:])
        assert torch.equal(grown[:4], moment)
        assert not grown[4:].any()

    def check_unchanged(self, rank: RankCall, error: BaseException) -> None:
        model, optimizer, before = rank.state
        if "is unusable" not in str(error):
            assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
            assert not optimizer.state


def check_report(problems: Sequence[str]) -> None:
    """Raise what a report says, as a caller would."""
    if problems:
        raise uc.CheckpointError("; ".join(problems))


class Verify(Operation):
    """Compare all digests of a checkpoint."""

    def prepare(self, root: Path) -> None:
        uc.save(root / NAME, model=tensors_of(0, 1, 1), extra={"seen": EXTRA}, options=SAVE)

    def run(self, rank: RankCall) -> None:
        check_report(uc.verify(rank.root / NAME, deep=True).problems)

    def check(self, rank: RankCall) -> None:
        """All is said by the report."""


class Repair(InFolders):
    """Repair a file and an index from a copy of the folder, or of another node."""

    leaves_files = False  # each file is as it was or repaired
    unknown_cause = "the rank does not answer"

    save_options = SAVE.model_copy(update={"node_copies": 2})

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        shutil.copytree(root / "node-0", root / "copy")
        file = next((root / "node-0" / NAME).glob("model*.safetensors"))
        file.write_bytes(file.read_bytes()[:-5] + b"wrong")
        next((root / "node-0" / NAME).glob("model*.index.json")).unlink()
        shutil.copytree(root / "node-0", root / "damaged")

    def run(self, rank: RankCall) -> None:
        if len(self.nodes) == 1:
            reports = (uc.repair(self.path(rank), [rank.root / "copy" / NAME]),)
        else:
            reports = rank.checkpointer.session.repair(self.path(rank))
        problems = [
            f"{report.path}: {problem}" for report in reports for problem in report.problems
        ]
        notes = [note for report in reports for note in report.notes]
        check_report([*problems, *notes] if problems else [])

    def check(self, rank: RankCall) -> None:
        if rank.comm.rank == 0:
            check_same_tree(read_tree(rank.root / "copy"), read_tree(rank.root / "node-0"))

    def check_unchanged(self, rank: RankCall, error: BaseException) -> None:
        if rank.comm.rank == 0:
            good, bad, now = (read_tree(rank.root / name) for name in ("copy", "damaged", "node-0"))
            for name, body in now.items():
                assert body in (good.get(name), bad.get(name)), f"{name} is neither"
            assert bad.keys() <= now.keys()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Convert(Operation):
    """Write a checkpoint in another form; `source` and `target` are names in the root."""

    def __init__(
        self, source: Sequence[str], target: str, *, world: int = 1, **options: Any
    ) -> None:
        self.nodes = (0,) * world
        self.source, self.target, self.options = source, target, options

    def prepare(self, root: Path) -> None:
        state = trained_state({"wide": (130, 130), "lone": (70,), "tiny": (3, 4)})
        uc.save(root / "unified", **state, extra={"seen": EXTRA}, step=1, options=SAVE)
        InFolders((0, 1), shared=False).prepare(root)
        for name in self.source:
            if name in FORMS:
                uc.convert(root / "unified", root / name, **FORMS[name])
        uc.convert(
            [root / name for name in self.source], root / f"right-{self.target}", **self.options
        )

    def start(self, rank: RankCall) -> None:
        """Free the name; the formats of others are never replaced."""
        target = rank.root / self.target
        if rank.comm.rank == 0 and target.is_dir():
            shutil.rmtree(target)
        elif rank.comm.rank == 0:
            target.unlink(missing_ok=True)

    def run(self, rank: RankCall) -> None:
        uc.convert(
            [rank.root / name for name in self.source],
            rank.root / self.target,
            group=rank.comm,  # type: ignore[arg-type]
            timeout_seconds=SECONDS,
            **self.options,
        )

    def check(self, rank: RankCall) -> None:
        if rank.comm.rank == 0:
            path, right_path = (rank.root / f"{name}{self.target}" for name in ("", "right-"))
            with uc.open(path) as got, uc.open(right_path) as right:
                assert sorted(got) == sorted(right)
                for part in right:
                    assert sorted(got[part]) == sorted(right[part])
                    for name in right[part]:
                        first, second = got[part][name][...], right[part][name][...]
                        assert first.dtype == second.dtype
                        assert bits(first) == bits(second)


FORMS: dict[str, dict[str, Any]] = {
    "dcp": {"to": "dcp"},
    "torch.pt": {"to": "torch"},
    "compressed": {"compression": "O2", "compare": False},
}


class ManagerSave(Operation):
    """Save a step with a manager that keeps two."""

    leaves_files = False

    def prepare(self, root: Path) -> None:
        for step in (1, 2):
            uc.save(root / f"checkpoint-{step}", step=step, **manager_state(step), options=SAVE)

    def run(self, rank: RankCall) -> None:
        options = {"keep_latest": 2, "retries": 0, "raise_after": 1, "save_options": SAVE}
        with manager_of(rank.comm, rank.root, **options) as manager:
            manager.save(3, force=True, **manager_state(3))

    def check(self, rank: RankCall) -> None:
        if rank.comm.rank == 0:
            assert {2, 3} <= set(steps_in(rank.root))  # the oldest may remain until the next save
            assert uc.verify(rank.root / "checkpoint-3", deep=True).ok

    def check_unchanged(self, rank: RankCall, error: BaseException) -> None:
        """No step is lost, and nothing hidden remains."""
        if rank.comm.rank == 0:
            assert {1, 2} <= set(steps_in(rank.root))
            assert rank.mode is Mode.LASTING or not list(rank.root.glob(".unified-*-*"))


class ManagerRestore(Operation):
    """Restore the newest step, never an older one because the newest could not be read."""

    leaves_files = False  # the file of events

    def prepare(self, root: Path) -> None:
        for step in (1, 2):
            uc.save(root / f"checkpoint-{step}", step=step, **manager_state(step), options=SAVE)

    def start(self, rank: RankCall) -> Any:
        return manager_state(0)

    def run(self, rank: RankCall) -> None:
        with manager_of(rank.comm, rank.root, keep_latest=2, save_options=SAVE) as manager:
            assert manager.restore(**rank.state).step == 2

    def check(self, rank: RankCall) -> None:
        check_state(rank.state, 2)


OPERATIONS: dict[str, Operation] = {
    "save": Save((0,)),
    "save on 2 ranks": Save((0, 0)),
    "save on 4 ranks": Save((0, 0, 0, 0)),
    "save on 2 nodes": Save((0, 0, 1, 1)),
    "save to 2 folders": Save((0, 0, 1, 1), shared=False),
    "save in the background": Save((0,), background=True),
    "save in the background on 2 ranks": Save((0, 0), background=True),
    "load": Load((0,)),
    "load on 2 ranks": Load((0, 0)),
    "load on 2 nodes": Load((0, 1)),
    "load from 2 folders": Load((0, 1), shared=False),
    "load and grow": Grow(),
    "verify": Verify(),
    "repair": Repair((0,), shared=False),
    "repair of 2 nodes": Repair((0, 1), shared=False),
    "compress": Convert(["unified"], "new", compression="O2", compare=False),
    "decompress": Convert(["compressed"], "new"),
    "compress on 2 ranks": Convert(["unified"], "new", world=2, compression="O2", compare=False),
    "convert to torch": Convert(["unified"], "new.pt", to="torch"),
    "convert to DCP": Convert(["unified"], "new", to="dcp"),
    "convert from torch": Convert(["torch.pt"], "new"),
    "convert from DCP": Convert(["dcp"], "new"),
    "merge": Convert([f"node-0/{NAME}", f"node-1/{NAME}"], "new"),
    "save by a manager": ManagerSave(),
    "restore by a manager": ManagerRestore(),
}
