"""Make tests/examples/llamacpp/ from a finished sweep: `python -m tests.examples.make RESULTS [EARLIER_RESULTS]`.

A second folder of results becomes the second repeats: measured points of the same arms and concurrencies, renamed.
Paths and the name of the machine are replaced; requests lose the digits that nobody reads.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from workflow.config import Limits, load_config
from workflow.contract import file_sha256
from workflow.evidence import read_evidence
from workflow.measured import context_for, request_frames
from workflow.metrics import measure_evidence
from workflow.runs import Run
from workflow.sweep import plan_sweep
from workflow.timeline import timeline_of_evidence

FOLDER = Path(__file__).parent / "llamacpp"


def anonymous(text: str) -> str:
    """Return the text of a run without the paths and the name of its machine."""
    for root in sorted({found[1] for found in re.finditer(r'"(/[^" ]*?)/(?:\.envs|results|workflow)/', text)}, key=len):
        text = text.replace(root, "/checkout")
    data = json.loads(text)
    data["host"] |= {"name": "example-node", "kernel": "Linux"}
    data["artefacts"] = []
    return json.dumps(data)


def main(folders: list[Path]) -> None:
    """Write the example."""
    sweep = plan_sweep(load_config([Path("configs/config.yaml")], {"repeats": len(folders)}))
    kept: dict[str, list[pd.DataFrame]] = {"requests": [], "timelines": []}
    for point in sweep.points.values():
        source = folders[point.repeat - 1] / "runs"
        pattern = f"*-{point.arm}-c{point.concurrency}-*/run.json"
        path = max(source.glob(pattern), key=lambda found: found.stat().st_mtime)
        text = path.read_text()
        folder = path.parent / json.loads(text)["attempt"]
        for artefact in json.loads(text)["artefacts"]:
            assert file_sha256(folder / artefact["path"]) == artefact["sha256"], artefact["path"]
        run = Run.model_validate_json(anonymous(text)).model_copy(update={"point": point.id})
        context = context_for(point, run, Limits())
        evidence = read_evidence(folder, context)
        metrics, frame = measure_evidence(evidence, context, folder.name), timeline_of_evidence(evidence, folder)
        requests = pd.concat(request_frames(evidence), ignore_index=True)
        point.write(FOLDER / "points" / f"{point.id}.json")
        run.write(FOLDER / "runs" / point.id / "run.json")
        metrics.write(FOLDER / "metrics" / f"{point.id}.json")
        # Session ids are random; the first eight digits tell them apart as well.
        sessions = requests["session"].astype(str).str[:8]
        kept["requests"].append(requests.assign(session=sessions, point=point.id))
        if point.repeat == 1:
            kept["timelines"].append(frame.assign(point=point.id))
    for name, frames in kept.items():
        together = pd.concat(frames, ignore_index=True)
        floats = together.select_dtypes("float").columns
        together[floats] = together[floats].round(6).astype(np.float32)
        together.to_parquet(FOLDER / f"{name}.parquet", index=False, compression="zstd")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
