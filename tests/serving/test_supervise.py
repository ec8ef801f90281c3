"""Groups of processes: what they log comes through, what cannot run ends the group, and all of them end."""

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from serving.frontend.http.listening import LISTEN_FD, listen
from serving.supervision.group import LINE_CHARACTERS, GroupError, ProcessEnded, ProcessGroup, ProcessReady, Program
from tests.support.waiting import PATIENCE_S, until, until_async

READY = "import serving.supervision.process as p; p.report_ready()\n"
HELD = """
import asyncio, os, signal, sys
from serving.supervision.log_writer import LogWriter
from serving.frontend.http.listening import LISTEN_FD, listen
from serving.supervision.group import ProcessGroup, Program

async def main():
    log = LogWriter(1)
    group = ProcessGroup(restart=True, say=log.say)
    os.mkfifo(sys.argv[1])
    await group.start(Program("child", ["-c", sys.argv[2], sys.argv[1]]))
    await asyncio.to_thread(lambda: open(sys.argv[1]).read())
    await group.stop(5)
    log.close(float(sys.argv[3]))

asyncio.run(main())
"""
TALKATIVE = (
    "import sys; print('x' * 8_000_000 + '\\n' + 'line\\n' * 200_000, flush=True); open(sys.argv[1], 'w').close()"
)


def watch(code, *, restart=False, until=None, arguments=()):
    """Run a child of this code to its end (or until a line comes); return the lines that it logged."""

    async def main():
        lines, ended = [], asyncio.Event()

        def say(line):
            lines.append(line.removeprefix("     child "))
            if until is not None and until in line:
                ended.set()

        group = ProcessGroup(restart=restart, say=say)
        await group.start(Program("child", ["-c", code, *arguments]))
        try:
            if until is not None:
                await group.wait(ended)
            else:
                await asyncio.gather(*group._keepers)
        finally:
            await group.stop(5)
        assert not group.processes
        return lines

    return asyncio.run(main())


def test_a_long_line_comes_through_in_pieces_and_the_lines_after_it_too():
    lines = watch(f"print('é' * {3 * LINE_CHARACTERS + 7}); print('next')")
    assert max(map(len, lines)) <= LINE_CHARACTERS
    assert "".join(lines[:-1]) == "é" * (3 * LINE_CHARACTERS + 7)
    assert lines[-1] == "next"


def test_a_child_that_never_ends_a_line_does_not_wait_for_us():
    lines = watch("import sys\nfor _ in range(3000): sys.stdout.write('a' * 1000)\nsys.stdout.write('end')")
    assert max(map(len, lines)) <= 2 * LINE_CHARACTERS
    assert "".join(lines) == "a" * 3_000_000 + "end"


def test_empty_lines_and_bytes_that_are_no_text_come_through():
    lines = watch(r"import sys; sys.stdout.buffer.write(b'a\n\n\xff\xfeb\nlast')")
    assert lines == ["a", "", "��b", "last"]


def test_a_reader_that_stops_reading_our_log_stops_neither_us_nor_the_child(tmp_path):
    command = [sys.executable, "-c", HELD, tmp_path / "pipe", TALKATIVE, "0.1"]
    group = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert group.wait(PATIENCE_S) == 0  # nobody has read anything
    group.stdout.close()


def test_a_reader_of_our_log_that_has_gone_stops_neither_us_nor_the_child(tmp_path):
    group = subprocess.Popen([sys.executable, "-c", HELD, tmp_path / "pipe", TALKATIVE, "5"], stdout=subprocess.PIPE)
    group.stdout.close()
    assert group.wait(PATIENCE_S) == 0


def test_lines_that_a_slow_reader_missed_are_counted(tmp_path):
    command = [
        sys.executable,
        "-c",
        HELD,
        tmp_path / "pipe",
        "import sys; print('line\\n' * 150_000, flush=True); open(sys.argv[1] + '.written', 'w'); open(sys.argv[1], 'w')",
        "20",
    ]
    group = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    until((tmp_path / "pipe.written").exists, group)
    lines = group.communicate(timeout=PATIENCE_S)[0].splitlines()
    left_out = sum(int(line[1:].split()[0]) for line in lines if line.startswith("("))
    kept = sum(line.endswith(" line") for line in lines)
    assert left_out > 0
    assert kept + left_out in (150_000, 150_001)


