"""Megatron-LM's rank folders: any parallelism gives the whole model; damage is refused by name."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.foreign.megatron_models import JOBS, VOCAB, drawn, new_model
from tests.support.foreign.megatrons import (
    Job,
    Tensors,
    arguments,
    megatron_classes,
    no_decay,
    place_of,
    stage,
    write,
)
from unified_ckpt.cli.main import main
from unified_ckpt.foreign.megatron.optimizer_states import flat_ranges
from unified_ckpt.integrations.transformers.hub_names import open_model_names
from unified_ckpt.options import SourceOptions


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(torch.arange(10)[None] % VOCAB).logits
    return output


# Virtual stages, buckets, experts in one tensor each and in one file: the others differ in less.
DEFAULT = ("llama, virtual stages, tied, flat", "qwen3, buckets", "mixtral, flat", "qwen3 moe")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.integration) for name in JOBS],
)
def test_loaded_model_computes_the_same_logits(tmp_path: Path, name: str) -> None:
    kind, job, more = JOBS[name]
    model, hub = drawn(kind, job, tmp_path)
    root = write(tmp_path / "job", job, hub, **more)
    with uc.open(root) as source:
        assert source.parts == (
            ("model",) if job.optimizer == "none" else ("master_weights", "model", "optimizer")
        )
    other = new_model(kind, job).bfloat16()
    with open_model_names(root, model=other) as renamed:  # transformers stacks experts in memory
        uc.load(renamed, model=other)
    assert torch.equal(logits(other), logits(model))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensors]]:
    tmp_path = tmp_path_factory.mktemp("llama")
    job = Job(tp=2, pp=2, optimizer="flat")
    _, hub = drawn("Llama", job, tmp_path)
    return write(tmp_path / "job", job, hub), hub


@pytest.fixture
def root(llama: tuple[Path, dict[str, Tensors]], tmp_path: Path) -> Path:
    shutil.copytree(llama[0], tmp_path / "job")
    return tmp_path / "job"


def of_rank(root: Path, name: str = "mp_rank_01_000") -> Path:
    return root / "iter_0000007" / name


def changed(path: Path, change: Callable[[Any], object]) -> None:
    with megatron_classes():
        content = torch.load(path, weights_only=False, map_location="cpu")
        change(content)
        torch.save(content, path)


def test_job_resumes_with_hyperparameters(
    llama: tuple[Path, dict[str, Tensors]],
) -> None:
    root, hub = llama
    model = new_model("Llama", Job()).float()
    named = list(model.named_parameters())
    groups = [
        {"params": [param for name, param in named if no_decay(name, param) == decayed]}
        for decayed in (False, True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    report = uc.load(root, model=model, optimizer=optimizer)
    assert report.sources["model"] == ("master_weights",)  # the trainer is fp32
    assert [
        (param["lr"], param["weight_decay"], param["betas"]) for param in optimizer.param_groups
    ] == [(0.01, w, (0.9, 0.95)) for w in (0.1, 0.0)]
    for name, parameter in named:
        assert torch.equal(parameter, hub["param"][name])
        assert torch.equal(optimizer.state[parameter]["exp_avg_sq"], hub["exp_avg_sq"][name])
        assert optimizer.state[parameter]["step"] == 7
    assert report.step == 7
    assert report.extra["opt_param_scheduler"] == {"max_lr": 0.01, "num_steps": 700}
    by_name = sys.version_info < (3, 11, 4)  # so these pickle members of an enum
    assert report.extra["args"]["attention_backend"] == ("flash" if by_name else 1)
    assert report.extra["args"]["save"] == "/somewhere"
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_random_state_of_a_rank(llama: tuple[Path, dict[str, Tensors]]) -> None:
    with uc.open(llama[0]) as source:
        states = [
            source.rank_extra[rank]["rng_state"]["torch_rng_state"].tolist() for rank in range(8)
        ]
    assert states == [[tp, pp, 0] for pp in range(2) for _ in range(2) for tp in range(2)]


def test_random_state_of_an_expert_rank(tmp_path: Path) -> None:
    job = Job(tp=2, pp=2, ep=2, experts=4, optimizer="none")
    _, hub = drawn("Mixtral", job, tmp_path)
    with uc.open(write(tmp_path / "job", job, hub)) as source:
        for rank in range(16):
            state = source.rank_extra[rank]["rng_state"]["torch_rng_state"]
            assert tuple(state.tolist()) == place_of(rank, arguments(job)), rank


def test_random_state_of_a_folder_that_one_process_wrote(root: Path) -> None:
    def convert(content: Any) -> None:
        content["args"].rank, content["args"].world_size = 0, 1

    edit(convert, ALL)(root)
    with uc.open(root) as source:
        assert list(source.rank_extra) == []
        assert "rng_state" in source.source.metadata().left_out


def test_step_folder_and_release(root: Path) -> None:
    with uc.open(root / "iter_0000007") as source:
        assert source.format == "megatron"
    (root / "iter_0000007").rename(root / "release")
    (root / "latest_checkpointed_iteration.txt").write_text("release")
    with uc.open(root) as source:
        assert "model.norm.weight" in source["model"]


def test_config_removes_vocabulary_padding(tmp_path: Path) -> None:
    job = Job(tp=2, padding=4)
    model, hub = drawn("Llama", job, tmp_path)
    root = write(tmp_path / "job", job, hub)
    with uc.open(root) as source:
        assert source["model"]["lm_head.weight"].shape == (VOCAB + 4, job.hidden)
    other = new_model("Llama", job).bfloat16()
    uc.load(
        root,
        model=other,
        options=uc.LoadOptions(source=SourceOptions(config=str(tmp_path / "hub"))),
    )
    assert torch.equal(logits(other), logits(model))
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config | {"vocab_size": 999}))
    with pytest.raises(uc.FormatError, match=r"got 64 rows, expected at least 999"):
        uc.open(root, options=SourceOptions(config=str(tmp_path / "hub"), names="huggingface"))


def test_own_names_of_the_whole_model(llama: tuple[Path, dict[str, Tensors]]) -> None:
    tensors = stage(llama[1]["param"], Job(), (0, 0, 0, 0), 0)
    with uc.open(llama[0], options=SourceOptions(names="own")) as source:
        assert set(source["master_weights"].keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(source["master_weights"][name][...], tensor), name


@pytest.mark.parametrize(
    ("kind", "more", "text"),
    [
        ("Llama", {"swiglu": False}, "swiglu=False"),
        ("Llama", {"normalization": "LayerNorm"}, "normalization='LayerNorm'"),
        ("Llama", {"rotary_interleaved": True}, "rotary_interleaved=True"),
        (
            "Mixtral",  # Qwen2-MoE has a gate
            {"moe_shared_expert_intermediate_size": 8},
            "without mlp.shared_experts.gate_weight",
        ),
    ],
)
def test_model_unlike_llama_keeps_own_names(
    tmp_path: Path, kind: str, more: dict[str, Any], text: str
) -> None:
    job = Job(optimizer="none", experts=4 if kind == "Mixtral" else 0)
    _, hub = drawn(kind, job, tmp_path)
    root = write(tmp_path / "job", job, hub, **more)
    with uc.open(root) as source:
        assert "decoder.layers.3.self_attention.linear_proj.weight" in source["model"]
    with pytest.raises(uc.FormatError, match=f"{text}, expected (a model like Llama|it)"):
        uc.open(root, options=SourceOptions(names="huggingface"))


# ---- damage


def edit(change: Callable[[Any], object], *files: str) -> Callable[[Path], object]:
    """Change the content of these files, by default the model's of one rank."""

    def act(root: Path) -> None:
        for pattern in files or ("mp_rank_01_000/model_optim_rng.pt",):
            for path in (root / "iter_0000007").glob(pattern):
                changed(path, change)

    return act


