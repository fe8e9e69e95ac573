"""Watching of Orca's iterations (``mlsys_serving.watch``), in this process or by a worker's reports."""
