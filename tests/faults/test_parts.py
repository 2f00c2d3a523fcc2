"""Parts that do not fit: refused with what to do, before anything is started."""

from workflow.environments import Environment
from workflow.failures import FailureClass


def refused(bench):
    """Measure, and return the record; nothing may have been started."""
    assert bench.run() == 1
    assert not list(bench.out.glob("*/*.log"))
    return bench.failure()


def test_another_version_of_the_client_is_installed(bench):
    name = bench.point.replay.client
    file = bench.environments / bench.point.environments[name] / "environment.json"
    Environment.read(file).model_copy(update={"packages": {name: "9.9"}}).write(file)
    failure = refused(bench)
    assert failure.failure_class == FailureClass.VERSION_MISMATCH
    assert f"{name} 9.9 is installed, the point declares" in failure.message


def test_a_client_that_cannot_be_started(bench):
    """A script whose interpreter is gone is there, and the system says `No such file`."""
    script = bench.environments / bench.point.environments[bench.point.replay.client] / "bin/aiperf"
    script.write_text("#!/nowhere/python\n")
    assert bench.run() == 1
    failure = bench.failure()
    assert failure.failure_class == FailureClass.CONFIGURATION
    assert "the replay client cannot be started" in failure.message


def test_sessions_that_changed_since_they_were_prepared(bench):
    (bench.results / "traces" / bench.point.trace.key / "sessions/one.json").write_text('{"other": 1}')
    failure = refused(bench)
    assert failure.failure_class == FailureClass.CONFIGURATION
    assert "has changed since it was prepared" in failure.message


def test_sessions_of_another_declaration(bench):
    trace = bench.point.trace.model_copy(update={"declaration": {"kind": "another"}})
    key = bench.results / "traces" / trace.key
    key.symlink_to(bench.results / "traces" / bench.point.trace.key)
    other = bench.with_point(trace=trace)
    assert "holds another declaration" in refused(other).message


def test_a_checkpoint_that_nobody_has_placed(bench):
    bench.clusters.write_text("clusters:\n  cluster:local: {launcher: bare, model_paths: {some/other: /nowhere}}\n")
    failure = refused(bench)
    assert failure.failure_class == FailureClass.CONFIGURATION
    assert "nobody knows where offload-sweep/tiny-llama lies" in failure.message
    assert "allowed: some/other" in failure.message


def test_a_draft_model_that_nobody_has_placed(bench):
    wants = {"model": bench.point.row.model, "draft": "some/draft"}
    assert "nobody knows where some/draft lies" in refused(bench.with_plan(wants=wants)).message


def test_a_checkpoint_folder_that_is_not_there(bench):
    bench.clusters.write_text(bench.clusters.read_text().replace("checkpoint", "gone"))
    assert "path_missing" in refused(bench).message


def test_an_image_that_was_not_imported(bench):
    text = bench.clusters.read_text().replace("launcher: bare", f"launcher: apptainer, images: {bench.root}")
    bench.clusters.write_text(text.replace("    launcher: apptainer, ", "    launcher: apptainer\n    "))
    failure = refused(bench)
    assert failure.failure_class == FailureClass.CONFIGURATION
    assert "has not been imported" in failure.message
    assert "python -m workflow.images" in failure.message
