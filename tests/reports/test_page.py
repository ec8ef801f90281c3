"""The report as a browser shows it: three widths, light, dark, on paper, with JavaScript and without."""

import io
import itertools
import json
import re
import shutil
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from matplotlib import image as mpl_image
from msgspec import structs

from dynabench.arm import Settings, runs_of
from dynabench.deployment.description import Deployment, Pool
from dynabench.experiment.arms import comparison_of
from dynabench.experiment.manifest import manifest_of
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.source import load_workload
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from reports import folder
from reports.capacity import report as plan_report
from reports.capacity.answer import Alternative, AtLoad, PlanAnswer, Ranked, Sureness
from reports.figures import slo
from reports.figures.metrics import Goodput
from reports.figures.outcomes import Outcome
from reports.figures.tiers import Hits, Spent
from reports.record.fleet import FleetUse, Oracle
from reports.summarize import summarize
from reports.sweep import report as sweep_report
from reports.sweep.points import SearchResult
from tests.reports.runs import GROWN, HOST, planned, run
from tests.reports.test_results_folder import FIDELITY
from tests.reports.test_results_folder import MANIFEST as SMALL
from tests.reports.test_sweep_report import MANIFEST, point
from workloads.shape import ShapeConfig

MODES = ("round-robin", "kv", "least-loaded", "random", "p2c", "session", "marginal-all")
LLAMA = TimingConfig(model="meta-llama/Llama-3.1-70B", gpu="h100", tensor_parallel_size=4, quantization="fp8")
LIMITS = ["ttft.p99 <= 2000 ms", "itl.p99 <= 60 ms"]
MET, MISSED = Outcome(LIMITS[0], "met", 1.2345, 0.38), Outcome(LIMITS[1], "missed", 0.06019, -0.0031)


FOUR = (Pool(replicas=4),)


def compare(out, *modes, pools=FOUR, limits=(), vary=()):
    """Simulate a few requests and write their results folder."""
    workload = load_workload((), None, ShapeConfig(max_requests=240), 0)
    experiment = ExperimentConfig(router_mode=modes, slo=tuple(limits), vary=vary)
    settings = Settings(Deployment(pools=pools))
    arms = comparison_of(experiment, settings).arms
    runs = [simulate(plan, workload) for plan in runs_of(arms, 1, 0)]
    folder.write(out, manifest_of("virtual", (), workload, experiment, settings, arms, runs), runs)


def one(out):
    compare(out, "kv", pools=(Pool(replicas=2, timing=LLAMA),), limits=LIMITS)


def three(out):
    compare(out, *MODES[:3], pools=(Pool(replicas=3, timing=LLAMA),), limits=LIMITS)


def seven(out):
    compare(out, *MODES)


def apart(out):
    pools = (Pool(name="prefill", role="prefill", replicas=2), Pool(name="decode", role="decode", replicas=2))
    compare(out, "round-robin", "kv", pools=pools)


SMALL_GPU = Pool(replicas=2, mocker=EngineConfig(num_gpu_blocks=150, block_size=128))


def tiers(out):
    compare(out, "kv", "random", pools=(SMALL_GPU,), vary=("kv_offloading_size=0,4,16",))


def tier_sweep(out):
    """Two modes by the size of host memory, two repeats of each; one is too slow with the smallest."""
    out.mkdir()
    points = []
    for mode, size in itertools.product(MODES[:2], (0, 16, 64)):
        hits = Hits(0.3, size / 200 if size else None, None, None, 0.7 - size / 200)
        one = point(
            f"{mode}, size {size}", 0.2 - size / 1000, is_stable=size > 0, router_mode=mode, kv_offloading_size=size
        )
        spent = [Spent(60, 6000, True, 0.2 - size / 1000 + n / 100, 90.0 - size / 10 - n * size / 20) for n in (0, 1)]
        uses = [structs.replace(HOST, capacity_bytes=float(size << 31))] if size else []
        points.append(structs.replace(one, hits=hits, tiers=uses, gpu_s=90.0 - size / 8, spent=spent))
    sweep_report.write(out, MANIFEST, points, points, is_complete=True)


