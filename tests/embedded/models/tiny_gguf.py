"""Writes a GGUF file of a tiny Llama with a byte-level tokenizer, the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 16, 2


def byte_characters() -> list[str]:
    """The printable stand-ins of the 256 bytes, as GPT-2's tokenizer has them."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """The model that the file holds; its embedding is its head."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + 256 + 2,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.3)
    return model


def write_gguf(path: Path, architecture: str = "llama", tokenizer: bool = True, quantised: bool = True) -> None:
    """Write `tiny_llama()`; matrices as Q8_0 unless told otherwise."""
    gguf: Any = pytest.importorskip("gguf")
    model = tiny_llama()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(model.config.vocab_size)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list([*SPECIAL, *byte_characters(), "he", "ll"])
        writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * 258)
        writer.add_token_merges(["h e", "l l"])  # transformers 5.17 cannot read a list of one
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHAT_TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        stem, suffix = name.rsplit(".", 1)
        values = tensor
        for heads, which in ((HEADS, "q_proj"), (KV_HEADS, "k_proj")):
            if which in name:  # llama.cpp rotates neighbours, transformers halves
                values = tensor.view(heads, 2, HEAD_DIM // 2, 64).transpose(1, 2).reshape(tensor.shape)
        array = values.float().numpy()
        if quantised and values.dim() == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{names.get_name(stem)}.{suffix}", gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{names.get_name(stem)}.{suffix}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
