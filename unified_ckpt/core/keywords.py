"""Keyword arguments that a class declares: they are checked by name, and `help` shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar, cast, is_typeddict

Function = TypeVar("Function", bound=Callable[..., object])


def suggestion(word: str, words: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the word that is most similar, or an empty string."""
    close = get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def show_keywords(declared: type[Any], **defaults: object) -> Callable[[Function], Function]:
    """Decorate a function with `**arguments` so that its signature lists what `declared` declares.

    `declared`: a class whose annotations are the keywords. The default that is shown is None for
    keywords without one in `defaults`. With a TypedDict, other keywords raise TypeError at the
    call, as in Python; other classes check their keywords themselves.
    """

    def decorate(function: Function) -> Function:
        shown = signature(function)
        first = [p for p in shown.parameters.values() if p.kind != Parameter.VAR_KEYWORD]
        parameters = [*first, *keyword_parameters(declared, defaults)]
        names = [parameter.name for parameter in parameters]

        @wraps(function)
        def checked(*values: object, **arguments: object) -> object:
            unknown = sorted(arguments.keys() - names) if is_typeddict(declared) else ()
            if unknown:
                raise TypeError(
                    f"{function.__qualname__}() got an unexpected keyword argument "
                    f"{unknown[0]!r}{suggestion(unknown[0], names)}"
                )
            return function(*values, **arguments)

        checked.__signature__ = shown.replace(parameters=parameters)  # type: ignore[attr-defined]
        return cast("Function", checked)

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
