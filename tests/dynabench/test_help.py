"""What help shows, and what a wrong flag is answered with, in terminals and pipes."""

import json
import os
import re
import sys

import pytest
from cyclopts import UnknownOptionError

from dynabench.arm import Settings
from dynabench.cli.app import app, unknown_option
from dynabench.cli.questions import QUESTIONS
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.file import from_plain
from dynabench.elsewhere import ANSWERS, KNOWN, NOT_SIMULATED, OF_COMMANDS, WITH_COMMAND
from dynabench.experiment.axes import read_axis
from dynabench.experiment.head import head_of
from dynabench.experiment.settings import ExperimentConfig
from dynabench.reference.command import all_commands
from serving.cli import questions
from serving.cli.help import MOST
from serving.worker.config import WorkerConfig
from tests.support.commands import dynabench, dynamo_run, run
from workloads import Workload
from workloads.pacing import LoadConfig

MANY = ["simulate", "run", "sweep", "plan", "serve", "validate"]
COMMANDS_BY_NAME = {command.name: command for command in all_commands()}


def flags_of(name):
    settings = (setting for group in COMMANDS_BY_NAME[name].groups.values() for setting in group)
    return {name for setting in settings for name in setting.names if name.startswith("--")}


def shown(text):
    """Return the flags that begin a line of help."""
    return {word for line in text.splitlines() for word in line.strip("│* ").split()[:1] if word.startswith("--")}


@pytest.mark.parametrize("command", MANY)
def test_help_shows_the_two_dozen_options_that_people_use_by_question(command):
    text = dynabench(command, "--help", env=os.environ | {"COLUMNS": "80"}).stdout
    assert 10 <= len(shown(text)) <= 30
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("? ─") >= 4
    count = sum(len(settings) for settings in COMMANDS_BY_NAME[f"dynabench {command}"].groups.values())
    assert f"Show all {count} options, by subject: " in " ".join(text.replace("│", "").split())


@pytest.mark.parametrize("command", ["run", "plan"])
def test_help_all_shows_every_option(command):
    text = dynabench(command, "--help-all", env=os.environ | {"COLUMNS": "200"}).stdout
    assert {flag for flag in flags_of(f"dynabench {command}") if flag not in text} == set()


@pytest.mark.parametrize("name", sorted(COMMANDS_BY_NAME))
def test_a_command_with_many_options_answers_several_questions_and_others_show_all(name):
    num_lines = sum(len(settings) for settings in COMMANDS_BY_NAME[name].groups.values())
    table = QUESTIONS if name.startswith("dynabench") else questions.QUESTIONS
    answered = [question for question, flags in table.items() if flags_of(name) & set(flags)]
    assert num_lines <= MOST or len(answered) >= 4


@pytest.mark.parametrize("table", [QUESTIONS, questions.QUESTIONS])
def test_each_common_option_exists(table):
    known = {flag for name in COMMANDS_BY_NAME for flag in flags_of(name)}
    assert {flag for flags in table.values() for flag in flags} - known == set()


def test_a_command_with_few_options_shows_them_all_either_way():
    assert dynabench("doctor", "-h").stdout == dynabench("doctor", "--help-all").stdout
    assert "--help-all" not in dynabench("doctor", "--help").stdout


def test_other_programs_have_both_lengths_of_help():
    short, whole = dynamo_run("--help").stdout, dynamo_run("--help-all").stdout
    assert "--router-temperature" not in short
    assert "--router-temperature" in whole
    text = run(sys.executable, "-m", "serving.mocker", "--help").stdout
    assert "--num-gpu-blocks" in text
    assert "--constant-prefill-ms" not in text


def test_the_length_of_help_is_that_which_the_words_ask_for(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["another-program", "--help-all"])
    texts = []
    for words in (["simulate", "--help-all"], ["simulate", "--help"]):
        command, bound, _ = app.parse_args(words)
        command(*bound.args, **bound.kwargs)
        texts.append(capsys.readouterr().out)
    assert ["--router-temperature" in text for text in texts] == [True, False]


def test_help_all_of_the_program_lists_the_commands():
    assert dynabench("--help-all").stdout == dynabench("--help").stdout


