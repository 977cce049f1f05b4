"""The base of all option classes: values are checked when they are made, never later."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Signature, cleandoc
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from unified_ckpt.core.keywords import keyword_parameters, option_error_text
from unified_ckpt.errors import OptionError


class BaseOptions(BaseModel):
    """Options as a frozen value. Raises OptionError for an unknown, wrong or ineffective one.

    `_REQUIRES`: name of an option -> options of which one must be set, or it has no effect.
    `_REMOVED`: name of a removed option -> what to do instead.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True
    )
    _REQUIRES: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    _REMOVED: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **values: Any) -> None:
        for name in self._REMOVED.keys() & values.keys():
            raise OptionError(
                f"{type(self).__name__} has no option {name!r}: {self._REMOVED[name]}"
            )
        try:
            super().__init__(**values)
        except ValidationError as error:
            errors = error.errors(include_url=False)
            names = type(self).model_fields
            texts = [option_error_text(type(self).__name__, names, each) for each in errors]
            raise OptionError("; ".join(texts)) from None
        self._check_required()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        """Let `help` show the fields with their types as in the source, and their docstrings."""
        texts = [f"`{name}`: {field.description}" for name, field in cls.model_fields.items()]
        cls.__doc__ = "\n\n".join([cleandoc(cls.__doc__ or ""), *texts])
        defaults = {name: field.default for name, field in cls.model_fields.items()}
        parameters = keyword_parameters(cls, defaults)
        cls.__signature__ = Signature([each for each in parameters if each.name in defaults])

    def _check_required(self) -> None:
        """Raise OptionError for an option that has no effect beside the others, unless it is off or
        at its default.
        """
        kind = type(self).__name__
        for name, required in self._REQUIRES.items():
            value = getattr(self, name)
            is_asked = value and value != type(self).model_fields[name].default
            if is_asked and not any(getattr(self, other) for other in required):
                needed = " or ".join(f"{kind}({other}=...)" for other in required)
                raise OptionError(f"{kind}({name}) has no effect without {needed}; set it too")
