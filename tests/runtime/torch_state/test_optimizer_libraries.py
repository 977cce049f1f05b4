"""The optimizers of other libraries: a resumed run is that of torch's own state dicts, or refused.

The libraries are optional; CONTRIBUTING.md says how to install them.
"""

from __future__ import annotations

import importlib.metadata
import io
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.equality import same
from tests.support.runtime.torch_state.optimizer_zoo import (
    LIBRARIES,
    Recipe,
    classes,
    import_library,
    plain_state,
    quiet,
    recipe,
)

pytestmark = pytest.mark.long

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "optimizers.md"
OUTCOMES = ("exact", "refused", "no step on a CPU")
STEPS, MORE_STEPS = range(3), range(3, 12)


def outcome(chosen: Recipe, folder: Path) -> str:
    """Save after some steps, load into fresh objects, and compare further steps.

    Stock may differ from an uninterrupted run, such as where an attribute is in no state dict.
    """
    module, optimizer = chosen.job(0)
    for number in STEPS:
        chosen.step(module, optimizer, number)
    stock = io.BytesIO()
    torch.save((module.state_dict(), optimizer.state_dict()), stock)
    try:
        uc.save(folder / "c", model=module, optimizer=optimizer)
    except uc.CheckpointError:
        return "refused"
    jobs = [(module, optimizer), chosen.job(1), chosen.job(2)]
    uc.load(folder / "c", model=jobs[1][0], optimizer=jobs[1][1])
    stock.seek(0)
    model_state, optimizer_state = torch.load(stock, weights_only=False)
    jobs[2][0].load_state_dict(model_state)
    with quiet():
        jobs[2][1].load_state_dict(optimizer_state)
    for number in MORE_STEPS:
        for job in jobs:
            chosen.step(*job, number)
    uninterrupted, resumed, as_stock = (plain_state(*job) for job in jobs)
    return "exact" if same(resumed, uninterrupted) or same(resumed, as_stock) else "differs"


def outcomes(name: str, folder: Path) -> Iterator[tuple[str, str]]:
    for kind in classes(name):
        chosen = recipe(kind)
        try:
            result = OUTCOMES[2] if chosen is None else outcome(chosen, folder)
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        shutil.rmtree(folder / "c", ignore_errors=True)
        yield kind.__name__, result


def row(name: str, results: dict[str, str]) -> str:
    """Return the row of a library in the guide's table."""
    version = importlib.metadata.version(name.replace("_", "-"))
    names = {
        kind: ", ".join(f"`{each}`" for each, result in results.items() if result == kind)
        for kind in OUTCOMES[1:]
    }
    count = list(results.values()).count(OUTCOMES[0])
    cells = [name, version, str(count), *(names[kind] or "none" for kind in OUTCOMES[1:])]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("name", LIBRARIES)
def test_resumed_run_is_stock_or_refused(tmp_path: Path, name: str) -> None:
    """No class loses state silently, and the guide's table says what each does."""
    try:
        import_library(name)
    except ImportError:
        pytest.skip(f"{name} is not installed")
    results = dict(outcomes(name, tmp_path))
    assert {kind: each for kind, each in results.items() if each not in OUTCOMES} == {}
    assert re.findall(rf"^\| {name} \|.*$", GUIDE.read_text(), re.MULTILINE) == [row(name, results)]
