"""The IPython of a `FakeSandbox`: it assigns, prints, and evaluates arithmetic."""

from __future__ import annotations

import ast
import operator
from typing import TYPE_CHECKING, Final

from prorl_ipc.sandbox_calls import CellError, CellResult
from prorl_trio.testing.fake_shell import cap_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_ipc.sandbox_calls import IpythonRun

_BINARY: Final[dict[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class FakePython:
    """A session of Python: its names, and the number of cells so far."""

    def __init__(self) -> None:
        self._names: dict[str, float | str | None] = {}
        self._execution_count = 0

    def run(self, request: IpythonRun) -> CellResult:
        """Run a cell to its end, which takes no time."""
        self._execution_count += 1
        printed: list[str] = []
        value: float | str | None = None
        error: CellError | None = None
        try:
            for statement in ast.parse(request.code).body:
                value = self._run_statement(statement, printed)
        except (ArithmeticError, NameError, SyntaxError, TypeError) as exc:
            name = type(exc).__name__
            error = CellError(name=name, value=str(exc), traceback=f"{name}: {exc}")
        kept, dropped = cap_bytes("".join(printed).encode(), request.max_output_bytes)
        return CellResult(
            stdout=kept.decode(errors="replace"),
            stderr="",
            result=None if value is None or error else repr(value),
            error=error,
            execution_count=self._execution_count,
            duration_s=0.0,
            dropped_bytes=dropped,
        )

    def _run_statement(self, statement: ast.stmt, printed: list[str]) -> float | str | None:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._names[name] = self._evaluate(value)
                return None
            case ast.Expr(value=ast.Call(func=ast.Name(id="print"), args=args)):
                printed.append(" ".join(str(self._evaluate(arg)) for arg in args) + "\n")
                return None
            case ast.Expr(value=value):
                return self._evaluate(value)
        raise TypeError(f"the fake cannot run {type(statement).__name__}")

    def _evaluate(self, node: ast.expr) -> float | str | None:
        match node:
            case ast.Constant(value=int() | float() | str() | None as value):
                return value
            case ast.Name(id=name):
                if name not in self._names:
                    raise NameError(f"name {name!r} is not defined")
                return self._names[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return _BINARY[type(op)](self._number(left), self._number(right))
        raise TypeError(f"the fake cannot evaluate {type(node).__name__}")

    def _number(self, node: ast.expr) -> float:
        value = self._evaluate(node)
        if isinstance(value, int | float):
            return value
        raise TypeError(f"{value!r} is not a number")
