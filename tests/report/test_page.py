"""The page about a run: what it says, and that names from files stay text."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import unified_ckpt as uc
from tests.support.harness import run_ranks
from tests.support.manager.managers import manager_of, save_steps, state, train
from unified_ckpt.cli.main import main
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding
from unified_ckpt.engine.plan.sharding_records import encode_shardings
from unified_ckpt.format.events import (
    EVENTS_NAME,
    DeleteEvent,
    Network,
    SaveEvent,
    encode_event,
    parse_events,
)
from unified_ckpt.report.contents import layer_of
from unified_ckpt.report.slices import COLUMNS, PlacedTensor, map_slices
from unified_ckpt.runtime.comm.comm import Comm

vl_convert = pytest.importorskip("vl_convert")
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Page(HTMLParser):
    """The text, tags, charts and data of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.data: dict[str, Any] = {}
        self.links: list[str] = []
        self._in: dict[str, str | None] = {}
        self.feed(path.read_text())

    @property
    def charts(self) -> list[Any]:
        return [value for name, value in self.data.items() if name.startswith("chart-")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._in = dict(attrs) | {"tag": tag}
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self._in.get("type") == "application/json" and data.strip():
            self.data[self._in["id"] or ""] = json.loads(data)
        elif self._in.get("tag") not in ("script", "style"):
            self.text += data


def page_of(path: Path, output: Path) -> Page:
    assert main(["report", os.fspath(path), "-o", os.fspath(output)]) == 0
    return Page(output)


@pytest.fixture(scope="module", autouse=True)
def library_is_bundled_once() -> Iterator[None]:
    """Each page holds the same library of charts, which takes seconds to bundle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vl_convert, "javascript_bundle", cache(vl_convert.javascript_bundle))
        yield


@pytest.fixture(scope="module")
def run_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of two ranks, one removed, with hostile names and a frozen layer."""
    root = tmp_path_factory.mktemp("run")

    def rank(comm: Comm) -> None:
        with manager_of(comm, root, interval_steps=1, keep_latest=2) as manager:
            manager.restore(**state(0), allow_fresh=True)
            for step in range(1, 4):
                model = {
                    "layers.0.w": torch.ones(64, 64),
                    "layers.1.w": torch.full((64, 64), float(step)),
                    HOSTILE: torch.ones(3, dtype=torch.bfloat16),
                }
                manager.save(step, model=model, metrics={HOSTILE: float(step)})

    run_ranks(2, rank)
    path = root / EVENTS_NAME
    events = list(parse_events(path.read_bytes().splitlines()))
    assert isinstance(events[-2], DeleteEvent)
    saves = [event for event in events if isinstance(event, SaveEvent)]
    network = Network(
        nbytes=5 << 30,
        address_count=2,
        addresses={"10.1.2.3": (3 << 30, 2 << 30, 4.0), "fd00::7": (2 << 30, 3 << 30, 100.0)},
        slowest=("10.1.2.3", "fd00::7", 1 << 30, 128.0),
    )
    events[events.index(saves[-1])] = saves[-1].model_copy(update={"network": network})
    path.write_bytes(b"".join(map(encode_event, events)))
    return root


def test_page_of_a_run(run_root: Path, tmp_path: Path) -> None:
    page = page_of(run_root, tmp_path / "page.html")
    assert "img" not in page.tags
    assert page.tags.count("script") == 2 + len(page.data)
    assert page.links == []
    assert HOSTILE in page.text
    assert (
        "<th>saved at</th><th>ranks</th><th>model</th><th>attempt</th>"
        in (tmp_path / "page.html").read_text()
    )
    assert re.search("rank 0.*waits until the disk has the bytes", page.text, re.DOTALL)
    assert re.search("Stops and resumes.*fresh start.*ended", page.text, re.DOTALL)
    for text in ("removed", "kept", "2 of 3", "checkpoint-2", "checkpoint-3"):
        assert text in page.text
    for text in ("5 GiB crossed the network between 2 addresses", "10.1.2.3", "512 MiB", "8 MiB"):
        assert text in page.text
    titles = [each["encoding"]["y"].get("title") for each in page.charts if "encoding" in each]
    assert "size, KiB" in titles
    (chart,) = (chart for chart in page.charts if "changes" in str(chart["data"]))
    changes = {value["layer"]: value["changed"] for value in chart["data"]["values"]}
    assert page.tags.count("option") == 2 * 2
    assert changes["layers.0"] == 0
    assert changes["layers.1"] == 1
    held = [
        value["copies"]
        for chart in page.charts
        if "encoding" in chart
        for value in chart["data"]["values"]
        if "copies" in value
    ]
    assert len(held) == 2 * COLUMNS
    assert set(held) == {1.0}


def test_page_says_why_retention_keeps_a_step(tmp_path: Path) -> None:
    rules = {"keep_latest": 1, "keep_every_steps": 3, "keep_best": 1, "best_metric": "loss"}
    with manager_of(None, tmp_path / "run", interval_steps=1, **rules) as manager:
        for step in range(1, 6):
            manager.save(step, **state(step), metrics={"loss": abs(step - 2)})
    page_of(tmp_path / "run", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    steps = text[text.index("<th>status</th>") :]
    assert steps.index("<th>size</th>") < steps.index("<th>ranks</th>")
    statuses = dict(re.findall(r"<tr><td[^>]*>(\d)</td><td[^>]*>(.*?)</td>", steps))
    assert statuses == {
        "1": "removed",
        "2": "kept: best 1 by loss, best by loss",
        "3": "kept: every 3 steps",
        "4": "removed",
        "5": "kept: latest, latest full, latest 1",
    }


def test_page_of_a_run_with_two_tiers(tmp_path: Path) -> None:
    options = {"interval_steps": 2, "local_interval_steps": 1, "local_directory": f"{tmp_path}/l"}
    with manager_of(None, tmp_path / "run", **options) as manager:
        train(manager, (1, 2))
        manager.wait()
        manager.restore(**state(0))
    page = page_of(tmp_path / "run", tmp_path / "page.html")
    assert "Copies from the local directory to the root" in page.text
    bars = [(bar["what"], bar["step"]) for bar in page.charts[0]["data"]["values"]]
    assert sorted(bars) == [  # a copy runs beside deletions
        ("copies to the root", 2),
        ("deletions", 1),
        ("loads", 2),
        ("local saves", 1),
        ("local saves", 2),
    ]


@pytest.mark.parametrize("name", ["checkpoint-{}", "epoch={}.ckpt"])
def test_page_of_a_run_without_events(tmp_path: Path, name: str) -> None:
    """Lightning chooses other names, and records events only with manager options."""
    save_steps(tmp_path / "run", 1, 2)
    for step in (1, 2):
        (tmp_path / "run" / f"checkpoint-{step}").rename(tmp_path / "run" / name.format(step))
    stale = tmp_path / "run" / ".unified-2dd0417c2b6531b8-checkpoint-3"
    stale.mkdir()
    (stale / "model.safetensors").write_bytes(bytes(2048))
    page = page_of(tmp_path / "run", tmp_path / "page.html")
    rows = re.findall("<tr><td[^>]*>[12]</td>.*?</tr>", (tmp_path / "page.html").read_text())
    assert len(rows) == 2
    assert "Interrupted saves left 1 folder, 2 KiB" in page.text
    for title, text in (("ranks", "1"), ("model", "500 B"), ("optimizer", "480 B")):
        assert all(f'<td data-title="{title}" class="">{text}</td>' in row for row in rows)


def test_page_of_a_checkpoint_without_events(tmp_path: Path) -> None:
    uc.save(tmp_path / "run" / "a", **state(1))
    page = page_of(tmp_path / "run" / "a", tmp_path / "page.html")
    assert "the events of a run are written by the CheckpointManager" in page.text
    assert len(page.charts) == 2


def test_page_of_a_plain_model_folder(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    page = page_of(tmp_path, tmp_path / "page.html")
    assert "Not recorded: only a save into one folder" in page.text
    assert len(page.charts) == 1


def test_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uc.save(tmp_path / "a", **state(1))
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert main(["report", os.fspath(tmp_path / "a"), "-o", os.fspath(tmp_path / "x")]) == 1
    assert "pip install 'jinja2>=3.1' 'vl-convert-python>=1.7'\n" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.up.weight/exp_avg", "model.layers.3"),
        ("model.embed.weight", "model.embed"),
        ("w", "w"),
        ("h.11", "h.11"),
    ],
)
def test_layer_of_a_tensor(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_slices_of_ranks_match_their_elements() -> None:
    """The oracle counts elements of each rank's boxes, byte by byte."""
    sharding = Sharding((ShardDim(0, 3, 1), ShardDim(0, 2, 3)))
    shapes = [(12, 8), (24, 2), (48,)]
    records = encode_shardings(
        ("model", f"t{i}", sharding, tuple(range(6))) for i in range(len(shapes))
    )
    assert records is not None
    ranges = [PlacedTensor("model", shape, 96 * 4 * i, 96 * 4, 0) for i, shape in enumerate(shapes)]
    ranges[2] = PlacedTensor("model", (48,), 96 * 8, 96 * 4, 0)  # of 8 bytes
    held = np.zeros((6, 96 * 12))
    for i, shape in enumerate(shapes):
        itemsize = 96 * 4 // int(np.prod(shape))
        for rank in range(6):
            mask = np.zeros(shape)
            for box, _ in sharding.boxes(rank, shape):
                index = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape, strict=True))
                mask[index] = 1
            held[rank, 96 * 4 * i : 96 * 4 * (i + 1)] = np.repeat(mask.reshape(-1), itemsize)
    slice_map = map_slices(records, ranges, world_size=6)
    np.testing.assert_allclose(slice_map.copies, held.reshape(6, COLUMNS, -1).mean(2), atol=1e-9)
    np.testing.assert_allclose(slice_map.nbytes_by_row, held.sum(1))


