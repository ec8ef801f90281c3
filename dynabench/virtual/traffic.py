"""Transfers on the links of a cluster; its drivers find them here."""

from mocker.network.traffic import Traffic

__all__ = ["Traffic"]
