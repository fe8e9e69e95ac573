"""Structs declared once, in C++: what Python writes C++ reads and the other way round; what does not fit is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlsys_core.errors import KernelUnavailableError
from mlsys_core.native import bind, expect, load_kernel, new

NUMBERS = {
    **{f"int{8 * size}_t": st.integers(-(2 ** (8 * size - 1)), 2 ** (8 * size - 1) - 1) for size in (1, 2, 4, 8)},
    **{f"uint{8 * size}_t": st.integers(0, 2 ** (8 * size) - 1) for size in (1, 2, 4, 8)},
    "float": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "double": st.floats(allow_nan=False, allow_infinity=False),
    "const void*": st.one_of(st.none(), st.integers(1, 2**47)),
    "Colour": st.sampled_from(["red", "green", "blue"]),
}


@dataclass(frozen=True)
class Field:
    """One field: its C++ type (the number of an earlier struct: that one), its size if it is an array, a value."""

    kind: str | int
    count: int
    value: Any


@st.composite
def fields(draw: st.DrawFn, structs: list[list[Field]]) -> Field:
    if structs and draw(st.integers(0, 4)) == 0:
        number = draw(st.integers(0, len(structs) - 1))
        return Field(number, 0, [field.value for field in structs[number]])
    kind = draw(st.sampled_from(sorted(NUMBERS)))
    count = draw(st.integers(0, 3)) if kind not in ("Colour", "const void*") else 0
    one = NUMBERS[kind]
    return Field(kind, count, draw(st.lists(one, min_size=count, max_size=count) if count else one))


@st.composite
def programs(draw: st.DrawFn) -> list[list[Field]]:
    structs: list[list[Field]] = []
    for _ in range(draw(st.integers(1, 12))):
        structs.append(draw(st.lists(fields(list(structs)), min_size=1, max_size=9)))
    return structs


def places(structs: list[list[Field]], number: int, prefix: str) -> list[tuple[str, str, Any]]:
    """Every number of a struct: its place in C++, its type, its value."""
    found = []
    for index, field in enumerate(structs[number]):
        place = f"{prefix}f{index}"
        if isinstance(field.kind, int):
            found += places(structs, field.kind, f"{place}.")
        elif field.count:
            found += [(f"{place}[{i}]", field.kind, value) for i, value in enumerate(field.value)]
        else:
            found.append((place, field.kind, field.value))
    return found


def literal(kind: str, value: Any) -> str:
    """A constant of C++, of any size."""
    if kind == "Colour":
        return str(value).upper()
    return f"({kind}){value.hex() if isinstance(value, float) else f'{(value or 0) % 2**64}ull'}"


def source_of(structs: list[list[Field]]) -> str:
    lines = ["#include <mlsys/layout.h>", "MLSYS_ENUM(Colour, RED, GREEN, BLUE);"]
    for number, own in enumerate(structs):
        lines.append(f"struct S{number} {{")
        for index, field in enumerate(own):
            kind = f"S{field.kind}" if isinstance(field.kind, int) else field.kind
            lines.append(f"    {kind} f{index}{f'[{field.count}]' if field.count else ''};")
        lines.append(f"}};\nMLSYS_STRUCT(S{number}, {', '.join(f'f{index}' for index in range(len(own)))});")
        found = places(structs, number, "s->")
        same = " && ".join(f"{place} == {literal(kind, value)}" for place, kind, value in found)
        lines.append(f'extern "C" int32_t reads{number}(const S{number}* s) {{ return {same}; }}')
        sets = " ".join(f"{place} = {literal(kind, value)};" for place, kind, value in found)
        lines.append(f'extern "C" void writes{number}(S{number}* s) {{ {sets} }}')
        lines.append(f"MLSYS_FUNCTIONS(reads{number}, writes{number});")
    return "\n".join(lines)


def written(structs: list[list[Field]], number: int) -> dict[str, Any]:
    """Arguments of :func:`new`."""
    return {
        f"f{index}": written(structs, field.kind) if isinstance(field.kind, int) else field.value
        for index, field in enumerate(structs[number])
    }


def read(struct: Any, structs: list[list[Field]], number: int, colours: dict[int, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for index, field in enumerate(structs[number]):
        value = getattr(struct, f"f{index}")
        if isinstance(field.kind, int):
            value = read(value, structs, field.kind, colours)
        elif field.kind == "Colour":
            value = colours[value]
        found[f"f{index}"] = list(value) if field.count else value
    return found


@given(structs=programs())
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
def test_python_and_cpp_see_the_same_fields(tmp_path_factory: pytest.TempPathFactory, structs: list[list[Field]]):
    folder = tmp_path_factory.mktemp("structs")
    (folder / "structs.cpp").write_text(source_of(structs))
    library = bind(load_kernel(folder / "structs.cpp", cache_dir=folder, flags=("-O0",)))
    colours = {value: name for name, value in library.enums["Colour"].items()}
    for number in range(len(structs)):
        struct = library.structs[f"S{number}"]
        values = written(structs, number)
        assert getattr(library, f"reads{number}")(new(struct, **values))
        made = struct()
        getattr(library, f"writes{number}")(made)
        assert read(made, structs, number, colours) == values


SOURCE = """#include <mlsys/layout.h>
constexpr int PANEL = 16;
MLSYS_CONSTANTS(PANEL);
MLSYS_ENUM(Kind, PLAIN, RICH);
struct Inner { int32_t first; int32_t second; };
MLSYS_STRUCT(Inner, first, second);
struct Outer { Kind kind; int64_t sizes[3]; Inner inner; const Inner* next; };
MLSYS_STRUCT(Outer, FIELDS);
"""
FIELDS = "kind, sizes, inner, next"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("library")
    (folder / "source.cpp").write_text(SOURCE.replace("FIELDS", FIELDS))
    return bind(load_kernel(folder / "source.cpp", cache_dir=folder))


OUTER = {"kind": "rich", "sizes": (1, 2), "inner": {"first": 3, "second": 4}, "next": None}


def test_arrays_are_filled_up_and_none_is_zeros(library: Any):
    made = new(library.structs["Outer"], **OUTER)
    assert (made.kind, list(made.sizes), made.inner.second) == (1, [1, 2, 0], 4)
    assert new(library.structs["Outer"], **{**OUTER, "inner": None}).inner.second == 0


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"more": 1}, TypeError, "unknown fields ['more']"),
        ({"next": ...}, TypeError, "missing fields ['next']"),
        ({"inner": {"first": 3}}, TypeError, "Inner: missing fields ['second']"),
        ({"kind": "poor"}, ValueError, "the enumerators are plain, rich; not 'poor'"),
    ],
)
def test_undeclared_names_are_refused(library: Any, change: dict[str, Any], error: type[Exception], words: str):
    fields = {name: value for name, value in {**OUTER, **change}.items() if value is not ...}
    with pytest.raises(error) as caught:
        new(library.structs["Outer"], **fields)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ("kind, sizes, inner", "only 3 names|4"),
        ("kind, inner, sizes, next", "in another order"),
        ("kind, sizes, inner, more", "more"),
    ],
)
def test_a_field_forgotten_moved_or_misspelt_does_not_compile(tmp_path: Path, listed: str, words: str):
    (tmp_path / "source.cpp").write_text(SOURCE.replace("FIELDS", listed))
    with pytest.raises(KernelUnavailableError, match=words):
        load_kernel(tmp_path / "source.cpp", cache_dir=tmp_path)


class Fake:
    """A library that says whatever a test has it say."""

    _name = "/nowhere/fake.so"

    def __init__(self, *declarations: str) -> None:
        self.mlsys_declarations = lambda: "\n".join(declarations).encode()


def test_a_misspelt_field_cannot_be_set(library: Any):
    made = library.structs["Inner"]()
    made.first = 3
    with pytest.raises(AttributeError):
        made.frist = 4


@pytest.mark.parametrize("said", ["struct|S|a, b|16|i4@0|i8@4", "struct|S|a, b|24|i4@0|i8@8"])
def test_another_layout_is_refused(said: str):
    assert bind(Fake("struct|S|a, b|16|i4@0|i8@8")).structs["S"].b.offset == 8
    with pytest.raises(KernelUnavailableError, match=r"fake.so was compiled with S of .* Python has it of 16 bytes"):
        bind(Fake(said))


def test_libraries_that_declare_the_same_share_the_class():
    said = "struct|S|a, b|16|i4@0|i8@8"
    assert bind(Fake(said)).structs["S"] is bind(Fake(said)).structs["S"]
    assert bind(Fake("enum|i|A", said.replace("i4@0", "i@0"))).structs["S"] is not bind(Fake(said)).structs["S"]


def test_constants_that_differ_are_refused(library: Any):
    expect(library, PANEL=16, Kind=("plain", "rich"))
    with pytest.raises(KernelUnavailableError, match="has PANEL = 16, its caller 32"):
        expect(library, PANEL=32)
    with pytest.raises(KernelUnavailableError, match="Kind"):
        expect(library, Kind=("rich", "plain"))
