"""The tests; a package, so that ``python -m tests.fuzz.run`` finds this one and none of another distribution."""
