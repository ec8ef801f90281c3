"""What is written in a turn of the event loop leaves together, in order, and before the connection closes."""

import asyncio

from serving.runtime.turn import AT_ONCE, AT_ONCE_BYTES, TurnTransport


class Wire:
    """A transport that remembers what it was asked to do."""

    def __init__(self):
        self.done = []

    def write(self, data):
        self.done.append(data)

    def close(self):
        self.done.append("closed")

    def abort(self):
        self.done.append("aborted")

    def is_closing(self):
        return "closed" in self.done


def written(write):
    """Return what reaches the wire, within the turn in which `write` is called and after it."""

    async def main():
        wire = Wire()
        write(TurnTransport(wire))
        within = list(wire.done)
        await asyncio.sleep(0)
        return within, wire.done

    return asyncio.run(main())


def test_small_messages_leave_together_at_the_end_of_the_turn():
    def write(transport):
        transport.write(b"a")
        transport.write(b"b")

    assert written(write) == ([], [b"ab"])


def test_many_messages_or_many_bytes_leave_at_once():
    assert written(lambda transport: [transport.write(b"a") for _ in range(AT_ONCE)])[0] == [b"a" * AT_ONCE]
    large = b"x" * (AT_ONCE_BYTES + 1)
    assert written(lambda transport: transport.write(large))[0] == [large]


def test_a_head_leaves_with_what_follows_it_which_does_not_wait():
    def write(transport):
        transport.write_answer(b"HTTP/1.1 200 OK\r\n\r\n")
        transport.write_answer(b"event")
        transport.write_answer(b"next")

    assert written(write)[0] == [b"HTTP/1.1 200 OK\r\n\r\nevent", b"next"]
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    assert written(lambda transport: transport.write_answer(head)) == ([], [head])


def test_what_was_written_is_sent_before_the_connection_closes_and_nothing_after():
    def write(transport):
        transport.write(b"last")
        transport.close()
        transport.write(b"too late")

    assert written(write)[1] == [b"last", "closed"]
