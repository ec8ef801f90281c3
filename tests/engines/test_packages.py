"""An engine whose package is missing or broken says so in one line, with the way out."""

import asyncio
import sys

import pytest

from foundation.extras import install
from serving.model.files import ModelFiles
from serving.worker.config import ModelRunConfig, WorkerConfig
from serving.worker.engine import EngineError
from serving.worker.make import make_engine
from serving.worker.registry import ENGINES
from tests.support.commands import dynabench, dynamo_run
from tests.support.model import write_model

BREAKS = {
    "import torch_that_nobody_has": "ModuleNotFoundError: No module named 'torch_that_nobody_has'",
    "raise ImportError('libcudart.so.13: cannot open shared object file: No such file')": "ImportError: libcudart.so.13: cannot",
    "import ctypes; ctypes.CDLL('libnowhere.so.1')": "OSError: libnowhere.so.1: cannot open shared object file",
    "raise AttributeError('two\\nlines')": "AttributeError: two lines",
    "a syntax error": "SyntaxError: invalid syntax",
    "": "AttributeError: module '{package}' has no attribute",
}


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Write an engine's package with this content; return its folder."""
    written = []

    def write(package, content):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(content)
        monkeypatch.syspath_prepend(str(tmp_path))
        written.append(package)
        return tmp_path

    yield write
    for package in written:
        sys.modules.pop(package, None)


def refused(name):
    """Return why an engine does not start."""
    engine = make_engine(name, WorkerConfig(model_path="m.gguf"), ModelRunConfig())

    async def main():
        try:
            with pytest.raises(EngineError) as error:
                await engine.start(ModelFiles({}))
            return str(error.value)
        finally:
            await engine.close()

    return asyncio.run(main())


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("content", BREAKS)
def test_a_package_that_cannot_be_imported_is_named_with_the_reason_and_the_way_out(broken, name, content):
    package = ENGINES[name].package
    broken(package, content)
    said = refused(name)
    assert said.startswith(
        f"the Python package {package} cannot be loaded here ({BREAKS[content].format(package=package)}"
    )
    assert said.endswith(f"; install it again with what it needs, as a build for this machine: {install(name)}")
    assert "\n" not in said


@pytest.mark.parametrize("name", ENGINES)
def test_a_package_that_is_missing_is_named_with_the_way_to_install_it(monkeypatch, name):
    package = ENGINES[name].package
    monkeypatch.setitem(sys.modules, package, None)
    assert refused(name) == f"{name} needs the Python package {package}, which is not installed: {install(name)}"


def test_a_package_that_breaks_only_when_it_is_used_has_a_way_out_too(broken):
    broken("sglang", "def Engine(**arguments):\n    raise ImportError('libnuma.so.1: cannot open shared object file')")
    assert refused("sglang") == (
        "SGLang does not start: ImportError: libnuma.so.1: cannot open shared object file; "
        "install it again with what it needs, as a build for this machine"
    )


@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm", "mistralrs"])
def test_the_command_ends_in_that_line(broken, tmp_path, name):
    package = ENGINES[name].package
    folder = broken(package, "raise RuntimeError('no driver')")
    done = dynamo_run(f"out={name}", write_model(tmp_path / "model"), input="Hello", env={"PYTHONPATH": str(folder)})
    assert done.returncode == 2
    assert done.stderr.strip() == (
        f"dynamo-run: the Python package {package} cannot be loaded here (RuntimeError: no driver); "
        f"install it again with what it needs, as a build for this machine: {install(name)}"
    )


def test_tensorrt_llm_comes_from_nvidias_index():
    assert install("trtllm") == "pip install --extra-index-url https://pypi.nvidia.com 'tensorrt-llm>=1.0'"


def test_a_recording_with_a_broken_vllm_says_so_too(broken, tmp_path):
    folder = broken("vllm", "raise OSError('libtorch.so: cannot open shared object file')")
    (tmp_path / "scenario.json").write_text('{"engine": {}, "requests": []}')
    words = ["record", "--scenario", "scenario.json", "--out", "steps.jsonl"]
    done = dynabench(*words, cwd=tmp_path, env={"PYTHONPATH": str(folder)})
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "dynabench: the Python package vllm cannot be loaded here (OSError: libtorch.so: cannot open shared object file); "
        f"install it again with what it needs, as a build for this machine: {install('vllm')}; without a GPU: {install('record')}"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "raise OSError('libtorch.so: cannot open shared object file')",
            "the Python package sglang cannot be loaded here (OSError: libtorch.so: cannot open shared object file); install it "
            f"again with what it needs, as a build for this machine: {install('sglang')}; without a GPU: "
            "see docs/engines.md#recording-sglangs-scheduler",
        ),
        (
            "__version__ = '0.5.9'",
            "SGLang 0.5.9 is installed; expected 0.5.23, whose loop is repeated here: pip install --no-deps sglang==0.5.23",
        ),
    ],
    ids=["broken", "another version"],
)
def test_a_recording_with_an_sglang_that_cannot_be_driven_says_why(broken, tmp_path, content, said):
    folder = broken("sglang", content)
    (tmp_path / "scenario.json").write_text('{"config": {}, "actions": []}')
    words = ["record", "--engine", "sglang", "--scenario", "scenario.json", "--out", "steps.jsonl"]
    done = dynabench(*words, cwd=tmp_path, env={"PYTHONPATH": str(folder)})
    assert (done.returncode, done.stderr.strip()) == (2, f"dynabench: {said}")
