"""Bodies of requests with declared fields, and the types of texts and token ids that several protocols share.

Every field works or is refused by name. Fields of a protocol that mean nothing here are taken at the values that ask
for nothing; a field that no protocol has is an error. Numbers are numbers and not texts that look like some.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_TEXTS = 2048  # of one request
_MAX_FIELDS = 256  # of an object; more than any has
Neutral = dict[str, tuple[Any, ...]]  # field -> the values at which it is taken, though nothing comes of it
Name = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# Lists end at the first item that is wrong: a list of half a million may have as many.
Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
ManyIds = Annotated[list[Ids], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]


class NotImplementedFieldError(ValueError):
    """A field has a value that asks for what this server has not."""

    def __init__(self, param: str) -> None:
        super().__init__(f"{param!r} is not implemented by this server; leave it out")
        self.param = param


class Body(BaseModel):
    """A request's body: no unknown fields, no values of another type.

    ``neutral`` names fields that are taken at the values that ask for nothing; ``harmless`` those among the model's
    that change no answer at any value.

    Example:
        >>> class Ask(Body):
        ...     neutral: ClassVar[Neutral] = {"best_of": (None, 1)}
        ...     n: int = 1
        >>> Ask.model_validate({"n": 2, "best_of": 1})
        Ask(n=2)
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    neutral: ClassVar[Neutral] = {}
    harmless: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_implemented(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if len(values) > _MAX_FIELDS:
            raise ValueError(f"there are {len(values)} fields, and no object of this request has so many")
        rest = dict(values)
        for name, allowed in cls.neutral.items():
            if name in rest:
                given = rest.pop(name)
                if not any(_is_same(given, value) for value in allowed):
                    raise NotImplementedFieldError(name)
        return rest


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return bool(value == other)
