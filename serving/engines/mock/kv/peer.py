"""A rank that hands KV to its peers and reads theirs, request by request, as vLLM's instances with NixlConnector do.

client         P                                       D
  | prompt, do_remote_decode -->
  | <-- first token, kv_transfer_params
  | prompt, kv_transfer_params ----------------------->
                  <-- where is this request's KV? ----    its side channel
                  --- agent, ticket ----------------->
                  <== leases renewed, ticket read ===>    as between workers of ours
  | <--------------------------------------------------  the answer
"""

from dataclasses import replace
from typing import Any

from mocker import Sequence
from serving.engines.kv.exchange import KvExchange
from serving.engines.kv.notices import Begin, Notice, Offered, Read, Renew
from serving.engines.kv.params import Part, RemoteKv
from serving.engines.kv.reader import Spoil
from serving.engines.mock.kv.handover import DecodeSide, PrefillSide, Rank, owner_of, reader_of
from serving.engines.mock.kv.nixl_channel import SideChannel
from serving.engines.mock.kv.nixl_peer import Peer, answer_of
from serving.engines.mock.kv.passage import KvShape
from serving.engines.mock.live import Live
from serving.engines.side_channel import is_loopback
from serving.life.lease import LeaseConfig
from serving.model.card import Bootstrap
from serving.transfer.agent import TransferError
from serving.transfer.config import TransferRunConfig
from serving.worker.engine import KvTransfers


class BothSides:
    """See `Handover`."""

    def __init__(
        self, peer: Peer, exchange: KvExchange, shape: KvShape, transfer: TransferRunConfig, lease: LeaseConfig
    ) -> None:
        """Hand over through a started exchange."""
        self.bootstrap: Bootstrap | None = None
        self._peer = peer
        self._exchange = exchange
        self._owner = owner_of(exchange, shape, transfer, lease)
        self._reader = reader_of(exchange, shape, transfer)
        self._channel = SideChannel(peer, self._found)
        self._prefill = PrefillSide(exchange, self._owner, self._describe)
        self._decode = DecodeSide(exchange, self._reader, self._channel.ask)
        exchange.on_notice = self._on_notice

    async def start(self) -> None:
        """Become reachable.

        Raises:
            TransferError: the side channel's port cannot be used.
        """
        try:
            await self._channel.open()
        except TransferError:
            await self.close()
            raise
        self._peer = self._peer._replace(port=self._channel.port)

    def begin(self, rank: Rank, live: Live, asked: Part) -> None:
        """See `Handover`."""
        live.kv_name = asked.name
        (self._prefill if asked.is_prefill else self._decode).begin(rank, live, asked)

    def on_loads(self, rank: Rank, sequences: list[Sequence]) -> None:
        """See `Handover`."""
        self._decode.on_loads(rank, sequences)

    def on_finished(self, rank: Rank, live: Live) -> None:
        """See `Handover`."""
        self._prefill.on_finished(rank, live)

    def cancel(self, rank: Rank, live: Live) -> None:
        """See `Handover`."""
        (self._prefill if live.sequence.is_remote_decode else self._decode).cancel(rank, live)

    def spoil_loads(self, spoil: Spoil) -> None:
        """See `Handover`."""
        self._decode.spoil_loads(spoil)

    def transfers(self) -> KvTransfers:
        """See `Handover`."""
        return self._exchange.counts._replace(
            num_held=self._owner.num_held,
            num_waiting=self._owner.num_waiting + self._reader.num_waiting,
            num_loading=self._reader.num_loading,
        )

    async def close(self) -> None:
        """See `Handover`."""
        await self._channel.close()
        self._owner.close()
        await self._reader.close()
        await self._exchange.close()

    def _describe(self, live: Live, kv: RemoteKv) -> dict[str, Any]:
        """Return what an answer says; block 0 is never used in vLLM."""
        return answer_of(
            self._peer,
            f"{live.kv_name}-{kv.remote_request_id}",
            list(range(1, kv.remote_num_blocks + 1)),
            num_prompt=kv.remote_num_tokens,
            num_output=live.made,
            num_cached=kv.remote_prefill_cached_tokens,
        )

    def _found(self, name: str) -> RemoteKv | None:
        return self._owner.find(name.rpartition("-")[2])

    def _on_notice(self, notice: Notice) -> None:
        if isinstance(notice, Renew | Read | Begin):
            self._owner.on_notice(notice)
        elif isinstance(notice, Offered):
            self._reader.on_notice(notice)
        else:
            self._owner.on_notice(notice)
            self._reader.on_notice(notice)


async def become_peer(peer: Peer, shape: KvShape, transfer: TransferRunConfig, lease: LeaseConfig) -> BothSides:
    """Become a peer of others.

    Raises:
        TransferError: this is not possible here.
    """
    if not is_loopback(peer.host):
        transfer = replace(transfer, transfer_host=peer.host)
    secret = peer.secret.encode()
    exchange = KvExchange(transfer, (lambda: secret) if secret else None)
    await exchange.start()
    made = BothSides(peer, exchange, shape, transfer, lease)
    await made.start()
    return made
