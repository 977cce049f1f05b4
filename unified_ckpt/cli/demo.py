"""The verb `demo`: trains, is killed during a save, and resumes on fewer processes.

It runs the example for plain PyTorch. In the end transformers opens the same folder. Each phase is
one line before it starts, and every number is measured in this run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from unified_ckpt.cli.display.console import stdout_columns
from unified_ckpt.core.text import human_size
from unified_ckpt.errors import CheckpointError, MissingPackageError
from unified_ckpt.foreign.step_names import DEFAULT_PREFIX as PREFIX
from unified_ckpt.manager.steps.scan import scan
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.packages import missing_package
from unified_ckpt.runtime.storage.roots import open_root, root_path

EXAMPLE = Path(__file__).parents[1] / "examples" / "plain_pytorch.py"
SAVE_EVERY = 5  # steps, in the example
KILL_AFTER = 12  # steps; 4 processes are killed in the first save after this one
KILL_BYTES = 2_000_000  # the save is killed after writing this many
UNTIL_2_RANKS, UNTIL_1_RANK = 30, 47  # steps at which 4 or 2 processes stop, then 1 process
SHOW_EVERY = 4
ATTEMPTS = 4
TOLERANCE = 1e-3  # relative, between a layout's loss and that of the uninterrupted process
TIMEOUT_SECONDS = 600.0
SENTENCE = "No manifest, no checkpoint: a killed save leaves none."  # fits a window
PROMPT = "No manifest,"
REPETITIONS = 500
COLUMNS = "{:>4}  {:<13}{:>9}{:>11}"  # 39 columns
STEP = re.compile(rb"step (\d+) rank 0 loss (\S+) samples (\[.*\])\n")


@dataclass(frozen=True, slots=True)
class Job:
    """A run of the example. Each rank has a process, and a file for what it prints."""

    processes: list[subprocess.Popen[bytes]]
    outputs: list[Path]

    def steps(self) -> list[tuple[int, float, list[int]]]:
        """Return the number, loss and samples of each step that rank 0 has printed."""
        found = STEP.findall(self.outputs[0].read_bytes())
        return [(int(step), float(loss), json.loads(samples)) for step, loss, samples in found]

    def is_running(self) -> bool:
        """Return whether some rank has not ended. CheckpointError if one has failed."""
        codes = [process.poll() for process in self.processes]
        for code, output in zip(codes, self.outputs, strict=True):
            if code:
                text = output.read_text(errors="replace")[-6000:]
                raise CheckpointError(f"{output.stem} ended with {code}:\n{text}")
        return None in codes

    def kill(self) -> None:
        """Send SIGKILL to every rank."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


