"""Where router modes exist outside dynabench: what other routers call them, with their flags."""

from collections.abc import Iterator

from foundation.own_code import base_and_additions
from serving.router.config import RouterConfig
from serving.router.policies.modes import Mode

ELSEWHERE = {
    "random": (
        "NVIDIA Dynamo --router-mode random",
        "SGLang's router --policy random",
        "AIBrix routing-strategy: random",
    ),
    "round-robin": (
        "NVIDIA Dynamo --router-mode round-robin",
        "SGLang's router --policy round_robin",
        "vLLM production-stack --routing-logic roundrobin",
    ),
    "p2c": (
        "NVIDIA Dynamo --router-mode power-of-two",
        "SGLang's router --policy power_of_two",
        "AIBrix routing-strategy: power-of-two",
    ),
    "least-loaded": (
        "NVIDIA Dynamo --router-mode least-loaded",
        "AIBrix routing-strategy: least-request",
        "KubeAI strategy: LeastLoad",
    ),
    "session": (
        "SGLang's router --policy manual",
        "vLLM production-stack --routing-logic session --session-key HEADER",
        "AIBrix routing-strategy: session-affinity",
    ),
    "chwbl": ("KubeAI strategy: PrefixHash",),
    "prefix-longest": ("vLLM production-stack --routing-logic prefixaware",),
    "kv": ("NVIDIA Dynamo --router-mode kv",),
    "dynamo-kv": ("NVIDIA Dynamo --router-mode kv",),
    "dynamo-kv-p8": ("NVIDIA Dynamo --router-mode kv",),
    "sgl-cache-aware": ("SGLang's router --policy cache_aware", "vLLM router --policy cache_aware"),
    "aibrix-prefix": ("AIBrix routing-strategy: prefix-cache",),
    "preble-e2": ("AIBrix routing-strategy: prefix-cache-preble",),
    "prodstack-loadaware": ("vLLM production-stack --routing-logic loadaware",),
    "llmd-weighted": ("llm-d weights: precise-prefix-cache-scorer 2 + kv-cache-utilization-scorer 1 + queue-scorer 1",),
    "llumnix": ("Llumnix --enable-cache-aware-scheduling",),
}
"""Names of modes in releases of other routers (Dynamo 1.4.2, sglang-router 0.3.2, production-stack 0.1.13, KubeAI, AIBrix,
llm-d, Llumnix); modes that are not listed exist only in dynabench."""

OF_DYNAMO_KV = ("kv", "dynamo-kv", "dynamo-kv-p8")
"""Modes that are NVIDIA Dynamo's KV router with other settings."""


def name_elsewhere(mode: str, config: RouterConfig | None = None) -> str | None:
    """Return what a mode is called in other routers, with its flags there; None where it exists only in dynabench.

    What is added to a mode exists only here, except `stale`, because every router that polls sees old reports, and
    `temp` where it is Dynamo's temperature.
    """
    config = config or RouterConfig()
    base, additions = base_and_additions(mode)
    if base not in ELSEWHERE or any(addition.partition("(")[0] not in ("stale", "temp") for addition in additions):
        return None
    temp = Mode.parse(mode).temp
    temperature = config.router_temperature if temp is None else temp
    if temperature and base not in OF_DYNAMO_KV:
        return None
    return " ".join([", ".join(ELSEWHERE[base]), *_dynamo_flags(base, config, temperature)])


def _dynamo_flags(base: str, config: RouterConfig, temperature: float) -> Iterator[str]:
    """Yield the settings of Dynamo's KV router that differ from their defaults."""
    if base not in OF_DYNAMO_KV:
        return
    is_new = base != "kv"
    scale = {"kv": config.kv_overlap_score_weight, "dynamo-kv": config.prefill_load_scale}.get(base, 8.0)
    for flag, value, default in (
        ("--router-prefill-load-scale", scale, 1.0),
        ("--router-kv-overlap-score-credit", config.overlap_score_credit if is_new else 1.0, 1.0),
        ("--router-kv-overlap-score-credit-decay", config.overlap_score_credit_decay if is_new else 0.0, 0.0),
        ("--router-temperature", temperature, 0.0),
    ):
        if value != default:
            yield f"{flag} {value:g}"
    if not config.use_kv_events:
        yield "--no-router-kv-events"
