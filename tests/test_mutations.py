"""Random changes to every JSON file and header of a checkpoint: a load returns the saved state or
raises a CheckpointError, never other state.
"""

from __future__ import annotations

import contextlib
import json
import random
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import SAVE, folder_of, on_node
from tests.support.engine.compressed import trained_state
from tests.support.format.manifests import sealed, with_records
from tests.support.harness import run_ranks
from tests.support.limits import alarm
from unified_ckpt.runtime.comm.comm import Comm

SEEDS = [
    0,
    *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 50)),
]  # of 1,000 cases each
OPTIONS = uc.SaveOptions(fsync=False, max_file_bytes=150, model_dtype="bfloat16")
UNTOUCHED = -7.0
MANIFEST = "unified_checkpoint.json"
COMPRESSED = {"w": (70, 67), "v": (66, 32), "b": (5,)}
EXTRA = {
    "seen": bytes(range(256)) * 8,
    "of": (1, 2.5, "a", 2**80, 1j, datetime(2026, 1, 31, tzinfo=UTC)),
    "array": np.arange(6.0).reshape(2, 3),
    "tensor": torch.arange(4),
    "last": deque([1, 2], maxlen=3),
    "range": range(3, 9, 2),
    "counts": Counter("aab"),
}


class Net(torch.nn.Module):
    """Two names of one tensor, a buffer, and parameters of several shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 3)
        self.inner = torch.nn.Linear(3, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight


def filled(net: Net) -> tuple[Net, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    for tensor in net.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape) if tensor.is_floating_point() else torch.tensor(5))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.25)
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    return net, optimizer, {"embed.weight": torch.randn(7, 3), "scale": torch.randn(())}


def as_bits(tree: Any) -> Any:
    """A tree whose tensors compare by dtype, shape and bits."""
    if isinstance(tree, torch.Tensor):
        return (
            tree.dtype,
            tuple(tree.shape),
            tree.detach().reshape(-1).contiguous().view(torch.uint8).tolist(),
        )
    if isinstance(tree, np.ndarray):
        return tree.dtype.str, tree.shape, tree.tobytes()
    if isinstance(tree, dict):
        return {key: as_bits(value) for key, value in tree.items()}
    return [as_bits(value) for value in tree] if isinstance(tree, list | tuple) else tree


@contextlib.contextmanager
def untouched_on_error(before: Any, state: Callable[[], Any]) -> Iterator[None]:
    """An error before the first byte leaves the target unchanged; an error in mid-load says that it
    did not.
    """
    failed = ""
    try:
        yield
    except uc.CheckpointError as error:
        failed = str(error)
        raise
    finally:
        if failed and "is unusable" not in failed:
            assert as_bits(state()) == before, f"the target was touched: {failed}"


# the checkpoints: how each is loaded and opened


def load_whole(root: Path) -> Any:
    net = Net()
    for tensor in net.state_dict().values():
        tensor.fill_(UNTOUCHED)
    optimizer = torch.optim.AdamW(net.parameters(), lr=9.0)
    ema = {"embed.weight": torch.full((7, 3), UNTOUCHED), "scale": torch.tensor(UNTOUCHED)}
    before = as_bits([net.state_dict(), optimizer.state_dict(), ema])
    with untouched_on_error(before, lambda: [net.state_dict(), optimizer.state_dict(), ema]):
        report = uc.load(root, model=net, optimizer=optimizer, parts={"ema": ema})
    return as_bits(
        [
            net.state_dict(),
            optimizer.state_dict(),
            ema,
            report.step,
            report.extra,
            report.rank_extra,
        ]
    )


def load_both(root: Path) -> Any:
    model = {"w": torch.full((6, 4), UNTOUCHED), "n": torch.full((3,), UNTOUCHED)}
    with untouched_on_error(as_bits(model), lambda: model):
        report = uc.load([folder_of(root, 0), folder_of(root, 1)], model=model)
    return as_bits([model, report.step, report.extra])


def opened(folder: Path) -> Any:
    with uc.open(folder) as source:
        tensors = {
            part: {name: tensor[...] for name, tensor in source[part].items()}
            for part in source.parts
        }
        return as_bits([tensors, source.step, source.extra, list(source.rank_extra)])


@dataclass(frozen=True)
class Subject:
    """A checkpoint under test: `bodies` of its files, and the actions that read it."""

    root: Path
    acts: Mapping[str, Callable[[], Any]]
    right: dict[str, Any] = field(default_factory=dict)
    bodies: dict[Path, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.right.update({name: act() for name, act in self.acts.items()})
        self.bodies.update(
            {path: path.read_bytes() for path in sorted(self.root.rglob("*")) if path.is_file()}
        )


def single_folder(root: Path) -> Subject:
    folder = root / "checkpoint-4"
    net, optimizer, ema = filled(Net())
    uc.save(
        folder,
        model=net,
        optimizer=optimizer,
        parts={"ema": ema},
        step=4,
        extra=EXTRA,
        rank_extra=[b"r" * 2000, 3],
        options=OPTIONS,
    )
    assert len(list(folder.glob("optimizer-*"))) > 1
    assert len(list(folder.glob("master_weights*"))) > 1
    return Subject(folder, {"load": partial(load_whole, folder), "open": partial(opened, folder)})


def node_groups(root: Path) -> Subject:
    """Two folders, each with a copy of the other."""
    options = SAVE.model_copy(update={"node_copies": 2})

    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1]) as checkpointer:
            rows = torch.arange(24.0).reshape(6, 4).chunk(2)[comm.rank].clone()
            layout = uc.Layout({"dp": 2}, {"w": {"dp": 0}})
            model = {"w": rows, "n": torch.arange(3.0)}
            checkpointer.save(
                folder_of(root, comm.rank),
                model=model,
                layout=layout,
                step=4,
                extra=EXTRA,
                rank_extra=comm.rank,
                options=options,
            )

    run_ranks(2, act)
    return Subject(
        root, {"load": partial(load_both, root), "open": partial(opened, folder_of(root, 0))}
    )


def load_compressed(folder: Path | list[Path]) -> Any:
    state = {
        part: {name: torch.full_like(tensor, UNTOUCHED) for name, tensor in tensors.items()}
        for part, tensors in trained_state(COMPRESSED).items()
    }
    with untouched_on_error(as_bits(state), lambda: state):
        report = uc.load(folder, **state)
    return as_bits([state, report.step, report.extra])


def compressed_folder(root: Path) -> Subject:
    """Encoded masters and moments, with exceptions of both."""
    folder = root / "checkpoint-4"
    options = OPTIONS.model_copy(update={"compression": "O2"})
    uc.save(folder, **trained_state(COMPRESSED), step=4, extra=EXTRA, options=options)
    assert len(list(folder.glob("*.exceptions.safetensors"))) == 2
    return Subject(
        folder, {"load": partial(load_compressed, folder), "open": partial(opened, folder)}
    )


def compressed_node_groups(root: Path) -> Subject:
    """Encoded shards in two folders; each has the exceptions of both."""
    options = SAVE.model_copy(update={"compression": "O1"})
    layout = uc.Layout({"dp": 2}, {"w": {"dp": 0}, "v": {"dp": 0}}, COMPRESSED)
    folders = [folder_of(root, node) for node in (0, 1)]

    def act(comm: Comm) -> None:
        state = trained_state(COMPRESSED)
        for tensors in state.values():
            for name, tensor in tensors.items():
                if name[0] in "wv" and tensor.shape:
                    tensors[name] = tensor.chunk(2)[comm.rank].clone()
        with on_node(comm, [0, 1]) as checkpointer:
            checkpointer.save(
                folders[comm.rank], **state, layout=layout, step=4, extra=EXTRA, options=options
            )

    run_ranks(2, act)
    assert len(list(folders[1].glob("*.exceptions.safetensors"))) == 2
    return Subject(
        root, {"load": partial(load_compressed, folders), "open": partial(opened, folders[0])}
    )


CASES = [
    (single_folder, 100),
    (node_groups, 100),
    (compressed_folder, 100),
    (compressed_node_groups, 100),
    pytest.param(single_folder, 800, marks=pytest.mark.slow),
]


# mutations: of the JSON of a file, of a header's as of an index's


def flipped_bits(draw: random.Random, text: bytes) -> bytes:
    body = bytearray(text)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        body[draw.randrange(len(body))] ^= 1 << draw.randrange(8)
    return bytes(body)


def other_digit(draw: random.Random, text: bytes) -> bytes:
    position = draw.choice(
        [position for position, byte in enumerate(text) if chr(byte).isdigit()] or [0]
    )
    return (
        text[:position]
        + draw.choice((b"0", b"1", b"9", b"99999999999", b"-1", b"1e9", b""))
        + text[position + 1 :]
    )


def truncated(draw: random.Random, text: bytes) -> bytes:
    return text[: draw.randrange(len(text))]


def renamed(draw: random.Random, text: bytes) -> bytes:
    """Replace a string by another; a key may then occur twice."""
    strings = _strings(text)
    (low, high), (first, stop) = draw.choice(strings), draw.choice(strings)
    return text[:low] + text[first:stop] + text[high:]


def swapped_strings(draw: random.Random, text: bytes) -> bytes:
    (low, high), (first, stop) = sorted(draw.sample(_strings(text), 2))
    return text[:low] + text[first:stop] + text[high:first] + text[low:high] + text[stop:]


def _strings(text: bytes) -> list[tuple[int, int]]:
    quotes = [position for position, byte in enumerate(text) if byte == ord('"')]
    return list(zip(quotes[::2], [position + 1 for position in quotes[1::2]], strict=False))


def edited(draw: random.Random, text: bytes) -> bytes:
    """Drop a key, or swap two keys' values: offsets of tensors, files of names, or parts."""
    tree = json.loads(text)
    place = draw.choice([node for node in _objects(tree) if len(node) > 1])
    first, second = draw.sample(sorted(place), 2)
    if draw.random() < 0.5:
        del place[first]
    elif (
        isinstance(place[first], dict)
        and isinstance(place[second], dict)
        and place[first].keys() & place[second].keys()
    ):
        inner = draw.choice(sorted(place[first].keys() & place[second].keys()))
        place[first][inner], place[second][inner] = place[second][inner], place[first][inner]
    else:
        place[first], place[second] = place[second], place[first]
    return json.dumps(tree).encode()


