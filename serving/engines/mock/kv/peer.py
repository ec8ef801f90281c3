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

from serving.engines.kv.exchange import KvExchange
from serving.engines.kv.owner import KvOwner
from serving.engines.kv.params import RemoteKv
from serving.engines.kv.reader import KvReader
from serving.engines.mock.kv.handover import DecodeSide, Handover, PrefillSide, owner_of, reader_of
from serving.engines.mock.kv.nixl_channel import SideChannel
from serving.engines.mock.kv.nixl_peer import NixlPeer, answer_of
from serving.engines.mock.kv.passage import KvShape
from serving.engines.mock.live import Live
from serving.engines.side_channel import is_loopback
from serving.life.lease import LeaseConfig
from serving.transfer.agent import TransferError
from serving.transfer.config import TransferRunConfig


async def become_peer(
    peer: NixlPeer, shape: KvShape, transfer: TransferRunConfig, lease: LeaseConfig
) -> "PeerHandover":
    """Become a peer of others, in both directions.

    Raises:
        TransferError: this is not possible here.
    """
    if not is_loopback(peer.host):
        transfer = replace(transfer, transfer_host=peer.host)
    secret = peer.secret.encode()
    exchange = KvExchange(transfer, (lambda: secret) if secret else None)
    await exchange.start()
    made = PeerHandover(
        peer, exchange, owner_of(exchange, shape, transfer, lease), reader_of(exchange, shape, transfer)
    )
    try:
        await made.channel.open()
    except TransferError:
        await made.close()
        raise
    return made


class PeerHandover(Handover):
    """A hand-over whose peers find each other's KV by a side channel."""

    def __init__(self, peer: NixlPeer, exchange: KvExchange, owner: KvOwner, reader: KvReader) -> None:
        """Hand over through a started exchange."""
        self.channel = SideChannel(peer, lambda name: owner.find(name.rpartition("-")[2]))
        self._peer = peer
        prefill, decode = PrefillSide(owner, self._describe), DecodeSide(reader, self.channel.ask)
        super().__init__(exchange, prefill=prefill, decode=decode)

    async def close(self) -> None:
        """Hang up, and release everything."""
        await self.channel.close()
        await super().close()

    def _describe(self, live: Live, kv: RemoteKv) -> dict[str, Any]:
        """Return what an answer says; block 0 is never used in vLLM."""
        return answer_of(
            self._peer._replace(port=self.channel.port),
            f"{live.kv_name}-{kv.remote_request_id}",
            list(range(1, kv.remote_num_blocks + 1)),
            num_prompt=kv.remote_num_tokens,
            num_output=live.made,
            num_cached=kv.remote_prefill_cached_tokens,
        )
