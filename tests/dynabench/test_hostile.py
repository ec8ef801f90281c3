"""What others write (servers, file and arm names) is shown as it is, and mass failure is never taken for a result."""

import csv
import html.parser
import io
import json
import re
from dataclasses import replace
from itertools import count
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from dynabench.experiment.arms import arm_name
from dynabench.terminal import Terminal
from foundation.text import one_line, printable
from reports import folder
from reports.foreign import csv_cell, markdown_cell, script_json
from reports.record.records import Record, Requests
from reports.summarize import summarize
from reports.tables import comparison as tables
from tests.support.commands import dynabench
from tests.support.strange_server import answers, strange_server

BAD = '[/b] [red]=HYPERLINK("x") \x1b]0;owned\x07 :smile: </script><script>alert(1)</script><!--'
TRACE = ["--max-requests", "40", "--rate-scale", "200"]


def refusing(*, every, text="no"):
    """Make the behaviour of a server that refuses one request of so many."""
    number = count()

    async def answer(reader, writer):
        if next(number) % every:
            await answers(reader, writer)
            return
        body = json.dumps({"error": {"message": text}}).encode()
        writer.write(b"HTTP/1.1 503 No\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()

    return answer


def test_mass_failure_is_no_valid_run_and_says_so_first(tmp_path):
    out = tmp_path / "x"
    with strange_server(refusing(every=10)) as url:
        done = dynabench("run", "--url", url, *TRACE, "--out", out)
        accepted = dynabench("run", "--url", url, *TRACE, "--max-failed-share", "0.2", "--out", tmp_path / "y")
    assert (done.returncode, done.stderr) == (1, "")
    first = " ".join(done.stdout.split())
    assert "4 of 40 requests failed (10.0%, more than --max-failed-share 0.01), most" in first
    assert first.startswith("not valid: endpoint: ")
    summary = json.loads((out / "summary.json").read_text())
    assert summary["is_valid"] is False
    assert summary["verdict"].startswith("This run is not valid")
    page = (out / "report.html").read_text()
    assert page.index("Not valid: endpoint") < page.index("This run is not valid")
    is_late = "the client was late" in accepted.stdout  # on a busy machine
    assert accepted.returncode == is_late, accepted.stdout
    assert "failures infinite" in accepted.stdout

    beside = dynabench("compare", out, tmp_path / "y")
    assert beside.returncode == 1
    assert beside.stdout.startswith("not valid: x/endpoint: ")
    assert "**Not valid**: x/endpoint" in dynabench("compare", out, tmp_path / "y", "--markdown").stdout


def test_what_a_server_says_reaches_the_terminal_as_text(tmp_path):
    with strange_server(refusing(every=2, text=BAD)) as url:
        done = dynabench("run", "--url", url, *TRACE, "--out", tmp_path / "x")
    assert (done.returncode, done.stderr) == (1, "")
    said = "".join(done.stdout.split())
    assert "[/b][red]=HYPERLINK" in said
    assert "\x1b" not in done.stdout
    assert ":smile:" in said


def result(arm, *, errors=0, requests=100):
    rng = np.random.default_rng(0)
    start = np.arange(requests) * 0.01
    error = np.array(["HTTP 503: no"] * errors + [""] * (requests - errors), dtype=object)
    made = Requests.of(
        worker=np.zeros(requests),
        intended_s=start,
        sent_s=start,
        first_byte_s=start + 0.01,
        first_token_s=start + 0.01 + rng.random(requests) / 100,
        last_token_s=start + 0.05,
        done_s=start + 0.05,
        isl=np.full(requests, 100),
        osl=np.full(requests, 5),
        first_chunk_tokens=np.ones(requests),
        cached_tokens=np.zeros(requests),
        predicted_tokens=np.zeros(requests),
        best_tokens=np.zeros(requests),
        endless_tokens=np.zeros(requests),
        queue_depth=np.zeros(requests),
        preemptions=np.zeros(requests),
        error=error,
    )
    return Record(arm, made, np.array([[0.01, 0, 0, 1, 4]] * requests), 1.0, 1)


@pytest.mark.parametrize(
    ("errors", "shown"), [(0, None), (1, "60.0"), (9, "60.0"), (11, "infinite"), (100, "infinite")]
)
def test_the_percentile_with_failures_is_there_whenever_a_request_failed(errors, shown):
    run = result("a", errors=errors)
    run = replace(run, requests=run.requests.replace(last_token_s=run.requests.intended_s + 0.06))
    rows = dict(tables.rows(summarize([run])))
    cells = rows.get("E2E p90, failures infinite (ms)")
    assert cells == ([shown.replace("60.0", "60.00")] if shown else None)


def test_lengths_that_missed_the_plan_are_remarked_upon_and_spoil_nothing():
    run = result("a")
    planned = run.requests.replace(planned_isl=np.full(100, 60), planned_osl=np.full(100, 5))
    run = replace(run, requests=planned, facts={"without_usage": 3.0})
    summary = summarize([run])
    assert summary.arms["a"].remarks == [
        "100 of 100 prompts are off the workload's length by more than 5%: they have 100 tokens on average instead of 60",
        "3 answers had no usage: each event with text counts as one token, and their prompts are assumed to have the workload's lengths",
    ]
    assert summary.is_valid


class Elements(html.parser.HTMLParser):
    """Finds scripts, and elements that call something."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        if tag == "script" or any(name.startswith("on") for name, _ in attributes):
            self.found.append(tag)


MANIFEST = {
    "schema": folder.SCHEMA, "title": BAD, "subtitle": BAD, "command": BAD, "limits": [], "runs": [],
    "workload": {"name": "w", "requests": 100},
}  # fmt: skip


@pytest.mark.parametrize("name", [BAD, "=cmd|' /C calc'!A0", "$x$ \\frac{", "<svg onload=alert(3)>", "名前"])
def test_a_report_shows_any_name_as_text(tmp_path, name, recwarn):
    arms = [printable(name), f"{printable(name)} 2"]
    folder.write(tmp_path / "x", MANIFEST, [result(arm) for arm in arms])
    page = (tmp_path / "x" / "report.html").read_text()
    elements = Elements()
    elements.feed(page)
    assert elements.found == ["script", "script"]
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert "<" not in data
    assert json.loads(data)["percentiles"]["panels"][0]["series"]
    assert printable(name)[:3] in html.unescape(page)
    for picture in (tmp_path / "x" / "charts").glob("*.svg"):
        ElementTree.parse(picture)
    assert [str(warning.message) for warning in recwarn] == []


def test_the_terminal_takes_nothing_for_markup_and_obeys_nobody():
    terminal = Terminal(file=io.StringIO(), width=400)
    summary = summarize([result(BAD), result(f"{BAD} 2")])
    for table in tables.comparison(summary).tables(terminal.width):
        terminal.print(table)
    terminal.print(BAD)
    shown = terminal.file.getvalue()
    assert shown.count("[/b] [red]=HYPERLINK") >= 3
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_names_become_cells_numbers_and_scripts_safely():
    assert [csv_cell(value) for value in ("=1+2", "+cmd", "-x", "@a", "-", "-1.5", "+5", "kv", -3)] == [
        "'=1+2", "'+cmd", "'-x", "'@a", "-", "-1.5", "+5", "kv", -3,
    ]  # fmt: skip
    assert script_json({"a": "</script><!--"}) == '{"a":"\\u003c/script>\\u003c!--"}'
    assert markdown_cell("a|b\n<i>[x](y) `c`") == "a\\|b \\<i>\\[x](y) \\`c\\`"
    assert printable("a\x1b[31m\u202eb\nc\udcff") == "a\\x1b[31m\\u202eb\nc\\udcff"
    assert one_line(b"a\r\n b\xff" + b"x" * 1000, 10) == "a b\ufffdxxxxxx..."
    assert arm_name({"model": "a\x1bb"}) == "model a\\x1bb"


def test_tables_for_spreadsheets_hold_no_formulas(tmp_path):
    run = result("=cmd|' /C calc'!A0", errors=1)
    folder.write(tmp_path / "=x", MANIFEST | {"runs": [folder.run_facts(run)]}, [run])
    assert dynabench("export", "=x", "out.csv", cwd=tmp_path).returncode == 0
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert {row["arm"] for row in rows} == {"'=cmd|' /C calc'!A0"}
    assert pd.read_csv(tmp_path / "out.csv")["first_token_s"].dtype == float
