"""Reads Megatron-LM's `mp_rank_<tp>[_<pp>][_<ep>]` folders, one per model-parallel rank.

Megatron-LM wrote these before torch_dist.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any

import torch

from unified_ckpt.core.text import format_list, raise_if_any
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.foreign.megatron.arguments import Arguments, parse_arguments, rank_positions
from unified_ckpt.foreign.megatron.names import to_core_name
from unified_ckpt.foreign.restricted_pickle.load import load_torch
from unified_ckpt.foreign.restricted_pickle.placeholders import Placeholder
from unified_ckpt.runtime.storage.regular_files import is_file, list_folder

_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_FILE, FLAT_FILE = "model_optim_rng.pt", "distrib_optim.pt"
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")
_UNREAD_SUFFIXES = ("_extra_state", "inv_freq")
PLACEHOLDER_CLASSES = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    "_io.BytesIO",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib._local.PosixPath",
    "signal.Signals",
    *(f"signal.SIG{name}" for name in ("TERM", "INT", "USR1", "USR2", "HUP")),
    "torch._C.Generator",
    *(f"megatron.core.enums.{name}" for name in ("ModelType", "Fp8Recipe", "Fp4Recipe")),
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    *(f"megatron.core.rerun_state_machine.Rerun{name}" for name in ("Diagnostic", "Mode", "State")),
    *(
        f"megatron.core.transformer.enums.{name}"
        for name in (
            "AttnBackend",
            "AttnMaskType",
            "AttnType",
            "CudaGraphScope",
            "CudaGraphModule",
            "InferenceCudaGraphScope",
        )
    ),
)


@dataclass(frozen=True, slots=True)
class RankFile:
    """The content of one model-parallel rank's file.

    `chunks`: tensors by name for each model chunk (virtual pipeline stage). Layers are numbered
    over the whole model. `left_out`: names of what the model holds beside them, which Transformer
    Engine and rotary embeddings recreate.
    """

    path: str
    tp: int
    pp: int
    ep: int
    state_dict: Mapping[str, Any]
    chunks: list[dict[str, torch.Tensor]] = field(default_factory=list)
    left_out: frozenset[str] = frozenset()


def read_rank_files(folder: str) -> tuple[Arguments, list[RankFile]]:
    """Read all ranks' files, with mapped tensors.

    IncompleteError names missing ranks, FormatError reports files that do not fit together.
    """
    names = sorted(name for name in list_folder(folder) if _FOLDER.fullmatch(name))
    missing = [name for name in names if not is_file(os.path.join(folder, name, _FILE))]
    if missing or not names:
        raise IncompleteError(
            format_list(f"{folder}: {_FILE} is missing", missing or ["mp_rank_00"])
        )
    state_dicts: dict[str, Mapping[str, Any]] = {}
    for name in names:
        path = os.path.join(folder, name, _FILE)
        state_dict = load_torch(path, placeholders=PLACEHOLDER_CLASSES)
        if not isinstance(state_dict, Mapping) or not isinstance(
            state_dict.get("args"), Placeholder
        ):
            raise FormatError(f"{path}: no Megatron arguments; expected a dict with 'args'")
        state_dicts[name] = state_dict
    args = parse_arguments(state_dicts[names[0]]["args"], os.path.join(folder, names[0], _FILE))
    rank_files = [
        _parse_rank_file(os.path.join(folder, name, _FILE), name, state_dict, args)
        for name, state_dict in state_dicts.items()
    ]
    first = rank_files[0]
    for rank_file in rank_files:
        rank_args = parse_arguments(rank_file.state_dict["args"], rank_file.path)
        sizes_equal = [rank_args.tp, rank_args.pp, rank_args.ep] == [args.tp, args.pp, args.ep]
        iteration = rank_file.state_dict.get("iteration")
        if not sizes_equal or iteration != first.state_dict.get("iteration"):
            raise FormatError(
                f"{rank_file.path}: got another step or layout than {first.path}, "
                "expected files of one save"
            )
        _check_writer(rank_file, rank_args)
    _check_complete(folder, rank_files, args)
    _check_names(rank_files)
    _renumber_layers(folder, rank_files, args)
    return args, rank_files


def expert_tp_rank(rank_file: RankFile, args: Arguments) -> int:
    """Return the tensor-parallel rank within experts. FormatError if file names do not give it."""
    if args.etp not in (1, args.tp):
        raise FormatError(
            f"{args.path}: got expert tensor parallelism {args.etp}, expected 1 or {args.tp}"
        )
    return rank_file.tp if args.etp == args.tp else 0


def _parse_rank_file(
    path: str, name: str, state_dict: Mapping[str, Any], args: Arguments
) -> RankFile:
    ranks = [int(rank) for rank in re.findall(r"\d+", name)]
    expected = 1 + (args.pp > 1) + (args.ep > 1)
    if len(ranks) != expected:
        raise FormatError(
            f"{path}: got {len(ranks)} ranks in its name, expected {expected} "
            f"with pp={args.pp}, ep={args.ep}"
        )
    pp = ranks[1] if args.pp > 1 else 0
    ep = ranks[-1] if args.ep > 1 else 0
    if ranks[0] >= args.tp or pp >= args.pp or ep >= args.ep:
        raise FormatError(
            f"{path}: got tp={ranks[0]}, pp={pp}, ep={ep}, "
            f"expected ranks below {args.tp}, {args.pp} and {args.ep}"
        )
    chunk_keys = takewhile(state_dict.__contains__, (f"model{index}" for index in count()))
    keys = ["model"] if "model" in state_dict else list(chunk_keys)
    chunks = [state_dict[key] for key in keys]
    if not chunks or not all(isinstance(chunk, Mapping) for chunk in chunks):
        raise FormatError(f"{path}: no model; expected the state dict 'model', or 'model0', ...")
    values = [dict(_flatten(chunk)) for chunk in chunks]
    return RankFile(
        path,
        ranks[0],
        pp,
        ep,
        state_dict,
        [
            {name: value.detach() for name, value in chunk.items() if _is_read(name, value)}
            for chunk in values
        ],
        frozenset(
            without_numbers(name)
            for chunk in values
            for name, value in chunk.items()
            if not _is_read(name, value)
            and (value.numel() if isinstance(value, torch.Tensor) else value is not None)
        ),
    )


def _flatten(state_dict: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state_dict.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield to_core_name((prefix + str(key)).removeprefix("module.")), value


def _is_read(name: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not name.endswith(_UNREAD_SUFFIXES)


def without_numbers(name: str) -> str:
    """Return the name with `*` in place of its numbers, the same for all layers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _check_writer(rank_file: RankFile, args: Arguments) -> None:
    """Raise FormatError if another rank wrote the file: its arguments give the writer's rank.

    Only files with random states are checked, because converters write every file with the
    arguments of one process.
    """
    rank, world = args.values.get("rank"), args.world_size
    if (
        "rng_state" not in rank_file.state_dict
        or not isinstance(rank, int)
        or not 0 <= rank < world
    ):
        return
    positions = rank_positions(rank, args)
    if (rank_file.tp, rank_file.pp, rank_file.ep) not in positions:
        tp, pp, ep = positions[0]
        raise FormatError(
            f"{rank_file.path}: got the file of rank {rank} (tp={tp}, pp={pp}, ep={ep}): folders "
            "were swapped or copied; restore their names"
        )


