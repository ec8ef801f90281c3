"""How two processes prove to each other that they know the cluster's token before they send anything else over TCP.

    listener                                                 caller
    GREETING, nonce  --------------------------------------->
                     <---------------------------------------  nonce, HMAC(token, "caller", address, both nonces)
    HMAC(token, "listener", address, both nonces)  --------->

Neither side learns the token from this, and a proof is valid for one connection to one address only. Pure: bytes in,
bytes out.
"""

import hmac

GREETING = b"dynabench/1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32


class ProofError(Exception):
    """The other side does not know the token; the message describes how that was noticed."""


class Handshake:
    """One side of the proof."""

    def __init__(self, token: bytes, address: str, nonce: bytes, *, is_caller: bool) -> None:
        self.is_over = False
        """Whether both sides have proven themselves."""
        self.rest = b""
        """Bytes that arrived after the other side's proof."""
        self._token = token
        self._address = address.encode()
        self._nonce = nonce
        self._is_caller = is_caller
        self._nonces = b""
        self._buffer = b""

    def start(self) -> bytes:
        """Return what to send at once."""
        return b"" if self._is_caller else GREETING + self._nonce

    def feed(self, data: bytes) -> bytes:
        """Process received bytes, and return what to send.

        Raises:
            ProofError: the other side is not a process of our cluster.
        """
        self._buffer += data
        return self._feed_caller() if self._is_caller else self._feed_listener()

    def _feed_caller(self) -> bytes:
        if not self._nonces:
            if not GREETING.startswith(self._buffer[: len(GREETING)]):
                raise ProofError("it is not a dynabench process, or has another version")
            if (nonce := self._take(len(GREETING) + NONCE_BYTES)) is None:
                return b""
            self._nonces = nonce[len(GREETING) :] + self._nonce
            return self._nonce + self._proof(b"caller")
        if (proof := self._take(PROOF_BYTES)) is not None:
            self._check(proof, b"listener")
        return b""

    def _feed_listener(self) -> bytes:
        if (answer := self._take(NONCE_BYTES + PROOF_BYTES)) is None:
            return b""
        self._nonces = self._nonce + answer[:NONCE_BYTES]
        self._check(answer[NONCE_BYTES:], b"caller")
        return self._proof(b"listener")

    def _take(self, count: int) -> bytes | None:
        if len(self._buffer) < count:
            return None
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _check(self, proof: bytes, role: bytes) -> None:
        if not hmac.compare_digest(proof, self._proof(role)):
            raise ProofError("it does not know this cluster's token")
        self.is_over = True
        self.rest, self._buffer = self._buffer, b""

    def _proof(self, role: bytes) -> bytes:
        return hmac.digest(self._token, b"\n".join((GREETING + role, self._address, self._nonces)), "sha256")
