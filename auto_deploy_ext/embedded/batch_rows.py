"""The lists that a batch is nested from, row by row: the engine's rows, and the rows that fill a captured size up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

NO_PAGE = -1


@dataclass
class BatchRows:
    """What `SequenceInfo.nest_sequences` is given.

    Attributes:
        input_ids: tokens of all rows; 0 where the device alone has them.
        cu_seqlen: where each row begins among them.
        input_pos: cached tokens of each row; the most there can be where the device alone knows.
        slot_idx: state slot of each row.
        prompt_lens: tokens of each row's prompt.
        cache_loc: pages of all rows.
        cu_num_pages: where each row begins among them.
        extra_pages: page that each row may get on the device.
        gather_idx: for each token that the device has, where it is in the previous step's next tokens.
        scatter_idx: and where it belongs in `input_ids`.
        late_rows: for the rows right after the prefills, as far as the device alone knows their lengths: their rows
            in the previous step.
    """

    input_ids: list[int] = field(default_factory=list)
    cu_seqlen: list[int] = field(default_factory=lambda: [0])
    input_pos: list[int] = field(default_factory=list)
    slot_idx: list[int] = field(default_factory=list)
    prompt_lens: list[int] = field(default_factory=list)
    cache_loc: list[int] = field(default_factory=list)
    cu_num_pages: list[int] = field(default_factory=lambda: [0])
    extra_pages: list[int] = field(default_factory=list)
    gather_idx: list[int] = field(default_factory=list)
    scatter_idx: list[int] = field(default_factory=list)
    late_rows: list[int] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return len(self.input_pos)

    def add(self, tokens: Sequence[int], input_pos: int, slot: int, prompt_len: int, pages: Sequence[int]) -> None:
        """Append a row.

        Args:
            tokens: its tokens.
            input_pos: tokens before them in its caches.
            slot: its state slot.
            prompt_len: tokens of its prompt.
            pages: those that hold `input_pos + len(tokens)` tokens, and then its extra page or `NO_PAGE`.
        """
        self.input_ids += tokens
        self.cu_seqlen.append(len(self.input_ids))
        self.input_pos.append(input_pos)
        self.slot_idx.append(slot)
        self.prompt_lens.append(prompt_len)
        self.cache_loc += pages[:-1]
        self.cu_num_pages.append(len(self.cache_loc))
        self.extra_pages.append(pages[-1])

    def gather_last(self, previous_row: int) -> None:
        """Have the last row's tokens taken from a row of the previous step's next tokens, which is as long."""
        start, end = self.cu_seqlen[-2:]
        first = previous_row * (end - start)
        self.gather_idx += range(first, first + end - start)
        self.scatter_idx += range(start, end)

    def metadata(self) -> dict[str, Any]:
        """Keyword arguments of `nest_sequences`, without `batch_info` and what comes from the device."""
        return {
            "input_ids": self.input_ids,
            "cu_seqlen": self.cu_seqlen,
            "input_pos": self.input_pos,
            "slot_idx": self.slot_idx,
            "prompt_lens": self.prompt_lens,
            "cache_loc_per_pool": [self.cache_loc],
            "cu_num_pages_per_pool": [self.cu_num_pages],
            "extra_page_per_seq_per_pool": [self.extra_pages],
            "_gather_idx": self.gather_idx,
            "_mask_scatter_indices": self.scatter_idx,
            "_gather_slot_idx": self.late_rows,
        }
