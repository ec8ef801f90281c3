"""A model that is cut into stages, each on GPUs of its own.

    layers 0 ............ 19 | 20 .......... 39 | 40 .......... 59 | 60 .......... 79, and the head
          stage 0                 stage 1            stage 2            stage 3

Layers of different kinds are counted as if each stage had the same share of every kind. The time in which hidden states
are sent from stage to stage is not counted.
"""

from mocker.models.shape import ModelShape

USUAL_STEP = 64
"""Tokens of the step from whose times the stages' shares are taken."""


def layers_of_stages(num_layers: int, num_stages: int) -> list[int]:
    """Return the layers of each stage as vLLM divides them: evenly, and the rest to the last stages but one, one each.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ValueError(f"pipeline_parallel_size is {num_stages}; expected at most the model's {num_layers} layers")
    each, rest = divmod(num_layers, num_stages)
    return [each + (num_stages - 1 - rest <= stage < num_stages - 1) for stage in range(num_stages)]


def shares_of_stages(layers: list[int], layers_s: float, head_s: float) -> tuple[float, ...]:
    """Return the share of a step's time that each stage takes; the last has the head."""
    times = [layers_s * count / sum(layers) for count in layers]
    times[-1] += head_s
    total = sum(times)
    return tuple([seconds / total for seconds in times[:-1]] + [1 - sum(times[:-1]) / total])


def saved_by_stages(shape: ModelShape, layers: list[int], weights: float, num_gpus: int) -> float:
    """Return the bytes of a model's weights on one GPU that the fullest stage does not have: other layers, and a head."""
    share, embeddings = max(layers) / sum(layers), 2.0 * shape.embedding_parameters / num_gpus
    elsewhere = 0.0 if shape.is_tied else embeddings / 2
    return (1 - share) * (weights - embeddings) + elsewhere
