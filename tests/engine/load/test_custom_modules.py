"""A module's own `load_state_dict`, with its hooks, compared with torch.save and torch.load."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import weight_norm

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.equality import same
from tests.support.harness import make_checkpointer, run_ranks, try_ranks
from tests.support.torch_training import train_step
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state.modules import flatten_model, load_methods

UNSYNCED = uc.SaveOptions(fsync=False)


class Net(nn.Module):
    """Several layers, of which subclasses and hooks change how one is loaded."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.inner = nn.Linear(4, 4) if inner is None else inner
        self.calls = 0


class Counting(Net):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().load_state_dict(*args, **kwargs)


class Prefixed(Net):
    """Other names in the state dict than in the module."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"v2.{key}": value for key, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        names = {key.removeprefix("v2."): value for key, value in state_dict.items()}
        return super().load_state_dict(names, strict=strict)


class Queue(Net):
    """A buffer that takes the saved shape."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("queue", torch.full((rows, 2), float(rows)))

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        self.queue = torch.zeros_like(state_dict["queue"])
        return super().load_state_dict(state_dict, strict=strict)


class Copies(Net):
    """`state_dict` without arguments, which returns copies."""

    def state_dict(self) -> Any:  # type: ignore[override]
        return {key: value.cpu().clone() for key, value in super().state_dict().items()}


class WithoutFirst(Net):
    """`state_dict` leaves out a layer, `load_state_dict` keeps that of the module."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {key: value for key, value in state.items() if not key.startswith("first")}

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_state_dict(state_dict, strict=False)


class Swapped(nn.Linear):
    """Exchanges two tensors of one shape, which fails where one is filled before it is read."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.other = nn.Parameter(torch.randn(4, 4))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        names = f"{prefix}weight", f"{prefix}other"
        state_dict.update(zip(names, [state_dict[name] for name in reversed(names)], strict=True))
        super()._load_from_state_dict(state_dict, prefix, *args)


class Halved(Net):
    """A hook saves floats rounded. Nothing is customized in its loading."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(round_floats)


class Packed(nn.Linear):
    """A tensor that the state dict computes, and its own loading."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = torch.rand(2)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = self.scale * 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.scale = state_dict.pop(f"{prefix}scale") / 2
        super()._load_from_state_dict(state_dict, prefix, *args)


class Noted(nn.Linear):
    """A layer with extra state. `is_new`: it also has a tensor that the saved layer lacks."""

    def __init__(self, *, is_new: bool) -> None:
        super().__init__(4, 4)
        self.note = "of the target" if is_new else "saved"
        if is_new:
            self.gain = nn.Parameter(torch.ones(1))
            self.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def round_floats(_: nn.Module, state_dict: Any, *__: Any) -> None:
    for name in [key for key in state_dict if not key.startswith("norm")]:
        state_dict[name] = state_dict[name].half()


def rename(state_dict: Any, prefix: str, *_: Any) -> None:
    for name in ("weight", "bias"):
        if f"{prefix}old_{name}" in state_dict:
            state_dict[f"{prefix}{name}"] = state_dict.pop(f"{prefix}old_{name}")


def old() -> nn.Module:
    layer = nn.Module()
    layer.old_weight, layer.old_bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.rand(4))
    return layer


def renamed() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer._register_load_state_dict_pre_hook(rename)
    return layer


def compiled(make: Callable[[], nn.Module]) -> nn.Module:
    return torch.compile(make(), backend="eager")  # type: ignore[return-value]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "override": (Net, Counting),
    "names": (Prefixed, Prefixed),
    "shape": (partial(Queue, 5), partial(Queue, 3)),
    "copies": (Copies, Copies),
    "left-out": (WithoutFirst, WithoutFirst),
    "loads-more": (Net, WithoutFirst),
    "swapped": (lambda: Net(Swapped()), lambda: Net(Swapped())),
    "halved": (Halved, Halved),
    "computed": (lambda: Net(Packed()), lambda: Net(Packed())),
    "extra-state": (lambda: Net(Noted(is_new=False)), lambda: Net(Noted(is_new=True))),
    "pre-hook": (lambda: Net(old()), lambda: Net(renamed())),
    "of-torch": (
        lambda: Net(old_weight_norm(nn.Linear(4, 4))),
        lambda: Net(weight_norm(nn.Linear(4, 4))),
    ),
}


