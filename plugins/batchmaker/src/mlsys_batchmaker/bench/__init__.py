"""BatchMaker's evaluation: its figures again, on this machine, against request-level batching."""
