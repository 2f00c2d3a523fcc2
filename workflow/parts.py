"""What a point needs before a GPU is allocated: environments, sessions, a made model; prepared on CPUs, checked here.

`python -m workflow.parts traces|model POINT ... FOLDER` prepares one of them, as the rules do.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from workflow import replay, traces, yamlfile
from workflow.config import AnyModel, TraceSets
from workflow.contract import InputError, reports_input_errors
from workflow.environments import Environment
from workflow.failures import AttemptFailed, FailureClass
from workflow.models import ModelManifest, served_from
from workflow.points import Point, trace_identity
from workflow.traces import TraceManifest, folder_sha256


@dataclass(frozen=True)
class Parts:
    """What CPU rules have prepared for a point before a GPU is allocated."""

    client: Path
    environments: dict[str, Path]
    packages: dict[str, str] | None
    """Distributions of the engine's environment -> version; None where an image brings its own."""
    paths: dict[str, Path]
    """What the plan wants of the node, by path placeholder: the checkpoint, a draft model, a chat template."""
    tokenizer: str
    """What the client loads its tokenizer from: a name in `hf_home`, or the checkpoint's folder."""
    hf_home: Path
    """Hub cache of the client, for offline use."""
    sessions: Path
    manifest: TraceManifest
    dataset_cache: Path


def find_parts(point: Point, results: Path, environments: Path, model_paths: Mapping[str, str]) -> Parts:
    """Locate and check the prepared parts; `model_paths` is the cluster's list of checkpoints.

    Raises AttemptFailed(configuration) that says what to make and how.
    """
    sets = results / "traces" / point.trace.key
    folders = {name: (environments / key).resolve() for name, key in point.environments.items()}
    try:
        prepared = {name: Environment.read(folder / "environment.json") for name, folder in folders.items()}
        manifest = TraceManifest.read(sets / "trace_set.json")
        paths, tokenizer, hf_home = _model(point, results, model_paths)
    except InputError as error:
        raise AttemptFailed(FailureClass.CONFIGURATION, f"{error}; make it with snakemake, which knows how") from None
    installed = prepared[point.replay.client].packages.get(point.replay.client)
    if installed != point.replay.client_version:
        raise AttemptFailed(
            FailureClass.VERSION_MISMATCH,
            f"{point.replay.client} {installed} is installed, the point declares {point.replay.client_version}",
        )
    declared = {name: value for name, value in manifest.declaration.items() if name != "path"}
    if declared != point.trace.declaration:
        raise AttemptFailed(
            FailureClass.CONFIGURATION,
            f"{sets} holds another declaration of trace set {point.trace.name!r}; make it again",
        )
    sessions = sets / "sessions"
    if (found := folder_sha256(sessions)) != manifest.content_sha256:
        raise AttemptFailed(
            FailureClass.CONFIGURATION, f"{sessions} has changed since it was prepared (sha256 {found})"
        )
    engine = point.plan.engine.environment
    return Parts(
        client=folders[point.replay.client],
        environments=folders,
        packages=prepared[engine].packages if engine is not None else None,
        paths=paths,
        tokenizer=tokenizer,
        hf_home=hf_home,
        sessions=sessions.resolve(),
        manifest=manifest,
        # Another client, or another version of it, must not read what this one made of the sessions.
        dataset_cache=(sets / f"client-cache-{point.environments[point.replay.client]}").resolve(),
    )


def _model(point: Point, results: Path, model_paths: Mapping[str, str]) -> tuple[dict[str, Path], str, Path]:
    """Return the plan's wanted paths, the client's tokenizer and its hub cache."""
    if point.made_model is not None:
        folder = results / "models" / point.model_key
        if ModelManifest.read(folder / "model.json").declaration != point.made_model:
            raise AttemptFailed(
                FailureClass.CONFIGURATION, f"{folder} holds a model of another declaration; make it again"
            )
        path = served_from(folder, point.row.framework).resolve()
        return {"model": path}, point.row.model, (folder / "hf_home").resolve()
    wanted = {"model": point.row.model, **point.plan.wants}
    unknown = sorted({what for what in wanted.values() if what not in model_paths})
    if unknown:
        raise InputError(
            f"nobody knows where {', '.join(unknown)} lies on this node",
            key=f"clusters.{point.row.runner}.model_paths",
            allowed=", ".join(sorted(model_paths)) or "nothing is listed",
            do="add it to the cluster's model_paths",
        )
    # Whether they exist and are complete is preflight's to say: it names the missing shards.
    paths = {name: Path(model_paths[what]) for name, what in wanted.items()}
    return paths, str(paths["model"]), results.resolve() / "hf_home"


def prepare_traces(point: Point, declared_in: Path, folder: Path) -> TraceManifest:
    """Prepare the sessions that a point replays; raises InputError, also if the set was declared anew meanwhile."""
    sets = yamlfile.validate(TraceSets, yamlfile.load(declared_in), declared_in).traces
    name = point.trace.name
    if name not in sets or trace_identity(name, sets[name], traces.GENERATOR) != point.trace:
        raise InputError(f"trace set {name!r} is no longer what {point.id} was planned with", file=declared_in)
    return traces.prepare(name, sets[name], Path.cwd(), folder)


def prepare_model(point: Point, corpus: Path, folder: Path) -> ModelManifest:
    """Make the model that a point serves; `corpus` is the text that the replay client draws prompts from."""
    from workflow import model_making  # noqa: PLC0415 - a node makes no models and lacks the packages for it

    declared: AnyModel = TypeAdapter(AnyModel).validate_python(point.made_model)
    return model_making.make(point.row.model, declared, corpus, folder)


@reports_input_errors
def main() -> int:
    """Prepare one part: `traces POINT TRACES_YAML FOLDER` or `model POINT CLIENT_ENVIRONMENT FOLDER`."""
    kind, point_file, source, folder = sys.argv[1:5]
    point = Point.read(Path(point_file))
    if kind == "traces":
        print(prepare_traces(point, Path(source), Path(folder)).to_json())
    else:
        print(prepare_model(point, replay.corpus(Path(source)), Path(folder)).to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
