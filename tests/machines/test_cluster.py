"""A cluster of nodes saves, loses and damages folders, loads, repairs and merges, in any order.

A load returns exactly the bytes of one save, or raises an error and leaves the target as it was.
A failed call leaves every file as it was. Whatever is damaged is found by `verify(deep=True)`, and
`repair` restores what another copy holds.
"""

from __future__ import annotations

import shutil
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)
from typing_extensions import override

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import keys_in_store, on_node
from tests.support.equality import same
from tests.support.harness import FullStorage, try_ranks
from tests.support.machines.cluster_disk import DAMAGES, Damage, Disk, Key, check_content
from tests.support.machines.cluster_model import (
    Tensor,
    as_bytes,
    sentinel,
)
from tests.support.machines.cluster_plans import (
    BACKUP,
    EQUAL,
    LOADS,
    MANIFEST,
    MESHES,
    MISTAKES,
    NAMES,
    OWN,
    SAVES,
    SECONDS,
    SHARED,
    Folder,
    Load,
    Save,
    Saved,
    Session,
    models,
    sessions,
)
from tests.support.machines.cluster_ranks import arguments, extra_of, local, save_rank
from tests.support.machines.machines import run_machine
from tests.support.schedules.ranks import DrawnRanks
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage

REPEATS = 8
MORE_KEYS = 4  # in the store after the last of eight equal calls than after the first

Check = Callable[[Sequence[Any]], None]  # of what the ranks returned or raised


