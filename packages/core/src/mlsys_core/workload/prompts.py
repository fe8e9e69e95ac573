"""Text of roughly a given number of tokens, for traces that carry only counts.

Each word is a single token, with its leading space, in the common byte-pair vocabularies. The exact count depends on
the tokenizer: results keep the count the server reports. Texts differ from request to request, so that a
server's prefix cache finds nothing to reuse.
"""

from __future__ import annotations

import random

_WORDS = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city name team minute idea body back parent face level office
door health person art war history party result change morning reason research girl guy food moment air
teacher force order
""".split()  # noqa: SIM905 - a list of them fills three pages


def synthetic_prompt(num_tokens: int, *, seed: int) -> str:
    """Return ``num_tokens`` common words drawn with ``seed``.

    Example:
        >>> len(synthetic_prompt(5, seed=0).split())
        5
    """
    # Seeded by text: as an integer, -1 would give what 1 gives.
    return " ".join(random.Random(f"prompt {seed}").choices(_WORDS, k=num_tokens))
