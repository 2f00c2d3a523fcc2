"""Models with random weights that the workflow makes itself, in seconds: a GGUF file or a shape, and a tokenizer."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from workflow.config import MadeModel, ShapedModel
from workflow.contract import file_sha256, write_atomic
from workflow.models import CHECKPOINT, GGUF, ModelManifest

HEAD_SIZE = 64
CHAT_TEMPLATE = (
    "{% for message in messages %}<|bos|>{{ message['role'] }}\n{{ message['content'] }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)
NO_REVISION = "0" * 40
"""Stands for the commit of a cache entry that no hub has."""

BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Name of a layer's tensor in GGUF -> elsewhere."""


def make(name: str, declared: MadeModel | ShapedModel, corpus: Path, folder: Path) -> ModelManifest:
    """Write what is served, the tokenizer as an offline hub cache in `folder`/hf_home, and `folder`/model.json.

    `corpus` is the text that the vocabulary is trained on: the one the replay client draws prompts from, so that its
    token counts and the engine's agree.
    """
    tokenizer = train_tokenizer(corpus, declared.vocabulary_size)
    weights = folder / GGUF
    if isinstance(declared, ShapedModel):
        pad_vocabulary(tokenizer, declared.vocabulary_size)
        parameters = write_checkpoint(tokenizer, declared, folder / CHECKPOINT)
    else:
        temporary = folder / f".{GGUF}"
        parameters = write_gguf(tokenizer, name, declared, temporary)
        temporary.replace(weights)
        write_checkpoint(tokenizer, shape_of(declared, tokenizer), folder / CHECKPOINT)
        write_weights(declared, tokenizer.get_vocab_size(), folder / CHECKPOINT / "model.safetensors")
    snapshot = write_hub_entry(tokenizer, name, folder / "hf_home" / "hub")
    manifest = ModelManifest(
        schema_version=ModelManifest.SCHEMA_VERSION,
        name=name,
        declaration=declared.model_dump(mode="json"),
        parameters=parameters,
        gguf_sha256=None if isinstance(declared, ShapedModel) else file_sha256(weights),
        tokenizer_sha256=file_sha256(snapshot / "tokenizer.json"),
    )
    manifest.write(folder / "model.json")
    return manifest


