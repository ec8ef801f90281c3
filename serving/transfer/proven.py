"""Both ends of a connection prove that they know the cluster's token (`serving/runtime/proof.py`)."""

from collections.abc import Callable

from serving.runtime.proof import NONCE_BYTES, Handshake, ProofError
from serving.runtime.world import world
from serving.transfer.agent import TransferError
from serving.transfer.stream import Stream

MIN_TOKEN_BYTES = 16

MAX_PROOF_BYTES = 256
"""The most that is read at once before the other side has proven itself."""

Token = Callable[[], bytes]


async def prove(stream: Stream, place: str, token: bytes, *, is_caller: bool) -> None:
    """Prove that we know the token, and check that the other side does; `place` is both sides' name for this address.

    Raises:
        TransferError: it does not, or finds that we do not.
        OSError: it hung up.
    """
    handshake = Handshake(token, place, world().entropy.randbytes(NONCE_BYTES), is_caller=is_caller)
    is_asked = False
    try:
        await stream.send(handshake.start())
        while not handshake.is_over:
            if answer := handshake.feed(await stream.receive_some(MAX_PROOF_BYTES)):
                is_asked = True
                await stream.send(answer)
    except ProofError as error:
        raise TransferError(f"{place} is not trusted: {error}", "refused") from error
    except ConnectionError as error:
        if not is_asked:
            raise
        raise TransferError(f"{place} hung up on this agent's proof: does it have another token?", "refused") from error
    stream.put_back(handshake.rest)
