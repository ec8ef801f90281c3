"""Engines that run a model. DYNABENCH_ENGINE names the one that is installed; without it nothing here is collected.

`.ci/engines` makes the environments and runs these tests in each.
"""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

import pytest
import tokenizers

from dynabench.deployment.description import Deployment, Pool
from dynabench.live.stack import LocalStack
from serving.frontend.config import FrontendConfig
from serving.worker.config import WorkerConfig, flags_to_arguments
from tests.real_engines import one_server
from tests.real_engines.reference import Reference
from tests.real_engines.serving_vllm import VLLM_FLAGS
from tests.support import waiting
from tests.support.stacks import in_background

ROOT = Path(__file__).parents[2]
ENGINE = os.environ.get("DYNABENCH_ENGINE", "")
SGLANG_FLAGS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--dtype=float32",
    "--disable-cuda-graph",
    "--mem-fraction-static=0.05",
    "--max-total-tokens=16384",
)
FLAGS = {"vllm": VLLM_FLAGS, "sglang": SGLANG_FLAGS, "mistralrs": ("--dtype=f32",), "llamacpp": ()}

if not ENGINE:
    collect_ignore_glob = ["test_*.py"]
else:
    # Only here: in a run of all tests they would keep every command from being forked (`tests/support/warm.py`).
    os.environ.setdefault("MISTRALRS_CPU_KV_F32", "1")  # or batches of different sizes round differently

    # One thread an engine of vLLM's, on any core. Several, each bound to a core, wait for each other in every operation: on two
    # cores, beside NIXL's threads, which are never idle, a token then takes seconds, and KV is given up before it was read.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    waiting.PATIENCE_S = 240.0  # without a GPU a model may take minutes to load
    others = {"llamacpp", "sglang", "vllm"} - {ENGINE}
    collect_ignore_glob = [f"test_{other}*.py" for other in others]


class Engine(NamedTuple):
    """The engine under test."""

    name: str
    model: Path
    flags: tuple[str, ...]
    gives_text: bool
    """Whether it takes and gives text, so that it decides itself what its tokens are."""


@pytest.fixture(scope="session")
def folder(tiny_folder):
    return tiny_folder


@pytest.fixture(scope="session")
def engine(folder):
    model = folder.with_name("tiny.gguf") if ENGINE == "llamacpp" else folder
    return Engine(ENGINE, model, FLAGS[ENGINE], ENGINE == "mistralrs")


@pytest.fixture(scope="session")
def real_vllm(folder, tmp_path_factory):
    """A client of vLLM's server, as `one_server` starts it."""
    with one_server.vllm(folder, tmp_path_factory.mktemp("logs") / "log") as client:
        yield client


@pytest.fixture(scope="session")
def stand_in(folder):
    """A client of a stand-in with the same settings."""
    with one_server.stand_in(folder) as client:
        yield client


@pytest.fixture(scope="session")
def reference(folder):
    return Reference(folder)


@pytest.fixture(scope="session")
def tokenizer(folder):
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@contextlib.contextmanager
def running(engine, num_workers=1, flags=(), worker=None, frontend=None):
    """Run workers of the engine and a frontend in the background; give the stack."""
    pool = Pool(
        replicas=num_workers,
        engine=engine.name,
        engine_args=flags_to_arguments((*engine.flags, *flags)),
        worker=WorkerConfig(model_path=str(engine.model), drain_s=5.0, **(worker or {})),
    )
    served = {"http_port": 0, "router_mode": "kv", "drain_s": 5.0} | (frontend or {})
    mode = served.pop("router_mode")
    stack = LocalStack(Deployment(pools=(pool,), router_mode=mode, frontend=FrontendConfig(**served)))
    with in_background(stack):
        yield stack


@pytest.fixture(scope="module")
def stack(engine):
    with running(engine) as found:
        yield found
