"""Old results are taken up only if everything that they depend on is the same."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from foundation import identity as module
from foundation.identity import Identity, files_named


@dataclass(frozen=True)
class Config:
    blocks: int = 16
    file: Path | None = None
    key: str = field(default="", repr=False)


def write(path, text="x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_same_facts_are_the_same_after_they_were_written(tmp_path):
    made = Identity.of({"seed": 0, "engine": Config()}, packages=["foundation"])
    made.write(tmp_path / "id")
    assert Identity.read(tmp_path / "id") == made
    assert Identity.of({"seed": 0, "engine": Config()}, packages=["foundation"]).key == made.key


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"seed": 0}, {"seed": 1}, "seed was 0 and is 1"),
        ({"engine": Config()}, {"engine": Config(blocks=8)}, "engine.blocks was 16 and is 8"),
        ({"modes": ("kv",)}, {"modes": ("kv", "p2c")}, "modes was kv and is kv, p2c"),
        ({"modes": ()}, {"modes": ("kv",)}, "modes was none and is kv"),
        ({}, {"seed": 1}, "seed was not a setting and is 1"),
        ({"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}, {}, "c was 1 and is not a setting; and 2 more"),
    ],
)
def test_what_differs_is_said_in_a_line(before, now, said):
    assert Identity.of(now).difference(Identity.of(before)).endswith(said)


def test_a_secret_is_no_fact_and_none_is_written():
    assert Identity.of({"engine": Config(key="hush")}) == Identity.of({"engine": Config()})


def test_a_file_that_a_setting_names_counts_by_its_content(tmp_path):
    file = write(tmp_path / "times.json", "1")
    before = Identity.of({"engine": Config(file=file)})
    assert Identity.of({"engine": Config(file=file)}) == before
    file.write_text("2")
    assert Identity.of({"engine": Config(file=file)}).difference(before) == f"{file} has changed"


def test_a_model_counts_by_every_file_in_its_folder(tmp_path):
    folder = write(tmp_path / "model" / "config.json", "{}").parent
    before = Identity.of({"model": str(folder)})
    write(folder / "hf_quant_config.json", "{}")
    assert Identity.of({"model": str(folder)}).difference(before) == f"{folder} has changed"


def test_what_stands_beside_a_config_counts_too(tmp_path):
    config, beside = write(tmp_path / "config.json"), write(tmp_path / "hf_quant_config.json")
    assert list(files_named([str(config)])) == [config, beside]


def test_the_modules_that_a_class_of_ones_own_imports_count(tmp_path):
    write(tmp_path / "mine.py", "import os\nfrom near import f\nimport pack.deep")
    write(tmp_path / "near.py", "def f():\n    import far")
    write(tmp_path / "far.py", "import mine")
    write(tmp_path / "unused.py")
    write(tmp_path / "pack" / "__init__.py")
    write(tmp_path / "pack" / "deep.py")
    found = {path.relative_to(tmp_path).as_posix() for path in files_named({"mode": f"{tmp_path}/mine.py:Mine+eps(5)"})}
    assert found == {"mine.py", "near.py", "far.py", "pack/__init__.py", "pack/deep.py"}


def test_a_package_that_a_class_imports_finds_modules_beside_the_class(tmp_path):
    write(tmp_path / "mine.py", "import pack.deep.a")
    write(tmp_path / "helper.py")
    write(tmp_path / "pack" / "deep" / "a.py", "import helper\nfrom .. import near\nfrom ..other import f")
    write(tmp_path / "pack" / "near.py")
    found = {path.relative_to(tmp_path).as_posix() for path in files_named(f"{tmp_path}/mine.py")}
    assert found == {"mine.py", "helper.py", "pack/deep/a.py", "pack/near.py"}


def test_modules_beside_a_linked_class_are_found_in_both_folders(tmp_path):
    write(tmp_path / "real" / "mine.py", "import helper, local")
    write(tmp_path / "real" / "helper.py")
    write(tmp_path / "link" / "local.py")
    (tmp_path / "link" / "mine.py").symlink_to("../real/mine.py")
    found = {path.relative_to(tmp_path).as_posix() for path in files_named(f"{tmp_path}/link/mine.py")}
    assert found == {"link/mine.py", "real/helper.py", "link/local.py"}


def test_a_file_is_the_same_by_any_path_that_leads_to_it(tmp_path, monkeypatch):
    file, own = write(tmp_path / "times.json"), write(tmp_path / "mine.py", "import near")
    write(tmp_path / "near.py")
    (tmp_path / "link.json").symlink_to("times.json")
    monkeypatch.chdir(tmp_path)
    made = Identity.of({"times": "times.json", "mode": "mine.py:Mine+eps(5)"}, files=[Path("times.json")])
    for path in (file, tmp_path / "link.json", Path("../") / tmp_path.name / "times.json"):
        assert Identity.of({"times": str(path), "mode": f"{own}:Mine+eps(5)"}, files=[path]) == made
    moved = Identity.of({"times": str(file), "mode": f"{own}:Other+eps(5)"}, files=[file])
    assert moved.difference(made) == "mode was a file:Mine+eps(5) and is a file:Other+eps(5)"


def test_a_file_that_moved_and_changed_is_named_by_both_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own, near = write(tmp_path / "mine.py", "import near"), write(tmp_path / "near.py")
    made = Identity.of({"mode": "mine.py"})
    near.write_text("y")
    assert Identity.of({"mode": "mine.py"}).difference(made) == "near.py has changed"
    assert Identity.of({"mode": str(own)}).difference(made) == f"{near} is new; near.py is not used"


def test_two_files_never_pass_for_each_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("a.json", "1"),
        ("b.json", "2"),
        ("x/a.json", "2"),
        ("kv", ""),
        ("lmetric", ""),
        ("a.csv", "1"),
    ):
        write(Path(name), text)
    made = Identity.of({"one": "a.json", "two": "b.json"})
    assert (
        Identity.of({"one": "b.json", "two": "a.json"}).difference(made)
        == "b.json, a.json: the same content was used otherwise"
    )
    assert Identity.of({"one": "x/a.json", "two": "b.json"}).difference(made) == "a.json is not used"
    assert Identity.of({"mode": "kv"}) != Identity.of({"mode": "lmetric"})
    assert Identity.of({"one": "a.json"}) != Identity.of({"one": "a.csv"})
    assert Identity.of({}, files=[Path("a.json"), Path("b.json")]) != Identity.of(
        {}, files=[Path("b.json"), Path("a.json")]
    )


@pytest.mark.parametrize("data", [b'{"seed": "0"}', b"[]", b'{"facts": 3}', b"x", b'{"\xff": 3}'])
def test_a_file_of_another_form_is_of_another_version(tmp_path, data):
    (tmp_path / "id").write_bytes(data)
    assert Identity.read(tmp_path / "id") is None


def test_text_that_names_no_file_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kv").mkdir()
    assert list(files_named(["kv", "", "a\0b", "x" * 5000, 4, None])) == []


def test_a_file_as_large_as_weights_counts_by_its_size_and_time(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGE_BYTES", 2)
    file = write(tmp_path / "weights.gguf", "abc")
    before = Identity.of({"model": str(file)})
    os.utime(file, ns=(1, 1))
    assert Identity.of({"model": str(file)}) != before


def test_what_another_version_left_is_not_the_same(tmp_path):
    write(tmp_path / "id", "0123456789abcdef\n")
    assert Identity.of({}).difference(Identity.read(tmp_path / "id")) == "another version of dynabench made it"


def test_our_code_counts(tmp_path, monkeypatch):
    package = write(tmp_path / "made_up" / "__init__.py", "a = 1").parent
    monkeypatch.syspath_prepend(tmp_path)
    before = Identity.of({}, packages=["made_up"])
    write(package / "__pycache__" / "x.pyc")
    assert Identity.of({}, packages=["made_up"]) == before
    write(package / "more.py")
    assert Identity.of({}, packages=["made_up"]).difference(before) == "dynabench has other code"
