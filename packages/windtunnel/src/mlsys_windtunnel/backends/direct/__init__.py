"""Answers without torch: a network as functions of numpy and native code, planned once and kept while nothing changes.

An operator of torch takes microseconds before it computes, which is most of what one row costs. ``forms.py`` and
``heads.py`` hold the functions, ``program.py`` strings them together.
"""
