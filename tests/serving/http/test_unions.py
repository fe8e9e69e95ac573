"""Refusals name fields of the client's body, and no branch of a union."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from hypothesis import given
from hypothesis import strategies as st
from mlsys_serving.http.bodies import Body
from mlsys_serving.http.describe import refused_body
from mlsys_serving.http.unions import without_branches
from pydantic import Field, TypeAdapter, ValidationError, create_model

NAMES = st.sampled_from(["a", "b", "type"])
SCALARS = st.sampled_from(
    [str, int, bool, Annotated[str, Field(min_length=1)], Annotated[int, Field(ge=0)], Literal["x", "y"]]
)


def _union(branches: list[Any]) -> Any:
    first, *rest = branches
    for branch in rest:
        first = first | branch
    return first


def _objects(types: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = st.dictionaries(NAMES, st.tuples(types, st.sampled_from([..., None])), min_size=1)
    return fields.map(lambda each: create_model("OurClass", __base__=Body, **each))


def _tagged(types: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def union(first: Any, second: Any) -> Any:
        one = create_model("OurClass", __base__=Body, type=(Literal["x"], ...), a=(first, ...))
        two = create_model("OurClass", __base__=Body, type=(Literal["y"], ...), b=(second, ...))
        return Annotated[one | two, Field(discriminator="type")]

    return st.builds(union, types, types)


TYPES = st.recursive(
    SCALARS,
    lambda types: st.one_of(
        st.lists(types, min_size=2, max_size=3).map(_union),
        types.map(lambda each: Annotated[list[each], Field(max_length=2)]),
        _objects(types),
        _tagged(types),
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.sampled_from([None, True, 0, -1, "", "x", "z"]),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(NAMES, values),
    max_leaves=8,
)


def _is_of(path: tuple[Any, ...], value: Any, *, may_miss: bool) -> bool:
    for number, part in enumerate(path, 1):
        if may_miss and number == len(path):
            return isinstance(value, dict) and part not in value
        value = value[part]  # raises if there is none
    return True


@given(types=st.dictionaries(st.sampled_from(["p", "q"]), TYPES, min_size=1), values=st.data())
def test_every_refusal_names_what_the_body_has(types: dict[str, Any], values: st.DataObject) -> None:
    model = create_model("Ours", __base__=Body, **{name: (kind, ...) for name, kind in types.items()})
    body = {name: values.draw(VALUES) for name in types}
    try:
        TypeAdapter(model).validate_python(body)
    except ValidationError as error:
        errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        left = without_branches(errors, body)

        assert {each["loc"][1] for each in left} == {each["loc"][1] for each in errors}  # no wrong field is kept back
        for each in left:
            assert _is_of(each["loc"][1:], body, may_miss=each["type"] == "missing")
            assert "OurClass" not in each["msg"]
        info = refused_body(error, body)
        assert info.param is not None
        assert info.param.partition(".")[0] in types


def test_the_branch_is_named_that_the_body_comes_nearest_to() -> None:
    def refusal(kind: Any, value: Any) -> str:
        try:
            TypeAdapter(create_model("Ours", __base__=Body, p=(kind, ...))).validate_python({"p": value})
        except ValidationError as error:
            return refused_body(error, {"p": value}).message
        raise AssertionError

    texts = str | Annotated[list[Annotated[str, Field(min_length=1)] | list[int]], Field(max_length=3)]

    assert refusal(texts, 5) == "p: Input should be a valid string or a valid list"
    assert refusal(texts, ["a", ""]) == "p.1: String should have at least 1 character"
    assert refusal(texts, ["a", [1, "b"]]) == "p.1.1: Input should be a valid integer"
    assert refusal(texts, ["a"] * 4) == "p: List should have at most 3 items after validation, not 4"
