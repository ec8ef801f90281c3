"""The kinds of an engine's groups, and how events describe them."""

from mocker.events import BlockGroup
from mocker.vllm.groups.kinds import Chunked, Kind, State, Units, WholeState, Window
from mocker.vllm.groups.settings import GroupSettings


def described(settings: GroupSettings, units: Units) -> list[BlockGroup]:
    """Return the groups as events describe them."""
    first = next((number for number, group in enumerate(settings.groups) if group.layer.is_full), None)
    return [
        BlockGroup(
            number,
            group.layer.kind,
            0 if group.layer.is_chunked else group.layer.window,
            group.layer.window if group.layer.is_chunked else 0,
            group.block_size,
            units.named,
            group.layer.is_full,
            number == first,
        )
        for number, group in enumerate(settings.groups)
    ]


def kinds_of(settings: GroupSettings, units: Units) -> list[Kind]:
    """Return the kinds of a model's groups in the order of look-ups: those that keep everything first."""
    alike: dict[object, list[int]] = {}
    for number, group in enumerate(settings.groups):
        alike.setdefault((group.layer, group.block_size), []).append(number)
    kinds = [_kind(settings, units, numbers) for numbers in alike.values()]
    return sorted(kinds, key=lambda kind: type(kind) is not Kind)


def _kind(settings: GroupSettings, units: Units, numbers: list[int]) -> Kind:
    group = settings.groups[numbers[0]]
    layer, size = group.layer, group.block_size
    drops = settings.drops_last and any(settings.groups[number].drops_last for number in numbers)
    if layer.is_full:
        return Kind(numbers, size, units, drops_last=drops)
    if not layer.token and settings.enable_prefix_caching:
        return State(
            numbers,
            size,
            units,
            num_drafts=settings.num_drafts,
            retention=settings.retention_interval,
            drops_last=settings.drops_last,
            stores_next=drops,
        )
    if not layer.token:
        return WholeState(numbers, size, units, num_drafts=settings.num_drafts)
    most = min(layer.window - int(not layer.is_chunked) + settings.num_in_flight, settings.max_model_len)
    if layer.is_chunked:
        return Chunked(numbers, size, units, chunk=layer.window, most_tokens=most)
    return Window(
        numbers,
        size,
        units,
        window=layer.window,
        retention=settings.retention_interval,
        most_tokens=most,
        drops_last=drops,
    )
