"""Links between workers, a section of a deployment."""

from mocker.network.config import TransferConfig

__all__ = ["TransferConfig"]
