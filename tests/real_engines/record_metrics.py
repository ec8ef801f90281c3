"""Record which metrics vLLM shows with which settings, for tests/stand_in: `python -m tests.real_engines.record_metrics`.

It runs in vLLM's environment (see `.ci/engines`) and starts its server on the CPU for each of the settings. Offloading needs a
GPU; what is shown with it is asked of vLLM's metrics alone.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

from tests.real_engines.serving_vllm import until_ready, vllm_serve
from tests.stand_in.metric_facts import facts, record

ROOT = Path(__file__).parents[2]

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 27},
}
SETTINGS = {
    "default": (),
    "without_stats": ("--disable-log-stats", "--tool-call-parser=hermes"),
    "everything": (
        "--enable-lora",
        "--max-loras=2",
        "--enable-auto-tool-choice",
        "--tool-call-parser=hermes",
        "--kv-cache-metrics",
        f"--speculative-config={json.dumps(SPECULATION)}",
        f"--kv-transfer-config={json.dumps(NIXL)}",
    ),
}

LOGGER = """
import json, sys
from prometheus_client import generate_latest
from vllm.engine.arg_utils import EngineArgs
from vllm.config import KVTransferConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger
model, transfer = sys.argv[1:]
config = EngineArgs(
    model=model, served_model_name=["tiny"], dtype="float32", block_size=32, max_model_len=4096, enforce_eager=True,
    kv_transfer_config=KVTransferConfig(**json.loads(transfer)),
).create_engine_config()
PrometheusStatLogger(config, [0]).log_engine_initialized()
print("BEGIN")
print(generate_latest().decode())
"""


def main():
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        subprocess.run([sys.executable, ROOT / "examples" / "tiny_model.py", model], check=True)
        found = {}
        for name, flags in SETTINGS.items():
            log = Path(folder) / "log"
            with vllm_serve(model, log, *flags) as (url, process):
                until_ready(url, process, log)
                found[name] = facts(httpx.get(f"{url}/metrics").text)
        found["offloading"] = facts(shown_by_logger(model, OFFLOADING))
    record(found)


def shown_by_logger(model, transfer):
    command = [sys.executable, "-c", LOGGER, str(model), json.dumps(transfer)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.partition("BEGIN\n")[2]


if __name__ == "__main__":
    sys.exit(main())
