"""The settings of the mocker that are those of a recorded vLLM."""

from pathlib import Path

from dynabench.fidelity.recordings import Json, RecordingError
from mocker import EngineConfig
from mocker.models.kv_groups import KvLayout, LayerKv, layout_of
from mocker.tiers.config import HostMemory
from mocker.vllm.versions import EngineVersion, version_of

CONNECTORS = (None, "NixlConnector", "OffloadingConnector")


def version_named(path: Path, release: object) -> EngineVersion:
    """Return the version whose rules a release of vLLM follows."""
    try:
        return version_of(release)
    except ValueError as error:
        raise RecordingError(f"{path}: recorded from {error}") from error


def config_of(path: Path, settings: Json, version: EngineVersion) -> EngineConfig:
    """Return the settings of vLLM's scheduler as ours."""
    if settings.get("kv_connector") not in CONNECTORS:
        raise RecordingError(
            f"{path}: recorded with kv_connector {settings['kv_connector']!r}; expected one of {', '.join(CONNECTORS[1:])} or none"
        )
    known = {name: settings[name] for name in EngineConfig.__dataclass_fields__ if name in settings}
    known["engine_version"] = version
    known["enable_lora"] = bool(settings.get("max_loras"))
    if not known["enable_lora"]:
        known.pop("max_loras", None)  # 0: none
    known["scheduling_policy"] = settings.get("policy", "fcfs")
    known["async_scheduling"] = settings.get("async_scheduling", False)
    if known.get("num_speculative_tokens"):
        if "spec_method" not in settings:
            raise RecordingError(f"{path}: it speculates, and does not say what drafts; expected config.spec_method")
        known["speculative_method"] = settings["spec_method"]
    if known.get("speculative_method") == "ngram" and known["async_scheduling"]:
        known["speculative_method"] = "ngram_gpu"  # only that knows its drafts in time
    if settings.get("kv_connector") == "OffloadingConnector":
        known["kv_role"] = None  # kv_both: no other engine is involved
    return EngineConfig(**known)


def offloading_of(meta: Json) -> HostMemory | None:
    """Return the host memory of a recording's first line, if KV is kept there."""
    settings = meta["config"]
    if settings.get("kv_connector") != "OffloadingConnector":
        return None
    given = settings["kv_connector_extra_config"]
    known = {name: given[name] for name in HostMemory.__dataclass_fields__ if name in given}
    budget = given.get("sync_load_budget_bytes", 0)
    if budget:
        known["load_tokens_within_step"] = budget // meta["kv_bytes_per_token"]
    return HostMemory(num_chunks=given["num_cpu_chunks"], **known)


def layout_of_layers(settings: Json, recorded: list[Json]) -> KvLayout | None:
    """Return the groups of a model's layers, which must be those of vLLM.

    Raises:
        ValueError: vLLM grouped them otherwise.
    """
    if "layers" not in settings:
        return None
    layout = layout_of(
        [_layer(layer) for layer in settings["layers"]],
        settings["block_size"],
        state_block_size=None if settings["enable_prefix_caching"] else settings["max_model_len"],
        is_block_outermost=settings["kv_cache_layout"].startswith("B"),
    )
    ours = [(group.layer.kind, group.block_size, list(group.layers)) for group in layout.groups]
    theirs = [(group["kind"], group["block_size"], group["layers"]) for group in recorded]
    if ours != theirs:
        raise ValueError(f"the layers form the groups {ours}; expected those that are recorded, {theirs}")
    return layout


def _layer(layer: Json) -> LayerKv:
    if layer["kind"] == "mamba":
        return LayerKv(0.0, state=layer["state_bytes"])
    window: int = layer["window" if layer["kind"] == "sliding" else "chunk"] if layer["kind"] != "full" else 0
    token = 2 * layer.get("element_bytes", 2) * layer["heads"] * layer["head_size"]
    return LayerKv(token, window, layer["kind"] == "chunked")


def num_stages_of(path: Path, settings: Json) -> int:
    """Return the number of stages of the recorded pipeline."""
    num_stages = settings.get("pipeline_parallel_size", 1)
    if not isinstance(num_stages, int) or num_stages < 1:
        raise RecordingError(f"{path}: pipeline_parallel_size is {num_stages!r}; expected a number of stages")
    return num_stages
