"""Batches of metadata with scattered pages, runs of mutations for them, and all that can be told of them afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from auto_deploy_ext.embedded.custom_ops.attention_interface import SequenceInfo
from auto_deploy_ext.runtime import fused_mutations
from auto_deploy_ext.runtime.fused_mutations import COPY_NAME, OFFSET_NAME, SWITCH_NAME, Part

TOKENS_PER_BLOCK = 4


@dataclass(frozen=True)
class Row:
    """A sequence: its kind, its tokens in the batch, and those cached before."""

    kind: str
    tokens: int
    cached: int


@dataclass(frozen=True)
class Batch:
    """Rows in the order prefill, extend, decode; the pages of each pool lie scattered."""

    rows: tuple[Row, ...]
    pools: int
    pages_active: tuple[bool, ...]

    def make(self, device: str = "cpu") -> SequenceInfo:
        info = SequenceInfo(256, 8, 64, tokens_per_block=TOKENS_PER_BLOCK).to(device)
        if self.pools > 1:
            info.register_window_groups([64 * (pool + 1) for pool in range(self.pools)])
        info.update_cache_information(600)
        for pool, active in enumerate(self.pages_active):
            if active:
                info.activate_arg("cache_loc" + (f"_g{pool}" if pool else ""))
        lengths = [row.tokens for row in self.rows]
        counts = []
        for kind in ("prefill", "extend", "decode"):
            of_kind = [row.tokens for row in self.rows if row.kind == kind]
            counts += [len(of_kind), sum(of_kind)]
        pages = [-(-(row.tokens + row.cached) // TOKENS_PER_BLOCK) for row in self.rows]
        boundaries = [0, *torch.tensor(pages).cumsum(0).tolist()]
        per_pool = [[(7 * i + 100 * pool) % 599 for i in range(boundaries[-1])] for pool in range(self.pools)]
        info.nest_sequences(
            [3 * i + 1 for i in range(sum(lengths))],
            [0, *torch.tensor(lengths).cumsum(0).tolist()],
            [row.cached for row in self.rows],
            batch_info=counts,
            slot_idx=list(range(len(self.rows))),
            cache_loc_per_pool=per_pool,
            cu_num_pages_per_pool=[boundaries] * self.pools,
            extra_page_per_seq_per_pool=[
                [1000 * (pool + 1) + i for i in range(len(self.rows))] for pool in range(self.pools)
            ],
        )
        return info


def in_use(info: SequenceInfo) -> dict[str, list[Any]]:
    """Every buffer's device side as far as it counts, and what the host knows."""
    buffer = info._input_buffer
    state: dict[str, Any] = {}
    for name in buffer.tensor_names:
        count = buffer.get_current_length(name)
        if name.startswith("cache_loc"):
            pages = buffer.get_view(name.replace("cache_loc", "cu_num_pages"))
            count = min(count, int(pages[info.num_sequences]))
        state[name] = buffer.get_view(name)[:count].tolist()
    state["batch_info"] = info.batch_info.serialize().tolist()
    state["lengths"] = dict(buffer._lengths)
    state["versions"] = dict(buffer.device_version), dict(buffer.mirror_version)
    return state


def one_by_one(info: SequenceInfo, parts: Sequence[Part], operands: Sequence[torch.Tensor]) -> None:
    """Call each mutation of a run."""
    given = iter(operands)
    for part in parts:
        if part.name == SWITCH_NAME:
            info.switch_to_generate_()
        elif part.name == COPY_NAME:
            info.copy_(part.buffer, next(given), strict=part.strict)
        else:
            info.offset_pos_and_cache_(next(given))


def fused(info: SequenceInfo, parts: Sequence[Part], operands: Sequence[torch.Tensor]) -> None:
    """Do the same as one run."""
    fused_mutations.mutate_all(info, tuple(map(tuple, parts)), operands)


tokens = {"prefill": st.integers(1, 7), "extend": st.integers(2, 5), "decode": st.just(1)}
rows = st.lists(
    st.sampled_from(["prefill", "extend", "decode"]).flatmap(
        lambda kind: st.builds(Row, st.just(kind), tokens[kind], st.integers(13, 40))
    ),
    min_size=1,
    max_size=8,
).map(lambda found: tuple(sorted(found, key=lambda row: ("prefill", "extend", "decode").index(row.kind))))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    pools = draw(st.integers(1, 3))
    active = tuple(draw(st.lists(st.booleans(), min_size=pools, max_size=pools)))
    return Batch(draw(rows), pools, active if any(active) else (True,) * pools)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Batch, list[Part], list[torch.Tensor]]:
    """A batch, at most four mutations in any order, and their operands."""
    batch = draw(batches())
    n = len(batch.rows)
    parts: list[Part] = []
    operands: list[torch.Tensor] = []
    for name in draw(st.lists(st.sampled_from([SWITCH_NAME, OFFSET_NAME, "tokens", "gather"]), min_size=1, max_size=4)):
        integer = draw(st.sampled_from([torch.int32, torch.int64]))
        if name == SWITCH_NAME:
            parts.append(Part(name))
        elif name == OFFSET_NAME:
            parts.append(Part(name))
            change = st.integers(-TOKENS_PER_BLOCK + 1, TOKENS_PER_BLOCK)
            operands.append(torch.tensor(draw(st.lists(change, min_size=n, max_size=n)), dtype=integer))
        elif name == "tokens":
            parts.append(Part(COPY_NAME, "input_ids", False))
            operands.append(torch.arange(500, 500 + draw(st.integers(0, 64)), dtype=integer))
        else:
            parts.append(Part(COPY_NAME, "token_gather_indices", False))
            operands.append(torch.arange(draw(st.integers(1, 20)), dtype=integer))
    return batch, parts, operands
