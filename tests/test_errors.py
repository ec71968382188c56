"""The tree of exceptions: its drawing, the classes and the public names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import hetero
from hetero import errors

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.HeteroError) and value.__module__ == errors.__name__
}


def drawn() -> dict[str, str]:
    """Return the parent of every exception in the drawing, by name."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.fullmatch(r"    ([|`\- ]*)(\w+Error)( \(also \w+\))?", line)
        if found is not None:
            depth = len(found[1]) // 3
            path = [*path[:depth], found[2]]
            if depth:
                parents[found[2]] = path[depth - 1]
    return parents


def raised() -> set[str]:
    """Return the names of all exceptions that the package raises or makes."""
    trees = (ast.parse(path.read_bytes()) for path in Path(hetero.__file__).parent.rglob("*.py"))
    calls = (node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {each.id for each in calls if isinstance(each, ast.Name)}


def test_drawn_tree_is_that_of_the_classes() -> None:
    found = {name: kind.__bases__[0].__name__ for name, kind in CLASSES.items() if kind is not errors.HeteroError}
    assert drawn() == found


def test_every_exception_of_the_tree_is_public() -> None:
    assert set(CLASSES) == {name for name in hetero.__all__ if name.endswith("Error")}
    assert set(CLASSES) <= set(errors.__all__)


def test_every_exception_without_subclasses_is_raised() -> None:
    leaves = set(CLASSES) - set(drawn().values()) - {"HeteroError"}
    assert leaves - raised() == set()
