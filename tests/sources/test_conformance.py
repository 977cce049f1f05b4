"""Every format and every view passes the conformance suite."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.sources.conformance import CHECKS
from tests.sources.conformance_cases import PYTORCH
from tests.sources.conformance_frameworks import FRAMEWORKS
from tests.sources.conformance_views import VIEWS
from tests.support.source_cases import Case

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
    "paddle, pickles",
    "paddle, single_bf16",
    "paddle, tied",
    "paddle, tp2_skip",
    "view of a view",
    "view of dcp",
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


def parameter(name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.integration] if name in INTEGRATION else [])


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", [parameter(name) for name in CASES])
def test_source_conforms(
    case_of: Callable[[str], Case], name: str, check: Callable[[Case], None]
) -> None:
    check(case_of(name))
