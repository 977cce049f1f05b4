"""Several nodes' folders and views of Sources, for the conformance suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import unified_ckpt as uc
from tests.foreign.conformance_cases import QUICK, Tensors, dcp_folder, keyed
from tests.support.engine.cluster.simulated_nodes import NodeState, folder_of
from tests.support.engine.compressed import save_compressed
from tests.support.foreign.source_cases import LAZY_NBYTES, Case
from tests.support.format.decoders import decode_folder
from unified_ckpt.engine.cluster.discover import open_cluster_source, open_folders
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.format.renames import check_renames
from unified_ckpt.runtime.comm.comm import single_process
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.views.derived import ElementRange, RangesTensor, derive
from unified_ckpt.views.rename_rules import apply_renames
from unified_ckpt.views.select import SelectedSource


@contextmanager
def opened_nodes(root: Path) -> Iterator[Source]:
    with ExitStack() as resources:
        paths = [str(folder_of(root, node)) for node in range(4)]
        folders = open_folders(paths, resources, lock=False)
        topology = Topology.shared_folder(0, [0])
        yield open_cluster_source(
            single_process(), "read", folders, topology, resources, timeout_seconds=30
        )


def nodes(root: Path) -> Case:
    """Each rank is a node, and has a quarter of each tensor."""
    full = {
        "wide": torch.randn(1200, 500),
        "columns": torch.randn(500, 1200),
        "cube": torch.randn(12, 8, 5),
    }
    NodeState(full, {"wide": 0, "columns": 1, "cube": 1}).save(root, range(4))
    return Case(
        root,
        keyed(model=full),
        digests="below",
        open_files=partial(opened_nodes, root),
        lazy_nbytes=2 * COMPUTED_NBYTES,
    )


def compressed(root: Path, *, compression: str) -> Case:
    """A compressed checkpoint. Only tensors that are stored plain have digests of their own."""
    save_compressed(root / "c", compression)
    return Case(
        root / "c",
        decode_folder(root / "c"),
        digests="below",
        lazy_nbytes=2 * COMPUTED_NBYTES,
    )


def view_of(case: Callable[[Path], Case], root: Path) -> Case:
    """A case whose tensor "wide" is permuted."""
    base = case(root)
    rule = {"match": "wide", "to": "permuted", "steps": [{"permute": [1, 0]}]}
    rules = check_renames({"rules": [rule]}, file="test")
    tensors = {
        (part, name.replace("wide", "permuted")): tensor.T
        if name.startswith("wide") and tensor.dim()
        else tensor
        for (part, name), tensor in base.tensors.items()
    }
    return replace(
        base,
        tensors=tensors,
        view=partial(apply_renames, renames=rules),
        located=False,
        lazy_nbytes=2 * COMPUTED_NBYTES,
    )


W, MASTER = torch.randn(1030, 300), torch.randn(1030, 300)
LAYERS = {f"h.{number}.w": torch.randn(200, 300) for number in range(3)}
MOMENTS_OF_W = {"w/exp_avg": torch.randn(1030, 300), "w/step": torch.tensor(3.0)}
LAZY = torch.randn(5, 2).to(torch.bfloat16)
COMPUTED_NBYTES = 3 << 19  # a tensor of less than a chunk is computed whole


def viewed(
    root: Path,
    stored: Mapping[str, Tensors],
    expected: Mapping[str, Tensors],
    view: Callable[[Source], Source] | None = None,
    rules: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Case:
    """A unified folder that is read through a view. `more`: of the case."""
    uc.save(root / "c", **stored, options=QUICK)
    source_options = uc.SourceOptions(**{"rename": rules, **(options or {})})
    more = {"lazy_nbytes": COMPUTED_NBYTES, "digests": "below", **more}
    return Case(root / "c", keyed(**expected), source_options, view=view, **more)


def renamed(state: Tensors, new: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    return {
        name.replace("w/", f"{new}/"): change(tensor) if tensor.dim() else tensor
        for name, tensor in state.items()
    }


TRAINED = {"model": {"w": W}, "optimizer": MOMENTS_OF_W}
PERMUTED = ({"match": "w", "to": "v", "steps": [{"permute": [1, 0]}]},)
SWAP = ({**PERMUTED[0], "to": "x"}, {**PERMUTED[0], "match": "x", "to": "w"})
SPLIT = ({"match": "w", "split": {"sizes": [30, 1000]}, "to": ["a", "b"]},)
STACKED = {"h.w": torch.stack(list(LAYERS.values()), 1)}
PIECES = (("w", 10, 500), ("w", 200, 7), ("w", 100_000, 93))
VIEWS: dict[str, Callable[[Path], Case]] = {
    **{form: partial(compressed, compression=form) for form in ("lossless", "O1")},
    "renamed": partial(
        viewed,
        stored=TRAINED,
        rules=({"match": "w", "to": "v"},),
        expected={"model": {"v": W}, "optimizer": renamed(MOMENTS_OF_W, "v", torch.clone)},
        digests="all",
        located=True,
        lazy_nbytes=LAZY_NBYTES,
    ),
    "permuted": partial(
        viewed,
        stored=TRAINED,
        rules=PERMUTED,
        expected={"model": {"v": W.T}, "optimizer": renamed(MOMENTS_OF_W, "v", torch.t)},
    ),
    "split": partial(
        viewed,
        stored={"model": {"w": W}},
        rules=SPLIT,
        expected={"model": {"a": W[:30], "b": W[30:]}},
        digests="none",  # blocks are not read whole
        located=True,
        lazy_nbytes=LAZY_NBYTES,
    ),
    "joined": partial(
        viewed,
        stored={"model": {"w": W, "x": MASTER}},
        rules=({"match": ["w", "x"], "concat": 1, "to": "wx"},),
        expected={"model": {"wx": torch.cat([W, MASTER], 1)}},
        lazy_nbytes=2 * COMPUTED_NBYTES,
    ),
    "scaled": partial(
        viewed,
        stored=TRAINED,
        rules=({"match": "w", "to": "v", "steps": [{"scale": 4}]},),
        expected={"model": {"v": W * 4}, "optimizer": renamed(MOMENTS_OF_W, "v", lambda t: t / 4)},
    ),
    "stacked": partial(
        viewed,
        stored={"model": LAYERS},
        options={"layers": "stacked", "layer_dim": 1},
        expected={"model": STACKED},
    ),
    "unstacked": partial(
        viewed,
        stored={"model": STACKED},
        options={"layers": "unstacked", "layer_dim": 1},
        expected={"model": LAYERS},
        digests="none",  # blocks are not read whole
    ),
    "cast": partial(
        viewed,
        stored={"model": {"w": W, "ids": torch.arange(5)}},
        view=partial(SelectedSource, parts=None, model_dtype="BF16"),
        expected={"model": {"w": W.bfloat16(), "ids": torch.arange(5)}},
        lazy_nbytes=LAZY_NBYTES,
    ),
    "cast from master weights": partial(
        viewed,
        stored={"model": {"w": W}, "master_weights": {"w": MASTER}},
        view=partial(SelectedSource, parts=["model"], model_dtype="BF16"),
        expected={"model": {"w": MASTER.bfloat16()}},
        digests="none",  # the stored model is not read
        lazy_nbytes=LAZY_NBYTES,
    ),
    "converted by a function": partial(
        viewed,
        stored={"model": {"w": W, "lazy": LAZY}, "master_weights": {"w": MASTER}},
        options={"conversion_fn": "tests.support.views.conversions:transposed"},
        expected={"model": {"w": W.T, "lazy": LAZY.T, "new": torch.arange(3), "master": MASTER}},
        lazy_nbytes=2 * COMPUTED_NBYTES,  # the function reads a tensor for its shape
    ),
    "derived from ranges": partial(
        viewed,
        stored={"model": {"w": W, "x": MASTER}},
        view=lambda source: derive(
            source,
            {"v": RangesTensor((20, 30), tuple(ElementRange(*piece) for piece in PIECES))},
            parts=["model"],
        ),
        expected={
            "model": {
                "v": torch.cat([W.flatten()[i : i + n] for _, i, n in PIECES]).view(20, 30),
                "x": MASTER,
            }
        },
        digests="none",
        lazy_nbytes=LAZY_NBYTES,
    ),
    "view of a view": partial(  # each uses names that the view below uses too
        viewed,
        stored={"model": {"w": W, "x": MASTER}},
        rules=SWAP,
        view=partial(apply_renames, renames=check_renames({"rules": SWAP}, file="test")),
        expected={"model": {"w": W, "x": MASTER}},
    ),
    "nodes": nodes,
    "view of nodes": partial(view_of, nodes),
    "view of dcp": partial(view_of, dcp_folder),
}
