"""What a user has who installed the package, and no checkout (.ci/installed runs these with the wheel)."""

from importlib import metadata, resources

import pytest

from foundation.extras import DISTRIBUTION
from tests.support.commands import BIN, run

PACKAGES = ("dynabench", "foundation", "mocker", "reports", "serving", "workloads")


def test_the_first_command_works_in_an_empty_folder_where_home_cannot_be_written(tmp_path):
    done = run(BIN / "dynabench", "simulate", "--max-requests", "40", cwd=tmp_path, env={"HOME": "/dev/null/nobody"})
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    [report] = tmp_path.glob("results/*/report.html")
    assert "round-robin" in report.read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_users_type_checker_reads_our_types(package):
    assert resources.files(package).joinpath("py.typed").is_file()


def test_what_a_package_index_shows_is_there():
    facts = metadata.metadata(DISTRIBUTION)
    assert facts["License-Expression"] == "Apache-2.0"
    assert facts["License-File"] == "LICENSE"
    assert "Typing :: Typed" in facts.get_all("Classifier")
    assert facts["Description-Content-Type"] == "text/markdown"


def test_the_licence_comes_along():
    [licence] = [file for file in metadata.files(DISTRIBUTION) if file.name == "LICENSE"]
    assert "Apache License" in licence.read_text()


@pytest.mark.parametrize(
    "program",
    ["dynabench", "dynabench.planner", "serving.frontend", "serving.mocker", "serving.router_service", "serving.vllm"],
)
def test_programs_name_the_version_of_the_package(program):
    done = run(BIN / "python", "-m", program, "--version")
    assert done.stdout.strip() == metadata.version(DISTRIBUTION)
