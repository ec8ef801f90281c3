"""The stand-in knows each flag of `vllm serve`, and reads command lines as vLLM's own parser does."""

import dataclasses
import shlex

import pytest

from serving.stand_in.vllm.flags.arguments import TABLE, arguments
from serving.stand_in.vllm.flags.command_line import parse_arguments
from tests.real_engines import vllm_flags

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # vLLM's imports warn

LINES = [
    "m",
    "m --max_model_len 8k -tp 2 -O3 -q fp8 -dp=2",
    "m -O 1 --max-num-batched-tokens 8K --kv-cache-memory-bytes 1.5g",
    "m --max-model-len auto --gpu-memory-util 0.5",
    "m --max-model-len -1 --no-enable-prefix-caching -ep -dph",
    "--model m --served-model-name a b --api-key x y",
    "m --middleware a --middleware b --hf-token --device-ids 0,GPU-1 --moe-backend DEEP-gemm",
    'm --lora-modules a=b \'{"name": "c", "path": "d"}\' --max-cpu-loras None',
    'm --kv-transfer-config \'{"kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": "e"}\'',
    "m --kv-transfer-config.kv_role kv_both --kv-transfer-config.kv_connector=NixlConnector "
    "--kv_transfer_config.kv_connector_extra_config.backends+ UCX,GDS --kv-transfer-config.engine_id e",
    'm --kv-events-config.hwm 5 --kv-events-config \'{"topic": "a"}\'',
    'm --kv-events-config \'{"hwm": 2k, "topic": "8k"}\'',
    "m --speculative-config.method ngram --speculative-config.num_speculative_tokens 3",
    "m --allowed-origins '[\"*\"]' --allow-credentials --default-chat-template-kwargs.thinking true",
    "m --port 1 --port 2 --host None --ignore-patterns a b",
    "m --hf-overrides '{\"a\": 1}' --override-generation-config '{\"temperature\": 0.5}'",
    "m --disable-log-stats --enable-log-requests --no-enable-log-deltas --shutdown-timeout 3",
    "m -asc 2 -dpn 1 -dpr 2 -dpl 3 -dpa 1.2.3.4 -dpp 5 -n 1 -r 0 -pp 1 -dcp 1",
]
REFUSED = [
    "m n",
    "m --portt 1",
    "m --port x",
    "m --scheduling-policy x",
    "m --max-num-batched-tokens 1.5K",
    "m --kv-events-config.nothing 1",
    "m --swap-space 4",
    "m --port",
    "m --max 1",
    "--served-model-name a",
]


@pytest.fixture(scope="module")
def parser():
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    return parser


def test_the_table_is_what_vllms_parser_says():
    assert TABLE.read_text() == vllm_flags.text(vllm_flags.table())


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_means_what_it_means_to_vllm(parser, line):
    _compare(parser, shlex.split(line))


@pytest.mark.parametrize("line", REFUSED)
def test_a_command_line_that_vllm_refuses_is_refused(parser, line, capsys):
    words = shlex.split(line)
    with pytest.raises((SystemExit, ValueError)):
        parser.parse_args(["serve", *words])
    with pytest.raises(ValueError):
        parse_arguments(words)


@pytest.mark.parametrize("before", [[], ["mine"]])
def test_a_file_means_what_it_means_to_vllm(parser, tmp_path, before):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: theirs\nport: 1\nserved-model-name: [a, b]\nenable-prefix-caching: false\nenable_chunked_prefill: false\n"
        "headless: true\nkv-events-config: {hwm: 7}\nmax_model_len: 8k\nhost: null\n"
    )
    _compare(parser, [*before, "--config", str(file), "--port", "2"])


def _compare(parser, words):
    theirs = vars(parser.parse_args(["serve", *words]))
    if theirs.get("model_tag") is not None:
        theirs["model"] = theirs["model_tag"]
    ours = parse_arguments(words)
    for name, argument in arguments().items():
        if name in ("model_tag", "config"):
            continue
        if name not in ours:
            if argument.type != "settings":
                assert _plain(theirs.get(name)) == argument.default, name
        elif dataclasses.is_dataclass(theirs[name]):
            assert {key: getattr(theirs[name], key) for key in ours[name]} == ours[name], name
        else:
            assert _plain(theirs[name]) == ours[name], name


def _plain(value):
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if dataclasses.is_dataclass(value):  # an adapter, of which we keep what was given
        return {key: entry for key, entry in dataclasses.asdict(value).items() if key in ("name", "path")}
    return vllm_flags._plain(value)
