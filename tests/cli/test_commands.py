"""Run the command line on checkpoints written by `uc.save` and the safetensors library."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file

import unified_ckpt as uc
from tests.support.cli.command_line import run_verb
from tests.support.damage import flip
from tests.support.format.manifests import edit_index
from tests.support.torch_training import train_step
from unified_ckpt.cli import main as command
from unified_ckpt.cli import verify
from unified_ckpt.cli.display import console, progress
from unified_ckpt.cli.display.progress import progress_bar
from unified_ckpt.cli.main import main
from unified_ckpt.format.names import MANIFEST

LAYERS = 12
SMALL = uc.SaveOptions(max_file_bytes=4096)


def model_of(layers: int = LAYERS) -> dict[str, torch.Tensor]:
    tensors = {
        f"model.layers.{i}.mlp.up.weight": torch.full((8, 16), float(i)) for i in range(layers)
    }
    return {"model.embed.weight": torch.arange(64.0).reshape(4, 16), **tensors}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "checkpoint-7"
    model = model_of()
    model["lm_head.weight"] = model["model.embed.weight"]
    # an optimizer needs a module; its names are those of the dict without the dots
    module = torch.nn.ParameterDict()
    module["embed"], module["norm"] = (
        torch.nn.Parameter(torch.ones(4, 16)),
        torch.nn.Parameter(torch.ones(16)),
    )
    optimizer = torch.optim.AdamW(
        [
            {"params": [module["embed"]], "lr": 0.5},
            {"params": [module["norm"]], "weight_decay": 0.0},
        ]
    )
    train_step(optimizer)
    uc.save(
        folder,
        model=module,
        optimizer=optimizer,
        parts={"ema": model},
        step=7,
        options=SMALL,
        **extras(),
    )
    return folder


def extras() -> dict[str, object]:
    extra = {
        "epoch": 3,
        "loss": float("nan"),
        "seen": Counter(a=2),
        "w": torch.ones(3),
        "shape": (1, 2),
        "device": torch.device("cpu"),
    }
    return {"extra": extra, "rank_extra": {"rng": torch.get_rng_state()}}


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / saved.name))


@pytest.fixture
def hugging_face(tmp_path: Path) -> Path:
    (tmp_path / "hf").mkdir()
    save_file(model_of(), tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "hf"


def run_failing_verb(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(a) for a in arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_inspect_prints_the_manifest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run_verb(capsys, "inspect", folder)
    manifest = json.loads((folder / "unified_checkpoint.json").read_bytes())
    for text_part in (
        str(folder),
        manifest["save_id"],
        manifest["created"],
        f"torch {torch.__version__}",
        "1 rank\n",
        "unified checkpoint 1.0",
    ):
        assert text_part in text
    assert "step           7\n" in text
    assert (
        "epoch=3, loss=float(nan), seen=Counter(1), w=torch.Tensor(float32, [3]), shape=(1, 2), "
        "device=torch.device(cpu)" in text
    )
    assert (
        "param group 0  1 parameter: lr=0.5, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01"
        in text
    )
    assert "weight_decay=0.0" in text


def test_inspect_folds_layers_and_states(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_verb(capsys, "inspect", folder).splitlines()
    assert "│  └─ layers.{0..11}.mlp.up.weight  F32 [8, 16]  512 B each" in lines
    assert "└─ lm_head.weight                   = model.embed.weight" in lines
    assert any(
        line.startswith("ema  13 tensors, 6.25 KiB in 2 files: ema-00001-of-00002.safetensors …")
        for line in lines
    )
    assert any(
        "embed/{exp_avg,exp_avg_sq}" in line and line.endswith("256 B each") for line in lines
    )
    assert lines.index("model  2 tensors, 320 B in model.safetensors") < next(
        i for i, line in enumerate(lines) if line.startswith("optim")
    )


def test_inspect_all_and_match(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run_verb(capsys, "inspect", folder, "--all", "--match", "*.layers.1*.weight")
    assert "ema  3 of 13 tensors, 1.5 KiB" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("  model.")]
    assert [row[0] for row in rows] == [f"model.layers.{i}.mlp.up.weight" for i in (1, 10, 11)]
    index = json.loads((folder / "ema.safetensors.index.json").read_bytes())["weight_map"]
    assert [row[-1] for row in rows] == [index[row[0]] for row in rows]
    assert "optimizer" not in text
    assert "\nema" not in run_verb(capsys, "inspect", folder, "--match", "optimizer:*")


def test_inspect_json_is_complete(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(run_verb(capsys, "inspect", folder, "--json"))
    assert (
        result["step"],
        result["world_size"],
        result["rank_extra"],
        result["extra"]["epoch"],
    ) == (
        7,
        1,
        1,
        3,
    )
    assert [group["names"] for group in result["param_groups"]] == [["embed"], ["norm"]]
    with uc.open(folder) as source:
        for part, part_json in result["parts"].items():
            assert {n: t["shape"] for n, t in part_json["tensors"].items()} == {
                n: list(source[part][n].shape) for n in source[part]
            }
    assert result["parts"]["ema"]["aliases"] == {"lm_head.weight": "model.embed.weight"}
    assert {
        file: (folder / file).stat().st_size for file in result["parts"]["ema"]["files"]
    } == result["parts"]["ema"]["files"]


def test_inspect_reads_hugging_face_folders_and_urls(
    hugging_face: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import fsspec

    assert "layers.{0..11}.mlp.up.weight  F32 [8, 16]  512 B each" in run_verb(
        capsys, "inspect", hugging_face
    )
    fsspec.filesystem("memory").put(str(hugging_face), "/test_cli/hf", recursive=True)
    by_url = json.loads(run_verb(capsys, "inspect", "memory://test_cli/hf", "--json"))
    assert by_url["format"] == "huggingface"
    assert (
        by_url["parts"]
        == json.loads(run_verb(capsys, "inspect", f"file://{hugging_face}", "--json"))["parts"]
    )


def test_terminal_escapes_in_names_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"a.\x1b[31m": torch.ones(1)}, tmp_path / "hf" / "model.safetensors")
    for extra in ([], ["--all"], ["--json"]):
        assert "\x1b" not in run_verb(capsys, "inspect", tmp_path / "hf", *extra)


def test_collapse_does_not_fold_different_patterns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"layers.{i}.experts.{j}.w" for i in range(1, 4) for j in range(4)] + [
        "layers.0.w",
        "layers.00.w",
        "layers.5.experts.0.w",
    ]
    shapes = dict.fromkeys(names, (2, 2)) | {"layers.7.experts.0.w": (3,)}
    (tmp_path / "hf").mkdir()
    save_file(
        {name: torch.ones(shape) for name, shape in shapes.items()},
        tmp_path / "hf" / "model.safetensors",
    )
    labels = [
        line.rpartition("─ ")[2].split("  ")[0]
        for line in run_verb(capsys, "inspect", tmp_path / "hf").splitlines()
        if "─" in line
    ]
    assert labels == [
        "layers",
        "0.w",
        "{1..3}.experts.{0..3}.w",
        "5.experts.0.w",
        "7.experts.0.w",
        "00.w",
    ]


@pytest.mark.parametrize("of_checkpoint", [True, False])
def test_one_safetensors_file(
    folder: Path,
    tmp_path: Path,
    of_checkpoint: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A file of a checkpoint keeps its digests and aliases; its neighbours are not needed."""
    file = folder / "model.safetensors"
    if not of_checkpoint:
        blob = Path(shutil.copy(file, tmp_path / "blob"))  # as in the cache of the hub
        file = tmp_path / "weights.safetensors"
        file.symlink_to(blob)
    tensors = load_file(file)
    result = json.loads(run_verb(capsys, "inspect", "--json", file))
    assert result["path"] == str(file)
    assert list(result["parts"]) == ["model"]
    assert result["parts"]["model"]["tensors"].keys() == tensors.keys()
    assert "deleted" not in run_verb(capsys, "inspect", file)
    target = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    uc.load(file, model=target)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in target.items())
    for other in folder.glob("optimizer*.safetensors"):
        other.unlink()
    expected = "all digests match" if of_checkpoint else "there are no digests: only sizes"
    assert expected in run_verb(capsys, "verify", "--deep", file)
    flip(file, -1)
    run_verb(capsys, "verify", "--deep", file, code=int(of_checkpoint))
    (folder / MANIFEST).unlink()
    if of_checkpoint:
        assert main(["inspect", str(file)]) == 1
        assert "is an unfinished save" in capsys.readouterr().err


