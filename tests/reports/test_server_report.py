"""What a server says of itself, in a report: made of runs small enough to check by hand."""

import msgspec
import pytest
from msgspec.structs import replace

from reports import folder
from reports.figures.server import server_figures
from reports.record.pools import GpuUse
from reports.record.server import Bracket, ClientSide, ServerSample, ServerTimes, ServerUse, added
from reports.summarize import summarize
from reports.tables.server import server_grid
from tests.reports.runs import run
from tests.reports.test_results_folder import MANIFEST

TTFT = ServerTimes(10, 2.5, (0.1, 0.3, 1.0), (0, 8, 1, 1))
QUEUE = ServerTimes(10, 1.0, (0.3,), (10, 0))
USE = ServerUse(
    software=("vLLM",),
    length_s=4.0,
    samples=(ServerSample(0.0, 2, 0, 0.1), ServerSample(1.0, 6, 2, 0.3), ServerSample(2.0, None, None, None)),
    client=ClientSide(10, 0, 0.3, 0.02, 1.0),
    requests=10,
    preemptions=1,
    output_tokens=80,
    looked_up_tokens=1000,
    hit_tokens=250,
    times={"ttft": TTFT, "queue": QUEUE},
    gpus=(GpuUse("0", 500.0, 0.8, 1e9, 4e9), GpuUse("1", 300.0)),
)


def figures(**changes):
    return server_figures([run(server=replace(USE, **changes))])


def test_a_quantile_is_interpolated_in_its_bucket_whose_bounds_are_said():
    assert TTFT.quantile(0.5) == Bracket(pytest.approx(0.225), 0.1, 0.3)
    assert TTFT.quantile(0.8) == Bracket(pytest.approx(0.3), 0.1, 0.3)
    assert TTFT.quantile(0.85) == Bracket(pytest.approx(0.65), 0.3, 1.0)
    assert TTFT.quantile(0.99) == Bracket(None, 1.0, None)
    assert QUEUE.quantile(0.5) == Bracket(pytest.approx(0.15), 0.0, 0.3)
    assert ServerTimes(0, 0.0, (0.1,), (0, 0)).quantile(0.5) is None
    assert ServerTimes(10, 1.0).quantile(0.5) is None
    assert (TTFT.mean_s, ServerTimes(0, 0.0).mean_s) == (0.25, None)


def test_histograms_with_different_bounds_keep_those_that_both_have():
    both = added([TTFT, ServerTimes(4, 1.0, (0.1, 0.2, 1.0), (1, 1, 2, 0))])
    assert both == ServerTimes(14, 3.5, (0.1, 1.0), (1, 12, 1))
    assert added([TTFT, ServerTimes(4, 1.0)]) == ServerTimes(14, 3.5)


def test_the_difference_is_explained_if_both_sides_are_of_the_same_requests():
    assert figures().explained == (
        "The client's mean TTFT of 300.0 ms is 250.0 ms by the server's own clock, 40% of it in its queue, and 50.00 ms outside of "
        "it: network, HTTP, what the server does before its clock starts, and the client."
    )
    assert figures(client=ClientSide(9, 1, 0.3)).same_requests  # the one that failed may have had a first token
    assert "in its queue" not in figures(times={"ttft": TTFT}).explained
    assert "is less than the 250.0 ms by the server's own clock" in figures(client=ClientSide(10, 0, 0.2)).explained


@pytest.mark.parametrize(
    ("answered", "why"),
    [
        (8, "The server counted 10 requests and the client 8 answers: others used it at the same time"),
        (12, "The server counted 10 requests and the client 12 answers: others of its processes or replicas"),
    ],
)
def test_other_requests_are_not_compared(answered, why):
    found = figures(client=ClientSide(answered, 0, 0.3))
    assert found.same_requests is False
    assert found.explained.startswith(why)
    assert "of it in its queue" not in found.explained


def test_what_is_not_counted_is_not_compared():
    found = figures(times={}, requests=None)
    assert (found.same_requests, found.explained) == (None, "")


def test_repeats_are_added_up():
    second = replace(USE, client=ClientSide(30, 0, 0.7), requests=30, times={"ttft": ServerTimes(30, 10.5)})
    found = server_figures([run(server=USE), run(server=second, repeat=1)])
    assert (found.requests, found.client.answered, found.counted) == (40, 40, 40)
    assert found.client.ttft_s == pytest.approx(0.6)
    assert found.times["ttft"].mean_s == pytest.approx(0.325)
    assert "queue" not in found.times  # known of one repeat only
    assert found.gpus[0].power_w == 500


def said(runs):
    """Return what the server of each arm says of itself."""
    return {name: arm.server or None for name, arm in summarize(runs).arms.items()}


def test_the_table_has_the_client_s_figures_beside_the_server_s():
    grid = server_grid(said([run("a", server=USE), run("b")]))
    rows = dict(grid.rows)
    assert rows["TTFT mean, client (ms)"] == ["300.0", "n/a"]
    assert rows["TTFT mean, server (ms)"] == ["250.0", "n/a"]
    assert rows["TTFT p50, server (ms)"] == ["225.0 [100.0, 300.0]", "n/a"]
    assert rows["time in the queue p50, server (ms)"] == ["below 300.0", "n/a"]
    assert rows["requests running"] == ["4.0 / 6", "n/a"]
    assert rows["KV in use"] == ["20.0% / 30.0%", "n/a"]
    assert rows["prefix cache hits"] == ["25.0%", "n/a"]
    assert rows["GPU 0"] == ["500 W, 80% busy, 1.0 GB of 4.0", "n/a"]
    assert rows["GPU 1"] == ["300 W", "n/a"]
    assert rows["all GPUs (W)"] == ["800", "n/a"]
    assert "of vLLM" in grid.note
    assert server_grid(said([run("a")])) is None
    brief = server_grid(said([run("a", server=USE)]), is_whole=False)
    assert len(brief.rows) < len(grid.rows)


def test_a_problem_is_a_remark_and_no_table():
    use = ServerUse(problems=("no metrics of the server: http://h/metrics: it answers with status 404",))
    summary = summarize([run("a", server=use)])
    assert use.problems[0] in summary.arms["a"].remarks
    assert server_grid(said([run("a", server=use)])) is None


def test_a_folder_keeps_what_the_server_said(tmp_path):
    runs = [run("a", ttft=(1.0, 2.0, 3.0), server=USE), run("b", ttft=(1.0, 2.0, 3.0))]
    folder.write(tmp_path / "out", MANIFEST | {"runs": folder.facts_of(runs)}, runs)
    _, again = folder.read(tmp_path / "out")
    assert [each.server for each in again] == [USE, None]
    summary = msgspec.json.decode((tmp_path / "out" / "summary.json").read_bytes())
    said = summary["arms"]["a"]["server"]
    assert said["times"]["ttft"] == {
        "count": 10,
        "mean_s": 0.25,
        "p50": {"value": pytest.approx(0.225), "low": 0.1, "high": 0.3},
        "p90": None,
        "p99": None,
    }
    assert said["states"]["running"] == {"mean": 4, "highest": 6}
    assert said["gpus"][0]["power_w"] == 500
    assert "server" not in summary["arms"]["b"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "What does the server say of itself?" in page
    assert "What does the server say of its load?" in page
