"""Each how-to page works as it is printed, from an empty folder."""

import shutil
from pathlib import Path

import pytest

from tests.how_to.pages import Run, commands, files, is_as_shown, run

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm-0.32"
PAGES = sorted((Path(__file__).parents[2] / "docs" / "how-to").glob("*.md"))
SCREENS = 130
"""Lines of two screens, about."""

LONG = {"attention-dp", "disaggregation-worth-it", "engines-differ", "test-my-autoscaler"}
"""Pages whose simulations take most of the time of all pages, with the same commands as others."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.long] * (path.stem in LONG)) for path in PAGES],
)
def test_a_page_works_as_printed(path, tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "recordings")  # as the page on vLLM says
    ran = 0
    for done in run(path.read_text(), tmp_path):
        assert is_as_shown(done), f"$ {done.command}\n{done.printed}\nexpected:\n{done.shown}"
        ran += 1
    assert ran


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_at_most_two_screens(path):
    assert len(path.read_text().splitlines()) <= SCREENS


PAGE = """
```python title="a.py"
print(1)
```

```console
$ python a.py
1
$ seq 1 \\
  9
1
...
9
```
"""


def test_files_and_commands_are_found():
    assert files(PAGE) == {"a.py": "print(1)\n"}
    assert list(commands(PAGE)) == [("python a.py", "1"), ("seq 1 \\\n  9", "1\n...\n9")]


@pytest.mark.parametrize(
    ("shown", "printed", "is_it"),
    [
        ("a b\nc", "a\nb c\n", True),
        ("a b", "a c", False),
        ("a\n...\nd", "a b c d", True),
        ("a\n...\nd", "b c d", False),
        ("a\n...", "a", True),
        ("in results/20260101-120000-run", "in results/20261124-100203-run", True),
        ("in results/x", "in results/20261124-100203-run", False),
        ("1.5", "1x5", False),
    ],
)
def test_what_is_printed_is_compared_word_by_word(shown, printed, is_it):
    assert is_as_shown(Run("", shown, printed, 0)) is is_it


def test_what_runs_in_the_background_is_waited_for_and_ended(tmp_path):
    page = "```console\n$ bash -c 'sleep 0.2; echo up; sleep 999' &\nup\n$ cat .log0\nup\n```\n"
    assert all(is_as_shown(done) for done in run(page, tmp_path))


def test_progress_counts_only_if_a_command_fails(tmp_path):
    page = "```console\n$ echo a; echo b >&2\na\n$ echo a; echo b >&2; exit 1\na\nb\n```\n"
    assert all(is_as_shown(done) for done in run(page, tmp_path))


def test_what_a_page_prints_is_what_its_commands_print(tmp_path):
    assert [done.printed for done in run(PAGE, tmp_path)] == ["1\n", "".join(f"{number}\n" for number in range(1, 10))]
