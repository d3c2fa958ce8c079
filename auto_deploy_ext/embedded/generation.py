"""Continuous batching over an Eagle wrapper: requests join and leave, every step runs one forward.

With speculation a step runs prefill rows (new requests) and extend rows (one token and its drafts, to be verified);
without, prefill rows and decode rows through the target alone, which is the greedy reference on the same pipeline.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import torch

from .models.custom.modeling_eagle import EagleWrapper
from .pages import PageAllocator, SlotAllocator
from .requests import (
    GenerationResult,
    Request,
    RequestOutput,
    RequestTooLargeError,
    RunningSequence,
    TokenEvent,
)
from .shim.interface import CachedSequenceInterface

Progress = Callable[[int], None]
"""Called after every step with the number of tokens that it added."""

OnTokens = Callable[[TokenEvent], None]
"""Called for every request with the tokens that a step added to it, in the order of the batch."""


class Engine:
    """Runs requests on a wrapper and the interface that its caches live in.

    A request is admitted when a slot, its row in the token budget and the pages of its whole life are to be had, so a
    running request never has to wait or to be preempted. Admission is in order of submission.

    Args:
        model: exported wrapper, rewritten or not.
        cm: the interface whose caches the model was initialised with.
        speculative: verify and draft, or decode with the target alone.

    Attributes:
        on_tokens: told every request's new tokens while `step` runs; may be set at any time.

    Raises:
        ValueError: pages too small for the draft length.
    """

    def __init__(self, model: EagleWrapper, cm: CachedSequenceInterface, speculative: bool = True) -> None:
        """Take all slots and pages of the interface."""
        info = cm.info
        self.model = model
        self.cm = cm
        self.draft_len = model.max_draft_len if speculative else 0
        if info.tokens_per_block <= self.draft_len:
            raise ValueError(
                f"tokens_per_block is {info.tokens_per_block}, but max_draft_len {self.draft_len} needs pages of at "
                f"least {self.draft_len + 1} tokens: raise kv_cache_config.tokens_per_block or lower max_draft_len"
            )
        self.page_allocator = PageAllocator(info.num_blocks, info.tokens_per_block)
        self.slot_allocator = SlotAllocator(info.max_batch_size)
        self.steps = 0
        self.on_tokens: OnTokens | None = None
        self.batches: Counter[str] = Counter()
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: list[RunningSequence] = []
        self._outputs: dict[int, RequestOutput] = {}
        self._promised_pages: dict[int, int] = {}

    # ---------------------------------------------------------------- requests

    @property
    def has_work(self) -> bool:
        """Some request waits or runs."""
        return bool(self._waiting or self._running)

    def submit(self, request: Request) -> int:
        """Queue a request; its number orders the outputs.

        Raises:
            RequestTooLargeError: it could never run, with the limit that it breaks.
        """
        self._check_fits(request)
        request_id = len(self._outputs) + len(self._waiting) + len(self._running)
        self._waiting.append((request_id, request))
        return request_id

    def result(self) -> GenerationResult:
        """The outputs of all finished requests."""
        outputs = tuple(self._outputs[request_id] for request_id in sorted(self._outputs))
        accepted = tuple(map(sum, zip(*(output.accepted for output in outputs), strict=True)))
        return GenerationResult(outputs, self.steps, dict(self.batches), accepted)

    def _longest(self, request: Request) -> int:
        """Most tokens that the caches hold for a request at a time, those of drafts included."""
        in_prefill = len(request.prompt) + max(self.draft_len - 1, 0)
        # The last step starts without the last token, and its own drafts follow the K that it verifies.
        in_last_step = len(request.prompt) + request.max_new_tokens - 1 + max(2 * self.draft_len - 1, 0)
        return max(in_prefill, in_last_step if request.max_new_tokens > 1 else 0)

    def _most_pages(self, request: Request) -> int:
        """Most pages that a request owns at a time, its extra page included."""
        last_row_end = len(request.prompt) + request.max_new_tokens - 1 + self.draft_len
        return self.page_allocator.pages_for(last_row_end) + self._num_extra_pages

    @property
    def _num_extra_pages(self) -> int:
        """A draft loop may grow a page table by one page."""
        return 1 if self.draft_len > 1 else 0

    def _check_fits(self, request: Request) -> None:
        info = self.cm.info
        what = f"a prompt of {len(request.prompt)} tokens with max_new_tokens {request.max_new_tokens}"
        longest, pages = self._longest(request), self._most_pages(request)
        if longest > info.max_seq_len:
            raise RequestTooLargeError(
                f"{what} and draft length {self.draft_len} reaches {longest} tokens, max_seq_len is "
                f"{info.max_seq_len}: shorten the request or raise max_seq_len"
            )
        row = max(len(request.prompt), 1 + self.draft_len)
        if row > info.max_num_tokens:
            raise RequestTooLargeError(
                f"{what} needs {row} tokens in one step, max_num_tokens is {info.max_num_tokens}: "
                "shorten the prompt or raise max_num_tokens"
            )
        if pages > self.page_allocator.num_pages:
            raise RequestTooLargeError(
                f"{what} needs {pages} pages of {info.tokens_per_block} tokens, the cache has "
                f"{self.page_allocator.num_pages}: shorten the request or give the cache more memory"
            )

    def _admit(self) -> None:
        """Start waiting requests, in order, as long as they fit beside what runs."""
        max_num_tokens = self.cm.info.max_num_tokens
        row_len = 1 + self.draft_len
        while self._waiting and self.slot_allocator.num_free:
            request_id, request = self._waiting[0]
            step_tokens = sum(len(seq.next_input) for seq in self._running) + len(request.prompt)
            later_tokens = row_len * (len(self._running) + 1)
            pages = sum(self._promised_pages.values()) + self._most_pages(request)
            if max(step_tokens, later_tokens) > max_num_tokens or pages > self.page_allocator.num_pages:
                return
            self._waiting.popleft()
            self._promised_pages[request_id] = self._most_pages(request)
            slot = self.slot_allocator.take()
            self._running.append(RunningSequence(request_id, request, slot, list(request.prompt)))

    def _finish(self, seq: RunningSequence) -> None:
        self._running.remove(seq)
        self.slot_allocator.give_back(seq.slot)
        self.page_allocator.release(seq.request_id)
        del self._promised_pages[seq.request_id]
        accepted = tuple(seq.accepted[length] for length in range(self.draft_len + 1)) if self.draft_len else ()
        self._outputs[seq.request_id] = RequestOutput(seq.request.prompt, tuple(seq.tokens), accepted)

    # ---------------------------------------------------------------- steps

    def step(self) -> int:
        """Admit what fits and run one forward; gives the number of tokens that it added to the outputs."""
        self._admit()
        rows = sorted(self._running, key=lambda seq: not seq.is_prefill)
        if not rows:
            return 0
        self._nest(rows)
        with torch.no_grad():
            new_tokens, next_inputs = self._run_speculative() if self.draft_len else self._run_greedy()
        self.steps += 1
        added = 0
        for seq, tokens, next_input in zip(rows, new_tokens, next_inputs, strict=True):
            before = len(seq.tokens)
            drafted = 0 if seq.is_prefill else len(tokens) - 1
            if not seq.is_prefill and self.draft_len:
                seq.accepted[drafted] += 1
            # What a row's accepted part put into the caches: all of a prompt, else the token and its accepted drafts.
            seq.cached += len(seq.next_input) if seq.is_prefill else len(tokens)
            seq.next_input = next_input
            finished = seq.extend(tokens)
            kept = tuple(seq.tokens[before:])
            added += len(kept)
            if finished:
                self._finish(seq)
            if self.on_tokens is not None:
                self.on_tokens(TokenEvent(seq.request_id, kept, min(drafted, len(kept)), finished))
        return added

    def _nest(self, rows: Sequence[RunningSequence]) -> None:
        """Put the next input of every row, and where its caches are, into the interface."""
        input_ids: list[int] = []
        cache_loc: list[int] = []
        extra_pages: list[int] = []
        cu_seqlen, cu_num_pages = [0], [0]
        for seq in rows:
            input_ids += seq.next_input
            cu_seqlen.append(len(input_ids))
            num_pages = self.page_allocator.pages_for(seq.cached + len(seq.next_input))
            pages = self.page_allocator.grow(seq.request_id, num_pages + self._num_extra_pages)
            cache_loc += pages[:num_pages]
            cu_num_pages.append(len(cache_loc))
            extra_pages.append(pages[num_pages] if len(pages) > num_pages else -1)
        self.cm.info.nest_sequences(
            input_ids,
            cu_seqlen=cu_seqlen,
            input_pos=[seq.cached for seq in rows],
            batch_info=self._batch_info(rows),
            slot_idx=[seq.slot for seq in rows],
            prompt_lens=[len(seq.request.prompt) for seq in rows],
            cache_loc_per_pool=[cache_loc],
            cu_num_pages_per_pool=[cu_num_pages],
            extra_page_per_seq_per_pool=[extra_pages],
        )

    def _batch_info(self, rows: Sequence[RunningSequence]) -> list[int]:
        """Rows and tokens of prefill, extend and decode; also counts the kind of batch."""
        prefill = [len(seq.next_input) for seq in rows if seq.is_prefill]
        generate = [len(seq.next_input) for seq in rows if not seq.is_prefill]
        generate_kind = "extend" if self.draft_len else "decode"
        self.batches["prefill" if not generate else "mixed" if prefill else generate_kind] += 1
        counts = [len(generate), sum(generate)]
        return [len(prefill), sum(prefill), *([*counts, 0, 0] if self.draft_len else [0, 0, *counts])]

    def _run_speculative(self) -> tuple[list[list[int]], list[list[int]]]:
        """New tokens of every row, and its next input."""
        output = self.model(self.cm)
        lens = output.new_tokens_lens.tolist()
        new_tokens = [tokens[:length] for tokens, length in zip(output.new_tokens.tolist(), lens, strict=True)]
        return new_tokens, output.next_new_tokens.tolist()

    def _run_greedy(self) -> tuple[list[list[int]], list[list[int]]]:
        """One new token of every row, which is its next input."""
        sampled = self.model.sample_target(self.model.forward_target(self.cm))
        tokens = [[token] for token in sampled.tolist()]
        return tokens, tokens


def generate(
    model: EagleWrapper,
    cm: CachedSequenceInterface,
    prompts: Iterable[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    eos_token_ids: Iterable[int] = (),
    speculative: bool = True,
    progress: Progress | None = None,
    on_tokens: OnTokens | None = None,
) -> GenerationResult:
    """Continue prompts greedily, as many at a time as fit.

    Args:
        model: exported wrapper, rewritten or not.
        cm: its interface; nothing else may use it meanwhile.
        prompts: token ids.
        max_new_tokens: for all prompts, or one per prompt.
        eos_token_ids: tokens that end a continuation.
        speculative: draft and verify, or decode with the target alone.
        progress: told after each step how many tokens it added.
        on_tokens: told each request's new tokens as soon as they are known.

    Raises:
        RequestTooLargeError: a prompt that could never run; nothing has been generated then.
        ValueError: pages too small for the draft length, or counts that differ.

    Example:
        >>> result = generate(model, cm, [[1, 2, 3], [4, 5]], max_new_tokens=8)
        >>> result.outputs[0].tokens, result.acceptance_length
    """
    rows = [tuple(prompt) for prompt in prompts]
    limits = [max_new_tokens] * len(rows) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if len(limits) != len(rows):
        raise ValueError(f"{len(rows)} prompts, but {len(limits)} values of max_new_tokens")
    engine = Engine(model, cm, speculative)
    engine.on_tokens = on_tokens
    for prompt, limit in zip(rows, limits, strict=True):
        engine.submit(Request(prompt, limit, frozenset(eos_token_ids)))
    while engine.has_work:
        added = engine.step()
        if progress is not None:
            progress(added)
    return engine.result()
