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
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KILL_AFTER = 16  # steps; 4 processes are killed in the first save after this one
UNTIL_2_RANKS, UNTIL_1_RANK = 32, 48  # steps at which 2 processes stop, then 1 process
SAVE_EVERY, SHOW_EVERY = 8, 4
KILL_BYTES = 2_000_000  # a save is killed after writing this many
ATTEMPTS = 4
TOLERANCE = 1e-4  # relative, between a layout's loss and that of the uninterrupted process
TIMEOUT_SECONDS = 180.0
CORPUS_BYTES = 400_000
COLUMNS = "{:>4}  {:<24}{:>10}{:>26}{:>14}"


class DemoError(Exception):
    """The demo did not see what it expected; the text says what it saw."""


@dataclass(slots=True)
class Run:
    """A training job in its own processes, and the log that it writes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    output: Path
    lines_read: int = 0
    pids: list[int] = field(default_factory=list)

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield the log entries that are new since the last call."""
        lines = self.log.read_bytes().split(b"\n")[:-1] if self.log.exists() else []
        for line in lines[self.lines_read :]:
            self.lines_read += 1
            entry = json.loads(line)
            if entry["event"] == "started":
                self.pids.append(entry["pid"])
            yield entry

    def kill(self) -> int:
        """Send SIGKILL to torchrun and every rank. Return the number of ranks."""
        self.process.kill()
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        return len(self.pids)


@dataclass(slots=True)
class Demo:
    """The demo's folder and processes, and what it has measured."""

    root: Path
    quiet: bool
    baseline: Run | None = None  # one process, never interrupted
    baseline_losses: dict[int, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    running: list[Run] = field(default_factory=list)

    def print_line(self, text: str = "") -> None:
        """Print a line, except with `--json`."""
        if not self.quiet:
            print(text, flush=True)

    def launch(
        self, name: str, *, dp: int, tp: int, until: int, save_every: int, resume: Path | None
    ) -> Run:
        """Start a training job on dp * tp processes that trains until step `until`."""
        arguments = [
            str(self.root),
            str(self.root / f"{name}.log"),
            "--corpus",
            str(self.root / "corpus.txt"),
        ]
        arguments += [
            "--dp",
            str(dp),
            "--tp",
            str(tp),
            "--until",
            str(until),
            "--save-every",
            str(save_every),
        ]
        arguments += ["--resume", str(resume)] if resume else []
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(dp * tp)]
            if dp * tp > 1
            else []
        )
        command = [sys.executable, *launcher, "-m", "unified_ckpt.cli.demo_train", *arguments]
        output = self.root / f"{name}.out"
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
        run = Run(name, process, self.root / f"{name}.log", output)
        self.running.append(run)
        return run

    def follow(self, run: Run, layout: str, *, killed: bool = False) -> Iterator[dict[str, Any]]:
        """Yield a run's log entries as they appear and print its steps, until the run ends."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            ended = run.process.poll()
            for entry in run.entries():
                if entry["event"] == "step":
                    self.record_step(entry, layout)
                elif entry["event"] == "saved":
                    name, seconds = Path(entry["path"]).name, entry["seconds"]
                    self.print_line(
                        f"      {name} saved: {entry['nbytes'] / 1e6:.1f} MB in {seconds:.3f} s"
                    )
                yield entry
            if ended is not None:
                break
            if time.monotonic() > deadline:
                raise DemoError(f"{run.name} ran past {TIMEOUT_SECONDS:.0f} s:\n{tail(run.output)}")
            time.sleep(0.02)
        if ended and not killed:
            raise DemoError(f"{run.name} ended with {ended}:\n{tail(run.output)}")

    def baseline_loss(self, step: int) -> float:
        """Return the baseline's loss at a step, waiting until it is there."""
        assert self.baseline is not None
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while step not in self.baseline_losses:
            has_ended = self.baseline.process.poll() is not None
            self.baseline_losses |= {
                entry["step"]: entry["loss"]
                for entry in self.baseline.entries()
                if entry["event"] == "step"
            }
            if step not in self.baseline_losses:
                if has_ended or time.monotonic() > deadline:
                    output = tail(self.baseline.output)
                    raise DemoError(f"the baseline did not reach step {step}:\n{output}")
                time.sleep(0.02)
        return self.baseline_losses[step]

    def record_step(self, entry: dict[str, Any], layout: str) -> None:
        """Record a step next to the baseline's loss, and print some of them."""
        step, loss = entry["step"], entry["loss"]
        baseline = self.baseline_loss(step)
        difference = abs(loss - baseline) / abs(baseline)
        is_new_layout = not self.rows or self.rows[-1]["layout"] != layout
        self.rows.append(
            {
                "step": step,
                "layout": layout,
                "loss": loss,
                "uninterrupted": baseline,
                "difference": difference,
            }
        )
        if is_new_layout or step % SHOW_EVERY == 0:
            self.print_line(
                COLUMNS.format(step, layout, f"{loss:.6f}", f"{baseline:.6f}", f"{difference:.1e}")
            )


