"""Options that other tools have: what there is here instead, or that it is not simulated.

Names are those of vLLM, SGLang, TensorRT-LLM and Dynamo (engines, mockers, routers, planners) and of AIPerf, guidellm and
vLLM's, SGLang's and TensorRT-LLM's own benchmarks.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from foundation.text import listed

NOT_SIMULATED = {
    "trees of drafts are not simulated; use --num-speculative-tokens for a chain": """
        speculative-eagle-topk speculative-num-draft-tokens""",
    "simulated adapters are on all linear layers": "lora-target-modules fully-sharded-loras lora-backend",
    "multimodal models are not simulated; only text is": """
        limit-mm-per-prompt mm-processor-kwargs mm-encoder-tp-mode enable-multimodal image-width-mean image-height-mean
        image-batch-size audio-length-mean""",
    "guided decoding is not simulated: it does not change how tokens are scheduled": """
        guided-decoding-backend structured-outputs-config grammar-backend xgrammar""",
    "context parallelism is not simulated; use --tensor-parallel-size": "decode-context-parallel-size dcp cp-size",
    "step times are those of compiled models with CUDA graphs; measure others with dynabench calibrate and use "
    "--timing-file": """
        enforce-eager compilation-config cuda-graph-sizes cuda-graph-max-bs disable-cuda-graph enable-torch-compile
        attention-backend sampling-backend all2all-backend moe-runner-backend enable-dbo enable-eplb
        use-cuda-graph""",
    "SGLang's continuous decode steps are not simulated": "num-continuous-decode-steps",
    "beam search is not simulated": "max-beam-width beam-width use-beam-search best-of",
}
"""Names of options, without their dashes, of what a simulated engine does not do, by what to say about them."""

ANSWERS = {
    # Speculative decoding.
    "use --num-speculative-tokens with --acceptance-length, and --speculative-method": """
        speculative-config speculative-algorithm speculative-algo speculative-num-steps speculative-decoding-config
        spec-decode""",
    "use --speculative-method draft_model with --draft-model": "speculative-model speculative-draft-model-path",
    # The model and its GPUs.
    "use --max-loras": "max-loras-per-batch",
    "use --model": "tokenizer-path hf-id model-id",
    "only the sizes in the model's config.json are read; use --model": """
        trust-remote-code load-format download-dir revision hf-overrides""",
    "weights and activations are in the type of the model's config.json; use --quantization or --kv-cache-dtype": "dtype",
    "use --tensor-parallel-size": "tp tp-size num-gpus",
    "use --pipeline-parallel-size": "pp pp-size",
    "use --dp-size": "dp data-parallel-size",
    "use --attn-dp-size": "enable-dp-attention attention-data-parallel-size",
    "use --enable-expert-parallel": "ep ep-size moe-ep-size expert-parallel-size",
    "use --gpu": "system gpu-type device device-type accelerator hardware-type",
    "use --gpus": "total-gpus max-total-gpus",
    # The scheduler and its memory.
    "use --engine-type; dynabench run --engine measures real engines": "engine backend-type",
    "use --max-num-batched-tokens": "max-num-tokens chunked-prefill-size",
    "use --max-model-len": "max-sequence-length",
    "use --gpu-memory-utilization": """
        kv-cache-free-gpu-mem-fraction free-gpu-memory-fraction""",
    "use --num-gpu-blocks (blocks, not tokens)": """
        num-gpu-blocks-override kv-cache-memory-bytes max-tokens-in-paged-kv-cache""",
    "use --block-size": "kv-cache-block-size",
    "use --no-enable-prefix-caching": "no-prefix-caching",
    "use --long-prefill-token-threshold; the number of partial prefills is not limited": """
        max-num-partial-prefills max-long-partial-prefills""",
    "use --kv-offloading-size (GiB)": """
        swap-space kv-offloading-backend kv-cache-host-memory-bytes host-cache-size""",
    "use --kv-store-size": "lmcache-config",
    "storage behind SGLang's host memory is not modelled; vLLM's scheduler has --kv-prefetch-policy": """
        hicache-storage-prefetch-policy hicache-storage-backend-extra-config""",
    "weights stay on the GPU; only KV can be offloaded, with --kv-offloading-size": "cpu-offload-gb",
    "use --prefill-workers and --decode-workers": """
        disaggregation-mode disaggregation-strategy is-prefill-worker is-decode-worker pd-disaggregation""",
    "use --transfer-bandwidth-gb-s": "disaggregation-transfer-backend disaggregation-ib-device kv-connector connector",
    "use --startup-s": "startup-time",
    # The router and the planner.
    "use --attention-dp-enable-balance, --attention-dp-timeout-iters and --attention-dp-batching-wait-iters": "attention-dp-config",
    "use --router-mode": "router policy routing-policy router-policy lb-policy routing-logic routing-strategy",
    "use --router-mode sgl-cache-aware, which has SGLang's thresholds": """
        cache-threshold balance-abs-threshold balance-rel-threshold""",
    "use --workers": "num-workers replicas num-replicas num-instances",
    "use --no-use-kv-events": "no-kv-events",
    "use --router-ttl-s": "router-ttl router-ttl-secs",
    "use --busy-threshold": "active-decode-blocks-threshold active-prefill-tokens-threshold",
    "one router is simulated, so there is nothing to synchronise": """
        router-replica-sync router-snapshot-threshold router-reset-states sync-interval""",
    "use --planner-interval-s": "adjustment-interval throughput-adjustment-interval",
    # The workload.
    "use --max-requests": "num-prompts num-requests request-count n-requests",
    "use --duration-s": "benchmark-duration max-seconds max-duration",
    "use --rate with --arrival poisson, or --rate-scale for the trace's own arrivals": """
        request-rate qps request-rate-mode arrival-pattern rate-type user-centric-rate""",
    "use --rate-scale": "arrival-speedup-ratio speed-ratio fixed-schedule-speedup",
    "the trace's own arrival times are the default": "fixed-schedule",
    "use --concurrency": "replay-concurrency num-users",
    "use --rate-profile with --rate-to and --profile-s": """
        ramp-up-strategy ramp-up-start-rps ramp-up-end-rps rampup request-rate-ramp-duration""",
    "use --warmup-s": "warmup warmup-percent warmup-duration cooldown cooldown-percent",
    "use --warmup-requests": "warmup-request-count num-warmups warmup-num-requests",
    "use --ends length": "ignore-eos disable-ignore-eos",
    "use --seed": "random-seed",
    # What is measured, and what comes out.
    "use --url": "base-url target endpoint-url server-url",
    "use --api, or its path at the end of --url": "endpoint endpoint-type request-type request-format",
    "use --header": "headers request-header request-headers",
    "use --extra-body, such as '{\"temperature\": 0}'": """
        extra-inputs extra-request-body extra-request-args temperature top-p top-k min-p frequency-penalty
        presence-penalty repetition-penalty""",
    "answers are always streamed": "streaming stream stream-interval",
    "use --timeout-s": "request-timeout-seconds request-timeout",
    "use --clients": "workers-max max-workers record-processors",
    "use --slo, such as 'ttft <= 2s'": "goodput ttft tpot itl e2e request-latency ttft-target itl-target",
    "use --max-failed-share": "max-errors max-error-rate",
    "all percentiles are in the report": "percentile-metrics metric-percentiles",
    "use --out": "output-path output-dir artifact-dir output-artifact-dir result-dir result-filename output-file save-result",
    # Servers.
    "use --http-host": "host server-host",
    "use --http-port": "port server-port",
    "use --model-name": "served-model-name",
    "use --http-workers": "api-server-count",
    "tools need no switch; the format of calls is --tool-call-parser": "enable-auto-tool-choice",
    "the template comes with the model; use --model-path": "chat-template",
}
"""The same of what there is under another name, with the flags of the same command."""

WITH_COMMAND = {
    "token counts are those of the trace, so no tokenizer is needed (to count the tokens of texts: dynabench workload "
    "convert --tokenizer)": "tokenizer tokenizer-mode processor processor-args tokenizer-revision",
    "give the file as an argument: dynabench simulate FILE": """
        input-file dataset dataset-path trace trace-file trace-path data custom-dataset-path""",
    "the format is detected; use --format (dynabench workload formats lists them)": """
        custom-dataset-type dataset-name trace-format""",
    "make a workload first: dynabench workload synth --isl --osl --requests": """
        isl osl synthetic-input-tokens-mean synthetic-input-tokens-stddev output-tokens-mean output-tokens-stddev
        isl-stddev osl-stddev random-input-len random-output-len random-range-ratio input-len output-len max-input-len
        random-input random-output sharegpt-output-len num-dataset-entries sequence-distribution""",
    "make a workload first: dynabench workload synth --prefix-groups --prefix-blocks": """
        random-prefix-len prefix-prompt-length num-prefix-prompts prefix-repetition-prefix-len prefix-repetition-num-prefixes
        gsp-num-groups gsp-system-prompt-len shared-system-prompt-length""",
    "make a workload first: dynabench workload synth --turns --think-time-s": """
        conversation-num conversation-turn-mean conversation-turn-delay-mean num-turns session-turns-mean""",
}
"""The same of what another command does, which the text names."""

OF_COMMANDS = {
    "plan": {
        "a plan chooses the number: use --vary prefill_workers=1": "prefill-workers decode-workers",
        "a plan chooses the number: use --max-gpus to limit it": "workers num-workers replicas gpus total-gpus num-gpus",
        "a plan chooses the layout: describe the model and its GPU with flags": "deployment",
    },
    "kubernetes": {
        "give the number in the deployment file, as replicas of a pool": "workers num-workers replicas num-replicas",
    },
    "workload synth": {
        "use --requests": "num-prompts num-requests request-count num-dataset-entries n-requests max-requests",
        "use --rate and --arrival": "request-rate qps request-rate-mode arrival-pattern",
        "use --isl": "synthetic-input-tokens-mean random-input-len random-input input-len max-input-len",
        "use --osl": "output-tokens-mean random-output-len random-output output-len",
        "use --spread": "synthetic-input-tokens-stddev output-tokens-stddev isl-stddev osl-stddev random-range-ratio",
        "use --prefix-groups and --prefix-blocks": """
            random-prefix-len prefix-prompt-length num-prefix-prompts shared-system-prompt-length gsp-num-groups
            gsp-system-prompt-len prefix-repetition-prefix-len prefix-repetition-num-prefixes""",
        "use --turns": "conversation-turn-mean num-turns session-turns-mean",
        "use --think-time-s": "conversation-turn-delay-mean",
    },
}
"""The same for commands in which the answer is another."""

_FLAG = re.compile(r"--[a-z][\w-]+")


class OptionHint(NamedTuple):
    """What to say about an option, and the flags that a command needs for it."""

    text: str
    flags: tuple[str, ...] = ()
    is_simulated: bool = True


def _by_name(answers: Mapping[str, str]) -> dict[str, str]:
    return {name: text for text, names in answers.items() for name in names.split()}


KNOWN = {
    **{name: OptionHint(text, (*_FLAG.findall(text),), False) for name, text in _by_name(NOT_SIMULATED).items()},
    **{name: OptionHint(text, (*_FLAG.findall(text),)) for name, text in _by_name(ANSWERS).items()},
    **{name: OptionHint(text) for name, text in _by_name(WITH_COMMAND).items()},
}


def of_setting(name: str, known: Collection[str]) -> str:
    """Return what to say about a setting of another tool that a file or an axis names; "" if none of those `known` is it."""
    told = KNOWN.get(name.replace("_", "-"), OptionHint("")).text
    flags = _FLAG.findall(told)
    settings = {flag: flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags}
    if flags and not set(settings.values()) & set(known):
        return ""
    return _FLAG.sub(lambda flag: settings[flag[0]] + "=off" * flag[0].startswith("--no-"), told)


def answer(option: str, command: str, own: Collection[str], everywhere: Callable[[], dict[str, set[str]]]) -> str:
    """Return what to say about an option that a command lacks, "" if it is not known from anywhere.

    `own` are the command's options, and `everywhere` returns those of every command.
    """
    name = option.partition("=")[0].lstrip("-").replace("_", "-")
    if special := _by_name(OF_COMMANDS.get(command, {})).get(name):
        return special
    if known := KNOWN.get(name):
        if lacking := [flag for flag in known.flags if flag not in own]:
            return f"{known.text} (of {_having(lacking[0], everywhere())})"
        is_of_engines = not known.is_simulated and "--extra-engine-args" in own
        return known.text + "; a real engine takes it in --extra-engine-args" * is_of_engines
    having = _having(f"--{name}", everywhere())
    return f"it is an option of {having}" if having else ""


def _having(flag: str, everywhere: dict[str, set[str]]) -> str:
    """Return the commands that have a flag."""
    names = [command for command, flags in everywhere.items() if flag in flags]
    return f"dynabench {listed(names)}" if names else ""
