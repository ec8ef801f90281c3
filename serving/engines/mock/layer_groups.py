"""What routers know of a simulated engine's layers. It loads no networking: simulations need it, too."""

from mocker.events import BlockGroup
from serving.router.events import LayerGroup


def layer_group(group: BlockGroup) -> LayerGroup:
    """Describe layers that keep only a part of a prompt's KV."""
    return LayerGroup(group.number, group.unit, group.block_size, group.window, group.chunk)
