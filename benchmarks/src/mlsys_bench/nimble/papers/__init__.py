"""Nets of the Nimble paper that the suites race, by name, beside those that the product brings.

Commands of the product take one as ``mlsys_bench.nimble.papers.genotype:darts``.
"""

from __future__ import annotations

from mlsys_nimble.nets import NETS as PRODUCT
from mlsys_nimble.nets import NetEntry, build, find_net, resolve
from mlsys_nimble.nets.blocks import Net

NETS: tuple[NetEntry, ...] = (
    *PRODUCT,
    NetEntry("darts", f"{__name__}.genotype:darts", "DARTS, 224 x 224", 4_718_752),
    NetEntry("amoebanet", f"{__name__}.genotype:amoebanet", "AmoebaNet-A's cells in DARTS' net, 224 x 224", 4_627_360),
    NetEntry("nasnet-mobile", f"{__name__}.nasnet:nasnet_mobile", "NASNet-A (4 @ 1056), 224 x 224", 5_289_978),
    NetEntry("nasnet-large", f"{__name__}.nasnet:nasnet_large", "NASNet-A (6 @ 4032), 331 x 331", 88_753_150),
    NetEntry("mobilenet-v2", f"{__name__}.mobile:mobilenet_v2", "MobileNetV2, 224 x 224", 3_504_872),
    NetEntry("efficientnet-b0", f"{__name__}.mobile:efficientnet_b0", "EfficientNet-B0, 224 x 224", 5_288_548),
    NetEntry("efficientnet-b5", f"{__name__}.mobile:efficientnet_b5", "EfficientNet-B5, 456 x 456", 30_389_784),
)


def net(name: str, *, batch: int = 1, seed: int = 0) -> Net:
    """Build a net of the suites; see :func:`mlsys_nimble.nets.net`.

    Raises:
        InvalidInputError: there is no such net, or ``batch`` is not positive.
    """
    return build(find_net(name, NETS), batch=batch, seed=seed)


def check_model(model: str) -> None:
    """Refuse what :func:`load_model` refuses, as far as possible without loading anything.

    Raises:
        InvalidInputError: no net has this name, or there is no such file.
    """
    if _is_name(model):
        find_net(model, NETS)
    else:
        resolve.check_model(model)


def load_model(model: str, *, batch: int = 1, trust_code: bool = False) -> Net:
    """Load what ``model`` names: a net of the suites, or what :func:`mlsys_nimble.nets.resolve.load_model` takes.

    Raises:
        InvalidInputError: nothing has this name, or it cannot be loaded.
        MissingDependencyError: the library it names is not installed.
    """
    if _is_name(model):
        return net(model, batch=batch)
    return resolve.load_model(model, batch=batch, trust_code=trust_code)


def _is_name(model: str) -> bool:
    return not model.endswith(".pt2") and ":" not in model
