"""URLs of buckets, their stores, and the options that reach them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.objects.memory import MemoryStore
from unified_ckpt.errors import OptionError, StorageError
from unified_ckpt.runtime.objects.registry import (
    bucket_of,
    is_bucket_url,
    register,
    set_storage_options,
    split_url,
)
from unified_ckpt.storage_options import StorageOptions

SECRETS = {"access_key": "AKIA-visible", "secret_key": "s3cr3t", "session_token": "t0ken"}


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore()
    register("s3://bucket", store)
    yield store
    register("s3://bucket", None)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket", ("s3://bucket", "")),
        ("s3://bucket/", ("s3://bucket", "")),
        ("gs://bucket/run/checkpoint-1", ("gs://bucket", "run/checkpoint-1")),
        ("s3://bucket//run///x/", ("s3://bucket", "run/x")),
        ("s3://bucket/a b?c#d/é", ("s3://bucket", "a b?c#d/é")),
    ],
)
def test_url_has_a_bucket_and_a_prefix(url: str, expected: tuple[str, str]) -> None:
    assert is_bucket_url(url)
    assert split_url(url) == expected


@pytest.mark.parametrize(
    ("url", "error", "text"),
    [
        ("az://bucket/x", StorageError, "s3://bucket/prefix or gs://bucket/prefix"),
        ("/local/path", StorageError, "s3://bucket/prefix or gs://bucket/prefix"),
        ("s3:///x", OptionError, "got no bucket"),
        ("s3://bucket/a/../b", OptionError, "relative segment"),
    ],
)
def test_url_without_a_bucket_is_an_error(url: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        bucket_of(url)


@pytest.mark.parametrize("path", ["/a/b", "a", "file:///a", "hf://a/b", "s3:/bucket", "s3"])
def test_other_paths_are_no_bucket_urls(path: str) -> None:
    assert not is_bucket_url(path)


def test_a_registered_store_serves_its_bucket(store: MemoryStore) -> None:
    assert bucket_of("s3://bucket/run/x") == (store, "run/x")
    assert bucket_of("gs://bucket")[0] is not store
    set_storage_options("s3://bucket", StorageOptions(region="eu-west-1"))
    assert bucket_of("s3://bucket")[0] is store


def test_a_bucket_has_one_client_until_options_change() -> None:
    first, _ = bucket_of("s3://options-change/a")
    assert bucket_of("s3://options-change/b")[0] is first
    set_storage_options("s3://options-change", None)
    set_storage_options("s3://options-change/c", StorageOptions(region="eu-west-1"))
    second, _ = bucket_of("s3://options-change/a")
    assert second is not first
    set_storage_options("s3://options-change/d", StorageOptions(region="eu-west-1"))
    assert bucket_of("s3://options-change/a")[0] is second


def test_options_never_show_secrets() -> None:
    options = StorageOptions(**SECRETS)
    shown = [repr(options), str(options), str(options.model_dump()), options.model_dump_json()]
    assert not any(secret in text for secret in SECRETS.values() for text in shown)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"access_key": "a"}, "set both or neither"),
        ({"secret_key": 12345}, "set both or neither"),
        ({"session_token": "t"}, "access_key"),
        ({"endpoint": "minio:9000"}, "https://host"),
        ({"endpoint": "https://host/path"}, "https://host"),
        ({"anonymous": True, "profile": "p"}, "expected one of them"),
        ({"secretkey": "12345"}, "did you mean 'secret_key'"),
    ],
)
def test_wrong_options_are_errors_without_secrets(values: dict[str, object], text: str) -> None:
    with pytest.raises(OptionError, match=text) as caught:
        StorageOptions(**values)
    assert "12345" not in str(caught.value)