def test_slices_of_16384_ranks_are_summarized() -> None:
    """FSDP over 1024 x TP over 16 and 3000 tensors of 3 shapes: 64 rows, in seconds."""
    sharding = Sharding((ShardDim(0, 16, 1), ShardDim(0, 1024, 16)))
    records = encode_shardings([("model", "w", sharding, tuple(range(16_384)))])
    assert records is not None
    ranges = [
        PlacedTensor("model", (16_384 * (1 + i % 3), 4), 0, 65_536 * (1 + i % 3), 0)
        for i in range(3000)
    ]
    starts = np.cumsum([0] + [tensor.nbytes for tensor in ranges])
    ranges = [
        PlacedTensor(t.part, t.shape, int(start), t.nbytes, 0)
        for t, start in zip(ranges, starts, strict=False)
    ]
    started = time.process_time()
    slice_map = map_slices(records, ranges, world_size=16_384)
    assert time.process_time() - started < 6
    assert slice_map.copies.shape == (64, COLUMNS)
    assert slice_map.rows[1] == "ranks 256–511"
    np.testing.assert_allclose(slice_map.copies.sum(0), 1, rtol=1e-6)  # each byte once
    np.testing.assert_allclose(slice_map.nbytes_by_row, starts[-1] / 16_384, rtol=1e-6)