def test_a_child_that_something_below_it_outlives_is_started_again(tmp_path):
    code = READY + (
        "import subprocess, sys\n"
        "open(sys.argv[1], 'a').write(str(subprocess.Popen(['sleep', '600']).pid) + ' ')\n"
        "print('once more')\nsys.exit(7)"
    )
    try:
        lines = watch(code, restart=True, until="restarting it", arguments=[str(tmp_path / "pids")])
        assert lines == ["once more", "ended with code 7; restarting it in 0.5 s"]
    finally:
        for pid in (tmp_path / "pids").read_text().split():
            os.kill(int(pid), 9)


def test_a_child_whose_settings_are_wrong_ends_the_group_with_its_reason():
    code = "import serving.cli.commands as c; print('noise'); c.fail('serving.x', 'no such model')"
    with pytest.raises(GroupError, match=r"^child does not start: no such model$"):
        watch(code, restart=True, until="never")


def test_a_child_that_never_becomes_ready_ends_the_group_after_some_tries(tmp_path):
    code = "import sys; print('try', file=open(sys.argv[1], 'a')); raise RuntimeError('out of luck')"
    message = "^child does not start: ended with code 1; its last line was: RuntimeError: out of luck$"
    with pytest.raises(GroupError, match=message):
        watch(code, restart=True, until="never", arguments=[str(tmp_path / "tries")])
    assert (tmp_path / "tries").read_text() == "try\n" * 3


def test_a_child_that_was_ready_once_is_started_again_whatever_it_ends_with(tmp_path):
    code = f"import sys, os\nif not os.path.exists(sys.argv[1]):\n open(sys.argv[1], 'w').close()\n exec({READY!r})\nprint('again')\nsys.exit(2)"
    lines = watch(code, restart=True, until="in 5 s", arguments=[str(tmp_path / "ready")])
    assert lines.count("again") == 4


def test_a_group_that_is_stopped_while_it_pauses_leaves_no_process(tmp_path):
    async def main():
        group = ProcessGroup(restart=True, say=lambda line: seen.set())
        seen = asyncio.Event()
        await group.start(Program("child", ["-c", READY + "print(1)"]))
        await seen.wait()
        await group.stop(5)
        await asyncio.sleep(0)
        return group.processes

    assert asyncio.run(main()) == {}


def test_a_child_that_cannot_be_started_again_is_tried_again(monkeypatch):
    spawn, tries = asyncio.create_subprocess_exec, []

    async def sometimes(*arguments, **options):
        tries.append(1)
        if len(tries) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return await spawn(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", sometimes)
    lines = watch(READY + "print('up')\nraise SystemExit(1)", restart=True, until="in 2 s")
    assert lines == [
        "up",
        "ended with code 1; restarting it in 0.5 s",
        "could not be started (Too many open files); restarting it in 1 s",
        "up",
        "ended with code 1; restarting it in 2 s",
    ]


def test_a_child_that_ignores_the_first_request_to_end_is_asked_again():
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGINT, lambda *_: (print('bye'), sys.exit()))\n"
        "print('up')\ntime.sleep(600)"
    )
    lines = watch(code, until="up")
    assert lines == ["up", "bye"]


LAST_WORD = """
import signal, sys, time
import serving.supervision.process as process

def stop(*_):
    time.sleep(float(sys.argv[2]))
    print(sys.argv[1], "ends", flush=True)
    raise SystemExit

signal.signal(signal.SIGTERM, stop)
print("runs", flush=True)
while True:
    signal.pause()
"""


def test_what_others_need_is_asked_to_end_once_they_have_ended():
    async def main():
        said = []
        async with ProcessGroup(restart=False, say=lambda line: said.append(line.split()[1:])) as group:
            await group.start(
                Program("store", ["-c", LAST_WORD, "store", "0"], is_needed_by_others=True),
                Program("worker", ["-c", LAST_WORD, "worker", "0.5"]),
            )
            while said.count(["runs"]) < 2:
                await asyncio.sleep(0.01)
            await group.stop(PATIENCE_S)
        return [words[0] for words in said if words[-1] == "ends"]

    assert asyncio.run(main()) == ["worker", "store"]


