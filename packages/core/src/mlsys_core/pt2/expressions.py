"""Grammars for the strings that torch evaluates as Python: symbolic sizes, and guards on inputs.

A string is parsed, every node of its tree is looked up, and it is written anew from the tree. So torch never evaluates
the file's own text, and the new text holds no attribute, call or name that is not listed here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from mlsys_core.errors import InvalidInputError


def words(text: str, *, prefix: str = "") -> frozenset[str]:
    """Return the words of ``text``, each after ``prefix``.

    Example:
        >>> sorted(words("add sub", prefix="_operator."))
        ['_operator.add', '_operator.sub']
    """
    return frozenset(prefix + word for word in text.split())


SYMBOL = re.compile(r"[a-z]{1,6}[0-9]{1,9}")
KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\- ]{0,255}")  # of a dict in the inputs: no quote, no backslash
MAX_LENGTH = 8192
MAX_NODES = 1024
_MAX_INT = 1 << 63
_MAX_EXPONENT = 8
_MAX_POWERS = 2  # one within the other: larger ones could take for ever to multiply out

_SYMBOLIC = words("""
    Add Mul Mod PythonMod Max Min Abs FloorDiv CeilDiv CleanDiv ModularIndexing Where RShift
    FloatTrueDiv IntTrueDiv TruncToInt TruncToFloat CeilToInt FloorToInt RoundToInt RoundDecimal
    ToFloat Identity IsNonOverlappingAndDenseIndicator Equality Unequality LessThan StrictLessThan
    GreaterThan StrictGreaterThan Eq Ne Le Lt Ge Gt And Or Not Piecewise ExprCondPair
