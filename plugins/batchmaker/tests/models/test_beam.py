"""Beam search, whose next cells depend on the last ones' outputs, against a search of each request alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from mlsys_batchmaker.engine import CancelledError, Engine, EngineConfig
from mlsys_batchmaker.models.beam import BeamSearch, beam_model
from mlsys_batchmaker.models.model import Model
from mlsys_batchmaker.models.store import load_model, save_model
from mlsys_core.errors import InvalidInputError


def search(model: Model, words: np.ndarray) -> tuple[list[int], float]:
    """One request alone, by the book."""
    encoder, decoder = (cell.module for cell in model.cells)
    config = model.architecture.config()
    width, eos = config["width"], config["eos"]
    with torch.no_grad():
        hidden = torch.zeros(1, encoder.gru.hidden_size)
        for word in words:
            hidden = encoder(torch.tensor([word]), hidden)
        alive, ended = [([], 0.0, hidden)], []
        for step in range(config["max_steps"]):
            grown = []
            for said, score, state in alive:
                scores, following, new = decoder(torch.tensor([said[-1] if said else config["go"]]), state)
                pairs = zip(scores[0].tolist(), following[0].tolist(), strict=True)
                grown += [([*said, word], score + more, new) for more, word in pairs]
            kept = sorted(grown, key=lambda each: -each[1])[:width]
            if step + 1 == config["max_steps"]:
                ended += kept
                break
            ended += [each for each in kept if each[0][-1] == eos]
            best = max((each[1] for each in ended), default=-math.inf)
            alive = [each for each in kept if each[0][-1] != eos and each[1] > best]
            if not alive:
                break
    said, score, _ = max(ended, key=lambda each: each[1])
    return said, score


def sharp(*, width: int) -> Model:
    """A model whose probabilities differ enough that hypotheses end at different steps."""
    model = beam_model(num_words=7, hidden_size=16, max_steps=12, batch_sizes=(1, 2, 4, 8), width=width, seed=5)
    with torch.no_grad():
        for cell in model.cells:
            cell.module.gru.weight_ih.mul_(3)
            cell.module.gru.weight_hh.mul_(3)
        model.cells[1].module.projection.weight.mul_(2)
    return model


@pytest.mark.parametrize("executor", ["cell", "chunk"])
@pytest.mark.parametrize("workers", [1, 2])
def test_as_alone(executor: str, workers: int):
    model = sharp(width=3)
    rng = np.random.default_rng(0)
    requests = [rng.integers(0, 7, length) for length in rng.integers(1, 12, 25)]
    with Engine(model, EngineConfig(executor=executor, num_workers=workers)) as engine:
        answers = [future.result() for future in [engine.submit({"words": words}) for words in requests]]
        assert engine.counters.effective_batch_size > 1.5
    lengths = set()
    for words, answer in zip(requests, answers, strict=True):
        said, score = search(model, words)
        assert answer.outputs["words"].tolist() == said
        assert float(answer.outputs["score"][0]) == pytest.approx(score, abs=1e-4)
        assert answer.result.num_cells > len(words)
        lengths.add(len(said))
    assert len(lengths) > 2  # they do end at different steps


class Broken(BeamSearch):
    """Cannot go on with requests of three words."""

    def extend(self, request, parts, graph) -> bool:
        """Refuse three words; extend others as a beam search does."""
        if len(request["words"]) == 3:
            raise InvalidInputError("three words are too many")
        return super().extend(request, parts, graph)


def test_one_that_cannot_go_on_fails_alone():
    good = sharp(width=2)
    model = Model("broken", good.cells, Broken(**good.architecture.config()))
    with Engine(model) as engine:
        futures = [engine.submit({"words": np.arange(length)}) for length in (2, 3, 4)]
        assert futures[0].result().outputs["words"].tolist() == search(good, np.arange(2))[0]
        with pytest.raises(InvalidInputError, match="three words"):
            futures[1].result()
        assert futures[2].result().outputs["words"].tolist() == search(good, np.arange(4))[0]


def test_growth_is_bounded():
    good = sharp(width=2)
    model = Model("small", good.cells, good.architecture, max_cells=6)
    with Engine(model) as engine, pytest.raises(InvalidInputError, match="are served"):
        engine.submit({"words": np.arange(5)}).result()


def test_a_growing_request_can_be_cancelled_and_waits_for_room():
    model = sharp(width=3)
    with Engine(model, EngineConfig(pool_bytes=64 * 1024)) as engine:  # some hundreds of rows
        requests = [np.arange(length) % 7 for length in range(1, 60)]
        futures = [engine.submit({"words": words}, request_id=str(n)) for n, words in enumerate(requests)]
        engine.cancel("40")
        for number, (words, future) in enumerate(zip(requests, futures, strict=True)):
            if number == 40:
                try:
                    future.result()
                except CancelledError:
                    continue
            assert future.result().outputs["words"].tolist() == search(model, words)[0]
        admission = engine.scheduler._admission
        assert not admission.by_index
        assert admission.room.num_held == 0


def test_saved_and_loaded(tmp_path):
    model = sharp(width=2)
    save_model(model, tmp_path)
    with Engine(load_model(tmp_path)) as engine:
        assert (
            engine.submit({"words": np.arange(4)}).result().outputs["words"].tolist()
            == (search(model, np.arange(4))[0])
        )
