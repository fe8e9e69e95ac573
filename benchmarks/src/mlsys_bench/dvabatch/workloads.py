"""Lengths and arrivals of the benchmarks (DVABatch, section 8.1; Figure 4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mlsys_core.loop import ServeRequest
from mlsys_core.workload import Poisson

BYTES_PER_TOKEN = 4.6  # of English in BERT's word pieces; by hand: 4.4 of our documentation, 4.7 to 4.9 of papers
_OFFSET, _LABEL, _INDEX = 4, 8, 4  # bytes of Arrow's columns for each example: each text's end, its label and number


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSize:
    """Size of one split of a set, as its publisher states it."""

    split: str
    num_bytes: int  # of the split in Arrow, all columns
    num_examples: int
    num_texts: int = 2  # of an example: a sentence, or a pair
    label_nbytes: int = _LABEL

    @property
    def mean_text_nbytes(self) -> float:
        """Average bytes of an example's texts, together."""
        return self.num_bytes / self.num_examples - self.num_texts * _OFFSET - self.label_nbytes - _INDEX

    @property
    def mean_tokens(self) -> float:
        """Average tokens of an example: word pieces, one mark at the front and one behind each text."""
        return self.mean_text_nbytes / BYTES_PER_TOKEN + 1 + self.num_texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Log-normal token counts, cut at both ends."""

    median: float
    sigma: float  # of the logarithm
    least: int
    most: int
    published: PublishedSize | None = None  # None: no set's

    def sample(self, num: int, seed: int = 0, most: int = 512) -> list[int]:
        """Draw the token counts of ``num`` requests, none above ``most``."""
        drawn = np.random.default_rng(seed).lognormal(math.log(self.median), self.sigma, num)
        return [int(length) for length in np.clip(np.round(drawn), self.least, min(self.most, most))]

    def described(self) -> dict[str, object]:
        """Return the sampler, and the mean that was published, as plain data for a results file."""
        own: dict[str, object] = {"median": self.median, "sigma": self.sigma, "least": self.least, "most": self.most}
        return own if self.published is None else own | {"published_mean_tokens": self.published.mean_tokens}


def _train(num_bytes: int, num_examples: int, num_texts: int = 2, label_nbytes: int = _LABEL) -> PublishedSize:
    return PublishedSize(
        split="train", num_bytes=num_bytes, num_examples=num_examples, num_texts=num_texts, label_nbytes=label_nbytes
    )


GLUE_LIKE: dict[str, Lengths] = {
    "CoLA": Lengths(median=10, sigma=0.40, least=3, most=47, published=_train(489_149, 8_551, 1)),
    "SST-2": Lengths(median=11, sigma=0.75, least=3, most=66, published=_train(4_715_283, 67_349, 1)),
    "MRPC": Lengths(median=53, sigma=0.25, least=20, most=103, published=_train(946_146, 3_668)),
    "STS-B": Lengths(median=25, sigma=0.50, least=10, most=125, published=_train(758_394, 5_749, label_nbytes=4)),
    "QQP": Lengths(median=26, sigma=0.45, least=8, most=330, published=_train(50_901_116, 363_846)),
    "MNLI": Lengths(median=36, sigma=0.50, least=5, most=440, published=_train(74_865_118, 392_702)),
    "QNLI": Lengths(median=46, sigma=0.50, least=12, most=512, published=_train(25_677_924, 104_743)),
    "RTE": Lengths(median=62, sigma=0.55, least=12, most=290, published=_train(848_888, 2_490)),
    "WNLI": Lengths(median=32, sigma=0.45, least=13, most=108, published=_train(107_517, 635)),
    "AX": Lengths(
        median=37,
        sigma=0.65,
        least=6,
        most=240,
        published=PublishedSize(split="test", num_bytes=238_392, num_examples=1_104),
    ),
}
# A few texts have most of the tokens, as documents among queries.
LIKE: dict[str, Lengths] = GLUE_LIKE | {"long-tailed": Lengths(median=24, sigma=1.1, least=3, most=256)}


def lengths_like(workload: str, num: int, seed: int = 0, most: int = 512) -> list[int]:
    """Draw the token counts of ``num`` requests, like those of a name of :data:`.lengths.LIKE`."""
    return LIKE[workload].sample(num, seed, most)


def poisson_trace(
    rate: float, lengths: list[int], payload: Callable[[int], Any], seed: int = 0
) -> list[tuple[float, ServeRequest[Any]]]:
    """Return requests of these lengths that arrive at ``rate`` per second; with one seed only the rate differs."""
    times = Poisson(rate).times(len(lengths), np.random.default_rng(seed))
    return [
        (float(at), ServeRequest(str(number), payload(length), length=length))
        for number, (at, length) in enumerate(zip(times, lengths, strict=True))
    ]


def stepping_trace(
    rates: Sequence[float], num_per_step: int, workload: str | None = None
) -> list[tuple[float, ServeRequest[Any]]]:
    """Return ``num_per_step`` requests at each of ``rates`` per second, one step after another (Figure 15).

    Their lengths are like those of ``workload``; None: all are 1.
    """
    trace: list[tuple[float, ServeRequest[Any]]] = []
    for step, rate in enumerate(rates):
        begin = trace[-1][0] if trace else 0.0
        lengths = [1] * num_per_step if workload is None else lengths_like(workload, num_per_step, seed=step)
        for at, request in poisson_trace(rate, lengths, lambda _: None, seed=step):
            trace.append((begin + at, replace(request, request_id=str(len(trace)))))
    return trace


def backlog(lengths: list[int], payload: Callable[[int], Any]) -> list[tuple[float, ServeRequest[Any]]]:
    """Return requests that all arrive at once; the throughput on them is the peak throughput."""
    return [(0.0, ServeRequest(str(number), payload(length), length=length)) for number, length in enumerate(lengths)]
