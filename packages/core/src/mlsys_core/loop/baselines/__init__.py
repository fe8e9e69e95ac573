"""Request-level baselines: schedulers that batch whole requests, for comparison with iterations, cells and stages.

Their requests are :class:`~mlsys_core.loop.request.ServeRequest`, their batches :class:`RequestBatch`, and the
output of a batch is a sequence of one result per request. Within a queue (a bucket of ``Bucketed``) all serve the
smallest ``priority`` first and equals first come, first served.
"""

from mlsys_core.loop.baselines.batch import RequestBatch
from mlsys_core.loop.baselines.bucketed import Bucketed
from mlsys_core.loop.baselines.delay_batch import DelayBatch
from mlsys_core.loop.baselines.static_batch import StaticBatch
from mlsys_core.loop.baselines.zero_batch import ZeroBatch

__all__ = ["Bucketed", "DelayBatch", "RequestBatch", "StaticBatch", "ZeroBatch"]
