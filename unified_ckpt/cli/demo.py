"""The verb `demo`: trains, is killed during a save, and resumes on fewer processes.

It runs the example for plain PyTorch. In the end transformers opens the same folder. Every number
on the screen is measured in this run.
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
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unified_ckpt.core.text import human_size
from unified_ckpt.errors import CheckpointError, MissingPackageError
from unified_ckpt.foreign.step_names import DEFAULT_PREFIX as PREFIX
from unified_ckpt.manager.steps.scan import scan
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.packages import missing_package
from unified_ckpt.runtime.storage.roots import open_root, root_path

EXAMPLE = Path(__file__).parents[1] / "examples" / "plain_pytorch.py"
KILL_AFTER = 12  # steps; 4 processes are killed in the first save after this one
KILL_BYTES = 2_000_000  # the save is killed after writing this many
UNTIL_2_RANKS, UNTIL_1_RANK = 30, 47  # steps at which 4 or 2 processes stop, then 1 process
SHOW_EVERY = 4
ATTEMPTS = 4
TOLERANCE = 1e-4  # relative, between a layout's loss and that of the uninterrupted process
TIMEOUT_SECONDS = 600.0
TEXT = Path(argparse.__file__)  # a text that every Python has
COLUMNS = "{:>4}  {:<16}{:>10}{:>12}{:>14}"
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
    baseline: dict[int, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def print_line(self, text: str = "") -> None:
        """Print a line, except with `--json`."""
        if not self.quiet:
            print(text, flush=True)

    def launch(self, name: str, ranks: int, *options: str, until: int) -> Job:
        """Start the example on several ranks. It resumes from the run's latest checkpoint."""
        folder = self.run if name == "run" else str(self.root / name)
        command = [sys.executable, str(EXAMPLE), folder, "--until", str(until)]
        command += ["--text", str(TEXT), "--dropout", "0", "--workers", "0", *options]
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
            cells = step, layout, f"{loss:.6f}", f"{baseline:.6f}", f"{difference:.1e}"
            self.print_line(COLUMNS.format(*cells))
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
    job = demo.launch("run", 4, "--fsdp", until=UNTIL_2_RANKS)
    for step in demo.follow(job, "4 ranks, FSDP2"):
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
        demo.print_line(
            f"      SIGKILL to 4 ranks during the save of checkpoint-{name}; it leaves "
            f"{len(written)} {kind}{size}, no manifest"
        )
    else:
        demo.print_line("      SIGKILL to 4 ranks came after the save was complete; trying again")
    return bool(name)


def verify_latest(demo: Demo, resuming: str) -> None:
    """Verify all bytes of the latest checkpoint, and print that the next job resumes from it."""
    from unified_ckpt import verify

    path, started = demo.checkpoints()[-1], time.perf_counter()
    name = path.rpartition("/")[2]
    report = verify(path, deep=True)
    if not report.ok:
        raise CheckpointError(f"{name} is damaged: {report.problems[0]}")
    seconds = time.perf_counter() - started
    demo.print_line(
        f"      {name}: all digests of {report.tensors} tensors verified in "
        f"{seconds * 1e3:.1f} ms\n      resuming from {name} {resuming}"
    )


def generate(folder: str, samples: list[int]) -> tuple[str, float]:
    """Open the folder with transformers. Return its text, and its loss on some of the windows."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from unified_ckpt.examples.plain_pytorch import Windows

    quiet: Any = logging.disable_progress_bar
    quiet()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    torch.set_num_threads(1)  # as in training, so that sums have the same order
    torch.manual_seed(0)
    tokens = Windows(TEXT.read_bytes()).tokens[samples]
    with torch.no_grad():
        loss = float(model(input_ids=tokens, labels=tokens).loss)
    prompt = torch.tensor([list(b"def add_")])
    generated = model.generate(
        prompt, max_new_tokens=120, do_sample=True, temperature=0.7, pad_token_id=0
    )
    return re.sub(r"[^\n -~]", "?", bytes(generated[0].tolist()).decode("latin-1")), loss


def run_demo(demo: Demo) -> dict[str, Any]:
    """Run the jobs, and return what was measured. CheckpointError if an event did not happen."""
    started = time.perf_counter()
    demo.print_line(
        f"4 processes run {EXAMPLE.name}: a Llama learns the text of {TEXT.name}.\n"
        "They save every 5 steps.\n"
        "The baseline is a single process that is never interrupted; it runs first.\n"
        f"Every step is compared with it, every {SHOW_EVERY}th is shown.\n"
    )
    list(demo.follow(demo.launch("baseline", 1, until=UNTIL_1_RANK), "baseline"))
    demo.print_line(COLUMNS.format("step", "layout", "loss", "baseline", "difference"))
    if not any(train_until_killed(demo) for _ in range(ATTEMPTS)):
        raise CheckpointError(f"in {ATTEMPTS} attempts the save was complete before the kill")
    verify_latest(demo, "with 2 processes")
    list(demo.follow(demo.launch("run", 2, until=UNTIL_2_RANKS), "2 ranks, DDP"))
    verify_latest(demo, "with 1 process, without a process group")
    last_job = demo.launch("run", 1, until=UNTIL_1_RANK)
    list(demo.follow(last_job, "1 process"))
    checkpoint = demo.local_checkpoint(demo.checkpoints()[-2])  # training has gone on from it
    steps = {step: (loss, samples) for step, loss, samples in last_job.steps()}
    name = checkpoint.rpartition("/")[2]
    probe_step = int(name.removeprefix(PREFIX)) + 1
    probe, samples = steps[probe_step]
    text, loss = generate(checkpoint, samples)
    demo.print_line(f"\nAutoModelForCausalLM.from_pretrained({name!r}) generates:\n")
    demo.print_line("  " + text.replace("\n", "\n  ") + "\n")
    return {
        "probe_step": probe_step,
        "probe": probe,
        "from_pretrained": loss,
        "text": text,
        "seconds": time.perf_counter() - started,
    }


def evaluate(demo: Demo, measured: dict[str, Any]) -> dict[str, Any]:
    """Print whether training continued as it should have; add that to the measurements."""
    by_step: dict[int, list[float]] = {}
    for row in demo.rows:
        by_step.setdefault(row["step"], []).append(row["loss"])
    differences = [max(losses) - min(losses) for losses in by_step.values() if len(losses) > 1]
    worst, twice = max(row["difference"] for row in demo.rows), max(differences, default=0.0)
    probe, loss = measured["probe"], measured["from_pretrained"]
    passed = (
        sorted(by_step) == list(range(1, UNTIL_1_RANK + 1))
        and worst <= TOLERANCE
        and demo.rows[-1]["loss"] < demo.rows[0]["loss"]
        and abs(probe - loss) <= 1e-6
    )
    demo.print_line(
        f"{UNTIL_1_RANK} steps: losses differ from the baseline's by at most {worst:.1e} "
        f"(relative; allowed {TOLERANCE:.0e}).\n"
        f"{len(differences)} steps were computed in two layouts: losses differ by at most "
        f"{twice:.1e}.\n"
        f"Step {measured['probe_step']}: loss {probe:.7f} in the trainer, {loss:.7f} from the "
        f"folder.\n{'PASSED' if passed else 'FAILED'} in {measured['seconds']:.0f} s."
    )
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
