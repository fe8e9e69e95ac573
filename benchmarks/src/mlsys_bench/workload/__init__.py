"""The load generator: fires a trace of requests at a target, sums up records, draws tables; ``mlsys workload``."""
