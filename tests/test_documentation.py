"""Runs what README, docs and examples show: every program, every snippet and every command, in the
order of its page.

A new block needs nothing here if it is a program (```python, with its name in the first line: `#
train.py`), or a command on files that the page's programs or `FILES` make. A snippet needs its
names in `NAMES`. Signatures are ```pyi. What cannot be run is listed in `NOT_RUN`, with the reason.
Blocks of a recipe's page are lines of the files that tests/recipes/run.py runs.
"""

from __future__ import annotations

import ast
import faulthandler
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import unified_ckpt as uc
from tests.incidents.table import INCIDENTS
from tests.support.damage import flip
from tests.support.objects.memory import MemoryBucket
from tests.support.objects.server import MemoryServer, memory_server
from tests.support.power.folder_operations import FOLDER_OPERATIONS
from tests.support.power.node_operations import NODE_OPERATIONS
from tests.support.power.run_operations import RUN_OPERATIONS
from tests.support.processes import warm
from unified_ckpt.cli import main as command_line
from unified_ckpt.cli.demo import SENTENCE

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
EXAMPLE_FOLDER = ROOT / "unified_ckpt" / "examples"
EXAMPLES = [
    EXAMPLE_FOLDER / "plain_pytorch.py",
    *sorted((ROOT / "docs" / "examples").glob("*.py")),
]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("bench_*.py"))
RECIPES = ROOT / "docs" / "guide" / "recipes"
LAUNCH = ("ls", "python", "torchrun")
RESOURCES = ExitStack()  # of `FILES`, until the page is done
SECONDS = 600.0  # for one program; it takes ten on an idle machine

# First line of a block -> why it is not run.
NOT_RUN = {
    "pip install uv": "takes minutes; a test with the mark `long` runs it",
    "unified_ckpt/": "the tree of folders",
    "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt '.[demo]' && "
    ".venv/bin/unified-ckpt demo": "a test runs it",
    "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e '.[test]' && "
    ".venv/bin/python -m pytest -q -n 2": "CI does",
    "/runs/new: from dcp, step 7, 2.73 MiB in 0.1 s": "output of the command above it",
    "saved /shared/run/step-40: 52.4 GiB in 9.31 s, 5.63 GiB/s; rank 3 wrote longest: 8.02 s; "
    "network: 11.8 GiB between 10.1.0.5, 10.1.0.6; slowest 10.1.0.6 to 10.1.0.5: 112 MiB/s": (
        "a line of a log"
    ),
    'model = AutoModelForCausalLM.from_pretrained(name, '
    'distributed_config=DistributedConfig(tp_size=2, fsdp_size=4))': (
        "needs 8 processes; docs/examples/hf_trainer_sharded.py runs the same with 2"
    ),
}  # fmt: skip
EXIT_1 = {  # commands that report a problem, as the page says
    "unified-ckpt verify llama",
    "unified-ckpt diff checkpoint-1000 checkpoint-1500 --part model --match '*.norm.*'",
    "unified-ckpt verify --deep damaged",
    "unified-ckpt verify damaged --repair",
}
# Appended to a benchmark's command, so that it takes seconds; the last of two options of one name
# counts.
TOY = {
    "bench_async": "--size 1MiB --ranks 1 --repeats 1 --seconds 0.1 --kind dim0",
    "bench_balance": "--state 'embedding tables'",
    "bench_boxes": "--ranks 8 --layers 1 --tables 2",
    "bench_buckets": "--size 1MiB --ranks 1 --repeats 1",
    "bench_compressed_saves": "--size 1MiB --repeats 1",
    "bench_compression": "--steps 2 --forms O1,4/4",
    "bench_convert": "--size 1MiB --repeats 1 --only unified",
    "bench_inventory": "--nodes 8 --layers 1 --repeats 1",
    "bench_lanes": "--size 32MiB --lanes 2 --repeats 1",
    "bench_load": "--size 1MiB --ranks 2 --repeats 1 --kind dim0",
    "bench_load_plan": "--nodes 8 --layers 1 --repeats 1",
    "bench_machine": "--size 1MiB --ranks 1 --repeats 1 --minutes 1 --device cpu --small-tensors 9",
    "bench_open_dcp": "--ranks 4 --shards 100 --repeats 1",
    "bench_parts": "--meshes 1x1x8x1 --layers 1",
    "bench_plan": "--ranks 64 --layers 1 --repeats 1",
    "bench_peer_writes": "--connections 4",
    "bench_replicas": "--tensors 50 --saved 20 --ranks 2 --many 64 --repeats 1",
    "bench_save": "--size 1MiB --ranks 2 --repeats 1 --kind dim0",
    "bench_shared_reads": "--nodes 2 --nbytes 1048576 --rounds 1",
    "bench_small_tensors": "--tensors 50 --repeats 1",
    "bench_values": "--ranks 64 --parameters 100",
    "bench_volume": "--ranks 64",
    "bench_writes": "--size 1MiB --repeats 1",
    "report": "",
}
SCRATCH = {"bench_convert": "--dir", "bench_writes": "--scratch"} | dict.fromkeys(
    (
        "bench_async",
        "bench_compressed_saves",
        "bench_lanes",
        "bench_load",
        "bench_machine",
        "bench_save",
        "bench_small_tensors",
    ),
    "--scratch",
)
TRAINERS = {"accelerate", "hugging-face-trainer", "lightning"}
COLD = "--scenario same --only raw"  # each such load empties the machine's page cache
# Those that start processes or change classes of the engine.
APART = {"bench_convert", "bench_open_dcp", "bench_shared_reads"}
LAUNCHES = {
    "bench_async",
    "bench_buckets",
    "bench_load",
    "bench_machine",
    "bench_save",
    "bench_small_tensors",
}