def fleets(out):
    """Planners of two pools beside workers that stand still, with the oracle of each."""
    known = GROWN.pools[0]
    pools = (known, structs.replace(known, pool="a-pool-with-a-long-name", role="decode", died_s=(25.0, 40.0)))
    oracle = Oracle(10.0, {pool.pool: (1, 2, 3, 2) * 2 for pool in pools}, (1.0, 0.9) * 4)
    still = tuple(structs.replace(pool, history=pool.history[:1], died_s=(), died=0.0) for pool in pools)
    made = [
        planned(f"planner {name}", fleet=structs.replace(GROWN, pools=pools, oracle=oracle, planner=name))
        for name in ("hpa", "kpa", "wva", "lead-time", "dynamo-sla-2025")
    ]
    made.insert(0, planned("planner static", fleet=FleetUse(still, 100.0, oracle=oracle)))
    folder.write(out, SMALL | {"limits": ["ttft <= 2 s"], "runs": folder.facts_of(made)}, made)


def planners(out):
    """A sweep over two planners and the number of workers at the start."""
    out.mkdir()
    points = []
    for planner, n in itertools.product(("static", "lead-time"), (2, 4, 8)):
        outcome = Outcome("ttft <= 2000 ms in 99%", "met" if n > 2 else "missed", 0.9 + n / 100, n / 100, is_share=True)
        (one,) = summarize([planned(fleet=structs.replace(GROWN, planner=planner))]).arms.values()
        made = point(f"planner {planner}, workers {n}", 1 / n, outcomes=[outcome], planner=planner, workers=n)
        goodput = Goodput(90.0, 100.0, 0.9 + n / 100 - 0.05 * (planner == "static"), 1.0)
        points.append(structs.replace(made, goodput=goodput, fleet=structs.replace(one.fleet, gpu_h=n / 3)))
    sweep_report.write(out, MANIFEST | {"limits": ["ttft <= 2000 ms"]}, points, points, is_complete=True)


def failures(out):
    """A live run that lost requests, beside one whose client was late."""
    errors = ["503 from the frontend"] * 20 + [""] * 180
    made = [
        run("round-robin", ttft=[1.0] * 200, is_live=True, error=errors, notes=("20 of 200 requests failed (10.0%)",)),
        run("kv", ttft=[0.5] * 200, is_live=True, error=["reset"] * 1 + [""] * 199, facts={"cpu_share": 0.25}),
    ]
    folder.write(out, SMALL | {"runs": [folder.run_facts(each) for each in made]}, made)


def validation(out):
    made = run("kv", ttft=[0.5] * 200, is_live=True)
    folder.write(out, SMALL | {"runs": [folder.run_facts(made)], "fidelity": FIDELITY}, [made])


def sweep(out):
    """Two modes and two chunks by workers of four GPUs each; limits that some meet."""
    out.mkdir()
    points = []
    for mode, chunk, n in itertools.product(MODES[:2], (512, 8192), range(1, 7)):
        ttft, itl = 4.8 / n, chunk / n / 50_000
        outcomes = [Outcome(LIMITS[0], "met" if n > 2 else "missed", ttft, 1 - ttft / 2)]
        outcomes.append(Outcome(LIMITS[1], "met" if itl <= 0.06 else "missed", itl, 1 - itl / 0.06))
        changes = {"router_mode": mode, "max_num_batched_tokens": chunk, "workers": n}
        one = point(f"{mode}, chunk {chunk}, workers {n}", ttft / 4, outcomes=outcomes, **changes)
        points.append(structs.replace(one, workers=n, gpus=4 * n))
    sweep_report.write(out, MANIFEST | {"limits": LIMITS}, points, points, is_complete=True)