@pytest.mark.integration
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_page_in_a_browser(run_root: Path, tmp_path: Path) -> None:
    """No script error, all charts drawn, nothing wider than the screen."""
    playwright = pytest.importorskip("playwright.sync_api")
    page_of(run_root, tmp_path / "page.html")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            for width in (390, 1280):
                page = browser.new_page(
                    viewport={"width": width, "height": 800}, color_scheme=scheme
                )
                messages: list[str] = []
                page.on("pageerror", lambda error, to=messages: to.append(str(error)))
                page.on("console", lambda message, to=messages: to.append(message.text))
                page.on("request", lambda request, to=messages: to.append(request.url))
                address = (tmp_path / "page.html").as_uri()
                page.goto(address)
                page.wait_for_function("document.documentElement.dataset.drawn", timeout=60_000)
                assert messages == [address]  # no error, no warning, no other request
                assert page.title() == f"{run_root.name} - unified_ckpt"
                shares = page.locator("dl.compared dd")
                assert shares.all_text_contents() == ["50.0%", "2 of 3"]
                page.select_option("#before", label="checkpoint-3")
                assert shares.all_text_contents() == ["0.0%", "3 of 3"]
                figures = page.locator("figure").count()
                assert page.locator("figure svg").count() == figures > 5
                assert page.evaluate("document.documentElement.scrollWidth") == width
                background = page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert background == (
                    "rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 24, 30)"
                )
                page.close()
        browser.close()


def test_page_is_not_written_to_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    """Before the run is read."""
    assert main(["report", "absent", "-o", "s3://bucket/page.html"]) == 1
    assert (
        "s3://bucket/page.html: got a URL, expected the path of a local" in capsys.readouterr().err
    )
