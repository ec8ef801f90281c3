"""Commands that install extras."""

import shlex
from importlib import metadata

import pytest

from foundation.errors import UserError
from foundation.extras import DISTRIBUTION, install
from foundation.namesake import refuse_namesake


@pytest.mark.parametrize("extra", metadata.metadata(DISTRIBUTION).get_all("Provides-Extra"))
def test_the_packages_of_an_extra_are_named_and_never_the_namesake_on_pypi(extra):
    pip, verb, *packages = shlex.split(install(extra))
    assert (pip, verb) == ("pip", "install")
    assert packages
    assert not any(package.startswith("dynabench") for package in packages)


def test_an_extra_that_is_none_is_a_mistake():
    with pytest.raises(KeyError):
        install("none")


def test_the_namesake_on_pypi_is_refused_and_our_own_distribution_is_not(tmp_path):
    (tmp_path / "dynabench_llm-0.2.0.dist-info").mkdir()
    (tmp_path / "dynabench_x-1.dist-info").mkdir()
    refuse_namesake(tmp_path)
    (tmp_path / "dynabench-0.4.1.dist-info").mkdir()
    with pytest.raises(UserError, match="another project's package dynabench is installed here"):
        refuse_namesake(tmp_path)
