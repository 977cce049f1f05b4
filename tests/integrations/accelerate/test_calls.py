"""`save_state` and `load_state` in one process: resuming, names, hooks, and errors for wrong
use.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import Sampler, WeightedRandomSampler
from transformers import LlamaForCausalLM

import unified_ckpt as uc
from tests.support.equality import same as is_same
from tests.support.integrations.accelerates import FAST, SEQUENCES, Count, Job, llama, same
from tests.support.runtime.torch_state.optimizers import Grouped
from unified_ckpt.integrations.accelerate import attach, load_state, save_state, save_state_async
from unified_ckpt.integrations.accelerate.folders import is_native

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated"
)  # torchdata 0.11 calls it


class GeneratorSampler(Sampler[int]):
    """Draws the order of each epoch from a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(24, generator=self.generator).tolist()

    def __len__(self) -> int:
        return 24


def of_other_model(*, prepares_its_own: bool = False) -> tuple[Accelerator, Any]:
    """An accelerator whose optimizer steps another model than the prepared one."""
    model, other = nn.Linear(2, 2), nn.Linear(3, 2)
    optimizer = torch.optim.AdamW((model if prepares_its_own else other).parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True)
    _, prepared = accelerator.prepare(model, optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    return accelerator, prepared


def test_attached_accelerator_can_be_copied(tmp_path: Path) -> None:
    """By pickle, as Accelerate's can, also after a save."""
    accelerator, optimizer = of_other_model(prepares_its_own=True)
    attach(accelerator)
    optimizer.step()
    accelerator.save_state(tmp_path / "c")
    again = pickle.loads(pickle.dumps(accelerator))
    weights = again._models[0].weight
    saved = weights.clone()
    with torch.no_grad():
        weights.zero_()
    again.load_state(tmp_path / "c")
    assert is_same(weights.detach(), saved.detach())
    assert not is_same(weights.detach(), torch.zeros_like(weights))


def test_optimizer_of_another_model_is_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Accelerate does: its state needs no model."""
    accelerator, optimizer = of_other_model()
    optimizer.step()
    save_state(accelerator, tmp_path / "c", options=FAST)
    assert "optimizer 0 has parameters of no prepared model" in caplog.text
    resumed, fresh = of_other_model()
    with caplog.at_level("INFO", logger="unified_ckpt"):
        load_state(resumed, tmp_path / "c")
    line = f"resumed from {tmp_path / 'c'}: without a step, saved by 1 rank, loaded by 1 rank"
    assert caplog.messages.count(line) == 1
    assert is_same(fresh.state_dict(), optimizer.state_dict())
    named, _ = of_other_model(prepares_its_own=True)
    with pytest.raises(uc.MismatchError, match="optimizer:weight: is not in the checkpoint"):
        load_state(named, tmp_path / "c")
    save_state(named, tmp_path / "named", options=FAST)
    with pytest.raises(uc.MismatchError, match="optimizers of other models: checkpoint has none"):
        load_state(resumed, tmp_path / "named")


@pytest.mark.parametrize(
    "stop", [4, 6, 10], ids=["midway", "at the last batch", "midway in the second"]
)
def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, straight: Job, stop: int) -> None:
    stopped = Job().run(3, stop=stop)
    assert save_state(stopped.accelerator, tmp_path / "c", step=stop, options=FAST).step == stop
    assert not [
        name for name in os.listdir(tmp_path / "c") if name.endswith((".bin", ".pkl", ".pt"))
    ], "nothing is pickled"
    resumed = Job(seed=7)
    assert load_state(resumed.accelerator, tmp_path / "c").step == stop
    assert same(resumed, stopped)
    assert (resumed.count.seen, resumed.accelerator.step) == (4 * stop, stopped.accelerator.step)
    resumed.epoch = stop // 6
    resumed.run(3)
    assert resumed.losses == straight.losses[stop:]
    assert same(resumed, straight)


@pytest.mark.parametrize(
    ("arguments", "skip"),
    [
        ({"stateful": False}, 4),
        ({"dispatch": True}, 0),
        ({"dispatch": True, "stateful": False}, 4),
    ],
    ids=["skip_first_batches", "dispatched", "skip_first_batches of dispatched"],
)
def test_resume_within_an_epoch(tmp_path: Path, arguments: dict[str, Any], skip: int) -> None:
    """`skip_first_batches` resumes without a stateful dataloader; later epochs keep their order."""
    whole = Job(**arguments).run(3)
    save_state(Job(**arguments).run(3, stop=10).accelerator, tmp_path / "c", options=FAST)
    resumed = Job(seed=7, **arguments)
    load_state(resumed.accelerator, tmp_path / "c")
    resumed.epoch = 1
    resumed.run(3, skip=skip)
    assert resumed.losses == whole.losses[10:]
    assert same(resumed, whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_save_before_the_first_batch_keeps_the_position(tmp_path: Path, workers: int) -> None:
    save_state(Job(workers=workers).run(1, stop=2).accelerator, tmp_path / "c", options=FAST)
    for name, before in (("d", "c"), ("e", "d")):
        job = Job(seed=7, workers=workers)
        load_state(job.accelerator, tmp_path / before)
        save_state(job.accelerator, tmp_path / name, options=FAST)
    last = Job(seed=8, workers=workers)
    load_state(last.accelerator, tmp_path / "e")
    assert [batch.tolist() for batch in last.loader] == [
        batch.tolist() for batch in Job(workers=workers).loader
    ][2:]


@pytest.mark.parametrize("workers", [0, 2])
def test_position_is_converted_to_another_batch_size(
    tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """After 3 steps of 4 samples, batches of 6 continue at sample 12.

    Batches of 8 continue at sample 8, so 4 samples are repeated and a warning is logged.
    """
    save_state(Job(workers=workers).run(1, stop=3).accelerator, tmp_path / "c", options=FAST)
    order = [ids.tolist() for batch in Job().loader for ids in batch]
    for size, first, warning in ((6, 12, ""), (8, 8, "4 samples are repeated")):
        job = Job(seed=7)
        loader = job.accelerator.prepare(
            torch.utils.data.DataLoader(
                SEQUENCES, batch_size=size, shuffle=True, num_workers=workers
            )
        )
        job.accelerator._dataloaders[:] = [loader]
        load_state(job.accelerator, tmp_path / "c")
        assert [ids.tolist() for batch in loader for ids in batch] == order[first:]
        assert warning in caplog.text


def test_save_state_opens_in_transformers(tmp_path: Path) -> None:
    job = Job().run(1, stop=2)
    save_state(
        job.accelerator,
        tmp_path / "c",
        attach=lambda folder: Path(folder, "note.txt").write_text("mine"),
        options=FAST,
    )
    assert {"config.json", "generation_config.json", "model.safetensors", "note.txt"} <= set(
        os.listdir(tmp_path / "c")
    )
    assert uc.verify(tmp_path / "c", deep=True).ok
    loaded, loading_info = LlamaForCausalLM.from_pretrained(
        tmp_path / "c", output_loading_info=True
    )
    assert not loading_info["missing_keys"]
    assert not loading_info["unexpected_keys"]
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    expected = job.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


def two_models(
    seed: int, steps: int, swapped: bool = False
) -> tuple[Accelerator, list[nn.Module], list[Any], nn.Module]:
    """A generator and a critic with an optimizer each, and a registered average."""
    torch.manual_seed(seed)
    accelerator = Accelerator(cpu=True)
    generator, critic = nn.Linear(4, 3), nn.Linear(3, 1)
    adamw, sgd = (
        torch.optim.AdamW(generator.parameters()),
        torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9),
    )
    average = torch.optim.swa_utils.AveragedModel(generator)
    prepared = accelerator.prepare(generator, critic, *((sgd, adamw) if swapped else (adamw, sgd)))
    accelerator.register_for_checkpointing(average)
    for _ in range(steps):
        accelerator.backward(critic(generator(torch.randn(2, 4))).sum())
        for optimizer in prepared[2:]:
            optimizer.step()
            optimizer.zero_grad()
        average.update_parameters(generator)
    return accelerator, [generator, critic], list(prepared[2:]), average


@pytest.mark.parametrize("config", ["", "remove_master_weight"])
def test_several_models_and_optimizers_and_a_registered_module(tmp_path: Path, config: str) -> None:
    """Options that leave out master weights leave out nothing else."""
    accelerator, models, optimizers, average = two_models(0, steps=3)
    save_state(accelerator, tmp_path / "c", options=uc.from_paddle(config, save=FAST).save)
    with uc.open(tmp_path / "c") as source:
        assert set(source.parts) == {"model", "model_1", "custom_0", "optimizer"}
        assert {"weight/exp_avg", "model_1.weight/momentum_buffer"} <= set(source["optimizer"])
    again, others, fresh, mean = two_models(1, steps=0)
    load_state(again, tmp_path / "c")
    for saved, loaded in zip((*models, average), (*others, mean), strict=True):
        expected = saved.state_dict()
        assert all(
            torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items()
        )
    for saved, loaded in zip(optimizers, fresh, strict=True):
        expected, actual = saved.state_dict(), loaded.state_dict()
        assert actual["param_groups"] == expected["param_groups"]
        assert {i: sorted(state) for i, state in actual["state"].items()} == {
            i: sorted(state) for i, state in expected["state"].items()
        }
        assert all(
            torch.equal(actual["state"][i][key], value)
            for i, state in expected["state"].items()
            for key, value in state.items()
        )


def test_another_optimizer_class_raises_and_changes_nothing(tmp_path: Path) -> None:
    accelerator, *_ = two_models(0, steps=1)
    save_state(accelerator, tmp_path / "c", options=FAST)
    again, others, _, _ = two_models(1, steps=0, swapped=True)
    before = [tensor.clone() for tensor in others[0].state_dict().values()]
    with pytest.raises(
        uc.MismatchError, match="optimizers: checkpoint has AdamW, SGD, accelerator has SGD, AdamW"
    ):
        load_state(again, tmp_path / "c")
    assert all(
        torch.equal(a, b) for a, b in zip(before, others[0].state_dict().values(), strict=True)
    )


def names(project: Path) -> list[str]:
    return sorted(os.listdir(project / "checkpoints"))


def test_automatic_names_and_total_limit(tmp_path: Path) -> None:
    job = Job(project=tmp_path, total_limit=2)
    for stop in range(2, 10, 2):
        job.run(2, stop=stop)
        save_state(job.accelerator, options=FAST)
    assert names(tmp_path) == ["checkpoint_2", "checkpoint_3"]
    resumed = Job(seed=7, project=tmp_path, total_limit=2)
    assert load_state(resumed.accelerator).step == 3
    assert same(resumed, job)
    save_state(resumed.accelerator, options=FAST)
    assert names(tmp_path) == ["checkpoint_3", "checkpoint_4"]
    fresh = Job(project=tmp_path, total_limit=2, iteration=4)
    with pytest.raises(
        uc.StorageError, match="checkpoint_4: already exists; call load_state first"
    ):
        save_state(fresh.accelerator)
    with pytest.raises(uc.LayoutError, match="its number as the step; pass a path, or no step"):
        save_state(fresh.accelerator, step=3)
    save_state(resumed.accelerator, tmp_path / "checkpoints" / "checkpoint_1", options=FAST)
    assert "checkpoint_1" in names(tmp_path), "what was just saved stays"


def test_incomplete_checkpoints_are_skipped_and_not_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a resume nor `total_limit` counts an incomplete checkpoint."""
    job = Job(project=tmp_path)
    for stop in (2, 4, 6):
        job.run(1, stop=stop)
        save_state(job.accelerator, options=FAST)
    (tmp_path / "checkpoints/checkpoint_2/optimizer.safetensors").unlink()
    (tmp_path / "checkpoints/checkpoint_1/unified_checkpoint.json").unlink()
    resumed = Job(seed=7, project=tmp_path, total_limit=2)
    assert load_state(resumed.accelerator).step == 0
    warned = [
        record.getMessage() for record in caplog.records if "skips newer" in record.getMessage()
    ]
    assert len(warned) == 1
    assert "checkpoint_2: optimizer.safetensors is missing" in warned[0]
    assert "checkpoint_1: it has no unified_checkpoint.json" in warned[0]
    save_state(resumed.accelerator, options=FAST)
    assert names(tmp_path) == [f"checkpoint_{number}" for number in range(4)], (
        "0 and 3 are the good ones: the limit is kept"
    )


def test_failed_save_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old checkpoint stays until the new one is committed."""
    from unified_ckpt.engine.folder.publish.renames import RenamePublisher

    job = Job(project=tmp_path, total_limit=1)
    save_state(job.accelerator, options=FAST)

    def full(*_: object, **__: object) -> None:
        raise uc.StorageError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(RenamePublisher, "publish", full)
        with pytest.raises(uc.StorageError, match="the disk is full"):
            save_state(job.accelerator, options=FAST)
    assert names(tmp_path) == ["checkpoint_0"]
    save_state(job.accelerator, options=FAST)
    assert names(tmp_path) == ["checkpoint_1"]


def test_save_state_async(tmp_path: Path) -> None:
    job = Job(project=tmp_path, total_limit=1)
    first = save_state_async(job.accelerator, options=FAST)
    job.run(1, stop=4)
    pending = save_state_async(job.accelerator, options=FAST)
    saved = {name: tensor.clone() for name, tensor in job.tensors().items()}
    job.run(1)
    assert [pending.result().step, first.result().step] == [1, 0]
    assert names(tmp_path) == ["checkpoint_1"]
    resumed = Job(seed=7, project=tmp_path)
    load_state(resumed.accelerator)
    loaded = resumed.tensors()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


def test_attach_replaces_save_and_load(tmp_path: Path) -> None:
    native = Job().run(1, stop=2)
    native.accelerator.save_state(str(tmp_path / "native"))
    stopped = Job()
    attach(stopped.accelerator)
    stopped.accelerator.load_state(str(tmp_path / "native"))
    assert same(stopped, native), "what Accelerate wrote is loaded by Accelerate"
    for sizes in ((2,), (2, 2)):
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(nn.Sequential(*(nn.Linear(2, size) for size in sizes)))
        if len(sizes) == 1:
            accelerator.save_state(str(tmp_path / "smaller"))
        else:
            attach(accelerator)
            accelerator.load_state(str(tmp_path / "smaller"), strict=False)
    for _ in range(2):
        stopped.accelerator.save_state(str(tmp_path / "latest"))
    assert (tmp_path / "latest" / "unified_checkpoint.json").is_file()
    resumed = Job(seed=7)
    attach(resumed.accelerator)
    attach(resumed.accelerator)
    resumed.accelerator.load_state(str(tmp_path / "latest"))
    assert same(resumed, stopped)
    with pytest.raises(
        uc.StorageError, match=r"native: holds other files \(.*\), expected a checkpoint"
    ):
        resumed.accelerator.save_state(str(tmp_path / "native"))
    with pytest.raises(
        uc.NotFoundError, match=r"expected a unified one; use accelerator.load_state, or attach"
    ):
        load_state(resumed.accelerator, tmp_path / "native")


def test_attach_keeps_automatic_names(tmp_path: Path) -> None:
    native = Job(project=tmp_path).run(1, stop=2)
    native.accelerator.save_state()
    job = Job(seed=7, project=tmp_path)
    attach(job.accelerator)
    job.accelerator.load_state()
    assert same(job, native)
    job.accelerator.save_state("not used")
    assert names(tmp_path) == ["checkpoint_0", "checkpoint_1"]
    assert os.listdir(tmp_path / "checkpoints/checkpoint_0") != [], (
        "what is not ours is not rotated"
    )
    job.accelerator.project_configuration.iteration = 0
    job.accelerator.save_state("not used")
    assert names(tmp_path) == ["checkpoint_0", "checkpoint_0-before-1", "checkpoint_1"], (
        "what has the name is kept"
    )
    assert is_native(str(tmp_path / "checkpoints/checkpoint_0-before-1"))
    shutil.rmtree(tmp_path / "checkpoints/checkpoint_0")
    (tmp_path / "checkpoints/checkpoint_0-before-1").rename(tmp_path / "checkpoints/checkpoint_0")
    again = Job(seed=8, project=tmp_path)
    attach(again.accelerator)
    again.accelerator.load_state()
    assert again.accelerator.save_iteration == 2


def test_hooks_read_and_write_checkpoint_files(tmp_path: Path) -> None:
    job = Job()
    notes: list[object] = []

    def saving(models: list[Any], weights: list[Any], folder: str) -> None:
        os.makedirs(os.path.join(folder, "unet"))
        Path(folder, "unet", "note.txt").write_text(f"{len(models)} {len(weights)}")
        weights.pop()

    def loading(models: list[Any], folder: str) -> None:
        notes.append(Path(folder, "unet", "note.txt").read_text())
        models.pop()

    attach(job.accelerator)
    job.accelerator.register_save_state_pre_hook(saving)
    job.accelerator.register_load_state_pre_hook(loading)
    job.accelerator.save_state(str(tmp_path / "c"))
    assert os.listdir(tmp_path) == ["c"], "the hooks' folder is gone"
    saved = {name: tensor.clone() for name, tensor in job.tensors().items()}
    job.run(1, stop=2)
    job.accelerator.load_state(str(tmp_path / "c"))
    assert notes == ["1 1"]
    assert all(
        torch.equal(tensor, saved[name]) for name, tensor in job.model.state_dict().items()
    ), "whatever the hooks take out"


def test_wrong_paths_raise(tmp_path: Path) -> None:
    accelerator, whole = Job().accelerator, tmp_path / "run" / "checkpoint_0"
    save_state(accelerator, whole, step=0, options=FAST)
    shutil.copytree(whole, tmp_path / "cut")
    (tmp_path / "cut" / "unified_checkpoint.json").unlink()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "log.txt").write_text("kept")
    no_path = r"got no path; pass one, or set ProjectConfiguration"
    for call, path, error, text in (
        (
            load_state,
            tmp_path / "run",
            uc.NotFoundError,
            "got a run's folder, expected a checkpoint; the latest is checkpoint_0",
        ),
        (
            load_state,
            whole / "config.json",
            uc.NotFoundError,
            "got a file, expected a checkpoint folder",
        ),
        (
            load_state,
            tmp_path / "nothing",
            uc.NotFoundError,
            "got nothing, expected a checkpoint folder",
        ),
        (
            load_state,
            tmp_path / "cut",
            uc.NotFoundError,
            "got no valid manifest; it is unfinished or damaged",
        ),
        (load_state, None, uc.NotFoundError, no_path),
        (save_state, None, uc.StorageError, no_path),
        (save_state, whole, uc.StorageError, "holds a committed checkpoint"),
        (
            save_state,
            tmp_path / "logs",
            uc.StorageError,
            r"holds other files \(log.txt\), expected a checkpoint",
        ),
    ):
        with pytest.raises(error, match=text):
            call(accelerator, path)
    (tmp_path / "mine").mkdir()
    save_state(accelerator, tmp_path / "mine", options=FAST)
    assert sorted(os.listdir(tmp_path)) == ["cut", "logs", "mine", "run"]
    with pytest.raises(ValueError, match="got no complete checkpoint"):  # as in Accelerate
        load_state(Job(project=tmp_path / "fresh").accelerator)


def test_objects_missing_from_the_checkpoint_raise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job()
    uc.save(tmp_path / "bare", model=job.model)
    with pytest.raises(uc.MismatchError) as caught:
        load_state(job.accelerator, tmp_path / "bare")
    assert "optimizers: checkpoint has none, accelerator has AdamW" in str(caught.value)
    save_state(job.accelerator, tmp_path / "c", options=FAST)
    other = Job(seed=7)
    other.accelerator.register_for_checkpointing(Count())
    with pytest.raises(
        uc.MismatchError, match="custom objects: checkpoint has Count, accelerator has Count, Count"
    ):
        load_state(other.accelerator, tmp_path / "c")
    load_state(other.accelerator, tmp_path / "c", strict=False)
    assert same(other, job)
    reader = Accelerator(cpu=True)
    model = reader.prepare(llama())
    reader.register_for_checkpointing(Count())
    caplog.clear()
    load_state(reader, tmp_path / "c")
    assert "optimizers: checkpoint has AdamW, accelerator has none" in caplog.text
    assert all(
        torch.equal(tensor, job.model.state_dict()[name])
        for name, tensor in model.state_dict().items()
    )
    wide = Accelerator(cpu=True)
    wide.prepare(nn.Linear(3, 3))
    wide.register_for_checkpointing(Count())
    with pytest.raises(uc.MismatchError, match="model:weight: is not in the checkpoint"):
        load_state(wide, tmp_path / "c")


def test_objects_of_other_classes_keep_their_state(tmp_path: Path) -> None:
    """Torch's schedulers take the state of any other class without an error."""

    class Total(Count):
        pass

    save_state(Job().run(1, stop=4).accelerator, tmp_path / "c", options=FAST)
    accelerator, model, total = Accelerator(cpu=True), llama(), Total()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(total)
    before = scheduler.state_dict()
    load_state(accelerator, tmp_path / "c", strict=False)
    assert scheduler.state_dict() == before
    assert total.seen == 0


def test_accumulated_gradients_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_state(Job().run(1, stop=3).accelerator, tmp_path / "c", options=FAST)
    assert "accumulated gradients are not saved" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "epochs", "message"),
    [
        ({"shuffle": True}, 0, "an epoch whose order cannot be reproduced; set DataLoaderConf"),
        (
            {"sampler": WeightedRandomSampler([1.0] * 24, 24)},
            0,
            "an epoch whose order cannot be reproduced; save between epochs",
        ),
        ({"sampler": GeneratorSampler()}, 0, "GeneratorSampler draws the order from a generator"),
        (
            {"num_workers": 1, "persistent_workers": True},
            1,
            "a resume starts persistent workers anew",
        ),
    ],
)
def test_what_a_resume_cannot_reproduce_is_warned_of(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    arguments: dict[str, Any],
    epochs: int,
    message: str,
) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(SEQUENCES, batch_size=4, **arguments))
    for _ in range(epochs):
        list(loader)
    assert not caplog.messages
    for _ in loader:
        save_state(accelerator, tmp_path / "c", options=FAST)
        break
    assert message in caplog.text


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (DistributedType.DEEPSPEED, "got DeepSpeed; use FSDP2"),
        (DistributedType.MEGATRON_LM, "got Megatron-LM; use FSDP2"),
    ],
)
def test_unsupported_types_are_refused_by_name(
    tmp_path: Path, kind: DistributedType, message: str
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = kind
    accelerator.state.fsdp_plugin = None
    for call in (save_state, load_state):
        with pytest.raises(uc.LayoutError, match=message):
            call(accelerator, tmp_path / "c")
    with pytest.raises(uc.LayoutError, match=message):
        attach(accelerator)
    assert os.listdir(tmp_path) == []


def test_refused_optimizer_is_known_before_the_first_step(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, Grouped(torch.optim.SGD(model.parameters())))
    for call in (attach, partial(save_state, path=tmp_path / "c")):
        with pytest.raises(uc.LayoutError, match="Grouped: got param groups of its own beside"):
            call(accelerator)
    assert os.listdir(tmp_path) == []


def test_import_leaves_accelerate_as_it_is() -> None:
    """Only data loaders of an attached, saved or loaded accelerator are changed."""
    for name in ("_fetch_batches", "adjust_state_dict_for_prefetch"):
        assert getattr(DataLoaderDispatcher, name).__module__ == "accelerate.data_loader"