def tail(output: Path) -> str:
    """Return the last part of a run's output, for errors."""
    return output.read_text(errors="replace")[-6000:]


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


def staging_folders(root: Path) -> set[Path]:
    """Return the staging folders, of running or interrupted saves."""
    return {root / name for name in os.listdir(root) if name.startswith(".unified-")}


def written_size(folder: Path) -> tuple[int, int]:
    """Return the number of files in a folder and the bytes on disk; (0, 0) if there is none."""
    stats = []
    with suppress(FileNotFoundError):
        stats = [entry.stat(follow_symlinks=False) for entry in os.scandir(folder)]
    return len(stats), sum(entry.st_blocks for entry in stats) * 512


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

    Return whether that save was interrupted.
    """
    layout = "4 ranks, FSDP2 dp2 x tp2"
    existing = staging_folders(demo.root)
    run = demo.launch(
        f"four-{len(demo.running)}",
        dp=2,
        tp=2,
        until=KILL_AFTER + SAVE_EVERY,
        save_every=SAVE_EVERY,
        resume=resume,
    )
    for entry in demo.follow(run, layout):
        if entry["event"] in ("step", "saved") and entry["step"] >= KILL_AFTER + (
            entry["event"] == "step"
        ):
            break
    interrupted = demo.root / f"checkpoint-{KILL_AFTER + SAVE_EVERY}"
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (new_folders := staging_folders(demo.root) - existing) and not interrupted.exists():
        if time.monotonic() > deadline or (
            run.process.poll() is not None and not interrupted.exists()
        ):
            raise DemoError(f"the save to kill never started:\n{tail(run.output)}")
        time.sleep(2e-4)
    folder, seen_at = new_folders.pop() if new_folders else interrupted, time.monotonic()
    patience = 1.0 if resume is None else 0.0  # kill at once if the last kill came too late
    while written_size(folder)[1] < KILL_BYTES and time.monotonic() - seen_at < patience:
        time.sleep(2e-4)
    ranks = run.kill()
    for _ in demo.follow(run, layout, killed=True):
        pass
    if interrupted.exists():
        demo.print_line(
            f"      SIGKILL to {ranks} ranks came after {interrupted.name} was complete; deleting "
            "it and trying again"
        )
        shutil.rmtree(interrupted)
        return False
    files, nbytes = written_size(folder)
    demo.print_line(
        f"      SIGKILL to {ranks} ranks during the save of {interrupted.name}; it leaves {files} "
        f"files, {nbytes / 1e6:.1f} MB, no manifest"
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
        f"Text: {size / 1e3:.0f} kB of docstrings of Python {python}; a token is a byte."
    )
    demo.print_line(f"4 processes train a Llama on it and save every {SAVE_EVERY} steps.")
    demo.print_line("The baseline is a single process that is never interrupted.")
    demo.print_line(f"Every step is compared with it, every {SHOW_EVERY}th is shown.\n")
    warm_up = threading.Thread(
        target=lambda: importlib.import_module("transformers.models.llama.modeling_llama"),
        daemon=True,
    )
    warm_up.start()  # the import takes seconds, and is needed at the end
    demo.baseline = demo.launch(
        "baseline", dp=1, tp=1, until=UNTIL_1_RANK, save_every=0, resume=None
    )
    demo.print_line(COLUMNS.format("step", "layout", "loss", "baseline", "difference"))
    # Let the baseline run ahead: waiting for it would delay the kill.
    demo.baseline_loss(KILL_AFTER + SAVE_EVERY)
    resume: Path | None = None
    for _ in range(ATTEMPTS):
        if train_until_killed(demo, resume):
            break
        resume = latest_verified(demo)
    else:
        raise DemoError(f"in {ATTEMPTS} attempts the save was complete before the kill")
    checkpoint = latest_verified(demo)
    demo.print_line(f"      resuming from {checkpoint.name} with 2 processes")
    two_ranks = demo.launch(
        "two", dp=1, tp=2, until=UNTIL_2_RANKS, save_every=SAVE_EVERY, resume=checkpoint
    )
    for _ in demo.follow(two_ranks, "2 ranks, tp2"):
        pass
    checkpoint = latest_verified(demo)
    demo.print_line(
        f"      resuming from {checkpoint.name} with 1 process, without a process group"
    )
    one_rank = demo.launch(
        "one", dp=1, tp=1, until=UNTIL_1_RANK, save_every=SAVE_EVERY, resume=checkpoint
    )
    entries = list(demo.follow(one_rank, "1 process"))
    checkpoint = latest_verified(demo)
    probe = next(entry["loss"] for entry in entries if entry["event"] == "probe")
    text, loss = generate(demo, checkpoint)
    demo.print_line(f"\nAutoModelForCausalLM.from_pretrained({checkpoint.name!r}) generates:\n")
    demo.print_line("  " + text.replace("\n", "\n  ") + "\n")
    return {
        "probe": probe,
        "from_pretrained": loss,
        "text": text,
        "seconds": time.perf_counter() - started,
    }


def evaluate(demo: Demo, measured: dict[str, Any]) -> dict[str, Any]:
    """Add to the measurements whether training continued as it should have."""
    by_step: dict[int, list[float]] = {}
    for row in demo.rows:
        by_step.setdefault(row["step"], []).append(row["loss"])
    differences = [max(losses) - min(losses) for losses in by_step.values() if len(losses) > 1]
    worst = max(row["difference"] for row in demo.rows)
    losses = [demo.rows[0]["loss"], demo.rows[-1]["loss"]]
    is_complete = sorted(by_step) == list(range(1, UNTIL_1_RANK + 1))
    passed = (
        is_complete
        and worst <= TOLERANCE
        and losses[1] < losses[0]
        and abs(measured["probe"] - measured["from_pretrained"]) <= 1e-6
    )
    return {
        **measured,
        "passed": passed,
        "worst": worst,
        "steps_in_two_layouts": len(differences),
        "worst_of_those": max(differences, default=0.0),
    }


def print_summary(demo: Demo, verdict: dict[str, Any]) -> None:
    """Print the last lines."""
    worst, twice = verdict["worst"], verdict["worst_of_those"]
    repeated, probe = verdict["steps_in_two_layouts"], verdict["probe"]
    demo.print_line(
        f"{UNTIL_1_RANK} steps: losses differ from the baseline's by at most {worst:.1e} "
        f"(relative; allowed {TOLERANCE:.0e})."
    )
    demo.print_line(
        f"{repeated} steps were computed in two layouts: losses differ by at most {twice:.1e}."
    )
    demo.print_line(
        f"Next batch: loss {probe:.7f} in the trainer, {verdict['from_pretrained']:.7f} from the "
        "folder."
    )
    outcome = "PASSED" if verdict["passed"] else "FAILED"
    demo.print_line(f"{outcome} in {verdict['seconds']:.0f} s.")


def run(arguments: Any) -> int:
    """Run the demo; return 0 if it passed.

    `arguments` may lack any of `dir`, `keep` and `json`.
    """
    folder, keep, as_json = (getattr(arguments, name, None) for name in ("dir", "keep", "json"))
    if importlib.util.find_spec("transformers") is None:
        message = "transformers is not installed; run: pip install unified-ckpt[demo]"
        print(f"unified-ckpt demo: {message}", file=sys.stderr)
        return 2
    try:
        with work_folder(folder, keep=bool(keep)) as root:
            demo = Demo(root, quiet=bool(as_json))
            try:
                verdict = evaluate(demo, run_demo(demo))
            finally:
                for job in demo.running:
                    list(job.entries())  # collects the process ids
                    if job.process.poll() is None:
                        job.kill()
            if as_json:
                print(json.dumps({"rows": demo.rows, **verdict}))
            print_summary(demo, verdict)
            kept = (
                f"The folders are in {root}."
                if keep or folder
                else "The folders are deleted; pass --keep to keep them."
            )
            demo.print_line(kept)
            return 0 if verdict["passed"] else 1
    except DemoError as error:
        print(f"unified-ckpt demo: {error}", file=sys.stderr)
        return 1
