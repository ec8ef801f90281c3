"""Commands that install extras."""

import shlex
from importlib import metadata

import pytest

from foundation.extras import install


@pytest.mark.parametrize("extra", metadata.metadata("dynabench").get_all("Provides-Extra"))
def test_the_packages_of_an_extra_are_named_and_never_the_namesake_on_pypi(extra):
    pip, verb, *packages = shlex.split(install(extra))
    assert (pip, verb) == ("pip", "install")
    assert packages
    assert not any(package.startswith("dynabench") for package in packages)


def test_an_extra_that_is_none_is_a_mistake():
    with pytest.raises(KeyError):
        install("none")
