"""A user's conversion function is called only when named; its results are computed when read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.views import conversions
from unified_ckpt.errors import CheckpointError, FormatError, NotFoundError
from unified_ckpt.options import LoadOptions, SourceOptions

QUICK = uc.SaveOptions(fsync=False)
MODEL = {"w": torch.randn(3, 4), "lazy": torch.randn(5, 2).to(torch.bfloat16)}
MASTER = {"w": torch.randn(3, 4)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    uc.save(tmp_path / "c", model=MODEL, master_weights=MASTER, options=QUICK)
    return tmp_path / "c"


def options(name: str) -> SourceOptions:
    return SourceOptions(conversion_fn=f"tests.support.views.conversions{name}")


@pytest.mark.parametrize("mark", [":", "."])
def test_tensors_under_other_names_are_the_stored_bytes(folder: Path, mark: str) -> None:
    with (
        uc.open(folder) as opened,
        uc.open(folder, options=options(f"{mark}renamed")) as renamed_view,
    ):
        assert sorted(renamed_view["model"]) == ["net.lazy", "net.w"]
        stored, keys = opened.source.block_digests([("model", "w")]), [("model", "net.w")]
        assert renamed_view.source.block_digests(keys)["model", "net.w"] == stored["model", "w"]
    target = torch.zeros(3, 4)
    report = uc.load(
        folder,
        model={"net.w": target},
        strict=False,
        options=LoadOptions(source=options(f"{mark}renamed")),
    )
    assert torch.equal(target, MODEL["w"])
    assert report.verified_bytes == target.nbytes


def test_tied_tensors_stay_tied_under_new_names(tmp_path: Path) -> None:
    embedding = torch.nn.Parameter(torch.randn(3, 4))
    model = {"a.e": embedding, "b.h": embedding, "c": torch.ones(2)}
    uc.save(tmp_path / "c", model=model, options=QUICK)
    with uc.open(tmp_path / "c", options=options(":renamed")) as opened:
        assert sorted(opened["model"]) == ["net.a.e", "net.c"]
        assert opened.source.aliases("model") == {"net.b.h": "net.a.e"}
        assert torch.equal(opened["model"]["net.b.h"][...], embedding)
    with uc.open(tmp_path / "c", options=options(":same")) as opened:
        assert opened.source.aliases("model") == {"b.h": "a.e"}


def test_results_are_computed_when_read(folder: Path) -> None:
    conversions.CALLS.clear()
    with uc.open(folder, options=options(":transposed")) as opened:
        assert conversions.CALLS == ["w"]  # once for its shape; the other result states its shape
        assert torch.equal(opened["model"]["w"][1:3], MODEL["w"].T[1:3])
        assert torch.equal(opened["model"]["lazy"][...], MODEL["lazy"].T)
        assert conversions.CALLS == ["w", "w", "lazy"]
        assert opened.parts == ("model",)


def test_rules_come_first(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('[[rules]]\nmatch = "w"\nto = "v"\n')
    both = SourceOptions(
        rename=str(tmp_path / "r.toml"), conversion_fn="tests.support.views.conversions:renamed"
    )
    with uc.open(folder, options=both) as opened:
        assert torch.equal(opened["model"]["net.v"][...], MODEL["w"])


REFUSED: list[tuple[str, type[Exception], str]] = [
    (":none", NotFoundError, "tests.support.views.conversions has no function none"),
    (
        "s:none",
        NotFoundError,
        "tests.support.views.conversionss:none: "
        "cannot import module tests.support.views.conversionss",
    ),
    (":no_dict", FormatError, r"returned a list, expected {part: {name: tensor}}"),
    (":no_tensor", FormatError, "model:w: got a str, expected a torch tensor"),
    (":raises", ArithmeticError, "of mine"),
]


@pytest.mark.parametrize(("name", "kind", "text"), REFUSED, ids=[one[0] for one in REFUSED])
def test_missing_functions_and_bad_results_are_refused(
    folder: Path, name: str, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        uc.open(folder, options=options(name))


def test_no_function_is_named(folder: Path) -> None:
    with pytest.raises(
        FormatError, match=r"got no function name, expected package.module:function"
    ):
        uc.open(folder, options=SourceOptions(conversion_fn="fn"))


def test_views_are_read_by_value_and_sparse_tensors_refused(folder: Path) -> None:
    with uc.open(folder, options=options(":views")) as opened:
        assert torch.equal(opened["model"]["conjugate"][...], conversions.COMPLEX.conj())
        assert torch.equal(opened["model"]["negative"][...], -conversions.COMPLEX.imag)
    with (
        uc.open(folder, options=options(":sparse")) as opened,
        pytest.raises(FormatError, match=r"model:w: got a torch.sparse_coo tensor, expected a de"),
    ):
        opened["model"]["w"][...]


def test_result_of_another_shape_is_an_error_when_read(
    folder: Path,
) -> None:
    target = torch.zeros(1, 1)
    with pytest.raises(
        CheckpointError, match=r"model:w: got shape \(3, 4\) and torch.float32, expected \(1, 1\)"
    ):
        uc.load(folder, model={"w": target}, options=LoadOptions(source=options(":lying")))
    assert not target.any()
