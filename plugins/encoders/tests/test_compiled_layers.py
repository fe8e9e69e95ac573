"""The compiled layers against torch's, for every form of a layer, width of vectors, and number of threads."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop.queue import ServeRequest
from mlsys_core.native.loader import builds_to_test
from mlsys_dvabatch.serve.preparing import Batching, prepare_loaded
from mlsys_dvabatch.stages.zoo import Loaded, Loading, load
from mlsys_encoders.models.bert import BertStages
from mlsys_encoders.models.config import BertConfig
from mlsys_encoders.models.native.layers import CompiledLayers, compiled_layers, pack_codes, quantised
from torch import Tensor

BUILDS = builds_to_test()
SMALL = BertConfig(hidden_size=48, num_layers=3, num_heads=3, intermediate_size=80, vocab_size=50, max_length=200)
FORMS = {
    "bert": SMALL,
    "wide-heads": replace(SMALL, hidden_size=144, activation="gelu_new", intermediate_size=112),
    "relative": replace(SMALL, num_buckets=32, num_token_types=0),
    "gated": replace(SMALL, is_gated=True, activation="silu", has_mlp_bias=False, thetas=(100.0, 10.0, 100.0)),
    "pre-norm": replace(
        SMALL, is_pre_norm=True, is_gated=True, reaches=(None, 5, 5), thetas=(1e4, 10.0, 10.0), has_positions=False,
        has_attention_bias=False, has_norm_bias=False,
    ),
}  # fmt: skip
LENGTHS = (5, 70, 1, 33, 130)


def encoder(config: BertConfig) -> BertStages:
    torch.manual_seed(1)
    model = BertStages(config, 2, is_packed=True).eval()
    for value in model.parameters():  # norms and biases, too
        value.data.normal_(std=0.3).add_(0.05)
    return model


def answers(model: BertStages, lengths: tuple[int, ...] = LENGTHS, *, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 50, length) for length in lengths]
    values = model.collate([ServeRequest(str(n), row, length=len(row)) for n, row in enumerate(rows)], 0)
    for stage in range(model.num_stages):
        values = model.run(stage, values)
    return values.tokens


def assert_bits_stay_in_company(model: BertStages) -> None:
    """Assert that a text's answer is the same alone and beside others, and all answers on three threads."""
    together = answers(model)
    assert torch.equal(answers(model, LENGTHS[:1]), together[:1])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(answers(model), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("flags", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_layers_give_what_torchs_give(form: str, flags: tuple[str, ...]):
    model = encoder(FORMS[form])
    model._native = (None,)
    expected = answers(model)
    model._native = (CompiledLayers(list(model.layers), model.config, flags),)
    torch.testing.assert_close(answers(model), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_a_text_has_the_same_bits_alone_in_company_and_on_any_number_of_threads(form: str):
    model = encoder(FORMS[form])
    assert model._compiled() is not None
    assert_bits_stay_in_company(model)


@torch.inference_mode()
def test_new_weights_are_packed_anew():
    model, other = encoder(SMALL), encoder(SMALL)
    before = answers(model)
    for value in other.parameters():
        value.data.mul_(1.5)
    model.load_state_dict(other.state_dict())
    assert torch.equal(answers(model), answers(other))
    assert not torch.equal(answers(model), before)


@torch.inference_mode()
def test_copies_and_pickles_pack_their_own():
    model = encoder(SMALL)
    before = answers(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(answers(again), before)


def test_other_widths_and_dtypes_run_as_torchs_operators():
    for config in (replace(SMALL, num_heads=6), replace(SMALL, intermediate_size=72)):
        assert encoder(config)._compiled() is None
    model = encoder(SMALL)
    assert model._compiled() is not None
    assert model.double()._compiled() is None
    assert compiled_layers(list(encoder(SMALL).to("meta").layers), SMALL) is None


WIDE = replace(SMALL, hidden_size=64, num_heads=2, intermediate_size=96)
CODED = {"bert": WIDE, "gated": replace(WIDE, is_gated=True, activation="silu", thetas=(100.0,) * 3)}


class Coded(torch.nn.Module):
    """A linear whose weight and rows are rounded to codes, in torch's operators: the reference for whole numbers."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        codes, scales = quantised(linear.weight.detach())
        self.weight = (codes.unflatten(1, (-1, 32)) * scales[..., None]).flatten(1).double()
        self.bias = None if linear.bias is None else linear.bias.detach().double()

    def forward(self, rows: Tensor) -> Tensor:
        codes, scales = quantised(rows.flatten(0, -2))
        rounded = (codes.unflatten(1, (-1, 32)) * scales[..., None]).flatten(1).double()
        return torch.nn.functional.linear(rounded, self.weight, self.bias).float().unflatten(0, rows.shape[:-1])


def coded(config: BertConfig, flags: tuple[str, ...] = ()) -> BertStages:
    model = encoder(config)
    model.weights = "int8"
    model._native = (CompiledLayers(list(model.layers), model.config, flags, weights="int8"),)
    return model


@pytest.mark.parametrize("flags", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("form", CODED)
@torch.inference_mode()
def test_whole_numbers_give_what_rounded_floats_give(form: str, flags: tuple[str, ...]):
    reference = encoder(CODED[form])
    exact = answers(reference)
    for layer in reference.layers:
        for name in ("query_key_value", "attention_output", "up", "down"):
            setattr(layer, name, Coded(getattr(layer, name)))
    reference._native = (None,)
    expected, found = answers(reference), answers(coded(CODED[form], flags))
    # A sum that is rounded another way moves a code by one now and then: far less than the codes differ from floats.
    assert (found - expected).abs().mean() < 0.2 * (found - exact).abs().mean()
    assert torch.nn.functional.cosine_similarity(found, exact).min() > 0.99


@pytest.mark.parametrize("form", CODED)
@torch.inference_mode()
def test_a_text_in_whole_numbers_has_the_same_bits_alone_and_in_company(form: str):
    model = coded(CODED[form])
    assert_bits_stay_in_company(model)


def test_codes_of_a_weight_are_gguf_s():
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    weight[1, :32] = 0
    codes, scales = quantised(weight)
    assert codes.abs().amax() == 127
    assert codes[1, :32].abs().amax() == 0
    assert torch.equal(codes, codes.round())
    error = (codes.unflatten(1, (-1, 32)) * scales[..., None]).flatten(1) - weight
    assert (error.unflatten(1, (-1, 32)).abs().amax(-1) <= scales / 2 * 1.0001).all()
    packed, spread = pack_codes(weight, 16)
    assert packed.shape == (1, 16, 16, 4)
    assert spread.shape == (1, 2, 16)
    assert packed[0, 3, 2].tolist() == (codes[2, 12:16] + 128).tolist()
    assert spread[0, :, 5:].abs().sum() == 0


@pytest.mark.parametrize("strange", [float("inf"), float("nan")])
def test_a_weight_that_is_not_finite_has_no_codes(strange: float):
    weight = torch.randn(4, 64)
    weight[2, 40] = strange
    with pytest.raises(InvalidInputError, match="not finite"):
        quantised(weight)


def test_what_cannot_run_in_whole_numbers_is_refused():
    for model in (encoder(SMALL), encoder(WIDE).double()):  # 48 features are no groups of 32
        model.weights = "int8"
        with pytest.raises(InvalidInputError, match="--weights int8 needs an encoder in fp32 on the CPU"):
            answers(model)
    model = encoder(WIDE)
    model.weights = "int8"
    assert model.form == " packed, compiled, int8"
    assert model.with_form(is_packed=True).form == model.form


def test_whole_numbers_are_served_packed_or_refused(tmp_path: Path):
    model = encoder(WIDE).with_form(is_packed=False)
    model.weights = "int8"
    loaded = Loaded("small", model)
    with pytest.raises(InvalidInputError, match="--weights int8 is for packed batches: give --policy packed"):
        prepare_loaded(loaded, tmp_path, Batching(policy="input"))
    prepared = prepare_loaded(loaded, tmp_path)
    assert prepared.policy_name == "packed"
    assert prepared.loaded.model.form == " packed, compiled, int8"
    with pytest.raises(InvalidInputError, match="--weights 'int4': give float or int8"):
        load("minilm-random", tmp_path, Loading(weights="int4"))
