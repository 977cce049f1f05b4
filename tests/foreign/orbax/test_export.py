"""Orbax checkpoints that `convert` writes: Orbax restores them, and so do we."""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import unified_ckpt as uc
from tests.foreign.orbax.test_export_maxtext import hub_state
from tests.support.foreign.orbaxes import MaxText, as_numpy, leaves, mapped
from tests.support.processes import warm
from tests.support.processes.launch import PROGRAMS, environment
from unified_ckpt.foreign.orbax import export as orbax

MODEL = {"layer.0.w": torch.randn(5, 3, 4), "layer.1.w": torch.zeros(2), "empty": torch.empty(0, 3)}


def restored(root: Path, step: int) -> tuple[Any, Any]:
    """Return what Orbax restores: the tree of numpy arrays, and that from devices of JAX."""
    target = root.parent / "restored.pickle"
    command = [
        *warm.orbax(PROGRAMS / "orbax_reader.py", environment()),
        *(str(root), str(step), str(target)),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return pickle.loads(target.read_bytes())


def check_tree(actual: Any, expected: Mapping[str, Any]) -> None:
    found = leaves(actual)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert np.array_equal(found[name], array), name


@pytest.mark.integration
def test_orbax_restores_a_maxtext_state(tmp_path: Path) -> None:
    """Each head of each layer is where MaxText has it, in weights and moments."""
    config, state = hub_state("llama", tmp_path / "c")
    (tmp_path / "c/config.json").write_text(config.to_json_string())
    assert uc.convert(tmp_path / "c", tmp_path / "o", to="orbax").tensors["optimizer"] > 0
    for tree in restored(tmp_path / "o", 7):
        assert int(tree["step"]) == 7
        adam, decay, schedule = tree["opt_state"]
        assert (int(adam["count"]), decay, int(schedule["count"])) == (7, None, 7)
        with uc.open(tmp_path / "c") as source:
            moments = {
                power: {name: source["optimizer"][f"{name}/{moment}"][...] for name in state}
                for power, moment in enumerate(("exp_avg", "exp_avg_sq"), 1)
            }
        trees = (tree["params"], adam["mu"], adam["nu"])
        for power, actual in enumerate(trees):
            expected = MaxText(config, mapped(moments.get(power, state), as_numpy), power=power)
            check_tree(
                actual["params"], leaves(expected.tree(stacked=True, vocab=config.vocab_size))
            )
    back = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    source_options = uc.SourceOptions(config=str(tmp_path / "c"))
    uc.load(tmp_path / "o", model=back, options=uc.LoadOptions(source=source_options))
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


@pytest.mark.integration
def test_orbax_restores_any_training_state(tmp_path: Path) -> None:
    """Two-byte weights with masters: the masters are the parameters, and other parts are trees."""
    model = {name: tensor.to(torch.bfloat16) for name, tensor in MODEL.items()}
    moments = {f"{name}/exp_avg": tensor + 1 for name, tensor in MODEL.items()}
    moments |= {f"{name}/exp_avg_sq": tensor + 2 for name, tensor in MODEL.items()}
    moments |= {f"{name}/step": torch.tensor(3.0) for name in MODEL}
    masters = {name: tensor for name, tensor in MODEL.items() if name != "layer.1.w"}
    ema = {"layer.0.w": torch.ones(3, dtype=torch.bfloat16), "scale": torch.tensor(0.3)}
    uc.save(
        tmp_path / "c",
        model=model,
        master_weights=masters,
        optimizer=moments,
        parts={"ema": ema},
        step=9,
        options=uc.SaveOptions(check_replicas="never"),
    )
    uc.convert(tmp_path / "c", tmp_path / "o", to="orbax", compare=False)
    tree, _ = restored(tmp_path / "o", 9)
    assert int(tree["opt_state"][0]["count"]) == 3
    params = leaves(tree["params"]["params"])
    assert params["layer.1.w"].dtype == ml_dtypes.bfloat16
    assert np.array_equal(params["layer.0.w"], MODEL["layer.0.w"].numpy())
    assert params["empty"].shape == (0, 3)
    nu = leaves(tree["opt_state"][0]["nu"]["params"])
    assert np.array_equal(nu["layer.1.w"], MODEL["layer.1.w"].numpy() + 2)
    assert np.array_equal(tree["ema"]["layer"]["0"]["w"], as_numpy(ema["layer.0.w"]))
    assert np.array_equal(tree["ema"]["scale"], as_numpy(ema["scale"]))


def test_names_of_tied_tensors_are_reported(tmp_path: Path) -> None:
    tied = torch.ones(2)
    uc.save(tmp_path / "c", model={"e.weight": tied, "h.weight": tied})
    (note,) = uc.convert(tmp_path / "c", tmp_path / "o", to="orbax").notes
    assert note.endswith("tied tensors that were not written (1):\n  model:h.weight (e.weight)")


def test_model_in_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    uc.save(tmp_path / "c", model=MODEL, step=2)
    uc.convert(tmp_path / "c", tmp_path / "o", to="orbax", model_dtype="bfloat16")
    with uc.open(tmp_path / "o") as opened:
        assert opened.step == 2
        assert opened["model"]["layer.0.w"].dtype == torch.bfloat16
        assert torch.equal(opened["model"]["layer.0.w"][...], MODEL["layer.0.w"].to(torch.bfloat16))


def test_arrays_larger_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orbax, "_CHUNK_NBYTES", 100)
    monkeypatch.setattr(orbax, "_MAX_IN_FLIGHT_NBYTES", 250)
    model = {"a": torch.randn(7, 11, 3), "b": torch.zeros(129), "c": torch.tensor(5.0)}
    uc.save(tmp_path / "c", model=model)
    uc.convert(tmp_path / "c", tmp_path / "o", to="orbax")
    back = {name: torch.full_like(tensor, torch.nan) for name, tensor in model.items()}
    uc.load(tmp_path / "o", model=back)
    assert all(torch.equal(back[name], tensor) for name, tensor in model.items())


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ({"a/max_exp_avg_sq": torch.zeros(2)}, "Adam has no name for.*a/max_exp_avg_sq"),
        (
            {"a/step": torch.tensor(1.0), "b/step": torch.tensor(2.0)},
            r"got parameters with steps \[1.0, 2.0\], expected one step",
        ),
    ],
)
def test_state_that_optax_lacks_is_refused(
    tmp_path: Path, optimizer: dict[str, torch.Tensor], text: str
) -> None:
    model = {"a": torch.zeros(2), "b": torch.zeros(2)}
    uc.save(tmp_path / "c", model=model, optimizer=optimizer)
    with pytest.raises(uc.FormatError, match=f"(?s){text}"):
        uc.convert(tmp_path / "c", tmp_path / "o", to="orbax")
    assert not (tmp_path / "o").exists()


