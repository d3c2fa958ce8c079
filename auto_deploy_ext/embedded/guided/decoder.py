"""The guided decoder: token masks that host functions fill in the order of the stream, also inside captured graphs.

What happens in one forward, on the stream:

1. target: a host function fetches the batch's snapshot and fills a mask for every row of logits, following each row's
   drafts as far as the grammar does; the masks are copied to the device and applied, the sampled tokens copied back;
2. draft i: a host function takes what came back (for the first draft: the tokens that verification accepts; then the
   draft before) and fills one mask per sequence; copied and applied likewise. After the last, drafts are rolled back.

Snapshots are queued by the host before each forward, so a captured graph works on the batch that it is replayed for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...hostfuncs import HostFuncOwner, hostfunc, use_owner
from .grammar import BITS, BitMask, GrammarState


class GuidedError(RuntimeError):
    """The guided decoder is used in a way that would give wrong masks, or a grammar refused a token it had allowed."""


@dataclass(frozen=True)
class GuidedRow:
    """One sequence of a batch.

    Attributes:
        state: where it is in its grammar; None: it is not constrained.
        drafts: the drafted tokens that the target verifies; it has a row of logits for each, and one more.
    """

    state: GrammarState | None
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Snapshot:
    """A batch as the host saw it when it queued it."""

    number: int
    rows: tuple[GuidedRow, ...]

    @property
    def num_logits(self) -> int:
        return sum(1 + len(row.drafts) for row in self.rows)


class _Mask:
    """A bitmask on the host and on the device, and how to apply it to logits."""

    def __init__(self, rows: int, vocab_size: int, token_ids: torch.Tensor, device: torch.device) -> None:
        words = -(-vocab_size // BITS)
        pinned = device.type == "cuda"
        self.host: BitMask = np.full((rows, words), -1, dtype=np.int32)
        self._staging = torch.full((rows, words), -1, dtype=torch.int32, pin_memory=pinned)
        self._staging_numpy = self._staging.numpy()
        self._device = torch.full((rows, words), -1, dtype=torch.int32, device=device)
        self._word = (token_ids // BITS).to(device)
        self._shift = (token_ids % BITS).to(torch.int32).to(device)

    def clear(self, rows: int) -> None:
        """Host side: allow everything in the first rows, those that are published; the others are nobody's."""
        self.host[:rows] = -1

    def publish(self, rows: int) -> None:
        """Host side: make what was filled ready to be copied."""
        self._staging_numpy[:rows] = self.host[:rows]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Copy the mask to the device and forbid what it forbids; ``[rows, tokens]``, in place."""
        mask = self._device[: logits.shape[0]]
        mask.copy_(self._staging[: logits.shape[0]], non_blocking=True)
        allowed = torch.bitwise_right_shift(mask[:, self._word], self._shift) & 1
        return logits.masked_fill_(allowed == 0, -torch.inf)


class GuidedDecoder:
    """Masks for all batches of an engine.

    Args:
        owner: whose host functions these are.
        vocab_size: width of the target's logits.
        max_batch_size: the most sequences in a batch.
        max_draft_len: the most drafted tokens per sequence; 0 without speculation.
        device: where logits are.
        d2t: int ``[draft vocabulary]``, to be added to a draft token to get the target's; None: the same vocabulary.

    Attributes:
        active: whether the forward that comes is guided.
        copies: copies between host and device enqueued so far, those of captures included.
    """

    def __init__(
        self,
        owner: HostFuncOwner,
        vocab_size: int,
        max_batch_size: int,
        max_draft_len: int,
        device: torch.device,
        d2t: torch.Tensor | None = None,
    ) -> None:
        self.owner = owner
        self.max_draft_len = max_draft_len
        self.active = False
        self.copies = 0
        max_rows = max_batch_size * (1 + max_draft_len)
        target_ids = torch.arange(vocab_size)
        draft_ids = target_ids if d2t is None else torch.arange(d2t.shape[0]) + d2t.detach().cpu().long()
        self._target_mask = _Mask(max_rows, vocab_size, target_ids, device)
        self._draft_mask = _Mask(max_batch_size, vocab_size, draft_ids, device)
        pinned = device.type == "cuda"
        self._sampled = torch.zeros(max_rows, dtype=torch.int32, pin_memory=pinned)
        self._drafted = torch.zeros(max_batch_size, dtype=torch.int32, pin_memory=pinned)
        self._sampled_numpy, self._drafted_numpy = self._sampled.numpy(), self._drafted.numpy()
        # Host side, before the forward.
        self._queue: deque[_Snapshot] = deque()
        self._draft_len = 0
        self._next_draft = 0
        # In host functions.
        self._batch: _Snapshot | None = None
        self._tentative: list[int] = []

    @property
    def queued(self) -> int:
        """Snapshots that no host function has fetched yet."""
        return len(self._queue)

    # ---------------------------------------------------------------- before and after a forward

    def add_batch(self, rows: Sequence[GuidedRow], draft_len: int, captured: bool = False) -> None:
        """Announce the batch of the next forward.

        An eager forward without a constrained row is left alone: no host function, no copy, nothing queued; it only
        waits for the last replay. A captured forward runs the work that it has captured, so its batch is always queued.

        Args:
            rows: prefill rows first, in the order of the logits.
            draft_len: tokens that the forward drafts for each row; 0: none.
            captured: the forward is the replay of a graph, or a capture followed by one.

        Raises:
            HostFuncError: host functions of earlier batches failed; only where this waits.
        """
        self.active = captured or any(row.state is not None for row in rows)
        self._draft_len = draft_len
        self._next_draft = 0
        if self.active:
            self._queue.append(_Snapshot(self.owner.batch, tuple(rows)))
        else:
            self.owner.drain()

    def end_batch(self) -> None:
        """After a forward has been launched: another one is unguided until it is announced."""
        self.active = False

    def reset(self) -> None:
        """After a forward that failed: wait for what is outstanding and forget what was queued.

        Raises:
            HostFuncError: host functions failed.
        """
        self.active = False
        try:
            self.owner.drain()
        finally:
            self._queue.clear()
            self._tentative = []

    # ---------------------------------------------------------------- in a forward, on the stream

    def mask_target(self, logits: torch.Tensor) -> torch.Tensor:
        """Forbid what the grammars forbid: ``[logit rows, vocab]``, in place.

        Raises:
            GuidedError: a capture of a forward whose batch is not guided.
        """
        if not self._is_guided():
            return logits
        self._next_draft = 0
        self._launch(self._fill_target, logits.shape[0])
        self.copies += 1
        return self._target_mask.apply(logits)

    def note_target(self, sampled: torch.Tensor) -> torch.Tensor:
        """Hand the target's tokens, int32 ``[logit rows]``, to the host functions that follow."""
        if self._is_guided():
            self.copies += 1
            self._sampled[: sampled.shape[0]].copy_(sampled, non_blocking=True)
            if self._draft_len == 0:
                self._launch(self._accept)
        return sampled

    def mask_draft(self, logits: torch.Tensor) -> torch.Tensor:
        """Forbid what cannot follow the drafts so far: ``[sequences, draft vocab]``, in place."""
        if not self._is_guided():
            return logits
        self._launch(self._fill_draft, logits.shape[0], self._next_draft, self._next_draft == self._draft_len - 1)
        self.copies += 1
        return self._draft_mask.apply(logits)

    def note_draft(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hand a draft, int32 ``[sequences]`` in the target's vocabulary, to the host functions that follow."""
        if self._is_guided():
            self._next_draft += 1
            if self._next_draft < self._draft_len:
                self.copies += 1
                self._drafted[: tokens.shape[0]].copy_(tokens, non_blocking=True)
        return tokens

    def _is_guided(self) -> bool:
        if not self.active and self.owner.layer.is_capturing():
            raise GuidedError(
                "a forward is captured while its batch is not guided: the graph would never mask anything; announce "
                "the batch with add_batch(..., captured=True)"
            )
        return self.active

    def _launch(self, function: Callable[..., None], *args: int | bool) -> None:
        with use_owner(self.owner):
            hostfunc(function)(*args)

    # ---------------------------------------------------------------- host functions

    def _fill_target(self, num_logits: int) -> None:
        """Fetch the batch and fill the mask of every row of logits."""
        self._batch = None
        self._target_mask.clear(num_logits)
        try:
            if not self._queue:
                raise GuidedError("no batch is queued: add_batch was not called before this forward")
            batch = self._queue.popleft()
            if batch.num_logits != num_logits:
                raise GuidedError(
                    f"batch {batch.number} has {batch.num_logits} rows of logits, the forward {num_logits}"
                )
            self._batch = batch
            self._tentative = [0] * len(batch.rows)
            self._each_row(batch, self._fill_row)
        finally:
            self._target_mask.publish(num_logits)

    def _fill_row(self, index: int, first: int, row: GuidedRow, state: GrammarState) -> None:
        followed = 0
        try:
            state.fill(self._target_mask.host, first)
            for token in row.drafts:
                if not state.accept(token):
                    break  # nothing behind a refused draft is ever accepted, so nothing there needs a mask
                followed += 1
                state.fill(self._target_mask.host, first + followed)
        finally:
            state.rollback(followed)

    def _accept(self) -> None:
        """Move every state past the tokens that verification accepts."""
        if self._batch is not None:
            self._each_row(self._batch, self._accept_row)

    def _accept_row(self, index: int, first: int, row: GuidedRow, state: GrammarState) -> None:
        sampled = self._sampled_numpy[first : first + 1 + len(row.drafts)].tolist()
        accepted = 0
        while accepted < len(row.drafts) and sampled[accepted] == row.drafts[accepted]:
            accepted += 1
        for token in sampled[: accepted + 1]:
            if state.terminated:
                return
            if not state.accept(token):
                raise GuidedError(f"request {state.name or index}: its grammar refuses the sampled token {token}")

    def _fill_draft(self, num_sequences: int, draft: int, last: bool) -> None:
        """Follow what was sampled before this draft and fill its mask; after the last draft, roll back."""
        self._draft_mask.clear(num_sequences)
        try:
            if draft == 0:
                self._accept()
            if self._batch is not None:
                self._each_row(self._batch, lambda index, first, row, state: self._follow(index, state, draft))
        finally:
            self._draft_mask.publish(num_sequences)
            if last and self._batch is not None:  # also where a row has failed: the others' drafts are no text
                self._each_row(self._batch, lambda index, first, row, state: self._roll_back(index, state))

    def _follow(self, index: int, state: GrammarState, draft: int) -> None:
        if self._tentative[index] != max(draft - 1, 0):
            return  # an earlier draft was refused
        if draft:
            if not state.accept(int(self._drafted_numpy[index])):
                return
            self._tentative[index] += 1
        state.fill(self._draft_mask.host, index)

    def _roll_back(self, index: int, state: GrammarState) -> None:
        state.rollback(self._tentative[index])
        self._tentative[index] = 0

    def _each_row(self, batch: _Snapshot, work: Callable[[int, int, GuidedRow, GrammarState], None]) -> None:
        """Do something for every constrained row; one that fails is given up, the others are not."""
        first, error = 0, None
        for index, row in enumerate(batch.rows):
            if row.state is not None and not row.state.failed:
                try:
                    work(index, first, row, row.state)
                except Exception as caught:
                    row.state.failed = True
                    error = error or caught
            first += 1 + len(row.drafts)
        if error is not None:
            raise error
