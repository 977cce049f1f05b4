"""The verb `demo`: trains, is killed during a save, and resumes on fewer processes.

In the end transformers opens the same folder. Every number on the screen is measured in this
run.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unified_ckpt.cli.demo_job import Job, tail
from unified_ckpt.core.text import human_size
from unified_ckpt.runtime.packages import missing_package

KILL_AFTER = 16  # steps; 4 processes are killed in the first save after this one
UNTIL_2_RANKS, UNTIL_1_RANK = 32, 48  # steps at which 2 processes stop, then 1 process
SAVE_EVERY, SHOW_EVERY = 8, 4
KILL_BYTES = 2_000_000  # the save is killed after writing this many
ATTEMPTS = 4
TOLERANCE = 1e-4  # relative, between a layout's loss and that of the uninterrupted process
TIMEOUT_SECONDS = 180.0
CORPUS_BYTES = 400_000
COLUMNS = "{:>4}  {:<24}{:>10}{:>26}{:>14}"


class DemoError(Exception):
    """The demo did not see what it expected; the text says what it saw."""


@dataclass(slots=True)
class Demo:
    """The demo's folder and processes, and what it has measured.

    `baseline`: the losses by step of one process that is never interrupted.
    """

    root: Path
    quiet: bool
    baseline: dict[int, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    def print_line(self, text: str = "") -> None:
        """Print a line, except with `--json`."""
        if not self.quiet:
            print(text, flush=True)

    def launch(self, name: str, *, dp: int, tp: int, until: int, resume: Path | None = None) -> Job:
        """Start a training job on dp * tp processes that trains until step `until`.

        All but the baseline save.
        """
        ranks, save_every = dp * tp, 0 if name == "baseline" else SAVE_EVERY
        log, output = self.root / f"{name}.log", self.root / f"{name}.out"
        launcher = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}".split()
        options = f"--dp {dp} --tp {tp} --until {until} --save-every {save_every}".split()
        command = [sys.executable, *(launcher if ranks > 1 else ())]
        command += ["-m", "unified_ckpt.cli.demo_train", str(self.root), str(log), *options]
        command += ["--corpus", str(self.root / "corpus.txt")]
        command += ["--resume", resume.name.removeprefix("checkpoint-")] if resume else []
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment
            )
        self.jobs.append(Job(name, process, log, output))
        return self.jobs[-1]

    def follow(self, job: Job, layout: str) -> Iterator[dict[str, Any]]:
        """Yield a job's log entries as they appear, and print its steps, until it ends."""
        ended, deadline = None, time.monotonic() + TIMEOUT_SECONDS
        while ended is None:
            ended = job.process.poll()
            for entry in job.entries():
                if entry["event"] == "step":
                    self.record_step(entry["step"], entry["loss"], layout)
                elif entry["event"] == "saved":
                    size, seconds = human_size(entry["nbytes"]), entry["seconds"]
                    name = Path(entry["path"]).name
                    self.print_line(f"      {name} saved: {size} in {seconds:.3f} s")
                yield entry
            if time.monotonic() > deadline:
                raise DemoError(f"{job.name} ran past {TIMEOUT_SECONDS:.0f} s:\n{tail(job.output)}")
            time.sleep(0.02)
        if ended and not job.killed:
            raise DemoError(f"{job.name} ended with {ended}:\n{tail(job.output)}")

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
        self.rows.append(
            {
                "step": step,
                "layout": layout,
                "loss": loss,
                "uninterrupted": baseline,
                "difference": difference,
            }
        )


def write_corpus(path: Path) -> int:
    """Write the docstrings of the standard library, sorted by module. Return their bytes."""
    size = 0
    with path.open("wb") as file:
        for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            for node in ast.walk(ast.parse(source.read_bytes())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
                    text := ast.get_docstring(node)
                ):
                    size += file.write(text.encode() + b"\n\n")
            if size > CORPUS_BYTES:
                break
    return size


