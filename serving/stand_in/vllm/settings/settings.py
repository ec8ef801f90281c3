"""The settings of a stand-in for `vllm serve`, made of vLLM's arguments, our own settings and the environment."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from foundation.settings import short_value
from serving.engines.mock.engine import AnswerConfig, TimingConfig
from serving.stand_in.config import (
    ApiConfig,
    HttpConfig,
    KvEventsConfig,
    LogConfig,
    LoraConfig,
    LoraModule,
    StandInConfig,
    TlsConfig,
)
from serving.stand_in.simulation import SimulationConfig
from serving.stand_in.vllm.flags.arguments import arguments
from serving.stand_in.vllm.flags.command_line import differing
from serving.stand_in.vllm.flags.treatment import treatments
from serving.stand_in.vllm.settings.engine import block_size_of, check_experts, simulated_engine, step_times_of
from serving.stand_in.vllm.settings.kv import describes_chunks, kv_of
from serving.stand_in.vllm.settings.ranks import ranks_of
from serving.transfer.config import TransferRunConfig

SECRET = ("api_key", "hf_token")
SAMPLING = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_k", "top_p", "min_p",
    "max_new_tokens",
)  # fmt: skip
"""What vLLM reads from a generation_config.json."""
TRUE = ("1", "true")


def stand_in_config(
    given: Mapping[str, Any],
    own: SimulationConfig = SimulationConfig(),  # noqa: B008 (frozen)
    *,
    environment: Mapping[str, str],
    answers: AnswerConfig = AnswerConfig(),  # noqa: B008
    transfer: TransferRunConfig = TransferRunConfig(),  # noqa: B008
) -> StandInConfig:
    """Return the settings of a stand-in.

    Args:
        given: vLLM's arguments, by its names.
        own: what takes the place of the GPUs.
        environment: environment variables; those of vLLM count as in vLLM.
        answers: what is answered.
        transfer: how KV travels.

    Raises:
        ValueError: an argument cannot be honoured; the message is one line with the way out.
    """
    given = {"model": arguments()["model"].default} | dict(given)
    refuse(given, own)
    timing = step_times_of(given, own)
    ranks, num_ranks = ranks_of(given)
    check_experts(timing, ranks, num_ranks)
    kv = kv_of(given, environment, block_size=block_size_of(given))
    return StandInConfig(
        model=given["model"],
        model_path=_model_path(given),
        served_model_names=tuple(given.get("served_model_name") or ()),
        engine=simulated_engine(given, own, timing, num_ranks=num_ranks, kv=kv.engine),
        timing=timing,
        answers=answers,
        transfer=transfer,
        lease=kv.lease,
        http=_http(given, environment),
        api=_api(given),
        logs=_logs(given, environment),
        ranks=ranks,
        lora=_lora(given, environment),
        kv_events=_kv_events(given, environment),
        kv_handover=kv.handover,
        outlives_engine=environment.get("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "0") != "0",
        is_dev_mode=bool(_whole(environment, "VLLM_SERVER_DEV_MODE", 0)),
        seed=given.get("seed", 0),
        given={name: value for name, value in differing(given).items() if name not in SECRET},
    )


def refuse(given: Mapping[str, Any], own: SimulationConfig) -> None:
    """Refuse an argument that cannot be honoured."""
    for name, value in differing(given).items():
        kind, why = treatments()[name]
        if kind == "refused" or (kind == "refused with --gpu" and own.predicts):
            raise ValueError(f"{_spelled(name, value)}: {why}")


def without_effect(given: Mapping[str, Any], own: SimulationConfig, timing: TimingConfig) -> str | None:
    """Name the arguments that are accepted and change nothing; None if there are none."""
    kinds = ("harmless",) if own.predicts else ("harmless", "refused with --gpu")
    idle = {"moe_backend"} if given.get("moe_backend", timing.moe_backend) != timing.moe_backend else set()
    names = [arguments()[name].flag for name in differing(given) if name in idle or treatments()[name].kind in kinds]
    return f"accepted without effect: {', '.join(names)}" if names else None


def about_times(timing: TimingConfig) -> str:
    """Say which step times are used."""
    if timing.timing_file is not None:
        return f"step times: measured, from {timing.timing_file}"
    if timing.gpu is not None:
        return f"step times: {timing.model} on {timing.tensor_parallel_size} {timing.gpu}"
    return (
        "step times: generic, of no particular model or GPU; for real ones, name a GPU (--gpu h100) or a --timing-file"
    )


def _spelled(name: str, value: Any) -> str:
    """Return an argument as it would be typed."""
    argument = arguments()[name]
    if argument.kind in ("switch", "pair"):
        return argument.flag if value else f"--no-{argument.flag[2:]}"
    words = value if isinstance(value, list) else [value]
    return " ".join(
        [argument.flag, *(json.dumps(word) if isinstance(word, dict) else short_value(word) for word in words)]
    )


def _model_path(given: Mapping[str, Any]) -> str:
    """Return where the tokenizer is; an id alone is not downloaded, because nobody asked for it."""
    if given.get("tokenizer"):
        return str(given["tokenizer"])
    return str(given["model"]) if Path(given["model"]).expanduser().is_dir() else ""


def _http(given: Mapping[str, Any], environment: Mapping[str, str]) -> HttpConfig:
    keys = given.get("api_key") or [environment.get("VLLM_API_KEY", "")]
    made = {
        "host": given.get("host") or "",
        "uds": given.get("uds") or "",
        "tls": _tls(given),
        "api_keys": tuple(filter(None, keys)),
        "root_path": given.get("root_path") or "",
        "has_docs": not given.get("disable_fastapi_docs", False),
        "shutdown_timeout_s": given.get("shutdown_timeout", 0),
    }
    origins = {name: _strings(given, name) for name in ORIGINS if name in given}
    return HttpConfig(**_same(given, HttpConfig) | made | origins)


ORIGINS = ("allowed_origins", "allowed_methods", "allowed_headers")


def _tls(given: Mapping[str, Any]) -> TlsConfig | None:
    certificate, key = given.get("ssl_certfile"), given.get("ssl_keyfile")
    if certificate is None:
        if key is not None:
            raise ValueError(f"--ssl-keyfile {key}: expected --ssl-certfile with it")
        return None
    return TlsConfig(
        certificate=certificate,
        key=key or "",
        client_authorities=given.get("ssl_ca_certs") or "",
        client_certificates=given.get("ssl_cert_reqs", 0),
        ciphers=given.get("ssl_ciphers") or "",
    )


def _strings(given: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a list that is given as JSON."""
    found = given[name]
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f'{arguments()[name].flag} {json.dumps(found)}: expected a JSON list such as ["*"]')
    return tuple(found)


