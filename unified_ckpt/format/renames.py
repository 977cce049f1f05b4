"""Rename rules in a small TOML or JSON file: which stored tensors become which. Patterns and steps;
knows no shapes.

A pattern is a glob in which `{name}` stands for text without dots and `*` for any text, or a
regular expression. What they stand for may be named in `to`: `{name}`, or `{1}` for the first `*`
or group.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from unified_ckpt.errors import FormatError
from unified_ckpt.format.json_text import parse_json

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_STAR = "_star"  # the name of a group that a `*` of a glob is, before its number
_TOKEN = re.compile(r"\{(\w+)\}|(\*)|(\?)")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Step(_Strict):
    """One change of a tensor: exactly one of these. `slice`: (dim, first row, row after the last,
    or none of it).
    """

    permute: tuple[int, ...] | None = None
    transpose: tuple[int, int] | None = None
    reshape: tuple[int, ...] | None = None
    slice: tuple[int, int] | tuple[int, int, int] | None = None
    scale: Annotated[float, Field(allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _check_one_change(self) -> Step:
        if len(self.model_fields_set) != 1:
            raise ValueError(
                f"a step has {', '.join(sorted(self.model_fields_set)) or 'nothing'}; needed exactly one change"
            )
        if self.scale == 0:
            raise ValueError("scale is 0; needed another number")
        return self


class Over(_Strict):
    """A dim that stands for a number in names: row `k` is the tensor with the number `start + k *
    step`.
    """

    over: str
    dim: int = 0
    start: Annotated[int, Field(ge=0)] = 0
    step: Annotated[int, Field(ge=1)] = 1


class Split(_Strict):
    """Along `dim`, in order of `to`: of these sizes, or of equal ones."""

    dim: int = 0
    sizes: tuple[Annotated[int, Field(ge=0)], ...] | None = None


class Target(_Strict):
    """A tensor that is made, and what is done to it last."""

    name: str
    steps: tuple[Step, ...] = ()


class Rule(_Strict):
    """What becomes of the tensors that match, in this order: `steps` of each; `concat` along a dim
    of what several patterns match; `stack` of those that differ in a number; `unstack` or `split`;
    the steps of each target. `pad`: dims along which the tensor that a load fills may be larger;
    without `to`, for each tensor that matches, under its own name.

    `parts`: only in these; optimizer state follows the parameters of the model unless "optimizer"
    is one of them, then the pattern is for "<parameter>/<state>". `partial`: elements may be left
    out, or used twice. `optional`: it may match nothing.
    """

    match: tuple[str, ...] = ()
    regex: tuple[str, ...] = ()
    to: tuple[Target, ...] = ()
    drop: bool = False
    parts: tuple[str, ...] | None = None
    steps: tuple[Step, ...] = ()
    concat: int | None = None
    stack: Over | None = None
    unstack: Over | None = None
    split: Split | None = None
    pad: tuple[int, ...] = ()
    partial: bool = False
    optional: bool = False

    @field_validator("match", "regex", "parts", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("pad", mode="before")
    @classmethod
    def _dims_as_list(cls, value: object) -> object:
        return [value] if type(value) is int else value  # not of True: that names no dim

    @field_validator("to", mode="before")
    @classmethod
    def _targets_as_list(cls, value: object) -> object:
        targets = value if isinstance(value, list | tuple) else [value]
        return [{"name": target} if isinstance(target, str) else target for target in targets]

    @model_validator(mode="after")
    def _check_rule(self) -> Rule:
        patterns = self.match or self.regex
        if bool(self.match) == bool(self.regex):
            raise ValueError("needed either match or regex")
        if self.drop and (self.to or self.pad):
            raise ValueError("drop goes with neither to nor pad; needed one of them")
        if self.pads_only:
            if self.steps or any(
                change is not None for change in (self.concat, self.stack, self.unstack, self.split)
            ):
                raise ValueError(
                    "pad without to goes with no other change; needed the name of what is made in to"
                )
            return self
        if not self.to and not self.drop:
            raise ValueError("needed either to or drop, or pad")
        if self.drop:
            return self
        if (len(patterns) > 1) != (self.concat is not None):
            raise ValueError(
                f"{len(patterns)} pattern(s) and {'no ' if self.concat is None else ''}concat; needed concat with several"
            )
        if self.split is not None and (
            len(self.to) < 2 or len(self.split.sizes or self.to) != len(self.to)
        ):
            raise ValueError(
                f"split makes {len(self.split.sizes or self.to)} tensors, to names {len(self.to)}; needed as many, at least 2"
            )
        if len(self.to) > 1 and self.split is None and not all(target.steps for target in self.to):
            raise ValueError(
                "several names in to, and no split; needed steps for each, that cut its part out"
            )
        if self.unstack is not None and (self.split is not None or self.stack is not None):
            raise ValueError("unstack goes with neither split nor stack; needed one of them")
        for target in self.to:
            self._check_placeholders(target.name)
        return self

    @property
    def pads_only(self) -> bool:
        """Whether its tensors keep their names and their elements."""
        return bool(self.pad) and not self.to

    def _check_placeholders(self, name: str) -> None:
        used = set(_PLACEHOLDER.findall(name))
        available = set.intersection(*(_capture_names(pattern) for pattern in self.patterns()))
        if self.stack is not None:
            if self.stack.over not in available:
                raise ValueError(
                    f"stack over {self.stack.over!r}: the pattern does not have it; needed {{{self.stack.over}}} there"
                )
            available = available - {self.stack.over}
        if self.unstack is not None:
            if self.unstack.over in available:
                raise ValueError(
                    f"unstack over {self.unstack.over!r}: the pattern has it too; needed another name"
                )
            if self.unstack.over not in used:
                raise ValueError(
                    f"unstack over {self.unstack.over!r}: {name!r} does not have it; needed {{{self.unstack.over}}} there"
                )
            available = available | {self.unstack.over}
        if used - available:
            raise ValueError(
                f"{name!r} asks for {', '.join(sorted(used - available))}; known are {', '.join(sorted(available)) or 'none'}"
            )

    def patterns(self) -> list[re.Pattern[str]]:
        return [_compile_glob(pattern) for pattern in self.match] or [
            _compile(pattern, pattern) for pattern in self.regex
        ]


class Renames(_Strict):
    """All rules of a source. The first rule that matches a tensor has it; `unmatched`: what becomes
    of those that none does.
    """

    rules: tuple[Rule, ...] = ()
    unmatched: Literal["keep", "drop", "error"] = "keep"


def parse_renames(body: bytes, *, file: str) -> Renames:
    """The rules of a file, whose name says whether it is TOML or JSON. FormatError as in
    `check_renames`.
    """
    try:
        content = (
            parse_json(body, file=file) if file.endswith(".json") else tomllib.loads(body.decode())
        )
    except ValueError as error:
        raise FormatError(f"{file}: is no TOML: {error}") from error
    return check_renames(content, file=file)


def check_renames(content: object, *, file: str) -> Renames:
    """The rules of the tables of a file, or of equal Python objects. FormatError naming the rule
    and the key that is wrong.
    """
    try:
        return Renames.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(step) for step in first["loc"])
        raise FormatError(
            f"{file}: {path or 'rules'}: {first['msg'].removeprefix('Value error, ')}"
        ) from error


def captures(match: re.Match[str]) -> dict[str, str]:
    """What a pattern stands for in a name: by name, and by number from 1."""
    named = {name.removeprefix(_STAR): value or "" for name, value in match.groupdict().items()}
    numbered = {str(number): value or "" for number, value in enumerate(match.groups(), 1)}
    return named if any(name.startswith(_STAR) for name in match.groupdict()) else numbered | named


def substitute(name: str, values: Mapping[str, str]) -> str:
    """A target's name with what its holes stand for; a hole that is not told stays."""
    return _PLACEHOLDER.sub(lambda hole: values.get(hole[1], hole[0]), name)


def _capture_names(pattern: re.Pattern[str]) -> set[str]:
    named = {name.removeprefix(_STAR) for name in pattern.groupindex}
    return named | (
        set()
        if any(name.startswith(_STAR) for name in pattern.groupindex)
        else {str(number) for number in range(1, pattern.groups + 1)}
    )


def _compile_glob(text: str) -> re.Pattern[str]:
    return _compile("".join(_translate_glob(text)), text)


def _translate_glob(text: str) -> Iterator[str]:
    last, stars, used_names = 0, 0, set[str]()
    for token in _TOKEN.finditer(text):
        yield re.escape(text[last : token.start()])
        last = token.end()
        name, star, _ = token.groups()
        if name is not None:
            yield f"(?P={name})" if name in used_names else f"(?P<{name}>[^.]+)"
            used_names.add(name)
        elif star:
            stars += 1
            yield f"(?P<{_STAR}{stars}>.*)"
        else:
            yield "."
    yield re.escape(text[last:])


def _compile(pattern: str, source: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{source!r} is no pattern: {error}") from error
