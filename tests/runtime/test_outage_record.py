"""The record of a server's outages: who is to blame for a late answer."""

import asyncio
import contextlib
import time

from serving.runtime.outages import ANSWER_S, LATE_S, Outages


def followed(ask):
    """Follow a server until asking it raises EOFError; give the record."""
    outages = Outages("nats", "NATS at nowhere")

    with contextlib.suppress(EOFError):
        asyncio.run(outages.follow(ask, (OSError,), str))
    return outages


def test_a_time_out_in_time_is_an_outage():
    answers = iter([TimeoutError("no answer"), EOFError()])

    async def ask():
        raise next(answers)

    outages = followed(ask)
    assert (outages.is_away, outages.num_outages) == (True, 1)
    assert str(outages).startswith("NATS at nowhere has not answered for ")


def test_a_time_out_that_comes_late_is_our_own_and_the_server_is_asked_again():
    answers = iter([TimeoutError("no answer"), EOFError()])

    async def ask():
        answer = next(answers)
        if isinstance(answer, TimeoutError):
            time.sleep(ANSWER_S + 2 * LATE_S)  # the process hangs
        raise answer

    assert followed(ask).num_outages == 0
