"""What the oracle of changed configurations has found, and some of its cases; ``full.py`` runs all of them."""

from __future__ import annotations

import pytest

from tests.conformance.orca.families import CASES
from tests.oracles.orca_configs.changes import ENCODERS, changes
from tests.oracles.orca_configs.compare import decoder_verdict, encoder_verdict
from tests.oracles.orca_configs.full import runs

EVERY = 400


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("qwen2", {"is_causal": False}, "refused"),
        ("gemma3", {"attn_logit_softcapping": 0.3}, "equal"),
        ("deepseek-v3", {"q_lora_rank": 0}, "refused"),
    ],
)
def test_decoders_that_were_wrong(name: str, change: dict[str, object], expected: str) -> None:
    assert decoder_verdict(CASES[name], change)[0] == expected


def test_encoders_that_were_wrong() -> None:
    assert encoder_verdict(ENCODERS["mpnet"], {"relative_attention_num_buckets": 64})[0] == "refused"
    assert encoder_verdict(ENCODERS["bert"], {"intermediate_size": 0})[0] in ("equal", "refused")
    assert encoder_verdict(ENCODERS["bert"], {"is_causal": False})[0] == "equal"


def test_some_of_all_changes_are_equal_or_refused() -> None:
    cases = [(verdict, change) for _, case, verdict in runs() for change in changes(case)]
    assert len(cases) > 6000
    found = [verdict(change)[0] for verdict, change in cases[::EVERY]]
    assert set(found) <= {"equal", "refused", "none"}
    assert found.count("equal") > len(found) // 2
