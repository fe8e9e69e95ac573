"""Distribution of tests over xdist's workers: a whole file to one, so that its models and servers are made once."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadGroupScheduling


class ByFile(LoadGroupScheduling):
    """Hand out files, and groups of ``xdist_group``, in the order of the collection.

    Args:
        config: pytest's.
        log: xdist's.
    """

    def __init__(self, config: Any, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # xdist's own order is by number of tests; long files may have one

    def _split_scope(self, nodeid: str) -> str:
        """Return the name of what is handed out together with a test.

        Example:
            >>> by_file = ByFile.__new__(ByFile)
            >>> by_file._split_scope("tests/test_a.py::test_b[c@d]")
            'tests/test_a.py'
            >>> by_file._split_scope("tests/test_a.py::test_b@group")
            'group'
        """
        scope: str = super()._split_scope(nodeid)
        return scope.partition("::")[0] if scope == nodeid else scope
