"""Imports that import-linter cannot see: it knows torch as one name, and torch's private parts are the point here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = [*(ROOT / "remat_compiler").rglob("*.py"), *(ROOT / "passes/remat_passes").rglob("*.py")]
TORCH_PRIVATE = ROOT / "remat_compiler/torch_private"  # the one door to what torch may change without notice


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an attribute chain that starts at a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def names_used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that is imported, or reached through an attribute of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, dotted(node)


def is_torch_private(name: str) -> bool:
    """Whether ``name`` is ``torch._*``; ``torch.__version__`` and its like are public."""
    root, _, rest = name.partition(".")
    return root == "torch" and rest.startswith("_") and not rest.startswith("__")


def private_uses(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    uses = {(line, name) for line, name in names_used(tree) if is_torch_private(name)}
    return [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in sorted(uses)]


def test_only_torch_private_touches_torch_private_parts() -> None:
    assert [use for path in MODULES if TORCH_PRIVATE not in path.parents for use in private_uses(path)] == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch._inductor.config", True),
        ("from torch._dynamo import reset", True),
        ("from torch import _functorch", True),
        ("import torch\n\n\ndef f():\n    return torch._C._get_tracing_state()", True),
        ("import torch.fx\nfrom torch.fx import Node\ntorch.__version__", False),
        ("from ._torch import x\nimport pytorch._x", False),
    ],
)
def test_the_check_sees_every_way_to_reach_them(source: str, expected: bool) -> None:
    assert any(is_torch_private(name) for _, name in names_used(ast.parse(source))) is expected
