"""Faults and their port as flags of a command."""

from collections.abc import Mapping
from dataclasses import dataclass

from foundation.settings import CheckedSettings
from serving.frontend.config import Port
from serving.stand_in.faults.config import AdminConfig, FaultConfig
from serving.stand_in.faults.words import read_faults

TOKEN = "DYNABENCH_ADMIN_TOKEN"  # noqa: S105 (the name of a variable)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFlags(CheckedSettings):
    """What goes wrong on purpose."""

    fault: tuple[str, ...] = ()
    """A fault, NAME=VALUE, such as 429=0.05, stall=0.01:30s or exit=100 (the page "Let a server fail on purpose" lists them). Can be
    given several times."""

    fault_seed: int | None = None
    """Seed of the choice which requests meet a fault (default: --seed)."""

    admin_port: Port | None = None
    """Port at which faults are seen and changed while it runs, 0 for any free one (default: none)."""

    admin_host: str = "127.0.0.1"
    """Address of that port."""

    admin_token: str = ""
    """Token that callers of that port must send as Authorization: Bearer; needed unless --admin-host is loopback. Environment:
    DYNABENCH_ADMIN_TOKEN."""

    def faults(self, seed: int) -> FaultConfig:
        """Return the faults; a seed of their own replaces this one.

        Raises:
            ValueError: one of them makes no sense; the message is one line.
        """
        return read_faults(self.fault, seed=seed if self.fault_seed is None else self.fault_seed)

    def admin(self, environment: Mapping[str, str]) -> AdminConfig | None:
        """Return where they are changed, if anywhere.

        Raises:
            ValueError: others could reach it without a token.
        """
        if self.admin_port is None:
            return None
        return AdminConfig(
            port=self.admin_port, host=self.admin_host, token=self.admin_token or environment.get(TOKEN, "")
        )
