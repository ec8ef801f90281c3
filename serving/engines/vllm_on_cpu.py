"""What vLLM's CPU build needs to be made to do, in one place."""

from typing import Any


def keep_async_scheduling(arguments: Any) -> None:
    """Let vLLM's CPU build schedule asynchronously where its EngineArgs ask for that; elsewhere nothing changes.

    The platform turns `async_scheduling` off without a word, as "not required on CPU", after everything that rules it out
    has been checked. Turning it on again is safe: scheduler and queue are those of any other platform, the CPU's model
    runner inherits the asynchronous path with streams and events that do nothing, and what a step computed is there when
    the next one begins.
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
