"""The suites of BatchMaker: the paper's figures, and the cost of its parts."""
