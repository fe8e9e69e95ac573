"""Orca on a GPU: Triton kernels fused as in section 4.4 of the dissertation, and the decoder that runs on them.

:mod:`.plan` decides which piece of attention each program takes (pure, no torch), :mod:`.batch` brings an iteration to
the device in one copy, :mod:`.attention` and :mod:`.rowwise` hold the kernels, and :mod:`.decoder` puts them
into a loaded model. On a CPU Triton is not imported.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlsys_orca.model.decoder import DecoderModel

_log = logging.getLogger(__name__)


def to_gpu(model: DecoderModel) -> DecoderModel:
    """Convert ``model`` to a decoder on these kernels.

    Args:
        model: A decoder of ours, on a CUDA device, gives its parts away. One that has a part without a kernel comes
            back as it is, and so does every one where Triton is not installed; the log says why.
    """
    from mlsys_orca.model.blocks import Decoder

    if not isinstance(model, Decoder):
        _log.info("the model runs on torch's operators: there are no kernels for a model by %s", type(model).__name__)
        return model
    if find_spec("triton") is None:
        _log.warning("the model runs on torch's operators, which is slower: Triton is not installed")
        return model
    from mlsys_orca.backends.triton.decoder import FusedDecoder, missing_kernel

    if (missing := missing_kernel(model)) is not None:
        _log.info("the model runs on torch's operators: there is no kernel for %s", missing)
        return model
    return FusedDecoder(model)
