"""Effect of an iteration's frame on a front's requests. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mlsys_orca.engine import wire
from mlsys_orca.engine.recovery import LiveRequest
from mlsys_orca.scheduling.batch import IterationOutput, SampledToken, ScoredPrompt


def seal(live_of: Mapping[int, LiveRequest], report: wire.Iteration) -> IterationOutput:
    """Take what an iteration gave into its requests; return what of it is new to their readers.

    Args:
        live_of: Requests by handle; what is said of others is for nobody.
        report: The iteration.
    """
    for state in report.seals:
        if (live := live_of.get(state.handle)) is not None:
            live.num_computed_tokens = state.num_computed_tokens
            if state.block_table is not None:
                live.block_table = state.block_table
    return IterationOutput(tuple(_sampled(live_of, report)), tuple(_scored(live_of, report)))


def _sampled(live_of: Mapping[int, LiveRequest], report: wire.Iteration) -> Iterator[SampledToken]:
    for token in report.tokens:
        live = live_of.get(token.handle)
        if live is None:
            continue
        if live.num_repeated:
            live.num_repeated -= 1
        elif live.finish_reason is None:
            item = wire.sampled(live.request.request_id, token)
            live.tokens.append(item)
            yield item


def _scored(live_of: Mapping[int, LiveRequest], report: wire.Iteration) -> Iterator[ScoredPrompt]:
    for part in report.scored:
        live = live_of.get(part.handle)
        if live is not None:
            new = live.take_scored(wire.scored(live.request.request_id, part))
            if new is not None:
                yield new
