"""Changes to vLLM's CPU build, in one place."""

from typing import Any


def keep_async_scheduling(arguments: Any) -> None:
    """Let vLLM's CPU build schedule asynchronously if its EngineArgs ask for that; other builds do not change.

    The platform silently turns `async_scheduling` off, as "not required on CPU", after the checks that may rule it out.
    Turning it on again is safe: scheduler and queue are the same as on other platforms, the CPU's model runner inherits the
    asynchronous path with streams and events that do nothing, and a step's results are there when the next step begins.
    """
    from vllm.platforms import current_platform

    if not (arguments.async_scheduling and current_platform.is_cpu()):
        return
    create = arguments.create_engine_config

    def create_engine_config(*positional: Any, **named: Any) -> Any:
        config = create(*positional, **named)
        # With several stages only the second model runner can, which needs Triton.
        config.scheduler_config.async_scheduling = config.parallel_config.pipeline_parallel_size == 1
        return config

    arguments.create_engine_config = create_engine_config


def prepare_stages(engine: Any) -> None:
    """Let vLLM's CPU build run a model in several stages; engines with one, and other builds, do not change.

    Stages after the first copy their input to memory that they allocate when they are warmed up, which the CPU's worker leaves
    out (`enforce_eager`); without it, their first step fails. A batch without requests warms them up.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and engine.vllm_config.parallel_config.pipeline_parallel_size > 1:
        engine.collective_rpc("execute_dummy_batch")
