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
        config.scheduler_config.async_scheduling = True
        return config

    arguments.create_engine_config = create_engine_config
