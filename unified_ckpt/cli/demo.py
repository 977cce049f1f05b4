"""The verb `demo`: train, be killed in mid-save, resume on fewer processes, and open the same
folder with stock transformers.

Every number on the screen is measured in this run.
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

KILL_AFTER, UNTIL_2_RANKS, UNTIL_1_RANK = (
    16,
    32,
    48,
)  # steps: the save after the first is killed; 2 processes go on to the second, 1 to the third
SAVE_EVERY, SHOW_EVERY = 8, 4
KILL_BYTES = 2_000_000  # written by a save, when the kill comes
ATTEMPTS = 4
TOLERANCE = 1e-4  # relative, between a layout's loss and that of the uninterrupted single process
TIMEOUT_SECONDS = 180.0
CORPUS_BYTES = 400_000
COLUMNS = "{:>4}  {:<24}{:>10}{:>26}{:>14}"


class DemoError(Exception):
    """The demo could not do what it set out to do; the text says what was seen."""


@dataclass(slots=True)
class Run:
    """A training job in processes of its own, and the log that it writes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    output: Path
    lines_read: int = 0  # lines of the log handed out so far
    pids: list[int] = field(default_factory=list)

    def entries(self) -> Iterator[dict[str, Any]]:
        """What the log has gained, each line handed out once."""
        lines = self.log.read_bytes().split(b"\n")[:-1] if self.log.exists() else []
        for line in lines[self.lines_read :]:
            self.lines_read += 1
            entry = json.loads(line)
            if entry["event"] == "started":
                self.pids.append(entry["pid"])
            yield entry

    def kill(self) -> int:
        """SIGKILL to torchrun and to every rank. Returns how many ranks there were."""
        self.process.kill()
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        return len(self.pids)


@dataclass(slots=True)
class Demo:
    """Where the demo works and what it has measured."""

    root: Path
    quiet: bool
    baseline: Run | None = None  # the reference
    baseline_losses: dict[int, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    running: list[Run] = field(default_factory=list)

    def print_line(self, text: str = "") -> None:
        if not self.quiet:
            print(text, flush=True)

    def launch(
        self, name: str, *, dp: int, tp: int, until: int, save_every: int, resume: Path | None
    ) -> Run:
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
        """The entries of a run's log as they come; rows of the table are shown on the way. Ends
        with the run.
        """
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
        """The loss of the reference at this step, as soon as it is there."""
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
                    raise DemoError(
                        f"the reference run did not reach step {step}:\n{tail(self.baseline.output)}"
                    )
                time.sleep(0.02)
        return self.baseline_losses[step]

    def record_step(self, entry: dict[str, Any], layout: str) -> None:
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
    return output.read_text(errors="replace")[-6000:]


def write_corpus(path: Path) -> int:
    """The documentation strings of the standard library's modules, in the order of their names."""
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
    if folder is None:
        root = Path(tempfile.mkdtemp(prefix="unified-ckpt-demo-"))
    else:
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()):
            raise DemoError(f"{root}: is not empty; the demo wants a folder of its own")
    try:
        yield root
    finally:
        if folder is None and not keep:
            shutil.rmtree(root, ignore_errors=True)


def staging_folders(root: Path) -> set[Path]:
    """The folders under construction, or left so."""
    return {root / name for name in os.listdir(root) if name.startswith(".unified-")}


def written_size(folder: Path) -> tuple[int, int]:
    """How many files lie in a folder, and how many bytes of them have been written. (0, 0) where
    there is none.
    """
    stats = []
    with suppress(FileNotFoundError):
        stats = [entry.stat(follow_symlinks=False) for entry in os.scandir(folder)]
    return len(stats), sum(entry.st_blocks for entry in stats) * 512


def latest_verified(demo: Demo) -> Path:
    """The newest folder that verifies, byte for byte."""
    from unified_ckpt import verify

    for folder in sorted(
        demo.root.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]), reverse=True
    ):
        started = time.perf_counter()
        report = verify(folder, deep=True)
        if report.ok:
            seconds = time.perf_counter() - started
            demo.print_line(
                f"      {folder.name}: every digest of {report.tensors} tensors verified in {seconds * 1e3:.1f} ms"
            )
            return folder
        demo.print_line(f"      {folder.name} is not whole: {report.problems[0]}")
    raise DemoError("no checkpoint was left")


