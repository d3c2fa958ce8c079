"""The config of a model that is exported in a moment; tests add lines to it."""

from __future__ import annotations

SMALL = """
model_kwargs: {model_type: llama, vocab_size: 256, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1,
               num_attention_heads: 2, num_key_value_heads: 2, head_dim: 16}
speculative_config: {decoding_type: Eagle3, max_draft_len: 2, eagle3_layers_to_capture: [0]}
speculative_model_kwargs: {num_captured_layers: 1}
kv_cache_config: {tokens_per_block: 4}
max_seq_len: 32
"""
