"""The options of buckets: every call takes them, and nothing shows or stores a secret."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.manager.buckets import ROOT, store
from tests.support.manager.managers import QUICK, state
from tests.support.objects.memory import MemoryStore
from unified_ckpt.runtime.objects import registry

__all__ = ["store"]  # a fixture

SECRETS = ("AKIA-visible", "s3cr3t-visible", "t0ken-visible")
OPTIONS = uc.StorageOptions(
    endpoint="https://store.example.com",
    access_key=SECRETS[0],
    secret_key=SECRETS[1],
    session_token=SECRETS[2],
)
Used = dict[str, uc.StorageOptions]
PATH = f"{ROOT}/checkpoint-1"


@pytest.fixture
def used(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> dict[str, uc.StorageOptions]:
    """The options by the URL of their bucket, as calls set them."""
    used: dict[str, uc.StorageOptions] = {}

    def set_storage_options(url: str, options: uc.StorageOptions | None) -> None:
        if options is not None:
            used[registry.split_url(url)[0]] = options

    monkeypatch.setattr(registry, "set_storage_options", set_storage_options)
    return used


def save(**more: Any) -> None:
    uc.save(PATH, step=1, **state(1), **more)


def manager(options: uc.ManagerOptions | uc.RunOptions, *, root: str = ROOT, **more: Any) -> None:
    with uc.CheckpointManager(root, options, **more) as opened:
        opened.save(1, force=True, **state(1))
        opened.wait()
        assert opened.restore(1, **state(0)) is not None


def checkpointer() -> None:
    with uc.Checkpointer(ROOT, storage_options=OPTIONS) as opened:
        opened.save("checkpoint-1", step=1, **state(1))


def checkpointer_without_root() -> None:
    with uc.Checkpointer(storage_options=OPTIONS) as opened:
        opened.save_async(PATH, step=1, **state(1)).result()


RUN = uc.RunOptions(uc.ManagerOptions(**QUICK), storage=OPTIONS)
WRITES: dict[str, Callable[[Path], object]] = {
    "save": lambda _: save(storage_options=OPTIONS),
    "save_async": lambda _: uc.save_async(PATH, storage_options=OPTIONS, **state(1)).result(),
    "checkpointer": lambda _: checkpointer(),
    "checkpointer without a root": lambda _: checkpointer_without_root(),
    "manager": lambda _: manager(uc.ManagerOptions(**QUICK), storage_options=OPTIONS),
    "run options": lambda _: manager(RUN),
    "run options and an argument": lambda _: manager(
        uc.RunOptions(uc.ManagerOptions(**QUICK)), storage_options=OPTIONS
    ),
    "from_maxtext": lambda _: manager(
        uc.from_maxtext({"base_output_directory": "s3://bucket", "run_name": "r"}),
        root="s3://bucket/r/checkpoints",
        storage_options=OPTIONS,
    ),
    "convert": lambda path: uc.convert(path, PATH, storage_options=OPTIONS),
}
READS: dict[str, Callable[[Path], object]] = {
    "load": lambda _: uc.load(PATH, storage_options=OPTIONS, model=state(0)["model"]),
    "load of several": lambda _: uc.load([PATH], storage_options=OPTIONS, model=state(0)["model"]),
    "open": lambda _: uc.open(PATH, storage_options=OPTIONS),
    "verify": lambda _: uc.verify(PATH, storage_options=OPTIONS),
    "convert": lambda path: uc.convert(PATH, path / "other", storage_options=OPTIONS),
    "estimate": lambda _: uc.estimate(PATH, storage_options=OPTIONS),
    "estimate of a root": lambda _: uc.estimate(
        {"a": torch.zeros(2)}, root=ROOT, storage_options=OPTIONS
    ),
    "repair": lambda _: uc.repair(PATH, storage_options=OPTIONS),
    "start of a run": lambda path: uc.CheckpointManager(
        path / "run", uc.ManagerOptions(load_full_state_path=PATH), storage_options=OPTIONS
    ).close(),
}


@pytest.mark.parametrize("write", WRITES)
def test_every_write_takes_them(used: Used, tmp_path: Path, write: str) -> None:
    uc.save(tmp_path / "local", **state(1))
    WRITES[write](tmp_path / "local")
    assert used == {"s3://bucket": OPTIONS}
    assert write == "from_maxtext" or uc.verify(PATH).ok


@pytest.mark.parametrize("read", READS)
def test_every_read_takes_them(used: Used, tmp_path: Path, read: str) -> None:
    save()
    assert used == {}
    with suppress(uc.StorageError):  # of a repair
        READS[read](tmp_path)
    assert used == {"s3://bucket": OPTIONS}


def test_local_paths_ignore_them(used: Used, tmp_path: Path) -> None:
    uc.save(tmp_path / "c", storage_options=OPTIONS, **state(1))
    assert uc.verify(tmp_path / "c", storage_options=OPTIONS).ok
    assert used == {}


@pytest.mark.parametrize("call", [uc.save, uc.save_async, uc.load, uc.open, uc.verify, uc.repair])
def test_other_values_are_refused(store: MemoryStore, call: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match=r"storage_options: got dict, expected StorageOptions") as e:
        call(PATH, storage_options={"secret_key": SECRETS[1]})
    assert SECRETS[1] not in str(e.value)


def test_nothing_shows_or_stores_a_secret(
    store: MemoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In objects, events, logs, reports, reprs, pickles and errors."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logger = logging.getLogger("unified_ckpt")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    shown: list[str] = []
    try:
        with uc.CheckpointManager(
            ROOT, uc.ManagerOptions(**QUICK), storage_options=OPTIONS
        ) as opened:
            opened.on_commit(lambda report: shown.append(repr(report)))
            opened.on_failure(lambda failure: shown.append(repr(failure)))
            opened.save(1, force=True, **state(1))
            shown.append(repr(opened.restore(**state(0))))
            store.before = fail
            with suppress(uc.CheckpointError):
                opened.save(2, force=True, **state(2))
            store.before = None
            shown += [repr(vars(opened.run)), repr(opened.options), repr(opened.steps())]
            session = opened.run.session
            pickled = pickle.dumps(uc.Checkpointer(ROOT, storage_options=OPTIONS).session)
        with pytest.raises(uc.CheckpointError) as error:
            uc.load(f"{ROOT}/none", storage_options=OPTIONS, model=state(0)["model"])
        with pytest.raises(uc.OptionError) as wrong:
            uc.StorageOptions(access_key=SECRETS[0], secret_key=SECRETS[1], endpoint="x")
        shown += [repr(error.value), repr(wrong.value), repr(OPTIONS), str(OPTIONS), repr(RUN)]
        shown += [repr(copy.copy(session).__dict__), pickled.decode("latin-1")]
        shown += [repr(uc.verify(PATH)), repr(uc.open(PATH)), OPTIONS.model_dump_json()]
        uc.convert(PATH, tmp_path / "converted", storage_options=OPTIONS)
        shown += [
            file.read_bytes().decode("latin-1") for file in (tmp_path / "converted").iterdir()
        ]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    shown += [body.decode("latin-1") for body in store.bucket.bodies().values()]
    captured = capsys.readouterr()
    shown += [log.getvalue(), captured.out, captured.err]
    assert "checkpoint-1" in log.getvalue()
    assert [text for text in shown for secret in SECRETS if secret in text] == []


def fail(verb: str, key: str) -> None:
    if verb == "put_part":
        raise uc.StorageError(f"{key}: {verb}: no")


def test_keys_in_a_url_are_refused_and_not_shown() -> None:
    with pytest.raises(uc.OptionError, match="got keys in a URL") as url:
        uc.verify(f"s3://{SECRETS[0]}:{SECRETS[1]}@bucket/checkpoint-1")
    with pytest.raises(uc.OptionError, match="got a user name in endpoint") as endpoint:
        uc.StorageOptions(endpoint=f"https://{SECRETS[0]}:{SECRETS[1]}@store.example.com")
    for error in (url, endpoint):
        assert [secret for secret in SECRETS if secret in str(error.value)] == []