def search(out):
    """Four modes, each as far as it meets the limits."""
    out.mkdir()
    rows = []
    for number, mode in enumerate(MODES[:4]):
        tried = [
            point(mode, 0.1 * load, outcomes=[outcome, MET], router_mode=mode, rate_scale=load)
            for load, outcome in ((2.0 + number / 10, MET), (2.1 + number / 10, MISSED))
        ]
        met_at, missed_at = (one.changes["rate_scale"] for one in tried)
        rows.append(
            SearchResult(mode, {"router_mode": mode}, "rate_scale", "highest", met_at, missed_at, False, *tried)
        )
    manifest = MANIFEST | {"limits": LIMITS, "sweep": {"find": "rate_scale"}}
    points = [one for row in rows for one in (row.point, row.missed)]
    sweep_report.write(out, manifest, rows, points, is_complete=True)


def plan(out):
    out.mkdir()
    layouts = [Ranked(f"TP {n}, chunk {512 << n % 4}, fp8", {}, n, n, 2.5 * n, outcomes=[MET, MISSED]) for n in (4, 8)]
    answer = PlanAnswer(
        "", "a plan", "s", True, "8 GPUs (workers 2, TP 4)", LIMITS, [*layouts, Ranked("TP 1", {}, impossible="too large")],
        [AtLoad(load, "TP 4, chunk 512, fp8", 8, 2, [MET, MISSED]) for load in (1, 1.25, 1.5, 2)],
        [Alternative(mode, 2, 8, [MET, MISSED], 0.2, "missed") for mode in MODES[:2]], [],
        [Sureness(LIMITS[0], 1.2345, 1.0, 1.5, 0.026), Sureness(LIMITS[1], 0.06019, None, None, None)],
        ["vllm serve x"], simulated=3, wall_s=1.0,
    )  # fmt: skip
    tried = [
        structs.replace(point("", 1.2 / n, outcomes=[MET, MISSED], workers=n), workers=n, gpus=4 * n) for n in (1, 2, 3)
    ]
    plan_report.write(out, answer, {layouts[0].name: tried, layouts[1].name: tried[1:]}, [*map(slo.parse_slo, LIMITS)])


PAGES = {
    make.__name__: make
    for make in (
        one,
        three,
        seven,
        sweep,
        search,
        plan,
        apart,
        tiers,
        tier_sweep,
        fleets,
        planners,
        failures,
        validation,
    )
}


@pytest.fixture(scope="module")
def page_of(tmp_path_factory):
    """Return the path of a report by its name; each is made once."""
    made = {}

    def path_of(name):
        if name not in made:
            out = tmp_path_factory.mktemp("page") / name
            PAGES[name](out)
            made[name] = out
        return made[name] / "report.html"

    return path_of


