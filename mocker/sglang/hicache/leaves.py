"""Leaves of a tree in two places.

a leaf of the device    on the device, nothing below it is; there may be nodes below it on the host
a leaf of the host      only on the host, and nothing is below it

Both are candidates for eviction only while nobody uses them.
"""

from mocker.sglang.eviction import Leaves
from mocker.sglang.node import Node


def is_device_leaf(node: Node) -> bool:
    """Return whether a node may be evicted from the device."""
    if not node.on_device or node.num_locks or node.parent is None:
        return False
    for child in node.children.values():  # noqa: SIM110  # a loop is compiled, and ends early
        if child.on_device:
            return False
    return True


def is_host_leaf(node: Node) -> bool:
    """Return whether a node may be evicted from the host."""
    if node.on_device or not node.on_host or node.parent is None:
        return False
    return not (node.children or node.num_locks or node.num_host_locks)


class DeviceLeaves(Leaves):
    """Candidates for eviction from the device."""

    def _may_go(self, node: Node) -> bool:
        return is_device_leaf(node)


class HostLeaves(Leaves):
    """Candidates for eviction from the host."""

    def list(self, node: Node) -> None:
        """Add a leaf that nobody uses."""
        if not node.is_listed_on_host:
            node.is_listed_on_host = True
            self._push(node)

    def _may_go(self, node: Node) -> bool:
        return is_host_leaf(node)

    def _forget(self, node: Node) -> None:
        node.is_listed_on_host = False
