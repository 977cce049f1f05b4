"""The files of a Megatron-LM checkpoint of before torch_dist: a folder `mp_rank_<tp>[_<pp>][_<ep>]` for each model-parallel rank."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unified_ckpt.core.text import listed
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.runtime.storage.regular_files import open_file
from unified_ckpt.sources.detect.names import MEGATRON_TRACKER
from unified_ckpt.sources.megatron.names import core_name
from unified_ckpt.sources.restricted_pickle.load import load_torch
from unified_ckpt.sources.restricted_pickle.stubs import Stub

_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_FILE, FLAT_FILE = "model_optim_rng.pt", "distrib_optim.pt"
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")
_LEFT = (
    "_extra_state",
    "inv_freq",
)  # ends of names of what is made anew: of Transformer Engine, of rotary embeddings
STUBS = (
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
class Saved:
    """What one model-parallel rank saved. `chunks`: of each virtual stage, tensors by name; layers are numbered over the whole model."""

    where: str
    tp: int
    pp: int
    ep: int
    told: Mapping[str, Any]
    chunks: list[dict[str, torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Megatron's arguments, as far as they were saved. `where`: the file that they are in."""

    told: Mapping[str, Any]
    where: str

    def number(self, name: str, default: int | None = None) -> int:
        """FormatError where it is not there and has no default."""
        found = self.told.get(name)
        if found is None and default is not None:
            return default
        if not isinstance(found, int) or isinstance(found, bool):
            raise FormatError(f"{self.where}: its arguments have {name}={found!r}; needed a number")
        return found

    def flag(self, name: str) -> bool:
        return bool(self.told.get(name))

    @property
    def experts(self) -> int:
        return self.number("num_experts", 0)

    @property
    def tp(self) -> int:
        return self.number("tensor_model_parallel_size", 1)

    @property
    def pp(self) -> int:
        return self.number("pipeline_model_parallel_size", 1)

    @property
    def ep(self) -> int:
        return self.number("expert_model_parallel_size", 1)

    @property
    def etp(self) -> int:
        return self.number("expert_tensor_parallel_size", self.tp)


def step_folder(root: str) -> str:
    """The folder of the step that a root's tracker names; the root itself where it has none. IncompleteError where it is not there."""
    tracker = os.path.join(root, MEGATRON_TRACKER)
    if not os.path.isfile(tracker):
        return root
    with open_file(tracker) as file:
        told = file.read().decode(errors="replace").strip()
    if told != "release" and not re.fullmatch(r"\d+", told):
        raise FormatError(f"{tracker}: says {told[:40]!r}; needed a number, or 'release'")
    folder = os.path.join(root, told if told == "release" else f"iter_{int(told):07d}")
    if not os.path.isdir(folder):
        raise IncompleteError(
            f"{tracker}: names {told}, which is not there; needed that folder, or another as the path"
        )
    return folder


def read_ranks(folder: str) -> tuple[Arguments, list[Saved]]:
    """What all ranks saved, tensors mapped. IncompleteError naming those that are missing, FormatError for files that do not fit."""
    names = sorted(name for name in os.listdir(folder) if _FOLDER.fullmatch(name))
    absent = [name for name in names if not os.path.isfile(os.path.join(folder, name, _FILE))]
    if absent or not names:
        raise IncompleteError(listed(f"{folder}: {_FILE} is missing", absent or ["mp_rank_00"]))
    told = {name: load_torch(os.path.join(folder, name, _FILE), stubs=STUBS) for name in names}
    for name, one in told.items():
        if not isinstance(one, Mapping) or not isinstance(one.get("args"), Stub):
            raise FormatError(
                f"{os.path.join(folder, name, _FILE)}: has no arguments of Megatron's; needed a dict with 'args'"
            )
    args = arguments(told[names[0]]["args"], os.path.join(folder, names[0], _FILE))
    ranks = [
        _saved(os.path.join(folder, name, _FILE), name, one, args) for name, one in told.items()
    ]
    for one in ranks:
        others = arguments(one.told["args"], one.where)
        if [others.tp, others.pp, others.ep] != [args.tp, args.pp, args.ep] or one.told.get(
            "iteration"
        ) != ranks[0].told.get("iteration"):
            raise FormatError(
                f"{one.where}: is of another step, or another layout, than {ranks[0].where}; needed files of one save"
            )
        _check_writer(one, others)
    _check_all(folder, ranks, args)
    _check_names(ranks)
    _number_layers(folder, ranks, args)
    return args, ranks


