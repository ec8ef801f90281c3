"""Settings of a file and of a command line: what the command line says goes first, also where it is the default."""

import json

from mocker.config import SimulatedConfig
from serving.cli.command_line import settings_named
from serving.cli.commands import engine_settings


def test_flags_name_settings():
    words = ["--model-path", "m", "--max-num-seqs=256", "--no-enable-prefix-caching", "-v", "kv"]
    assert settings_named(words) == {"model_path", "max_num_seqs", "enable_prefix_caching"}


def test_a_flag_goes_before_the_file_also_if_it_is_the_default(tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"max_num_seqs": 8, "block_size": 16, "enable_prefix_caching": False}))
    read = engine_settings(file, SimulatedConfig()).vllm
    assert (read.max_num_seqs, read.block_size, read.enable_prefix_caching) == (8, 16, False)
    read = engine_settings(file, SimulatedConfig(), named={"max_num_seqs", "enable_prefix_caching"}).vllm
    assert (read.max_num_seqs, read.block_size, read.enable_prefix_caching) == (256, 16, True)
