"""`dynabench completion`, in real shells."""

import shutil

import pexpect
import pytest

from dynabench.cli.app import COMMANDS
from tests.support.commands import BIN, dynabench, run
from tests.support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Return the file with the script of a shell."""
    folder = tmp_path_factory.mktemp("completion")

    def write(shell):
        file = folder / f"_dynabench.{shell}"
        if not file.exists():
            done = dynabench("completion", shell)
            assert (done.returncode, done.stderr) == (0, "")
            file.write_text(done.stdout)
        return file

    return write


def needs(shell):
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


def in_bash(script, words, cwd):
    """Return what bash offers after these words."""
    ask = """
source "$1"; shift
COMP_WORDS=(dynabench "$@"); COMP_CWORD=$#; COMPREPLY=()
"$(complete -p dynabench | sed 's/.*-F \\([^ ]*\\).*/\\1/')" dynabench "${@: -1}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
    done = run("bash", "-c", ask, "bash", script("bash"), *words, cwd=cwd)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_bash_completes_every_command(script, tmp_path, command):
    assert command in in_bash(script, [command[:2]], tmp_path)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["simulate", "--router-mo"], "--router-mode"),
        (["workload", "syn"], "synth"),
        (["workload", "synth", "--req"], "--requests"),
        (["export", "results", "--to", "par"], "parquet"),
        (["doctor", "--js"], "--json"),
        (["completion", "fi"], "fish"),
    ],
)
def test_bash_completes_commands_of_commands_flags_and_values(script, tmp_path, words, offered):
    assert offered in in_bash(script, words, tmp_path)


def test_bash_completes_a_file_whose_name_has_a_space(script, tmp_path):
    (tmp_path / "my trace.jsonl").touch()
    assert in_bash(script, ["simulate", "my"], tmp_path) == ["my trace.jsonl"]


@needs("fish")
def test_fish_completes_commands_flags_and_values(script, tmp_path):
    def offered(line):
        done = run("fish", "--no-config", "-c", f"source {script('fish')}; complete -C '{line}'", cwd=tmp_path)
        return {said.split("\t")[0] for said in done.stdout.splitlines()}

    assert set(COMMANDS) <= offered("dynabench ")
    assert "--router-mode" in offered("dynabench simulate --router-mo")
    assert "parquet" in offered("dynabench export results --to par")


@needs("zsh")
def test_zsh_completes_commands_and_flags(script, tmp_path):
    (tmp_path / "_dynabench").write_text(script("zsh").read_text())
    shell = pexpect.spawn("zsh", ["-f"], cwd=tmp_path, encoding="utf-8", timeout=PATIENCE_S, dimensions=(24, 200))
    shell.sendline("PS1='ready> '; fpath=($PWD $fpath); autoload -U compinit; compinit -u -D; print set-$((40+2))")
    shell.expect("set-42")
    for typed, completed in (("dynabench simul\t", "simulate"), ("dynabench simulate --router-mod\t", "--router-mode")):
        shell.expect("ready> ")
        shell.send(typed)
        shell.expect(completed)
        shell.sendline("\x15")  # deletes the line; a Ctrl-C while zsh is still completing is lost
    shell.close(force=True)


def test_an_unknown_shell_is_one_line():
    done = run(BIN / "dynabench", "completion", "tcsh")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "bash" in done.stderr
