"""The project keeps its own rules. Those about who may import whom are contracts in pyproject.toml (lint-imports)."""

import re
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]


def test_ci_runs_the_readmes_test_command():
    commands = re.findall(r"^    (python3 -m venv .*pytest.*)$", (ROOT / "README.md").read_text(), re.M)
    assert len(commands) == 1
    assert commands[0] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_changelog_begins_with_the_version_of_the_package():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    first = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first[1] == version


def test_what_pages_link_to_and_cite_is_there():
    missing = []
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        text = page.read_text()
        linked = [page.parent / link for link in re.findall(r"\]\(([^)#\s:]+)[)#]", text)]
        cited = [ROOT / name for name in re.findall(r"(?<![\w/: ])`?((?:benchmarks|tests)/[\w./-]+\.\w+)", text)]
        missing += [f"{page.name}: {path}" for path in linked + cited if not path.exists()]
    assert not missing


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions count, and those for types alone: both are where circles hide."""
    found = circles(grimp.build_graph(*PACKAGES, cache_dir=None))
    assert not found, "\n".join(sorted(found))


def circles(graph):
    """Return the shortest circle through each import that is part of one, as text."""
    found = set()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            if chain := graph.find_shortest_chain(importer=imported, imported=importer):
                first = chain.index(min(chain))
                found.add(" -> ".join((*chain[first:], *chain[: first + 1])))
    return found


def test_a_circle_is_found():
    graph = grimp.ImportGraph()
    for importer, imported in (("c", "b"), ("b", "a"), ("a", "c"), ("a", "d")):
        graph.add_import(importer=importer, imported=imported)
    assert circles(graph) == {"a -> c -> b -> a"}
