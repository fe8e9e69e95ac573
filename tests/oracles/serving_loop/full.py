"""The serving loop under interleavings of submit, cancel, drain, stop, signals and completions: ``make oracles``.

Every scene by every plan of one choice (another thread goes on, or a signal comes), and by a sample of those of two and
three. A request that was accepted is told of once, a refused one never, and nothing waits for what will not come.
"""

from __future__ import annotations

import sys
from collections import Counter

from tests.oracles.serving_loop.scenes import explore, sampler, scenes

SHARES = {1: 1.0, 2: 0.15, 3: 0.05}  # of the choices at each level


def main(share: float = 1.0, seed: int = 0) -> int:
    """Run that share of the plans and print the tally; 1 if one failed."""
    runs: Counter[int] = Counter()
    bad = []
    for number, scene in enumerate(scenes()):
        for depth, of_depth in SHARES.items():
            try:
                runs[depth] += explore(scene, depth, sampler(share * of_depth, seed + number))
            except AssertionError as error:
                bad.append(f"WRONG {error}")
                print(bad[-1], flush=True)
    by_depth = ", ".join(f"{count:,} of up to {depth}" for depth, count in runs.items())
    print(f"serving_loop: {runs.total():,} runs ({by_depth} choices), {len(bad)} scenes wrong")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(*(kind(text) for kind, text in zip((float, int), sys.argv[1:], strict=False))))
