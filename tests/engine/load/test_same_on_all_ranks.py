"""Ranks with different options of one load raise before a byte is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.refusals import same_error
from tests.support.simulated_nodes import NAME, SAVE
from unified_ckpt.engine.load.same_on_all_ranks import check_same_on_all_ranks, shared_settings
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.testing import make_checkpointer, try_ranks

COLUMNS = uc.Layout(mesh={"tp": 2}, rules={"w": {"tp": 1}})
LOAD = uc.LoadOptions(timeout_seconds=8)


@pytest.mark.parametrize("extra", [False, True], ids=["all is there", "something is missing"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("name", "values"),
    [("strict", (True, False)), ("verify", ("read", "off")), ("max_over_read", (1.0, 1000.0))],
)
def test_options_that_are_not_the_same_on_all_ranks(
    tmp_path: Path, name: str, values: tuple[object, object], turned: bool, extra: bool
) -> None:
    uc.save(
        tmp_path / NAME,
        model={"w": torch.ones(1024, 1024), "s": torch.ones(4)},
        step=1,
        options=SAVE,
    )
    values = values[::-1] if turned else values
    targets = [
        {
            "w": torch.zeros(1024, 512),
            "s": torch.zeros(4),
            **({"x": torch.zeros(3)} if extra else {}),
        }
        for _ in range(2)
    ]

    def load(comm: Comm) -> None:
        value = values[comm.rank]
        how = (
            {"strict": value}
            if name == "strict"
            else {"options": LOAD.model_copy(update={name: value})}
        )
        with make_checkpointer(comm) as made:
            made.load(
                tmp_path / NAME,
                model=targets[comm.rank],
                layout=COLUMNS,
                **{"options": LOAD, **how},
            )

    found = (
        f"{name} is not the same on all ranks of this load: rank\\(s\\) 0 {values[0]!r}; "
        f"rank\\(s\\) 1 {values[1]!r}; pass one value"
    )
    same_error(try_ranks(2, load), uc.LayoutError, found)
    assert not any(tensor.any() for target in targets for tensor in target.values())


def test_many_ranks_are_listed_briefly() -> None:
    told = [
        shared_settings("ab"[rank in (1, 5)], strict=True, options=LOAD) for rank in range(2048)
    ]
    with pytest.raises(
        uc.StorageError,
        match=r"rank\(s\) 0, 2-4, 6-2047 save a; rank\(s\) 1, 5 save b; expected one",
    ):
        check_same_on_all_ranks(told)


def test_source_without_a_save_id() -> None:
    told = [shared_settings(save_id, strict=True, options=LOAD) for save_id in ("a", None)]
    with pytest.raises(uc.StorageError, match=r"rank\(s\) 0 save a; rank\(s\) 1 one without an id"):
        check_same_on_all_ranks(told)
    check_same_on_all_ranks(told[1:])
