"""A model that is only a shape: the engine draws its weights, and client and engine share its tokenizer."""

import json

import pytest
from tokenizers import Tokenizer

from workflow import models
from workflow.config import Models, ShapedModel
from workflow.contract import InputError
from workflow.yamlfile import parse, validate

SHAPE = ShapedModel(
    kind="shape",
    vocabulary_size=1024,
    hidden_size=4096,
    intermediate_size=14336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_size=128,
    context_tokens=131072,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "corpus.txt").write_text("to be or not to be, that is the question " * 50)
    return folder, models.make("org/shape", SHAPE, folder / "corpus.txt", folder / "model")


def test_a_shape_is_a_checkpoint_without_weights(made):
    folder, manifest = made
    served = models.served_path(folder / "model", SHAPE.model_dump(mode="json"))
    assert served == folder / "model/checkpoint"
    config = json.loads((served / "config.json").read_text())
    assert (config["num_key_value_heads"], config["head_dim"], config["num_hidden_layers"]) == (8, 128, 32)
    assert not [path for path in (folder / "model").rglob("*") if path.suffix in (".gguf", ".safetensors")]
    # Llama-3.1-8B has 8.030 billion with a vocabulary of 128,256; less the rows that this one lacks.
    assert manifest.parameters == 8_030_261_248 - 2 * 4096 * (128_256 - 1024)
    assert manifest.gguf_sha256 is None


def test_every_row_of_the_embedding_has_a_token_and_the_client_has_the_same_ones(made):
    folder, _ = made
    entry = folder / "model/hf_home/hub/models--org--shape/snapshots" / models.NO_REVISION / "tokenizer.json"
    ours = folder / "model/checkpoint/tokenizer.json"
    assert entry.read_bytes() == ours.read_bytes()
    tokenizer = Tokenizer.from_file(str(ours))
    assert tokenizer.get_vocab_size() == 1024, "the corpus gives fewer; the rest is padding"
    assert tokenizer.decode([1023]) != ""
    assert json.loads((ours.parent / "config.json").read_text())["eos_token_id"] == tokenizer.token_to_id("<|eos|>")


def test_a_declaration_without_kind_is_still_a_gguf_model(tmp_path):
    text = b"models: {a: {vocabulary_size: 512, hidden_size: 64, layers: 1, kv_heads: 1, context_tokens: 9, seed: 0}}"
    declared = validate(Models, parse(text, tmp_path), tmp_path).models["a"]
    assert "kind" not in declared.model_dump(), "points that were measured with it must keep their ids"
    with pytest.raises(InputError, match=r"models\.a\.heads.*missing key|models\.a.*heads"):
        validate(Models, parse(b"models: {a: {kind: shape, vocabulary_size: 512}}", tmp_path), tmp_path)