@dataclass(slots=True)
class Demo:
    """The demo's folder, and what it has measured.

    `run`: the folder of the checkpoints, or a URL. `stack` ends the jobs. `baseline`: the losses by
    step of one process that is never interrupted.
    """

    root: Path
    run: str
    stack: ExitStack
    quiet: bool
    started: float = field(default_factory=time.perf_counter)
    baseline: dict[int, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> Path:
        """The file that the model learns."""
        return self.root / "text.txt"

    def print_line(self, text: str, *, indent: str = "") -> None:
        """Print a line, wrapped to the terminal, except with `--json`."""
        if not self.quiet:
            wrap = partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)
            print(wrap(text, stdout_columns(), subsequent_indent=indent), flush=True)

    def announce(self, text: str) -> None:
        """Print what begins now, and when."""
        self.print_line(f"[{time.perf_counter() - self.started:3.0f} s] {text}", indent=" " * 8)

    def launch(self, name: str, ranks: int, *options: str, until: int) -> Job:
        """Start the example on several ranks. It resumes from the run's latest checkpoint."""
        folder = self.run if name == "run" else str(self.root / name)
        command = [sys.executable, str(EXAMPLE), folder, "--until", str(until)]
        command += ["--text", str(self.text), "--dropout", "0", "--workers", "0", *options]
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",  # a small machine has fewer devices than ranks
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "UNIFIED_CKPT_RUN_ID": "demo",  # the next save aborts the uploads of the killed one
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
        }
        job = Job([], [])
        self.stack.callback(job.kill)
        for rank in range(ranks):
            job.outputs.append(self.root / f"{name}-{ranks}-ranks-{rank}.out")
            with job.outputs[-1].open("wb") as output:
                process = subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
            job.processes.append(process)
        return job

    def follow(self, job: Job, layout: str) -> Iterator[int]:
        """Yield a job's latest step until it ends, and record its steps."""
        seen, running, deadline = 0, True, time.monotonic() + TIMEOUT_SECONDS
        while running:
            running = job.is_running()
            steps = job.steps()
            for step, loss, _ in steps[seen:]:
                self.record_step(step, loss, layout)
            seen = len(steps)
            yield steps[-1][0] if steps else 0
            if time.monotonic() > deadline:
                raise CheckpointError(f"{layout} ran past {TIMEOUT_SECONDS:.0f} s")
            time.sleep(0.02)

    def record_step(self, step: int, loss: float, layout: str) -> None:
        """Record a step next to the baseline's loss, and print some of them."""
        if layout == "baseline":
            self.baseline[step] = loss
            return
        baseline = self.baseline[step]
        difference = abs(loss - baseline) / abs(baseline)
        if step % SHOW_EVERY == 0 or not self.rows or self.rows[-1]["layout"] != layout:
            line = COLUMNS.format(step, layout, f"{loss:.5f}", f"{difference:.1e}")
            self.print_line(line)
        names = "step", "layout", "loss", "uninterrupted", "difference"
        values = step, layout, loss, baseline, difference
        self.rows.append(dict(zip(names, values, strict=True)))

    def checkpoints(self) -> list[str]:
        """Return the paths of the run's checkpoints, oldest first."""
        return [record.path for record in scan(open_root(self.run), PREFIX).complete]

    def local_checkpoint(self, path: str) -> str:
        """Return the path of a local folder with the files of a checkpoint."""
        if not is_bucket_url(path):
            return path
        folder = self.root / path.rpartition("/")[2]
        folder.mkdir()
        with open_root(path) as storage:
            for file in storage.sizes(""):
                (folder / file).write_bytes(storage.read(file))
        return str(folder)


def unfinished_save(demo: Demo) -> tuple[str, list[int]]:
    """Return the step's name and the bytes on disk of each file of a save that is not complete.

    In a bucket, the bytes are not known.
    """
    storage = open_root(demo.run)
    if isinstance(storage, ObjectStorage):
        uploads = storage.store.uploads(storage.key(PREFIX))
        steps = [upload.key.partition(f"/{PREFIX}")[2].partition("/")[0] for upload in uploads]
        return (steps[-1], [KILL_BYTES] * len(steps)) if steps else ("", [])
    for folder in Path(demo.run).glob(".unified-*-checkpoint-*"):
        with suppress(FileNotFoundError):  # the save ends meanwhile
            sizes = [file.stat().st_blocks * 512 for file in folder.iterdir()]
            return folder.name.partition("-checkpoint-")[2], sizes
    return "", []


def train_until_killed(demo: Demo) -> bool:
    """Train on 4 processes and kill the first save after `KILL_AFTER`.

    Return whether the kill came before the save was complete.
    """
    demo.announce(
        f"4 ranks FSDP2: train and save every {SAVE_EVERY} steps, until they are killed in the "
        f"first save after step {KILL_AFTER}"
    )
    demo.print_line(COLUMNS.format("step", "layout", "loss", "difference"))
    job = demo.launch("run", 4, "--fsdp", until=UNTIL_2_RANKS)
    for step in demo.follow(job, "4 ranks FSDP2"):
        if step > KILL_AFTER:
            break
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while job.is_running() and sum(unfinished_save(demo)[1]) < KILL_BYTES:
        if time.monotonic() > deadline:
            raise CheckpointError(f"no save was seen after step {KILL_AFTER}")
        time.sleep(5e-4)
    job.kill()
    name, written = unfinished_save(demo)
    if name:
        size = "" if is_bucket_url(demo.run) else f", {human_size(sum(written))}"
        kind = "uploads" if is_bucket_url(demo.run) else "files"
        demo.announce(
            f"SIGKILL to 4 ranks during the save of checkpoint-{name}; it leaves {len(written)} "
            f"{kind}{size}, no manifest"
        )
    else:
        demo.announce("SIGKILL to 4 ranks came after the save was complete; trying again")
    return bool(name)


