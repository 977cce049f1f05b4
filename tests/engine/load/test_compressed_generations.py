"""Ten generations of load, train and save: how far errors of compressed moments add up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.torch_training import sine_loss, small_net

GENERATIONS, WARM_UP = 10, 60
# Of an update, after one generation or ten, by steps between generations. An error of the first
# moment decays with beta1, so errors of near generations add up. The second moment hardly changes
# in 50 steps: rounding undoes the change, so it lags behind.
MAX_ERROR = {
    "O1": {1: 0.02, 10: 0.012, 50: 0.012},
    "O2": {1: 0.08, 10: 0.065, 50: 0.08},
}

Training = tuple[torch.nn.Module, torch.optim.Optimizer]
Gradients = list[torch.Tensor]


def gradients(training: Training, step: int) -> Gradients:
    net, optimizer = training
    optimizer.zero_grad()
    sine_loss(net, torch.Generator().manual_seed(step)).backward()
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def apply(training: Training, gradient: Gradients) -> None:
    net, optimizer = training
    for parameter, values in zip(net.parameters(), gradient, strict=True):
        parameter.grad = values.clone()
    optimizer.step()


def update(training: Training) -> torch.Tensor:
    """The update that Adam makes next, of all parameters."""
    net, optimizer = training
    states = [optimizer.state[parameter] for parameter in net.parameters()]
    return torch.cat([(s["exp_avg"] / (s["exp_avg_sq"].sqrt() + 1e-8)).flatten() for s in states])


def relative_error(training: Training, reference: Training) -> float:
    actual, expected = update(training), update(reference)
    return float((actual - expected).norm() / expected.norm())


def resumed(kind: str, folder: Path, training: Training, compression: str) -> Training:
    """Save, and load into a new model and optimizer."""
    options = uc.SaveOptions(compression=compression, fsync=False)
    uc.save(folder, model=training[0], optimizer=training[1], options=options)
    fresh = small_net(kind)
    uc.load(folder, model=fresh[0], optimizer=fresh[1])
    return fresh


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 10, 50])
@pytest.mark.parametrize("compression", ["O1", "O2"])
@pytest.mark.parametrize("kind", ["linear", "attention"])
def test_drift_of_ten_generations_is_bounded(
    tmp_path: Path, kind: str, compression: str, steps: int
) -> None:
    """Both runs see the gradients of the uncompressed one, so encodings alone make them differ."""
    reference = small_net(kind)
    for step in range(WARM_UP):
        apply(reference, gradients(reference, step))
    training = resumed(kind, tmp_path / "0", reference, compression)
    errors = [relative_error(training, reference)]
    for generation in range(1, GENERATIONS + 1):
        for step in range(steps):
            gradient = gradients(reference, WARM_UP + generation * steps + step)
            apply(reference, gradient)
            apply(training, gradient)
        training = resumed(kind, tmp_path / str(generation), training, compression)
        errors.append(relative_error(training, reference))
    assert 0 < max(errors) <= MAX_ERROR[compression][steps], errors
