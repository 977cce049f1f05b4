"""The root of a trainer's run: a bucket that an argument or the options of the run name."""

from __future__ import annotations

from pathlib import Path

import pytest

import unified_ckpt as uc
from unified_ckpt.integrations.run_options import with_bucket_root

URL = "s3://bucket/run"


@pytest.mark.parametrize(
    ("configured", "argument"),
    [(None, f"{URL}/"), (None, Path(URL)), (f"{URL}/", None), (URL, f"{URL}/")],
    ids=str,
)
def test_argument_and_options_name_one_root(
    monkeypatch: pytest.MonkeyPatch, configured: str | None, argument: str | Path | None
) -> None:
    """The bucket is reached by the options, before a manager exists."""
    reached: list[tuple[str, uc.StorageOptions | None]] = []
    monkeypatch.setattr(
        "unified_ckpt.runtime.objects.registry.set_storage_options",
        lambda url, options: reached.append((url, options)),
    )
    storage = uc.StorageOptions(region="eu-west-1")
    options, url = with_bucket_root(uc.RunOptions(root=configured, storage=storage), argument)
    assert options.root == url == URL
    assert reached == [(URL, storage)]


def test_local_and_other_roots() -> None:
    assert with_bucket_root(uc.RunOptions(), None) == (uc.RunOptions(), None)
    local = uc.RunOptions(root="/runs/a")
    assert with_bucket_root(local, None) == (local, None)
    with pytest.raises(uc.FormatError, match=r"root: got s3://bucket/run, expected /runs/a"):
        with_bucket_root(local, URL)
    with pytest.raises(uc.FormatError, match=r"root: got s3://bucket/run, expected s3://other/run"):
        with_bucket_root(uc.RunOptions(root="s3://other/run"), URL)
    with pytest.raises(uc.FormatError, match=r"root: got run, expected the URL of a bucket"):
        with_bucket_root(uc.RunOptions(), "run")
