"""Lays out the pages of the documentation site: `python docs/site.py build/pages`, then `zensical build`.

The pages in `docs` read well on their own, so they stay as they are. The site also has the pages at the root of the
repository, the examples, and the API reference. Links between pages are kept.
"""

import base64
import json
import re
import shutil
import sys
from itertools import groupby
from pathlib import Path

import forewarn

ROOT = Path(__file__).parent.parent
AT_ROOT = {"ARCHITECTURE.md": "architecture.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
HEADINGS = {
    "attach": "Attach and monitor", "monitor": "Attach and monitor", "measure": "What is measured",
    "catalogue": "What is measured", "config": "Settings", "settings": "Settings", "plan": "Settings",
    "policy": "Settings", "judge": "Rules", "store": "Stored runs", "types": "Shared types", "views": "Views",
    "standalone": "Monitors on their own", "preflight_checks": "Before a run", "lab": "The example trainer",
}  # fmt: skip
"""Under which heading of the reference the public names of a part of the package stand."""


def lay_out(folder: Path) -> None:
    """Write every page of the site to `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for source, target in AT_ROOT.items():
        (folder / target).write_text((ROOT / source).read_text())
    _examples(folder / "examples")
    (folder / "reference.md").write_text(_reference())
    for page in folder.rglob("*.md"):
        page.write_text(_with_links_of_the_site(page.read_text(), len(page.relative_to(folder).parts) - 1))


def _with_links_of_the_site(text: str, depth: int) -> str:
    """The links of a page, `depth` folders below the top, as they lead from there on the site."""
    up = "../" * depth
    for source, target in AT_ROOT.items():
        text = re.sub(rf"\]\((?:\.\./)*{re.escape(source)}", f"]({up}{target}", text)
    text = re.sub(r"\]\((?:\.\./)*docs/", f"]({up}", text)
    text = re.sub(r"\]\((?:\.\./)+README\.md", f"]({up}README.md", text) if depth < 1 else text
    text = re.sub(r"\]\((?:\.\./)*examples/(\w+)\.(?:py|ipynb)\)", rf"]({up}examples/\1.md)", text)
    text = re.sub(r"\]\((?:\.\./)*examples/grafana\)", rf"]({up}examples/grafana.md)", text)
    text = re.sub(r"\]\((?:\.\./)*examples/grafana/", rf"]({up}examples/grafana/", text)
    return re.sub(r"\]\((?:\.\./)*examples/README\.md", f"]({up}examples/README.md", text)


def _examples(folder: Path) -> None:
    """A page for each example."""
    folder.mkdir()
    text = (ROOT / "examples" / "README.md").read_text()
    (folder / "README.md").write_text(re.sub(r"\]\((\w+)\.(?:py|ipynb)\)", r"](\1.md)", text))
    for script in sorted((ROOT / "examples").glob("*.py")):
        (folder / f"{script.stem}.md").write_text(f"# {script.name}\n\n```python\n{script.read_text()}```\n")
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        (folder / f"{notebook.stem}.md").write_text(_notebook(notebook, folder))
    files = sorted((ROOT / "examples" / "grafana").iterdir())
    shutil.copytree(ROOT / "examples" / "grafana", folder / "grafana")
    listed = "".join(f"- [{file.name}](grafana/{file.name})\n" for file in files)
    (folder / "grafana.md").write_text(f"# Prometheus and Grafana\n\n{listed}\n[How to use them](../prometheus.md)\n")


def _notebook(path: Path, folder: Path) -> str:
    """A notebook as a page: its text, its code and what that printed and drew."""
    parts: list[str] = []
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{path.stem}-{number}.png"
                (folder / picture).write_bytes(base64.b64decode("".join(data["image/png"])))
                parts.append(f"![what the code draws]({picture})")
            elif printed := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
                parts.append(f"```text\n{printed}\n```")
    return "\n\n".join(parts) + "\n"


def _reference() -> str:
    """Every public name, under the heading of its part."""
    homes = {name: forewarn._HOMES[name].partition(".")[0] for name in forewarn.__all__ if name[0] != "_"}
    names = sorted(homes, key=lambda name: (list(HEADINGS).index(homes[name]), name.lower()))
    parts = ["# Reference", "Everything that `import forewarn` offers."]
    for heading, ones in groupby(names, key=lambda name: HEADINGS[homes[name]]):
        parts += [f"## {heading}", *(f"::: forewarn.{name}" for name in ones)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]))