def test_verify_of_a_good_folder(
    folder: Path, hugging_face: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run_verb(capsys, "verify", folder).splitlines()
    assert lines[0] == str(folder)
    assert lines[1].startswith("  sizes and headers match: 21 tensors, 7.2 KiB (")
    assert lines[2:] == ["  --deep also checks all digests"]
    assert "  all digests match: 21 tensors, " in run_verb(capsys, "verify", "--deep", folder)
    assert "there are no digests: " in run_verb(capsys, "verify", "--deep", hugging_face)
    assert "\n  it has no digests\n" in run_verb(capsys, "verify", hugging_face)
    result = json.loads(run_verb(capsys, "verify", "--deep", "--json", folder))
    assert (
        result["ok"],
        result["digests"],
        result["problems"],
        result["tensors"],
        result["nbytes"],
    ) == (
        True,
        True,
        [],
        21,
        320 + 648 + 6400,
    )


def test_verify_names_damaged_tensors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(folder / "ema-00002-of-00002.safetensors", -1)
    run_verb(capsys, "verify", folder)
    text = run_verb(capsys, "verify", folder, "--deep", code=1)
    assert re.search(
        r"\n  ema-00002-of-00002.safetensors: 1 of \d+ tensors damaged: "
        r"ema:model.layers.9.mlp.up.weight: block 0 \(from byte 0 of the tensor, in ema-00002",
        text,
    )
    assert text.endswith("\n  damaged: 1 problem\n")
    result = json.loads(run_verb(capsys, "verify", folder, "--deep", "--json", code=1))
    assert (result["ok"], len(result["problems"]), len(result["damage"])) == (False, 1, 1)
    size = (folder / "ema-00002-of-00002.safetensors").stat().st_size
    os.truncate(folder / "ema-00002-of-00002.safetensors", 700)
    (folder / "model.safetensors").unlink()
    weight_map = json.loads((folder / "ema.safetensors.index.json").read_bytes())["weight_map"]
    damaged = [f"ema:{name}" for name, file in weight_map.items() if "-00002-" in file]
    assert run_verb(capsys, "verify", folder, code=1).splitlines() == [
        str(folder),
        f"  ema-00002-of-00002.safetensors: has 700 bytes; the manifest says {size}; it has "
        f"{len(damaged)} tensors",
        "  model.safetensors is missing, with 2 tensors",
        "  damaged: 2 problems",
        "  --deep also checks all digests",
    ]
    assert "model.safetensors with 2 tensor" in run_failing_verb(capsys, "inspect", folder)
    run_verb(capsys, "inspect", folder, "--match", "optimizer:*")  # reads only what it needs


def test_verify_fits_the_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(folder / "ema-00002-of-00002.safetensors", -1)
    monkeypatch.setattr(console, "stdout_columns", lambda: 80)
    lines = run_verb(capsys, "verify", "--deep", folder.parent, code=1).splitlines()
    assert {len(line) <= 80 for line in lines} == {True}
    assert lines[2].startswith("    ema-00002-of-00002.safetensors: 1 of ")
    assert lines[2].endswith("…")


def test_verify_damaged_index_and_digests(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(folder / "digests.safetensors", 100)
    text = run_verb(capsys, "verify", "--deep", folder, code=1)
    assert text.count("digests.safetensors: has 100 bytes") == 1
    edit_index(folder, "ema", lambda index: index["weight_map"].pop("model.embed.weight"))
    text = run_verb(capsys, "verify", "--deep", folder, code=1)
    assert (
        "ema-00001-of-00002.safetensors: only its header lists 'model.embed.weight', expected the "
        "same tensors in both" in text
    )
    assert "ema:lm_head.weight: is tied to model.embed.weight" in text
    os.truncate(folder / "ema.safetensors.index.json", 20)
    text = run_verb(capsys, "verify", folder, code=1)
    assert "ema.safetensors.index.json: has CRC " in text
    assert f"`unified-ckpt verify {folder} --repair` rebuilds it" in text
    (folder / "ema-00001-of-00002.safetensors").unlink()
    text = run_verb(capsys, "verify", folder, code=1)
    assert "ema-00001-of-00002.safetensors is missing or has another size too; load another" in text


FILE, INDEX = "model-00001-of-00002.safetensors", "model.safetensors.index.json"


@pytest.mark.parametrize("missing", [FILE, INDEX])
@pytest.mark.parametrize("kind", ["unified", "huggingface", "url"])
def test_a_command_in_an_error_works_for_the_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, missing: str
) -> None:
    """Only a manifest says what a repair has to restore, and only local folders are written."""
    folder, copy = tmp_path / "a folder", tmp_path / "copy"
    uc.save(folder, model=model_of(), options=SMALL)
    if kind == "huggingface":
        (folder / "unified_checkpoint.json").unlink()
        (folder / "digests.safetensors").unlink()
    shutil.copytree(folder, copy)
    (folder / missing).unlink()
    path = str(folder)
    if kind == "url":
        path = f"memory://{tmp_path.name}"
        fsspec.filesystem("memory").put(f"{folder}/", path, recursive=True)
    with pytest.raises(uc.CheckpointError) as caught, uc.open(path) as opened:
        opened["model"]["model.embed.weight"]
    match = re.search("`unified-ckpt (.+)`", str(caught.value))
    assert (match is not None) == (kind == "unified")
    if match is not None:
        run_verb(capsys, *shlex.split(match[1].replace("COPY", str(copy))))
        assert uc.verify(folder, deep=True).ok


def test_commands_in_the_sources_are_parsed() -> None:
    """Messages name only commands and flags that exist."""
    root = Path(uc.__file__).parent
    text = "".join(path.read_text() for path in root.rglob("*.py"))
    commands = set(re.findall(r"`unified-ckpt ([a-z]+ [^`\n]+)`", text))
    assert len(commands) > 3
    for line in commands - {"convert --help"}:
        line = re.sub(r"\{[^}]*\}", "PATH", line).replace("DTYPE", "bfloat16")
        command.build_parser().parse_args(shlex.split(line))


def test_paths_without_a_checkpoint_are_errors(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "unified_checkpoint.json").unlink()
    for verb in ("inspect", "verify"):
        assert f"unified-ckpt {verb}: {folder}: is an unfinished save" in run_failing_verb(
            capsys, verb, folder
        )
        assert "there is no such folder" in run_failing_verb(capsys, verb, tmp_path / "nothing")
        file = folder / "model.safetensors"
        assert f"{folder}: is an unfinished save" in run_failing_verb(capsys, verb, file)
        assert "Protocol not known: nowhere" in run_failing_verb(capsys, verb, "nowhere://a/b")
    assert f"did you mean {folder}?" in run_failing_verb(capsys, "inspect", folder.parent)
    folder.rename(tmp_path / f".replaced-0a-{folder.name}")
    assert (
        f"an interrupted replacement left a copy at {tmp_path}/.replaced-0a-checkpoint-7"
        in run_failing_verb(capsys, "inspect", folder)
    )


@pytest.mark.parametrize(
    "arguments",
    [["inspect"], ["verify", "a", "b"], ["mend", "a"], ["verify", "--match", "x", "a"]],
)
def test_usage_errors_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: unified-ckpt" in capsys.readouterr().err


def test_python_m_with_closed_pipe_and_ascii_terminal(folder: Path) -> None:
    command_line = [sys.executable, "-m", "unified_ckpt", "inspect"]
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [*command_line, folder], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (process.returncode, process.stderr) == (0, "")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    poor = subprocess.run([*command_line, folder], capture_output=True, check=True, env=environment)
    assert b"layers.{0..11}.mlp.up.weight" in poor.stdout
    for arguments, code in ((["inspect", "nothing"], 1), (["mend"], 2)):
        failed = subprocess.run([*command_line[:3], *arguments], capture_output=True, check=False)
        assert failed.returncode == code


def save_trainer_folder(folder: Path, model: torch.nn.Module) -> int:
    """Write optimizer and state as the stock Trainer does; return the number of parameters."""
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(optimizer)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    return len(list(model.parameters()))


def test_inspect_of_a_trainer_folder_builds_no_model(tmp_path: Path) -> None:
    """Neither transformers nor DTensor is imported."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    count = save_trainer_folder(tmp_path, model)
    script = f"""
import sys
from unified_ckpt.cli.main import main
assert main(["inspect", {str(tmp_path)!r}]) == 0
slow = ["transformers", "torch.distributed.tensor", "sympy"]
assert [module for module in slow if module in sys.modules] == []
"""
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert f"  param group 0  {count} parameters: lr=0.001" in process.stdout
    assert any(f"{{0..{count - 1}}}/step" in line for line in lines)
    assert lines[-1].startswith("optimizer state is stored by position; --config PATH names")


@pytest.mark.slow
def test_inspect_names_a_trainers_state_by_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    model.save_pretrained(tmp_path)
    capsys.readouterr()
    save_trainer_folder(tmp_path, model)
    text = run_verb(capsys, "inspect", tmp_path, "--config", tmp_path)
    assert "embed_tokens.weight/{exp_avg,exp_avg_sq}" in text
    assert "by position" not in text


def test_bare_command_shows_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    text = run_verb(capsys)
    assert text.startswith("usage: unified-ckpt")
    assert "repair" in text
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"unified-ckpt {version('unified-ckpt')}\n"


def test_match_without_a_match_is_an_error(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hint = f"no tensor matches 'mdoel*'; `unified-ckpt inspect {folder}` shows the names"
    for arguments in (["inspect", folder], ["inspect", folder, "--json"], ["diff", folder, folder]):
        assert hint in run_failing_verb(capsys, *arguments, "--match", "mdoel*")


def test_verify_checks_all_steps_of_a_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = run_verb(capsys, "verify", tmp_path).splitlines()
    assert good[0] == str(tmp_path)
    assert good[-1] == "  1 checkpoint, 0 damaged; --deep also checks all digests"
    flip(Path(shutil.copytree(folder, tmp_path / "checkpoint-8")) / "optimizer.safetensors", -1)
    unfinished = Path(shutil.copytree(folder, tmp_path / "checkpoint-9"))
    (unfinished / "unified_checkpoint.json").unlink()
    garbled = Path(shutil.copytree(folder, tmp_path / "checkpoint-6"))
    (garbled / "unified_checkpoint.json").write_bytes(b"{")
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-10" / "optimizer.pt").write_bytes(b"x")  # of the stock Trainer
    lines = run_verb(capsys, "verify", tmp_path, "--deep", code=1).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        str(tmp_path),
        "  checkpoint-6  damaged",
        "    unified_checkpoint.json",
        "  checkpoint-9  damaged",
        f"    {unfinished}",
        f"  {folder.name}  all digests match",
        "  checkpoint-8  damaged",
        "    optimizer.safetensors",
        "  4 checkpoints, 3 damaged",
    ]
    result = json.loads(run_verb(capsys, "verify", tmp_path, "--json", code=1))
    assert not result["ok"]
    assert [check["ok"] for check in result["checkpoints"]] == [False, False, True, True]
    assert run_failing_verb(capsys, "verify", tmp_path, "--prefix", "step-")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_names_verbs_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = run_verb(capsys, "completion", shell)
    assert [
        word for word in (*command._VERBS, "--keep-latest", "--deep") if word not in script
    ] == []


def test_bash_completes_verbs_and_paths(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script runs in bash and offers what a user would choose from."""
    script = run_verb(capsys, "completion", "bash")
    function = re.findall(r"^complete .*-F (\w+)", script, re.MULTILINE)[0]
    typed = [("unified-ckpt ver", "verify"), (f"unified-ckpt inspect {folder}", str(folder))]
    for line, expected in typed:
        words = line.split()
        asked = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; {function}"
        process = subprocess.run(
            ["bash", "-c", f'{script}\n{asked}\necho "${{COMPREPLY[@]}}"'],
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.stdout.split() == [expected], process.stderr


def stderr_terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Make stderr a terminal; return what it receives."""
    received = io.StringIO()
    monkeypatch.setattr(received, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", received)
    monkeypatch.setenv("TERM", "xterm")
    return received


CLEARED = "\x1b[2K"


def test_verify_shows_a_progress_bar_on_terminals(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal sees the bytes that are done while files are read, and nothing after the end."""

    def slow(*arguments: Any, **more: Any) -> Any:
        report = read_all(*arguments, **more)
        time.sleep(0.5)
        return report

    terminal = stderr_terminal(monkeypatch)
    read_all = verify.verify_with_replicas
    monkeypatch.setattr(verify, "verify_with_replicas", slow)
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.1)
    assert main(["verify", "--deep", str(folder)]) == 0
    assert "verify" in terminal.getvalue()
    assert "7.2/7.2 KiB" in re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
    assert terminal.getvalue().endswith(CLEARED)


def test_progress_shows_the_time_where_nothing_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = stderr_terminal(monkeypatch)
    with progress_bar("estimate", "none"):
        pass
    assert terminal.getvalue() == ""
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.1)
    with progress_bar("estimate", "none"):
        time.sleep(1.6)
        shown = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
        assert re.search(r"estimate .* 0:00:01", shown)
    assert terminal.getvalue().endswith(CLEARED)


@pytest.mark.parametrize(
    ("redirection", "code", "error"),
    [(">&-", 0, ""), (">/dev/full", 1, "unified-ckpt inspect: No space left on device\n")],
)
def test_output_that_cannot_be_written(
    saved: Path, redirection: str, code: int, error: str
) -> None:
    command_line = f'"$0" -m unified_ckpt inspect "$1" {redirection}'
    done = subprocess.run(
        ["sh", "-c", command_line, sys.executable, saved],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, error)


def test_every_verb_that_may_take_time_shows_progress() -> None:
    shown = {
        verb
        for verb in command._VERBS
        if "progress_bar(" in Path(command.__file__).with_name(f"{verb}.py").read_text()
    }
    assert set(command._VERBS) - shown == {"completion", "demo", "watch"}


def test_demo_receives_its_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from unified_ckpt.cli import demo

    calls = []
    monkeypatch.setattr(
        demo,
        "run",
        lambda arguments: calls.append((arguments.dir, arguments.keep, arguments.json)) or 1,
    )
    assert command.main(["demo", "--dir", "x", "--keep"]) == 1
    assert command.main(["demo", "--json"]) == 1
    assert calls == [("x", True, False), (None, False, True)]
