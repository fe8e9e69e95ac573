"""Exported programs (``.pt2``) from any source: read without pickle and without running code that the file names.

``torch.export.load`` unpickles sample inputs, and evaluates strings of the file as Python in four places. Here the
archive's JSON is rebuilt by an allow list and two small grammars (:mod:`~mlsys_core.pt2.schema`), tensors are read
from raw bytes (:mod:`~mlsys_core.pt2.archive`), and only then does torch make a program of both
(:mod:`~mlsys_core.pt2.program`). Anything else is refused, unless the user trusts the file's maker.
"""
