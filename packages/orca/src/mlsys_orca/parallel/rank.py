"""The loop of one rank: take a message, pass it on, wait for the states before, run, hand on.

A rank keeps no state of a request but keys and values. It ends when it loses a neighbour: what it has computed by then
is void, and the group that follows goes on from what the front has sealed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from mlsys_core.errors import ServingError

from mlsys_orca.backends.native.iteration import NativeKVCache
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.parallel import messages
from mlsys_orca.parallel.channels import RankLinks
from mlsys_orca.parallel.shard import Shard


class Rank:
    """One process's part in each iteration of a group.

    Args:
        shard: Its part of the model, which has joined the ranks of its stage.
        links: Its channels.
        cache_of: Makes the keys and values of a replica, when no other process writes to them any more.
        hello: Said to the master first.
        kv_identity: Returns the name of a replica's memory for keys and values.
    """

    def __init__(
        self,
        shard: Shard,
        links: RankLinks,
        cache_of: Callable[[int], NativeKVCache],
        *,
        hello: messages.Hello,
        kv_identity: Callable[[int], str] = lambda _: "",
    ) -> None:
        self._shard, self._links, self._cache_of, self._hello = shard, links, cache_of, hello
        self._kv_identity = kv_identity
        self._cache: NativeKVCache | None = None
        self._ended_s = 0.0  # when the last iteration had ended
        self._was_waiting = False  # whether a message was there then

    def run(self) -> None:
        """Follow the messages until a neighbour has gone.

        Raises:
            GroupBrokenError: the neighbour went in the middle of an iteration.
            ServingError: a step came before a replica was named.
        """
        links = self._links
        assert links.up is not None
        assert links.down is not None
        links.up.send(self.greeting)
        with torch.inference_mode():
            while (payload := links.down.receive()) is not None:
                for channel in links.onward:  # before anything runs: nobody waits for this rank to know what comes
                    channel.send(payload)
                if answer := self.follow(payload):
                    links.up.send(answer)

    @property
    def greeting(self) -> bytes:
        """First words to the master."""
        return messages.encode(self._hello)

    def follow(self, payload: bytes) -> bytes:
        """Do what one message of the master says, in inference mode; return the answer, which may be empty.

        Raises:
            GroupBrokenError: a neighbour has gone.
            ServingError: a step came before a replica was named.
        """
        message = messages.decode_to_rank(payload)
        if isinstance(message, messages.Serve):
            self._cache = self._cache_of(message.replica)
            return messages.encode(messages.Serving(self._kv_identity(message.replica)))
        return self._step(message)

    def _step(self, step: messages.Step) -> bytes:
        """Run one iteration: states in, states or results out."""
        links, cache = self._links, self._cache
        if cache is None:
            raise ServingError("a step came before the keys and values it is about")
        batch = messages.batch_of(step)
        cache.copy_blocks(step.block_copies)
        inputs = ForwardInputs(
            batch,
            block_size=cache.block_size,
            device="cpu",
            wanted=step.wanted,
            needs_logits=step.needs_logits,
        )
        states = None
        if links.states_in is not None:
            states = links.states_in.receive(step.number, batch.num_tokens)
        began_s = time.perf_counter()
        out = None
        if links.states_out is not None:
            out = links.states_out.room(step.number, batch.num_tokens)
        elif links.results is not None:
            gives_logits = step.needs_logits or self._shard.needs_logits
            make = links.results.logits if gives_logits else links.results.peaks
            out = make(step.number, len(step.wanted))
        self._shard.run(inputs, states, out, cache)
        now = time.perf_counter()
        if links.states_out is not None:
            links.states_out.send(step.number)
        done = None
        if links.results is not None:
            links.results.send(step.number)
            idle_s = began_s - self._ended_s if self._ended_s else 0.0
            done = messages.Done(step.number, now - began_s, idle_s, self._was_waiting)
        self._ended_s, self._was_waiting = time.perf_counter(), links.down is not None and links.down.is_waiting()
        return b"" if done is None else messages.encode(done)