@dataclass(frozen=True)
class Block:
    """A fenced block. `where`: its page and line."""

    where: str
    language: str
    body: str

    @property
    def first_line(self) -> str:
        return self.body.partition("\n")[0]

    @property
    def program(self) -> str | None:
        """The block's file name, if it is a program."""
        named = re.match(r"# (\S+\.py)$", self.first_line)
        return named[1] if named and self.language == "python" else None

    @property
    def is_snippet(self) -> bool:
        return self.language == "python" and self.program is None

    @property
    def commands(self) -> list[str]:
        """The block's command lines: those after `$ `, or all of them."""
        lines = [line for line in self.body.splitlines() if line.strip()]
        return [line[2:] for line in lines if line.startswith("$ ")] or lines

    @property
    def outputs(self) -> list[tuple[str, str]]:
        """Commands after `$ `, each with the output shown below it."""
        sessions = re.split(r"^\$ ", self.body, flags=re.MULTILINE)[1:]
        return [(command, output) for command, _, output in (s.partition("\n") for s in sessions)]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    name = str(page.relative_to(ROOT))
    return [
        Block(f"{name}:{text.count(chr(10), 0, block.start()) + 1}", block[1], block[2])
        for block in blocks(text)
    ]


def blocks(text: str) -> list[re.Match[str]]:
    """The fenced blocks of a text: language, body."""
    return list(re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def run_blocks(page: Path) -> list[Block]:
    if page.parent == RECIPES:
        return []
    return [block for block in blocks_of(page) if block.first_line not in NOT_RUN]


def excerpts(text: str, lines: int) -> set[str]:
    """Each run of so many lines of a text, without its indentation."""
    every = text.splitlines()
    return {
        textwrap.dedent("\n".join(every[start : start + lines])).strip()
        for start in range(len(every) - lines + 1)
    }


def is_benchmark(command: str) -> bool:
    return command.startswith("python benchmarks/")


def page_commands(page: Path) -> list[str]:
    """All commands of a page except benchmarks."""
    shown = [
        command for block in run_blocks(page) if block.language == "" for command in block.commands
    ]
    return [command for command in shown if not is_benchmark(command)]


def starts_processes(command: str) -> bool:
    return not command.startswith(("unified-ckpt", "python -m unified_ckpt"))


def benchmark_commands() -> list[str]:
    """Benchmarks that pages show, and the others without arguments."""
    shown = [
        command
        for page in PAGES
        for block in run_blocks(page)
        for command in block.commands
        if is_benchmark(command)
    ]
    names = {shlex.split(command)[1] for command in shown}
    return [
        *shown,
        *(
            f"python benchmarks/{script.name}"
            for script in BENCHMARKS
            if f"benchmarks/{script.name}" not in names
        ),
    ]


# ---- what pages name


def small_llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 32,
        **more,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes))


