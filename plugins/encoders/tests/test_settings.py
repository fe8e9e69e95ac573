"""Each setting in a folder's files is obeyed or refused by name; tokens and scores are those of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_encoders.models.bert_folder import PROBLEMS, load_bert
from mlsys_encoders.models.config import BertConfig
from mlsys_encoders.models.sentence import read_sentence_form
from mlsys_encoders.serve.tei_routes import _scores
from mlsys_encoders.serve.tokens import TextTokens, tokenizer_of

transformers = pytest.importorskip("transformers")
pipeline = pytest.importorskip("transformers.pipelines.text_classification")
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the train Train café cafe museum is late at nine cat dog mat 中 国 中国"
TEXTS = ["the Train is late", "Train café 中国 [MASK] dog", "[CLS] cat", "the cat " * 50 + "dog", ""]
PAIRS = [("the cat", "at nine"), ("Train", "中国 [SEP] is"), ("the cat " * 20, "dog " * 30)]
VALUES: dict[str, list[Any]] = {  # of tokenizer_config.json
    "do_lower_case": [True, False],
    "strip_accents": [True, False, None],
    "tokenize_chinese_chars": [True, False],
    "model_input_names": [["input_ids", "attention_mask"], ["input_ids", "token_type_ids", "attention_mask"]],
    "truncation_side": ["left", "right"],
    "padding_side": ["left", "right"],
    "model_max_length": [5, 8, 64, 1e30, 10**30, None],
    "split_special_tokens": [True, False],
    "cls_token": ["[CLS]", "[MASK]", {"content": "[CLS]", "__type": "AddedToken"}],
    "sep_token": ["[SEP]", "[MASK]"],
    "unk_token": ["[UNK]", "[MASK]"],
    "pad_token": ["[PAD]", "[MASK]"],
    "added_tokens_decoder": [
        {"4": {"content": "[MASK]", "special": True}},
        {"5": {"content": "Train is", "special": True}},
        {"40": {"content": "late cat", "special": False}},
    ],
    "additional_special_tokens": [["[MASK]"]],
    "clean_up_tokenization_spaces": [True, False],
    "never_split": [["Train"]],
    "max_length": [6],
    "stride": [2],
    "pad_to_multiple_of": [8],
    "do_basic_tokenize": [False],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    words = {word: number for number, word in enumerate(WORDS.split())}
    transformers.BertTokenizerFast(vocab=words, do_lower_case=False, model_max_length=64).save_pretrained(made)
    return made


def theirs(folder: Path) -> list[list[list[int]]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    options = {"truncation": True, "max_length": min(64, tokenizer.model_max_length)}
    made = [tokenizer(text, **options) for text in TEXTS] + [tokenizer(*pair, **options) for pair in PAIRS]
    return [
        [each["input_ids"], types] if any(types := each.get("token_type_ids", [])) else [each["input_ids"]]
        for each in made
    ]


def ours(folder: Path) -> list[list[list[int]]]:
    form = read_sentence_form(folder, 8, has_head=False)
    config = BertConfig(hidden_size=8, vocab_size=50, max_length=64, num_token_types=2, form=form)
    texts = TextTokens(tokenizer_of(folder, config), config)
    made = [*texts.encode(TEXTS, is_cut=True), *texts.encode_pairs(PAIRS, is_cut=True)]
    return [each.tolist() if each.ndim == 2 else [each.tolist()] for each in made]


@settings(max_examples=80, deadline=None)
@given(
    changed=st.lists(st.sampled_from(sorted(VALUES)), max_size=3, unique=True).flatmap(
        lambda keys: st.fixed_dictionaries({key: st.sampled_from(VALUES[key]) for key in keys})
    )
)
def test_texts_become_the_tokens_that_transformers_makes_of_them(folder: Path, changed: dict[str, Any]):
    with TemporaryDirectory() as place:
        copied = Path(place) / "encoder"
        shutil.copytree(folder, copied)
        raw = json.loads((copied / "tokenizer_config.json").read_text()) | changed
        (copied / "tokenizer_config.json").write_text(json.dumps(raw))
        made, reason = None, ""
        try:
            made = ours(copied)
        except InvalidInputError as error:
            reason = str(error)
        assert any(key in reason for key in changed) if made is None else made == theirs(copied)


FILES: dict[str, dict[str, Any]] = {  # a whole folder, as sentence-transformers 6 writes it
    "modules.json": {},
    "sentence_bert_config.json": {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
    },
    "config_sentence_transformers.json": {
        "__version__": {"sentence_transformers": "6.2.0"},
        "default_prompt_name": None,
        "model_type": "SentenceTransformer",
        "prompts": {"query": "", "document": ""},
        "similarity_fn_name": "cosine",
    },
    "1_Pooling/config.json": {"embedding_dimension": 8, "pooling_mode": "mean", "include_prompt": True},
    "2_Dense/config.json": {
        "in_features": 8,
        "out_features": 4,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
        "module_input_name": "sentence_embedding",
        "module_output_name": "sentence_embedding",
    },
    "3_Normalize/config.json": {
        "module_input_name": "sentence_embedding",
        "module_output_name": "sentence_embedding",
    },
}
KINDS = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}


@settings(max_examples=60, deadline=None)
@given(
    file=st.sampled_from(sorted(FILES.keys() - {"modules.json"})),
    key=st.sampled_from(
        ["truncate_dim", "document_length", "use_residual", "processing_kwargs", "tasks", "module_input_name"]
    )
    | st.text("abcdefgh_", min_size=3, max_size=12),
    value=st.sampled_from([None, False, {}, [], "", 3, True, "other", {"a": 1}]),
)
def test_a_setting_that_nothing_obeys_is_refused_by_name(file: str, key: str, value: Any):
    files = {name: dict(content) for name, content in FILES.items()}
    files[file][key] = value
    with TemporaryDirectory() as place:
        for name, content in files.items():
            (Path(place) / name).parent.mkdir(exist_ok=True)
            (Path(place) / name).write_text(json.dumps(content))
        listed = [
            {"idx": number, "path": path, "type": f"x.{kind}"} for number, (path, kind) in enumerate(KINDS.items())
        ]
        (Path(place) / "modules.json").write_text(json.dumps(listed))
        if value:
            with pytest.raises(InvalidInputError, match=key):
                read_sentence_form(Path(place), 8, has_head=False)
        else:
            form = read_sentence_form(Path(place), 8, has_head=False)
            assert (form.poolings, form.is_normalised, len(form.denses)) == (("mean",), True, 1)


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("problem", [None, *PROBLEMS, "other"])
def test_scores_are_those_of_the_problem(problem: str | None, num_labels: int, tmp_path: Path):
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=20,
        num_labels=num_labels,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"problem_type": problem}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if problem == "other":
        with pytest.raises(InvalidInputError, match="problem_type is 'other'"):
            load_bert(tmp_path)
        return
    head = load_bert(tmp_path).config.head
    assert head is not None
    logits = np.array([[0.5, -1, 3.0][:num_labels]], np.float32)
    function = {
        "regression": lambda x: x,
        "multi_label_classification": pipeline.sigmoid,
        "single_label_classification": pipeline.sigmoid if num_labels == 1 else pipeline.softmax,
        None: pipeline.sigmoid if num_labels == 1 else pipeline.softmax,
    }[problem]  # as text_classification.postprocess chooses
    np.testing.assert_allclose(_scores(logits, head.problem, is_raw=False), function(logits), rtol=1e-5)
    np.testing.assert_array_equal(_scores(logits, head.problem, is_raw=True), logits)
