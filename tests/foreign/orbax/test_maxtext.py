"""MaxText checkpoints, written by Orbax, equal the Hugging Face models that they were made from."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unified_ckpt as uc
from tests.support.foreign.maxtexts import KINDS, HubModel, make, tree_of
from tests.support.foreign.orbaxes import MaxText, as_numpy, job, mapped, write
from unified_ckpt.cli.main import main
from unified_ckpt.engine.source.view import SourceView
from unified_ckpt.foreign.open import open_source
from unified_ckpt.foreign.orbax.export_maxtext import maxtext_view
from unified_ckpt.options import SourceOptions

FORMS = ["stacked", "unstacked"]
# in the other models, nothing that stacking changes is different
UNSTACKED = ("llama3", "mixtral", "gemma", "gemma2", "gemma3")
DEFAULT = (
    *(("llama3", form) for form in FORMS),
    *(("gemma3", form) for form in FORMS),
    *((kind, "stacked") for kind in ("mixtral", "gemma2", "qwen3_moe")),
)


def pairs(kinds: Iterable[str]) -> list[Any]:
    """Kinds and forms; those without anything of their own are integration tests."""
    return [
        pytest.param(kind, form, marks=[] if (kind, form) in DEFAULT else pytest.mark.integration)
        for kind in kinds
        for form in FORMS
        if form == "stacked" or kind in UNSTACKED
    ]


DRIVERS = [
    {"ocdbt": True, "zarr3": True},
    {"ocdbt": True, "zarr3": False},
    {"ocdbt": False, "zarr3": True},
    {"ocdbt": False, "zarr3": False},
]


@pytest.fixture(scope="module")
def needed(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """Kinds and forms of the tests that run."""
    cases = [
        item.callspec.params
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else {}
        for item in request.session.items
        if item.path == Path(__file__)
    ]
    return sorted({(case.get("kind", "llama3"), case.get("form", "stacked")) for case in cases})


@pytest.fixture(scope="module")
def models(
    needed: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, HubModel]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make(kind, root / kind) for kind in {"llama3", *(kind for kind, _ in needed)}}


@pytest.fixture(scope="module")
def written(
    needed: list[tuple[str, str]],
    models: dict[str, HubModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Folders named <kind>-<stacked or unstacked>-<training or inference>; drivers alternate."""
    root = tmp_path_factory.mktemp("written")
    jobs = []
    for kind, form in needed:
        for trained in (True, False) if kind == "llama3" else (True,):
            name = f"{kind}-{form}-{'training' if trained else 'inference'}"
            tree = tree_of(models[kind], stacked=form == "stacked", trained=trained)
            jobs.append(job(root / name, tree, **DRIVERS[len(jobs) % 4]))
    write(jobs, root / "jobs")
    return root


def opened(path: Path, fixture: HubModel) -> Any:
    return uc.open(path, options=SourceOptions(config=str(fixture.folder)))


@pytest.mark.parametrize(("kind", "form"), pairs(KINDS))
def test_model_and_moments_are_bitwise_equal(
    models: dict[str, HubModel], written: Path, kind: str, form: str
) -> None:
    fixture = models[kind]
    with opened(written / f"{kind}-{form}-training", fixture) as source:
        assert set(source["model"].keys()) == set(fixture.state)
        for name, tensor in fixture.state.items():
            assert torch.equal(source["model"][name][...], tensor), name
        steps = {f"{name}/step" for name in fixture.state}
        assert set(source["optimizer"].keys()) == set(fixture.moments) | steps
        for name, tensor in fixture.moments.items():
            assert torch.equal(source["optimizer"][name][...], tensor), name
        assert all(source["optimizer"][name][...] == 7 for name in steps)
        name = "model.layers.1.self_attn.q_proj.weight"
        assert torch.equal(source["model"][name][5:37, 3:50], fixture.state[name][5:37, 3:50])
        assert source.step == 7
        tie = {"lm_head.weight": "model.embed_tokens.weight"}
        tied = fixture.model.config.tie_word_embeddings
        assert source.source.aliases("model") == (tie if tied else {})
    assert "jax" not in sys.modules


