"""The benchmarks of mlsys: one harness, and the suites of every subsystem."""

__version__ = "0.1.0"
