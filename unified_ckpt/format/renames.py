"""Rename rules, from TOML, JSON or Python objects: which stored tensors become which.

A pattern is a glob or a regular expression. In a glob, `{name}` matches text without dots and `*`
matches any text. The names in `to` may refer to the matched text: `{name}`, or `{1}` for the first
`*` or group.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from unified_ckpt.core.keywords import suggestion
from unified_ckpt.errors import FormatError
from unified_ckpt.format.json_text import parse_json

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_STAR = "_star"  # prefix of the regex group names for `*`, before the number
_TOKEN = re.compile(r"\{(\w+)\}|(\*)|(\?)")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Step(_Strict):
    """One operation on a tensor: exactly one field is set. `slice`: (dim, start) or plus stop."""

    permute: tuple[int, ...] | None = None
    transpose: tuple[int, int] | None = None
    reshape: tuple[int, ...] | None = None
    slice: tuple[int, int] | tuple[int, int, int] | None = None
    scale: Annotated[float, Field(allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _check_single_operation(self) -> Step:
        if len(self.model_fields_set) != 1:
            raise ValueError(
                f"got a step with {', '.join(sorted(self.model_fields_set)) or 'no operation'}, "
                "expected exactly one operation"
            )
        if self.scale == 0:
            raise ValueError("got scale 0, expected another number")
        return self


class Over(_Strict):
    """A dim that stands for a number in names: index `k` is the tensor numbered `start + k * step`.

    `over`: the placeholder for that number.
    """

    over: str
    dim: int = 0
    start: Annotated[int, Field(ge=0)] = 0
    step: Annotated[int, Field(ge=1)] = 1


class Split(_Strict):
    """A split along `dim` into the tensors of `to`, with these sizes or equal ones."""

    dim: int = 0
    sizes: tuple[Annotated[int, Field(ge=0)], ...] | None = None


class Target(_Strict):
    """The name of a resulting tensor, and the steps that are applied to it last."""

    name: str
    steps: tuple[Step, ...] = ()


class Rule(_Strict):
    """What happens to the tensors that match.

    Operations apply in this order: `steps` to each tensor; `concat` of the matches of several
    patterns along a dim; `stack` of tensors that differ in a number; `unstack` or `split`; the
    steps of each target.

    `pad`: dims along which the tensor that a load fills may be larger. Without `to`, it applies to
    each matching tensor under its own name.

    `parts`: apply the rule to these parts only. Optimizer state follows the model's parameters
    unless "optimizer" is among them; the pattern then matches "<parameter>/<state>". With `drop`,
    one that also matches "<parameter>", as "*" does, takes it out of its param group.

    `partial`: elements may be unused, or used twice. `optional`: the rule may match nothing.
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
        return [value] if type(value) is int else value  # excludes bool

    @field_validator("to", mode="before")
    @classmethod
    def _targets_as_list(cls, value: object) -> object:
        targets = value if isinstance(value, list | tuple) else [value]
        return [{"name": target} if isinstance(target, str) else target for target in targets]

    @model_validator(mode="after")
    def _check_rule(self) -> Rule:
        patterns = self.match or self.regex
        if bool(self.match) == bool(self.regex):
            raise ValueError("expected either match or regex")
        if self.drop and (self.to or self.pad):
            raise ValueError("got drop together with to or pad, expected one of them")
        if self.pads_only:
            if self.steps or any(
                change is not None for change in (self.concat, self.stack, self.unstack, self.split)
            ):
                raise ValueError(
                    "got pad and another operation, but no to; name the resulting tensor in to"
                )
            return self
        if not self.to and not self.drop:
            raise ValueError("expected to, drop or pad")
        if self.drop:
            return self
        if (len(patterns) > 1) != (self.concat is not None):
            raise ValueError(
                f"got {len(patterns)} pattern(s) and {'no ' if self.concat is None else ''}concat, "
                "expected concat if, and only if, there are several"
            )
        if self.split is not None and (
            len(self.to) < 2 or len(self.split.sizes or self.to) != len(self.to)
        ):
            raise ValueError(
                f"got a split into {len(self.split.sizes or self.to)} tensors "
                f"and {len(self.to)} names in to, expected equal numbers, at least 2"
            )
        if len(self.to) > 1 and self.split is None and not all(target.steps for target in self.to):
            raise ValueError(
                "got several names in to without a split, "
                "expected steps for each that select its elements"
            )
        if self.unstack is not None and (self.split is not None or self.stack is not None):
            raise ValueError("got unstack together with split or stack, expected one of them")
        for target in self.to:
            self._check_placeholders(target.name)
        return self

    @property
    def pads_only(self) -> bool:
        """Whether the rule leaves names and elements unchanged."""
        return bool(self.pad) and not self.to

    @property
    def has_plain_names(self) -> bool:
        """Whether it matches names, without placeholders."""
        return bool(self.match) and not any(map(_TOKEN.search, self.match))

    def _check_placeholders(self, name: str) -> None:
        used = set(_PLACEHOLDER.findall(name))
        if self.has_plain_names and not used and self.unstack is None and self.stack is None:
            return
        available = set.intersection(*(_capture_names(pattern) for pattern in self.patterns()))
        if self.stack is not None:
            if self.stack.over not in available:
                raise ValueError(
                    f"stack over {self.stack.over!r}: "
                    f"expected {{{self.stack.over}}} in every pattern"
                )
            available = available - {self.stack.over}
        if self.unstack is not None:
            if self.unstack.over in available:
                raise ValueError(
                    f"unstack over {self.unstack.over!r}: the pattern has it too; "
                    "choose another name"
                )
            if self.unstack.over not in used:
                raise ValueError(
                    f"unstack over {self.unstack.over!r}: "
                    f"expected {{{self.unstack.over}}} in {name!r}"
                )
            available = available | {self.unstack.over}
        if used - available:
            raise ValueError(
                f"{name!r}: got unknown placeholder {', '.join(sorted(used - available))}, "
                f"expected {', '.join(sorted(available)) or 'none'}"
            )

    def patterns(self) -> list[re.Pattern[str]]:
        """Return the compiled patterns."""
        globs = [_compile("".join(_translate_glob(pattern)), pattern) for pattern in self.match]
        return globs or [_compile(pattern, pattern) for pattern in self.regex]


