"""Architectures that say which requests unfold alike: what is unfolded once, and what each request keeps of its own."""

from __future__ import annotations

import numpy as np
import pytest
from mlsys_batchmaker.models import model as models
from mlsys_batchmaker.models.model import Model
from mlsys_batchmaker.models.sequence import Seq2Seq, SequenceEncoder, lstm_model, seq2seq_model
from mlsys_core.errors import InvalidInputError

MODELS = {
    "lstm": lambda: lstm_model(num_words=9, hidden_size=4),
    "seq2seq": lambda: seq2seq_model(num_words=9, hidden_size=4),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_as_unfolded_one_by_one(make, monkeypatch: pytest.MonkeyPatch):
    keyed, plain = make(), make()
    plain._alike = None
    unfolded = []
    unfold = type(keyed.architecture).unfold
    monkeypatch.setattr(
        type(keyed.architecture), "unfold", lambda self, *given: (unfolded.append(self), unfold(self, *given))
    )
    rng = np.random.default_rng(0)
    for length in (1, 5, 4, 5, 5, 1):
        request = {"words": rng.integers(0, 9, length)}
        ours, theirs = keyed.unfold(request), plain.unfold(request)
        np.testing.assert_array_equal(ours.plan.block, theirs.plan.block)
        assert ours.plan.kinds == theirs.plan.kinds
        np.testing.assert_equal(ours.constants, theirs.constants)
    assert sum(each is keyed.architecture for each in unfolded) == 3  # of lengths 1, 5 and 4
    keyed.forget_plans()
    keyed.unfold({"words": np.zeros(5, dtype=np.int64)})
    assert sum(each is keyed.architecture for each in unfolded) == 4


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_bad_requests_of_a_known_key(make):
    model = make()
    good = {"words": np.zeros(3, dtype=np.int64)}
    before = model.unfold(good)
    for words, says in (([0, 9, 0], r"\[0, 9\)"), ([0.5, 1, 1], "int64"), ([[1]] * 3, "rows of shape")):
        with pytest.raises(InvalidInputError, match=says):
            model.unfold({"words": np.array(words)})
    np.testing.assert_equal(model.unfold(good).constants, before.constants)


def test_keys_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "_MAX_FORMS", 2)
    model = MODELS["lstm"]()
    for length in range(1, 6):
        model.unfold({"words": np.zeros(length, dtype=np.int64)})
    assert list(model._forms) == [4, 5]


class Wrong(SequenceEncoder):
    """Its key's rows are not those that it unfolds."""

    def structure_key(self, request):
        key, (words,) = super().structure_key(request)
        return key, (words[::-1],)


def test_a_key_with_other_rows_is_refused():
    cells = MODELS["lstm"]().cells
    model = Model("wrong", cells, Wrong(4))  # its example has equal words
    with pytest.raises(InvalidInputError, match="other rows than unfold"):
        model.unfold({"words": np.arange(4)})


def test_steps_are_part_of_the_key():
    one, other = (Seq2Seq().structure_key({"words": np.zeros(3), "steps": np.array([steps])})[0] for steps in (4, 5))
    assert one != other