@pytest.mark.parametrize(
    ("kind", "form", "cache_nbytes"),
    [
        *((kind, "stacked", 1 << 20) for kind in ("llama3", "mixtral", "gemma2")),
        pytest.param("mixtral", "stacked", 1, marks=pytest.mark.slow),
        pytest.param("mixtral", "unstacked", 1 << 20, marks=pytest.mark.slow),
    ],
)
def test_tensors_in_many_pieces(
    models: dict[str, HubModel],
    written: Path,
    kind: str,
    form: str,
    cache_nbytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pieces are chunks if the cache holds a whole tensor, and rows if it does not."""
    monkeypatch.setattr("unified_ckpt.foreign.orbax.arrays.READ_NBYTES", 3000)
    monkeypatch.setattr("unified_ckpt.foreign.orbax.arrays.MAX_READ_NBYTES", 3000)
    monkeypatch.setattr("unified_ckpt.foreign.orbax.maxtext.CACHE_NBYTES", cache_nbytes)
    fixture = models[kind]
    with opened(written / f"{kind}-{form}-training", fixture) as source:
        for name, tensor in fixture.state.items():
            assert torch.equal(source["model"][name][...], tensor), name
        for name, tensor in fixture.moments.items():
            assert torch.equal(source["optimizer"][name][...], tensor), name


@pytest.mark.parametrize("form", FORMS)
def test_params_only_checkpoint(models: dict[str, HubModel], written: Path, form: str) -> None:
    fixture = models["llama3"]
    with opened(written / f"llama3-{form}-inference", fixture) as source:
        assert source.parts == ("model",)
        assert source.step == 7  # from the folder's name: the tree has no step
        for name, tensor in fixture.state.items():
            assert torch.equal(source["model"][name][...], tensor), name


@pytest.mark.parametrize("kind", ["llama3", "qwen3_moe", "gemma2"])
def test_view_as_maxtext_restores_the_stored_bytes(
    models: dict[str, HubModel], written: Path, kind: str
) -> None:
    path, fixture = written / f"{kind}-stacked-training", models[kind]
    ours = open_source(str(path), SourceOptions(config=str(fixture.folder)))
    with (
        uc.open(path, options=SourceOptions(names="own")) as native,
        SourceView(maxtext_view(ours, fixture.model.config.to_dict())) as view,
    ):
        assert view.parts == native.parts
        for part in native.parts:
            assert set(view[part]) == set(native[part])
            for name in native[part]:
                viewed, stored = view[part][name][...], native[part][name][...]
                rows = tuple(
                    slice(size) for size in viewed.shape
                )  # without the padding of the vocabulary
                assert torch.equal(viewed, stored[rows]), name


# ---- identifying the model


def test_ambiguous_names_are_kept_with_a_warning(
    written: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without config.json, reading uses MaxText's own names and a conversion is refused."""
    path = written / "llama3-stacked-training"
    query = "decoder.layers.self_attention.query.kernel"
    target = {query: torch.zeros(64, 3, 4, 16)}
    uc.load(path, model=target, strict=False)
    with uc.open(path, options=SourceOptions(names="own")) as source:
        assert torch.equal(target[query], source["model"][query][...])
    assert re.search(
        r"several models(.|\n)*pass the model's config.json(.|\n)*using MaxText's own names",
        caplog.text,
    )
    assert main(["inspect", str(path)]) == 0
    assert "self_attention" in capsys.readouterr().out
    for to in ("huggingface", "unified"):
        with pytest.raises(
            uc.FormatError,
            match=r"names are those of several models(.|\n)*pass the model's config.json",
        ):
            uc.convert(path, tmp_path / to, to=to)
    with pytest.raises(uc.FormatError, match=r"names are those of several models"):
        uc.open(path, options=SourceOptions(names="huggingface"))


def test_own_names_are_kept(models: dict[str, HubModel], written: Path) -> None:
    fixture = models["llama3"]
    expected = MaxText(fixture.model.config, mapped(fixture.state, as_numpy)).tree(
        stacked=True, vocab=128
    )
    with uc.open(written / "llama3-stacked-training", options=SourceOptions(names="own")) as source:
        query = source["model"]["decoder.layers.self_attention.query.kernel"]
        assert query.shape == (64, 3, 4, 16)
        assert np.array_equal(
            query[...].numpy(), expected["decoder"]["layers"]["self_attention"]["query"]["kernel"]
        )
        assert source["optimizer"]["token_embedder.embedding/exp_avg"].shape == (128, 64)
        assert source["optimizer"]["token_embedder.embedding/step"][...] == 7


@pytest.mark.parametrize(("kind", "form"), pairs(["mixtral", "gemma", "gemma3"]))
def test_names_that_identify_the_model(
    models: dict[str, HubModel], written: Path, kind: str, form: str
) -> None:
    """The names identify the model, but not how much of the vocabulary is padding."""
    fixture = models[kind]
    with uc.open(written / f"{kind}-{form}-training") as source:
        assert set(source["model"].keys()) == set(fixture.state)
        for name, tensor in fixture.state.items():
            values = source["model"][name][...]
            assert torch.equal(values[: len(tensor)], tensor), name
            assert values.shape == tensor.shape or (
                name in ("lm_head.weight", "model.embed_tokens.weight") and len(values) == 128
            )


def options_with(fixture: HubModel, path: Path, **change: Any) -> SourceOptions:
    config = json.loads((fixture.folder / "config.json").read_text())
    path.write_text(json.dumps({**config, **change}))
    return SourceOptions(config=str(path))


WRONG: list[tuple[str, dict[str, Any], type[uc.CheckpointError], str]] = [
    (
        "llama3",
        {"num_hidden_layers": 2},
        uc.FormatError,
        r"shapes do not match(.|\n)*layers.*has shape \(.*3.*\), expected \(.*2.*\)",
    ),
    (
        "llama3",
        {"num_attention_heads": 8},
        uc.FormatError,
        r"query.kernel has shape \(64, 3, 4, 16\), expected \(64, 3, 8, 16\)",
    ),
    (
        "llama3",
        {"vocab_size": 129},
        uc.FormatError,
        r"embedding has shape \(128, 64\), expected \(129, 64\)",
    ),
    (
        "llama3",
        {"tie_word_embeddings": True},
        uc.FormatError,
        r"tensors that the model lacks(.|\n)*logits_dense",
    ),
    (
        "llama3",
        {"model_type": "qwen2"},
        uc.IncompleteError,
        r"as qwen2: tensors of the model are missing in the checkpoint(.|\n)*query.bias",
    ),
    (
        "llama3",
        {"model_type": "opt"},
        uc.FormatError,
        r"got model_type 'opt' of a MaxText checkpoint, expected one of llama",
    ),
    (
        "llama3",
        {"num_attention_heads": None},
        uc.FormatError,
        "expected a valid llama configuration",
    ),
    ("gemma2", {"num_hidden_layers": 5}, uc.FormatError, "odd num_hidden_layers"),
    (
        "mixtral",
        {"num_local_experts": 2},
        uc.FormatError,
        r"wi_0 has shape \(3, 3, 64, 96\), expected \(2, 3, 64, 96\)",
    ),
]


@pytest.mark.parametrize(("kind", "change", "error", "match"), WRONG)
def test_config_of_another_model_is_rejected(
    models: dict[str, HubModel],
    written: Path,
    tmp_path: Path,
    kind: str,
    change: dict[str, Any],
    error: type[uc.CheckpointError],
    match: str,
) -> None:
    with pytest.raises(error, match=match):
        uc.open(
            written / f"{kind}-stacked-training",
            options=options_with(models[kind], tmp_path / "config.json", **change),
        )


def test_invalid_config_is_rejected(written: Path, tmp_path: Path) -> None:
    where = written / "llama3-stacked-training"
    with pytest.raises(uc.NotFoundError, match=r"config.json: no such file"):
        uc.open(where, options=SourceOptions(config=str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(uc.FormatError, match=r"config.json: not valid JSON"):
        uc.open(where, options=SourceOptions(config=str(tmp_path)))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(uc.FormatError, match="expected an object"):
        uc.open(where, options=SourceOptions(config=str(tmp_path)))