def without(word: str) -> Callable[[Any], object]:
    return lambda content: [
        content["model"].pop(name) for name in list(content["model"]) if word in name
    ]


def rename(first: str, second: str, *, swapped: bool) -> Callable[[Path], object]:
    """Swap two ranks' folders, or put a copy of the first in place of the second."""

    def act(root: Path) -> None:
        shutil.move(of_rank(root, second), root / "aside")
        shutil.copytree(of_rank(root, first), of_rank(root, second))
        if swapped:
            shutil.rmtree(of_rank(root, first))
            shutil.move(root / "aside", of_rank(root, first))

    return act


def track(text: str) -> Callable[[Path], object]:
    return lambda root: (root / "latest_checkpointed_iteration.txt").write_text(text)


def set_pipeline_size(content: Any) -> None:
    content["args"].pipeline_model_parallel_size = 1


ALL = "*/model_optim_rng.pt"
SWAPPED = r"got the file of rank \d+(.|\n)*restore their names"
TP, PP = ("mp_rank_00_000", "mp_rank_01_000"), ("mp_rank_01_000", "mp_rank_01_001")
DAMAGE: dict[str, tuple[Callable[[Path], object], type[uc.CheckpointError], str]] = {
    "no rank": (
        lambda root: shutil.rmtree(of_rank(root)),
        uc.IncompleteError,
        r"folders of ranks are missing(.|\n)*mp_rank_01_000",
    ),
    "no norm": (
        edit(without("decoder.layers.0.mlp.linear_fc1.layer_norm_weight")),
        uc.FormatError,
        r"have different tensors(.|\n)*linear_fc1.layer_norm_weight",
    ),
    "no layer": (
        edit(without("layers.1.")),
        uc.FormatError,
        r"have different tensors(.|\n)*decoder.layers.1",
    ),
    "no optimizer": (
        lambda root: [path.unlink() for path in root.rglob("distrib_optim.pt")],
        uc.IncompleteError,
        r"is distrib_optim.pt missing\?",
    ),
    "no step": (
        track("8"),
        uc.IncompleteError,
        r"names step 8, but .*/iter_0000008 does not exist",
    ),
    "a path": (track("../../etc"), uc.FormatError, r"got '../../etc'"),
    "two saves": (
        edit(lambda content: content.update(iteration=6)),
        uc.FormatError,
        r"mp_rank_01_000/model_optim_rng.pt: got another step",
    ),
    "other ranks": (
        edit(set_pipeline_size, ALL),
        uc.FormatError,
        r"got 2 ranks in its name, expected 1",
    ),
    "order of 2021": (
        edit(lambda content: content.update(checkpoint_version=1.0), ALL),
        uc.FormatError,
        r"got checkpoint_version(.|\n)*expected 2 or later",
    ),
    "unknown class": (
        edit(lambda content: setattr(content["args"], "x", Job())),
        uc.FormatError,
        r"megatrons\.Job",
    ),
    "tensor ranks swapped": (rename(*TP, swapped=True), uc.FormatError, SWAPPED),
    "a tensor rank copied": (rename(*TP, swapped=False), uc.FormatError, SWAPPED),
    "pipeline ranks swapped": (rename(*PP, swapped=True), uc.FormatError, SWAPPED),
    "a pipeline rank copied": (rename(*PP, swapped=False), uc.FormatError, SWAPPED),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_folder_is_refused(root: Path, case: str) -> None:
    damage, error, text = DAMAGE[case]
    damage(root)
    with pytest.raises(error, match=text):
        uc.open(root)


def test_missing_experts_are_named(tmp_path: Path) -> None:
    """The converter of Megatron-LM drops experts silently."""
    job = Job(tp=2, ep=2, experts=4, optimizer="none")
    _, hub = drawn("Mixtral", job, tmp_path)
    root = write(tmp_path / "job", job, hub)
    drop = without("layers.2.mlp.experts.local_experts.1.")
    name = "layers.2.mlp.experts.local_experts.1.linear_fc1"
    edit(drop, "mp_rank_0?_001/model_optim_rng.pt")(root)
    with pytest.raises(uc.FormatError, match=rf"have different tensors(.|\n)*{name}.weight"):
        uc.open(root)
    edit(drop, "mp_rank_0?_000/model_optim_rng.pt")(root)
    with pytest.raises(
        uc.IncompleteError,
        match=r"expected 4 "
        r"experts(.|\n)*local_experts.1.linear_fc1(.|\n)*local_experts.3.linear_fc2",
    ):
        uc.open(root)
    shutil.rmtree(of_rank(root, "mp_rank_01_001"))
    with pytest.raises(uc.IncompleteError, match=r"mp_rank_1_001"):
        uc.open(root)


# ---- optimizer state of another parameter


def flat_of(content: Any) -> dict[str, torch.Tensor]:
    return next(iter(content[0].values()))


def swap(content: Any) -> None:
    first = content["optimizer"]["fp32_from_fp16_params"][0]
    same = [n for n, param in enumerate(first) if param.shape == first[1].shape][:2]
    first[same[0]], first[same[1]] = first[same[1]], first[same[0]]


def roll(content: Any) -> None:
    flat = flat_of(content)
    flat.update({key: flat[key].roll(64) for key in ("param", "exp_avg", "exp_avg_sq")})


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job, tmp_path = Job(tp=1), tmp_path_factory.mktemp("one")
    return write(tmp_path / "job", job, drawn("Llama", job, tmp_path)[1])


@pytest.fixture
def by_groups(one_rank: Path, tmp_path: Path) -> Path:
    """One rank, whose optimizer state is in its model's file."""
    return Path(shutil.copytree(one_rank, tmp_path / "one"))


FLAT = "mp_rank_01_000/distrib_optim.pt"
GROUPS = "mp_rank_00/model_optim_rng.pt"
WRONG_VALUES: dict[str, tuple[str, Callable[[Any], object], str, str]] = {
    "another order": (FLAT, roll, "master_weights", ""),
    "moments of other weights": (
        FLAT,
        lambda content: flat_of(content)["param"].add_(1.0),
        "optimizer",
        "/exp_avg",
    ),
    "two of equal shape": (GROUPS, swap, "master_weights", ""),
}


@pytest.mark.parametrize("case", WRONG_VALUES)
def test_state_of_another_parameter_is_refused(root: Path, by_groups: Path, case: str) -> None:
    """All shapes fit; the fp32 copy of the weights reveals it. The model alone loads."""
    file, change, part, suffix = WRONG_VALUES[case]
    path = root if file == FLAT else by_groups
    edit(change, file)(path)
    uc.load(path, model=new_model("Llama", Job()).bfloat16())
    with (
        uc.open(path) as source,
        pytest.raises(uc.IntegrityError, match=r"does not round to the model's tensor"),
    ):
        _ = [source[part][name + suffix][...] for name in source["model"]]


ONLY_MODEL: list[tuple[str, Callable[[Any], object], str]] = [
    (
        FLAT,
        lambda content: flat_of(content).update(exp_avg=torch.zeros(64)),
        r"buffer 0: got numels .*parameters are in another order",
    ),
    (FLAT, lambda content: content.pop("buckets_coalesced"), r"one buffer per bucket"),
    (
        GROUPS,
        lambda o: o["optimizer"]["optimizer"]["param_groups"][0]["params"].pop(),
        r"param group 0: got 17 parameters, expected 18",
    ),
    (
        GROUPS,
        lambda o: o["optimizer"]["optimizer"]["state"].update(
            {0: o["optimizer"]["optimizer"]["state"][1]}
        ),
        r"exp_avg: got shape",
    ),
    (
        GROUPS,
        lambda o: o["optimizer"]["optimizer"]["state"].pop(3),
        r"no optimizer state of parameter 3",
    ),
    (
        GROUPS,
        lambda o: o["optimizer"]["fp32_from_fp16_params"][0].pop(),
        r"param group 0: got 17 fp32 copies, expected 18",
    ),
    (
        GROUPS,
        lambda o: o["optimizer"]["optimizer"]["param_groups"][1].update(wd_mult=1.0),
        r"expected exactly one for each",
    ),
    (
        GROUPS,
        lambda o: [group.pop("step") for group in o["optimizer"]["optimizer"]["param_groups"]],
        r"no step count",
    ),
    (
        GROUPS,
        lambda o: o["optimizer"]["optimizer"].pop("param_groups"),
        r"expected an optimizer of Megatron-LM: KeyError\('param_groups'\)",
    ),
]


@pytest.mark.parametrize(("file", "change", "text"), ONLY_MODEL)
def test_wrong_optimizer_is_refused_model_loads(
    root: Path, by_groups: Path, file: str, change: Callable[[Any], object], text: str
) -> None:
    path = root if file == FLAT else by_groups
    edit(change, file)(path)
    check_only_model_loads(path, text)


def test_unreadable_optimizer_is_refused_model_loads(root: Path) -> None:
    os.truncate(of_rank(root) / "distrib_optim.pt", 100)
    check_only_model_loads(root, r"mp_rank_01_000/distrib_optim.pt")
    (of_rank(root) / "layer_wise_optimizer_0.pt").touch()
    check_only_model_loads(root, r"layer-wise optimizer")


def check_only_model_loads(root: Path, text: str) -> None:
    """Check that a requested optimizer is refused before anything changes, and the model loads."""
    model = new_model("Llama", Job()).bfloat16()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(uc.FormatError, match=text):
        uc.load(root, model=model, optimizer=optimizer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not optimizer.state
    uc.load(root, model=model)
    assert not any(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert main(["inspect", str(root)]) == 0
    with pytest.raises(uc.FormatError, match=text):
        uc.convert(root, root.parent / "new")
    assert not (root.parent / "new").exists()


@pytest.mark.parametrize(
    ("sizes", "bucket", "ranges"),
    [
        ([(10, False), (70, False), (5, False)], None, [(192, 202), (64, 134), (0, 5)]),
        ([(10, False), (70, False), (5, False)], 60, [(134, 144), (64, 134), (0, 5)]),
        ([(10, True), (70, False), (5, False)], None, [(192, 202), (64, 134), (0, 5)]),
        ([(10, False), (70, False), (5, True)], None, [(133, 143), (5, 75), (0, 5)]),
    ],
)
def test_flat_ranges(
    sizes: list[tuple[int, bool]], bucket: int | None, ranges: list[tuple[int, int]]
) -> None:
    assert flat_ranges(sizes, bucket) == ranges
