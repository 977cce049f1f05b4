"""Megatron-LM's rank folders: any parallelism gives the whole model; damage is refused by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.megatron_models import JOBS, VOCAB, drawn, new_model
from tests.support.megatrons import Job, Tensors, megatron_classes, no_decay, stage, write
from tests.support.optimizers import FusedAdam
from unified_ckpt.cli.main import main
from unified_ckpt.integrations.transformers.hub_names import open_model_names
from unified_ckpt.options import SourceOptions
from unified_ckpt.sources.megatron.optimizer_states import flat_ranges


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(torch.arange(10)[None] % VOCAB).logits
    return output


@pytest.mark.parametrize("name", JOBS)
def test_whole_model_and_optimizer(tmp_path: Path, name: str) -> None:
    kind, job, more = JOBS[name]
    model, hub = drawn(kind, job, tmp_path)
    root = write(tmp_path / "job", job, hub, **more)
    with uc.open(root) as source:
        assert source.format == "megatron"
        assert source.step == 7
        assert set(source["model"].keys()) == set(hub["param"])
        for fqn, tensor in hub["param"].items():
            assert torch.equal(source["model"][fqn][...], tensor.bfloat16()), fqn
            if job.optimizer == "none":
                continue
            assert torch.equal(source["master_weights"][fqn][...], tensor), fqn
            assert source["optimizer"][f"{fqn}/step"][...] == 7
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(source["optimizer"][f"{fqn}/{key}"][...], hub[key][fqn]), (
                    f"{fqn}/{key}"
                )
        assert ("optimizer" in source.parts) == (job.optimizer != "none")
    other = new_model(kind, job).bfloat16()
    with open_model_names(root, model=other) as renamed:  # transformers joins experts in memory
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
    assert report.extra["args"]["attention_backend"] == 1
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


def test_convert_and_inspect(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(root)]) == 0
    assert "Megatron-LM" in capsys.readouterr().out
    assert main(["convert", str(root), str(tmp_path / "new")]) == 0
    assert "cast down, equal the model bit for bit" in capsys.readouterr().out
    assert main(["diff", str(root), str(tmp_path / "new")]) == 0
    assert uc.verify(tmp_path / "new", deep=True).ok


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
    ("more", "text"),
    [
        ({"swiglu": False}, "swiglu=False"),
        ({"normalization": "LayerNorm"}, "normalization='LayerNorm'"),
        ({"rotary_interleaved": True}, "rotary_interleaved=True"),
    ],
)
def test_model_unlike_llama_keeps_own_names(
    tmp_path: Path, more: dict[str, Any], text: str
) -> None:
    job = Job(optimizer="none")
    _, hub = drawn("Llama", job, tmp_path)
    root = write(tmp_path / "job", job, hub, **more)
    with uc.open(root) as source:
        assert "decoder.layers.3.mlp.linear_fc1.weight" in source["model"]
    with pytest.raises(uc.FormatError, match=f"{text}, expected a model like Llama"):
        uc.open(root, options=SourceOptions(names="huggingface"))


# ---- what is missing


def test_missing_rank_is_named(root: Path) -> None:
    shutil.rmtree(of_rank(root))
    with pytest.raises(
        uc.IncompleteError, match=r"folders of ranks are missing(.|\n)*mp_rank_01_000"
    ):
        uc.open(root)


def test_missing_experts_are_named(tmp_path: Path) -> None:
    job = Job(tp=2, ep=2, experts=4, optimizer="none")
    _, hub = drawn("Mixtral", job, tmp_path)
    root = write(tmp_path / "job", job, hub)
    shutil.rmtree(of_rank(root, "mp_rank_01_001"))
    with pytest.raises(uc.IncompleteError, match=r"mp_rank_1_001"):
        uc.open(root)


def test_converter_drops_moe_experts_silently(tmp_path: Path) -> None:
    job = Job(ep=2, experts=4, optimizer="none")
    _, hub = drawn("Mixtral", job, tmp_path)
    root = write(tmp_path / "job", job, hub)

    def drop(content: Any) -> None:
        content["model"] = {
            name: tensor
            for name, tensor in content["model"].items()
            if "layers.2.mlp.experts.local_experts.1." not in name
        }

    changed(of_rank(root, "mp_rank_00_001") / "model_optim_rng.pt", drop)
    with pytest.raises(
        uc.FormatError,
        match=r"have different "
        r"tensors(.|\n)*layers.2.mlp.experts.local_experts.1.linear_fc1.weight",
    ):
        uc.open(root)
    changed(of_rank(root, "mp_rank_00_000") / "model_optim_rng.pt", drop)
    with pytest.raises(
        uc.IncompleteError,
        match=r"expected 4 "
        r"experts(.|\n)*local_experts.1.linear_fc1(.|\n)*local_experts.3.linear_fc2",
    ):
        uc.open(root)


def test_norm_missing_on_one_rank_is_refused(root: Path) -> None:
    changed(
        of_rank(root) / "model_optim_rng.pt",
        lambda content: content["model"].pop("decoder.layers.0.mlp.linear_fc1.layer_norm_weight"),
    )
    with pytest.raises(
        uc.FormatError, match=r"have different tensors(.|\n)*linear_fc1.layer_norm_weight"
    ):
        uc.open(root)


@pytest.mark.parametrize("name", ["model_optim_rng.pt", "distrib_optim.pt"])
def test_missing_file_is_named(root: Path, name: str) -> None:
    (of_rank(root) / name).unlink()
    with pytest.raises(uc.IncompleteError, match=rf"{name} (is )?missing(.|\n)*mp_rank_01_000"):
        uc.open(root)


def test_missing_distributed_optimizer_files(root: Path) -> None:
    for path in root.rglob("distrib_optim.pt"):
        path.unlink()
    with pytest.raises(uc.IncompleteError, match=r"is distrib_optim.pt missing\?"):
        uc.open(root)


@pytest.mark.parametrize("cut", [0, 100, -100])
def test_truncated_file_is_named(root: Path, cut: int) -> None:
    path = of_rank(root) / "model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(uc.FormatError, match=r"mp_rank_01_000/model_optim_rng.pt"):
        uc.open(root)


@pytest.mark.parametrize("cut", [0, 100, -100])
def test_truncated_optimizer_is_named(root: Path, cut: int) -> None:
    path = of_rank(root) / "distrib_optim.pt"
    path.write_bytes(path.read_bytes()[:cut])
    check_only_model_loads(root, r"mp_rank_01_000/distrib_optim.pt")


def check_only_model_loads(root: Path, text: str) -> None:
    """The optimizer is refused before anything changes, and only if it is requested."""
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


def test_tracker_names_missing_folder(root: Path) -> None:
    (root / "latest_checkpointed_iteration.txt").write_text("8")
    with pytest.raises(uc.IncompleteError, match=r"names step 8, whose folder does not exist"):
        uc.open(root)
    (root / "latest_checkpointed_iteration.txt").write_text("../../etc")
    with pytest.raises(uc.FormatError, match=r"got '../../etc'"):
        uc.open(root)


def test_files_of_two_saves_are_refused(root: Path) -> None:
    changed(of_rank(root) / "model_optim_rng.pt", lambda content: content.update(iteration=6))
    with pytest.raises(
        uc.FormatError, match=r"mp_rank_01_000/model_optim_rng.pt: got another step"
    ):
        uc.open(root)


@pytest.mark.parametrize(
    "pair", [("mp_rank_00_000", "mp_rank_01_000"), ("mp_rank_01_000", "mp_rank_01_001")]
)
@pytest.mark.parametrize("swapped", [True, False])
def test_rank_folders_swapped_or_copied(root: Path, pair: tuple[str, str], swapped: bool) -> None:
    """Two tensor or two pipeline ranks: every name and shape fits, and the values are wrong."""
    step = root / "iter_0000007"
    first, second = (step / name for name in pair)
    second.rename(step / "aside")
    if swapped:
        first.rename(second)
        (step / "aside").rename(first)
    else:
        shutil.copytree(first, second)
        shutil.rmtree(step / "aside")
    with pytest.raises(uc.FormatError, match=r"got the file of rank \d+(.|\n)*restore their names"):
        uc.open(root)


def test_wrong_number_of_ranks_is_refused(root: Path) -> None:
    for path in root.rglob("model_optim_rng.pt"):
        changed(path, lambda content: setattr(content["args"], "pipeline_model_parallel_size", 1))
    with pytest.raises(uc.FormatError, match=r"got 2 ranks in its name, expected 1"):
        uc.open(root)


def test_missing_layer_is_refused(root: Path) -> None:
    def drop(content: Any) -> None:
        content["model"] = {
            name: tensor for name, tensor in content["model"].items() if "layers.1." not in name
        }

    changed(of_rank(root) / "model_optim_rng.pt", drop)
    with pytest.raises(uc.FormatError, match=r"have different tensors(.|\n)*decoder.layers.1"):
        uc.open(root)


def test_qkv_order_before_2021_is_refused(root: Path) -> None:
    for path in root.rglob("model_optim_rng.pt"):
        changed(path, lambda content: content.update(checkpoint_version=1.0))
    with pytest.raises(uc.FormatError, match=r"got checkpoint_version(.|\n)*expected 2 or later"):
        uc.open(root)


# ---- optimizer state of another parameter


def test_optimizer_silently_wrong_after_layout_change(root: Path) -> None:
    """A buffer in another order has the same size; the fp32 copy of the weights reveals it."""

    def turn(content: Any) -> None:
        ((_, flat),) = content[0].items()
        for key in ("param", "exp_avg", "exp_avg_sq"):
            flat[key] = flat[key].roll(64)

    changed(of_rank(root) / "distrib_optim.pt", turn)
    model = new_model("Llama", Job())
    uc.load(root, model=model.bfloat16())  # without the optimizer it loads
    optimizer = FusedAdam(model.parameters(), master_weights=True)
    with pytest.raises(uc.IntegrityError, match=r"does not round to the model's tensor"):
        uc.load(
            root,
            model=model,
            optimizer=optimizer,
            options=uc.LoadOptions(hyperparameters="current"),
        )


def test_moments_alone_are_checked(root: Path) -> None:
    changed(
        of_rank(root) / "distrib_optim.pt",
        lambda content: next(iter(content[0].values()))["param"].add_(1.0),
    )
    with (
        uc.open(root) as source,
        pytest.raises(uc.IntegrityError, match=r"does not round to the model's tensor"),
    ):
        _ = source["optimizer"]["model.layers.0.mlp.down_proj.weight/exp_avg"][...]


def test_buffer_of_wrong_size_is_refused(root: Path) -> None:
    def grow(content: Any) -> None:
        ((_, flat),) = content[0].items()
        flat["exp_avg"] = torch.cat([flat["exp_avg"], torch.zeros(64)])

    changed(of_rank(root) / "distrib_optim.pt", grow)
    check_only_model_loads(root, r"buffer 0: got numels .*parameters are in another order")


def test_buffers_per_bucket_are_refused(root: Path) -> None:
    changed(of_rank(root) / "distrib_optim.pt", lambda content: content.pop("buckets_coalesced"))
    check_only_model_loads(root, r"one buffer per bucket")


def grouped(tmp_path: Path, change: Callable[[Any], object]) -> Path:
    job = Job(tp=1)
    _, hub = drawn("Llama", job, tmp_path)
    root = write(tmp_path / "job", job, hub)
    changed(
        of_rank(root, "mp_rank_00") / "model_optim_rng.pt",
        lambda content: change(content["optimizer"]),
    )
    return root


def test_swapped_parameters_of_equal_shape(tmp_path: Path) -> None:
    def swap(optimizer: Any) -> None:
        first = optimizer["fp32_from_fp16_params"][0]
        same = [n for n, param in enumerate(first) if param.shape == first[1].shape][:2]
        first[same[0]], first[same[1]] = first[same[1]], first[same[0]]

    root = grouped(tmp_path, swap)
    with (
        uc.open(root) as source,
        pytest.raises(uc.IntegrityError, match=r"does not round to the model's tensor"),
    ):
        _ = [source["master_weights"][name][...] for name in source["master_weights"]]


REFUSED: list[tuple[str, Callable[[Any], object], str]] = [
    (
        "a parameter less",
        lambda o: o["optimizer"]["param_groups"][0]["params"].pop(),
        r"param group 0: got 17 parameters, expected 18",
    ),
    (
        "another shape",
        lambda o: o["optimizer"]["state"].update({0: o["optimizer"]["state"][1]}),
        r"exp_avg: got shape",
    ),
    (
        "no state",
        lambda o: o["optimizer"]["state"].pop(3),
        r"no optimizer state of parameter 3",
    ),
    (
        "a master less",
        lambda o: o["fp32_from_fp16_params"][0].pop(),
        r"param group 0: got 17 fp32 copies, expected 18",
    ),
    (
        "one group twice",
        lambda o: o["optimizer"]["param_groups"][1].update(wd_mult=1.0),
        r"expected exactly one for each",
    ),
    (
        "no steps",
        lambda o: [group.pop("step") for group in o["optimizer"]["param_groups"]],
        r"no step count",
    ),
    (
        "no groups",
        lambda o: o["optimizer"].pop("param_groups"),
        r"expected an optimizer of Megatron-LM: KeyError\('param_groups'\)",
    ),
]


@pytest.mark.parametrize(
    ("change", "text"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_mismatched_optimizer_is_refused(
    tmp_path: Path, change: Callable[[Any], object], text: str
) -> None:
    check_only_model_loads(grouped(tmp_path, change), text)


def test_flat_ranges() -> None:
    assert flat_ranges([(10, False), (70, False), (5, False)], None) == [
        (192, 202),
        (64, 134),
        (0, 5),
    ]
    assert flat_ranges([(10, False), (70, False), (5, False)], 60) == [
        (134, 144),
        (64, 134),
        (0, 5),
    ]
    assert flat_ranges([(10, True), (70, False), (5, False)], None) == [
        (192, 202),
        (64, 134),
        (0, 5),
    ]
    assert flat_ranges([(10, False), (70, False), (5, True)], None) == [(133, 143), (5, 75), (0, 5)]


# ---- hostile files


class Hostile:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


@pytest.mark.parametrize("name", ["model_optim_rng.pt", "distrib_optim.pt"])
@pytest.mark.parametrize("place", ["beside", "inside"])
def test_hostile_file_is_refused_and_not_executed(
    root: Path, tmp_path: Path, name: str, place: str
) -> None:
    def spoil(content: Any) -> None:
        content["x"] = (
            Hostile(tmp_path / "mark")
            if place == "beside"
            else {"args": [Hostile(tmp_path / "mark")]}
        )

    changed(of_rank(root) / name, spoil)
    text = rf"{name}: asks for classes that are not loaded from files(.|\n)*system"
    if name == "distrib_optim.pt":
        check_only_model_loads(root, text)
    else:
        with pytest.raises(uc.FormatError, match=text):
            uc.open(root)
    assert not (tmp_path / "mark").exists()


def test_arguments_of_unknown_class_are_refused(root: Path) -> None:
    changed(
        of_rank(root) / "model_optim_rng.pt",
        lambda content: setattr(content["args"], "x", replace(Job())),
    )
    with pytest.raises(uc.FormatError, match=r"megatrons\.Job"):
        uc.open(root)


def test_layer_wise_optimizer_is_refused(root: Path) -> None:
    (of_rank(root) / "layer_wise_optimizer_0.pt").touch()
    check_only_model_loads(root, r"layer-wise optimizer")
