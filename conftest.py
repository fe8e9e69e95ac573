"""Settings of every test: none is decided by the clock. pytest's own timeout ends what hangs."""

import inspect

import httpx
from hypothesis import Phase, settings

# httpx gives up after five seconds by default: on a busy machine that decides tests which are not about time.
_patience = inspect.signature(httpx.get).parameters["timeout"].default
_patience.connect = _patience.read = _patience.write = _patience.pool = None

settings.register_profile("mlsys", deadline=None)
# For `make mutants`: a failure is enough, its smallest form is not wanted; thousands of runs have few examples each.
settings.register_profile(
    "mutants", deadline=None, phases=(Phase.explicit, Phase.generate), derandomize=True, max_examples=25
)
settings.load_profile("mlsys")