@contextmanager
def work_folder(folder: str | None, *, keep: bool) -> Iterator[Path]:
    """Yield the folder to work in; a temporary one is deleted afterwards unless `keep`."""
    if folder is None:
        root = Path(tempfile.mkdtemp(prefix="unified-ckpt-demo-"))
    else:
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()):
            raise DemoError(f"{root}: is not empty, expected an empty folder")
    try:
        yield root
    finally:
        if folder is None and not keep:
            shutil.rmtree(root, ignore_errors=True)


def written_sizes(root: Path, name: str) -> list[int]:
    """Return the bytes on disk of each file that an unfinished save of `name` has written."""
    with suppress(FileNotFoundError):  # the save ends meanwhile
        return [file.stat().st_blocks * 512 for file in root.glob(f".unified-*-{name}/*")]
    return []


def latest_verified(demo: Demo) -> Path:
    """Return the latest folder whose bytes all verify."""
    from unified_ckpt import verify

    for folder in sorted(
        demo.root.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]), reverse=True
    ):
        started = time.perf_counter()
        report = verify(folder, deep=True)
        if report.ok:
            seconds = time.perf_counter() - started
            demo.print_line(
                f"      {folder.name}: all digests of {report.tensors} tensors verified in "
                f"{seconds * 1e3:.1f} ms"
            )
            return folder
        demo.print_line(f"      {folder.name} is damaged: {report.problems[0]}")
    raise DemoError("no valid checkpoint is left")


def train_until_killed(demo: Demo, resume: Path | None) -> bool:
    """Train on 4 processes, FSDP2 x TP, and kill the first save after `KILL_AFTER`.

    Return whether the kill came before the save was complete; if not, the save is deleted.
    `resume`: where to continue after such a kill. The next one then comes at the first byte.
    """
    killed_step, layout = KILL_AFTER + SAVE_EVERY, "4 ranks, FSDP2 dp2 x tp2"
    interrupted = demo.root / f"checkpoint-{killed_step}"
    job = demo.launch(f"four-{len(demo.jobs)}", dp=2, tp=2, until=killed_step, resume=resume)
    entries = demo.follow(job, layout)
    while next(entries).get("step", 0) <= KILL_AFTER:
        pass
    deadline, kill_bytes = time.monotonic() + TIMEOUT_SECONDS, KILL_BYTES if resume is None else 1
    written: list[int] = []
    while sum(written) < kill_bytes and not interrupted.exists():
        if time.monotonic() > deadline or job.process.poll() is not None:
            raise DemoError(f"the save to kill was not seen:\n{tail(job.output)}")
        time.sleep(2e-4)
        written = written_sizes(demo.root, interrupted.name)
    ranks = job.kill()
    for _ in entries:
        pass
    if interrupted.exists():
        demo.print_line(
            f"      SIGKILL to {ranks} ranks came after {interrupted.name} was complete; deleting "
            "it and trying again"
        )
        shutil.rmtree(interrupted)
        return False
    demo.print_line(
        f"      SIGKILL to {ranks} ranks during the save of {interrupted.name}; it leaves "
        f"{len(written)} files, {human_size(sum(written))} or more, no manifest"
    )
    return True


