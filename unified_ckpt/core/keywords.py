"""Keyword arguments that a class declares: they are checked by name, and `help` shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def check_argument_names(
    arguments: Mapping[str, object], valid: type[Any], *, function: str
) -> None:
    """TypeError for a keyword that the TypedDict `valid` lacks, as Python raises it."""
    unknown = sorted(arguments.keys() - valid.__optional_keys__)
    if unknown:
        hint = suggestion(unknown[0], valid.__optional_keys__)
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown[0]!r}{hint}")


def suggestion(word: str, words: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the word that is most similar, or an empty string."""
    close = get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def show_keywords(declared: type[Any], **defaults: object) -> Callable[[Function], Function]:
    """Decorate a function with `**arguments` so that its signature lists what `declared` declares.

    `declared`: a class whose annotations are the keywords, such as a TypedDict. The default that is
    shown is None for keywords without one in `defaults`.
    """

    def decorate(function: Function) -> Function:
        shown = signature(function)
        first = [p for p in shown.parameters.values() if p.kind != Parameter.VAR_KEYWORD]
        parameters = [*first, *keyword_parameters(declared, defaults)]
        function.__signature__ = shown.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate


def keyword_parameters(declared: type[Any], defaults: Mapping[str, object]) -> list[Parameter]:
    """Return the annotations of a class as keyword-only parameters, types as in the source."""
    return [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=defaults.get(name),
            annotation=getattr(annotation, "__forward_arg__", annotation),
        )
        for name, annotation in declared.__annotations__.items()
    ]
