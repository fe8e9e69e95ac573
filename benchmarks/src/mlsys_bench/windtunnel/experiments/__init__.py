"""The dissertation's experiment on flights (section 5.4): ``mlsys bench windtunnel-tables``.

:mod:`.data` reads and splits, :mod:`.sources` makes the pipeline, :mod:`.outside` the models that are no translation;
:mod:`.suite` fits them one by one into a journal and reports. Importing this package imports nothing heavy.
"""