def trained(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def save_llama(path: str, *, step: int, **more: Any) -> None:
    model = small_llama()
    with torch.no_grad():
        model.model.norm.weight.add_(step)
    uc.save(path, model=model, optimizer=trained(model), step=step, **more)


def cli_files() -> None:
    for step in (1000, 1500):
        save_llama(f"checkpoint-{step}", step=step)
    shutil.copytree("checkpoint-1000", "damaged")
    flip(Path("damaged/model.safetensors"), -1)
    for step in (1000, 2000, 3000, 4000):
        save_llama(f"llama/checkpoint-{step}", step=step, metrics={"loss": abs(step - 2000)})
    os.remove("llama/checkpoint-4000/optimizer.safetensors")
    shutil.copytree("llama/checkpoint-4000", "llama/.unified-2dd0417c2b6531b8-checkpoint-5000")
    os.remove("llama/.unified-2dd0417c2b6531b8-checkpoint-5000/unified_checkpoint.json")


def convert_files() -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings(action="ignore"):  # about a single process
        dcp.save({"model": small_llama().state_dict()}, checkpoint_id="old")


def model_files() -> None:
    small_llama().bfloat16().save_pretrained("model")


def other_formats_files() -> None:
    from tests.support.foreign import megatrons, orbaxes
    from tests.support.foreign.maxtexts import make, tree_of
    from tests.support.foreign.megatron_models import JOBS, drawn

    kind, job, more = JOBS["llama"]
    _, hub = drawn(kind, job, Path.cwd())
    shutil.copytree("hub", "llama")
    megatrons.write(Path("job"), job, hub, **more)
    os.rename("job/iter_0000007", "job/iter_0002000")
    tree = tree_of(make("qwen3", Path("qwen3")), stacked=True, trained=True)
    orbaxes.write([orbaxes.job(Path("run/checkpoints").absolute(), tree)], Path("jobs"))
    os.rename("run/checkpoints/7", "run/checkpoints/1000")
    shutil.copy("qwen3/config.json", "config.json")


def bucket_files() -> None:
    """An empty bucket, and the environment of its users."""
    server = RESOURCES.enter_context(memory_server())
    RESOURCES.enter_context(patch.dict(os.environ, bucket_environment(server)))


def bucket_environment(server: MemoryServer) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{server.server_address[1]}",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "access",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }


FILES: dict[str, Callable[[], None]] = {
    "docs/cli.md": cli_files,
    "docs/guide/convert.md": convert_files,
    "docs/guide/estimate.md": model_files,
    "docs/guide/object-stores.md": bucket_files,
    "docs/guide/other-formats.md": other_formats_files,
}


def plain_names() -> dict[str, Any]:
    model = small_llama()
    optimizer = trained(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return {
        "uc": uc,
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "steps": 1003,
        "train": lambda _: None,
    }


def data_names() -> dict[str, Any]:
    names = plain_names()
    dataset, manager = (
        torch.utils.data.TensorDataset(torch.arange(32.0)),
        uc.CheckpointManager("data"),
    )
    names |= {
        "dataset": dataset,
        "DataLoader": torch.utils.data.DataLoader,
        "epochs": 1,
        "manager": manager,
        "step": 1,
    }
    return names | {
        "sampler": uc.ElasticSampler(dataset),
        "scaler": torch.amp.GradScaler(enabled=False),
        "state": {"model": names["model"]},
    }


def hugging_face_names() -> dict[str, Any]:
    """A run of one step, and the arguments to continue with."""
    from transformers import Trainer, TrainingArguments

    from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback

    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    first, args = (
        TrainingArguments(
            "trainer", max_steps=steps, save_steps=1, report_to=[], disable_tqdm=True, use_cpu=True
        )
        for steps in (1, 2)
    )
    model = small_llama()
    Trainer(
        model=model, args=first, train_dataset=data, callbacks=[UnifiedCheckpointCallback()]
    ).train()
    return {"Trainer": Trainer, "model": model, "args": args, "data": data}


def accelerate_names() -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration("accelerate-run", automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(4, 4)
    accelerator.prepare(model, trained(model))
    return {"accelerator": accelerator, "loader": [torch.ones(4)], "train": lambda _: None}


def lightning_names() -> dict[str, Any]:
    """A run of one epoch, and the module to continue with."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tests.support.integrations.lightnings import Net
    from unified_ckpt.integrations.lightning import UnifiedCheckpointCallback

    class MyModule(Net):
        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val_loss", (self(batch[0]) - batch[1]).square().mean())

    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    trainer = partial(pl.Trainer, **quiet)
    checkpoints = partial(ModelCheckpoint, "run")
    first = trainer(
        callbacks=[
            checkpoints(monitor="val_loss", save_top_k=3, save_last="link"),
            UnifiedCheckpointCallback(),
        ]
    )
    first.fit(MyModule())
    return {
        "Trainer": trainer,
        "ModelCheckpoint": checkpoints,
        "module": MyModule(),
        "MyModule": MyModule,
    }


# A page, or text that a snippet has -> its names. They stay for the snippets after it on the page.
NAMES: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/guide/estimate.md": plain_names,
    "docs/guide/nodes.md": plain_names,
    "docs/guide/training-loop.md": data_names,
    "unified_ckpt.integrations.transformers": hugging_face_names,
    "unified_ckpt.integrations.accelerate": accelerate_names,
    "unified_ckpt.integrations.lightning": lightning_names,
}


# ---- the tests


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_a_page_is_run(page: Path) -> None:
    """Each block is of a kind that a test below runs, or is listed in NOT_RUN."""
    ran = {
        word
        for command in page_commands(page)
        for word in shlex.split(command, comments=True)
        if word.endswith(".py")
    }
    bodies = "".join(block.body for block in run_blocks(page))
    named = re.findall(r"(?:^from |^import |--conversion-fn )(\w+)", bodies, re.MULTILINE)
    imported = {f"{name}.py" for name in named}
    for block in run_blocks(page):
        advice = f"; see the docstring of {Path(__file__).name}"
        if block.program is not None:
            assert block.program in ran | imported, (
                f"{block.where}: no command of the page runs {block.program}{advice}"
            )
        elif block.is_snippet:
            ast.parse(block.body)
            known = any(
                key == page.relative_to(ROOT).as_posix() or key in block.body for key in NAMES
            )
            assert known, f"{block.where}: a snippet whose names are not in NAMES{advice}"
        elif block.language != "pyi":  # a signature
            assert block.language == "", (
                f"{block.where}: a block of {block.language}, which nothing runs{advice}"
            )
            for command in block.commands:
                program, *arguments = shlex.split(command, comments=True)
                runs = program == "unified-ckpt" or (program in LAUNCH and arguments)
                assert runs, (
                    f"{block.where}: {command!r} is no command, and not after `$ `: label "
                    f"Python as such, or list it{advice}"
                )


@pytest.mark.parametrize("page", sorted(RECIPES.glob("*.md")), ids=lambda page: page.name)
def test_blocks_of_a_recipe_are_lines_it_runs(page: Path) -> None:
    folder = ROOT / "tests" / "recipes" / page.stem
    files = [path for path in (*folder.rglob("*"), *EXAMPLE_FOLDER.iterdir()) if path.is_file()]
    texts = [path.read_text() for path in files if path.suffix != ".pyc"]
    for block in blocks_of(page):
        lines = block.body.count("\n")
        excerpt = textwrap.dedent(block.body).strip()
        assert any(excerpt in excerpts(text, lines) for text in texts), (
            f"{block.where}: these lines are in no file of {folder.relative_to(ROOT)}"
        )


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page",
    [*PAGES, *ROOT.glob("[CS]*.md"), ROOT / "docs" / "notebooks" / "tour.ipynb"],
    ids=lambda page: page.name,
)
def test_links_of_a_page_lead_to_sections(page: Path) -> None:
    broken = []
    for link, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", prose(page)):
        target = page.parent / link if link else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{link}#{anchor}")
    assert broken == []


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"],
    ids=lambda page: page.name,
)
def test_paragraphs_are_not_wrapped(page: Path) -> None:
    """A paragraph or an item of a list is one line, as CONTRIBUTING.md says."""
    starts = re.compile(r"\s*([-*] |\d+\. |[|#<]|$)")
    lines = re.sub(r"^> ?", "", prose(page), flags=re.MULTILINE).splitlines()
    assert [
        line for before, line in pairwise(lines) if before.strip() and not starts.match(line)
    ] == []


def test_glossary_has_each_word_once_in_order() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    words = [word.lower() for word in rows[1:]]
    assert words == sorted(set(words))


def test_index_answers_thirty_wishes() -> None:
    table = (ROOT / "docs" / "index.md").read_text().partition("\n## Guide")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")]
    answers = [row[2] for row in rows if row[1] not in (" I want to … ", " --- ")]
    assert len(answers) >= 30
    assert [answer for answer in answers if "](" not in answer] == []


def test_index_has_a_row_for_every_page() -> None:
    """The navigation of the site follows these rows; `SUBPAGES` of site_pages.py has the others."""
    docs = ROOT / "docs"
    rows = re.findall(r"^\| \[[^]]+\]\(([^)]+)\)", (docs / "index.md").read_text(), re.MULTILINE)
    trainers = [docs / "guide" / f"{name}.md" for name in TRAINERS]
    listed = {docs / "index.md", *trainers, *(docs / row for row in rows)}
    nested = ("decisions", "recipes")
    pages = [page for page in PAGES if docs in page.parents and page.parent.name not in nested]
    assert [page for page in pages if page not in listed] == []


def test_versions_tried_are_those_of_the_tests() -> None:
    page = (ROOT / "docs" / "guide" / "other-formats.md").read_text()
    tried = re.findall(r"([a-z-]+) (\d\S*\d)", page.split("\n## Versions tried\n")[1])
    installed = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    wrong = [name for name, version in tried if installed.get(name, version) != version]
    assert wrong == []
    assert len(installed.keys() & {name for name, _ in tried}) == 8


def test_page_about_tests_counts_what_there_is() -> None:
    page, tests = (ROOT / "docs" / "how-this-is-tested.md").read_text(), ROOT / "tests"
    counts = {
        "patches": len(list((tests / "mutations").glob("*.patch"))),
        "inputs": sum(path.is_file() for path in (tests / "corpus").rglob("*")),
        "operations": len(FOLDER_OPERATIONS) + len(NODE_OPERATIONS) + len(RUN_OPERATIONS),
        "public reports": sum(map(len, INCIDENTS.values())),
    }
    for noun, count in counts.items():
        assert f"{count} {noun}" in page, f"expected {count} {noun}"


def test_decisions_have_numbers_of_their_own() -> None:
    pages = [page for page in PAGES if page.parent.name == "decisions" and page.stem != "index"]
    files = [int(page.name[:4]) for page in pages]
    titles = [int(page.read_text().removeprefix("# ").partition(".")[0]) for page in pages]
    assert titles == files == sorted(set(files))


def test_index_and_page_name_every_verb() -> None:
    page, index = (ROOT / "docs" / name for name in ("cli.md", "index.md"))
    (row,) = (line for line in index.read_text().splitlines() if "[Command line](cli.md)" in line)
    verbs = set(command_line._VERBS)
    assert verbs - set(re.findall(r"`(\w+)`", row)) == set()
    assert verbs - anchors(page) == set()


@pytest.mark.parametrize("name", ["save", "save_async", "load", "open", "repair", "estimate"])
def test_reference_shows_the_defaults_of_calls(name: str) -> None:
    text = (ROOT / "docs" / "reference.md").read_text().partition(f"### uc.{name}\n")[2]
    shown = blocks(text)[0][2]
    for parameter in inspect.signature(getattr(uc, name)).parameters.values():
        if parameter.default is not parameter.empty:
            line = rf"^ +{parameter.name}: .* = {re.escape(repr(parameter.default))},$"
            assert re.search(line, shown, re.MULTILINE), parameter


def test_exemptions_name_blocks_that_are_shown() -> None:
    shown = {block.first_line for page in PAGES for block in blocks_of(page)}
    assert not NOT_RUN.keys() - shown, "NOT_RUN lists blocks that no page has"
    commands = {command for page in PAGES for command in page_commands(page)}
    assert not EXIT_1 - commands, "EXIT_1 lists commands that no page has"
    assert {script.stem for script in BENCHMARKS} <= TOY.keys(), "a benchmark is not in TOY"


def test_commands_within_text_parse() -> None:
    """`unified-ckpt list run` in a sentence: the verb and its options exist."""
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for command in re.findall(r"`unified-ckpt ([^`]+)`", text):
            assert is_usage(shlex.split(command)), (
                f"{page.name}: `unified-ckpt {command}` is a usage error"
            )


def is_usage(argv: list[str]) -> bool:
    """Whether the command line accepts these arguments; for a verb alone, whether it exists."""
    try:
        command_line.build_parser().parse_args(argv if len(argv) > 1 else [*argv, "--help"])
    except SystemExit as end:
        return end.code == 0
    return True


def pages(having: Callable[[Path], bool], slow: Callable[[Path], bool]) -> list[Any]:
    return [
        pytest.param(
            page,
            id=page.relative_to(ROOT).as_posix(),
            marks=[pytest.mark.slow] if slow(page) else [],
        )
        for page in PAGES
        if having(page)
    ]


@pytest.mark.parametrize(
    "page",
    pages(
        lambda page: bool(page_commands(page)),
        lambda page: any(map(starts_processes, page_commands(page))),
    ),
)
def test_programs_and_commands_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest's limit is for a test, not for a page of programs: `SECONDS` is theirs
    faulthandler.cancel_dump_traceback_later()
    monkeypatch.chdir(tmp_path)
    with RESOURCES:
        FILES.get(page.relative_to(ROOT).as_posix(), lambda: None)()
        for block in run_blocks(page):
            if block.program is not None:
                Path(block.program).write_text(block.body)
            elif block.language == "":
                for command in block.commands:
                    if not is_benchmark(command):
                        run_command(command, block.where, monkeypatch)


def test_readme_shows_real_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compared line by line; only ids, dates, versions and seconds may differ."""
    monkeypatch.chdir(tmp_path)
    shown = [block for block in run_blocks(ROOT / "README.md") if block.outputs]
    assert shown, "the README shows no output"
    for block in run_blocks(ROOT / "README.md"):
        if block.program is not None:
            Path(block.program).write_text(block.body)
    for command, expected in (pair for block in shown for pair in block.outputs):
        program, *arguments = shlex.split(command)
        if program == "unified-ckpt":
            assert command_line.main(arguments) == 0
            actual = capsys.readouterr().out
        else:
            actual = run(launched(program, arguments, tmp_path), tmp_path)
        assert mask_varying(actual) == mask_varying(expected), command


@pytest.mark.slow
def test_notebook_prints_what_it_shows(tmp_path: Path) -> None:
    """Compared like the README's output."""
    script = runpy.run_path(str(ROOT / "docs" / "build_notebook.py"))
    notebook = json.loads((ROOT / "docs" / "notebooks" / "tour.ipynb").read_text())
    shown = script["outputs"](notebook)
    tour = tmp_path / "tour.py"
    tour.write_text(script["program"](notebook))
    command = launched("python", [str(tour)], tmp_path)
    printed = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path), check=True, stdout=-1, timeout=SECONDS
    ).stdout.decode()
    script["store"](notebook, printed)
    actual = script["outputs"](notebook)
    assert list(map(mask_varying, actual)) == list(map(mask_varying, shown))
    four_ranks, uninterrupted = re.findall(r"(?:four ranks|uninterrupted) +(\[.*\])", printed)
    assert four_ranks == uninterrupted


def mask_varying(text: str) -> list[str]:
    """Lines without ids, dates, versions, parent folders and seconds; no trailing blank lines."""
    text = re.sub(r"\b[0-9a-f]{16}\b|\d{4}-\d\d-\d\d[T ]\S+|\d+(\.\d+)+\S*|\S*/", "#", text)
    return [line.rstrip() for line in text.rstrip().splitlines()]


@pytest.mark.parametrize(
    "page",
    pages(
        lambda page: any(block.is_snippet for block in run_blocks(page)),
        lambda page: page.stem in TRAINERS,
    ),
)
@pytest.mark.filterwarnings("ignore")  # of the trainers
def test_snippets_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    page_names = NAMES.get(page.relative_to(ROOT).as_posix(), dict)()
    for block in (block for block in run_blocks(page) if block.is_snippet):
        for add in [make for key, make in NAMES.items() if key in block.body] or [
            lambda: page_names
        ]:
            names |= add()
        exec(compile(block.body.replace('"/local/', f'"{tmp_path}/'), block.where, "exec"), names)


@pytest.mark.slow
def test_demo_holds_in_a_bucket(tmp_path: Path) -> None:
    """Its checkpoints are on a server, and are removed from it at the end."""
    faulthandler.cancel_dump_traceback_later()
    bucket = MemoryBucket()
    with memory_server(bucket) as server, patch.dict(os.environ, bucket_environment(server)):
        command = [sys.executable, "-m", "unified_ckpt", "demo", "--root", "s3://bucket/demo"]
        output = run(command, tmp_path)
    assert "SIGKILL to 4 ranks during the save of checkpoint-" in output
    assert "uploads, no manifest" in output
    assert "PASSED in" in output
    assert bucket.bodies() == {}
    assert bucket.open_uploads() == []


@pytest.mark.slow
def test_demo_holds(tmp_path: Path) -> None:
    """The demo that the README runs first succeeds, and leaves nothing running."""
    faulthandler.cancel_dump_traceback_later()
    folder = str(tmp_path / "demo")
    output = run([sys.executable, "-m", "unified_ckpt", "demo", "--dir", folder], tmp_path)
    assert "SIGKILL to 4 ranks during the save of checkpoint-" in output
    assert f"  {SENTENCE}\nPASSED in" in output
    assert (tmp_path / "demo" / "report.html").exists()
    assert folder not in run(["ps", "-eo", "args"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_commands_of_an_example_run(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the commands of its docstring, in order."""
    faulthandler.cancel_dump_traceback_later()
    monkeypatch.chdir(tmp_path)
    shutil.copy(example, tmp_path)
    shown = [
        line.strip()
        for line in (ast.get_docstring(ast.parse(example.read_text())) or "").splitlines()
    ]
    commands = [line for line in shown if line.partition(" ")[0] in LAUNCH]
    assert commands
    for command in commands:
        run_command(command, example.name, monkeypatch)


@pytest.mark.integration
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            command,
            marks=[pytest.mark.slow]
            if Path(shlex.split(command)[1]).stem in APART | LAUNCHES
            else [],
        )
        for command in benchmark_commands()
    ],
)
def test_benchmarks_run_at_toy_size(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_benchmark(command, tmp_path, monkeypatch)


def test_machine_benchmark_compares_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "python benchmarks/bench_machine.py --only G4 --out machine.jsonl"
    run_benchmark(command, tmp_path, monkeypatch)
    (row,) = re.findall(
        r"^\| G4 .*\| unified \|.*$", (tmp_path / "rows.md").read_text(), re.MULTILINE
    )
    assert re.search(r"\| (yes|\*\*no\*\*) \| \w+", row), row  # the goal, and the best peer


def run_benchmark(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the command of a page at toy size, in a folder of its own."""
    argv = shlex.split(command.partition(" > ")[0], comments=True)
    script = ROOT / argv[1]
    arguments = [file for argument in argv[2:] if argument != "…" for file in expand(argument)]
    arguments += [
        *shlex.split(TOY[script.stem]),
        *shlex.split(COLD if "--cold" in argv else ""),
        *([SCRATCH[script.stem], str(tmp_path)] if script.stem in SCRATCH else []),
    ]
    if "--out" in argv:
        arguments += ["--out", str(tmp_path / "rows.jsonl")]
    monkeypatch.chdir(tmp_path)
    if script.stem in APART:
        run([sys.executable, str(script), *arguments], tmp_path)
    else:
        monkeypatch.syspath_prepend(script.parent)
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        before = set(sys.modules)
        try:
            monkeypatch.setattr("common.launch", launch)
            runpy.run_path(str(script), run_name="__main__")
        finally:
            for name in set(sys.modules) - before:
                if getattr(sys.modules[name], "__file__", None) and str(script.parent) in str(
                    sys.modules[name].__file__
                ):
                    del sys.modules[name]
    if "--out" in argv:
        assert (tmp_path / "rows.jsonl").stat().st_size


def launch(
    script: str, arguments: Sequence[str], *, ranks: int, seconds: float | None = None
) -> None:
    """Run ranks of a benchmark as `common.launch` does."""
    del seconds  # `run` has a limit of its own
    words = ["--nproc-per-node", str(ranks), script, *arguments]
    sys.stdout.write(run(launched("torchrun", words, Path.cwd()), Path.cwd()))


def expand(word: str) -> list[str]:
    return sorted(map(str, ROOT.glob(word))) if "*" in word else [word]


def run_command(command: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command line in the current folder; in this process if it is the package's own."""
    argv = shlex.split(command, comments=True)
    if "convert" in argv:  # pages show several ways to write the same folder
        shutil.rmtree(argv[argv.index("convert") + 2], ignore_errors=True)
    if starts_processes(command):
        program, *arguments = argv
        if "unified_ckpt" in arguments:
            arguments[arguments.index("--nproc-per-node") + 1] = "2"  # of any number
        run(launched(program, arguments, Path.cwd()), Path.cwd())
        return
    monkeypatch.syspath_prepend(Path.cwd())
    arguments = argv[1:] if argv[0] == "unified-ckpt" else argv[3:]
    code = command_line.main(arguments)
    expected = int(shlex.join(argv) in EXIT_1 or command in EXIT_1)
    assert code == expected, (
        f"{where}: {command}: exit code {code}; needed {expected} (EXIT_1), on files that "
        f"`FILES` or programs make"
    )


def launched(program: str, arguments: Sequence[str], folder: Path) -> list[str]:
    """Return the command that runs a program of a page, forked from a warm interpreter."""
    env = environment(folder)
    if program == "python":
        option, *rest = arguments
        if option == "-c":
            return warm.program(*rest, env)
        return [*warm.python(Path(option), env), *rest]
    if program != "torchrun":
        return [program, *arguments]
    start = next(i for i, word in enumerate(arguments) if word == "-m" or word.endswith(".py"))
    options, (script, *rest) = arguments[:start], arguments[start:]
    worker = warm.module(rest.pop(0), env) if script == "-m" else warm.python(Path(script), env)
    torchrun = [*warm.module("torch.distributed.run", env), "--standalone", *options]
    return [*torchrun, "--no-python", *worker, *rest]


def environment(folder: Path) -> dict[str, str]:
    more = {"HF_HUB_OFFLINE": "1", "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    return {**os.environ, **more}


def run(command: Sequence[str], folder: Path) -> str:
    """Return the program's output. If it fails or hangs, show the output of it and its ranks, and
    kill them all.
    """
    log = folder / "said.txt"
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, cwd=folder, env=environment(folder), stdout=output, stderr=output
        ) as child,
    ):
        try:
            code: int | str = child.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = f"not ended within {SECONDS:g} s"
            child.terminate()  # on SIGTERM torchrun ends its ranks
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
    assert code == 0, f"{' '.join(command)}: {code}\n{log.read_text(errors='replace')}"
    return log.read_text(errors="replace")
