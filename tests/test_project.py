"""The project keeps its own rules. Those about who may import whom are contracts in pyproject.toml (lint-imports)."""

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

import grimp
import pytest
import yaml

from tests.real_engines import documented

ROOT = Path(__file__).parent.parent
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]


def test_ci_runs_the_readmes_test_command():
    commands = re.findall(r"^    (python3 -m venv .*pytest.*)$", (ROOT / "README.md").read_text(), re.M)
    assert len(commands) == 1
    assert commands[0] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_readmes_badge_is_that_of_a_workflow_which_runs_ci():
    shown, linked = re.findall(
        r"\]\(\.\./\.\./actions/(workflows/\w+\.yml)(?:/badge\.svg)?\)", (ROOT / "README.md").read_text()
    )
    assert shown == linked
    [job] = yaml.safe_load((ROOT / ".github" / shown).read_text())["jobs"].values()
    assert {"run": ".ci/run", "timeout-minutes": 75} in job["steps"]


def test_the_changelog_begins_with_the_version_of_the_package():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    first = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first[1] == version


def test_what_pages_link_to_and_cite_is_there():
    missing = []
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        text = page.read_text()
        links = re.findall(r"\]\(([^)#\s:]+)[)#]", text)
        linked = [
            page.parent / link for link in links if not link.startswith("../../actions/")
        ]  # of the repository's host
        cited = [ROOT / name for name in re.findall(r"(?<![\w/: ])`?((?:benchmarks|tests)/[\w./-]+\.\w+)", text)]
        missing += [f"{page.name}: {path}" for path in linked + cited if not path.exists()]
    assert not missing


PAGE = ROOT / "docs" / "where-is-it.md"
SMALL_ROOM = 3  # modules; a folder with more has a line on the page


def test_every_file_and_name_that_the_page_of_look_ups_gives_is_there():
    page = PAGE.read_text()
    rows = look_ups(page)
    assert len(rows) == len(re.findall(r"^\| (?!looking for)", page, re.M)) >= 60, "a row has another form"
    wrong = [f"{concept}: no {file}" for concept, file, _ in rows if not (ROOT / file).is_file()]
    defined = {file: names_in((ROOT / file).read_text()) for _, file, _ in rows if (ROOT / file).is_file()}
    wrong += [
        f"{concept}: {file} does not define {name}"
        for concept, file, names in rows
        for name in names
        if name not in defined.get(file, {name})
    ]
    assert not wrong, "\n".join(wrong)


def test_every_room_with_several_modules_is_on_the_page_of_look_ups():
    named = {Path(file).parent for _, file, _ in look_ups(PAGE.read_text())}
    modules = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    rooms = Counter(path.parent for path in modules if not path.name.startswith("__"))
    missing = [f"{room}/" for room, count in rooms.items() if count > SMALL_ROOM and room not in named]
    assert not missing, "no look-up leads to " + ", ".join(sorted(missing))


def look_ups(page):
    """Return the page's rows: what somebody looks for, the file, and the names in it."""
    rows = re.findall(r"^\| (.+) \| `([\w/]+\.py)` \| (.*) ?\|$", page, re.M)
    return [(concept, file, re.findall(r"`([\w.]+)`", names)) for concept, file, names in rows]


def names_in(source):
    """Return what a module defines at its top level, and `Class.member` for what its classes define."""

    def defined(body):
        for node in body:
            match node:
                case ast.ClassDef(name=name, body=members):
                    yield name
                    yield from (f"{name}.{member}" for member in defined(members))
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    yield name
                case ast.AnnAssign(target=ast.Name(id=name)):
                    yield name
                case ast.Assign(targets=targets):
                    yield from (target.id for target in targets if isinstance(target, ast.Name))

    return set(defined(ast.parse(source).body))


