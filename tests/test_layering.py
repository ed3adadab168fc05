"""Which way imports point, read from the syntax trees: data flows one way through this package."""

import ast
from collections import defaultdict
from pathlib import Path

import forewarn

SOURCE = Path(forewarn.__file__).parent

LOW = {
    "codec", "files", "types", "histograms", "settings", "catalogue", "metrics", "random_states", "standing",
    "rows", "suggestions",
}  # fmt: skip
"""What every part may import."""

ALLOWED: dict[str, set[str]] = {
    "codec": set(),
    "files": set(),
    "random_states": set(),
    "suggestions": set(),
    "types": {"codec"},
    "standing": {"types"},
    "settings": set(),
    "histograms": {"types"},
    "rows": {"types"},
    "catalogue": {"types"},
    "metrics": {"types", "catalogue"},
    "plan": {"settings", "types"},
    "policy": LOW | {"store", "judge"},
    "measure": LOW | {"plan"},
    "store": LOW,
    "judge": LOW | {"store"},
    "config": LOW | {"measure", "judge", "policy"},
    "importing": LOW | {"config", "measure", "store", "judge"},
    "act": LOW | {"config", "measure", "judge", "policy"},
    "views": LOW | {"store", "judge", "config"},
    "snapshots": LOW | {"config", "measure", "store", "judge"},
    "saved_state": {"measure"},
    "troubles": {"measure", "store", "snapshots", "views"},
    "monitor": LOW | {"saved_state", "troubles", "config", "measure", "store", "judge", "act", "snapshots", "views"},
    "attach": LOW | {"plan", "policy", "config", "measure", "store", "judge", "act", "snapshots", "views", "monitor"},
    "preflight_checks": LOW | {"plan", "config", "measure", "store", "judge", "act", "views", "attach"},
    "standalone": LOW | {"measure", "judge"},
    "compat": {"standalone", "measure"},
    "integrations": LOW | {"plan", "config", "measure", "store", "judge", "views", "monitor", "attach"},
    "lab": LOW | {"config", "measure", "store", "judge", "views", "monitor", "attach", "standalone"},
    "trainer": {"lab"},
}
"""What a part may import at any level; the command line may import everything."""

UPWARDS = {("monitor.py", "preflight_checks")}
"""A file that may import a part above it: `Monitor.preflight`, when it is called."""

SHOW_THEMSELVES = {"types.py", "store/reader.py"}
"""Nouns that a prompt or a notebook shows: their methods may import `views` when they are called."""

TORCH_FREE = {
    "codec", "files", "types", "settings", "histograms", "catalogue", "metrics", "plan", "policy", "config", "judge",
    "store", "importing", "views", "cli", "random_states", "standing", "suggestions", "rows", "__init__", "__main__",
}  # fmt: skip


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(tree: ast.AST, *, top_level_only: bool) -> set[str]:
    nodes = tree.body if top_level_only else ast.walk(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


FILES = sorted(SOURCE.rglob("*.py"))


def test_every_part_imports_only_what_lies_below_it():
    wrong = []
    for path in FILES:
        part = part_of(path)
        if part not in ALLOWED:
            assert part in {"cli", "__init__", "__main__"}, f"{part} has no place in the layering"
            continue
        for name in imports(ast.parse(path.read_text()), top_level_only=False):
            if name.startswith("forewarn."):
                target = name.split(".")[1]
                if target == "views" and path.relative_to(SOURCE).as_posix() in SHOW_THEMSELVES:
                    continue
                if (path.relative_to(SOURCE).as_posix(), target) in UPWARDS:
                    continue
                if target != part and target not in ALLOWED[part] and target != "__version__":
                    wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not wrong


def test_what_shows_itself_imports_its_view_when_it_is_shown():
    for path in SHOW_THEMSELVES:
        names = imports(ast.parse((SOURCE / path).read_text()), top_level_only=True)
        assert not [name for name in names if name.startswith("forewarn.views")]


def test_what_judges_and_shows_a_stored_run_does_not_import_torch():
    wrong = [
        str(path.relative_to(SOURCE))
        for path in FILES
        if part_of(path) in TORCH_FREE
        and any(
            name.split(".")[0] == "torch" or name.startswith(("forewarn.measure.probes", "forewarn.measure.engine"))
            for name in imports(ast.parse(path.read_text()), top_level_only=True)
        )
    ]
    assert not wrong


VAGUE_LOCALS = {"at", "each", "found", "known"}
"""Names that do not say what they hold; `index`, `tensor` or `alert` does."""

PUBLIC_KEYWORDS = {("judge/forecast.py", "forecast", "at"), ("monitor.py", "forecast", "at")}
"""Arguments that users name in their calls, by file and function."""


def vague_locals(path: Path) -> list[str]:
    """Vague names of variables and arguments in a file; fields of classes are attributes and do not count."""
    name = path.relative_to(SOURCE).as_posix()
    nodes = list(ast.walk(ast.parse(path.read_text())))
    exempt: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            exempt |= {statement.target for statement in node.body if isinstance(statement, ast.AnnAssign)}
        elif isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            exempt |= {argument for argument in arguments if (name, node.name, argument.arg) in PUBLIC_KEYWORDS}
    variables = [(node.lineno, node.id, node) for node in nodes if is_stored(node)]
    variables += [(node.lineno, node.arg, node) for node in nodes if isinstance(node, ast.arg)]
    return [
        f"{name}:{line}: {local}" for line, local, node in variables if local in VAGUE_LOCALS and node not in exempt
    ]


def is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def test_locals_say_what_they_hold():
    assert not [local for path in FILES for local in vague_locals(path)]


def test_no_part_is_named_for_nothing():
    vague = {"utils", "common", "manager", "helpers", "contrib", "misc"}
    assert not [path for path in FILES if vague & set(path.relative_to(SOURCE).with_suffix("").parts)]


PAIRS = ({"measure/probes", "judge/rules"}, {"importing", "views/export"})
"""A probe and the rules that read it have the same stem, as have the reader and the writer of a format."""

OWN_NAMES = {"cli", "compat"}
"""Commands are named for what they show, and `compat` mirrors the paths of another package."""


def test_no_two_files_have_the_same_stem_but_pairs():
    folders = defaultdict(list)
    for path in FILES:
        if part_of(path) not in OWN_NAMES and not path.stem.startswith("__"):
            folders[path.stem].append(path.relative_to(SOURCE).parent.as_posix())
    double = {stem: several for stem, several in folders.items() if len(several) > 1 and set(several) not in PAIRS}
    assert not double


HIDES_GRADIENTS = "act/guard.py"
"""It takes the gradients away for a step that is skipped."""


def test_nothing_but_the_probes_and_the_engine_walks_gradients():
    wrong = [
        str(path.relative_to(SOURCE))
        for path in FILES
        if part_of(path) not in {"measure", "lab", "cli"}
        and path.relative_to(SOURCE).as_posix() != HIDES_GRADIENTS
        and any(
            isinstance(node, ast.Attribute) and node.attr == "grad" for node in ast.walk(ast.parse(path.read_text()))
        )
    ]
    assert not wrong