""")
_NUMBERS = frozenset({"Integer", "Float", "ToFloat"})
_POWERS = frozenset({"Pow", "PowByNatural", "FloatPow"})
_CONSTANTS = frozenset({"true", "false", "True", "False", "oo", "int_oo"})
_GUARD_FUNCTIONS = frozenset({"max", "min", "abs", "int", "float", "bool", "round"}) | _SYMBOLIC
_GUARD_METHODS = frozenset({"size", "stride", "storage_offset"})
_GUARD_MODULES = {
    "math": frozenset({"trunc", "floor", "ceil", "sqrt"}),
    "torch": frozenset({"sym_float", "sym_int", "sym_max", "sym_min", "sym_not", "sym_ite"}),
}
_OPERATORS = (
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.USub, ast.UAdd, ast.Not, ast.And, ast.Or,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip


def symbolic(text: str) -> str:
    """Return a symbolic size, such as ``Mul(Integer(2), Symbol('s0', integer=True))``, written anew.

    Raises:
        InvalidInputError: it holds anything but symbols, numbers and arithmetic, or is too long.
    """
    return _written_anew(text, _check_symbolic)


def guard(text: str) -> str:
    """Return a guard, such as ``L['x'].size()[0] % 2 == 0``, written anew.

    Raises:
        InvalidInputError: it holds anything but sizes of inputs, numbers and arithmetic, or is too long.
    """
    return _written_anew(text, _check_guard)


def _written_anew(text: str, check: Callable[[ast.expr], None]) -> str:
    if len(text) > MAX_LENGTH:
        raise _refusal(text)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
            raise _refusal(text)
        check(tree)
        return ast.unparse(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError, _UnknownError) as error:
        raise _refusal(text) from error


def _refusal(text: str) -> InvalidInputError:
    shown = text if len(text) <= 80 else f"{text[:80]}..."
    return InvalidInputError(f"the expression {shown!r} is not plain arithmetic of sizes")


class _UnknownError(Exception):
    """A node that the grammar lacks."""


def _check_symbolic(node: ast.expr, powers: int = 0) -> None:
    if _is_number(node) or (isinstance(node, ast.Name) and (node.id in _CONSTANTS or SYMBOL.fullmatch(node.id))):
        return None
    if _check_operation(node, lambda child: _check_symbolic(child, powers)):
        return None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _check_power(node.left, node.right, powers)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name = node.func.id
        if name in _POWERS and len(node.args) == 2 and not node.keywords:
            return _check_power(node.args[0], node.args[1], powers)
        if name in ("Symbol", "Integer", "Float", "Rational"):
            return _check_leaf(name, node)
        if name in _SYMBOLIC and not node.keywords:
            for child in node.args:
                _check_symbolic(child, powers)
            return None
    raise _UnknownError


def _check_power(base: ast.expr, exponent: ast.expr, powers: int) -> None:
    while isinstance(exponent, ast.Call) and isinstance(exponent.func, ast.Name) and len(exponent.args) == 1:
        if exponent.func.id not in ("Integer", "Float", "ToFloat") or any(
            k.arg != "precision" for k in exponent.keywords
        ):
            raise _UnknownError
        exponent = exponent.args[0]
    if powers >= _MAX_POWERS or not _is_small(exponent):
        raise _UnknownError
    _check_symbolic(base, powers + 1)


def _is_small(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _is_small(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return bool(re.fullmatch(r"-?[0-9]\.[0-9]{1,20}", node.value))
    return _is_number(node) and isinstance(node, ast.Constant) and abs(node.value) <= _MAX_EXPONENT  # type: ignore[arg-type]


def _check_leaf(name: str, node: ast.Call) -> None:
    if name == "Symbol":
        is_name = len(node.args) == 1 and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
        if not is_name or not SYMBOL.fullmatch(node.args[0].value):  # type: ignore[attr-defined]
            raise _UnknownError
        kinds = {"positive", "integer", "nonnegative", "nonzero", "real", "finite"}
        if any(k.arg not in kinds or not _is_truth(k.value) for k in node.keywords):
            raise _UnknownError
        return
    if name == "Float":
        digits = node.args[0] if len(node.args) == 1 else None
        if not isinstance(digits, ast.Constant) or not re.fullmatch(
            r"-?[0-9]{1,25}(\.[0-9]{0,40})?(e[-+]?[0-9]{1,3})?", str(digits.value)
        ):
            raise _UnknownError
        if any(k.arg != "precision" or not (_is_number(k.value) and _below(k.value, 1024)) for k in node.keywords):
            raise _UnknownError
        return
    if node.keywords or len(node.args) != (1 if name == "Integer" else 2) or not all(map(_is_signed_int, node.args)):
        raise _UnknownError


def _check_guard(node: ast.expr) -> None:
    if _is_number(node) or (isinstance(node, ast.Name) and node.id == "inf") or _is_input(node):
        return None
    if _check_operation(node, _check_guard):
        return None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and _is_small(node.right):
        return _check_guard(node.left)
    if isinstance(node, ast.Subscript) and _is_number(node.slice) and _is_measure(node.value):
        return None
    if _is_measure(node):
        return None
    if isinstance(node, ast.Call) and not node.keywords and _is_guard_function(node.func):
        for child in node.args:
            _check_guard(child)
        return None
    raise _UnknownError


def _is_input(node: ast.expr) -> bool:
    """Return whether this is ``L['x']`` or an element of it."""
    if isinstance(node, ast.Name):
        return node.id == "L"
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Constant):
        return False
    key = node.slice.value
    is_key = (isinstance(key, str) and KEY.fullmatch(key)) or (type(key) is int and abs(key) < _MAX_INT)
    return bool(is_key) and _is_input(node.value)


def _is_measure(node: ast.expr) -> bool:
    """Return whether this measures an input: ``L['x'].size()`` or the like."""
    if not isinstance(node, ast.Call) or node.args or node.keywords or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr in _GUARD_METHODS and _is_input(node.func.value)


def _is_guard_function(node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _GUARD_FUNCTIONS
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr in _GUARD_MODULES.get(node.value.id, ())
    return False


def _check_operation(node: ast.expr, check: Callable[[ast.expr], None]) -> bool:
    """Check the operands of an operator; return False if the operator is unknown."""
    if isinstance(node, ast.BinOp):
        operators: list[ast.AST] = [node.op]
        operands = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp):
        operators, operands = [node.op], [node.operand]
    elif isinstance(node, ast.BoolOp):
        operators, operands = [node.op], node.values
    elif isinstance(node, ast.Compare):
        operators, operands = list(node.ops), [node.left, *node.comparators]
    else:
        return False
    if not all(isinstance(each, _OPERATORS) for each in operators):
        return False
    for operand in operands:
        check(operand)
    return True


def _is_number(node: ast.expr) -> bool:
    if not isinstance(node, ast.Constant):
        return False
    return isinstance(node.value, float) or (isinstance(node.value, int) and abs(node.value) <= _MAX_INT)


def _is_signed_int(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return _is_number(node) and type(getattr(node, "value", None)) is int


def _below(node: ast.expr, limit: int) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value < limit


def _is_truth(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)
