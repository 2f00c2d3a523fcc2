"""What a model that the workflow has made is, and where an engine finds it.

Apart from workflow/model_making.py: a node that serves a model needs none of the packages that one is made with.
"""

from pathlib import Path
from typing import Any

from workflow.contract import Document

CHECKPOINT = "checkpoint"
GGUF = "model.gguf"


class ModelManifest(Document):
    """What a made model is; its file is written last."""

    name: str
    declaration: dict[str, Any]
    parameters: int
    gguf_sha256: str | None
    """None where the engine draws the weights."""
    tokenizer_sha256: str


def served_from(folder: Path, framework: str) -> Path:
    """Return what an engine loads of a made model: llama.cpp its own format, all others a checkpoint folder."""
    return folder / (GGUF if framework == "llamacpp" else CHECKPOINT)