@pytest.mark.parametrize("command", ["simulate", "kubernetes", ""])
def test_no_line_of_help_is_wider_than_a_narrow_terminal(command):
    done = dynabench(*command.split(), "--help", env=os.environ | {"COLUMNS": "40"})
    assert max(map(len, done.stdout.splitlines())) <= 40


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "simulate --speculative-config x",
            "--speculative-config; use --num-speculative-tokens with --acceptance-length, and --speculative-method",
        ),
        ("sweep --lora_target_modules", "--lora_target_modules; simulated adapters are on all linear layers"),
        ("run --enforce-eager", "use --timing-file; a real engine takes it in --extra-engine-args"),
        (
            "simulate --engine sglang",
            "--engine; use --engine-type; dynabench run --engine measures real engines",
        ),
        ("simulate -tp 4", "-tp; use --tensor-parallel-size"),
        (
            "compare --tp=4",
            "--tp; use --tensor-parallel-size (of dynabench simulate, run, sweep, plan, serve, ",
        ),
        ("plan --workers 2", "--workers; a plan chooses the number"),
        ("simulate --url http://x", "--url; it is an option of dynabench run and validate"),
        ("workload inspect --max-model-len 4", "--max-model-len; it is an option of dynabench simulate"),
        ("workload synth o.jsonl --num-prompts 4", "--num-prompts; use --requests"),
        ("kubernetes d.yaml --out o --replicas 4", "--replicas; give the number in the deployment file"),
        ("simulate --router kv", "--router; use --router-mode"),
        ("simulate --max-requsts 4", "--max-requsts; did you mean --max-requests or --max-queued-requests?"),
        ("doctor --frobnicate", "--frobnicate; dynabench doctor --help-all lists all options\n"),
    ],
)
def test_an_option_of_another_tool_or_command_is_answered_with_what_exists_here(words, told):
    with pytest.raises(UnknownOptionError) as caught:
        app.parse_args(words.split(), exit_on_error=False, print_error=False)
    answered = f"{unknown_option(caught.value)}\n"
    assert answered.startswith("Unknown option: -")
    assert told in answered


def test_an_unknown_option_is_one_line():
    done = dynabench("simulate", "--speculative-config={}")
    told = "dynabench: Unknown option: --speculative-config; use --num-speculative-tokens with --acceptance-length, and --speculative-method\n"
    assert (done.returncode, done.stderr) == (2, told)


def test_each_option_that_an_answer_names_exists_and_is_given_one_answer():
    known = {flag for name in COMMANDS_BY_NAME for flag in flags_of(name)}
    assert {flag for text in KNOWN.values() for flag in re.findall(r"--[a-z][\w-]+", text.text)} - known == set()
    for table in (NOT_SIMULATED | ANSWERS | WITH_COMMAND, *OF_COMMANDS.values()):
        names = [name for names in table.values() for name in names.split()]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("command", OF_COMMANDS)
def test_an_answer_for_one_command_names_what_it_has_and_is_for_what_it_lacks(command):
    had = flags_of(f"dynabench {command}")
    assert {flag for text in OF_COMMANDS[command] for flag in re.findall(r"--[a-z][\w-]+", text)} <= had
    assert {name for names in OF_COMMANDS[command].values() for name in names.split() if f"--{name}" in had} == set()


def test_no_answer_is_for_an_option_that_every_command_with_engines_has():
    had = set.intersection(*(flags_of(f"dynabench {name}") for name in MANY))
    assert {name for name in KNOWN if f"--{name}" in had} == set()


def test_a_program_that_runs_a_model_says_where_options_of_the_engine_go():
    done = dynamo_run("out=vllm", "--speculative-config", "x")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.endswith("Options of the engine itself go after --.\n")