def _objects(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
    for value in (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    ):
        yield from _objects(value)


CHANGES = (
    flipped_bits,
    flipped_bits,
    other_digit,
    truncated,
    renamed,
    swapped_strings,
    edited,
    edited,
)


def changed_file(
    draw: random.Random, path: Path, body: bytes, bodies: Mapping[Path, bytes]
) -> tuple[str, bytes]:
    """Return a description of the change, and the file's new bytes."""
    if draw.random() < 0.1:
        other = draw.choice([candidate for candidate in bodies if candidate.suffix == path.suffix])
        return f"is now {other.name}", bodies[other]
    change = draw.choice(CHANGES)
    if path.suffix == ".json":
        return change.__name__, change(draw, body)
    if draw.random() < 0.1:
        return "length of the header", flipped_bits(draw, body[:8]) + body[8:]
    size = int.from_bytes(body[:8], "little")
    text = change(draw, body[8 : 8 + size].rstrip(b" "))
    text = text.ljust(size) if len(text) <= size else text + b" " * (-len(text) % 8)
    return f"header: {change.__name__}", struct.pack("<Q", len(text)) + text + body[8 + size :]


# the properties


def rewrite(path: Path, body: bytes) -> None:
    """Rewrite in place: file systems flush a file that replaces another."""
    with path.open("r+b", buffering=0) as file:
        file.write(body)
        file.truncate()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("make", "cases"), CASES)