def train_until_killed(demo: Demo, resume: Path | None) -> bool:
    """4 processes, FSDP2 x TP, killed in the first save after `KILL_AFTER`. Returns whether that
    save was cut off.
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
            raise DemoError(f"the save to be killed never came:\n{tail(run.output)}")
        time.sleep(2e-4)
    folder, seen_at = new_folders.pop() if new_folders else interrupted, time.monotonic()
    patience = 1.0 if resume is None else 0.0  # once that was too late, at first sight
    while written_size(folder)[1] < KILL_BYTES and time.monotonic() - seen_at < patience:
        time.sleep(2e-4)
    ranks = run.kill()
    for _ in demo.follow(run, layout, killed=True):
        pass
    if interrupted.exists():
        demo.print_line(
            f"      SIGKILL to {ranks} ranks came after {interrupted.name} was whole: it is deleted, and once more from the one before"
        )
        shutil.rmtree(interrupted)
        return False
    files, nbytes = written_size(folder)
    demo.print_line(
        f"      SIGKILL to {ranks} ranks in the save of {interrupted.name}; it leaves {files} files, {nbytes / 1e6:.1f} MB, no manifest"
    )
    return True


def generate(demo: Demo, folder: Path) -> tuple[str, float]:
    """Stock transformers on the folder. Returns the text, and the loss on the batch that the
    trainer probed last.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from unified_ckpt.cli.demo_train import draw_batch

    quiet: Any = logging.disable_progress_bar
    quiet()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    torch.set_num_threads(1)  # as in the training process: sums in the same order
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
    """The whole story. Returns what was measured; raises `DemoError` where something did not
    happen.
    """
    started = time.perf_counter()
    size = write_corpus(demo.root / "corpus.txt")
    demo.print_line(
        f"Text: {size / 1e3:.0f} kB of documentation strings from Python {sys.version.split()[0]}'s own modules; a token is a byte."
    )
    demo.print_line(
        f"4 processes train a Llama on it and save every {SAVE_EVERY} steps; a single process, never interrupted, is the reference."
    )
    demo.print_line(f"Every step is compared, every {SHOW_EVERY}th is shown.\n")
    warm_up = threading.Thread(
        target=lambda: importlib.import_module("transformers.models.llama.modeling_llama"),
        daemon=True,
    )
    warm_up.start()  # for the end of the story; importing it takes seconds
    demo.baseline = demo.launch(
        "reference", dp=1, tp=1, until=UNTIL_1_RANK, save_every=0, resume=None
    )
    demo.print_line(
        COLUMNS.format("step", "layout", "loss", "1 process, uninterrupted", "difference")
    )
    demo.baseline_loss(
        KILL_AFTER + SAVE_EVERY
    )  # the table then never waits for it, and the kill is not late
    resume: Path | None = None
    for _ in range(ATTEMPTS):
        if train_until_killed(demo, resume):
            break
        resume = latest_verified(demo)
    else:
        raise DemoError(f"{ATTEMPTS} times the save was whole before the kill came")
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
    demo.print_line(
        f"\nStock transformers, AutoModelForCausalLM.from_pretrained({checkpoint.name!r}), writes:\n"
    )
    demo.print_line("  " + text.replace("\n", "\n  ") + "\n")
    return {
        "probe": probe,
        "from_pretrained": loss,
        "text": text,
        "seconds": time.perf_counter() - started,
    }


def evaluate(demo: Demo, measured: dict[str, Any]) -> dict[str, Any]:
    """Whether the curve went on as it should have. `differences`: steps that two layouts computed."""
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
    """The last lines on the screen."""
    worst, twice = verdict["worst"], verdict["worst_of_those"]
    demo.print_line(
        f"{UNTIL_1_RANK} steps: losses at most {worst:.1e} from the uninterrupted run (relative; allowed {TOLERANCE:.0e})."
    )
    demo.print_line(
        f"{verdict['steps_in_two_layouts']} steps were computed in two layouts: losses at most {twice:.1e} apart."
    )
    demo.print_line(
        f"The next batch: loss {verdict['probe']:.7f} in the trainer, {verdict['from_pretrained']:.7f} from the folder."
    )
    demo.print_line(
        f"{'All of it holds' if verdict['passed'] else 'This is NOT as it should be'}; {verdict['seconds']:.0f} s in total."
    )


def run(arguments: Any) -> int:
    """Takes `dir`, `keep` and `json` from the command line; each may be absent."""
    folder, keep, as_json = (getattr(arguments, name, None) for name in ("dir", "keep", "json"))
    if importlib.util.find_spec("transformers") is None:
        print(
            "unified-ckpt demo: it trains a transformers model, and that is not installed; pip install unified-ckpt[demo]",
            file=sys.stderr,
        )
        return 2
    try:
        with work_folder(folder, keep=bool(keep)) as root:
            demo = Demo(root, quiet=bool(as_json))
            try:
                verdict = evaluate(demo, run_demo(demo))
            finally:
                for job in demo.running:
                    list(job.entries())  # for the process ids in it
                    if job.process.poll() is None:
                        job.kill()
            if as_json:
                print(json.dumps({"rows": demo.rows, **verdict}))
            print_summary(demo, verdict)
            demo.print_line(
                f"The folders are in {root}."
                if keep or folder
                else "The folders are deleted; --keep keeps them."
            )
            return 0 if verdict["passed"] else 1
    except DemoError as error:
        print(f"unified-ckpt demo: {error}", file=sys.stderr)
        return 1
