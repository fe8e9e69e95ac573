"""Tables of the documentation, written from the files in ``benchmarks/results``.

A page says which table it wants between two comments, a renderer and its files::

    <!-- figures: nimble.nets nimble-zen3.json -->
    <!-- end -->

``make figures`` writes what belongs between them.
"""