def _check_complete(folder: str, rank_files: list[RankFile], args: Arguments) -> None:
    dense = {(rank_file.tp, rank_file.pp) for rank_file in rank_files}
    missing = [
        f"mp_rank_{t:02d}" + (f"_{p:03d}" if args.pp > 1 else "")
        for p in range(args.pp)
        for t in range(args.tp)
        if (t, p) not in dense
    ]
    if args.ep > 1:
        expert_positions = {
            (rank_file.pp, rank_file.ep, expert_tp_rank(rank_file, args))
            for rank_file in rank_files
        }
        missing += [
            f"mp_rank_{t if args.etp > 1 else '*'}"
            + (f"_{p:03d}" if args.pp > 1 else "")
            + f"_{e:03d}"
            for p in range(args.pp)
            for e in range(args.ep)
            for t in range(args.etp)
            if (p, e, t) not in expert_positions
        ]
    raise_if_any(IncompleteError, f"{folder}: folders of ranks are missing", missing)


def _check_names(rank_files: Sequence[RankFile]) -> None:
    """Check that all ranks of a pipeline stage have tensors of the same names.

    Experts count too, because each rank numbers its own from 0.
    """
    references: dict[int, RankFile] = {}
    for rank_file in rank_files:
        reference = references.setdefault(rank_file.pp, rank_file)
        for chunk, expected in zip(rank_file.chunks, reference.chunks, strict=False):
            if chunk.keys() != expected.keys():
                differing = sorted(chunk.keys() ^ expected.keys())
                paths = f"{rank_file.path} and {reference.path}"
                problem = f"{paths}: ranks of one pipeline stage have different tensors"
                raise FormatError(format_list(problem, differing))


def _renumber_layers(folder: str, rank_files: list[RankFile], args: Arguments) -> None:
    """Number layers over the whole model; files number them from 0 in each stage.

    The n-th chunk of every pipeline rank comes before any (n + 1)-th.
    """
    counts: dict[tuple[int, int], int] = {}
    for rank_file in rank_files:
        for chunk_index, chunk in enumerate(rank_file.chunks):
            layers = {int(match[2]) for match in map(_LAYER.fullmatch, chunk) if match}
            count = counts.setdefault((chunk_index, rank_file.pp), len(layers))
            if layers != set(range(count)):
                raise FormatError(
                    f"{rank_file.path}: model chunk {chunk_index}: got layers {sorted(layers)}, "
                    f"expected 0 to {count - 1} as on other ranks"
                )
    if len({len(rank_file.chunks) for rank_file in rank_files}) > 1:
        raise FormatError(
            f"{folder}: ranks have different numbers of model chunks; expected files of one save"
        )
    total = sum(counts.values())
    if total != args.get_int("num_layers", total):
        raise FormatError(
            f"{folder}: got {total} layers, expected num_layers={args.get_int('num_layers')}"
        )
    next_layer, first_layers = 0, {}
    for stage in sorted(counts):
        first_layers[stage] = next_layer
        next_layer += counts[stage]
    for rank_file in rank_files:
        for chunk_index, chunk in enumerate(rank_file.chunks):
            rank_file.chunks[chunk_index] = {
                _shift_layer(name, first_layers[chunk_index, rank_file.pp]): tensor
                for name, tensor in chunk.items()
            }


def _shift_layer(name: str, offset: int) -> str:
    match = _LAYER.fullmatch(name)
    return f"{match[1]}{int(match[2]) + offset}{match[3]}" if match else name
