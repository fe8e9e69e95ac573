"""The form of networks beside trees: the trees' kernel, and each layer of a network as one call of torch.

Layers stay in torch, whose matrix products have bits of their own: the answers are those of the module to the bit. What
is saved is the executor of the network around them, and the modules' own calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.combine.beside import Beside
from mlsys_windtunnel.modules.linear.linear import Affine
from mlsys_windtunnel.modules.linear.neural import Layers, activate
from mlsys_windtunnel.modules.tree.native import native_form
from mlsys_windtunnel.modules.tree.trees import Trees
from torch import Tensor, nn

if TYPE_CHECKING:
    from mlsys_windtunnel.modules.linear.neural import Activation
    from mlsys_windtunnel.modules.tree.native import NativeTrees

Layer = tuple[Tensor, Tensor, "Activation"]  # weight [outputs, inputs], bias [outputs], and what follows them


class TreesAndNetworks:
    """Scores ``[rows, outputs]`` of :class:`.Beside` as its parameters are now.

    Args:
        module: Shares its memory with this form.
        trees: The kernel's form of its trees.
        networks: The layers of each network.
    """

    def __init__(self, module: Beside, trees: NativeTrees, networks: list[list[Layer]]) -> None:
        self._fill, self._low, self._high = (each.numpy() for each in (module.fill, module.low, module.high))
        self._trees = trees
        self._networks = networks

    def __call__(self, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the scores of ``[rows, columns]`` float64."""
        bounded = np.minimum(np.maximum(np.where(np.isnan(x), self._fill, x), self._low), self._high)
        with torch.inference_mode():
            scores, table = torch.from_numpy(self._trees(x)), torch.from_numpy(bounded)
            for layers in self._networks:
                hidden = table
                for weight, bias, activation in layers:
                    hidden = activate(torch.nn.functional.linear(hidden, weight, bias), activation)
                scores += hidden
        result: npt.NDArray[np.float64] = scores.numpy()
        return result


def beside_form(module: Beside) -> TreesAndNetworks | None:
    """Return the form of a module; None without a kernel, or with networks that are no :class:`.Layers`."""
    trees = native_form(module.trees) if type(module.trees) is Trees else None
    networks = [_layers(network) for network in module.networks]
    whole = [layers for layers in networks if layers is not None]
    return TreesAndNetworks(module, trees, whole) if trees is not None and len(whole) == len(networks) else None


def _layers(network: nn.Module) -> list[Layer] | None:
    if type(network) is not Layers:
        return None
    affine = [layer for layer in network.layers if type(layer) is Affine]
    if len(affine) != len(network.layers):
        return None
    follows: list[Activation] = [network.hidden] * (len(affine) - 1) + [network.last]
    return [(layer.weight.detach(), layer.bias.detach(), each) for layer, each in zip(affine, follows, strict=True)]