@pytest.fixture(scope="module")
def browser():
    """Run Chromium; where there is none, these tests are skipped by name."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    missing = "no chromium (apt-get install chromium)" if program is None else ""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing = "no playwright (pip install -e '.[test]')"
    if missing:
        pytest.skip(missing)
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser, page_of):
    """Return a function that opens a report; nothing may be said on its console."""
    said = []

    @contextmanager
    def open_page(name, width=1280, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, offline=True, **options)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(page_of(name).as_uri())
        yield page
        context.close()

    yield open_page
    assert said == []


WIDER = """() => [...document.querySelectorAll("body *")].filter((one) => {
    const box = one.getBoundingClientRect();
    return box.width && !one.closest(".unseen, .picture") && (box.right > innerWidth + 1 || box.left < -1);
}).map((one) => `${one.tagName} ${one.className.baseVal ?? one.className}: ${one.textContent.slice(0, 40)}`).slice(0, 5)"""
"""What reaches beyond the window."""

OVERLAPPING = """() => [...document.querySelectorAll("figure")].flatMap((figure) => {
    const texts = [...figure.querySelectorAll("svg text")].filter((one) => one.textContent.trim() && one.getBoundingClientRect().width);
    const boxes = texts.map((one) => one.getBoundingClientRect()), found = [];
    boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b, j) => {
        const x = Math.min(a.right, b.right) - Math.max(a.left, b.left), y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        // A box has room for accents and descenders that most labels do not use.
        if (x > 1 && y > .3 * Math.min(a.height, b.height, a.width, b.width)) found.push(`${figure.id}: ${texts[i].textContent} / ${texts[i + j + 1].textContent}`);
    }));
    return found;
})"""
"""Labels of charts that lie on each other."""

CUT = """() => [...document.querySelectorAll("figure svg")].flatMap((svg) => {
    const frame = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].filter((one) => {
        const box = one.getBoundingClientRect();
        return box.width && (box.left < frame.left - 2 || box.right > frame.right + 2 || box.top < frame.top - 2 || box.bottom > frame.bottom + 2);
    }).map((one) => `${svg.closest("figure").id}: ${one.textContent}`);
})"""
"""Labels of charts that reach beyond their picture."""


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wider_than_the_window_and_no_label_lies_on_another(opened, name):
    for width in (1920, 1280, 390):
        with opened(name, width) as page:
            assert page.evaluate(WIDER) == [], width
            if width == 1280:
                assert page.evaluate(OVERLAPPING) == []
                assert page.evaluate(CUT) == []


@pytest.mark.parametrize("name", PAGES)
def test_the_answer_is_in_the_first_screen(opened, name):
    with opened(name) as page:
        box = page.locator(".verdict").bounding_box()
        assert box["y"] + box["height"] < 600


@pytest.mark.parametrize("name", ["three", "plan", "fleets"])
def test_without_javascript_nothing_but_hover_and_switches_is_missing(opened, name):
    with opened(name) as page:
        shown = page.locator("main").inner_text().split()
    with opened(name, java_script_enabled=False) as page:
        plain = page.locator("main").inner_text().split()
        assert page.locator("input:visible, button:visible").count() == 0
    only = "light / dark Point at a chart to see its values, or select it with Tab and use the arrow keys."
    assert not Counter(shown) - Counter(plain) - Counter(only.split())


def test_the_key_shows_and_hides_an_arm_in_charts_and_tables(opened):
    with opened("three") as page:
        arm = page.locator(".arm-1")
        shown = arm.evaluate_all("(all) => all.filter((one) => one.getClientRects().length).map((one) => one.tagName)")
        assert {"rect", "TD", "TH"} <= set(shown)
        page.get_by_role("checkbox", name="kv").uncheck()
        assert arm.evaluate_all("(all) => all.filter((one) => one.getClientRects().length).length") == 0
        assert page.locator("td.arm-0:visible").count()
        page.get_by_role("checkbox", name="kv").check()
        again = arm.evaluate_all("(all) => all.filter((one) => one.getClientRects().length).map((one) => one.tagName)")
        assert again == shown


def test_the_reasons_of_planners_unfold_without_javascript_and_fit_a_phone(opened):
    with opened("fleets", 390, java_script_enabled=False) as page:
        reason = page.get_by_text("queue is 7, its target 3").first
        assert not reason.is_visible()
        page.get_by_text("What planners changed, and why").click()
        box = reason.bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= 390


def test_the_key_stays_in_sight(opened):
    with opened("seven") as page:
        page.locator("figure").last.scroll_into_view_if_needed()
        assert page.locator(".key").bounding_box()["y"] == pytest.approx(0, abs=1)
        names = page.locator(".key label").all_inner_texts()
        assert names == list(MODES)
        titles = page.locator(".key label").evaluate_all("(all) => all.map((one) => one.title)")
        assert titles == list(MODES)


def test_the_pointer_and_the_arrow_keys_show_the_values_of_a_chart(opened):
    with opened("three") as page:
        picture = page.locator("figure .picture").nth(1)
        picture.scroll_into_view_if_needed()
        box = picture.bounding_box()
        for share in (0.2, 0.4, 0.6, 0.8):
            page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] / 2)
            if page.locator(".tip").count():
                break
        assert any(mode in page.locator(".tip").inner_text() for mode in MODES[:3])
        page.mouse.move(0, 0)
        assert page.locator(".tip").count() == 0
        picture.focus()
        page.keyboard.press("ArrowRight")
        assert page.locator(".tip").inner_text()
        page.keyboard.press("Escape")
        assert page.locator(".tip").count() == 0


def test_the_pointer_on_a_map_shows_what_a_worker_did_then(opened):
    with opened("three") as page:
        chart = json.loads(page.locator("#data").text_content())["worker_work"]
        left, top, right, bottom = chart["panels"][0]["box"]
        workers = chart["panels"][0]["series"]
        assert [worker["label"] for worker in workers] == ["worker 0", "worker 1", "worker 2"]
        picture = page.locator("#worker_work .picture")
        picture.scroll_into_view_if_needed()
        box, width = (
            picture.bounding_box(),
            page.locator("#worker_work svg").evaluate("(svg) => svg.viewBox.baseVal.width"),
        )
        scale = box["width"] / width
        for place, worker in enumerate(workers):
            at = (left + right) / 2, bottom - (place + 0.5) / len(workers) * (bottom - top)
            page.mouse.move(box["x"] + at[0] * scale, box["y"] + at[1] * scale)
            said = page.locator("#worker_work .tip").inner_text()
            assert said.startswith(f"{worker['label']}: ")
            seen = float(said.rpartition(", ")[2].removesuffix(" tokens/s").replace(",", ""))
            assert any(seen == pytest.approx(value, abs=0.5) for value in worker["y"][28:32])


def test_a_wide_chart_on_a_phone_has_a_shadow_where_there_is_more_of_it(opened):
    def is_shaded(picture, side):
        """Tell whether the paper at an edge is darker than paper is."""
        pixels = mpl_image.imread(io.BytesIO(picture.screenshot()))[2:-2, :, :3]
        return bool((pixels[:, {"left": 1, "right": -3}[side]] < 1).all())

    with opened("seven", 390) as page:
        picture = page.locator("figure.wide .picture").first
        assert not is_shaded(picture, "left")
        assert is_shaded(picture, "right")
        picture.evaluate("(one) => { one.scrollLeft = one.scrollWidth; }")
        assert is_shaded(picture, "left")
        assert not is_shaded(picture, "right")
    with opened("seven", 1280) as page:
        picture = page.locator("figure.wide .picture").first
        assert not is_shaded(picture, "left")
        assert not is_shaded(picture, "right")


PAPER = "() => getComputedStyle(document.body).backgroundColor"


def test_the_page_is_dark_where_the_system_is_and_by_its_button_and_light_on_paper(opened):
    with opened("one", color_scheme="dark") as page:
        dark = page.evaluate(PAPER)
        page.get_by_role("button", name="light / dark").click()
        light = page.evaluate(PAPER)
        page.get_by_role("button", name="light / dark").click()
        assert page.evaluate(PAPER) == dark
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate(PAPER) == light == "rgb(255, 255, 255)"


def test_on_paper_folded_tables_are_open(opened):
    with opened("three") as page:
        folded = page.locator("details table").first
        assert not folded.is_visible()
        page.emulate_media(media="print")
        assert folded.bounding_box()["height"] > 20
        assert page.pdf().startswith(b"%PDF")


def test_what_is_wrong_stands_above_the_answer(opened):
    with opened("failures") as page:
        alerts = page.get_by_role("alert").all_inner_texts()
        assert alerts == [
            "Not valid: round-robin: 20 of 200 requests failed (10.0%)",
            "kv: 1 of 200 requests failed, 1 of them with: reset",
        ]
        assert page.locator(".alert").last.bounding_box()["y"] < page.locator(".verdict").bounding_box()["y"]
    with opened("three") as page:
        assert page.get_by_role("alert").count() == 0


def test_the_head_says_what_was_run_on_what_and_how_far_off_it_may_be(opened):
    with opened("three") as page:
        said = dict(
            zip(page.locator(".head dt").all_inner_texts(), page.locator(".head dd").all_inner_texts(), strict=True)
        )
    assert said["Model"] == (
        "meta-llama/Llama-3.1-70B: 70.6 B parameters; 80 layers keep KV; FP8 and BF16 weights, BF16 KV"
    )
    assert (said["GPU"], said["Layout"], said["Chunk"]) == ("h100", "3 workers, TP 4 (12 GPUs)", "8,192 tokens")
    assert said["Workload"].startswith("chat.jsonl: 240 requests in ")
    assert said["Model error"].startswith("in 9 of 10 cases, the real mean TPOT is 0.9")
    assert "by 45 published points of meta-llama/Llama-3.1-70B fp8 on vllm and h100" in said["Model error"]
    with opened("seven") as page:
        text = page.locator(".head").inner_text()
    assert "generic: a polynomial" in text
    assert "do not read the times as those of a GPU" in text


def test_what_is_not_known_does_not_look_like_a_number(opened):
    with opened("failures") as page:
        page.locator("details").evaluate_all("(all) => all.forEach((one) => { one.open = true; })")
        styles = page.locator("td").evaluate_all(
            "(all) => all.map((one) => [one.textContent, getComputedStyle(one).fontStyle])"
        )
    unknown = {style for text, style in styles if text == "n/a"}
    assert unknown == {"italic"}
    assert {style for text, style in styles if text not in ("n/a", "-")} == {"normal"}


def test_no_cell_has_percent_and_milliseconds(opened):
    for name in ("three", "apart", "tiers", "sweep", "tier_sweep", "plan", "validation"):
        with opened(name) as page:
            cells = page.locator("td").all_text_contents()
        assert not [cell for cell in cells if "%" in cell and (" ms" in cell or "(" in cell)], name


def test_text_has_one_size(opened):
    with opened("three") as page:
        sizes = page.evaluate(
            "() => [...new Set([...document.querySelectorAll('main *:not(svg, svg *)')].filter((one) => one.textContent.trim() && one.tagName != 'H1')"
            ".map((one) => getComputedStyle(one).fontSize))]"
        )
    assert sizes == ["14px"]


@pytest.mark.parametrize("name", PAGES)
def test_charts_have_one_type_size_and_no_row_is_half_empty_unless_their_number_is_odd(opened, name):
    with opened(name) as page:
        types = page.locator("figure svg text")
        sizes = types.evaluate_all("(all) => [...new Set(all.map((one) => getComputedStyle(one).fontSize))]")
        tops = page.locator("figure:not(.wide)").evaluate_all("(all) => all.map((one) => one.offsetTop)")
    assert sizes == ["12px"]
    assert list(Counter(tops).values()).count(1) == len(tops) % 2


def test_every_chart_is_explained_in_the_docs(page_of):
    page = Path(__file__).parents[2] / "docs" / "reading-a-report.md"
    questions = {one for name in PAGES for one in re.findall(r"<h3>([^<]*[?])</h3>", page_of(name).read_text())}
    questions = {re.sub("better than .* is", "better than round-robin is", one) for one in questions}
    assert not [one for one in questions if one not in page.read_text()]


def test_a_report_of_seven_arms_is_one_file_below_a_megabyte(page_of):
    text = page_of("seven").read_text()
    assert len(text.encode()) < 1_000_000
    assert "http-equiv" not in text
    assert ' src="' not in text
    assert "<link" not in text


@pytest.mark.parametrize("name", ["plan", "three"])
def test_the_answer_comes_before_what_was_run(name, page_of):
    text = page_of(name).read_text()
    answer = text.index('<p class="verdict">')
    assert text.find('<dl class="head">') in (-1, *range(answer, len(text)))
    assert ("<strong>4 GPUs (TP 4, chunk 512, fp8; workers: 4) meet every limit. " in text) == (name == "plan")
