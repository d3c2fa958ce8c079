"""Example batches set on an interface, one for each kind of batch that an engine makes."""

from __future__ import annotations

import inspect
from typing import Any

#: variant names in the order in which a dispatcher tries them: the batch of the steady state comes first.
KINDS = ("extend", "mixed", "prefill", "decode")


def rows_of(kind: str, draft_len: int, max_batch_size: int) -> list[tuple[int, int]]:
    """The rows of an example batch as `(tokens, tokens already cached)`, prefill rows before others.

    Raises:
        ValueError: the kind needs more rows than `max_batch_size`.
    """
    prefill, extend, decode = (5, 0), (1 + draft_len, 4), (1, 4)
    rows = {
        "prefill": [prefill, (3, 0)],
        "extend": [extend, extend],
        "mixed": [prefill, (3, 0), extend, extend],
        "decode": [decode, decode],
    }[kind]
    if kind == "mixed" and max_batch_size < len(rows):
        rows = [prefill, extend]
    if kind == "mixed" and max_batch_size < 2:
        raise ValueError("a mixed batch needs two rows")
    return rows if kind == "mixed" else rows[:max_batch_size]


def set_batch(interface: Any, kind: str, draft_len: int) -> None:
    """Nest an example batch of `kind` into the interface, with pages and slots of its own and zeros as tokens.

    Args:
        interface: a CachedSequenceInterface; `max_batch_size`, `max_num_tokens` and `tokens_per_block` are respected.
        kind: `prefill`, `extend`, `mixed` or `decode`.
        draft_len: drafted tokens of an extend row.

    Raises:
        ValueError: the interface is too small for such a batch.
    """
    info = interface.info
    rows = rows_of(kind, draft_len, int(info.max_batch_size))
    lengths = [tokens for tokens, _ in rows]
    if sum(lengths) > int(info.max_num_tokens):
        raise ValueError(f"a {kind} batch of {sum(lengths)} tokens exceeds max_num_tokens={info.max_num_tokens}")
    cu_seqlen = [0]
    for length in lengths:
        cu_seqlen.append(cu_seqlen[-1] + length)
    prefill = [length for length, (_, cached) in zip(lengths, rows, strict=True) if cached == 0]
    extend = [length for length, (_, cached) in zip(lengths, rows, strict=True) if cached and kind != "decode"]
    decode = len(rows) if kind == "decode" else 0
    pages = [-(-(tokens + cached) // info.tokens_per_block) for tokens, cached in rows]
    cu_pages = [0]
    for count in pages:
        cu_pages.append(cu_pages[-1] + count)
    info.nest_sequences(
        [0] * cu_seqlen[-1],
        cu_seqlen,
        [cached for _, cached in rows],
        batch_info=[len(prefill), sum(prefill), len(extend), sum(extend), decode, decode],
        slot_idx=list(range(len(rows))),
        **page_arguments(info, list(range(cu_pages[-1])), cu_pages, [-1] * len(rows)),
    )


def page_arguments(
    info: Any, cache_loc: list[int], cu_num_pages: list[int], extra_page_per_seq: list[int]
) -> dict[str, Any]:
    """The keyword arguments by which `nest_sequences` is given pages, as lists per pool or, by early releases, as such.

    A pool that is not given has the pages of the first.
    """
    pages = {"cache_loc": cache_loc, "cu_num_pages": cu_num_pages, "extra_page_per_seq": extra_page_per_seq}
    parameters = inspect.signature(info.nest_sequences).parameters
    if "cache_loc_per_pool" in parameters:
        return {f"{name}_per_pool": [values] for name, values in pages.items()}
    return pages
