from __future__ import annotations

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


@pytest.mark.parametrize("number", [0, 5, -1])
def test_a_file_number_outside_the_count_is_refused(number: int) -> None:
    with pytest.raises(FormatError, match=r"part 'model': got file number .*expected 1 to 4"):
        names.file_name("model", number=number, count=4)


@pytest.mark.parametrize("part", ["model", "master_weights", "optimizer", "ema2", "E"])
def test_part_names(part: str) -> None:
    names.check_part_name(part)


@pytest.mark.parametrize("part", ["", "a-b", "a/b", "..", "a.b", "é", "a b", "x\n", "a" * 65])
def test_invalid_part_names_are_refused(part: str) -> None:
    with pytest.raises(FormatError, match="expected 1 to 64 ASCII"):
        names.check_part_name(part)


@pytest.mark.parametrize("part", ["extra", "rank_extra", "digests"])
def test_reserved_part_names_are_refused(part: str) -> None:
    with pytest.raises(FormatError, match="reserved for a file"):
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


def test_a_replaced_folder_belongs_to_one_name() -> None:
    assert not names.is_replaced(names.replaced_name("checkpoint-10", "a1"), "10")
    assert not names.is_replaced(names.replaced_name("checkpoint-10", "a1"), "checkpoint-1")


def test_a_staging_folder_belongs_to_one_name() -> None:
    staging = names.staging_name("ema-checkpoint-1", "a1")
    assert [
        names.is_staging_of(staging, name) for name in ("ema-checkpoint-1", "checkpoint-1", "1")
    ] == [True, False, False]


@pytest.mark.parametrize(
    "entry",
    [
        "checkpoint-10",
        ".unified",
        ".unified-",
        ".unified-a1",
        ".unified-a1-",
        ".unified-é-x",
        "x.unified-a1-x",
    ],
)
def test_other_entries_are_not_staging(entry: str) -> None:
    assert not names.is_staging(entry)


@pytest.mark.parametrize("save_id", ["", "a-b", "../x", "a/b"])
def test_a_save_id_that_would_make_names_ambiguous_is_refused(save_id: str) -> None:
    for make in (names.staging_name, names.trash_name, names.replaced_name):
        with pytest.raises(FormatError, match=r"save id: got .*, expected 1 to 64"):
            make("checkpoint-1", save_id)
