"""What the terminal shows at 80 and at 60 columns, of few arms and of many."""

import io

import pytest
from rich.cells import cell_len

from dynabench.terminal import Terminal
from reports.capacity import answer as capacity
from reports.capacity.answer import AtLoad, Ranked, Sureness
from reports.figures import slo
from reports.figures.outcomes import STEADY_QUEUE, Outcome
from reports.summarize import summarize
from reports.sweep import table as sweep_table
from reports.tables import comparison as tables
from reports.tables import use as use_tables
from reports.tables.grid import UNBROKEN
from tests.reports.runs import planned, run
from tests.reports.test_sweep_report import MANIFEST, point

MODES = ["round-robin", "kv", "lmetric+eps(5)", "prodstack-loadaware"]
LIMITS = ["ttft.p99 <= 2000 ms", "itl.p99 <= 60 ms"]
OUTCOMES = [
    Outcome(LIMITS[0], "met", value=1.2345, margin=0.38),
    Outcome(LIMITS[1], "missed", value=0.06019, margin=-0.0031),
]


def lines_of(found, width):
    terminal = Terminal(file=io.StringIO(), width=width)
    for table in found:
        terminal.print(table)
    return terminal.file.getvalue().splitlines()


def check(lines, heads, width):
    """See that nothing is wider than the terminal, nothing is cut, and headings are folded between their words."""
    assert max(map(cell_len, lines)) <= width
    assert "…" not in "\n".join(lines)
    shown = [[cell.strip() for cell in line.strip("┃").split("┃")] for line in lines if line.startswith("┃")]
    words = {word for row in shown for cell in row for word in cell.split()}
    for head in heads:
        assert {word for word in head.split() if len(word) <= UNBROKEN} <= words, head


def arms(count):
    names = [f"{MODES[number % 4]}, max_num_batched_tokens {512 << number // 4}" for number in range(count)]
    runs = [run(name, ttft=[1.0 + number / 10 + n % 7 for n in range(400)]) for number, name in enumerate(names)]
    return summarize(runs, [slo.parse_slo("ttft.p90 <= 2s")])


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("count", [1, 2, 7, 24])
def test_a_comparison_is_readable(count, width):
    summary = arms(count)
    grid = tables.comparison(summary, is_whole=False)
    lines = lines_of(grid.tables(width), width)
    turned = count > 2
    check(lines, [label for label, _ in grid.rows] if turned else grid.columns, width)
    assert len(lines) < 20 + 17 * count
    check(lines_of((table for each in use_tables.grids(summary) for table in each.tables(width)), width), [], width)
    check(lines_of(tables.comparison(summary).tables(width), width), [], width)


@pytest.mark.parametrize("width", [120, 80, 60])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_the_table_of_fleets_is_readable(count, width):
    names = ["planner lead-time", *(f"planner hpa, hpa_target {number}" for number in range(1, count))]
    grid = use_tables.grids(summarize([planned(name) for name in names], [slo.parse_slo("ttft <= 2s")]))[0]
    lines = lines_of(grid.tables(width), width)
    check(lines, [], width)
    assert len(lines) <= 5 * (count + 7)


def test_what_is_limited_comes_first_and_the_rest_is_asked_for():
    (key, *_), whole = tables.comparison(arms(2), is_whole=False).rows, tables.comparison(arms(2)).rows
    assert key[0] == "TTFT p90 (ms)"
    assert {label for label, _ in tables.comparison(arms(2), is_whole=False).rows} < {label for label, _ in whole}


def test_without_colours_nothing_is_coloured(monkeypatch):
    for environment, is_coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        with monkeypatch.context() as patch:
            patch.delenv("NO_COLOR", raising=False)
            patch.setenv("TERM", "xterm")
            for name, value in environment.items():
                patch.setenv(name, value)
            terminal = Terminal(file=io.StringIO(), force_terminal=True)
            terminal.say("not valid", style="red")
            assert ("\x1b[31m" in terminal.file.getvalue()) is is_coloured


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("count", [1, 2, 7, 24])
def test_a_sweep_is_readable(count, width):
    changes = [
        {"router_mode": MODES[n % 4], "workers": n, "max_num_batched_tokens": 512 << n % 3} for n in range(count)
    ]
    points = [point(str(n), 0.1, outcomes=OUTCOMES, **each) for n, each in enumerate(changes)]
    sweep = sweep_table.lay_out(points, MANIFEST | {"limits": LIMITS}, is_complete=True)
    lines = lines_of(sweep_table.tables(sweep, width, is_whole=False), width)
    axes = sweep.columns[: sweep.num_axes]
    check(lines, [*(axis.replace("_", " ") for axis in axes), "limits"], width)
    assert len(lines) < 12 + 3 * count
    whole = lines_of(sweep_table.tables(sweep, width, is_whole=True), width)
    check(whole, [head.replace("_", " ") for head in sweep.columns], width)


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("count", [1, 2, 7, 24])
def test_a_plan_is_readable(count, width):
    layouts = [Ranked(f"TP {n}, chunk {512 << n % 4}, fp8", {}, n, n, 2.5 * n, outcomes=OUTCOMES) for n in range(count)]
    loads = [AtLoad(load, "TP 4, chunk 512, fp8", 8, 2, OUTCOMES) for load in (1, 1.25, 1.5, 2)]
    answer = capacity.PlanAnswer(
        "", "", "", True, "", LIMITS, layouts, loads, [], [], [], [], simulated=0, wall_s=0.0
    )  # fmt: skip
    for grid in capacity.grids(answer):
        check(lines_of(grid.tables(width), width), [], width)


