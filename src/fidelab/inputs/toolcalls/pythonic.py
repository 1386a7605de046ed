"""Calls as Python writes them, with constants as named arguments.  Their text is parsed, never run."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from fidelab.inputs.toolcalls.unreadable import UnreadableError


def python_calls(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return names and arguments of the calls in a text.

    Raises:
        UnreadableError: If it has anything else, or an argument is not a constant.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UnreadableError("a call that cannot be parsed") from None
    for statement in tree.body:
        node = statement.value if isinstance(statement, ast.Expr | ast.Assign) else statement
        for one in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
            yield _python_call(_printed(one))


def _printed(node: ast.AST) -> ast.AST:
    """The argument of ``print``, or the node itself."""
    match node:
        case ast.Call(func=ast.Name(id="print"), args=[one], keywords=[]):
            return one
    return node


def _python_call(node: ast.AST) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call):
        raise UnreadableError("code that is not a call")
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr == "call":
        function = function.value  # Llama's own tools: search.call(…)
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise UnreadableError("an argument has no name")
    if not name:
        raise UnreadableError("the call has no name")
    return name, _once((str(keyword.arg), keyword.value) for keyword in node.keywords)


def _once(pairs: Iterable[tuple[str, ast.expr]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise UnreadableError("a key is there twice")
        found[key] = _constant(value)
    return found


def constant(text: str) -> Any:
    """Return the constant that a text is in Python's notation.

    Raises:
        UnreadableError: If it is something else.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UnreadableError("not a constant") from None
    return _constant(tree.body)


def _constant(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | str() | None as value):
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.Name(id="true" | "false" | "null" as word):
            return {"true": True, "false": False, "null": None}[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return list(map(_constant, items))
        case ast.Dict(keys=keys, values=values):
            names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            if len(names) == len(keys):
                return _once(zip(names, values, strict=True))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise UnreadableError("an argument is code")
