"""A model that is only a shape: the engine draws its weights, and client and engine share its tokenizer."""

import json

import gguf
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from workflow import model_making
from workflow.config import MadeModel, Models, ShapedModel
from workflow.contract import InputError
from workflow.models import served_from
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
    return folder, model_making.make("org/shape", SHAPE, folder / "corpus.txt", folder / "model")


def test_a_shape_is_a_checkpoint_without_weights(made):
    folder, manifest = made
    served = served_from(folder / "model", "vllm")
    assert served == folder / "model/checkpoint"
    config = json.loads((served / "config.json").read_text())
    assert (config["num_key_value_heads"], config["head_dim"], config["num_hidden_layers"]) == (8, 128, 32)
    assert not [path for path in (folder / "model").rglob("*") if path.suffix in (".gguf", ".safetensors")]
    # Llama-3.1-8B has 8.030 billion with a vocabulary of 128,256; less the rows that this one lacks.
    assert manifest.parameters == 8_030_261_248 - 2 * 4096 * (128_256 - 1024)
    assert manifest.gguf_sha256 is None


def test_every_row_of_the_embedding_has_a_token_and_the_client_has_the_same_ones(made):
    folder, _ = made
    entry = folder / "model/hf_home/hub/models--org--shape/snapshots" / model_making.NO_REVISION / "tokenizer.json"
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


# ------------------------------------------------------------------------------------------ one model, two formats
DECLARED = MadeModel(vocabulary_size=512, hidden_size=128, layers=3, kv_heads=1, context_tokens=4096, seed=1)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "corpus.txt").write_text(" ".join(f"word{number * 7919}" for number in range(3000)))
    model_making.make("some/model", DECLARED, folder / "corpus.txt", folder)
    return folder


def test_engines_are_given_what_they_load(both):
    assert served_from(both, "llamacpp").is_file()
    assert (served_from(both, "vllm") / "config.json").is_file()
    assert served_from(both, "vllm") == served_from(both, "sglang")


def test_the_checkpoint_is_the_model_of_the_gguf(both):
    config = json.loads((served_from(both, "vllm") / "config.json").read_text())
    fields = gguf.GGUFReader(served_from(both, "llamacpp")).fields
    for key, field in {
        "hidden_size": "llama.embedding_length",
        "num_hidden_layers": "llama.block_count",
        "intermediate_size": "llama.feed_forward_length",
        "num_attention_heads": "llama.attention.head_count",
        "num_key_value_heads": "llama.attention.head_count_kv",
        "head_dim": "llama.rope.dimension_count",
        "vocab_size": "llama.vocab_size",
        "max_position_embeddings": "llama.context_length",
        "rope_theta": "llama.rope.freq_base",
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
    }.items():
        assert config[key] == fields[field].contents(), key


def test_the_checkpoint_has_the_weights_of_the_gguf_under_the_names_of_its_architecture(both):
    drawn = load_file(served_from(both, "vllm") / "model.safetensors")
    config = json.loads((served_from(both, "vllm") / "config.json").read_text())
    width, vocabulary, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    assert drawn["model.embed_tokens.weight"].shape == drawn["lm_head.weight"].shape == (vocabulary, width)
    assert (
        drawn["model.layers.0.self_attn.k_proj.weight"].shape[0] == config["num_key_value_heads"] * config["head_dim"]
    )
    assert drawn["model.layers.0.mlp.down_proj.weight"].shape == (width, config["intermediate_size"])
    assert len(drawn) == 3 + 9 * layers
    manifest = json.loads((both / "model.json").read_text())
    assert sum(tensor.size for tensor in drawn.values()) == manifest["parameters"]
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(both / "model.gguf").tensors}
    assert (tensors["blk.0.attn_q.weight"] == drawn["model.layers.0.self_attn.q_proj.weight"]).all()


def test_weights_are_as_wide_as_declared_and_nothing_else_changes(both, tmp_path):
    wider = DECLARED.model_copy(update={"weights_std": 0.06})
    model_making.write_weights(wider, 512, tmp_path / "model.safetensors")
    ours = load_file(tmp_path / "model.safetensors")
    usual = load_file(served_from(both, "vllm") / "model.safetensors")
    for name, std in (("self_attn.q_proj", 3), ("mlp.down_proj", 3), ("input_layernorm", 1)):
        one, other = (float(abs(t[f"model.layers.2.{name}.weight"]).mean()) for t in (ours, usual))
        assert one / other == pytest.approx(std, rel=0.01), name
    assert "weights_std" not in DECLARED.model_dump(mode="json"), "points that were measured with it keep their ids"
    assert wider.model_dump(mode="json")["weights_std"] == 0.06


def test_engine_and_client_have_one_tokenizer(both):
    (snapshot,) = both.glob("hf_home/hub/models--some--model/snapshots/*")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (snapshot / name).read_bytes() == (served_from(both, "vllm") / name).read_bytes()
