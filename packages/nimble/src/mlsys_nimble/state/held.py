"""Record of what a model's modules hold, and its return when a run of the model must leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_PARTS = ("_parameters", "_buffers")  # entries of a module that no path names


class Held:
    """Contents of a model's modules: their dictionaries of attributes, and the dictionaries and lists within them.

    As a context manager it puts back every entry that has become another object.
    """

    def __init__(self, model: nn.Module) -> None:
        self._saved: list[tuple[str, Any, dict[Any, Any]]] = []  # path, container, its items
        seen: set[int] = set()
        rest: list[tuple[str, Any]] = [(path, vars(module)) for path, module in reversed([*model.named_modules()])]
        while rest:
            path, container = rest.pop()
            if id(container) not in seen and isinstance(container, dict | list):
                seen.add(id(container))
                self._saved.append((path, container, _items(container)))
                rest += [(_joined(path, key), value) for key, value in reversed(self._saved[-1][2].items())]

    def tensors(self) -> Iterator[tuple[str, Any, Any, Tensor]]:
        """Yield each tensor with its path, its container and its key there."""
        for path, container, saved in self._saved:
            for key, value in saved.items():
                if isinstance(value, Tensor):
                    yield _joined(path, key), container, key, value

    def changed(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the path, the old and the new value of each entry that is another object now; None for no entry."""
        for path, container, saved in self._saved:
            items = _items(container)
            for key in {**saved, **items}:
                if saved.get(key) is not items.get(key):
                    yield _joined(path, key), saved.get(key), items.get(key)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.put_back()

    def put_back(self) -> None:
        """Put back every entry that has become another object."""
        for _path, container, saved in self._saved:
            if [*map(id, _items(container).values())] != [*map(id, saved.values())]:
                container.clear()
                container.update(saved) if isinstance(container, dict) else container.extend(saved.values())


def _items(container: Any) -> dict[Any, Any]:
    return dict(container if isinstance(container, dict) else enumerate(container))


def _joined(path: str, key: Any) -> str:
    return path if key in _PARTS else f"{path}.{key}".strip(".")
