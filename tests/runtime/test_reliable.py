"""Bytes over a network that loses, repeats and reorders: they arrive whole, once, in order."""

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.runtime.reliable import WINDOW_BYTES, ReliableStream
from tests.support.examples import worth


@settings(max_examples=worth(300))
@given(st.lists(st.binary(max_size=5), max_size=30), st.randoms(use_true_random=False))
def test_whatever_the_network_does_all_bytes_arrive_once_and_in_order(messages, rng):
    sender, receiver = ReliableStream(), ReliableStream()
    to_receiver, to_sender, got = [], [], []

    def shaken(segments):
        for segment in segments:
            for _ in range(rng.choice([0, 1, 1, 1, 2])):
                yield segment

    def deliver(lossless=False):
        rng.shuffle(to_receiver)
        arriving, to_receiver[:] = list(to_receiver), []
        for segment in arriving:
            data, answers = receiver.receive(segment)
            if data is not None:
                got.append(data)
            to_sender.extend(answers if lossless else shaken(answers))
        arriving, to_sender[:] = list(to_sender), []
        for segment in arriving:
            _, again = sender.receive(segment)
            to_receiver.extend(again if lossless else shaken(again))

    for message in messages:
        to_receiver.extend(shaken([sender.seal(message)]))
        if rng.random() < 0.5:
            deliver()
        if rng.random() < 0.3:
            to_sender.extend(shaken([receiver.acknowledge()]))
    for _ in range(len(messages) + 2):  # the network is well again, and the timers run
        receiver.forget_asking()
        to_receiver.extend(sender.again())
        to_receiver.sort()  # in order of their numbers' low bytes: good enough to make progress
        deliver(lossless=True)
        to_sender.append(receiver.acknowledge())
        deliver(lossless=True)
    assert b"".join(got) == b"".join(messages)
    assert len(got) == len(messages)
    assert not sender.has_unacknowledged


def test_a_full_window_is_told_and_opens_with_the_acknowledgement():
    sender, receiver = ReliableStream(), ReliableStream()
    segment = sender.seal(b"x" * WINDOW_BYTES)
    assert sender.is_full
    receiver.receive(segment)
    sender.receive(receiver.acknowledge())
    assert not sender.is_full
