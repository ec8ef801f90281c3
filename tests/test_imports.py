"""What is run seldom, or only as a text in a process of its own, still imports names that our packages have.

mypy reads the packages, and pytest imports the tests. Benchmarks, examples, the code of our pages and the programs that
stand in strings of tests are read here.
"""

import ast
import functools
import importlib
import re
import textwrap
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OWN = {*tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"], "tests"}


def test_benchmarks_examples_and_pages_import_names_that_are_there():
    files = [path for folder in (".ci", "benchmarks", "examples", "docs") for path in (ROOT / folder).rglob("*.py")]
    programs = {path: [path.read_text()] for path in (*files, ROOT / "hatch_build.py")}
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")):
        programs[page] = code_of(page.read_text())
    assert sum(map(len, programs.values())) > 30
    assert not problems(programs)


def test_programs_in_the_strings_of_tests_import_names_that_are_there():
    programs = {
        path: programs_in(path.read_text()) for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)
    }
    assert sum(map(len, programs.values())) > 20
    assert not problems(programs)


def problems(programs):
    """Return the names that programs, by file, take from our packages, and that those do not have."""
    found = [
        f"{path.relative_to(ROOT)}: no {name}"
        for path, texts in programs.items()
        for text in texts
        for name in gone(text)
    ]
    return "\n".join(found)


def code_of(page):
    """Return the Python programs of a page."""
    return [textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```$", page, re.M | re.S)]


def programs_in(source):
    """Return the strings of a file that are programs with imports."""
    texts = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return [text for text in texts if isinstance(text, str) and "import " in text and parsed(text) is not None]


def parsed(text):
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def gone(text):
    """Return the names that a program takes from our packages, with their modules, and that are not there."""
    tree, modules = ast.parse(text), {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for name in names:
                    if is_ours(name.name):
                        modules[name.asname or name.name] = name.name
                        if not has_module(name.name):
                            yield name.name
            case ast.ImportFrom(module=str(module), names=names, level=0) if is_ours(module):
                if not has_module(module):
                    yield module
                    continue
                yield from (f"{module}.{name.name}" for name in names if not has(module, name.name))
    for node in ast.walk(tree) if modules else ():
        match node:
            case ast.Attribute(value=ast.Name() | ast.Attribute() as value, attr=name):
                module = modules.get(ast.unparse(value), "")
                if has_module(module) and not has(module, name):
                    yield f"{module}.{name}"


def is_ours(module):
    return module.partition(".")[0] in OWN


def has_module(module):
    return bool(module) and (file_of(module) is not None or ROOT.joinpath(*module.split(".")).is_dir())


def has(module, name):
    if "__getattr__" in bound_in(module):
        return hasattr(importlib.import_module(module), name)
    return has_module(f"{module}.{name}") or name in bound_in(module)


def file_of(module):
    place = ROOT.joinpath(*module.split("."))
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)


@functools.cache
def bound_in(module):
    """Return all names that a module defines or imports outside its functions and classes."""
    file = file_of(module)
    return set() if file is None else set(bound(ast.parse(file.read_text()).body))


def bound(body):
    for node in body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (name.asname or name.name.partition(".")[0] for name in names)
            case _:
                yield from (
                    inner.id
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
                )
                yield from bound(ast.iter_child_nodes(node))


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("from mocker import EngineConfig, core", []),
        ("from mocker import Gone", ["mocker.Gone"]),
        ("from mocker.gone import EngineConfig", ["mocker.gone"]),
        ("import mocker.gone", ["mocker.gone"]),
        ("import mocker.core as c; c.Gone", ["mocker.core.Gone"]),
        ("def later():\n    from serving.router import Gone", ["serving.router.Gone"]),
        ("from serving import register_llm", []),
        ("from elsewhere import Gone", []),
    ],
)
def test_a_name_that_is_gone_is_found(text, missing):
    assert [*gone(text)] == missing
