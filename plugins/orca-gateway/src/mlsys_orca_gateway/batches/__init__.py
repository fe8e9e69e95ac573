"""``/v1/files`` and ``/v1/batches``: many requests in a file, answered when there is room, by servers that may die.

``records`` and ``lines`` are pure; ``files`` and ``store`` keep them; ``runner`` has the lines answered by the app's
own routes; ``routes`` are what clients see.
"""
