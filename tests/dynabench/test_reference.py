"""The reference in docs/reference is what the programs are, wherever it is made."""

import ast
import filecmp
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from dynabench.deployment.description import ECHOES
from dynabench.deployment.paths import settings_of_pool
from dynabench.reference.command import all_commands, programs
from dynabench.reference.deployment_file import page
from dynabench.reference.environment import OURS
from dynabench.reference.pages import COMMAND, pages
from serving.worker.registry import ENGINES
from tests.support.commands import run

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "reference"
UNITS = {
    "s": "s",
    "ms": "ms",
    "us": "us",
    "ns": "ns",
    "gb_s": "GB/s",
    "gbps": "GB/s",
    "mb": "Mi?B",
    "us_per_token": "us",
}
"""Units by the ends of the names of settings, longer ends last."""


def reference(*arguments, **environment):
    return run(sys.executable, "-m", "dynabench.reference", *map(str, arguments), env=os.environ | environment)


def test_the_reference_is_current_and_the_same_in_other_surroundings():
    elsewhere = {
        "DYN_NAMESPACE": "mine",
        "ETCD_LEASE_TTL": "7",
        "NATS_SERVER": "nats://here",
        "POD_IP": "10.0.0.1",
        "COLUMNS": "40",
    }
    done = reference("--check", FOLDER, **elsewhere)
    assert (done.returncode, done.stderr) == (0, "")


def test_pages_that_are_not_current_are_named_with_the_command_that_renews_them(tmp_path):
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    (tmp_path / "run.md").write_text("old")
    (tmp_path / "gone.md").write_text("of a command that is gone")
    done = reference("--check", tmp_path)
    assert (done.returncode, done.stderr) == (1, f"gone.md, run.md: not current; run {COMMAND}\n")
    assert reference(tmp_path).returncode == 0
    assert not filecmp.dircmp(FOLDER, tmp_path).diff_files
    assert not (tmp_path / "gone.md").exists()


def test_each_flag_says_what_it_does_and_in_which_unit():
    for command in all_commands():
        assert command.paragraphs, command.name
        for setting in (setting for group in command.groups.values() for setting in group):
            assert setting.help, (command.name, setting.names)
            units = [unit for end, unit in UNITS.items() if setting.names[0].endswith("-" + end.replace("_", "-"))]
            for unit in units[-1:]:
                said = re.search(rf"\([^)]*\b{unit}\b", f"{setting.help} {setting.values}")
                assert said, f"{command.name} {setting.names[0]} names no unit {unit}: {setting.help}"


def test_each_program_of_serving_is_in_the_reference():
    modules = [*(ROOT / "serving").glob("*.py"), ROOT / "serving" / "frontend" / "__main__.py"]
    started = {path for path in modules if 'if __name__ == "__main__"' in path.read_text()}
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for path in started}
    assert names == set(programs())


def test_each_environment_variable_that_is_read_is_in_the_reference():
    known = pages()["environment.md"]
    found = set()
    for package in ("dynabench", "serving", "foundation"):
        for path in (ROOT / package).rglob("*.py"):
            constants = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
            texts = [node.value for node in constants if isinstance(node.value, str)]
            prefixes = "POD|DYN|DYNABENCH|ETCD|NATS|OPENAI|HF|XDG|CUDA"
            found |= {text for text in texts if re.fullmatch(rf"(?:{prefixes})_[A-Z_]+", text)}
    found = {name for name in found if not name.endswith("_")}  # beginnings of names
    assert len(found) > 20
    assert {name for name in found if f"`{name}`" not in known} == set(OURS)


@pytest.mark.parametrize("engine", ["mocker", *ECHOES, *ENGINES])
def test_each_key_of_a_pool_is_on_the_page_of_the_deployment_file(engine):
    pools = page().partition("\n## pools\n")[2].partition("\n## ")[0]
    assert [name for name in settings_of_pool(engine) if f"**`{name}`**" not in pools] == []