def contents(module: nn.Module) -> dict[str, Any]:
    """What a module holds, registered or not."""
    values = {
        f"{name}.{key}": value
        for name, inner in module.named_modules()
        for key, value in inner.__dict__.items()
        if key in ("scale", "note", "calls")
    }
    return {**dict(module.named_parameters()), **dict(module.named_buffers()), **values}


@pytest.mark.incident("Automodel#2682")
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("part", ["model", "ema"])
@pytest.mark.parametrize("name", CASES)
def test_load_state_dict_is_that_of_the_module(name: str, part: str, tmp_path: Path) -> None:
    make_saved, make_target = CASES[name]
    saved, target = make_saved(), make_target()
    expected, parameters = copy.deepcopy(target), dict(target.named_parameters())
    torch.save(saved.state_dict(), tmp_path / "stock.pt")
    expected.load_state_dict(torch.load(tmp_path / "stock.pt"))

    def argument(module: nn.Module) -> Any:
        return {"model": module} if part == "model" else {"parts": {"ema": module}}

    uc.save(tmp_path / "c", options=UNSYNCED, **argument(saved))
    report = uc.load(tmp_path / "c", **argument(target))
    assert same(contents(target), contents(expected))
    assert all(tensor is parameters[key] for key, tensor in target.named_parameters())
    assert any("load_state_dict()" in note for note in report.notes)
    assert not any((report.missing, report.unexpected, report.wrong))


@pytest.mark.parametrize("cls", [Copies, WithoutFirst, Prefixed])
def test_optimizer_resumes_whatever_state_dict_returns(cls: type[Net], tmp_path: Path) -> None:
    """The optimizer's parameters have names, also where the state dict has copies or none."""
    saved, target = cls(), cls()
    optimizer = torch.optim.AdamW(saved.parameters(), lr=0.1)
    train_step(optimizer)
    uc.save(tmp_path / "c", model=saved, optimizer=optimizer, options=UNSYNCED)
    stock = copy.deepcopy(target)
    stock.load_state_dict(saved.state_dict())
    resumed = torch.optim.AdamW(target.parameters())
    again = torch.optim.AdamW(stock.parameters())
    again.load_state_dict(optimizer.state_dict())
    uc.load(tmp_path / "c", model=target, optimizer=resumed)
    train_step(resumed)
    train_step(again)
    assert same(contents(target), contents(stock))
    assert same(resumed.state_dict()["state"], again.state_dict()["state"])


@pytest.mark.parametrize("wrap", [compiled, lambda make: checkpoint_wrapper(make())])
def test_wrapped_module_gets_its_names(wrap: Callable[..., nn.Module], tmp_path: Path) -> None:
    saved, target = Net(old()), Net(wrap(renamed))
    uc.save(tmp_path / "c", model=saved, options=UNSYNCED)
    uc.load(tmp_path / "c", model=target)
    assert same(dict(target.named_parameters()).popitem()[1], saved.inner.old_bias)


def test_other_modules_are_filled_in_place() -> None:
    """Torch's layers and wrappers change nothing, and a part that does leaves the others alone."""
    for module in (
        Net(),
        nn.DataParallel(Net()),
        compiled(Net),
        Net(checkpoint_wrapper(nn.Linear(4, 4))),
        Net(nn.InstanceNorm1d(4, affine=True, track_running_stats=True)),
    ):
        assert load_methods(module, flatten_model(module), ()) == []
    module = nn.DataParallel(Net(renamed()))
    (method,) = load_methods(module, flatten_model(module), ())
    assert method.prefixes == ("inner.",)
    assert method.module is module.module