def resume(demo: Demo, ranks: int, layout: str, *, until: int) -> Job:
    """Verify all bytes of the latest checkpoint, and train from it on so many ranks."""
    from unified_ckpt import verify

    path, started = demo.checkpoints()[-1], time.perf_counter()
    name = path.rpartition("/")[2]
    report = verify(path, deep=True)
    if not report.ok:
        raise CheckpointError(f"{name} is damaged: {report.problems[0]}")
    milliseconds = (time.perf_counter() - started) * 1e3
    demo.announce(
        f"{layout}: resumes from {name}; all digests of its {report.tensors} tensors were verified "
        f"in {milliseconds:.0f} ms"
    )
    job = demo.launch("run", ranks, until=until)
    list(demo.follow(job, layout))
    return job


def generate(demo: Demo, folder: str, samples: list[int]) -> tuple[str, float]:
    """Open the folder with transformers. Return a text and the loss on some of the windows."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from unified_ckpt.examples.plain_pytorch import Windows

    quiet: Any = logging.disable_progress_bar
    quiet()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    torch.set_num_threads(1)  # as in training, so that sums have the same order
    tokens = Windows(demo.text.read_bytes()).tokens[samples]
    with torch.no_grad():
        loss = float(model(input_ids=tokens, labels=tokens).loss)
    prompt = torch.tensor([list(PROMPT.encode())])
    (text,) = model.generate(
        prompt, max_length=len(SENTENCE), max_new_tokens=None, do_sample=False, pad_token_id=0
    )
    return re.sub(r"[^ -~]", "?", bytes(text.tolist()).decode("latin-1")), loss


def run_demo(demo: Demo) -> dict[str, Any]:
    """Run the jobs, and return what was measured. CheckpointError if an event did not happen."""
    demo.text.write_text(f"{SENTENCE} " * REPETITIONS)
    demo.print_line(
        f"A small Llama learns one sentence in {UNTIL_1_RANK} steps. Its processes are killed "
        "during a save, and it resumes on fewer. The loss of each step is compared with that of "
        f"one process that nothing interrupts; every {SHOW_EVERY}th is shown."
    )
    demo.announce("1 process: trains without interruption, the baseline")
    list(demo.follow(demo.launch("baseline", 1, until=UNTIL_1_RANK), "baseline"))
    if not any(train_until_killed(demo) for _ in range(ATTEMPTS)):
        raise CheckpointError(f"in {ATTEMPTS} attempts the save was complete before the kill")
    resume(demo, 2, "2 ranks DDP", until=UNTIL_2_RANKS)
    last_job = resume(demo, 1, "1 process", until=UNTIL_1_RANK)
    checkpoint = demo.local_checkpoint(demo.checkpoints()[-2])  # training has gone on from it
    steps = {step: (loss, samples) for step, loss, samples in last_job.steps()}
    name = checkpoint.rpartition("/")[2]
    probe_step = int(name.removeprefix(PREFIX)) + 1
    probe, samples = steps[probe_step]
    demo.announce(f"AutoModelForCausalLM.from_pretrained({name!r}) continues {PROMPT!r}")
    text, loss = generate(demo, checkpoint, samples)
    demo.print_line(f"        {text}", indent=" " * 8)
    return {
        "probe_step": probe_step,
        "probe": probe,
        "from_pretrained": loss,
        "text": text,
        "seconds": time.perf_counter() - demo.started,
    }


def evaluate(demo: Demo, measured: dict[str, Any]) -> dict[str, Any]:
    """Print whether training continued as it should have; add that to the measurements."""
    by_step: dict[int, list[float]] = {}
    for row in demo.rows:
        by_step.setdefault(row["step"], []).append(row["loss"])
    differences = [max(losses) - min(losses) for losses in by_step.values() if len(losses) > 1]
    worst, twice = max(row["difference"] for row in demo.rows), max(differences, default=0.0)
    probe, loss = measured["probe"], measured["from_pretrained"]
    wrong_text = "" if measured["text"] == SENTENCE else f"{measured['text']!r}, not "
    passed = (
        sorted(by_step) == list(range(1, UNTIL_1_RANK + 1))
        and worst <= TOLERANCE
        and demo.rows[-1]["loss"] < demo.rows[0]["loss"]
        and abs(probe - loss) <= 1e-6
        and not wrong_text
    )
    for line in (
        f"{'PASSED' if passed else 'FAILED'} in {measured['seconds']:.0f} s",
        f"- {UNTIL_1_RANK} steps: losses differ from the baseline's by at most {worst:.1e} "
        f"(relative; allowed {TOLERANCE:.0e})",
        f"- {len(differences)} steps were computed in two layouts: losses differ by at most "
        f"{twice:.1e}",
        f"- step {measured['probe_step']}: loss {probe:.7f} in training, {loss:.7f} from the "
        "folder (allowed 1e-06)",
        f"- transformers writes {wrong_text}the sentence that was learnt",
    ):
        demo.print_line(line, indent="  ")
    return {
        **measured,
        "passed": passed,
        "worst": worst,
        "steps_in_two_layouts": len(differences),
        "worst_of_those": twice,
    }


def write_report(demo: Demo, *, keep: bool) -> str | None:
    """Write the page about the run. Return its path, None without the extra `report`.

    `keep`: the folder stays, and the page lies in it.
    """
    from unified_ckpt.report.page import write_page
    from unified_ckpt.report.run_data import read_report

    page = str(demo.root / "report.html") if keep else f"{demo.root}.html"
    with suppress(MissingPackageError):
        write_page(read_report(demo.run), page)
        return page
    return None


def run_folder(url: str | None, root: Path, stack: ExitStack, *, keep: bool) -> str:
    """Return where the checkpoints go: below `url`, or else below the demo's folder.

    Without `keep`, the end of `stack` deletes them.
    """
    if url is None:
        return str(root / "run")
    path = f"{root_path(url)}/run"
    storage = open_root(path)
    if storage.kind("") and storage.names():
        raise CheckpointError(f"{path}: is not empty, expected an empty folder")
    if not keep:
        stack.callback(open_root(root_path(url)).remove_folder, "run")
    return path


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return 0 if it passed. CheckpointError if it did not see what it expects."""
    if importlib.util.find_spec("transformers") is None:
        error = ModuleNotFoundError("No module named 'transformers'")
        raise missing_package("demo", error, extra="demo")
    keep = bool(arguments.keep or arguments.dir)
    root = Path(arguments.dir or tempfile.mkdtemp(prefix="unified-ckpt-demo-"))
    root.mkdir(parents=True, exist_ok=True)
    if any(root.iterdir()):
        raise CheckpointError(f"{root}: is not empty, expected an empty folder")
    with ExitStack() as stack:
        if not keep:
            stack.callback(shutil.rmtree, root, ignore_errors=True)
        demo = Demo(root, run_folder(arguments.root, root, stack, keep=keep), stack, arguments.json)
        verdict = evaluate(demo, run_demo(demo))
        page = write_report(demo, keep=keep)
    if arguments.json:
        print(json.dumps({"rows": demo.rows, "page": page, **verdict}))
    if page:
        demo.print_line(f"What happened, as a page: {page}")
    kept = f"in {root}" if keep else "deleted; pass --keep to keep them"
    demo.print_line(f"The folders are {kept}.")
    return 0 if verdict["passed"] else 1
