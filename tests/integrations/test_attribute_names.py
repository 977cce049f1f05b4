"""Which attribute of a module holds a checkpoint's model."""

from __future__ import annotations

import pytest
from torch import nn

import unified_ckpt as uc
from unified_ckpt.integrations.attribute_names import AttributeNames, compare_names


def bare() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def wrapped(*path: str, **others: nn.Module) -> nn.Module:
    """A model under a path of attributes, beside other attributes."""
    module = bare()
    for name in reversed(path):
        parent = nn.Module()
        parent.add_module(name, module)
        module = parent
    for name, other in others.items():
        module.add_module(name, other)
    return module


@pytest.mark.parametrize("path", [("model",), ("net", "model"), ("0",)])
@pytest.mark.parametrize("side", ["module", "checkpoint"])
def test_one_attribute_holds_all_names(path: tuple[str, ...], side: str) -> None:
    outer, inner = wrapped(*path, head=nn.Linear(1, 1)), bare()
    module, saved = (outer, inner) if side == "module" else (inner, outer)
    names = compare_names(module.state_dict(), saved.state_dict(), label="path")
    attribute = ".".join(path)
    expected = (
        AttributeNames(in_module=attribute)
        if side == "module"
        else AttributeNames(in_checkpoint=attribute)
    )
    assert names == expected
    target, stored = names.target(module).state_dict(), saved.state_dict()
    assert {*target} <= {*stored}
    own = {tensor.data_ptr() for tensor in module.state_dict().values()}
    assert {tensor.data_ptr() for tensor in target.values()} <= own
    assert attribute in str(names)


@pytest.mark.parametrize(
    "saved", [bare(), nn.Module(), nn.Sequential(nn.Linear(2, 3)), nn.GRU(1, 1)]
)
def test_other_names_are_left_to_the_load(saved: nn.Module) -> None:
    """They are equal, missing, partly equal, or those of another model."""
    names = compare_names(bare().state_dict(), saved.state_dict(), label="path")
    assert names == AttributeNames()
    assert not str(names)
    module = bare()
    assert names.target(module) is module


def test_several_attributes_raise() -> None:
    both = wrapped("student", teacher=bare())
    with pytest.raises(uc.MismatchError, match=r"path: the attributes student, teacher of the mod"):
        compare_names(both.state_dict(), bare().state_dict(), label="path")
    with pytest.raises(uc.MismatchError, match=r"student, teacher of the saved module"):
        compare_names(bare().state_dict(), both.state_dict(), label="path")
