"""Which way imports point, read from the syntax trees: data flows one way through this package."""

import ast
from pathlib import Path

import forewarn

SOURCE = Path(forewarn.__file__).parent

ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "ema": set(),
    "bands": set(),
    "settings": set(),
    "portable_state": set(),
    "plan": {"settings"},
    "thresholds": {"settings"},
    "config": {"types", "settings", "thresholds", "plan"},
    "distributions": {"types"},
    "convergence": {"types"},
    "gradient_tally": {"types"},
    "evaluation": {"types", "thresholds", "config"},
    "schedule": {"types"},
    "series": {"types", "thresholds"},
    "history": {"types", "thresholds", "series"},
    "remedies": {"types", "config", "series", "history"},
    "learning_remedies": {"types", "history", "remedies"},
    "rules": {"types", "settings", "thresholds", "config", "evaluation", "series", "history"}
    | {"remedies", "learning_remedies"},
    "alerts": {"types", "config", "series", "history", "remedies", "rules"},
    "stats": {"types", "distributions"},
    "probes": {"types", "ema", "distributions", "gradient_tally", "evaluation", "stats"},
    "balance": {"types", "config", "probes"},
    "tasks": {"types", "config", "probes", "balance"},
    "store": {"types", "distributions"},
    "views": {"types", "bands", "distributions", "gradient_tally", "store"},
    "actions": {"types", "alerts"},
    "checklist": {"types", "config", "series", "history", "store", "rules"},
    "diagnosis": {"types", "config", "evaluation", "series", "history", "rules", "alerts", "store", "checklist"},
    "monitor": {"types", "config", "schedule", "evaluation", "convergence", "history", "rules", "alerts", "actions"}
    | {"portable_state", "probes", "store", "tasks", "views"},
    "attach": {"types", "config", "schedule", "rules", "actions", "stats", "probes", "store", "views", "monitor"},
    "compat": {"probes"},
    "trainer": {
        "types",
        "settings",
        "thresholds",
        "config",
        "portable_state",
        "schedule",
        "evaluation",
        "views",
        "attach",
        "monitor",
    },
    "coordinates": {"probes", "trainer"},
    "bench": {"types", "config", "schedule", "stats", "history", "rules", "attach", "monitor", "trainer"},
}
"""What a part may import at any level; the command line may import everything."""

TORCH_FREE = {
    "types", "settings", "thresholds", "plan", "convergence", "config", "evaluation", "bands",
    "distributions", "gradient_tally", "schedule", "series", "history", "remedies", "learning_remedies", "rules",
    "alerts", "store", "views", "actions", "checklist", "diagnosis", "commands", "cli", "__init__", "__main__",
}  # fmt: skip


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(tree: ast.AST, *, top_level_only: bool) -> set[str]:
    nodes = tree.body if top_level_only else ast.walk(tree)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(SOURCE.rglob("*.py"))


def test_every_part_imports_only_what_lies_below_it():
    wrong = []
    for path in FILES:
        part = part_of(path)
        if part not in ALLOWED:
            assert part in {"commands", "cli", "__init__", "__main__"}, f"{part} has no place in the layering"
            continue
        for name in imports(ast.parse(path.read_text()), top_level_only=False):
            if name.startswith("forewarn."):
                target = name.split(".")[1]
                if target != part and target not in ALLOWED[part] and target != "__version__":
                    wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not wrong


def test_what_judges_and_shows_a_stored_run_does_not_import_torch():
    wrong = [
        str(path.relative_to(SOURCE))
        for path in FILES
        if part_of(path) in TORCH_FREE
        and any(
            name.split(".")[0] == "torch" or name.startswith(("forewarn.probes", "forewarn.stats"))
            for name in imports(ast.parse(path.read_text()), top_level_only=True)
        )
    ]
    assert not wrong


def test_no_file_has_grown_into_two():
    long = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: lines for name, lines in long.items() if lines > 400} == {}


def test_no_part_is_named_for_nothing():
    vague = {"utils", "common", "manager", "helpers", "contrib", "misc"}
    assert not [path for path in FILES if vague & set(path.relative_to(SOURCE).with_suffix("").parts)]


def test_nothing_but_the_probes_and_the_engine_walks_gradients():
    wrong = [
        str(path.relative_to(SOURCE))
        for path in FILES
        if part_of(path) not in {"probes", "stats", "trainer", "commands", "bench"}
        and any(
            isinstance(node, ast.Attribute) and node.attr == "grad" for node in ast.walk(ast.parse(path.read_text()))
        )
    ]
    assert not wrong
