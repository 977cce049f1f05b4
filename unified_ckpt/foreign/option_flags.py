"""The flags of a configuration: which are about checkpoints, and their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import TypeVar

from unified_ckpt.core.keywords import suggestion
from unified_ckpt.errors import FormatError
from unified_ckpt.options import LoadOptions, ManagerOptions, SaveOptions, SourceOptions

Options = TypeVar("Options", ManagerOptions, SaveOptions, LoadOptions, SourceOptions)

_WORDS = ("checkpoint", "ckpt", "orbax", "restore")  # a flag with one of them is about checkpoints
_SIMILARITY = 0.85  # of a misspelt name; flags of models are less similar to those of checkpoints
_ON, _OFF = ("true", "1"), ("false", "0")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a flag has no meaning here, and the values that request nothing beside the empty ones.

    A flag that is True by default requests something if it is off.
    """

    reason: str
    defaults: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class KnownFlags:
    """The flags of a library that are about checkpoints.

    `accepted`: those with a meaning here. `always`: what they request holds for every checkpoint.
    `refused`: those without a meaning. `synonyms`: other name -> name in `accepted`. `earlier`:
    the same of earlier versions, which request nothing if they are off.
    """

    accepted: frozenset[str]
    always: frozenset[str]
    refused: Mapping[str, Refusal]
    synonyms: Mapping[str, str]
    earlier: Mapping[str, str]

    def select(self, flags: Mapping[str, object]) -> dict[str, object]:
        """Return the flags with a meaning, under their names in `accepted`; None for an empty one.

        Raises FormatError for a flag that requests what is refused, is misspelt, or is set twice.
        """
        values: dict[str, object] = {}
        for name, raw_value in flags.items():
            value, known_name = _plain(raw_value), self.synonyms.get(name, name)
            if name in self.earlier:
                if _is_empty(value):
                    continue
                known_name = self.earlier[name]
            if name in self.refused:
                defaults = {str(each).lower() for each in self.refused[name].defaults}
                accepted = _ON if "true" in defaults else (*_OFF, *defaults)
                if value is not None and str(value).lower() not in accepted:
                    reason = self.refused[name].reason
                    raise FormatError(f"{name}={value!r}: not supported: {reason}; remove {name}")
            elif known_name in self.accepted:
                if known_name in values and values[known_name] != value:
                    raise FormatError(f"{name}: got two values, also as {known_name}; remove one")
                values[known_name] = value
            elif name not in self.always:
                self._check_other(name, value)
        return values

    def _check_other(self, name: str, value: object) -> None:
        """Raise FormatError if a flag of the trainer is a checkpoint's, or has one inside."""
        is_about_checkpoints = any(word in name.lower() for word in _WORDS)
        if is_about_checkpoints or get_close_matches(
            name, self._names(), n=1, cutoff=_SIMILARITY
        ):  # it is misspelt
            raise FormatError(
                f"{name}: got an unknown checkpoint flag, expected one of "
                f"{', '.join(sorted(self.accepted))}{suggestion(name, self._names())}"
            )
        if isinstance(value, Mapping):
            names = {
                known
                for known in self._names() | self.refused.keys()
                if any(word in known for word in (*_WORDS, "load_"))
            }
            for inner, inner_value in value.items():
                if inner in names and not _is_empty(_plain(inner_value)):
                    raise FormatError(
                        f"{name}.{inner}: got a checkpoint flag inside {name}, expected none; "
                        f"pass {inner} at the top level"
                    )

    def _names(self) -> frozenset[str]:
        return self.accepted | self.synonyms.keys() | self.earlier.keys()


def _plain(value: object) -> object:
    """Return a value as YAML or an enum writes it; None for an empty one."""
    value = value.value if isinstance(value, Enum) else value
    return None if value in ("", "None", "none", "null") else value


def _is_empty(value: object) -> bool:
    return value is None or str(value).lower() in _OFF


def is_on(values: Mapping[str, object], name: str) -> bool:
    """Return whether a flag is set and true. Raises FormatError for what is neither."""
    text = str(values.get(name)).lower()
    if values.get(name) is not None and text not in (*_ON, *_OFF):
        raise FormatError(f"{name}: got {values[name]!r}, expected True or False")
    return text in _ON


def number(values: Mapping[str, object], name: str) -> int:
    """Return a flag's number; 0 if it is not set. Raises FormatError for what is none."""
    value = values.get(name)
    digits = str(0 if value is None else value).replace("_", "")
    if isinstance(value, bool) or not digits.isdecimal():
        raise FormatError(f"{name}: got {value!r}, expected a number that is not negative")
    return int(digits)


def translated(values: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    """Return our name -> value of each flag in `names`."""
    return {names[name]: value for name, value in values.items() if name in names}


def changed_rules(options: ManagerOptions, changes: Mapping[str, object]) -> ManagerOptions:
    """Return changed options, validated as a whole. What concerns background saves is dropped if
    they are turned off.
    """
    synchronous = options.model_copy(update={"lazy": False, "in_flight": "wait"})
    result = changed(synchronous, changes)
    return changed(options, changes) if result.asynchronous else result


def changed(options: Options, changes: Mapping[str, object]) -> Options:
    """Return changed options, validated as a whole."""
    return type(options)(**{**options.model_dump(exclude_unset=True), **changes})
