"""The files of a Megatron-LM checkpoint of before torch_dist: a folder `mp_rank_<tp>[_<pp>][_<ep>]`
for each model-parallel rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unified_ckpt.core.text import format_list
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.runtime.storage.regular_files import open_binary
from unified_ckpt.sources.detect.names import MEGATRON_TRACKER
from unified_ckpt.sources.megatron.names import to_core_name
from unified_ckpt.sources.restricted_pickle.load import load_torch
from unified_ckpt.sources.restricted_pickle.stubs import Placeholder

_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_FILE, FLAT_FILE = "model_optim_rng.pt", "distrib_optim.pt"
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")
_SKIPPED_SUFFIXES = (
    "_extra_state",
    "inv_freq",
)  # ends of names of what is made anew: of Transformer Engine, of rotary embeddings
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
    """What one model-parallel rank saved. `chunks`: of each virtual stage, tensors by name; layers
    are numbered over the whole model.
    """

    path: str
    tp: int
    pp: int
    ep: int
    state_dict: Mapping[str, Any]
    chunks: list[dict[str, torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Megatron's arguments, as far as they were saved. `path`: the file that they are in."""

    values: Mapping[str, Any]
    path: str

    def get_int(self, name: str, default: int | None = None) -> int:
        """FormatError where it is not there and has no default."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise FormatError(f"{self.path}: its arguments have {name}={value!r}; needed a number")
        return value

    def get_bool(self, name: str) -> bool:
        return bool(self.values.get(name))

    @property
    def experts(self) -> int:
        return self.get_int("num_experts", 0)

    @property
    def tp(self) -> int:
        return self.get_int("tensor_model_parallel_size", 1)

    @property
    def pp(self) -> int:
        return self.get_int("pipeline_model_parallel_size", 1)

    @property
    def ep(self) -> int:
        return self.get_int("expert_model_parallel_size", 1)

    @property
    def etp(self) -> int:
        return self.get_int("expert_tensor_parallel_size", self.tp)


def step_folder(root: str) -> str:
    """The folder of the step that a root's tracker names; the root itself where it has none.
    IncompleteError where it is not there.
    """
    tracker = os.path.join(root, MEGATRON_TRACKER)
    if not os.path.isfile(tracker):
        return root
    with open_binary(tracker) as file:
        step = file.read().decode(errors="replace").strip()
    if step != "release" and not re.fullmatch(r"\d+", step):
        raise FormatError(f"{tracker}: says {step[:40]!r}; needed a number, or 'release'")
    folder = os.path.join(root, step if step == "release" else f"iter_{int(step):07d}")
    if not os.path.isdir(folder):
        raise IncompleteError(
            f"{tracker}: names {step}, which is not there; needed that folder, or another as the path"
        )
    return folder


def read_rank_files(folder: str) -> tuple[Arguments, list[RankFile]]:
    """What all ranks saved, tensors mapped. IncompleteError naming those that are missing,
    FormatError for files that do not fit.
    """
    names = sorted(name for name in os.listdir(folder) if _FOLDER.fullmatch(name))
    missing = [name for name in names if not os.path.isfile(os.path.join(folder, name, _FILE))]
    if missing or not names:
        raise IncompleteError(
            format_list(f"{folder}: {_FILE} is missing", missing or ["mp_rank_00"])
        )
    state_dicts = {
        name: load_torch(os.path.join(folder, name, _FILE), placeholders=PLACEHOLDER_CLASSES)
        for name in names
    }
    for name, rank_file in state_dicts.items():
        if not isinstance(rank_file, Mapping) or not isinstance(rank_file.get("args"), Placeholder):
            raise FormatError(
                f"{os.path.join(folder, name, _FILE)}: has no arguments of Megatron's; needed a dict with 'args'"
            )
    args = parse_arguments(state_dicts[names[0]]["args"], os.path.join(folder, names[0], _FILE))
    rank_files = [
        _parse_rank_file(os.path.join(folder, name, _FILE), name, rank_file, args)
        for name, rank_file in state_dicts.items()
    ]
    for rank_file in rank_files:
        rank_args = parse_arguments(rank_file.state_dict["args"], rank_file.path)
        if [rank_args.tp, rank_args.pp, rank_args.ep] != [
            args.tp,
            args.pp,
            args.ep,
        ] or rank_file.state_dict.get("iteration") != rank_files[0].state_dict.get("iteration"):
            raise FormatError(
                f"{rank_file.path}: is of another step, or another layout, than {rank_files[0].path}; needed files of one save"
            )
        _check_writer(rank_file, rank_args)
    _check_complete(folder, rank_files, args)
    _check_names(rank_files)
    _renumber_layers(folder, rank_files, args)
    return args, rank_files


def parse_arguments(namespace: Any, path: str) -> Arguments:
    return Arguments(
        namespace.state
        if isinstance(namespace, Placeholder) and isinstance(namespace.state, dict)
        else {},
        path,
    )


def expert_tp_rank(rank_file: RankFile, args: Arguments) -> int:
    """Its tensor-parallel rank in experts. FormatError where the names of files do not say."""
    if args.etp not in (1, args.tp):
        raise FormatError(
            f"experts are divided over {args.etp} tensor-parallel ranks, all else over {args.tp}; needed as many, or 1"
        )
    return rank_file.tp if args.etp == args.tp else 0


def _parse_rank_file(
    path: str, name: str, state_dict: Mapping[str, Any], args: Arguments
) -> RankFile:
    match = _FOLDER.fullmatch(name)
    assert match is not None
    ranks = [int(chunk) for chunk in match.groups() if chunk is not None]
    expected = 1 + (args.pp > 1) + (args.ep > 1)
    if len(ranks) != expected:
        raise FormatError(
            f"{path}: is named by {len(ranks)} ranks; needed {expected}, for pipeline {args.pp} and experts over {args.ep}"
        )
    pp = ranks[1] if args.pp > 1 else 0
    ep = ranks[-1] if args.ep > 1 else 0
    if ranks[0] >= args.tp or pp >= args.pp or ep >= args.ep:
        raise FormatError(
            f"{path}: is not of a job with tensor {args.tp}, pipeline {args.pp} and experts over {args.ep}"
        )
    chunks = (
        [state_dict["model"]]
        if "model" in state_dict
        else [state_dict[key] for key in _chunk_keys(state_dict)]
    )
    if not chunks or not all(isinstance(chunk, Mapping) for chunk in chunks):
        raise FormatError(
            f"{path}: has no model; needed the state dict 'model', or 'model0' and so on"
        )
    return RankFile(path, ranks[0], pp, ep, state_dict, [dict(_flatten(chunk)) for chunk in chunks])


def _chunk_keys(state_dict: Mapping[str, Any]) -> Iterator[str]:
    index = 0
    while f"model{index}" in state_dict:
        yield f"model{index}"
        index += 1


def _flatten(state_dict: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in state_dict.items():
        if str(key).endswith(_SKIPPED_SUFFIXES):
            continue
        if isinstance(value, torch.Tensor):
            yield to_core_name((prefix + str(key)).removeprefix("module.")), value.detach()
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")


def _check_writer(rank_file: RankFile, args: Arguments) -> None:
    """Refuses a file that another rank wrote: each has the arguments of the process that saved it,
    with its global rank.

    Ranks are counted along tensor, data and pipeline parallelism; experts along tensor, expert and
    data. Only files with random states are checked: converters write every file with the arguments
    of one process. FormatError.
    """
    rank, world = args.values.get("rank"), args.get_int("world_size", 0)
    if (
        "rng_state" not in rank_file.state_dict
        or not isinstance(rank, int)
        or not 0 <= rank < world
    ):
        return
    inner = rank % (world // args.pp)  # within its pipeline stage
    if args.get_bool("use_tp_pp_dp_mapping"):  # neither with experts nor with context parallelism
        positions = [(rank % args.tp, rank // args.tp % args.pp, rank_file.ep)]
    else:  # versions that divide experts as all else count context parallelism before experts
        strides = dict.fromkeys((args.etp, args.tp * args.get_int("context_parallel_size", 1)))
        positions = [
            (rank % args.tp, rank * args.pp // world, inner // stride % args.ep)
            for stride in strides
        ]
    if (rank_file.tp, rank_file.pp, rank_file.ep) not in positions:
        tp, pp, ep = positions[0]
        raise FormatError(
            f"{rank_file.path}: was written by rank {rank}, whose place is tensor {tp}, pipeline {pp}, experts {ep}: folders were swapped or "
            "copied; put each back under its own name"
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
    if missing:
        raise IncompleteError(format_list(f"{folder}: folders of ranks are missing", missing))


def _check_names(rank_files: Sequence[RankFile]) -> None:
    """All ranks of a pipeline stage have tensors of the same names, experts too, which are numbered
    on each rank.
    """
    references: dict[int, RankFile] = {}
    for rank_file in rank_files:
        reference = references.setdefault(rank_file.pp, rank_file)
        for chunk, expected in zip(rank_file.chunks, reference.chunks, strict=False):
            if chunk.keys() != expected.keys():
                differing = sorted(chunk.keys() ^ expected.keys())
                raise FormatError(
                    format_list(
                        f"{rank_file.path} and {reference.path} are of one pipeline rank: only one of them has",
                        differing,
                    )
                )


def _renumber_layers(folder: str, rank_files: list[RankFile], args: Arguments) -> None:
    """Layers are numbered from 0 in each stage: the n-th virtual stage of every pipeline rank comes
    before any (n + 1)-th.
    """
    counts: dict[tuple[int, int], int] = {}
    for rank_file in rank_files:
        for chunk_index, chunk in enumerate(rank_file.chunks):
            layers = {int(match[2]) for match in map(_LAYER.fullmatch, chunk) if match}
            if layers != set(range(len(layers))) or counts.setdefault(
                (chunk_index, rank_file.pp), len(layers)
            ) != len(layers):
                raise FormatError(
                    f"{rank_file.path}: has layers {sorted(layers)} in stage {chunk_index}; needed all, as many as its other ranks"
                )
    if len({len(rank_file.chunks) for rank_file in rank_files}) > 1:
        raise FormatError(
            f"{folder}: ranks have different numbers of virtual stages; needed files of one save"
        )
    total = sum(counts.values())
    if total != args.get_int("num_layers", total):
        raise FormatError(
            f"{folder}: has {total} layers; its arguments say {args.get_int('num_layers')}"
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


def plain_values(obj: Any) -> Any:
    """Values without classes: a namespace as a dict, an enum as its value, a path as text."""
    if isinstance(obj, Placeholder):
        if obj.state is not None:
            return plain_values(obj.state)
        if "Path" in type(obj).__name__:
            return "/".join(map(str, obj.args)).replace("//", "/")
        return (
            plain_values(obj.args[0])
            if len(obj.args) == 1
            else [plain_values(item) for item in obj.args]
        )
    if isinstance(obj, type) and issubclass(obj, Placeholder):
        return obj.__name__
    if isinstance(obj, Mapping):
        return {key: plain_values(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return (
            type(obj)(plain_values(item) for item in obj)
            if type(obj) in (list, tuple)
            else list(obj)
        )
    return obj