def arguments(told: Any, where: str) -> Arguments:
    return Arguments(
        told.state if isinstance(told, Stub) and isinstance(told.state, dict) else {}, where
    )


def expert_rank(one: Saved, args: Arguments) -> int:
    """Its tensor-parallel rank in experts. FormatError where the names of files do not say."""
    if args.etp not in (1, args.tp):
        raise FormatError(
            f"experts are divided over {args.etp} tensor-parallel ranks, all else over {args.tp}; needed as many, or 1"
        )
    return one.tp if args.etp == args.tp else 0


def _saved(where: str, name: str, told: Mapping[str, Any], args: Arguments) -> Saved:
    found = _FOLDER.fullmatch(name)
    assert found is not None
    numbers = [int(one) for one in found.groups() if one is not None]
    wanted = 1 + (args.pp > 1) + (args.ep > 1)
    if len(numbers) != wanted:
        raise FormatError(
            f"{where}: is named by {len(numbers)} ranks; needed {wanted}, for pipeline {args.pp} and experts over {args.ep}"
        )
    pp = numbers[1] if args.pp > 1 else 0
    ep = numbers[-1] if args.ep > 1 else 0
    if numbers[0] >= args.tp or pp >= args.pp or ep >= args.ep:
        raise FormatError(
            f"{where}: is not of a job with tensor {args.tp}, pipeline {args.pp} and experts over {args.ep}"
        )
    chunks = [told["model"]] if "model" in told else [told[key] for key in _virtual(told)]
    if not chunks or not all(isinstance(one, Mapping) for one in chunks):
        raise FormatError(
            f"{where}: has no model; needed the state dict 'model', or 'model0' and so on"
        )
    return Saved(where, numbers[0], pp, ep, told, [dict(_flat(one)) for one in chunks])


def _virtual(told: Mapping[str, Any]) -> Iterator[str]:
    number = 0
    while f"model{number}" in told:
        yield f"model{number}"
        number += 1


