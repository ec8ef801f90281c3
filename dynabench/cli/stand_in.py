"""`dynabench vllm`: a stand-in for another engine's server, with that server's flags beside ours."""

import json
import logging
import os
from dataclasses import asdict, fields, replace
from typing import Annotated, Any

from cyclopts import Parameter

from foundation.errors import UserError, plain_errors
from serving.cli.command_line import Verbosity, flat
from serving.engines.mock.config import AnswerConfig
from serving.model.errors import ModelError
from serving.runtime.ports import RuntimeUnavailableError
from serving.stand_in.config import StandInConfig
from serving.stand_in.faults.flags import FaultFlags
from serving.stand_in.replicas import ReplicasConfig, replicas_of, serve_replicas
from serving.stand_in.simulation import SimulationConfig
from serving.stand_in.vllm.flags.command_line import in_flags, parse_arguments
from serving.stand_in.vllm.flags.help import help_of
from serving.stand_in.vllm.settings.settings import about_times, stand_in_config, without_effect
from serving.supervision.group import GroupError
from serving.supervision.logs import set_up
from serving.supervision.process import run_process
from serving.transfer.config import TransferRunConfig
from serving.worker.engine import EngineError

log = logging.getLogger(__name__)

HELP = "--help="

Words = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]
"""The model and the flags of the other server, which reads them itself."""
Simulation = Annotated[SimulationConfig, flat("In place of GPUs", 1)]
Replicas = Annotated[ReplicasConfig, flat("Many at once", 2)]
Faults = Annotated[FaultFlags, flat("Faults on purpose", 3)]
Answers = Annotated[AnswerConfig, flat("Simulated engine", 6)]
OF_HANDOVER = Parameter(parse="^transfer(_host|_bandwidth_gb_s|_latency_ms|_block_us|_read_timeout_s)?$")
Transfer = Annotated[TransferRunConfig, OF_HANDOVER, flat("KV between processes", 7)]


def vllm(
    *words: Words,
    simulation: Simulation | None = None,
    replicas: Replicas | None = None,
    answers: Answers | None = None,
    faults: Faults | None = None,
    kv_transfer: Transfer | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    verbose: Verbosity = 0,
) -> None:
    """Stand in for `vllm serve`: its flags, its HTTP and its metrics, in one process and without a GPU.

    The model and all flags of `vllm serve` are given as to vLLM itself. `--help=all` shows what is done with each of them,
    and `--help=WORD` searches them.

    Args:
        words: The model, and flags of vLLM.
        simulation: What takes the place of the GPUs.
        replicas: How many there are.
        answers: What is answered.
        faults: What goes wrong on purpose.
        kv_transfer: How KV gets to other instances.
        dry_run: Print the settings that follow from all flags, and exit.
        verbose: How much to log.
    """
    if searched := [word.removeprefix(HELP) for word in words if word.startswith(HELP)]:
        with plain_errors():
            print(help_of(searched[0]))
        return
    own = simulation or SimulationConfig()
    with plain_errors():
        set_up(verbose)
        given = parse_arguments(words, beside=_own_flags())
        try:
            config = stand_in_config(
                given,
                own,
                environment=os.environ,
                answers=answers or AnswerConfig(),
                transfer=kv_transfer or TransferRunConfig(),
            )
        except ValueError as error:
            raise ValueError(in_flags(str(error))) from error
        wrong = faults or FaultFlags()
        config = replace(config, faults=wrong.faults(config.seed), admin=wrong.admin(os.environ))
        many = replicas or ReplicasConfig()
        replicas_of(config, many.replicas)  # refuses those that would be at one place
    if dry_run:
        print(json.dumps(_shown(config), indent=2, default=str))
        return
    log.info(about_times(config.timing))
    if unused := without_effect(given, own, config.timing):
        log.info(unused)
    _serve(config, many)


def _own_flags() -> list[str]:
    """Return flags of ours that an unknown word may be meant to be."""
    kinds = (SimulationConfig, ReplicasConfig, FaultFlags, AnswerConfig)
    names = [field.name for kind in kinds for field in fields(kind)]
    return [f"--{name.replace('_', '-')}" for name in (*names, "dry_run")]


def _serve(config: StandInConfig, many: ReplicasConfig) -> None:
    try:
        run_process(lambda stopping: serve_replicas(config, many.replicas, many.num_processes, stopping))
    except (ModelError, EngineError, RuntimeUnavailableError, GroupError, ValueError) as error:
        raise UserError(str(error)) from error


def _shown(config: StandInConfig) -> dict[str, Any]:
    """Return settings as they are printed: without secrets."""
    found = asdict(config)
    found["http"]["api_keys"] = ["..." for _ in config.http.api_keys]
    if config.admin is not None and config.admin.token:
        found["admin"]["token"] = "..."  # noqa: S105
    return found
