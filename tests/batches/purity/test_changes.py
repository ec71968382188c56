"""What source code assigns or changes."""

from __future__ import annotations

import ast

import pytest

from hetero.batches.purity.changes import changes, is_global


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("SCALE = 1", [("SCALE",)]),
        ("SCALE += 1", [("SCALE",)]),
        ("a, config.b = 1, 2", [("a",), ("config", "b")]),
        ("CACHE[key(1)] = 2", [("CACHE",)]),
        ("del self.seen[0]", [("self", "seen")]),
        ("self.stats['n'].all += 1", [("self", "stats", "all")]),
        ("self.seen.append(1)", [("self", "seen")]),
        ("setattr(config, 'DEPTH', 2)", [("config", "DEPTH")]),
        ("setattr(config, name, 2)", []),
        ("parser.parse_args([], namespace=ARGS)", [("ARGS",)]),
        ("print(SCALE, CACHE.get(1), make().seen)", []),
        ("make().seen = 1", []),
    ],
)
def test_changes_name_what_is_assigned_or_changed(statement: str, names: list[tuple[str, ...]]) -> None:
    found = [names for names, line in changes(ast.parse(statement)) if line == 1]
    assert sorted(found) == sorted(names)


def test_name_is_global_unless_the_function_binds_it() -> None:
    tree = ast.parse("def function(given):\n  global DECLARED\n  DECLARED = given\n  local = READ\n")
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    found = {name: is_global(name, function) for name in ("given", "DECLARED", "local", "READ")}
    assert found == {"given": False, "DECLARED": True, "local": False, "READ": True}
