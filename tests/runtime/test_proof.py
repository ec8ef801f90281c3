"""The proof that both sides of a TCP connection know the cluster's token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.runtime.proof import GREETING, Handshake, ProofError

TOKEN = b"sesame, and what it opens"
ADDRESS = "tcp:127.0.0.1:1"


def listener(token=TOKEN, address=ADDRESS, nonce=b"l" * 32):
    return Handshake(token, address, nonce, is_caller=False)


def caller(token=TOKEN, address=ADDRESS, nonce=b"c" * 32):
    return Handshake(token, address, nonce, is_caller=True)


@given(st.lists(st.integers(1, 50)), st.binary(max_size=100))
def test_both_sides_are_satisfied_however_the_bytes_are_cut_and_what_follows_is_kept(cuts, more):
    def feed(side, data):
        sent, at = b"", 0
        for cut in [*cuts, len(data)]:
            if data[at : at + cut]:
                sent += side.feed(data[at : at + cut])
            at += cut
        return sent

    one, other = listener(), caller()
    answer = feed(one, feed(other, one.start()))
    assert one.is_over
    assert not other.is_over
    assert other.feed(answer + more) == b""
    assert (other.is_over, other.rest) == (True, more)


def test_a_listener_does_not_prove_itself_to_a_caller_without_the_token():
    one, other = listener(), caller(token=b"another")
    with pytest.raises(ProofError, match="it does not know this cluster's token"):
        one.feed(other.feed(one.start()))
    assert not one.is_over


def test_a_caller_is_not_satisfied_with_a_listener_without_the_token():
    one, other = listener(token=b"another"), caller()
    proof = other.feed(one.start())
    with pytest.raises(ProofError):
        one.feed(proof)
    with pytest.raises(ProofError):
        other.feed(proof[32:])  # its own proof, sent back
    assert not other.is_over


def test_a_proof_is_worth_nothing_at_another_address_or_on_another_connection():
    elsewhere, other = listener(address="tcp:127.0.0.1:2"), caller()
    proof = other.feed(elsewhere.start())
    for place in (elsewhere, listener(nonce=b"m" * 32)):
        with pytest.raises(ProofError):
            place.feed(proof)


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH_9.2\r\n", b"\x06\x00\x00\x00\x93\x91", b"d" * 200])
def test_a_caller_says_nothing_to_what_is_no_process_of_ours(said):
    with pytest.raises(ProofError, match="not a dynabench process"):
        caller().feed(said)


def test_the_token_is_never_sent():
    one, other = listener(), caller()
    hello = one.start()
    proof = other.feed(hello)
    assert hello.startswith(GREETING)
    assert not any(TOKEN in sent for sent in (hello, proof, one.feed(proof)))