WAITING = """
import signal, sys, serving.supervision.process as p
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
p.report_ready(sys.argv[1])
signal.pause()
"""


async def until_event(events, wanted):
    await until_async(lambda: wanted in events)


def test_a_process_that_is_asked_to_end_is_forgotten_and_the_others_stay():
    async def main():
        events = []
        async with ProcessGroup(restart=True, on_event=events.append) as group:
            await group.start(*(Program(name, ["-c", WAITING, name.upper()]) for name in ("one", "two")))
            await until_event(events, ProcessReady("one", "ONE"))
            await until_event(events, ProcessReady("two", "TWO"))
            await group.end("one", 60)
            assert list(group.processes) == ["two"]
            await group.start(Program("one", ["-c", WAITING, "again"]))
            await until_event(events, ProcessReady("one", "again"))
        assert not group.processes
        return events

    assert [event for event in asyncio.run(main()) if isinstance(event, ProcessEnded)] == []


def test_a_process_that_does_not_end_when_asked_is_ended():
    stubborn = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(600)"

    async def main():
        events = []
        async with ProcessGroup(restart=True, on_event=events.append) as group:
            await group.start(Program("child", ["-c", stubborn]))
            await until_event(events, ProcessReady("child", ""))
            await group.end("child", 0)
            assert not group.processes

    asyncio.run(main())


def test_a_process_that_is_retried_may_fail_again_and_again_and_is_ended_between(tmp_path):
    async def main():
        events, said = [], []
        async with ProcessGroup(restart=False, say=said.append, on_event=events.append) as group:
            await group.start(Program("child", ["-c", "import sys; sys.exit('no')"], is_retried=True))
            await until_async(lambda: events.count(ProcessEnded("child", False, True)) == 4)
            await group.end("child", 60)
            assert not group._failed.is_set()
        assert any("does not start: ended with code 1; its last line was: no; restarting it" in line for line in said)

    asyncio.run(main())


def test_a_process_that_dies_in_a_group_that_does_not_restart_is_reported_so():
    async def main():
        events = []
        async with ProcessGroup(restart=False, on_event=events.append) as group:
            await group.start(Program("child", ["-c", READY]))
            await until_event(events, ProcessEnded("child", True, False))

    asyncio.run(main())


HOLDS = """
import os, signal, serving.supervision.process as p
links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]
p.report_ready(" ".join(links))
signal.pause()
"""


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_only_the_process_that_listens_has_the_listener(run):
    async def main():
        events = []
        with listen("127.0.0.1", 0) as listener:
            held = str(Path(f"/proc/self/fd/{listener.fileno()}").readlink())
            async with ProcessGroup(restart=False, on_event=events.append) as group:
                await group.start(
                    Program("frontend", ["-c", HOLDS], file_descriptors=(listener.fileno(),)),
                    Program("worker", ["-c", HOLDS]),
                )
                await until_async(lambda: len(events) == 2)
        return {event.name for event in events if held in event.known_as.split()}

    assert run(main()) == {"frontend"}


BELOW = """
import asyncio, os, signal, serving.supervision.process as p
from serving.frontend.http.listening import listen

async def main(stopping):
    with listen("127.0.0.1", 0) as listener:
        given = {name: os.readlink(f"/proc/self/fd/{fd}") for name, fd in
            {"listener": listener.fileno(), "status": os.environ[p.STATUS_FD]}.items()}
        below = await asyncio.create_subprocess_exec("ls", "-l", "/proc/self/fd", stdout=asyncio.subprocess.PIPE)
        seen, _ = await below.communicate()
        p.report_ready(" ".join(name for name, link in given.items() if link in seen.decode()))
        await stopping.wait()

p.run_process(main)
"""


def test_what_a_process_was_given_does_not_go_on_to_those_that_it_starts():
    async def main():
        events = []
        with listen("127.0.0.1", 0) as listener:
            given = {LISTEN_FD: str(listener.fileno())}
            async with ProcessGroup(restart=False, on_event=events.append) as group:
                await group.start(
                    Program("frontend", ["-c", BELOW], environment=given, file_descriptors=(listener.fileno(),))
                )
                await until_async(lambda: events)
        return events[0]

    assert uvloop.run(main()) == ProcessReady("frontend", "")