def train_tokenizer(corpus: Path, vocabulary_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on a text file; the same text gives the same vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=["<|pad|>", "<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(corpus)], trainer)
    return tokenizer


def write_hub_entry(tokenizer: Tokenizer, name: str, hub: Path) -> Path:
    """Lay a tokenizer out as a hub cache entry and return the snapshot's folder.

    The replay client loads tokenizers by hub name only: a plain folder fails in those of its processes that force
    offline mode.
    """
    entry = hub / f"models--{name.replace('/', '--')}"
    snapshot = entry / "snapshots" / NO_REVISION
    write_tokenizer(tokenizer, snapshot)
    write_atomic(entry / "refs" / "main", NO_REVISION.encode())
    return snapshot


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer with its chat template as transformers reads it."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "model_max_length": 1_000_000,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_atomic(folder / "tokenizer.json", tokenizer.to_str().encode())
    write_atomic(folder / "tokenizer_config.json", json.dumps(settings, indent=1).encode())


def pad_vocabulary(tokenizer: Tokenizer, size: int) -> None:
    """Give every row of an embedding a token: a random model answers with any, and decoding one must not fail."""
    missing = size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<|unused-{number}|>" for number in range(missing)])


def shape_of(declared: MadeModel, tokenizer: Tokenizer) -> ShapedModel:
    """Return the shape of a model that is written as GGUF too, for engines that draw the weights themselves."""
    return ShapedModel(
        kind="shape",
        vocabulary_size=tokenizer.get_vocab_size(),
        hidden_size=declared.hidden_size,
        intermediate_size=2 * declared.hidden_size,
        layers=declared.layers,
        heads=declared.hidden_size // HEAD_SIZE,
        kv_heads=declared.kv_heads,
        head_size=HEAD_SIZE,
        context_tokens=declared.context_tokens,
    )


def write_checkpoint(tokenizer: Tokenizer, declared: ShapedModel, folder: Path) -> int:
    """Write a llama's checkpoint without its weights and return how many parameters it has."""
    special = {name: tokenizer.token_to_id(f"<|{name}|>") for name in ("bos", "eos", "pad")}
    ids = {f"{name}_token_id": number for name, number in special.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": declared.hidden_size,
        "intermediate_size": declared.intermediate_size,
        "num_hidden_layers": declared.layers,
        "num_attention_heads": declared.heads,
        "num_key_value_heads": declared.kv_heads,
        "head_dim": declared.head_size,
        "max_position_embeddings": declared.context_tokens,
        "vocab_size": declared.vocabulary_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        **ids,
    }
    write_atomic(folder / "config.json", json.dumps(config, indent=1).encode())
    write_atomic(folder / "generation_config.json", json.dumps(ids, indent=1).encode())
    write_tokenizer(tokenizer, folder)
    width, query, kv = declared.hidden_size, declared.heads * declared.head_size, declared.kv_heads * declared.head_size
    layer = 2 * width * query + 2 * width * kv + 3 * width * declared.intermediate_size + 2 * width
    return 2 * declared.vocabulary_size * width + declared.layers * layer + width


def write_gguf(tokenizer: Tokenizer, name: str, declared: MadeModel, path: Path) -> int:
    """Write a random llama with the tokenizer's vocabulary and return its number of parameters."""
    description = json.loads(tokenizer.to_str())
    vocabulary: dict[str, int] = description["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token["id"] for token in description["added_tokens"]}
    width, layers, heads = declared.hidden_size, declared.layers, declared.hidden_size // HEAD_SIZE
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_context_length(declared.context_tokens)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(declared.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(500_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(tokens))]
    )
    writer.add_token_merges(
        [" ".join(pair) if isinstance(pair, list) else pair for pair in description["model"]["merges"]]
    )
    writer.add_bos_token_id(vocabulary["<|bos|>"])
    writer.add_eos_token_id(vocabulary["<|eos|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    parameters = 0
    for tensor, data in _drawn(declared, len(tokens)):
        writer.add_tensor(tensor, data)
        parameters += data.size
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return parameters


def write_weights(declared: MadeModel, vocabulary: int, path: Path) -> None:
    """Write the weights under the names that other engines load them by.

    Not left to the engine: what vLLM draws makes every token as likely as every other, whatever the prompt, and then
    nothing shows whether the KV blocks that a store gives back are the right ones.
    """
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    tensors = {}
    for name, data in _drawn(declared, vocabulary):
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        found = f"model.layers.{match[1]}.{BLOCK[match[2]]}" if match else names[name.removesuffix(".weight")]
        tensors[f"{found}.weight"] = data.astype(np.float16)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"format": "pt"})


def _drawn(declared: MadeModel, vocabulary: int) -> Iterator[tuple[str, Any]]:
    """Yield the name of each tensor and its values; one seed gives one model."""
    rng = np.random.default_rng(declared.seed)
    width, kv_width = declared.hidden_size, declared.kv_heads * HEAD_SIZE
    for name, shape in _tensors(vocabulary, width, kv_width, declared.layers):
        norm = len(shape) == 1
        values = np.ones(shape, np.float32) if norm else rng.standard_normal(shape) * declared.weights_std
        yield name, values if norm else values.astype(np.float16)


def _tensors(vocabulary: int, width: int, kv_width: int, layers: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of a llama's tensors, norms one-dimensional."""
    tensors: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (vocabulary, width)),
        ("output_norm.weight", (width,)),
        ("output.weight", (vocabulary, width)),
    ]
    for layer in range(layers):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm": (width,),
            "ffn_norm": (width,),
            "attn_q": (width, width),
            "attn_k": (kv_width, width),
            "attn_v": (kv_width, width),
            "attn_output": (width, width),
            "ffn_gate": (2 * width, width),
            "ffn_up": (2 * width, width),
            "ffn_down": (width, 2 * width),
        }
        tensors += [(f"blk.{layer}.{name}.weight", shape) for name, shape in block.items()]
    return tensors