def test_changed_checkpoint_loads_right_or_fails(
    make: Callable[[Path], Subject], cases: int, seed: int, tmp_path: Path
) -> None:
    subject, draw, refused = make(tmp_path), random.Random(seed), 0
    for case in range(cases):
        path = draw.choice(list(subject.bodies))
        done, body = changed_file(draw, path, subject.bodies[path], subject.bodies)
        label = f"case {case}: {path.relative_to(subject.root)}: {done}"
        rewrite(path, body)
        for name, act in subject.acts.items() if case % 4 == 0 else list(subject.acts.items())[:1]:
            with alarm(20, AssertionError(f"did not end: {name}: {label}")):
                try:
                    assert act() == subject.right[name], f"{name} gave other state: {label}"
                except uc.CheckpointError:
                    refused += name == "load"
        rewrite(path, subject.bodies[path])
    assert refused > cases // 2 or make is node_groups  # each with a copy of the other


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("make", "cases"), [(single_folder, 150), (compressed_folder, 50)])
def test_sealed_wrong_content_is_a_checkpoint_error(
    make: Callable[[Path], Subject], cases: int, seed: int, tmp_path: Path
) -> None:
    """The digest is correct, as if the file had been written so. No action hangs, exhausts memory
    or raises another error. Indexes, headers and the tensors' digests confirm each other: a load
    still returns the saved state.
    """
    subject = make(tmp_path)
    draw, manifest = random.Random(seed), subject.root / MANIFEST
    for case in range(cases):
        path = draw.choice(
            [
                file
                for file in subject.bodies
                if file.name not in ("extra.safetensors", "rank_extra.safetensors")
            ]
        )
        done, body = changed_file(draw, path, subject.bodies[path], subject.bodies)
        label = f"case {case}: {path.name}: {done}"
        fields = json.loads(subject.bodies[manifest])
        rewrite(path, body)
        try:
            rewrite(
                manifest,
                sealed(
                    json.loads(body)
                    if path == manifest
                    else with_records(fields, {path.name: body})
                ),
            )
        except (ValueError, TypeError, AttributeError):
            pass  # no JSON object: unchanged
        for name, act in (
            *subject.acts.items(),
            ("verify", partial(uc.verify, subject.root, deep=True)),
        ):
            late = AssertionError(f"did not end: {name}: {label}")
            with alarm(20, late), contextlib.suppress(uc.CheckpointError):
                loaded = act()
                if path != manifest and name == "load":
                    assert loaded == subject.right[name], f"{name} gave other state: {label}"
        rewrite(path, subject.bodies[path])
        rewrite(manifest, subject.bodies[manifest])