def test_state_that_optax_cannot_mirror_is_refused(tmp_path: Path) -> None:
    model = {"a": torch.zeros(2)}
    moments = {"a/exp_avg": torch.ones(2), "a/exp_avg_sq": torch.ones(2)}
    uc.save(tmp_path / "both", model=model, optimizer=moments)
    with pytest.raises(uc.FormatError, match="got parts optimizer, expected the model among them"):
        uc.convert(tmp_path / "both", tmp_path / "o", to="orbax", parts=("optimizer",))
    del moments["a/exp_avg"]
    uc.save(tmp_path / "one", model=model, optimizer=moments)
    with pytest.raises(uc.FormatError, match=r"(?s)lacks a moment.*optimizer:a/exp_avg$"):
        uc.convert(tmp_path / "one", tmp_path / "o", to="orbax")
    assert not (tmp_path / "o").exists()


def test_names_that_no_tree_holds_are_refused(tmp_path: Path) -> None:
    uc.save(tmp_path / "c", model={"a": torch.zeros(2), "a.b": torch.zeros(2)})
    with pytest.raises(uc.FormatError, match="names are also folders of others"):
        uc.convert(tmp_path / "c", tmp_path / "o", to="orbax")


def test_bytes_that_do_not_arrive_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that is read back has another byte than the one that was written."""
    uc.save(tmp_path / "c", model=MODEL)
    real, first = orbax.read_box, []

    def read_box(source: Any, key: Any, box: Any) -> bytearray:
        body = real(source, key, box)
        if key in first:
            body[0] ^= 1
        first.append(key)
        return body

    monkeypatch.setattr(orbax, "read_box", read_box)
    with pytest.raises(uc.IntegrityError, match=r"model:layer.0.w: box .* has other bytes"):
        uc.convert(tmp_path / "c", tmp_path / "o", to="orbax")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
