"""Arguments of public calls: types that several of them share, and keywords that a class declares,
which are checked by name and shown by `help`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, signature
from typing import Any, TypeVar, cast, get_args, get_type_hints, is_typeddict

from unified_ckpt.errors import FormatError, OptionError

Options = TypeVar("Options")
Function = TypeVar("Function", bound=Callable[..., object])


_FUNCTIONS = ("attach", "after_commit", "progress")
_FLAGS = ("strict", "lazy", "force")


def suggestion(word: str, words: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the word that is most similar, or an empty string."""
    close = get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def option_error_text(kind: str, names: Iterable[str], error: Mapping[str, Any]) -> str:
    """Return what is wrong with one option of a class, and which one was probably meant.

    `kind`: the name of the class; `names`: of its options; `error`: pydantic's.
    """
    value = error["input"]
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        hint = suggestion(name, names) or f"; it has {', '.join(names)}"
        return f"{kind} has no option {name!r}{hint}"
    if not name:  # options that exclude each other
        return f"{kind}: {error['msg'].removeprefix('Value error, ')}"
    if error["type"] == "literal_error":
        expected = error["ctx"]["expected"]
        hint = suggestion(str(value), re.findall(r"'([^']*)'", expected))
        return f"{kind}({name}): got {value!r}, expected {expected}{hint}"
    if error["type"] == "string_too_short":
        return f"{kind}({name}): got an empty path, expected a path; omit it for the default"
    if error["type"] == "too_short":
        return f"{kind}({name}): got {value!r}, expected at least one; omit it for the default"
    message = error["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    return f"{kind}({name}): got {value!r}, but {message}"


def checked_path(path: object, name: str = "path") -> str:
    """Return a path that a caller passed. TypeError for another type, OptionError for no path.

    An empty path would be the working directory, or the root of a Checkpointer.
    """
    text = as_text(path)
    if not isinstance(text, str):
        raise TypeError(f"{name}: got {type(text).__name__}, expected a str or an os.PathLike")
    if not text:
        raise OptionError(f"{name}: got an empty path; pass '.' for the current folder")
    if "\0" in text:
        raise OptionError(f"{name}: got {text!r}, expected a path without null characters")
    return text


def checked_paths(paths: object, name: str = "path") -> list[str]:
    """Return the paths of a call that takes one or several, checked like `checked_path`."""
    if isinstance(as_text(paths), str | bytes) or not isinstance(paths, Iterable):
        return [checked_path(paths, name)]
    return [checked_path(path, name) for path in paths]


def as_text(path: object) -> object:
    """Return an os.PathLike as text, and any other value unchanged."""
    to_text = getattr(path, "__fspath__", None)
    return path if to_text is None or isinstance(path, type) else to_text()


def check_function(function: object, name: str) -> None:
    """Raise TypeError unless the argument is None or can be called."""
    if function is not None and not callable(function):
        raise TypeError(f"{name}: got {type(function).__name__}, expected a function")


def check_flag(value: object, name: str) -> None:
    """Raise TypeError unless the argument is True or False: any text would be true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, expected True or False")


def check_type(value: object, kind: type[object], name: str) -> None:
    """Raise TypeError unless the argument is None or an instance of `kind`."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a {kind.__name__}")


def check_options(options: object, kind: type[object], name: str = "options") -> None:
    """Raise TypeError unless the options are None or an instance of `kind`."""
    if options is not None and not isinstance(options, kind):
        got = type(options).__name__
        raise TypeError(f"{name}: got {got}, expected {kind.__name__}; pass {kind.__name__}(...)")


def options_or_default(
    options: Options | None, kind: type[Options], name: str = "options"
) -> Options:
    """Return the options of a call, by default those of `kind`. TypeError for another class."""
    check_options(options, kind, name)
    return kind() if options is None else options


def show_keywords(declared: type[Any], **defaults: object) -> Callable[[Function], Function]:
    """Decorate a function with `**arguments` so that its signature lists what `declared` declares.

    `declared`: a class whose annotations are the keywords. The default that is shown is None for
    keywords without one in `defaults`. With a TypedDict, other keywords and an `options` of another
    class raise TypeError at the call, as in Python; other classes check their keywords themselves.
    """

    is_checked = is_typeddict(declared)

    @cache
    def options_class() -> type[Any]:
        return next(iter(get_args(get_type_hints(declared).get("options"))), type(None))

    def decorate(function: Function) -> Function:
        shown = signature(function)
        first = [p for p in shown.parameters.values() if p.kind != Parameter.VAR_KEYWORD]
        parameters = [*first, *keyword_parameters(declared, defaults)]
        names = [parameter.name for parameter in parameters]

        @wraps(function)
        def checked(*values: object, **arguments: object) -> object:
            unknown = sorted(arguments.keys() - names) if is_checked else ()
            if unknown:
                kind, hint = options_class(), suggestion(unknown[0], names)
                if unknown[0] in getattr(kind, "model_fields", ()):
                    hint = f"; pass options={kind.__name__}({unknown[0]}=...)"
                raise TypeError(
                    f"{function.__qualname__}() got an unexpected keyword argument "
                    f"{unknown[0]!r}{hint}"
                )
            if is_checked and arguments.get("options") is not None:
                check_options(arguments["options"], options_class())
            for name in arguments.keys() & _FUNCTIONS:
                check_function(arguments[name], name)
            for name in arguments.keys() & _FLAGS:
                check_flag(arguments[name], name)
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


def check_step(step: object) -> None:
    """Raise FormatError for a step that a manifest cannot store."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**63:
        raise FormatError(f"step: got {step!r}, expected an int of 0 or more, below 2**63")
