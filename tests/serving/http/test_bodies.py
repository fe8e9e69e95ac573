from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_serving.http.bodies import MAX_DEPTH, parse_json
from mlsys_serving.http.errors import HttpError

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=60)
@given(values, st.booleans())
def test_every_json_value_passes_unchanged(value: object, ensure_ascii: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ensure_ascii).encode()) == value


@pytest.mark.parametrize(
    ("body", "code", "reason"),
    [
        (b"", "malformed_json", "column 0"),
        (b'{"a": 1', "malformed_json", "column 7"),
        (b"NaN", "malformed_json", "NaN"),
        (b"[-Infinity]", "malformed_json", "Infinity"),
        (b"[1e999]", "malformed_json", "too large"),
        (b"-1e999", "malformed_json", "too large"),
        (b'[[{"a": [1, {"b": -1e999}]}]]', "malformed_json", "too large"),
        (b"[" + b"1," * 70_000 + b"1e999]", "malformed_json", "too large"),
        (b"[1,]", "malformed_json", "trailing comma"),
        (b'["a\tb"]', "malformed_json", "control character"),
        (b'{"a\\nb": 1, "a\\nb": 2}', "malformed_json", r"the key 'a\\nb' comes twice"),
        (b"[" + b"9" * 5000 + b"]", "malformed_json", "digits"),
        (b'"\\ud83d"', "malformed_json", "surrogate"),
        (b'{"\\uDC00": 1}', "malformed_json", "surrogate"),
        (b'[{"a": 1, "b": 2, "a": 3}]', "malformed_json", "'a' comes twice"),
        (b"[" * 100_000, "malformed_json", "nested"),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), "malformed_json", "nested"),
        (b'"\xff"', "invalid_encoding", "byte 1"),
        (b"\xed\xa0\x80", "invalid_encoding", "byte 0"),
        ('"é"'.encode("utf-16"), "invalid_encoding", "byte 0"),
    ],
)
def test_invalid_json_is_refused_with_the_reason(body: bytes, code: str, reason: str) -> None:
    with pytest.raises(HttpError, match=reason) as caught:
        parse_json(body)
    assert (caught.value.http_status, caught.value.error_code) == (400, code)


def test_the_deepest_that_is_allowed_passes_and_so_does_a_whole_surrogate_pair() -> None:
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert json.dumps(parse_json(deepest)).encode() == deepest
    assert parse_json(b'"\\ud83d\\ude00"') == "\N{GRINNING FACE}"
    with_siblings = b"[" * MAX_DEPTH + b"]" * (MAX_DEPTH - 1) + b",[],{}]"
    assert json.dumps(parse_json(with_siblings), separators=(",", ":")).encode() == with_siblings
    assert parse_json(b'["' + b"[" * 200 + b'"]') == ["[" * 200]  # brackets in a string are no nesting


tokens = st.sampled_from(
    [*"[]{},:-.0123456789eE \t\n", '"', '"a"', '"b":', "true", "null", "NaN", "\\", "\\u", "d83d", "é"]
)


@settings(max_examples=300)
@given(st.lists(tokens, max_size=12).map("".join))
def test_a_text_is_taken_if_and_only_if_pythons_own_strict_parser_takes_it(text: str) -> None:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("twice")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        expected = json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
        json.dumps(expected, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:  # a number out of range and half of a surrogate pair among them
        with pytest.raises(HttpError):
            parse_json(text.encode())
        return
    assert parse_json(text.encode()) == expected


def test_many_keys_of_which_the_last_comes_twice_are_refused_without_comparing_each_with_each() -> None:
    keys = [f'"{number}": 0' for number in range(200_000)]
    with pytest.raises(HttpError, match="'199999' comes twice"):
        parse_json(("{" + ",".join([*keys, keys[-1]]) + "}").encode())