PROSE = "Model error: " + ", ".join(["in 9 of 10 cases, the real mean is 0.78 to 1.39 times the simulated"] * 5)


def shown(call, *, width, is_terminal):
    """Return the lines of what a call prints, in a pipe or on a terminal."""
    terminal = Terminal(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None)
    call(terminal)
    return terminal.file.getvalue().splitlines()


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("width", [80, 60, 20])
def test_prose_is_wrapped_between_words_on_a_terminal_and_in_a_pipe(width, is_terminal):
    lines = shown(lambda terminal: terminal.say(PROSE), width=width, is_terminal=is_terminal)
    assert max(map(len, lines)) <= width
    assert " ".join(lines) == PROSE


@pytest.mark.parametrize("is_terminal", [False, True])
def test_lines_after_the_first_are_indented_and_a_path_is_never_broken(is_terminal):
    path = "/results/" + 30 * "x"
    lines = shown(lambda terminal: terminal.say(f"\n{path} is new", indent="    "), width=20, is_terminal=is_terminal)
    assert lines == ["", path, "    is new"]


def test_a_finding_is_a_line_in_a_pipe_and_wrapped_on_a_terminal():
    assert shown(lambda terminal: terminal.item(PROSE), width=60, is_terminal=False) == [PROSE]
    lines = shown(lambda terminal: terminal.entry("model", PROSE), width=60, is_terminal=True)
    assert max(map(len, lines)) <= 60
    assert {line[:21] for line in lines[1:]} == {" " * 21}


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_is_copied_stays_a_line(is_terminal):
    assert shown(lambda terminal: terminal.verbatim(PROSE), width=20, is_terminal=is_terminal) == [PROSE]


def test_the_table_of_layouts_explains_the_limit_that_nobody_set():
    """A queue that grows misses a limit that every run has."""
    layout = Ranked("TP 1", {}, at_least=2, tried=1, outcomes=[Outcome(STEADY_QUEUE, "missed", reason="grew")])
    answer = capacity.PlanAnswer("", "t", "s", True, "v", LIMITS, [layout], [], [], [], [], [], 0, 1.0)
    (grid, *_) = capacity.grids(answer)
    assert f"{STEADY_QUEUE}: missed" in grid.rows[0][1]
    assert "steady queue: requests arrived faster than they were answered" in grid.note
    assert "waited; allow more GPUs (--max-gpus), or use a lower rate (--rate-scale)." in grid.note


CERTAIN = Sureness(LIMITS[0], 1.2, 1.1, 1.3, 0.03, chance=0.97)


@pytest.mark.parametrize(
    ("sureness", "said"),
    [
        ([CERTAIN], "For a real engine, the chance of each limit is 97% or more."),
        (
            [CERTAIN, Sureness(LIMITS[1], 0.05, 0.04, 0.06, 0.1, chance=0.86, is_within_error=True)],
            "Not certain: for a real engine, the chance of itl.p99 <= 60 ms is 86%.",
        ),
        ([Sureness(LIMITS[0], 1.2, None, None, None)], "Not certain: there is no interval for ttft.p99 <= 2000 ms."),
        ([], "How sure that is was not examined."),
    ],
)
def test_a_plan_in_short_says_what_and_how_sure(sureness, said):
    layout = Ranked("TP 2", {}, gpus=4, workers=2)
    answer = capacity.PlanAnswer("", "t", "s", True, "v", LIMITS, [layout], [], [], [], sureness, [], 0, 1.0)
    assert capacity.in_short(answer) == f"4 GPUs (TP 2; workers: 2) meet every limit. {said}"


@pytest.mark.parametrize("sureness", [[], [CERTAIN]])
def test_a_plan_in_short_says_first_what_its_workload_is_too_short_for(sureness):
    layout = Ranked("TP 2", {}, gpus=4, workers=2)
    answer = capacity.PlanAnswer(
        "",
        "t",
        "s",
        True,
        "v",
        LIMITS,
        [layout],
        [],
        [],
        [],
        sureness,
        [],
        0,
        1.0,
        too_little=["the load was never steady"],
    )
    assert capacity.in_short(answer).endswith(" meet every limit. Not certain: the load was never steady.")


def test_nothing_is_said_in_short_where_no_layout_meets_the_limits():
    answer = capacity.PlanAnswer("", "t", "s", True, "v", LIMITS, [Ranked("TP 2", {})], [], [], [], [], [], 0, 1.0)
    assert capacity.in_short(answer) == ""
