"""The list of what Nimble refuses among torch's own operator cases, docs/nimble-refusals.md: written, and checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.oracles.nimble_opinfo.cases import VARIANTS, cases_of, label_of, operators
from tests.oracles.nimble_opinfo.judge import Judgement, judge

PAGE = Path(__file__).resolve().parents[3] / "docs" / "nimble-refusals.md"
HEAD = """# Nimble: operators that are refused

`prepare` takes what a fixed schedule can hold, and refuses the rest with a `CaptureError`; `fallback="eager"` and
`torch.compile` run such a part eagerly. This list is generated: of all operators that torch has test data for (OpInfo),
in every variant (views, expansions, no elements, in place, `out=`) and dtype, what `prepare` refuses, and why. All
others give what eager gives.

`python -m tests.oracles.nimble_opinfo.full --write` writes it; `make test-all` runs each line again.

| case: operator, dtype, sample, variant | reason |
| --- | --- |
"""


def reason_of(judgement: Judgement) -> str:
    """The first sentence of a refusal, without the line of the model."""
    text = judgement.reason.removeprefix("CaptureError: ")
    return re.split(r" \([^()]*\.py:|\. ", text)[0].rstrip(".")


def rows(judgements: Iterable[Judgement]) -> dict[str, str]:
    """A case for each operator and reason: its name -> the reason; names in order."""
    found: dict[tuple[str, str], str] = {}
    for judgement in judgements:
        if judgement.verdict == "refused" and judgement.path == "native" and "prepared in" not in judgement.case:
            key = _operator(judgement.case), reason_of(judgement)
            found[key] = min(found.get(key, judgement.case), judgement.case)
    return {case: reason for (_, reason), case in sorted(found.items(), key=lambda item: item[1])}


def write(judgements: Iterable[Judgement]) -> None:
    """Write the page."""
    PAGE.write_text(HEAD + "".join(f"| `{case}` | {reason} |\n" for case, reason in rows(judgements).items()))


def listed() -> dict[str, str]:
    """Return the page's refusals: case -> reason."""
    return dict(re.findall(r"^\| `(.*?)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))


def differences() -> Iterator[str]:
    """Run each listed case again; what it says that is no longer so."""
    numbers = {label_of(info): number for number, info in enumerate(operators())}
    for name, reason in listed().items():
        operator, dtype, _, variant = _parts(name)
        cases = cases_of(operators()[numbers[operator]], dtype, most_samples=2, variants=(variant,))
        judgement = next((judge(case, "native") for case in cases if case.name == name), None)
        if judgement is None or judgement.verdict != "refused" or reason_of(judgement) != reason:
            yield f"{name}: listed as {reason!r}, is {judgement}"


def _operator(name: str) -> str:
    return _parts(name)[0]


def _parts(name: str) -> tuple[str, str, str, str]:
    """operator, dtype, sample, variant."""
    match = re.fullmatch(rf"(.*) (\w+) #(\d+) ({'|'.join(VARIANTS)})", name)
    assert match, name
    return match[1], match[2], match[3], match[4]
