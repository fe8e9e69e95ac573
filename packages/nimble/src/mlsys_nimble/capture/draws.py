"""Random numbers that a captured run draws: from which generators, and whether forward itself sets their state.

A replay draws on from where the generators are. So a model that seeds one, puts an earlier state back (``fork_rng``) or
makes one at each call would get other numbers than in eager, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mlsys_core.device import default_generator

from mlsys_nimble.errors import CaptureError, refuse

_ADVICE = "Pass the random numbers as an argument of forward, or prepare with fallback='eager'."
_OTHER_SEED = 0x5EED_0F_0BAD  # seed of the second run; no model uses it by chance


class Draws:
    """States of the generators that one run draws from."""

    def __init__(self, device: torch.device) -> None:
        self._default = default_generator(device)
        self._first: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._last: dict[int, torch.Tensor] = {id(self._default): self._default.get_state()} if self._default else {}
        self._has_drawn = False

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """Return the generators, beside torch's own, that were drawn from."""
        return tuple(generator for generator, _ in self._first.values())

    @contextmanager
    def drawing(self, arguments: Iterable[Any], source: str) -> Iterator[None]:
        """Watch an operator that draws random numbers.

        Raises:
            CaptureError: the state is not what the run's last operator left.
        """
        generator = next((each for each in arguments if isinstance(each, torch.Generator)), self._default)
        if generator is None:
            yield
            return
        before = generator.get_state()
        if id(generator) not in self._last:
            self._first[id(generator)] = generator, before
        elif not torch.equal(before, self._last[id(generator)]):
            raise _refused(source)
        yield
        self._has_drawn = True
        self._last[id(generator)] = generator.get_state()

    def check(self) -> None:
        """Raise if the run ends with torch's own generator in another state than its last operator left it in.

        Raises:
            CaptureError: it does.
        """
        if not self._has_drawn or self._default is None:
            return
        if not torch.equal(self._default.get_state(), self._last[id(self._default)]):
            raise _refused("")

    def restore(self) -> None:
        """Put the generators' states back, but that of torch's own."""
        for generator, state in self._first.values():
            generator.set_state(state)

    def began_at(self, generator: torch.Generator) -> torch.Tensor | None:
        """Return the state that a generator had when it was first drawn from; None if it was not."""
        return self._first[id(generator)][1] if id(generator) in self._first else None


@contextmanager
def other_states(generators: Iterable[torch.Generator], device: torch.device) -> Iterator[list[torch.Tensor]]:
    """Give torch's own generator and these other states within the context; yield those of these."""
    generators = tuple(generators)
    default = default_generator(device)
    before = [(each, each.get_state()) for each in (*generators, *([default] if default else []))]
    try:
        for generator, _ in before:
            generator.manual_seed(_OTHER_SEED)
        yield [generator.get_state() for generator in generators]
    finally:
        for generator, state in before:
            generator.set_state(state)


def refuse_reseeding(first: Draws, second: Draws, given: Iterable[torch.Tensor]) -> None:
    """Refuse a model whose second run does not draw from the first run's generators, at the states given.

    Raises:
        CaptureError: forward makes a generator at each call, or sets its state.
    """
    pairs = zip(first.generators, given, strict=True)
    begins = [(second.began_at(generator), state) for generator, state in pairs]
    is_same = len(first.generators) == len(second.generators)
    if not is_same or any(begin is None or not torch.equal(begin, state) for begin, state in begins):
        raise _refused("")


def _refused(source: str) -> CaptureError:
    what = "forward makes a generator of random numbers or sets the state of one (manual_seed, fork_rng)"
    return refuse(f"{what}, and a replay goes on drawing", source, _ADVICE)
