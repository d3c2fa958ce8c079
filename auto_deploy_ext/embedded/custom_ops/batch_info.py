"""BatchInfo: the thirteen host integers that describe a batch's layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_PREFILL, _PREFILL_TOKENS, _EXTEND, _EXTEND_TOKENS, _DECODE, _DECODE_TOKENS = range(6)
_MAX_SEQ_INFO = slice(6, 10)
_NUM_TOKENS_TO_GATHER, _GATHER_REQUIRED, _MAX_DRAFT_LEN = 10, 11, 12


class BatchInfo:
    """A batch's layout and gather information in one host tensor.

    Elements: [0..5] num_prefill, num_prefill_tokens, num_extend, num_extend_tokens, num_decode, num_decode_tokens;
    [6..9] max_context_length, max_blocks_per_seq, block_offset_multiplier, max_batch_size; [10] num_tokens_to_gather;
    [11] gather_required; [12] max_draft_len. Sequences come in the order prefill, extend, decode.

    Args:
        batch_info_host: ``[13]`` integer CPU tensor to wrap, without a copy (what :meth:`serialize` gave); zeros when
            ``None``.

    Raises:
        ValueError: the tensor has not 13 elements.
    """

    _NUM_ELEMENTS = 13

    def __init__(self, batch_info_host: torch.Tensor | None = None) -> None:
        if batch_info_host is None:
            batch_info_host = torch.zeros(self._NUM_ELEMENTS, dtype=torch.int32)
        if batch_info_host.numel() != self._NUM_ELEMENTS:
            raise ValueError(
                f"BatchInfo wraps {self._NUM_ELEMENTS} integers, got a tensor of {batch_info_host.numel()}; "
                "pass what BatchInfo.serialize() returned"
            )
        self._batch_info_host = batch_info_host
        #: the tensor's memory, made at the first use: an element of an array is read in a tenth of the time.
        self._array: np.ndarray | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the array out: a copy's would have memory of its own."""
        return {**self.__dict__, "_array": None}

    def __repr__(self) -> str:
        """Name the six counts."""
        p, pt, e, et, d, dt = self.counts()
        return f"BatchInfo(prefill={p}/{pt} tokens, extend={e}/{et} tokens, decode={d}/{dt} tokens)"

    def serialize(self) -> torch.Tensor:
        """Return the ``[13]`` host tensor itself: later updates show in it."""
        return self._batch_info_host

    def update(self, batch_info: Sequence[int]) -> None:
        """Set the six counts [0..5].

        Raises:
            ValueError: not six values.
        """
        if len(batch_info) != 6:
            raise ValueError(f"BatchInfo.update takes the six counts, got {len(batch_info)} values")
        self._values()[:6] = [int(v) for v in batch_info]

    def _values(self) -> np.ndarray:
        if self._array is None:
            self._array = self._batch_info_host.numpy()
        return self._array

    def counts(self) -> list[int]:
        """Return the six counts: rows and tokens of prefill, extend and decode."""
        return self._values()[:6].tolist()

    def is_generate_only(self) -> bool:
        """Return whether every sequence is a decode."""
        counts = self.counts()
        return counts[_PREFILL] == 0 and counts[_EXTEND] == 0

    def is_extend_only(self) -> bool:
        """Return whether there are sequences and every one is an extend."""
        counts = self.counts()
        return counts[_EXTEND] > 0 and counts[_PREFILL] == 0 and counts[_DECODE] == 0

    def get_num_sequences(self) -> tuple[int, int, int]:
        """Return (num_prefill, num_extend, num_decode)."""
        counts = self.counts()
        return counts[_PREFILL], counts[_EXTEND], counts[_DECODE]

    def get_num_tokens(self) -> tuple[int, int, int]:
        """Return (num_prefill_tokens, num_extend_tokens, num_decode_tokens)."""
        counts = self.counts()
        return counts[_PREFILL_TOKENS], counts[_EXTEND_TOKENS], counts[_DECODE_TOKENS]

    def get_total_num_sequences(self) -> int:
        """Return the number of sequences of any kind."""
        return sum(self.get_num_sequences())

    def get_total_num_tokens(self) -> int:
        """Return the number of tokens of any kind."""
        return sum(self.get_num_tokens())

    def get_absorbed_info(self) -> tuple[int, int, int]:
        """Return (num_prefill, num_prefill_tokens, num_decode) with extends counted as prefills."""
        counts = self.counts()
        return (
            counts[_PREFILL] + counts[_EXTEND],
            counts[_PREFILL_TOKENS] + counts[_EXTEND_TOKENS],
            counts[_DECODE],
        )

    def update_tokens_gather_info(self, num_tokens_to_gather: int, gather_required: bool) -> None:
        """Set how many tokens get logits, and whether they must be gathered out of all tokens."""
        self._values()[_NUM_TOKENS_TO_GATHER] = int(num_tokens_to_gather)
        self._values()[_GATHER_REQUIRED] = int(gather_required)

    def get_num_tokens_to_gather(self) -> int:
        """Return how many tokens get logits."""
        return int(self._values()[_NUM_TOKENS_TO_GATHER])

    def is_gather_required(self) -> bool:
        """Return whether the tokens that get logits must be gathered out of all tokens."""
        return bool(self._values()[_GATHER_REQUIRED])

    def update_max_draft_len(self, max_draft_len: int) -> None:
        """Set the draft length."""
        self._values()[_MAX_DRAFT_LEN] = int(max_draft_len)

    def get_max_draft_len(self) -> int:
        """Return the draft length, 0 without speculation."""
        return int(self._values()[_MAX_DRAFT_LEN])

    def update_max_seq_info(
        self, max_context_length: int, max_blocks_per_seq: int, block_offset_multiplier: int, max_batch_size: int
    ) -> None:
        """Set the four limits [6..9]."""
        limits = [max_context_length, max_blocks_per_seq, block_offset_multiplier, max_batch_size]
        self._values()[_MAX_SEQ_INFO] = limits

    def get_max_seq_info(self) -> tuple[int, int, int, int]:
        """Return (max_context_length, max_blocks_per_seq, block_offset_multiplier, max_batch_size)."""
        context, blocks, multiplier, batch = self._values()[_MAX_SEQ_INFO].tolist()
        return context, blocks, multiplier, batch
