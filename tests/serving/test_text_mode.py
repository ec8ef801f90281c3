"""`in=text` through a pseudo-terminal, as a user types; and through a pipe."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pexpect
import pytest

from tests.support import warm
from tests.support.commands import DYNAMO_RUN, dynamo_run
from tests.support.servers import free_port
from tests.support.waiting import PATIENCE_S, until

PROMPT = "User.*›"
UP, CTRL_C, CTRL_D, ALT_ENTER = "\x1b[A", "\x03", "\x04", "\x1b\r"
ANSWER = "2004l"  # the prompt gives the terminal back, and the answer follows


@pytest.fixture
def environment(tmp_path):
    return os.environ | {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "TERM": "xterm",
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "DYN_TOKEN_ECHO_DELAY_MS": "10",
        "DYN_DISCOVERY_DIR": str(tmp_path / "d"),
    }


def spawn(environment, *words, columns=80):
    return pexpect.spawn(
        str(words[0] if words[0] is DYNAMO_RUN else sys.executable),
        list(map(str, words[1:])) if words[0] is DYNAMO_RUN else list(map(str, words)),
        env=environment,
        encoding="utf8",
        timeout=PATIENCE_S,
        dimensions=(24, columns),
    )


@pytest.fixture
def talk(environment):
    children = []

    def start(*words, **options):
        child = spawn(environment, DYNAMO_RUN, *words, **options)
        children.append(child)
        return child

    yield start
    for child in children:
        child.close(force=True)


def leave(child, key=CTRL_D):
    child.expect(PROMPT)
    child.send(key)
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus


def test_a_question_is_answered_with_its_figures_below(talk):
    child = talk("in=text", "out=echo_full", "--model-name", "my")
    child.expect("my: type /help")
    child.expect(PROMPT)
    child.send("hello there\r")
    child.expect(f"{ANSWER}hello there\r\n")
    child.expect(r"TTFT \d+ ms")
    assert leave(child) == 0


def test_text_is_the_default_in_a_terminal(talk):
    child = talk("out=echo_full", "--model-name", "my")
    assert leave(child) == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(talk):
    child = talk("out=echo_full", "--model-name", "my")
    child.expect(PROMPT)
    child.send("x" * 1000 + "\r")
    child.expect(f"{ANSWER}xxx")
    child.send(CTRL_C)
    child.expect("stopped")
    child.expect(PROMPT)
    child.send("still here\r")
    child.expect(f"{ANSWER}still here")
    child.expect(PROMPT)
    child.send(CTRL_C)
    child.expect("Ctrl-C again")
    assert leave(child, CTRL_C) == 0


def test_ctrl_c_clears_a_line_that_is_not_empty(talk):
    child = talk("out=echo_full", "--model-name", "my")
    child.expect(PROMPT)
    child.send("half a thought")
    child.expect("thought")
    child.send(CTRL_C)
    child.expect(PROMPT)
    child.send("whole\r")
    child.expect(f"{ANSWER}whole")
    assert leave(child) == 0


def test_several_lines_in_one_question(talk):
    child = talk("out=echo_full", "--model-name", "my")
    child.expect(PROMPT)
    child.send("first")
    child.send(ALT_ENTER)
    child.send("second\r")
    child.expect(f"{ANSWER}first\r\nsecond\r\n")
    child.expect(PROMPT)
    child.send("\x1b[200~pasted\nlines\x1b[201~\r")
    child.expect(f"{ANSWER}pasted\r\nlines\r\n")
    assert leave(child) == 0


def test_questions_are_kept_for_the_next_time(talk, tmp_path):
    child = talk("out=echo_full", "--model-name", "my")
    child.expect(PROMPT)
    child.send("remember me\r")
    child.expect(f"{ANSWER}remember me")
    assert leave(child) == 0
    assert (tmp_path / "state" / "dynabench" / "history").stat().st_mode & 0o777 == 0o600
    child = talk("out=echo_full", "--model-name", "my")
    child.expect(PROMPT)
    child.send(UP)
    child.expect("remember me")
    child.send("\r")
    child.expect(f"{ANSWER}remember me")
    assert leave(child) == 0


def test_commands_change_what_the_model_is_told(talk, tmp_path):
    engine = tmp_path / "e.py"
    engine.write_text(
        "async def generate(request):\n"
        "    said = '|'.join(f\"{m['role']}={m['content']}\" for m in request['messages'])\n"
        "    yield {'choices': [{'index': 0, 'delta': {'content': f'<{said}>'}, 'finish_reason': 'stop'}]}\n"
    )
    child = talk(f"out=pystr:{engine}")
    for line, answer in (
        ("/help", "Alt-Enter starts a new line"),
        ("one", "<user=one>"),
        ("two", "<user=one|assistant=<user=one>|user=two>"),
        ("/retry", "<user=one|assistant=<user=one>|user=two>"),
        ("/bogus", "unknown command /bogus"),
        ("/system be brief", ""),
        ("three", "<system=be brief|user=three>"),
        ("/clear", ""),
        ("/retry", "There is no question"),
        ("four", "<user=four>"),
    ):
        child.expect(PROMPT)
        child.send(f"{line}\r")
        child.expect(ANSWER)
        child.expect(re.escape(answer))
    child.expect(PROMPT)
    child.send("/quit\r")
    child.expect(pexpect.EOF)


def test_an_answer_cannot_steer_the_terminal(talk, tmp_path):
    engine = tmp_path / "e.py"
    engine.write_text(
        "async def generate(request):\n"
        "    yield {'choices': [{'index': 0, 'delta': {'content': 'a\\x1b[31mb\\x9b2Jc\\rd\\te\\n'}}]}\n"
    )
    child = talk(f"out=pystr:{engine}")
    child.expect(PROMPT)
    child.send("?\r")
    child.expect(re.escape(f"{ANSWER}a\\x1b[31mb\\x9b2Jc\\rd") + r"[\t ]+e\r\n")
    assert leave(child) == 0


def test_an_error_is_told_and_the_conversation_goes_on(talk, tmp_path):
    engine = tmp_path / "e.py"
    engine.write_text(
        "async def generate(request):\n"
        "    text = request['messages'][-1]['content']\n"
        "    assert len(request['messages']) == 1, 'the failed question was kept'\n"
        "    if text == 'bad': raise RuntimeError('not that')\n"
        "    yield {'choices': [{'index': 0, 'delta': {'content': f'fine: {text}'}}]}\n"
    )
    child = talk(f"out=pystr:{engine}")
    child.expect(PROMPT)
    child.send("bad\r")
    child.expect("RuntimeError: not that")
    child.expect(PROMPT)
    child.send("good\r")
    child.expect("fine: good")
    assert leave(child) == 0


def test_a_question_may_be_longer_than_the_terminal_is_wide(talk):
    child = talk("out=echo_full", "--model-name", "my", columns=20)
    child.expect(PROMPT)
    child.send("a question that is longer than the terminal is wide\r")
    child.expect(f"{ANSWER}a question that is")
    child.expect("TTFT")
    assert leave(child) == 0


def test_sigterm_ends_it(talk):
    child = talk("out=echo_full", "--model-name", "my")
    child.expect(PROMPT)
    child.kill(signal.SIGTERM)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


@pytest.fixture
def short_folder():
    """One whose sockets have names that the kernel takes."""
    with tempfile.TemporaryDirectory(prefix="d-") as folder:
        yield Path(folder)


def test_a_terminal_that_is_closed_ends_it_and_leaves_no_files(talk, environment, short_folder):
    environment["TMPDIR"] = str(short_folder)
    child = talk("out=echo_full", "--model-name", "my")
    child.expect(PROMPT)
    assert list(short_folder.glob("dynamo-run-*"))
    child.close(force=False)
    until(lambda: not list(short_folder.glob("dynamo-run-*")))


def test_a_conversation_with_what_the_network_serves(talk, environment):
    child = talk("in=text", "out=dyn")
    child.expect("Waiting for remote model")
    worker = warm.start(
        [DYNAMO_RUN, "in=dyn://test", "out=echo_full", "--model-name", "far"],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    try:
        child.expect("far: type /help")
        child.expect(PROMPT)
        child.send("hello\r")
        child.expect(f"{ANSWER}hello")
        assert leave(child) == 0
    finally:
        worker.terminate()
        assert worker.wait(PATIENCE_S) == 0


def test_the_frontends_own_conversation(environment):
    child = spawn(environment, "-m", "serving.frontend", "--interactive", "--http-port", free_port())
    worker = warm.start(
        [sys.executable, "-m", "serving.echo", "full", "--model-name", "far"],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    try:
        child.expect("Waiting for a model")
        child.expect("far: type /help")
        child.expect(PROMPT)
        child.send("hello\r")
        child.expect(f"{ANSWER}hello")
        assert leave(child) == 0
    finally:
        child.close(force=True)
        worker.terminate()
        assert worker.wait(PATIENCE_S) == 0


def test_ctrl_c_ends_the_wait_for_a_model(talk):
    child = talk("in=text", "out=dyn")
    child.expect("Waiting for remote model")
    child.send(CTRL_C)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_what_comes_through_a_pipe_is_one_question(environment):
    done = dynamo_run("out=echo_full", "--model-name", "my", input="two\nlines", env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "two\nlines\n", "")


@pytest.mark.parametrize(("way_in", "code"), [("stdin", 130), ("text", 0)])
def test_a_pipe_that_says_nothing_does_not_keep_it_from_ending(environment, way_in, code):
    command = [DYNAMO_RUN, f"in={way_in}", "out=echo_full", "--model-name", "my", "-v"]
    process = warm.start(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True, start_new_session=True
    )
    try:
        for line in process.stderr:
            if "is served at" in line:
                break
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)  # its input stays open
        assert process.returncode == code
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_an_empty_pipe_asks_nothing(environment):
    done = dynamo_run("out=echo_full", "--model-name", "my", input="\n", env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert "standard input is empty" in done.stderr


def test_a_pipe_into_text_is_a_conversation_line_by_line(environment):
    done = dynamo_run("in=text", "out=echo_full", "--model-name", "my", input="one\ntwo\n", env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "one\ntwo\n", "")


def test_an_engine_that_fails_ends_it_with_its_reason(environment, tmp_path):
    (tmp_path / "e.py").write_text("1 / 0")
    done = dynamo_run("in=stdin", f"out=pystr:{tmp_path / 'e.py'}", input="x", env=environment)
    assert done.returncode == 2
    assert done.stderr.endswith("cannot be loaded: ZeroDivisionError: division by zero\n")
