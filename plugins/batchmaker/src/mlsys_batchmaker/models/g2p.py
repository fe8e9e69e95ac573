"""g2p-en: letters to phonemes with a GRU encoder and a feed-previous GRU decoder, with the package's weights.

The checkpoint lies in the wheel ``g2p-en`` (``mlsys models fetch g2p-en``). The package looks words up in a dictionary
first and predicts only the others; the prediction is what runs here.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from numpy.typing import ArrayLike

from mlsys_batchmaker.cells.cell import make_cell
from mlsys_batchmaker.cells.gru import WordGRUCell, WordGRUDecoderCell
from mlsys_batchmaker.models.model import Model, Payload, Tensor, sequence
from mlsys_batchmaker.plan import CellGraph, Wire
from mlsys_batchmaker.plan.spec import DEFAULT_BATCH_SIZES
from mlsys_batchmaker.scheduling.requests import Values

MAX_PHONEMES = 20
_UNKNOWN, _END_OF_WORD = 1, 2
_START, _END = 2, 3
_STRESSED = ("AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW")
_VOICELESS = ("CH", "F", "HH", "K", "P", "S", "SH", "T", "TH")
_VOICED = ("B", "D", "DH", "G", "JH", "L", "M", "N", "NG", "R", "UW", "V", "W", "Y", "Z", "ZH")
# In the order of the checkpoint's rows: four marks, then all phonemes by name (a stressed one has three forms).
_FORMS = (*(f"{phoneme}{stress}" for phoneme in _STRESSED for stress in range(3)), *_VOICELESS, *_VOICED)
PHONEMES = ("<pad>", "<unk>", "<s>", "</s>", *sorted(_FORMS))


class Graphemes:
    """word: a string (bytes, UTF-8) -> phonemes: strings."""

    name = "g2p-en"
    inputs: tuple[Tensor, ...] = (Tensor("word", "bytes", (1,)),)
    outputs: tuple[Tensor, ...] = (Tensor("phonemes", "bytes", (-1,)),)

    def unfold(self, request: Payload, graph: CellGraph) -> None:
        """Add a chain over the letters and the end of the word, then at most 20 phonemes."""
        letters = encode(word_of(request))
        encoder = graph.chain("encoder", len(letters), each={"word": letters}, carry={"h": "h"})
        first: dict[str, Wire | ArrayLike] = {"word": _START, "h": encoder.last("h")}
        graph.result(graph.chain("decoder", MAX_PHONEMES, carry={"word": "word", "h": "h"}, first=first))

    def structure_key(self, request: Payload) -> tuple[Hashable, Sequence[ArrayLike]]:
        """Return the length and the letters: words of one length unfold alike."""
        letters = encode(word_of(request))
        return len(letters), (letters,)

    def finish(self, request: Payload, values: Sequence[Values]) -> Payload:
        """Return the names of the phonemes, without the end's mark."""
        numbers = [int(value[0]) for value in values]
        names = [PHONEMES[each].encode() for each in numbers if each != _END]
        return {"phonemes": np.array(names, dtype=object)}

    def example(self) -> Payload:
        """Return a word."""
        return {"word": np.array([b"cell"], dtype=object)}

    def config(self) -> Mapping[str, Any]:
        """See :class:`mlsys_batchmaker.models.model.Architecture`."""
        return {}


def word_of(request: Payload) -> str:
    """Return the request's word.

    Raises:
        InvalidInputError: there is none, it is empty, longer than 100 letters, or no UTF-8.
    """
    values = sequence(request, "word").reshape(-1)
    raw = values[0]
    try:
        word = raw.decode() if isinstance(raw, bytes) else str(raw)
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"word: {raw!r} is no UTF-8: {error}") from None
    if len(values) != 1 or not 1 <= len(word) <= 100:
        raise InvalidInputError(f"word: one word of 1 to 100 letters is needed, got {len(values)} of {len(word)}")
    return word.lower()


def encode(word: str) -> np.ndarray:
    """Return numbers of the letters and of the word's end, [len(word) + 1] int64; what is no letter is unknown."""
    letters = [ord(char) - ord("a") + 3 if "a" <= char <= "z" else _UNKNOWN for char in word]
    return np.array([*letters, _END_OF_WORD], dtype=np.int64)


def g2p_model(checkpoint: Path, *, batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES, name: str = "g2p-en") -> Model:
    """Load the model with the weights of ``checkpoint20.npz``.

    Raises:
        InvalidInputError: the file has other tensors.
    """
    try:
        with np.load(checkpoint, allow_pickle=False) as arrays:
            weights = {key: torch.from_numpy(arrays[key]) for key in arrays.files}
        (letters, width), hidden = weights["enc_emb"].shape, weights["enc_w_hh"].shape[1]
        encoder = WordGRUCell(letters, width, hidden)
        decoder = WordGRUDecoderCell(len(weights["dec_emb"]), width, hidden)
        for module, prefix in ((encoder, "enc"), (decoder, "dec")):
            names = {"embedding.weight": "emb", "gru.weight_ih": "w_ih", "gru.weight_hh": "w_hh"}
            names |= {"gru.bias_ih": "b_ih", "gru.bias_hh": "b_hh"}
            state = {own: weights[f"{prefix}_{theirs}"] for own, theirs in names.items()}
            if module is decoder:
                state |= {"projection.weight": weights["fc_w"], "projection.bias": weights["fc_b"]}
            module.load_state_dict(state)
    except Exception as error:  # numpy raises of many kinds where a file is damaged
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InvalidInputError(f"{checkpoint} is not g2p-en's checkpoint20.npz: {reason}") from error
    cells = [
        make_cell("encoder", encoder, batch_sizes=batch_sizes),
        make_cell("decoder", decoder, results=["word"], stop=("word", _END), priority=1, batch_sizes=batch_sizes),
    ]
    return Model(name, cells, Graphemes())