class ClusterMachine(RuleBasedStateMachine):
    """The folders of three nodes, a shared one and backups. `folders`: what was committed where;
    the disk says what has become of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.try_ranks: Callable[..., list[Any]] = try_ranks
        self.barrier: Callable[..., Any] = threading.Barrier
        self.root = Path(mkdtemp(prefix="cluster-"))
        self.disk = Disk(self.root)
        self.targets: dict[int, dict[Tensor, torch.Tensor]] = {}  # by rank, of a load
        self.serial = 0
        self.model: tuple[Tensor, ...] = ()

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @initialize(model=models(), first=sessions(SAVES, 2))
    def start(self, model: tuple[Tensor, ...], first: Session) -> None:
        for place in (*OWN, SHARED, BACKUP):
            (self.root / place).mkdir()
        self.model = model
        self.run(first)

    # sessions

    @rule(plan=sessions(st.one_of(SAVES, SAVES, LOADS)))
    def session(self, plan: Session) -> None:
        self.run(plan)

    @rule(plan=sessions(SAVES, 1), rank=st.integers(0, 3), writes=st.integers(0, 8))
    def save_on_full_disk(self, plan: Session, rank: int, writes: int) -> None:
        (save,) = plan.calls
        self.run(replace(plan, calls=(replace(save, full_disk=(rank, writes)),)))

    @rule(plan=sessions(SAVES, 1), kind=st.sampled_from(MISTAKES))
    def save_with_mistake(self, plan: Session, kind: str) -> None:
        """Names and replicas are compared between ranks that share a folder."""
        (save,) = plan.calls
        shared = save.shared or kind in ("bytes", "name")
        save = replace(save, mistake=kind, shared=shared, if_exists="replace")
        self.run(replace(plan, calls=(save,)))

    @rule(plan=sessions(st.one_of(SAVES, LOADS), 1))
    def repeat(self, plan: Session) -> None:
        """The same call again and again leaves no keys in the store."""
        self.run(replace(plan, calls=plan.calls * REPEATS))

    @rule(plan=sessions(SAVES, 1), turns=st.lists(st.booleans(), min_size=2, max_size=5))
    def save_in_turn(self, plan: Session, turns: list[bool]) -> None:
        """Equal saves to the nodes' folders and to the shared one: only some plans serve again.

        Values that differ between ranks do so from the second save on.
        """
        (save,) = plan.calls
        save = replace(save, if_exists="replace")
        saves = [replace(save, shared=turns[0], values=EQUAL)]
        saves += [replace(save, shared=shared) for shared in turns[1:]]
        self.run(replace(plan, calls=(*saves, Load(save.name, turns[-1]))))

    @precondition(lambda self: self.disk.present())
    @rule(plan=sessions(LOADS, 2), number=st.integers(0, 9))
    def load(self, plan: Session, number: int) -> None:
        """Loads of what is there, by any ranks."""
        place, name = self.disk.nth(number)
        calls = [
            call
            if (SHARED if call.shared else OWN[0], NAMES[call.name]) in self.disk.folders
            else replace(call, name=NAMES.index(name), shared=place == SHARED)
            for call in plan.calls
        ]
        self.run(replace(plan, calls=tuple(calls)))

    @rule(plan=sessions(SAVES, 1), place=st.integers(0, 2), turn=st.integers(0, 2))
    def mix_saves(self, plan: Session, place: int, turn: int) -> None:
        """One node's folders of two saves change places, and nodes load them."""
        saves = [
            replace(call, name=name, shared=False, if_exists="replace", copies=1)
            for call in plan.calls
            for name in (0, 1)
        ]
        self.run(replace(plan, calls=tuple(saves)))
        node = OWN[plan.nodes[place % len(plan.nodes)]]
        self.disk.swap((node, NAMES[0]), (node, NAMES[1]))
        self.run(replace(plan, calls=tuple(Load(n, shared=False, turn=turn) for n in (0, 1))))

    @rule(
        plan=sessions(SAVES, 1),
        verify=st.sampled_from(["read", "full"]),
        mesh=st.sampled_from(MESHES),
    )
    def save_and_load(self, plan: Session, verify: str, mesh: tuple[int, int]) -> None:
        """The ranks of a save load it again, and those of another mesh."""
        (save,) = plan.calls
        load = Load(save.name, save.shared, verify)
        self.run(replace(plan, calls=(replace(save, if_exists="replace"), load)))
        nodes = [plan.nodes[rank % len(plan.nodes)] for rank in range(mesh[0] * mesh[1])]
        self.run(replace(plan, nodes=tuple(nodes), mesh=mesh, calls=(load,)))

    def run(self, plan: Session) -> None:
        """Run the calls of a session. Before and after each, look at the disk."""
        world, first = len(plan.nodes), self.serial
        self.serial += len(plan.calls)
        waiting = iter(enumerate(plan.calls, first))
        outcomes: list[Any] = [None] * world
        full: dict[int, int] = {}
        checks: list[Check] = []
        keys: list[int] = []  # in the store, after each call
        repeats = len(plan.calls) == REPEATS

        def prepare() -> None:
            serial, call = next(waiting)
            full.clear()
            if isinstance(call, Save) and call.full_disk is not None:
                full[call.full_disk[0] % world] = call.full_disk[1]
            checks.append(
                self.expect_save(plan, call, serial)
                if isinstance(call, Save)
                else self.expect_load(plan, call)
            )

        ready = self.barrier(world, prepare, timeout=4 * SECONDS)
        done = self.barrier(world, lambda: checks[-1](outcomes), timeout=4 * SECONDS)

        def act(comm: Comm) -> None:
            def storage(folder: str) -> LocalStorage:
                writes = full.get(comm.rank)
                return LocalStorage(folder) if writes is None else FullStorage(folder, writes)

            with on_node(comm, plan.nodes, storage=storage) as checkpointer:
                for serial, call in enumerate(plan.calls, first):
                    ready.wait()
                    try:
                        outcomes[comm.rank] = (
                            save_rank(
                                self.model,
                                plan,
                                call,
                                serial=serial,
                                rank=comm.rank,
                                root=self.root,
                                checkpointer=checkpointer,
                            )
                            if isinstance(call, Save)
                            else self.load_rank(plan, call, comm.rank, checkpointer)
                        )
                    except uc.CheckpointError as error:
                        outcomes[comm.rank] = error
                    except BaseException:
                        done.abort()
                        raise
                    done.wait()
                    if repeats:
                        keys.append(keys_in_store(comm))

        results = self.try_ranks(world, act, timeout_seconds=4 * SECONDS)
        errors = [result for result in results if isinstance(result, BaseException)]
        errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
        if errors:
            raise errors[0]
        counts = [count for count in keys if count]  # of rank 0
        more = min(counts[5:]) - min(counts[2:5]) if repeats else 0
        assert more <= MORE_KEYS, f"keys in the store: {counts}"

    # saves

    def expect_save(self, plan: Session, call: Save, serial: int) -> Check:
        places = [SHARED] if call.shared else [OWN[node] for node in dict.fromkeys(plan.nodes)]
        keys = [(place, NAMES[call.name]) for place in places]
        before = self.disk.files()
        old = {key: self.disk.current(key, before) for key in keys}
        copies = min(call.copies, len(keys))
        saved = Saved(
            serial,
            call.seed,
            call.step,
            len(plan.nodes),
            len(keys),
            copies,
            call.compression,
            plan.mesh,
            call.values,
        )
        folders = self.disk.folders
        held = {folders[key].saved for key in keys if key in folders and old[key]}
        free = not any(old.values())
        whole = (
            len(held) == 1
            and all(key in folders and self.disk.is_intact(key, before) for key in keys)
            and next(iter(held)).groups == len({folders[key].group for key in keys})
            and next(iter(held)).groups == len(keys)
        )
        mistaken = bool(call.mistake) and len(plan.nodes) > 1
        succeeds = (
            call.full_disk is None
            and not mistaken
            and (free or (whole and call.if_exists != "error"))
        )

        def check(outcomes: Sequence[Any]) -> None:
            after, error = self.disk.files(), common_error(outcomes)
            if error is not None:
                assert not succeeds, f"the save failed: {error}"
                assert after == before, f"a save that failed changed files: {error}"
                return
            assert not mistaken, f"one rank has wrong {call.mistake}, and all saved"
            (existed,) = {report.existed for report in outcomes}
            if existed:
                assert held
                assert call.if_exists in ("keep", "keep_complete")
                assert after == before, "a checkpoint was kept, and files were changed"
                return
            assert not (whole and call.if_exists != "replace"), "a good save was replaced"
            self.disk.check_others(keys, before, after)
            for key in keys:
                manifest = old[key].get(MANIFEST)
                if old[key] and not (key in folders and manifest == folders[key].files[MANIFEST]):
                    self.disk.check_aside(key, old[key])
            for group, key in enumerate(keys):
                self.disk.folders[key] = Folder(saved, group, self.disk.current(key, after))
            if len(keys) == 1:
                check_content(self.disk.path(keys[0]), self.model, saved)

        return check

    # loads

    def paths(self, plan: Session, call: Load) -> dict[int, list[Key]]:
        """The folders of each node that exist; those of absent nodes go to the ones present."""
        if call.shared:
            return {node: [(SHARED, NAMES[call.name])] for node in plan.nodes}
        nodes = sorted(set(plan.nodes))
        keys: dict[int, list[Key]] = {node: [] for node in nodes}
        for number, place in enumerate(OWN):
            if (self.root / place / NAMES[call.name]).is_dir():
                keys[nodes[(number + call.turn) % len(nodes)]].append((place, NAMES[call.name]))
        return keys

    def load_rank(
        self, plan: Session, call: Load, rank: int, checkpointer: uc.Checkpointer
    ) -> uc.LoadReport:
        self.targets[rank] = {
            tensor: sentinel(array, tensor.dtype)
            for tensor, array in local(self.model, plan, rank, 0).items()
        }
        keys = self.paths(plan, call)[plan.nodes[rank]]
        folders = [self.root / place / name for place, name in keys]
        return checkpointer.load(
            folders or [self.root / "nothing" / NAMES[call.name]],
            **arguments(self.model, plan, self.targets[rank]),
            options=uc.LoadOptions(verify=call.verify, timeout_seconds=SECONDS),  # type: ignore[arg-type]
        )

    def expect_load(self, plan: Session, call: Load) -> Check:
        keys = sorted({key for node_keys in self.paths(plan, call).values() for key in node_keys})
        keys = [key for key in keys if (self.disk.path(key)).is_dir()]
        before = self.disk.files()
        saves = {self.disk.folders[key].saved for key in keys}
        whole = [key for key in keys if self.disk.is_intact(key, before)]
        intact = {
            saved: {
                self.disk.folders[key].group
                for key in whole
                if self.disk.folders[key].saved == saved
            }
            for saved in saves
        }
        undamaged = whole == keys
        succeeds = any(
            (len(saves) == 1 or undamaged) and saved.groups - len(intact[saved]) < saved.copies
            for saved in saves
        )

        def check(outcomes: Sequence[Any]) -> None:
            assert self.disk.files() == before, "a load changed files"
            error = common_error(outcomes)
            if error is not None:
                assert not succeeds, f"a complete save was refused: {error}"
                if "is unusable" not in str(error) or undamaged:
                    for rank, target in self.targets.items():
                        for tensor, array in local(self.model, plan, rank, 0).items():
                            left = as_bytes(sentinel(array, tensor.dtype))
                            assert as_bytes(target[tensor]) == left, (
                                f"rank {rank}: {tensor.name} was touched: {error}"
                            )
                self.targets.clear()
                return
            (serial,) = {report.extra["serial"] for report in outcomes}
            joined = [saved for saved in saves if saved.serial == serial]  # merged or not
            saved = joined[0]
            for rank, report in enumerate(outcomes):
                assert report.step == saved.step
                value, is_placed = saved.value(rank, plan.mesh)
                assert same(report.extra, extra_of(serial, value)), (rank, value, report.extra)
                differs = [note for note in report.notes if "differed between the ranks" in note]
                assert is_placed == (not differs), (rank, report.notes)
                right = saved.rank_extra(rank, plan.mesh)
                assert report.rank_extra in (right, None), report.rank_extra
                if all(len(intact[other]) == other.groups for other in joined):
                    assert report.rank_extra == right, report.notes
                for tensor, array in local(self.model, plan, rank, saved.seed).items():
                    assert as_bytes(self.targets[rank][tensor]) == array.tobytes(), (
                        f"rank {rank}: {tensor.part}:{tensor.name} is not that of save {serial}"
                    )
            self.targets.clear()

        return check

    # damage

    @precondition(lambda self: self.disk.present())
    @rule(number=st.integers(0, 9), damage=DAMAGES)
    def damage_file(self, number: int, damage: Damage) -> None:
        key = self.disk.nth(number)
        self.disk.damage(key, damage)
        self.disk.check_verify(key)

    @rule(plan=sessions(SAVES, 1), place=st.integers(0, 3), damage=DAMAGES, lost=st.booleans())
    def damage_one_node(self, plan: Session, place: int, damage: Damage, lost: bool) -> None:
        """Each byte is on two nodes; one of them is damaged, and the same ranks load."""
        (save,) = plan.calls
        save = replace(save, shared=False, if_exists="replace", copies=2)
        self.run(replace(plan, calls=(save,)))
        key = (OWN[plan.nodes[place % len(plan.nodes)]], NAMES[save.name])
        if lost:
            self.disk.lose(key)
        else:
            self.disk.damage(key, damage)
        self.run(replace(plan, calls=(Load(save.name, shared=False),)))

    @precondition(lambda self: self.disk.present())
    @rule(number=st.integers(0, 9), damage=DAMAGES)
    def damage_and_repair(self, number: int, damage: Damage) -> None:
        """A backup of the folder mends it."""
        key, goal = self.disk.nth(number), (BACKUP, NAMES[0])
        if key != goal:
            self.disk.copy(key, goal)
            self.disk.damage(key, damage)
            self.repair(key, [goal])

    @precondition(lambda self: self.disk.present())
    @rule(number=st.integers(0, 9))
    def lose_folder(self, number: int) -> None:
        self.disk.lose(self.disk.nth(number))

    @precondition(lambda self: self.disk.present())
    @rule(number=st.integers(0, 9), place=st.integers(0, 4), name=st.integers(0, 1))
    def copy_folder(self, number: int, place: int, name: int) -> None:
        """A backup, or another save's folder where a node's should be."""
        key, goal = self.disk.nth(number), ((*OWN, SHARED, BACKUP)[place], NAMES[name])
        if key != goal:
            self.disk.copy(key, goal)

    @precondition(lambda self: len(self.disk.present()) > 1)
    @rule(first=st.integers(0, 9), second=st.integers(0, 9))
    def swap_folders(self, first: int, second: int) -> None:
        keys = self.disk.nth(first), self.disk.nth(second)
        if keys[0] != keys[1]:
            self.disk.swap(*keys)

    # what reads and mends folders

    @rule()
    def verify_all(self) -> None:
        for key in self.disk.present():
            self.disk.check_verify(key)

    @precondition(lambda self: self.disk.present())
    @rule(number=st.integers(0, 9), sources=st.lists(st.integers(0, 9), max_size=3))
    def repair_folder(self, number: int, sources: list[int]) -> None:
        key = self.disk.nth(number)
        others = dict.fromkeys(other for n in sources if (other := self.disk.nth(n)) != key)
        self.repair(key, list(others))

    def repair(self, key: Key, others: Sequence[Key]) -> None:
        before = self.disk.files()
        folder = self.disk.folders[key]
        now = self.disk.current(key, before)
        folders = [self.disk.folders[other] for other in others]
        mended = (
            now.get(MANIFEST) == folder.files[MANIFEST]
            and all(other.saved == folder.saved for other in folders)
            and any(
                self.disk.folders[other].files == folder.files
                and self.disk.is_intact(other, before)
                for other in others
            )
        )
        report, error = attempt(
            lambda: uc.repair(self.disk.path(key), [self.disk.path(other) for other in others])
        )
        after = self.disk.files()
        if report is None:
            assert after == before, f"a refused repair changed files: {error}"
            assert not mended, f"a copy was refused: {error}"
            return
        self.disk.check_repaired(key, before, after)
        self.disk.check_others([key], before, after)
        if not self.disk.lacks_a_part(key, after):
            # a copy of another node's files is a folder of its own
            wrong = [file for file in self.disk.damaged_files(key, after) if "/" not in file]
            assert not mended or not wrong, f"{wrong} are not repaired: {report.problems}"
            assert report.ok == (not wrong), f"damaged: {wrong}, reported: {report.problems}"

    @rule(name=st.integers(0, 1), world=st.integers(1, 3))
    def repair_nodes(self, name: int, world: int) -> None:
        """Each node's folder from those of the others."""
        keys = [(place, NAMES[name]) for place in OWN[:world]]
        present = [key for key in keys if key in self.disk.folders]
        before = self.disk.files()
        intact = [key for key in present if self.disk.is_intact(key, before)]
        saves = {self.disk.folders[key].saved for key in present}
        lost = [key for key in present if key not in intact]

        def act(comm: Comm) -> object:
            with on_node(comm, range(world)) as checkpointer:
                return checkpointer.repair(self.root / OWN[comm.rank] / NAMES[name])

        outcomes = self.try_ranks(world, act, timeout_seconds=4 * SECONDS)
        after, error = self.disk.files(), common_error(outcomes)
        if error is not None:
            assert after == before, f"a refused repair changed files: {error}"
            assert not present, f"the repair failed: {error}"
            return
        for key in present:
            self.disk.check_repaired(key, before, after)
        self.disk.check_others(present, before, after)
        groups = {self.disk.folders[key].group for key in present}
        if len(saves) == len(lost) == 1:
            ((saved,), (key,)) = saves, lost
            copied = all(
                before.get(f"{'/'.join(key)}/{file}") == body
                or damaged_in_data(file, body, before.get(f"{'/'.join(key)}/{file}", b""))
                for file, body in self.disk.folders[key].files.items()
            )
            if saved.copies > 1 and copied and len(groups) == len(present) == saved.groups:
                mended = self.disk.is_intact(key, after)
                assert mended or self.disk.lacks_a_part(key, after), outcomes

    @rule(name=st.integers(0, 1), from_nodes=st.booleans())
    def merge_folders(self, name: int, from_nodes: bool) -> None:
        """Folders of one save or of several, whole or not."""
        self.merge([(place, NAMES[name]) for place in (OWN if from_nodes else (BACKUP,))])

    @rule(plan=sessions(SAVES, 1), loads=sessions(SAVES, 1))
    def merge_and_load(self, plan: Session, loads: Session) -> None:
        """The ranks of a save, and others, load what became of it on a shared path."""
        (save,) = plan.calls
        save = replace(save, shared=False, if_exists="replace")
        keys = [(place, NAMES[save.name]) for place in OWN]
        for key in keys:
            if key in self.disk.folders:
                self.disk.lose(key)
        self.run(replace(plan, calls=(save,)))
        self.merge(keys)
        for ranks in (plan, loads):
            self.run(replace(ranks, calls=(Load(1, shared=True),)))

    def merge(self, keys: Sequence[Key]) -> None:
        """Convert folders to one whole folder at a shared path."""
        keys = [key for key in keys if key in self.disk.folders]
        goal = (SHARED, NAMES[1])
        if not keys:
            return
        if self.disk.path(goal).exists():
            self.disk.lose(goal)
        before = self.disk.files()
        saves = {self.disk.folders[key].saved for key in keys}
        groups = {self.disk.folders[key].group for key in keys if self.disk.is_intact(key, before)}
        succeeds = len(saves) == 1 and len(groups) == next(iter(saves)).groups
        paths = [self.disk.path(key) for key in keys]
        options = {"fsync": False, "timeout_seconds": SECONDS}
        report, error = attempt(lambda: uc.convert(paths, self.disk.path(goal), **options))
        after = self.disk.files()
        if report is None:
            assert not succeeds, f"a complete save cannot be merged: {error}"
            assert after == before, f"a merge that failed changed files: {error}"
            return
        self.disk.check_others([goal], before, after)
        with uc.open(self.disk.path(goal)) as source:
            serial = source.extra["serial"]
        (saved,) = (saved for saved in saves if saved.serial == serial)
        saved = replace(saved, groups=1, copies=1, compression="none")
        self.disk.folders[goal] = Folder(saved, 0, self.disk.current(goal, after))
        check_content(self.disk.path(goal), self.model, saved)


