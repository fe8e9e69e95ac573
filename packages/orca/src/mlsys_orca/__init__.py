"""Orca: LLM serving with iteration-level scheduling and selective batching."""

from typing import TYPE_CHECKING

from mlsys_core.lazy import lazy_exports

if TYPE_CHECKING:
    from mlsys_orca.llm.answers import Answer, Choice, Piece, ToolCall
    from mlsys_orca.llm.llm import LLM

__version__ = "0.1.0"

__all__ = ["LLM", "Answer", "Choice", "Piece", "ToolCall"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"llm.answers": ["Answer", "Choice", "Piece", "ToolCall"], "llm.llm": ["LLM"]}
)
