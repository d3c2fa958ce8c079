"""Batches in which every row verifies three drafts, as an engine nests them, and steps of a pipeline on them."""

from __future__ import annotations

from typing import Any

import torch

K = 3


def nest(cm: Any, rows: int = 2, past: int = 9) -> None:
    """An extend-only batch with a history; pages are row after row."""
    pages = -(-(past + 2 * K) // cm.info.tokens_per_block)
    used = -(-(past + 1 + K) // cm.info.tokens_per_block)
    cm.info.nest_sequences(
        [(7 * i) % 200 for i in range(rows * (1 + K))],
        cu_seqlen=[i * (1 + K) for i in range(rows + 1)],
        input_pos=[past] * rows,
        batch_info=[0, 0, rows, rows * (1 + K), 0, 0],
        slot_idx=list(range(rows)),
        cache_loc_per_pool=[[row * (pages + 1) + i for row in range(rows) for i in range(used)]],
        cu_num_pages_per_pool=[[row * used for row in range(rows + 1)]],
        extra_page_per_seq_per_pool=[[row * (pages + 1) + used for row in range(rows)]],
        _gather_idx=[],
        _mask_scatter_indices=[],
        _gather_slot_idx=[],
    )


def step(pipeline: Any, rows: int = 2, past: int = 9, fresh: bool = False) -> Any:
    """Run the model on such a batch; `fresh`: on empty caches."""
    if fresh:
        for cache in pipeline.cm.kv_cache_manager.resources.values():
            cache.zero_()
    nest(pipeline.cm, rows, past)
    with torch.no_grad():
        return pipeline.model(pipeline.cm)