def damaged_in_data(file: str, right: bytes, now: bytes) -> bool:
    """Whether only bytes of tensors differ, which other nodes have; a header is in one folder."""
    header = 8 + int.from_bytes(right[:8], "little")
    tensors = file.startswith(("model", "master_weights", "optimizer", "ema")) and file.endswith(
        ".safetensors"
    )
    return tensors and len(now) == len(right) and now[:header] == right[:header]


def attempt(call: Callable[[], Any]) -> tuple[Any, uc.CheckpointError | None]:
    """Return the result, or None and the error of ours."""
    try:
        return call(), None
    except uc.CheckpointError as error:
        return None, error


def common_error(outcomes: Sequence[Any]) -> uc.CheckpointError | None:
    """Return the error that all ranks raised, None if none did."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, uc.CheckpointError):
            raise outcome
    errors = [outcome for outcome in outcomes if isinstance(outcome, uc.CheckpointError)]
    if not errors:
        return None
    assert len(errors) == len(outcomes), f"only some ranks failed: {outcomes}"
    assert len({(type(error), str(error)) for error in errors}) == 1, errors
    return errors[0]


@pytest.mark.parametrize(
    ("examples", "steps", "case_seed"),
    [
        (5, 12, 0),
        pytest.param(20, 12, 1, marks=pytest.mark.slow),
        pytest.param(20, 12, 2, marks=pytest.mark.slow),
        pytest.param(1500, 25, 3, marks=pytest.mark.long),
    ],
)
def test_cluster(examples: int, steps: int, case_seed: int) -> None:
    run_machine(ClusterMachine, examples=examples, steps=steps, case_seed=case_seed)


class ScheduledMachine(ClusterMachine):
    """The same on drawn schedules: an order of threads that hangs fails at once."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = DrawnRanks()
        self.try_ranks, self.barrier = self.ranks.try_ranks, self.ranks.barrier

    @override
    def run(self, plan: Session) -> None:
        self.ranks.seed = zlib.crc32(f"{self.serial} {plan}".encode())
        super().run(plan)


@pytest.mark.parametrize(
    ("examples", "steps", "case_seed"),
    [
        (1, 8, 4),
        pytest.param(5, 12, 5, marks=pytest.mark.slow),
        pytest.param(600, 25, 6, marks=pytest.mark.long),
    ],
)
def test_cluster_on_drawn_schedules(examples: int, steps: int, case_seed: int) -> None:
    run_machine(ScheduledMachine, examples=examples, steps=steps, case_seed=case_seed)
