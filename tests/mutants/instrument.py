"""Copies the tree, and guards each statement that may be deleted with a switch.

One copy holds all mutants: `switch.py` turns one statement off at run time, so that no mutant needs
a copy or a compilation of its own. `statements.json` in the copy lists the statements.
"""

import ast
import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

# Where statements are deleted: what decides, and the client that engines run.
PACKAGES = ("kvd/broker", "kvd/cache", "kvd/tier", "kvd/lane", "client/kvd_client")
# Need an engine, which the suite without engines does not have.
LEFT_OUT = ("client/kvd_client/vllm", "client/kvd_client/sglang")

_FIRST_LINES = "from kvd_mutants_switch import live as _live\n"
_LOGGERS = {"log", "logger", "_log", "_logger", "logging", "warnings"}


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement that can be switched off."""

    number: int
    path: str
    line: int
    scope: str
    text: str


class _Guard(ast.NodeTransformer):
    """Puts `if _live[number]:` before statements of functions; collects them in `statements`."""

    def __init__(self, path: str, first: int) -> None:
        self.statements: list[Statement] = []
        self._path = path
        self._first = first
        self._scope: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._enter(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._enter(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._enter(node)

    def _enter(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self._scope.append(node.name)
        if not isinstance(node, ast.ClassDef) and node.name != "__repr__":
            self._guard_bodies(node, is_function=True)
        else:
            self.generic_visit(node)
        self._scope.pop()
        return node

    def _guard_bodies(self, node: ast.AST, *, is_function: bool = False) -> None:
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if not isinstance(body, list):
                continue
            guarded: list[ast.stmt] = []
            for index, child in enumerate(body):
                is_last = is_function and index == len(body) - 1
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    self._enter(child)
                    guarded.append(child)
                elif self._may_be_deleted(child, is_last=is_last):
                    guarded.append(self._guarded(child))
                else:
                    self._guard_bodies(child)
                    guarded.append(child)
            setattr(node, field, guarded)
        for part in [*getattr(node, "handlers", ()), *getattr(node, "cases", ())]:
            self._guard_bodies(part)

    def _may_be_deleted(self, node: ast.stmt, *, is_last: bool) -> bool:
        """Whether deletion changes behaviour without an error that any run would notice."""
        match node:
            case ast.Expr(value=ast.Constant() | ast.Yield() | ast.YieldFrom()):
                return False
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
                return name not in _LOGGERS
            case ast.Expr() | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break():
                return True
            case ast.Return():
                return not is_last
            case ast.AugAssign():
                return True
            case ast.Assign(targets=targets):
                in_init = self._scope[-1] in {"__init__", "__post_init__"}
                return not in_init and all(
                    isinstance(target, ast.Attribute | ast.Subscript) for target in targets
                )
        return False

    def _guarded(self, node: ast.stmt) -> ast.stmt:
        number = self._first + len(self.statements)
        scope = ".".join(self._scope)
        text = ast.unparse(node)
        self.statements.append(Statement(number, self._path, node.lineno, scope, text))
        test = ast.Subscript(
            value=ast.Name(id="_live", ctx=ast.Load()),
            slice=ast.Constant(value=number),
            ctx=ast.Load(),
        )
        return ast.copy_location(ast.If(test=test, body=[node], orelse=[]), node)


def package_of(path: str) -> str:
    """Return the package that a statement's file belongs to."""
    return next(package for package in PACKAGES if path.startswith(package))


def instrument(source: str, path: str, first: int) -> tuple[str, list[Statement]]:
    """Returns the source with guarded statements, numbered from `first`, and the statements."""
    tree = ast.parse(source)
    guard = _Guard(path, first)
    guard.visit(tree)
    has_docstring = ast.get_docstring(tree) is not None
    tree.body[has_docstring:has_docstring] = ast.parse(_FIRST_LINES).body
    return ast.unparse(ast.fix_missing_locations(tree)), guard.statements


def build(root: Path, target: Path) -> list[Statement]:
    """Copies what git tracks under `root` to `target`, instrumented. Returns the statements."""
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    target.mkdir(parents=True)
    statements: list[Statement] = []
    for name in sorted(tracked):
        source, copy = root / name, target / name
        if not source.is_file():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".py") and name.startswith(PACKAGES) and not name.startswith(LEFT_OUT):
            text, guarded = instrument(source.read_text(), name, len(statements))
            copy.write_text(text)
            statements += guarded
        else:
            copy.write_bytes(source.read_bytes())
            copy.chmod(source.stat().st_mode)
    switch = (root / "tests/mutants/switch.py").read_text()
    (target / "proto/kvd_mutants_switch.py").write_text(
        switch.replace('int(os.environ.get("KVD_MUTANTS", "0"))', str(len(statements)))
    )
    (target / "statements.json").write_text(
        json.dumps([asdict(statement) for statement in statements])
    )
    return statements