def _api(given: Mapping[str, Any]) -> ApiConfig:
    kwargs = given.get("default_chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise ValueError(f"--default-chat-template-kwargs {json.dumps(kwargs)}: expected a JSON object")
    made = {
        "chat_template": given.get("chat_template") or "",
        "default_chat_template_kwargs": kwargs,
        "tool_call_parser": given.get("tool_call_parser") or "",
        "reasoning_parser": _reasoning_parser(given),
        "fingerprint_value": given.get("fingerprint_value") or "",
        "sampling_defaults": _sampling_defaults(given),
    }
    return ApiConfig(**_same(given, ApiConfig) | made)


def _same(given: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return the arguments that have the names of some settings."""
    return {each.name: given[each.name] for each in fields(kind) if each.name in given}


def _reasoning_parser(given: Mapping[str, Any]) -> str:
    inner: str = (given.get("structured_outputs_config") or {}).get("reasoning_parser", "")
    return given.get("reasoning_parser") or inner


def _sampling_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of the model's generation_config.json, or of another, with those of the flags."""
    source, over = given.get("generation_config", "auto"), given.get("override_generation_config") or {}
    if not isinstance(over, dict):
        raise ValueError(f"--override-generation-config {json.dumps(over)}: expected a JSON object")
    found = dict(_generation_config(Path(given["model"]) if source == "auto" else Path(source)))
    if source == "auto":
        found.pop("max_new_tokens", None)  # as in vLLM: only who names the file wants its limit
    elif source == "vllm":
        found = {}
    entries = {name: value for name, value in (found | over).items() if name in SAMPLING and value is not None}
    return {"max_tokens" if name == "max_new_tokens" else name: value for name, value in entries.items()}


def _generation_config(folder: Path) -> Mapping[str, Any]:
    path = folder.expanduser() / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return found


def _logs(given: Mapping[str, Any], environment: Mapping[str, str]) -> LogConfig:
    has_stats = not given.get("disable_log_stats", False)
    if given.get("enable_per_request_metrics") and not has_stats:
        raise ValueError("--enable-per-request-metrics: expected no --disable-log-stats with it, as in vLLM")
    return LogConfig(
        stats_interval_s=_stats_interval_s(environment) if has_stats else None,
        has_stats=has_stats,
    )


def _stats_interval_s(environment: Mapping[str, str]) -> float:
    """Return how often figures are logged; vLLM takes what is not positive as unset."""
    text = environment.get("VLLM_LOG_STATS_INTERVAL", "10")
    try:
        found = float(text)
    except ValueError:
        raise ValueError(f"VLLM_LOG_STATS_INTERVAL={text}: expected a number") from None
    return found if found > 0 else 10.0


def _lora(given: Mapping[str, Any], environment: Mapping[str, str]) -> LoraConfig | None:
    modules = given.get("lora_modules") or []
    if not given.get("enable_lora"):
        if modules:
            raise ValueError(
                f"--lora-modules {modules[0]['name']}={modules[0]['path']}: expected --enable-lora with it"
            )
        return None
    return LoraConfig(
        modules=tuple(LoraModule(**{name: each[name] for name in NAMES if name in each}) for each in modules),
        may_change=environment.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").strip().lower() in TRUE,
        **_same(given, LoraConfig),
    )


NAMES = ("name", "path", "base_model_name")
"""What is known of an adapter."""


def _kv_events(given: Mapping[str, Any], environment: Mapping[str, str]) -> KvEventsConfig | None:
    """Return where events are published, if they are, and how they name blocks."""
    entries = dict(given.get("kv_events_config") or {})
    is_on, publisher = entries.pop("enable_kv_cache_events", False), entries.pop("publisher", None)
    if not is_on or publisher == "null":
        return None
    if publisher not in (None, "zmq"):
        raise ValueError(f"--kv-events-config.publisher {publisher}: expected zmq or null")
    try:
        return KvEventsConfig(
            **entries,
            hash_algorithm=given.get("prefix_caching_hash_algo", "sha256"),
            hash_seed=environment.get("PYTHONHASHSEED"),
            host_ip=environment.get("VLLM_HOST_IP", ""),
            use_int_block_hashes=bool(_whole(environment, "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", 1)),
            describes_chunks=describes_chunks(given),
        )
    except ValueError as error:
        raise ValueError(f"--kv-events-config: {error}") from None


def _whole(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text}: expected a whole number") from None
