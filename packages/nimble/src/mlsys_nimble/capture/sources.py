"""Source of an operator in the model: the line, and the path of the module that calls it."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent.parent)


@dataclass(frozen=True, slots=True)
class Site:
    """Source of an operator in the model."""

    path: str = ""  # path of the innermost module, "layer1.0.conv1"; "": the model itself
    source: str = ""  # "net.py:12, in forward: x = self.conv(x)"


def current_site(paths: Mapping[int, str]) -> Site:
    """Return the site of the operator being dispatched, from the Python frames above.

    The line is the innermost outside torch or, where the whole model is torch's modules, the innermost of torch.

    Args:
        paths: Module paths by ``id`` of the module.
    """
    path, line, torch_line = None, "", ""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        filename = code.co_filename
        if path is None or not line:
            module = frame.f_locals.get("self") if code.co_varnames[:1] == ("self",) else None
            if path is None and isinstance(module, nn.Module):
                path = paths.get(id(module))
            if filename.startswith(_TORCH):
                if not torch_line and code.co_name.endswith("forward"):
                    torch_line = _describe(filename, frame.f_lineno, code.co_name)
            elif not filename.startswith((_OWN, "<")) and not line:
                line = _describe(filename, frame.f_lineno, code.co_name)
        if module_is_root(frame.f_locals.get("self"), paths):
            break
        frame = frame.f_back  # type: ignore[assignment]
    return Site(path or "", line or torch_line)


def module_is_root(module: object, paths: Mapping[int, str]) -> bool:
    """Return whether a frame's ``self`` is the captured model; the frames above it are the caller's."""
    return paths.get(id(module)) == ""


def site_of_node(node: torch.fx.Node) -> Site:
    """Return the site of a node of a traced graph, from its metadata."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(iter(reversed(stack.values())))[0] if stack else ""
    path = re.sub(r"^L\['self'\]\.?|^self\.?|\[['\"]?|['\"]?\]|_modules", "", str(path)).strip(".")
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
    for filename, number, name in reversed(frames):
        if not filename.startswith(_TORCH):
            return Site(path, _describe(filename, int(number), name))
    return Site(path)


def _describe(filename: str, number: int, name: str) -> str:
    text = linecache.getline(filename, number).strip()
    return f"{Path(filename).name}:{number}, in {name}" + (f": {text}" if text else "")