def test_a_switch_may_be_set_as_the_help_prints_its_default(tmp_path):
    flags = ["--enable-prefix-caching=off", "--async-scheduling=on", "--no-noise-floor"]
    done = dynabench("simulate", "--max-requests", "2", "--router-mode", "kv", *flags, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    pool = json.loads((tmp_path / "out" / "experiment.json").read_text())["deployment"]["pools"]["worker"]
    assert (pool["enable_prefix_caching"], pool["async_scheduling"]) == (False, True)
    done = dynabench("simulate", "--enable-prefix-caching=maybe")
    assert done.stderr == "dynabench: --enable-prefix-caching is 'maybe'; expected true or false\n"


def test_an_axis_and_a_deployment_file_take_on_and_off():
    assert read_axis("enable_prefix_caching=on,off", Settings()) == ("enable_prefix_caching", [True, False])
    values = {"pools": {"a": {"enable_prefix_caching": "off", "model": "on"}}}
    assert from_plain(values).pools[0].mocker.enable_prefix_caching is False
    assert from_plain(values).pools[0].timing.model == "on"


def test_help_needs_no_file_of_the_checkout():
    """docs/ is not in the wheel."""
    for command in all_commands():
        settings = (setting for group in command.groups.values() for setting in group)
        assert not [setting.names for setting in settings if "docs/" in setting.help]
        assert "docs/" not in " ".join(map(str, command.paragraphs))


def test_the_help_of_slo_gives_limits_that_are_accepted():
    (setting,) = (s for g in COMMANDS_BY_NAME["dynabench run"].groups.values() for s in g if s.names == ("--slo",))
    each = re.search(r"Limit on (.*) of each request", setting.help)[1]
    limits = [f"{metric} <= 1s" for metric in re.split(r", | or ", each)] + re.findall(r"'([^']*)'", setting.help)
    assert len(limits) == 8
    assert len(ExperimentConfig(slo=tuple(limits)).limits) == 8


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("serve nothere.yaml", "nothere.yaml: cannot be read (No such file or directory)"),
        ("simulate two.yaml", "two.yaml: YAML is not a format of workloads; give a deployment with -f two.yaml"),
        ("simulate --oracle off", "off: there is no such file; a switch takes its value after =, as in --oracle=off"),
        ("doctor me", "me: there is no place for this; options begin with --"),
    ],
)
def test_an_argument_in_the_wrong_place_is_named(words, told):
    done = dynabench(*words.split())
    assert (done.returncode, done.stderr) == (2, f"dynabench: {told}\n")


def test_a_single_arm_has_figures_and_says_how_to_compare_it(tmp_path):
    done = dynabench("simulate", "--router-mode", "kv", "--max-requests", "5", "--out", tmp_path / "out")
    assert done.returncode == 0
    assert "Arms compared" not in done.stdout
    lines = done.stdout.splitlines()
    assert "Figures" in [line.strip() for line in lines]
    assert "n/a: too few requests; a p99 needs 368." in lines
    assert "Only kv was run; to compare it, add another --router-mode or a --vary." in lines


def test_only_simulated_workers_are_said_to_have_gpus():
    workload = Workload("none", 16, [])
    model = WorkerConfig(model_path="m.gguf")
    real = Deployment(pools=(Pool(engine="llamacpp", replicas=2, worker=model),))
    assert head_of(workload, [real], [LoadConfig()])["Layout"] == "2 workers, TP 1"
    assert (
        head_of(workload, [Deployment(pools=(Pool(replicas=2),))], [LoadConfig()])["Layout"]
        == "2 workers, TP 1 (2 GPUs)"
    )
    many = [Deployment(pools=(Pool(engine="llamacpp", replicas=count, worker=model),)) for count in range(1, 6)]
    assert head_of(workload, many, [LoadConfig()])["Layout"] == "1 to 5 workers"
    parts = [(count, 5 - count) for count in range(1, 5)]
    equal = [
        Deployment(
            pools=tuple(
                Pool(name=role, role=role, replicas=n) for role, n in zip(("prefill", "decode"), both, strict=True)
            )
        )
        for both in parts
    ]
    assert head_of(workload, equal, [LoadConfig()])["Layout"] == "5 workers, 5 GPUs"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tp", "use tensor_parallel_size"),
        ("max_beam_width", "beam search is not simulated"),
    ],
)
def test_a_setting_of_another_tool_is_answered_in_axes_and_in_files_too(name, told):
    with pytest.raises(ValueError, match=f"^{name} is not a setting that can be varied; {told}$"):
        read_axis(f"{name}=1,2", Settings())
    with pytest.raises(ValueError, match=f"^pools.worker.{name} is unknown; {told}$"):
        read_axis(f"pools.worker.{name}=1,2", Settings())
    with pytest.raises(ValueError, match=f"^pools.a.{name} is unknown; {told}$"):
        from_plain({"pools": {"a": {name: 1}}})


def test_an_answer_that_names_nothing_of_a_file_is_not_given():
    with pytest.raises(ValueError, match=r"^pools.a.num_workers is unknown; (?!use workers)"):
        from_plain({"pools": {"a": {"num_workers": 1}}})
