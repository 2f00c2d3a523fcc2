"""Points of one plan in turn on one llama.cpp server: each is its own result, and each begins cold."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.conftest import CONFIG, Checkout, copy_checkout, end, running_in, wait_for
from workflow.failures import Failure
from workflow.points import Point
from workflow.runs import Run
from workflow.serving import Emptying
from workflow.sharing import Turns, turns_file


@pytest.fixture(scope="module")
def checkout(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Return a checkout that plans three concurrencies of the arm without offload on one server."""
    made = copy_checkout(project, tmp_path_factory.mktemp("shared"))
    text = (project / "tests/end_to_end/master.yaml").read_text()
    none, ram = "kv-offloading: none, conc-list: [4]", "conc-list: [4]"
    assert text.count(ram) == 2
    lines = [line for line in text.splitlines() if "llamacpp-ram" not in line]
    shared = "\n".join(lines).replace(none, "kv-offloading: none, conc-list: [2, 3, 4]")
    (made.root / "shared.yaml").write_text(shared)
    config = CONFIG.replace("tests/end_to_end/master.yaml", "shared.yaml")
    # A loaded machine answers little in six seconds, and a replay without a single answer is a failure.
    config = config.replace("duration_s: 6, grace_s: 3", "duration_s: 12, grace_s: 10")
    (made.root / "sweep.yaml").write_text(config + "share_server: true\n")
    return made


def concurrency_of(checkout: Checkout, point: str) -> int:
    """Return the concurrency of a planned point."""
    return Point.read(checkout.results / "points" / f"{point}.json").concurrency


def measured(checkout: Checkout) -> dict[int, Run]:
    """Return the published runs by concurrency."""
    runs = [Run.read(path) for path in checkout.runs()]
    return {concurrency_of(checkout, run.point): run for run in runs}


def kill_engine(checkout: Checkout) -> None:
    """Kill the shared server, found by where it writes."""
    logs = {str(path) for path in checkout.results.glob("shared/*/*/server/engine.log")}
    for process in psutil.process_iter():
        try:
            if str(Path(f"/proc/{process.pid}/fd/1").readlink()) in logs:
                process.kill()
        except OSError:
            continue


def test_a_server_that_dies_fails_the_points_that_were_not_measured_and_no_other(checkout):
    sweep = checkout.start("--until", "publish_point", "--keep-going")
    try:
        wait_for(lambda: len(checkout.runs()) == 1, 120, "the first of three points")
        second = "runs/*-c3-*/*/client/profile_export.jsonl"
        wait_for(lambda: list(checkout.results.glob(second)), 60, "the replay of the second")
        kill_engine(checkout)
        wait_for(lambda: sweep.poll() is not None, 90, "the end of Snakemake")
    finally:
        end(sweep)
    assert sweep.returncode == 1
    first = measured(checkout)
    assert list(first) == [2], "what was measured stays"
    records = [Failure.read(path) for path in checkout.results.glob("failures/*.json")]
    assert {concurrency_of(checkout, record.point): record.failure_class.value for record in records} == {
        3: "engine_died",
        4: "engine_died",
    }
    assert not running_in(checkout.results)
    assert not list(checkout.results.glob("runs/*/lease.json"))

    # The same command again: one server for the two that are missing.
    assert {name: checkout.planned()[name] for name in ("run_shared", "publish_point")} == {
        "run_shared": 1,
        "publish_point": 2,
    }
    checkout.snakemake("--until", "publish_point")
    runs = measured(checkout)
    assert runs[2] == first[2], "a point that was measured is not measured again"
    assert {number: run.shared.points_before for number, run in runs.items()} == {2: 0, 3: 0, 4: 1}
    assert runs[3].attempt == runs[4].attempt, "one job"
    assert runs[3].services == runs[4].services, "one server"
    assert runs[4].shared.cold.startswith("at least ")
    assert runs[4].phases_s["empty"] > 0
    assert not any(run.findings for run in runs.values())

    # Each has its own part of the server's log: how it started, and its own turn.
    texts = {number: engine_log(checkout, runs[number]) for number in (3, 4)}
    (whole,) = (path.read_text() for path in checkout.results.glob(f"shared/*/{runs[4].attempt}/server/engine.log"))
    assert texts[3].startswith("log clock starts at")
    assert whole.startswith(texts[3]), "the first turn's log is the beginning"
    assert whole.endswith(texts[4][-1000:]), "the last turn's log is the end"
    last = texts[3].splitlines()[-1]
    assert last not in texts[4], "and nothing of the turn before"
    assert "serving with xllamacpp" in texts[4]

    # One point is one rerun.
    runs_of_four = checkout.results / "runs" / runs[4].point / "run.json"
    runs_of_four.unlink()
    planned = checkout.planned()
    assert planned["run_point"] == 1
    assert "run_shared" not in planned


def engine_log(checkout: Checkout, run: Run) -> str:
    """Return the engine's log that was published with a run."""
    return (checkout.results / "runs" / run.point / run.attempt / "engine.log").read_text()


def test_a_server_that_stays_warm_measures_no_second_point(checkout, project):
    """Erased slots leave llama.cpp's host cache full, and the proof sees it: that arm is refused when it is planned."""
    text = (project / "tests/end_to_end/master.yaml").read_text()
    lines = [line for line in text.splitlines() if "kv-offloading: none" not in line]
    (checkout.root / "ram.yaml").write_text("\n".join(lines).replace("conc-list: [4]", "conc-list: [2, 3]"))
    refused = checkout.snakemake("--dry-run", "--config", "masters=[ram.yaml]", check=False)
    assert refused.returncode == 1
    assert "share_server: found true, but nothing is known to empty every cache of llamacpp-ram" in refused.stderr
    assert "Traceback" not in refused.stderr

    checkout.snakemake("--dry-run", "--config", "masters=[ram.yaml]", "share_server=false")
    points = [Point.read(path) for path in sorted(checkout.results.glob("points/*llamacpp-ram*.json"))]
    assert [point.concurrency for point in points] == [2, 3]
    slots = Emptying(posts=tuple(("engine", f"/slots/{slot}?action=erase") for slot in (0, 1)))
    for point in points:
        plan = point.plan.model_copy(update={"empties": slots})
        point.model_copy(update={"plan": plan}).write(checkout.results / "points" / f"{point.id}.json")
    turns = Turns(schema_version=Turns.SCHEMA_VERSION, points=tuple(point.id for point in points), tries=1)
    file = turns_file(checkout.results, "0123456789-1")
    turns.write(file)
    done = file.with_name("0123456789-1.done.json")
    argv = [sys.executable, "-m", "workflow.turns", str(file), str(done), "--results", str(checkout.results)]
    ended = subprocess.run(argv, cwd=checkout.root, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "still has" in ended.stderr
    assert (checkout.results / "runs" / points[0].id / "run.json").exists()
    assert not (checkout.results / "runs" / points[1].id / "run.json").exists()
    (record,) = [Failure.read(path) for path in checkout.results.glob(f"failures/{points[1].id}.*.json")]
    assert record.failure_class.value == "engine_not_ready"
    assert "of a prompt cached after it was told 5 times to empty its caches" in record.message
