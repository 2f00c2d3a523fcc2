"""The report page: self-contained, escaped, complete; and in a real browser, sortable and filterable."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from tests.examples import gallery
from workflow.changelog import load_changelog
from workflow.failures import Failure, FailureClass
from workflow.figures import draw, draw_timeline
from workflow.report import Content, inline_svg, page, read_content, tail
from workflow.style import render

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=10000"),
)


def content_of(example, **more):
    points, table, _, timelines = example
    drawn, explanations, fairness = gallery.tables(example)
    figures = {name: render(draw(name, drawn), "svg").decode() for name in ("sweep", "ratios")}
    sheets = {one: render(draw_timeline(one, frame), "svg").decode() for one, frame in list(timelines.items())[:1]}
    return Content(table, drawn.pairs, explanations, fairness, points, figures, sheets, **more)


@pytest.fixture(scope="module")
def made_up():
    example = gallery.made_up()
    failed = next(point for point in example[0] if point.arm == "lmcache" and point.concurrency == 64)
    failure = Failure(
        schema_version=Failure.SCHEMA_VERSION,
        point=failed.id,
        attempt="a1",
        failure_class=FailureClass.ENGINE_DIED,
        message="the engine ended with code -9",
        first_cause="<script>alert('from a log')</script>",
        worth_retrying=True,
        unix_s=1.0,
        logs=(),
    )
    logs = {failed.id: [("a1/engine.log", "Traceback & <b>bold</b>\nKilled")]}
    return content_of(example, failures={failed.id: [failure]}, logs=logs)


@pytest.fixture(scope="module")
def text(made_up):
    return page(made_up)


def test_nothing_is_fetched_from_anywhere(text):
    assert not re.findall(r"<(?:script|img|iframe|link)[^>]+(?:src|href)=[\"'](?!data:)", text)
    assert "@import" not in text
    assert "default-src 'none'" in text
    # Addresses in commands and of pull requests are text; no attribute that a browser follows by itself has one.
    assert not re.findall(r"<[^>]+\b(?:src|srcset|poster|data|action|background)=[\"']https?:", text)


def test_what_a_server_printed_is_text_and_never_markup(text):
    assert "<script>alert" not in text
    assert html.escape("<script>alert('from a log')</script>") in text.replace("&#x27;", "&#x27;").replace(
        "&#39;", "&#x27;"
    )
    assert "Traceback &amp; &lt;b&gt;bold" in text


def test_the_verdicts_come_first_and_every_point_has_its_section(text, made_up):
    places = [text.index(f'<section id="{name}">') for name in ("verdicts", "figures", "why", "fairness", "points")]
    assert places == sorted(places)
    for point in made_up.points:
        assert f'<details id="{point.id}"' in text
        assert f'href="#{point.id}"' in text
    assert "the engine ended with code -9" in text
    assert "not comparable (lmcache failed: engine_died)" in text


def test_the_page_of_a_measured_point_has_commands_versions_and_reasons_for_nulls(tmp_path):
    points, table, _, _ = example = gallery.real()
    drawn, explanations, fairness = gallery.tables(example)
    for name in ("runs", "metrics"):
        shutil.copytree(gallery.REAL / name, tmp_path / name)
    table.to_parquet(tmp_path / "metrics.parquet")
    drawn.pairs.to_csv(tmp_path / "comparison.csv", index=False)
    explanations.to_csv(tmp_path / "explanations.csv", index=False)
    fairness.to_csv(tmp_path / "fairness.csv", index=False)
    entries = load_changelog(gallery.PROJECT / "configs/perf-changelog.yaml")
    content = read_content(tmp_path, points, entries)
    found = page(content)
    run = next(iter(content.runs.values()))
    for wanted in (run.trace_content_sha256, "--cache-ram", "versions read back", "null: ", "example-node"):
        assert wanted in found, wanted
    assert html.escape(" ".join(entries[0].entry.description)) in found
    assert page(content) == page(read_content(tmp_path, points, entries))


def test_two_figures_on_one_page_share_no_id(text):
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'xlink:href="#([^"]+)"', text))
    assert wanted
    assert wanted <= set(ids)


def test_an_svg_loses_its_head_and_keeps_its_links():
    svg = (
        '<?xml version="1.0"?>\n<svg><metadata>x</metadata><g id="a"/><use xlink:href="#a" clip-path="url(#a)"/></svg>'
    )
    assert inline_svg(svg, "p") == '<svg><g id="p-a"/><use xlink:href="#p-a" clip-path="url(#p-a)"/></svg>'


def test_only_the_end_of_a_large_log_is_read(tmp_path):
    path = tmp_path / "engine.log"
    path.write_bytes(b"".join(b"line %d \xff\n" % i for i in range(100_000)))
    found = tail(path)
    assert found.splitlines()[-1].startswith("line 99999 ")
    assert len(found.splitlines()) == 40


def test_a_sweep_of_nothing_but_plans_has_a_report(made_up):
    nothing = replace(
        made_up,
        table=made_up.table.assign(status="missing", reasons="not measured yet", succeeded=float("nan")),
        pairs=made_up.pairs.iloc[:0],
        explanations=made_up.explanations.iloc[:0],
        fairness=made_up.fairness.iloc[:0],
        figures={},
        timelines={},
        failures={},
        logs={},
    )
    found = page(nothing)
    assert "36 points planned: 36 missing; 0 successful requests." in found
    assert "No two arms were compared." in found


PROBE = """<script>
const problems = [];
addEventListener("error", event => problems.push(String(event.message)));
document.addEventListener("securitypolicyviolation", event => problems.push(event.blockedURI));
addEventListener("load", () => {
  const rows = id => [...document.getElementById(id).tBodies[0].rows];
  const heads = [...document.getElementById("verdict-table").tHead.rows[0].cells];
  const column = name => heads.findIndex(head => head.textContent === name);
  const shown = () => rows("verdict-table").filter(row => row.offsetParent !== null && !row.hidden);
  const texts = name => shown().map(row => row.cells[column(name)].dataset.v ?? row.cells[column(name)].textContent);
  const found = {all: shown().length, resources: performance.getEntriesByType("resource").map(one => one.name)};
  heads[column("ratio")].click(); found.up = texts("ratio");
  heads[column("ratio")].click(); found.down = texts("ratio");
  heads[column("metric")].click(); found.names = texts("metric");
  const bar = document.querySelector('[data-for="verdict-table"]');
  const choose = bar.querySelector("select");
  choose.value = "worse"; choose.dispatchEvent(new Event("input", {bubbles: true}));
  found.worse = texts("verdict");
  const search = bar.querySelector("input");
  search.value = "mooncake TTFT"; search.dispatchEvent(new Event("input", {bubbles: true}));
  found.both = shown().length; found.count = bar.querySelector(".count").textContent;
  location.hash = document.querySelector("details.point").id;
  setTimeout(() => {
    found.opened = document.querySelector("details.point").open;
    const svgs = [...document.querySelectorAll("figure svg")].filter(svg => svg.checkVisibility());
    found.sizes = svgs.map(svg => Math.round(svg.getBoundingClientRect().width));
    found.page = document.documentElement.scrollWidth - document.documentElement.clientWidth;
    found.problems = problems;
    const out = document.createElement("pre"); out.id = "probe"; out.textContent = JSON.stringify(found);
    document.body.append(out);
  }, 200);
});
</script></head>"""


def test_the_page_works_in_a_browser(text, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here to open the report in")
    path = tmp_path / "report.html"
    path.write_text(text.replace("</head>", PROBE, 1))
    done = subprocess.run(
        [browser, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    found = json.loads(html.unescape(re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)[1]))
    assert found["problems"] == []
    assert found["resources"] == []
    assert found["all"] == 260
    known = [float(one) for one in found["up"] if one]
    assert known == sorted(known)
    assert len(known) > 100
    # What is not known comes last, both ways.
    assert [float(one) for one in found["down"] if one] == sorted(known, reverse=True)
    assert found["up"][-1] == found["down"][-1] == ""
    assert found["names"] == sorted(found["names"])
    assert set(found["worse"]) == {"worse"}
    assert 0 < found["both"] < len(found["worse"])
    assert found["count"] == f"{found['both']} of 260 rows"
    assert found["opened"]
    assert min(found["sizes"]) > 300
    assert found["page"] <= 0