def _flat(told: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in told.items():
        if str(key).endswith(_LEFT):
            continue
        if isinstance(value, torch.Tensor):
            yield core_name((prefix + str(key)).removeprefix("module.")), value.detach()
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")


def _check_writer(one: Saved, args: Arguments) -> None:
    """Refuses a file that another rank wrote: each has the arguments of the process that saved it, with its global rank.

    Ranks are counted along tensor, data and pipeline parallelism; experts along tensor, expert and data. Only files with random states
    are checked: converters write every file with the arguments of one process. FormatError.
    """
    rank, world = args.told.get("rank"), args.number("world_size", 0)
    if "rng_state" not in one.told or not isinstance(rank, int) or not 0 <= rank < world:
        return
    inner = rank % (world // args.pp)  # within its pipeline stage
    if args.flag("use_tp_pp_dp_mapping"):  # neither with experts nor with context parallelism
        places = [(rank % args.tp, rank // args.tp % args.pp, one.ep)]
    else:  # versions that divide experts as all else count context parallelism before experts
        strides = dict.fromkeys((args.etp, args.tp * args.number("context_parallel_size", 1)))
        places = [
            (rank % args.tp, rank * args.pp // world, inner // stride % args.ep)
            for stride in strides
        ]
    if (one.tp, one.pp, one.ep) not in places:
        tp, pp, ep = places[0]
        raise FormatError(
            f"{one.where}: was written by rank {rank}, whose place is tensor {tp}, pipeline {pp}, experts {ep}: folders were swapped or "
            "copied; put each back under its own name"
        )


def _check_all(folder: str, ranks: list[Saved], args: Arguments) -> None:
    dense = {(one.tp, one.pp) for one in ranks}
    lost = [
        f"mp_rank_{t:02d}" + (f"_{p:03d}" if args.pp > 1 else "")
        for p in range(args.pp)
        for t in range(args.tp)
        if (t, p) not in dense
    ]
    if args.ep > 1:
        held = {(one.pp, one.ep, expert_rank(one, args)) for one in ranks}
        lost += [
            f"mp_rank_{t if args.etp > 1 else '*'}"
            + (f"_{p:03d}" if args.pp > 1 else "")
            + f"_{e:03d}"
            for p in range(args.pp)
            for e in range(args.ep)
            for t in range(args.etp)
            if (p, e, t) not in held
        ]
    if lost:
        raise IncompleteError(listed(f"{folder}: folders of ranks are missing", lost))


def _check_names(ranks: Sequence[Saved]) -> None:
    """All ranks of a pipeline stage have tensors of the same names, experts too, which are numbered on each rank."""
    first: dict[int, Saved] = {}
    for one in ranks:
        other = first.setdefault(one.pp, one)
        for mine, theirs in zip(one.chunks, other.chunks, strict=False):
            if mine.keys() != theirs.keys():
                lost = sorted(mine.keys() ^ theirs.keys())
                raise FormatError(
                    listed(
                        f"{one.where} and {other.where} are of one pipeline rank: only one of them has",
                        lost,
                    )
                )


def _number_layers(folder: str, ranks: list[Saved], args: Arguments) -> None:
    """Layers are numbered from 0 in each stage: the n-th virtual stage of every pipeline rank comes before any (n + 1)-th."""
    counts: dict[tuple[int, int], int] = {}
    for one in ranks:
        for number, chunk in enumerate(one.chunks):
            layers = {int(found[2]) for found in map(_LAYER.fullmatch, chunk) if found}
            if layers != set(range(len(layers))) or counts.setdefault(
                (number, one.pp), len(layers)
            ) != len(layers):
                raise FormatError(
                    f"{one.where}: has layers {sorted(layers)} in stage {number}; needed all, as many as its other ranks"
                )
    if len({len(one.chunks) for one in ranks}) > 1:
        raise FormatError(
            f"{folder}: ranks have different numbers of virtual stages; needed files of one save"
        )
    total = sum(counts.values())
    if total != args.number("num_layers", total):
        raise FormatError(
            f"{folder}: has {total} layers; its arguments say {args.number('num_layers')}"
        )
    first, starts = 0, {}
    for stage in sorted(counts):
        starts[stage] = first
        first += counts[stage]
    for one in ranks:
        for number, chunk in enumerate(one.chunks):
            one.chunks[number] = {
                _moved(name, starts[number, one.pp]): tensor for name, tensor in chunk.items()
            }


def _moved(name: str, by: int) -> str:
    found = _LAYER.fullmatch(name)
    return f"{found[1]}{int(found[2]) + by}{found[3]}" if found else name


def plain(told: Any) -> Any:
    """Values without classes: a namespace as a dict, an enum as its value, a path as text."""
    if isinstance(told, Stub):
        if told.state is not None:
            return plain(told.state)
        if "Path" in type(told).__name__:
            return "/".join(map(str, told.args)).replace("//", "/")
        return plain(told.args[0]) if len(told.args) == 1 else [plain(one) for one in told.args]
    if isinstance(told, type) and issubclass(told, Stub):
        return told.__name__
    if isinstance(told, Mapping):
        return {key: plain(value) for key, value in told.items()}
    if isinstance(told, list | tuple):
        return type(told)(plain(one) for one in told) if type(told) in (list, tuple) else list(told)
    return told
