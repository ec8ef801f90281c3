"""The links of a cluster; `dynabench.virtual.cluster` finds them here."""

from mocker.network.links import Links

__all__ = ["Links"]
