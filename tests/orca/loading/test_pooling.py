import json
from pathlib import Path
from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_orca.loading.pooling import Pooling, read_pooling

KINDS = ["Transformer", "Pooling", "Normalize"]


def write(
    path: Path, kinds: list[str] = KINDS, *, pooling: dict[str, Any] | None = None, **files: dict[str, Any]
) -> Path:
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [
        {"idx": number, "name": str(number), "path": paths.get(kind, f"{number}_{kind}"), "type": f"st.models.{kind}"}
        for number, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {"pooling_mode_mean_tokens": True}))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def test_a_directory_that_says_nothing_has_the_defaults(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == Pooling(mode="mean", normalize=False, max_tokens=None, prompt="")


def test_files_of_sentence_transformers_are_obeyed(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "query: ", "passage": "passage: "}, "default_prompt_name": "query"}
    path = write(
        tmp_path,
        pooling={"word_embedding_dimension": 8, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        sentence_bert_config={"max_seq_length": 256, "do_lower_case": False},
        config_sentence_transformers=prompts,
    )
    assert read_pooling(path) == Pooling(mode="cls", normalize=True, max_tokens=256, prompt="query: ")


@pytest.mark.parametrize(("mode", "expected"), [("mean", "mean"), ("cls", "cls")])
def test_newer_files_name_the_mode(tmp_path: Path, mode: str, expected: str) -> None:
    found = read_pooling(write(tmp_path, KINDS[:2], pooling={"pooling_mode": mode, "include_prompt": True}))
    assert (found.mode, found.normalize) == (expected, False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kinds": ["Transformer", "Pooling", "Dense", "Normalize"]}, "Dense"),
        ({"kinds": ["Pooling", "Transformer"]}, "in this order"),
        ({"pooling": {"pooling_mode_max_tokens": True}}, "pooling by max_tokens"),
        ({"pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}}, "cls_token and mean_tokens"),
        ({"pooling": {"pooling_mode": "lasttoken"}}, "lasttoken"),
        ({"sentence_bert_config": {"do_lower_case": True}}, "lower case"),
        (
            {
                "pooling": {"pooling_mode_mean_tokens": True, "include_prompt": False},
                "config_sentence_transformers": {"prompts": {"a": "A: "}, "default_prompt_name": "a"},
            },
            "include_prompt",
        ),
    ],
    ids=["dense", "order", "max", "two", "last", "lower", "prompt"],
)
def test_unimplemented_options_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        read_pooling(write(tmp_path, **changes))


def test_a_damaged_list_of_modules_is_said(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('{"a": 1}')
    with pytest.raises(InvalidInputError, match=r"modules\.json"):
        read_pooling(tmp_path)
