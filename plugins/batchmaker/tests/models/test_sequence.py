"""Sequence models through the whole engine, against the cells called one request at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mlsys_batchmaker.engine import CancelledError, Engine, EngineConfig
from mlsys_batchmaker.models.sequence import lstm_model, seq2seq_model
from mlsys_core.errors import InvalidInputError

CONFIGS = [
    EngineConfig(
        executor=executor,
        lookahead=lookahead,
        compiler=compiler,
        **({"num_workers": workers} if isinstance(workers, int) else {"devices": workers}),
    )
    for compiler in ("eager", "auto")
    for executor, lookahead, workers in [
        ("cell", "speculative", 1),
        ("chunk", "speculative", 1),
        ("cell", "one", 2),
        ("chunk", "speculative", 2),
        ("chunk", "speculative", ("cpu", "cpu")),
        ("cell", "one", ("cpu", "cpu")),
    ]
]
IDS = [f"{each.compiler}-{each.executor}-{each.lookahead}-{each.num_workers}-{len(each.devices)}" for each in CONFIGS]


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_lstm(config: EngineConfig):
    model = lstm_model(num_words=50, hidden_size=16, batch_sizes=(1, 2, 4, 8))
    rng = np.random.default_rng(0)
    requests = [{"words": rng.integers(0, 50, length)} for length in rng.integers(1, 30, 25)]
    with Engine(model, config) as engine:
        answers = [future.result() for future in [engine.submit(request) for request in requests]]
        assert engine.counters.cells == sum(len(request["words"]) for request in requests)
    reference = torch.nn.LSTM(16, 16, batch_first=True)
    cell = model.cells[0].module
    with torch.no_grad():
        reference.weight_ih_l0.copy_(cell.lstm.weight[:16].t())
        reference.weight_hh_l0.copy_(cell.lstm.weight[16:].t())
        reference.bias_ih_l0.copy_(cell.lstm.bias)
        reference.bias_hh_l0.zero_()
        for request, answer in zip(requests, answers, strict=True):
            _, (hidden, _) = reference(cell.embedding(torch.from_numpy(request["words"]))[None])
            np.testing.assert_allclose(answer.outputs["hidden"], hidden[0, 0].numpy(), rtol=0, atol=1e-6)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
@pytest.mark.parametrize("stops", [True, False], ids=["eos", "bound"])
def test_seq2seq(config: EngineConfig, stops: bool):
    sizes = {"encoder_batch_sizes": (1, 4, 8), "decoder_batch_sizes": (1, 2, 4)}
    rng = np.random.default_rng(1)
    requests = [{"words": rng.integers(0, 6, length)} for length in rng.integers(1, 12, 20)]
    endless = seq2seq_model(num_words=6, hidden_size=16, eos=None, seed=3, **sizes)
    eos = decode(endless, requests[0]["words"], None)[3] if stops else None  # a word that this model does say
    model = seq2seq_model(num_words=6, hidden_size=16, eos=eos, seed=3, **sizes)
    with Engine(model, config) as engine:
        answers = [future.result() for future in [engine.submit(request) for request in requests]]
    stopped = 0
    for request, answer in zip(requests, answers, strict=True):
        assert answer.outputs["words"].tolist() == decode(model, request["words"], eos)
        stopped += len(answer.outputs["words"]) < len(request["words"]) + 10
    assert stopped > 0 if stops else stopped == 0
    if stops and config.lookahead == "speculative" and config.executor == "cell":
        assert engine.counters.discarded_cells > 0


@pytest.mark.parametrize("compiler", ["eager", "auto"])
@pytest.mark.parametrize("executor", ["chunk", "cell"])
def test_rows_follow_a_request_to_another_device(executor, compiler):
    model = seq2seq_model(num_words=30, hidden_size=16, eos=3, seed=3)
    rng = np.random.default_rng(1)
    requests = [{"words": rng.integers(0, 30, length)} for length in rng.integers(1, 40, 100)]
    found = []
    for devices in ((), ("cpu", "cpu")):
        config = EngineConfig(executor=executor, compiler=compiler, max_tasks_to_submit=2, devices=devices)
        with Engine(model, config) as engine:
            answers = [future.result() for future in [engine.submit(request) for request in requests]]
            assert (engine.counters.copied_rows > 0) == bool(devices)
        found.append([answer.outputs["words"].tolist() for answer in answers])
    assert found[0] == found[1]


def test_devices_have_a_worker_each():
    with pytest.raises(InvalidInputError, match="leave out num_workers"):
        EngineConfig(devices=("cpu", "cpu"), num_workers=2)


def decode(model, words, eos: int | None) -> list[int]:
    """One request alone: encode, then feed each word back until ``eos`` or ten words more than went in."""
    encoder, decoder = (cell.module for cell in model.cells)
    with torch.no_grad():
        hidden = state = torch.zeros(1, 16)
        for word in words:
            hidden, state = encoder(torch.tensor([word]), hidden, state)
        word, said = torch.tensor([1]), []
        while len(said) < len(words) + 10 and (eos is None or said[-1:] != [eos]):
            word, hidden, state = decoder(word, hidden, state)
            said.append(int(word))
    return said


def test_words_are_streamed():
    model = seq2seq_model(num_words=6, hidden_size=8, eos=None)
    seen: list[int] = []
    with Engine(model, EngineConfig(compiler="eager")) as engine:
        request = {"words": np.array([1, 2])}
        answer = engine.submit(request, on_values=lambda values: seen.append(int(values[0]))).result()
    assert seen == answer.outputs["words"].tolist()


def test_bad_requests_are_refused_alone():
    model = lstm_model(num_words=5, hidden_size=8)
    with Engine(model, EngineConfig(compiler="eager")) as engine:
        good = engine.submit({"words": np.array([1, 2, 3])})
        for words, says in [
            ([9], r"\[0, 5\)"),
            ([], "at least one step"),
            ([1.5], "int64"),
            ([0] * 5000, "at most 4096"),
        ]:
            with pytest.raises(InvalidInputError, match=says):
                engine.submit({"words": np.array(words)})
        with pytest.raises(InvalidInputError, match="no tensor 'words'"):
            engine.submit({"wrods": np.array([1])})
        assert good.result().outputs["hidden"].shape == (8,)


def test_an_id_in_use_is_refused_and_its_owner_goes_on():
    model = lstm_model(num_words=5, hidden_size=8)
    with Engine(model, EngineConfig(compiler="eager")) as engine:
        first = engine.submit({"words": np.zeros(4000, dtype=np.int64)}, request_id="a")
        with pytest.raises(InvalidInputError, match="'a' belongs to an unfinished"):
            engine.submit({"words": np.array([1])}, request_id="a")
        assert first.result().outputs["hidden"].shape == (8,)


def test_cancelled_and_expired_requests():
    model = lstm_model(num_words=5, hidden_size=8)
    with Engine(model, EngineConfig(compiler="eager")) as engine:
        expired = engine.submit({"words": np.zeros(4000, dtype=np.int64)}, timeout_s=0.0)
        cancelled = engine.submit({"words": np.zeros(4000, dtype=np.int64)}, request_id="c")
        good = engine.submit({"words": np.zeros(20, dtype=np.int64)})
        engine.cancel("c")
        assert good.result().outputs["hidden"].shape == (8,)
        for future, says in ((expired, "expired"), (cancelled, "cancelled")):
            with pytest.raises(CancelledError, match=says):
                future.result()