def test_the_names_of_a_module_are_those_that_it_defines():
    source = "import a\nLIMIT = 3\nclass Pool:\n    size: int = 0\n    def take(self):\n        spare = 1\n"
    assert names_in(source) == {"LIMIT", "Pool", "Pool.size", "Pool.take"}


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions count, and those for types alone: both are where circles hide."""
    found = circles(grimp.build_graph(*PACKAGES, cache_dir=None))
    assert not found, "\n".join(sorted(found))


AMBIENT = re.compile(
    r"random\.(?!Random\b)|(np|numpy)\.random\b|os\.(urandom|getrandom)$|(datetime\.)?(datetime|date)\.(now|utcnow|today)$"
    r"|asyncio\.create_subprocess_|os\.(fork|posix_spawn|timerfd)"
)
"""Names of what is not taken from `serving.runtime.world`, besides the modules that a contract forbids."""

AROUND_THE_WORLD = {
    "serving/runtime/world.py": {"random.SystemRandom"},
    "serving/frontend/preparing/preparer.py": {"asyncio.create_subprocess_exec"},  # not in virtual time
    "serving/supervision/group.py": {"asyncio.create_subprocess_exec"},  # a parent of real processes
}


def test_serving_takes_time_and_randomness_from_its_world():
    found = {}
    for path in (ROOT / "serving").rglob("*.py"):
        if names := {name for name in names_used_in(path.read_text()) if AMBIENT.match(name)}:
            found[str(path.relative_to(ROOT))] = names
    assert found == AROUND_THE_WORLD


def names_used_in(source):
    """Return the names with dots in a module, as they are written, and what it imports from modules."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute():
                found.add(ast.unparse(node))
            case ast.ImportFrom(module=module, names=names):
                found |= {f"{module}.{each.name}" for each in names}
    return found


@pytest.mark.parametrize(
    "line",
    ["random.random()", "from random import choice", "x = os.urandom", "datetime.datetime.now(UTC)", "date.today()"],
)
def test_ambient_time_and_randomness_are_found(line):
    assert any(AMBIENT.match(name) for name in names_used_in(line))


@pytest.mark.parametrize(
    "line",
    ["random.Random(3).random()", "world().entropy.random()", "client.random(request)", "from random import Random"],
)
def test_randomness_that_is_handed_in_is_not_ambient(line):
    assert not any(AMBIENT.match(name) for name in names_used_in(line))


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


def test_the_picture_of_contributing_is_what_the_contracts_say():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    picture = re.findall(
        r"^ {4}(\w+)\*? +(\w[^.:]*? > .*(?:\n.{8,20}> .*)*)", (ROOT / "CONTRIBUTING.md").read_text(), re.M
    )
    assert {package for package, _ in picture} == {"dynabench", "serving", "mocker", "reports"}
    for package, chain in picture:
        drawn = [re.findall(r"\w+", level) for level in re.sub(r"[\n|]", " ", chain).split(">")]
        assert drawn in [
            [[room.removeprefix(f"{package}.") for room in re.split(r" [|:] ", level)] for level in each]
            for each in layers
        ]


def test_lines_of_prose_fit_a_terminal():
    """Tables, examples and figures that a program writes may be longer."""
    wide = []
    for page in (
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/how-to/*.md"),
        *ROOT.glob("docs/decisions/*.md"),
        ROOT / "README.md",
    ):
        prose = re.sub(r"^\s*```.*?^\s*```$", "", page.read_text(), flags=re.M | re.S)
        wide += [
            f"{page.name}: {line}"
            for line in prose.splitlines()
            if len(line) > 120 and not re.match(r" {4}|\||<", line)
        ]
    assert not wide, "\n".join(wide)


@pytest.mark.parametrize("page", [documented.OF_VLLM, documented.OF_SGLANG, documented.OF_ONES_OWN_VLLM])
def test_a_section_that_real_engines_run_has_the_commands_that_they_run(page):
    assert len(documented.commands_in(documented.section(*page))) == 2
