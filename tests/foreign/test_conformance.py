"""Every format and every view passes the conformance suite."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.foreign import conformance
from tests.foreign.conformance_cases import PYTORCH
from tests.foreign.conformance_frameworks import FRAMEWORKS
from tests.foreign.conformance_views import VIEWS
from tests.support.foreign.source_cases import Case

CASES = PYTORCH | FRAMEWORKS | VIEWS
# Further layouts of formats of which one small case runs by default.
INTEGRATION = (
    *[
        name
        for name in CASES
        if name.startswith("megatron, ") and name != "megatron, mixtral, flat"
    ],
    *[name for name in CASES if name.endswith("not zipped") and "model" not in name],
    *[name for name in CASES if name.startswith("torch, ") and name != "torch, model"],
    "accelerate, files of ranks",
    "accelerate, folders",
    "bin, several files",
    "lightning, sharded",
    "maxtext, mixtral",
    "megatron-core, apart",
    "nanotron",
    "nanotron, zero, 3",
    "nanotron, zero, 12",
    "orbax, ocdbt, zarr2",
    "orbax, files, zarr2",
    "orbax, files, zarr3",
    "orbax, v1",
    "orbax, bare",
    "paddle-flex, by_api",
    "paddle-flex, special",
    "paddle, pickles",
    "paddle, single_bf16",
    "paddle, tied",
    "paddle, tp2_skip",
    "view of a view",
    "view of dcp",
)
TRAINERS = (*FRAMEWORKS, "accelerate", "lightning", "torch, model", "trainer")
COSTLY = (
    conformance.check_nothing_is_lost,
    conformance.check_laziness,
    conformance.check_missing_and_damaged_files,
)
pytestmark = pytest.mark.filterwarnings(
    r"ignore::UserWarning:(pytorch_)?lightning\b",
    "ignore:.*LeafSpec:FutureWarning",
    "ignore::DeprecationWarning:(pytorch_)?lightning",
    "ignore:.*is deprecated and will be removed in v6:FutureWarning",
    "ignore:Could not find a config file in",
)


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return cache(lambda name: CASES[name](tmp_path_factory.mktemp("case")))


def parameters() -> list[Any]:
    """Cases with their checks. The costly checks of formats of trainers are integration tests."""
    return [
        pytest.param(
            name,
            check,
            id=f"{name}-{check.__name__}",
            marks=[pytest.mark.integration]
            if name in INTEGRATION or (name in TRAINERS and check in COSTLY)
            else [],
        )
        for name in CASES
        for check in conformance.CHECKS
    ]


@pytest.mark.parametrize(("name", "check"), parameters())
def test_source_conforms(
    case_of: Callable[[str], Case], name: str, check: Callable[[Case], None]
) -> None:
    check(case_of(name))
