"""Messages of the command line name the flags that the user typed, not options of Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from unified_ckpt.cli.arguments import with_flags
from unified_ckpt.cli.main import build_parser, main


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("pass SourceOptions(config=...)", "pass --config"),
        ("or SourceOptions(names='own') too", "or --names own too"),
        (
            "x: names='huggingface' is not; pass names='own'",
            "x: --names huggingface is not; pass --names own",
        ),
        (
            "parts=('optimizer',): pass 'model' in parts=... too",
            "--part optimizer: pass 'model' in --part too",
        ),
        (
            'pass options with if_exists="replace" or if_exists="keep"',
            "pass options with --if-exists replace or --if-exists keep",
        ),
        ("SourceOptions(layer_dim) has no effect", "--layer-dim has no effect"),
        ("rename: `pad` has no effect", "--rename: `pad` has no effect"),
        ("pass compare=False", "pass --no-compare"),
        # none of these is an option of the verb
        ("/data/to=3/names=a/c: num_layers=3, but format is old", None),
        ("rule 1 of `match`: got to, expected `to`", None),
        ("pass SourceOptions(optimizer_order=[[names], ...])", None),
    ],
)
def test_options_are_named_as_flags(message: str, expected: str | None) -> None:
    parser = build_parser().parse_args(["convert", "a", "b"]).parser
    assert with_flags(message, parser) == (expected or message)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["convert", "c", "c2"], "pass options with --if-exists replace or --if-exists keep"),
        (["convert", "c", "d", "--part", "optimizer"], "--part optimizer: leaves out the model"),
        (["inspect", "c", "--layer-dim", "1"], "--layer-dim has no effect without --layers"),
        (["estimate", "c", "--masters"], "--masters: got True for a model without"),
        (
            ["estimate", "c", "--optimizer", "adamx"],
            "--optimizer: got it beside a checkpoint, which has one; omit --optimizer",
        ),
    ],
)
def test_errors_of_verbs_name_flags(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
) -> None:
    model = {"w": torch.zeros(3, dtype=torch.int32)}
    moments = {"w/exp_avg": torch.zeros(3)}
    for name in ("c", "c2"):
        uc.save(
            tmp_path / name, model=model, optimizer=moments, options=uc.SaveOptions(fsync=False)
        )
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    assert text in capsys.readouterr().err