class Renames(_Strict):
    """All rules of a source; the first that matches a tensor applies.

    `unmatched`: what happens to tensors that no rule matches.
    """

    rules: tuple[Rule, ...] = ()
    unmatched: Literal["keep", "drop", "error"] = "keep"


def parse_renames(body: bytes, *, file: str) -> Renames:
    """Parse a rules file: JSON if its name ends in .json, else TOML.

    Raises FormatError as `check_renames` does.
    """
    try:
        content = (
            parse_json(body, file=file) if file.endswith(".json") else tomllib.loads(body.decode())
        )
    except ValueError as error:
        raise FormatError(f"{file}: not valid TOML: {error}") from error
    return check_renames(content, file=file)


def check_renames(content: object, *, file: str) -> Renames:
    """Validate rules given as Python objects.

    Raises FormatError, naming `file`, the rule and the key that is wrong.
    """
    try:
        return Renames.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(step) for step in first["loc"])
        text = first["msg"].removeprefix("Value error, ").replace("valid tuple", "list")
        if first["type"] == "extra_forbidden":
            known_keys = {name for kind in _Strict.__subclasses__() for name in kind.model_fields}
            text = f"unknown key{suggestion(str(first['loc'][-1]), known_keys)}"
        raise FormatError(f"{file}: {path or 'rules'}: {text}") from error


def captures(match: re.Match[str]) -> dict[str, str]:
    """Return the matched text of each placeholder, by name and by number from 1."""
    named = {name.removeprefix(_STAR): value or "" for name, value in match.groupdict().items()}
    numbered = {str(number): value or "" for number, value in enumerate(match.groups(), 1)}
    return named if any(name.startswith(_STAR) for name in match.groupdict()) else numbered | named


def substitute(name: str, values: Mapping[str, str]) -> str:
    """Replace placeholders in a target's name; those without a value stay."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), name)


def _capture_names(pattern: re.Pattern[str]) -> set[str]:
    named = {name.removeprefix(_STAR) for name in pattern.groupindex}
    return named | (
        set()
        if any(name.startswith(_STAR) for name in pattern.groupindex)
        else {str(number) for number in range(1, pattern.groups + 1)}
    )


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
        raise ValueError(f"{source!r}: not a valid pattern: {error}") from error
