"""Nets of timm beside eager, by the names that commands take; ``make test-peers`` installs timm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_nimble import Nimble
from mlsys_nimble.ir.operators import Aten, Reduce
from mlsys_nimble.nets.blocks import settle
from mlsys_nimble.nets.resolve import load_model

from tests.oracles.nimble_zoo.vision import define_operators

NAMES = (  # a small one of each family
    *("convnextv2_atto", "densenet121", "edgenext_xx_small", "efficientnet_b0", "ghostnet_050", "hardcorenas_a"),
    *("lcnet_035", "levit_128s", "mixer_s32_224", "mobilenetv3_small_050", "mobilevit_xxs", "poolformer_s12"),
    *("regnetx_002", "resnet18", "test_resnet", "test_vit", "vit_tiny_patch16_224"),
)


@pytest.fixture(scope="module", autouse=True)
def timm() -> Any:
    try:
        define_operators()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    return pytest.importorskip("timm")


@pytest.mark.parametrize("name", NAMES)
def test_a_net_gives_what_eager_gives(name: str):
    torch.manual_seed(0)
    net = load_model(f"timm:{name}", batch=2)
    for weight in net.module.parameters():
        if weight.dim() > 1 and not weight.any():  # some heads begin with zeros, which hide what is wrong
            torch.nn.init.normal_(weight, std=0.1)
    net = settle(net)
    replayed = Nimble(net.module)
    replayed.prepare(*net.inputs)
    for scale in (1.0, 0.5):
        inputs = tuple(scale * x for x in net.inputs)
        with torch.no_grad():
            expected = net.module(*inputs)
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(replayed(*inputs), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    if name == "convnextv2_atto":  # its response normalisation: sums of squares, scaled and added
        assert replayed.prepared is not None
        kinds = [operator.kind for operator in replayed.prepared.program.operators]
        assert sum(isinstance(kind, Reduce) and kind.squares for kind in kinds) == 12
        assert not any(isinstance(kind, Aten) for kind in kinds)


def test_a_name_that_timm_does_not_know_is_refused():
    with pytest.raises(InvalidInputError, match=r"timm\.list_models\(\) has the names"):
        load_model("timm:no_such_net")
