"""The experiments of the dissertation's section 5.4 on data that everybody can have: ``mlsys bench windtunnel-tables``.

:mod:`.data` reads and splits, :mod:`.sources` makes the pipelines, :mod:`.baselines` the outside models; :mod:`.plan`
says which cells the tables have, :mod:`.run` fits them one by one into a journal, :mod:`.tables` makes the report.
Importing this package imports nothing heavy.
"""