def generate(demo: Demo, folder: Path) -> tuple[str, float]:
    """Open the folder with transformers. Return its text, and its loss on the trainer's probe."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from unified_ckpt.cli.demo_train import draw_batch

    quiet: Any = logging.disable_progress_bar
    quiet()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    torch.set_num_threads(1)  # as in training, so that sums have the same order
    torch.manual_seed(0)
    corpus = torch.frombuffer(bytearray((demo.root / "corpus.txt").read_bytes()), dtype=torch.uint8)
    tokens = draw_batch(corpus, UNTIL_1_RANK + 1)
    with torch.no_grad():
        loss = float(model(input_ids=tokens, labels=tokens).loss)
    prompt = tokenizer("Return the ", return_tensors="pt")
    generated = model.generate(
        **prompt, max_new_tokens=120, do_sample=True, temperature=0.7, pad_token_id=0
    )
    return str(tokenizer.decode(generated[0])), loss


def run_demo(demo: Demo) -> dict[str, Any]:
    """Run the demo and return what it measured. Raises `DemoError` if an event did not happen."""
    started = time.perf_counter()
    size = write_corpus(demo.root / "corpus.txt")
    python = sys.version.split()[0]
    demo.print_line(
        f"Text: {size / 1e3:.0f} kB of docstrings of Python {python}; a token is a byte.\n"
        f"4 processes train a Llama on it and save every {SAVE_EVERY} steps.\n"
        "The baseline is a single process that is never interrupted; it runs first.\n"
        f"Every step is compared with it, every {SHOW_EVERY}th is shown.\n"
    )
    baseline = demo.launch("baseline", dp=1, tp=1, until=UNTIL_1_RANK)
    list(demo.follow(baseline, "baseline"))
    demo.print_line(COLUMNS.format("step", "layout", "loss", "baseline", "difference"))
    resume: Path | None = None
    for _ in range(ATTEMPTS):
        if train_until_killed(demo, resume):
            break
        resume = latest_verified(demo)
    else:
        raise DemoError(f"in {ATTEMPTS} attempts the save was complete before the kill")
    checkpoint = latest_verified(demo)
    demo.print_line(f"      resuming from {checkpoint.name} with 2 processes")
    two_ranks = demo.launch("two", dp=1, tp=2, until=UNTIL_2_RANKS, resume=checkpoint)
    list(demo.follow(two_ranks, "2 ranks, tp2"))
    checkpoint = latest_verified(demo)
    demo.print_line(
        f"      resuming from {checkpoint.name} with 1 process, without a process group"
    )
    single_process = demo.launch("one", dp=1, tp=1, until=UNTIL_1_RANK, resume=checkpoint)
    *_, probe = demo.follow(single_process, "1 process")
    checkpoint = latest_verified(demo)
    text, loss = generate(demo, checkpoint)
    demo.print_line(f"\nAutoModelForCausalLM.from_pretrained({checkpoint.name!r}) generates:\n")
    demo.print_line("  " + text.replace("\n", "\n  ") + "\n")
    return {
        "probe": probe["loss"],
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
        f"Next batch: loss {probe:.7f} in the trainer, {loss:.7f} from the folder.\n"
        f"{'PASSED' if passed else 'FAILED'} in {measured['seconds']:.0f} s."
    )
    return {
        **measured,
        "passed": passed,
        "worst": worst,
        "steps_in_two_layouts": len(differences),
        "worst_of_those": twice,
    }


def write_report(root: Path, *, keep: bool) -> str | None:
    """Write the page about the run. Return its path, None without the extra `report`.

    `keep`: the folder stays, and the page lies in it.
    """
    if importlib.util.find_spec("vl_convert") is None:
        return None
    from unified_ckpt.report.page import write_page
    from unified_ckpt.report.run_data import read_report

    page = str(root / "report.html") if keep else f"{root}.html"
    write_page(read_report(str(root)), page)
    return page


def run(arguments: Any) -> int:
    """Run the demo; return 0 if it passed.

    `arguments` may lack any of `dir`, `keep` and `json`.
    """
    folder, keep, as_json = (getattr(arguments, name, None) for name in ("dir", "keep", "json"))
    if importlib.util.find_spec("transformers") is None:
        error = ModuleNotFoundError("No module named 'transformers'")
        raise missing_package("demo", error, extra="demo")
    try:
        with work_folder(folder, keep=bool(keep)) as root:
            demo = Demo(root, quiet=bool(as_json))
            try:
                verdict = evaluate(demo, run_demo(demo))
            finally:
                for job in demo.jobs:
                    list(job.entries())  # collects the process ids
                    if job.process.poll() is None:
                        job.kill()
            page = write_report(root, keep=bool(keep or folder))
            if as_json:
                print(json.dumps({"rows": demo.rows, "page": page, **verdict}))
            if page:
                demo.print_line(f"What happened, as a page: {page}")
            demo.print_line(
                f"The folders are in {root}."
                if keep or folder
                else "The folders are deleted; pass --keep to keep them."
            )
            return 0 if verdict["passed"] else 1
    except DemoError as error:
        print(f"unified-ckpt demo: {error}", file=sys.stderr)
        return 1
