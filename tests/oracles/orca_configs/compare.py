"""One checkpoint of a changed configuration beside transformers: equal, refused, wrong, raw, or not to be had there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import MlsysError
from mlsys_core.loop import ServeRequest
from mlsys_encoders.models.bert_folder import load_bert
from mlsys_orca.loading.load import load_model
from torch import Tensor
from torch.nn import functional

from tests.conformance.orca.families import VOCAB, Case, log_probabilities, write_checkpoint

SEQUENCES = [[(7 * i + 3 * j * j + 11) % VOCAB for j in range(length)] for i, length in enumerate([40, 1, 9, 23])]
TEXTS = [[2 + token % 100 for token in sequence] for sequence in SEQUENCES]  # of encoders
TOLERANCE = 2e-3  # of a log-probability or a vector's element, in fp32


def decoder_verdict(case: Case, change: dict[str, Any]) -> tuple[str, str]:
    """Compare Orca's log-probabilities; see :func:`_verdict`."""

    def theirs(folder: Path) -> list[Tensor]:
        reference = write_checkpoint(folder, Case(case.family, case.config | change))
        return [reference(torch.tensor([each])).logits[0].log_softmax(-1) for each in SEQUENCES]

    return _verdict(theirs, lambda folder: log_probabilities(load_model(folder, dtype="fp32"), SEQUENCES))


def encoder_verdict(case: Case, change: dict[str, Any]) -> tuple[str, str]:
    """Compare normalised mean vectors of DVABatch; see :func:`_verdict`."""

    def theirs(folder: Path) -> list[Tensor]:
        reference = write_checkpoint(folder, Case(case.family, case.config | change), auto="AutoModel")
        vectors = [reference(torch.tensor([text])).last_hidden_state[0].mean(0) for text in TEXTS]
        return [functional.normalize(vector, dim=0) for vector in vectors]

    return _verdict(theirs, _dvabatch_vectors)


def _dvabatch_vectors(folder: Path) -> list[Tensor]:
    model = load_bert(folder, is_packed=True)
    requests: list[ServeRequest[Any]] = [
        ServeRequest(str(number), payload, length=model.check(payload)) for number, payload in enumerate(_rows())
    ]
    values: Any = model.collate(requests, 1)
    for stage in range(model.num_stages):
        values = model.run(stage, values)
    return [torch.from_numpy(vector) for vector in model.results(values)]


def _rows() -> list[Any]:
    return [torch.tensor(text).numpy() for text in TEXTS]


@torch.inference_mode()
def _verdict(theirs: Callable[[Path], list[Tensor]], ours: Callable[[Path], list[Tensor]]) -> tuple[str, str]:
    """Return ``equal``, ``refused``, ``wrong`` or ``raw``, or ``none`` where transformers has no answer; and why."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            expected = theirs(Path(folder))
        except Exception as error:  # noqa: BLE001  third-party code
            return "none", type(error).__name__
        if not all(rows.isfinite().all() for rows in expected):
            return "none", "not finite"
        try:
            found = ours(Path(folder))
        except MlsysError as error:
            return "refused", str(error).replace(folder, "the folder")
        except Exception as error:  # noqa: BLE001  the fault that is looked for
            return "raw", f"{type(error).__name__}: {error}"
    difference = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    return ("equal" if difference < TOLERANCE else "wrong"), f"{difference:.2g}"