class Refusing(Net):
    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_state_dict({**state_dict, "scale": torch.ones(1)}, strict=strict)


def test_refusals_name_the_module(tmp_path: Path) -> None:
    uc.save(tmp_path / "c", model=Net(), options=UNSYNCED)
    with pytest.raises(uc.MismatchError, match=r'^model: Refusing.load_state_dict.*\s.*"scale"'):
        uc.load(tmp_path / "c", model=Refusing())
    report = uc.load(tmp_path / "c", model=Refusing(), strict=False)
    assert report.notes == ("model: loaded by Refusing.load_state_dict(); unexpected: scale",)
    half = Counting().half()
    with pytest.raises(uc.MismatchError, match=r"pass LoadOptions\(cast=True\)"):
        uc.load(tmp_path / "c", model=half)
    assert half.calls == 0
    uc.load(tmp_path / "c", model=half, options=uc.LoadOptions(cast=True))


def test_all_ranks_raise_what_one_module_refuses(tmp_path: Path) -> None:
    uc.save(tmp_path / "c", model=Net(), options=UNSYNCED)

    def load(comm: Comm) -> Any:
        model = Counting() if comm.rank == 0 else Refusing()
        with make_checkpointer(comm) as checkpointer:
            return checkpointer.load(tmp_path / "c", model=model)

    errors = try_ranks(2, load)
    assert all(isinstance(error, uc.CheckpointError) for error in errors), errors
    assert all("Refusing.load_state_dict() refused" in str(error) for error in errors), errors


def test_damage_leaves_the_module_unchanged(tmp_path: Path) -> None:
    saved, target = Counting(), Counting()
    uc.save(tmp_path / "c", model=saved, options=UNSYNCED)
    flip(tmp_path / "c" / "model.safetensors", -1)
    before = copy.deepcopy(contents(target))
    with pytest.raises(uc.IntegrityError):
        uc.load(tmp_path / "c", model=target)
    assert same(contents(target), before)


class Chunk(nn.ModuleDict):
    """A pipeline chunk: a part of the layers, under their names in the whole model."""

    def __init__(self, *names: str) -> None:
        super().__init__({name: nn.Linear(2, 2) for name in names})


class CountingChunk(Chunk):
    calls = 0

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().load_state_dict(*args, **kwargs)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("last", [Chunk, CountingChunk])
def test_modules_of_a_list_get_their_own_tensors(
    last: type[Chunk], strict: bool, tmp_path: Path
) -> None:
    """Pipeline chunks, of which all or one load themselves."""
    saved = [CountingChunk("0", "1"), last("2", "3")]
    target = [CountingChunk("0", "1"), last("2", "3")]
    uc.save(tmp_path / "c", model=saved, options=UNSYNCED)
    report = uc.load(tmp_path / "c", model=target, strict=strict)
    for before, after in zip(saved, target, strict=True):
        assert same(dict(after.named_parameters()), dict(before.named_parameters()))
    assert not any("unexpected" in note for note in report.notes)
    assert target[0].calls == 1


def test_renamed_tensors_of_two_stages(tmp_path: Path) -> None:
    """The ranks have none of the saved names. Each loads the tensors that its own layer can use."""
    saved = nn.ModuleDict({name: old() for name in "01"})
    uc.save(tmp_path / "c", model=saved, options=UNSYNCED)

    def load(comm: Comm) -> nn.Module:
        model = nn.ModuleDict({str(comm.rank): renamed()})
        make_checkpointer(comm).load(tmp_path / "c", model=model)
        return model[str(comm.rank)]

    for rank, layer in enumerate(run_ranks(2, load)):
        assert torch.equal(layer.weight, saved[str(rank)].old_weight)
        assert torch.equal(layer.bias, saved[str(rank)].old_bias)
