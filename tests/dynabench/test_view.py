"""How a live run is going, where nobody sees a terminal."""

from dynabench.live.timeline import Stats
from dynabench.live.view import LiveView
from dynabench.terminal import Terminal


def stats(now_s, ended, failed=0, ttft_ms=(41.24, 90.0)):
    return Stats(now_s, 150, ended, failed, 900, ttft_ms, None, {})


def test_in_a_pipe_a_live_run_says_every_few_seconds_how_far_it_is(capsys):
    with LiveView(Terminal(), "kv (1/2)", 1200) as view:
        for tenths in range(121):
            view.update(stats(tenths / 10, tenths))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "   5 s  kv (1/2): 50 of 1,200 requests, 100 in flight, TTFT 41.2 ms (p90 90.0)\n"
        "  10 s  kv (1/2): 100 of 1,200 requests, 50 in flight, TTFT 41.2 ms (p90 90.0)\n"
    )


def test_failures_are_said_and_a_name_commands_no_terminal(capsys):
    view = LiveView(Terminal(), "kv\x1b[2J", 1200)
    view.update(stats(7.0, 140, failed=3, ttft_ms=None))
    assert capsys.readouterr().err == "   7 s  kv\\x1b[2J: 140 of 1,200 requests, 3 failed, 10 in flight, TTFT -\n"
