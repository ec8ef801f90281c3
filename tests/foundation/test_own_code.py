"""Classes of a user's own, from a file."""

from string import Formatter as Shape

import pytest

from foundation.own_code import base_and_additions, is_own, own_class

HEAD = "from string import Formatter as Shape\n"


def written(tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text(HEAD + text)
    return str(path)


def test_names_of_files_are_told_from_others():
    assert [is_own(name) for name in ("mine.py", "a/mine.py:Mine", "kv", "py", "kv:Mine")] == [
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("name", "base", "additions"),
    [
        ("kv", "kv", []),
        ("kv+eps(5)+temp(1)", "kv", ["eps(5)", "temp(1)"]),
        ("kv+", "kv", [""]),
        ("a+b/m.py", "a+b/m.py", []),
        ("a.py+b/m+n.py:Mine+eps(5)", "a.py+b/m+n.py:Mine", ["eps(5)"]),
        ("m.py+bound(1.25)", "m.py", ["bound(1.25)"]),
    ],
)
def test_additions_follow_the_part_that_names_a_file(name, base, additions):
    assert base_and_additions(name) == (base, additions)


def test_the_only_class_of_a_file_needs_no_name_and_runs_once(tmp_path):
    path = written(tmp_path, "class Round(Shape): pass\nclass Other: pass")
    assert own_class(path, Shape).__name__ == "Round"
    assert own_class(path, Shape) is own_class(f"{path}:Round", Shape)


def test_of_several_classes_that_build_on_each_other_the_last_is_meant(tmp_path):
    assert own_class(written(tmp_path, "class A(Shape): pass\nclass B(A): pass"), Shape).__name__ == "B"


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "", "expected one class that derives from string.Formatter, but found none"),
        ("class A(Shape): pass\nclass B(Shape): pass", "", "but found A, B; name one, as in {path}:A"),
        ("class A(Shape): pass", ":B", ", named B, but found A"),
        ("class A: pass", ":A", ", named A, but found none"),
        ("x = (", "", "cannot be run: SyntaxError: '(' was never closed (line 2)"),
        ("import nonsense", "", "cannot be run: ModuleNotFoundError: No module named 'nonsense' (line 2)"),
        ("def f():\n    1 / 0\nf()", "", "cannot be run: ZeroDivisionError: division by zero (line 3)"),
        ("open('nope')", "", "cannot be run: [Errno 2] No such file or directory: 'nope'"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, text, name, message):
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=r"mine\.py") as refused:
        own_class(f"{path}{name}", Shape)
    assert message.format(path=path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"^nope\.py: no such file$"):
        own_class("nope.py", Shape)
