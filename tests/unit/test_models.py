"""Models that the workflow makes: the same vocabulary and shape for every engine."""

import json

import gguf
import pytest

from workflow.config import MadeModel
from workflow.models import make, served_from

DECLARED = MadeModel(vocabulary_size=512, hidden_size=128, layers=3, kv_heads=1, context_tokens=4096, seed=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "corpus.txt").write_text("to be or not to be that is the question " * 50)
    make("some/model", DECLARED, folder / "corpus.txt", folder)
    return folder


def test_engines_are_given_what_they_load(made):
    assert served_from(made, "llamacpp").is_file()
    assert (served_from(made, "vllm") / "config.json").is_file()
    assert served_from(made, "vllm") == served_from(made, "sglang")


def test_the_checkpoint_is_the_model_of_the_gguf_without_its_weights(made):
    config = json.loads((served_from(made, "vllm") / "config.json").read_text())
    fields = gguf.GGUFReader(served_from(made, "llamacpp")).fields
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


def test_engine_and_client_have_one_tokenizer(made):
    (snapshot,) = made.glob("hf_home/hub/models--some--model/snapshots/*")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (snapshot / name).read_bytes() == (served_from(made, "vllm") / name).read_bytes()
