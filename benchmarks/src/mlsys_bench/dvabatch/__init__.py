"""The suites of DVABatch: the paper's figures, the ideal of joining, servers over HTTP."""
