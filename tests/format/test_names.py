from __future__ import annotations

from functools import partial

import pytest

from unified_ckpt.errors import FormatError
from unified_ckpt.format import names


@pytest.mark.parametrize(
    ("name", "is_file", "renamed"),
    [
        ("checkpoint-8", False, "checkpoint-8-before-3"),
        ("checkpoint-8", True, "checkpoint-8-before-3"),
        ("last.ckpt", True, "last-before-3.ckpt"),
        ("last.ckpt", False, "last.ckpt-before-3"),
        ("epoch=0-step=8.ckpt", True, "epoch=0-step=8-before-3.ckpt"),
        (".hidden", True, ".hidden-before-3"),
    ],
)
def test_backup_name_is_visible_and_not_a_step(name: str, is_file: bool, renamed: str) -> None:
    assert names.backup_name(name, 3, is_file=is_file) == renamed
    assert names.is_backup(renamed)
    assert not names.is_backup(name)


def test_file_names_are_those_of_hugging_face() -> None:
    assert names.file_name("model", number=1, count=1) == "model.safetensors"
    assert names.file_name("model", number=1, count=4) == "model-00001-of-00004.safetensors"
    assert names.file_name("ema", number=123456, count=200000) == "ema-123456-of-200000.safetensors"
    assert names.index_name("model") == "model.safetensors.index.json"


INVALID = {
    "expected 1 to 64 ASCII": [
        partial(names.check_part_name, part)
        for part in ("", "a-b", "a/b", "..", "a.b", "é", "a b", "x\n", "a" * 65)
    ],
    "reserved for a file": [
        partial(names.check_part_name, part) for part in ("extra", "rank_extra", "digests")
    ],
    r"save id: got .*, expected 1 to 64": [  # names would be ambiguous
        partial(make, "checkpoint-1", save_id)
        for make in (names.staging_name, names.trash_name, names.replaced_name)
        for save_id in ("", "a-b", "../x", "a/b")
    ],
}


@pytest.mark.parametrize("text", INVALID)
def test_invalid_names_are_refused(text: str) -> None:
    for call in INVALID[text]:
        with pytest.raises(FormatError, match=text):
            call()
    for part in ("model", "master_weights", "optimizer", "ema2", "E"):
        names.check_part_name(part)


def test_siblings_never_look_like_checkpoints() -> None:
    staging, replaced = (
        names.staging_name("checkpoint-10", "a1"),
        names.replaced_name("checkpoint-10", "a1"),
    )
    assert (staging, replaced) == (".unified-a1-checkpoint-10", ".replaced-a1-checkpoint-10")
    assert [names.is_staging(entry) for entry in (staging, replaced)] == [True, False]
    assert [names.is_replaced(entry, "checkpoint-10") for entry in (staging, replaced)] == [
        False,
        True,
    ]


def test_a_trash_name_is_a_staging_name() -> None:
    removed = names.trash_name("checkpoint-10", "a1")
    assert (removed, names.is_staging(removed), names.is_trash(removed)) == (
        ".unified-trash_a1-checkpoint-10",
        True,
        True,
    )
    assert not names.is_trash(names.staging_name("checkpoint-10", "a1"))
    assert names.is_trash(names.trash_name("checkpoint-10", "a" * 64)), "the longest id"


def test_siblings_belong_to_one_name() -> None:
    replaced = names.replaced_name("checkpoint-10", "a1")
    assert not any(names.is_replaced(replaced, name) for name in ("10", "checkpoint-1"))
    staging = names.staging_name("ema-checkpoint-1", "a1")
    assert [
        names.is_sibling(staging, name) for name in ("ema-checkpoint-1", "checkpoint-1", "1")
    ] == [True, False, False]
    others = ("checkpoint-10", ".unified", ".unified-", ".unified-a1", ".unified-a1-")
    for entry in (*others, ".unified-é-x", "x.unified-a1-x"):
        assert not names.is_staging(entry)
