"""A strategy for each option: how to draw a valid value. A new option without one fails a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, get_args

import unified_ckpt as uc
from tests.support.refusals import error_of
from unified_ckpt.base_options import BaseOptions

CONVERSIONS = (
    *("huggingface", "torch", "dcp", "orbax", "maxtext", "peft"),
    *("paddle", "paddleformers", "paddle-flex", "unifeid"),
)
Draw = Callable[[Random, "Surroundings"], object]


@dataclass(frozen=True)
class Surroundings:
    """What options may refer to. `folder`: for paths that need not exist; `checkpoint`: a path that
    holds one; `parts`: names of parts that may exist.
    """

    folder: str
    checkpoint: str
    parts: Sequence[str]


def one_of(*values: object) -> Draw:
    return lambda random, _: random.choice(values)


def literal(kind: type[BaseOptions], name: str) -> Draw:
    """Draw a value of a field that is a Literal, so that new values are drawn too."""
    annotation = kind.model_fields[name].annotation
    values = [
        value
        for choice in (annotation, *get_args(annotation))
        for value in get_args(choice)
        if isinstance(value, str)
    ]
    assert values, f"{name} is no Literal"
    return one_of(*values)


def _mostly(value: object, draw: Draw) -> Draw:
    return lambda random, around: draw(random, around) if random.random() < 0.4 else value


def _parts(random: Random, around: Surroundings) -> tuple[str, ...]:
    names = random.sample(around.parts, random.choice((1, 2, 3, *[len(around.parts)] * 3)))
    return (*names, *(["modle"] if random.random() < 0.05 else ()))


def _omitted(random: Random, around: Surroundings) -> tuple[str, ...]:
    names = random.sample(around.parts[1:], random.choice((0, 1, 1, 2)))
    return (*names, *random.choice(((), (), (), around.parts[:1], ("modle",))))


def _rename(random: Random, around: Surroundings) -> object:
    """Rules that give every tensor another name; the oracle of names is `renamed`."""
    return [{"match": "layers.{i}.w", "to": "layers.{i}.weight", "optional": True}, *_KEPT][
        : random.choice((1, 2))
    ]


_KEPT = ({"match": "emb", "to": "emb", "optional": True},)
_WRITTEN_PARTS = one_of(
    None, None, ("model",), ("model", "optimizer"), ("ema", "model"), ("optimizer",), ("modle",)
)
_DTYPE = one_of(None, "float32", "bfloat16", "float16", "float64")
_BYTES = one_of(1, 64, 200, 4096, None)
_SECONDS = one_of(60, 120.5, 3600)
_SAVE, _LOAD, _SOURCE = uc.SaveOptions, uc.LoadOptions, uc.SourceOptions
_CONVERT, _MANAGER = uc.ConvertOptions, uc.ManagerOptions
_FLAG = one_of(False, True)


def _source(random: Random, around: Surroundings) -> uc.SourceOptions:
    return valid_options(uc.SourceOptions, random, around, share=0.15)


def _path(name: str) -> Draw:
    return lambda _, around: f"{around.folder}/{name}"


def _checkpoint(_: Random, around: Surroundings) -> str:
    return around.checkpoint


STRATEGIES: Mapping[type[BaseOptions], Mapping[str, Draw]] = {
    _SAVE: {
        "model_dtype": _DTYPE,
        "parts": _parts,
        "omit": _omitted,
        "max_file_bytes": _BYTES,
        "check_replicas": literal(_SAVE, "check_replicas"),
        "fsync": one_of(False, False, False, True),
        "if_exists": literal(_SAVE, "if_exists"),
        "timeout_seconds": _SECONDS,
        "write_alignment": one_of(None, 0, 1, 7, 4096, 1 << 20),
        "compression": literal(_SAVE, "compression"),
        "host_bytes": one_of(None, 0, 100, 1 << 20),
        "node_copies": one_of(1, 1, 2, 3),
    },
    _LOAD: {
        "parts": _parts,
        "source": _source,
        "verify": literal(_LOAD, "verify"),
        "cast": _FLAG,
        "hyperparameters": literal(_LOAD, "hyperparameters"),
        "max_over_read": one_of(1, 1.0, 1.5, 100.0),
        "share_reads": literal(_LOAD, "share_reads"),
        "data_dims": one_of(None, ("dp",), ("tp", "dp"), ()),
        "timeout_seconds": _SECONDS,
    },
    _SOURCE: {
        "format": one_of(None, "unified"),
        "config": one_of(None),  # read by other formats
        "names": literal(_SOURCE, "names"),
        "optimizer_order": one_of(None, (("emb", "norm"),)),
        "rename": _rename,
        "layers": literal(_SOURCE, "layers"),
        "layer_dim": one_of(0, 1),
        "conversion_fn": one_of(None, "tests.support.options.strategies:unchanged"),
    },
    _CONVERT: {
        "to": one_of("unified", "unified", *CONVERSIONS),
        "source": _source,
        "parts": _WRITTEN_PARTS,
        "model_dtype": _DTYPE,
        "adapter": lambda random, around: random.choice((*[None] * 9, around.folder + "/adapter")),
        "compression": _mostly("none", literal(_CONVERT, "compression")),
        "compare": _FLAG,
        "max_file_bytes": _BYTES,
        "if_exists": literal(_CONVERT, "if_exists"),
        "fsync": one_of(False, False, False, True),
        "timeout_seconds": _SECONDS,
    },
    _MANAGER: {
        "enabled": one_of(True, True, True, True, False),
        "interval_steps": one_of(None, 1, 2, 3),
        "interval_seconds": one_of(None, 1e-6, 1e6),
        "steps": one_of(frozenset(), frozenset({0, 4}), [1, 5]),
        "on_start": _FLAG,
        "on_completion": _FLAG,
        "continuous": _FLAG,
        "on_preemption": _FLAG,
        "save_on_exception": _FLAG,
        "keep_latest": one_of(None, 1, 2, 5),
        "keep_every_steps": one_of(None, 1, 2, 4),
        "keep_every_seconds": one_of(None, 1e-3, 1e9),
        "keep_best": one_of(None, 1, 2),
        "best_metric": one_of(None, "loss", "loss", "absent"),
        "best_mode": literal(_MANAGER, "best_mode"),
        "keep_latest_model_only": one_of(None, 1, 3),
        "keep_every_steps_model_only": one_of(None, 2),
        "trash_directory": one_of(None, "trash", ".old/trash"),
        "asynchronous": _FLAG,
        "lazy": _FLAG,
        "in_flight": literal(_MANAGER, "in_flight"),
        "retries": one_of(0, 1, 3),
        "retry_seconds": one_of(0, 0.0, 0.5),
        "raise_after": one_of(1, 2, 5),
        "notice_seconds": one_of(0.1, 5),
        "margin_steps": one_of(1, 2, 4),
        "local_directory": _path("local"),
        "local_interval_steps": one_of(1, 2),
        "keep_latest_local": one_of(1, 2),
        "load_parameters_path": _checkpoint,
        "load_full_state_path": _checkpoint,
        "load_adapters_path": one_of(None),
        "load_source": _source,
        "step_prefix": one_of("checkpoint-", "", "step_", "run.1-"),
    },
}


def unchanged(parts: Any) -> Any:
    """A conversion function that changes nothing."""
    return parts


def draw_values(
    kind: type[BaseOptions], random: Random, around: Surroundings, *, share: float
) -> dict[str, Any]:
    """Draw values of a random subset of the options, each with probability `share`."""
    return {
        name: draw(random, around)
        for name, draw in STRATEGIES[kind].items()
        if random.random() < share
    }


def refusal_of(kind: type[BaseOptions], values: Mapping[str, Any]) -> str:
    """Return words of the documented error of values that limit each other, or ""."""
    is_set = {name for name, value in values.items() if value}
    if kind in (_SAVE, _CONVERT):
        parts, omit = values.get("parts"), values.get("omit") or ()
        if parts is not None and omit:
            return "expected one of them"
        if kind is _CONVERT and values.get("adapter"):
            parts = ("model",)
        stored = {
            part
            for part in ("master_weights", "optimizer")
            if part not in omit and (parts is None or part in parts)
        }
        return "requires" if values.get("compression", "none") != "none" and not stored else ""
    if kind is _LOAD:
        parts = values.get("parts")
        keeps = values.get("hyperparameters", "checkpoint") == "current"
        return "hyperparameters requires" if keeps and parts and "optimizer" not in parts else ""
    if kind is _SOURCE:
        is_stacked = "layers" in is_set
        return "no effect without" if "layer_dim" in is_set and not is_stacked else ""
    return _refusal_of_manager(values, is_set)


def _refusal_of_manager(values: Mapping[str, Any], is_set: set[str]) -> str:
    paths = is_set & {"load_parameters_path", "load_full_state_path", "load_adapters_path"}
    is_synchronous = values.get("asynchronous") is False
    lacks = "no effect without"
    if len(paths) > 1 and "load_full_state_path" in paths:
        return "not both|goes with"
    if paths and values.get("enabled") is False:
        return lacks
    if ("keep_best" in is_set or values.get("best_mode") == "max") and "best_metric" not in is_set:
        return lacks
    if is_synchronous and ("lazy" in is_set or values.get("in_flight") == "skip"):
        return lacks
    if values.get("retry_seconds", 1.0) not in (0, 1.0) and values.get("retries") == 0:
        return lacks
    if ("local_directory" in is_set) != ("local_interval_steps" in is_set):
        return lacks
    if values.get("keep_latest_local", 1) != 1 and "local_directory" not in is_set:
        return lacks
    return ""


def try_options(
    kind: type[BaseOptions], random: Random, around: Surroundings, *, share: float
) -> BaseOptions | None:
    """Draw options. Return None if they limit each other, after a check of that error."""
    values = draw_values(kind, random, around, share=share)
    expected, options = refusal_of(kind, values), list[BaseOptions]()
    error = error_of(lambda: options.append(kind(**values)))
    refused = error is not None and any(text in str(error) for text in expected.split("|"))
    assert refused == bool(expected), f"{kind.__name__}(**{values}): {error}, not {expected!r}"
    if error is None:
        return options[0]
    assert expected, error
    return None


def valid_options(
    kind: type[BaseOptions], random: Random, around: Surroundings, *, share: float
) -> Any:
    """Draw until the options go together."""
    while True:
        options = try_options(kind, random, around, share=share)
        if options is not None:
            return options
