"""Converters: from fitted estimators to modules, one file per family, found by class name in :mod:`.table`."""
