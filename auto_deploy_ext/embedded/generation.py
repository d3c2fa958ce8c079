"""Continuous batching over an Eagle wrapper: requests join and leave, every step runs one forward.

With speculation a step runs prefill rows (new requests) and extend rows (one token and its drafts, to be verified);
without, prefill rows and decode rows through the target alone, which is the greedy reference on the same pipeline.
"""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import ClassVar

import torch

from auto_deploy_ext.effects import buffer_of, is_mirror
from auto_deploy_ext.orchestrator.rebound import ReboundForward
from auto_deploy_ext.runtime import host_mirrors, late_offset, metadata_arithmetic

from .batch_rows import NO_PAGE, BatchRows
from .compile.batch_sizes import padded_batch_size
from .custom_ops.metadata_mutations import OFFSET_WRITES
from .in_flight import ResultCopies, StepInFlight
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


#: owner of the page that rows share which only fill a batch up; requests are numbered from 0.
_NOBODY = -1


class _Late(Enum):
    """What the host does not know of a row when it launches it, in the order of the rows in a batch."""

    PROMPT = "nothing, and the row runs its prompt"
    LENGTH = "its tokens and how many there are before them"
    NOTHING = "its tokens at most"


_LATE_ORDER = {late: place for place, late in enumerate(_Late)}


class Engine:
    """Runs requests on a wrapper and the interface that its caches live in.

    A request is admitted when a slot, its row in the token budget and the pages of its whole life are to be had, so a
    running request never has to wait or to be preempted. Admission is in order of submission.

    With overlap, `step` launches the next step first and takes the results of the one before it then, so the device
    never waits for the host:

    1. The next step's tokens are gathered on the device from what the step in flight leaves there. So are its lengths:
       a row is nested as if all drafts in flight were accepted, on the pages that takes, and moved back on the device
       by those that were not: by at most K tokens, which drops at most one page. Its extra page then serves the draft
       loop alone.
    2. A row that certainly ends with the step in flight is not launched again. One that turns out to have ended was
       launched once for nothing; what that gives is dropped, and its slot and its pages are given back when the results
       of its last step have come. All steps run on one stream, so whoever gets them writes after that step.
    3. Mirrors are stale when such a step begins. A rewritten wrapper brings up to date what it reads; for any other
       the engine does.

    Batches that only verify (or only decode) are filled up to a batch size that the model has captured. The rows added
    share one page that nobody else gets, and the spare slot.

    Args:
        model: exported wrapper, rewritten or not.
        cm: the interface whose caches the model was initialised with.
        speculative: verify and draft, or decode with the target alone.
        overlap: launch each step before the tokens of the one before it are read.

    Attributes:
        on_tokens: told every request's new tokens while `step` runs; may be set at any time.

    Raises:
        ValueError: pages too small for the draft length.
    """

    #: whether batches are filled up to the sizes that the model has captured.
    fills_up: ClassVar[bool] = True

    def __init__(
        self, model: EagleWrapper, cm: CachedSequenceInterface, speculative: bool = True, overlap: bool = False
    ) -> None:
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
        self._untold: deque[TokenEvent] = deque()
        self.batches: Counter[str] = Counter()
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: list[RunningSequence] = []
        self._outputs: dict[int, RequestOutput] = {}
        self._promised_pages: dict[int, int] = {}
        self._copies = ResultCopies(info.device, info.max_batch_size, 1 + self.draft_len) if overlap else None
        self._in_flight: StepInFlight | None = None
        self._batch_sizes: tuple[int, ...] = ()
        self._spare_page = NO_PAGE
        if self.fills_up:
            self._fill_up_to(tuple(getattr(model, "captured_batch_sizes", ())))

    def _fill_up_to(self, sizes: tuple[int, ...]) -> None:
        """Fill batches up to these numbers of rows from now on; the rows that are added get a page."""
        self._batch_sizes = sizes
        if sizes and self._spare_page == NO_PAGE:
            self._promised_pages[_NOBODY] = 1
            (self._spare_page,) = self.page_allocator.grow(_NOBODY, 1)

    # ---------------------------------------------------------------- requests

    @property
    def has_work(self) -> bool:
        """Some request waits or runs, or a step is in flight."""
        return bool(self._waiting or self._running or self._in_flight)

    def submit(self, request: Request) -> int:
        """Queue a request; its number orders the outputs.

        Raises:
            RequestTooLargeError: it could never run, with the limit that it breaks.
            ValueError: a token that the target does not know.
        """
        self._check_known(request)
        self._check_fits(request)
        request_id = len(self._outputs) + len(self._waiting) + len(self._running)
        self._waiting.append((request_id, request))
        return request_id

    def result(self) -> GenerationResult:
        """The outputs of all finished requests."""
        outputs = tuple(self._outputs[request_id] for request_id in sorted(self._outputs))
        accepted = tuple(map(sum, zip(*(output.accepted for output in outputs), strict=True)))
        return GenerationResult(outputs, self.steps, dict(self.batches), accepted)

    def _lookahead(self, request: Request) -> int:
        """Most tokens by which a row of a request is nested further than the host knows it to be."""
        # A row whose length is late verifies after one that verifies: the third step, with at least three tokens.
        return self.draft_len if self._copies is not None and request.max_new_tokens > 2 else 0

    def _longest(self, request: Request) -> int:
        """Most tokens that the caches hold for a request at a time, those of drafts included."""
        in_prefill = len(request.prompt) + max(self.draft_len - 1, 0)
        # The last step starts without the last token, and its own drafts follow the K that it verifies.
        in_last_step = len(request.prompt) + request.max_new_tokens - 1 + max(2 * self.draft_len - 1, 0)
        return max(in_prefill, in_last_step + self._lookahead(request) if request.max_new_tokens > 1 else 0)

    def _most_pages(self, request: Request) -> int:
        """Most pages that a request owns at a time, its extra page included."""
        last_row_end = len(request.prompt) + request.max_new_tokens - 1 + self.draft_len + self._lookahead(request)
        return self.page_allocator.pages_for(last_row_end) + self._num_extra_pages

    @property
    def _num_extra_pages(self) -> int:
        """A draft loop may grow a page table by one page."""
        return 1 if self.draft_len > 1 else 0

    def _check_known(self, request: Request) -> None:
        """Raise ValueError for a token that the target does not know: on a GPU, looking it up ends the process."""
        vocab_size = self.model.target_model.get_input_embeddings().weight.shape[0]
        for token in request.prompt:
            if not 0 <= token < vocab_size:
                raise ValueError(f"a prompt has token {token}, the model knows 0 to {vocab_size - 1}")

    def _check_fits(self, request: Request) -> None:
        info = self.cm.info
        what = f"a prompt of {len(request.prompt)} tokens with max_new_tokens {request.max_new_tokens}"
        longest, pages = self._longest(request), self._most_pages(request)
        if longest > info.max_seq_len:
            ahead = " and overlap" if self._lookahead(request) else ""
            raise RequestTooLargeError(
                f"{what} and draft length {self.draft_len}{ahead} reaches {longest} tokens, max_seq_len is "
                f"{info.max_seq_len}: shorten the request or raise max_seq_len"
            )
        row = max(len(request.prompt), 1 + self.draft_len)
        if row > info.max_num_tokens:
            raise RequestTooLargeError(
                f"{what} needs {row} tokens in one step, max_num_tokens is {info.max_num_tokens}: "
                "shorten the prompt or raise max_num_tokens"
            )
        available = self.page_allocator.num_pages - self._promised_pages.get(_NOBODY, 0)
        if pages > available:
            raise RequestTooLargeError(
                f"{what} needs {pages} pages of {info.tokens_per_block} tokens, the cache has "
                f"{available}: shorten the request or give the cache more memory"
            )

    def _admit(self) -> None:
        """Start waiting requests, in order, as long as they fit beside what runs."""
        max_num_tokens = self.cm.info.max_num_tokens
        row_len = 1 + self.draft_len
        while self._waiting and self.slot_allocator.num_free:
            request_id, request = self._waiting[0]
            running = sum(row_len if seq.launches else len(seq.next_input) for seq in self._running)
            step_tokens = running + len(request.prompt)
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
        accepted = tuple(seq.accepted[length] for length in range(self.draft_len + 1)) if self.draft_len else ()
        self._outputs[seq.request_id] = RequestOutput(seq.request.prompt, tuple(seq.tokens), accepted)
        if not seq.launches:
            self._release(seq)

    def _release(self, seq: RunningSequence) -> None:
        """Give back what a sequence owns that no launched step uses."""
        self.slot_allocator.give_back(seq.slot)
        self.page_allocator.release(seq.request_id)
        del self._promised_pages[seq.request_id]

    # ---------------------------------------------------------------- steps

    def step(self) -> int:
        """Admit what fits and run one forward; gives the number of tokens that became known and were added to outputs.

        With overlap these are the tokens of the step before.
        """
        self._admit()
        rows = self._next_rows()
        if self._copies is not None:
            launched = self._launch(rows, self._copies) if rows else None
            before, self._in_flight = self._in_flight, launched
            return self._retire(before) if before is not None else 0
        if not rows:
            return 0
        self._nest(rows)
        with torch.no_grad():
            new_tokens, next_inputs = self._run_speculative() if self.draft_len else self._run_greedy()
        self.steps += 1
        # Rows that only fill the batch up come last.
        new_tokens, next_inputs = new_tokens[: len(rows)], next_inputs[: len(rows)]
        added = 0
        for seq, tokens, next_input in zip(rows, new_tokens, next_inputs, strict=True):
            was_prefill, seq.next_input = seq.is_prefill, next_input
            added += self._take(seq, tokens, was_prefill)
        self._tell()
        return added

    def _next_rows(self) -> list[RunningSequence]:
        """The rows of the next step: those with a prompt first, those whose length the host does not know next."""
        rows = [seq for seq in self._running if not (seq.launches and seq.ends_in_flight)]
        return sorted(rows, key=lambda seq: _LATE_ORDER[self._lateness(seq)])

    def _lateness(self, seq: RunningSequence) -> _Late:
        if seq.is_prefill:
            return _Late.PROMPT
        return _Late.LENGTH if self.draft_len and seq.launches and seq.cached else _Late.NOTHING

    def _take(self, seq: RunningSequence, tokens: Sequence[int], was_prefill: bool) -> int:
        """Add a row's new tokens to its output; gives how many of them are part of it."""
        before = len(seq.tokens)
        drafted = 0 if was_prefill else len(tokens) - 1
        if not was_prefill and self.draft_len:
            seq.accepted[drafted] += 1
        # What a row's accepted part put into the caches: all of a prompt, else the token and its accepted drafts.
        seq.cached += len(seq.request.prompt) if was_prefill else len(tokens)
        finished = seq.extend(tokens)
        kept = tuple(seq.tokens[before:])
        if finished:
            self._finish(seq)
        if self.on_tokens is not None:
            self._untold.append(TokenEvent(seq.request_id, kept, min(drafted, len(kept)), finished))
        return len(kept)

    def _tell(self) -> None:
        """Tell what `_take` has noted; after all rows, so that a listener that raises leaves no row behind."""
        while self._untold:
            event = self._untold.popleft()
            if self.on_tokens is not None:
                self.on_tokens(event)

    def _nest(self, rows: Sequence[RunningSequence]) -> None:
        """Put the next input of every row, and where its caches are, into the interface."""
        batch = BatchRows()
        for seq in rows:
            self._add_row(batch, seq)
        counts = self._batch_info(rows)
        if not counts[0]:
            counts = self._fill_up(batch, counts)
        late_lens = None
        if batch.late_rows:
            assert self._in_flight is not None and self._in_flight.lens is not None
            late_lens = self._in_flight.lens - self.draft_len
        self.cm.info.nest_sequences(
            **batch.metadata(),
            batch_info=counts,
            _ungathered_input_ids=self._in_flight.next_tokens if self._in_flight is not None else None,
            _ungathered_new_lens=late_lens,
        )

    def _add_row(self, batch: BatchRows, seq: RunningSequence) -> None:
        tokens, cached = seq.next_input, seq.cached
        if seq.launches:
            tokens = [0] * (1 + self.draft_len)
            # Exact after a prompt and without drafts, else as if all drafts in flight were accepted.
            cached = cached + 1 + self.draft_len if cached else len(seq.request.prompt)
        num_pages = self.page_allocator.pages_for(cached + len(tokens))
        owned = self.page_allocator.grow(seq.request_id, num_pages + self._num_extra_pages)
        extra = owned[num_pages] if len(owned) > num_pages else NO_PAGE
        batch.add(tokens, cached, seq.slot, len(seq.request.prompt), [*owned[:num_pages], extra])
        if seq.launches:
            assert self._in_flight is not None
            row = self._in_flight.row_of(seq)
            batch.gather_last(row)
            if self._lateness(seq) is _Late.LENGTH:
                batch.late_rows.append(row)

    def _batch_info(self, rows: Sequence[RunningSequence]) -> list[int]:
        """Rows and tokens of prefill, extend and decode; also counts the kind of batch."""
        lens = [(seq.is_prefill, 1 + self.draft_len if seq.launches else len(seq.next_input)) for seq in rows]
        prefill = [length for is_prefill, length in lens if is_prefill]
        generate = [length for is_prefill, length in lens if not is_prefill]
        generate_kind = "extend" if self.draft_len else "decode"
        self.batches["prefill" if not generate else "mixed" if prefill else generate_kind] += 1
        counts = [len(generate), sum(generate)]
        return [len(prefill), sum(prefill), *([*counts, 0, 0] if self.draft_len else [0, 0, *counts])]

    def _fill_up(self, batch: BatchRows, counts: list[int]) -> list[int]:
        """Add rows up to a captured number of rows, if there is one and it fits; gives the new counts."""
        info, row_len = self.cm.info, 1 + self.draft_len
        size = padded_batch_size(self._batch_sizes, batch.num_rows)
        if size > info.max_batch_size or size * row_len > info.max_num_tokens:
            return counts
        while batch.num_rows < size:
            batch.add([0] * row_len, 0, info.max_num_state_slots - 1, 1, [self._spare_page] * 2)
        kinds = [size, size * row_len]
        return [0, 0, *([*kinds, 0, 0] if self.draft_len else [0, 0, *kinds])]

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

    # ---------------------------------------------------------------- overlap

    @torch.no_grad()
    def _launch(self, rows: Sequence[RunningSequence], copies: ResultCopies) -> StepInFlight:
        """Set the next step up and launch it; the host waits for nothing that it does not have to plan with."""
        num_prefill = sum(seq.is_prefill for seq in rows)
        self._nest(rows)
        info = self.cm.info
        self._announce_lengths()
        try:
            self._bring_mirrors()
            drafter = self.model.draft_model if self.draft_len else None
            with copies.watching(self.model, drafter):
                if self.draft_len:
                    output = self.model(self.cm)
                    tokens, lens, next_tokens = output.new_tokens, output.new_tokens_lens, output.next_new_tokens
                else:
                    tokens = self.model.sample_target(self.model.forward_target(self.cm)).view(-1, 1)
                    lens, next_tokens = None, tokens
        finally:
            late_offset.withdraw(info)
        self.steps += 1
        for seq in rows:
            seq.launches += 1
        return StepInFlight(rows, num_prefill, next_tokens, lens, copies.start(tokens, lens))

    def _announce_lengths(self) -> None:
        """Let the host plan with the lengths as soon as it can know them, which is before the step in flight ends."""
        info, before = self.cm.info, self._in_flight
        late_rows = info._input_buffer.get_host_memory("_gather_slot_idx", truncate=True).clone()
        if before is None or not late_rows.numel():
            return
        num_prefill, num_rows = info.batch_info.get_num_sequences()[0], info.num_sequences

        def offset() -> tuple[torch.Tensor, bool]:
            waited = before.results.wait()
            lens = before.results.lens() - self.draft_len
            return metadata_arithmetic.overlap_offset(lens, late_rows, num_prefill, num_rows), waited

        written = {name + suffix for name in OFFSET_WRITES for suffix in info._pool_suffixes}
        late_offset.announce(info, written, offset)

    def _bring_mirrors(self) -> None:
        """Where no plan does, bring those mirrors up to date that consumers may read and that nesting left behind."""
        bound = self.model.__dict__.get("forward")
        if self.draft_len and isinstance(bound, ReboundForward) and not bound.bypassed:
            return
        info = self.cm.info
        active = {buffer_of(name) for name in info._active_args if is_mirror(name)}
        stale = active.intersection(host_mirrors.stale_names(info))
        if stale:
            late_offset.settle(info, stale)
            host_mirrors.move(info, stale.intersection(host_mirrors.stale_names(info)), trigger="overlap")

    def _retire(self, step: StepInFlight) -> int:
        """Take the results of a launched step; gives the number of tokens that it added to the outputs."""
        new_tokens = step.results.tokens()
        added = 0
        for row, (seq, tokens) in enumerate(zip(step.rows, new_tokens, strict=False)):
            seq.launches -= 1
            if seq.has_ended:
                self._release(seq)
            else:
                added += self._take(seq, tokens, row < step.prefills)
        self._tell()
        return added


def _token_ids(prompt: Sequence[int], number: int) -> tuple[int, ...]:
    try:
        return tuple(operator.index(token) for token in prompt)
    except TypeError as error:
        shown = repr(prompt)
        shown = shown if len(shown) < 60 else f"{shown[:57]}..."
        raise ValueError(f"prompt {number} should be a sequence of token ids, which are ints: {shown}") from error


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
    overlap: bool = False,
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
        overlap: launch each step before the tokens of the one before it are read; the tokens are the same.

    Raises:
        RequestTooLargeError: a prompt that could never run; nothing has been generated then.
        ValueError: pages too small for the draft length, counts that differ, or what are no tokens of the model.

    Example:
        >>> result = generate(model, cm, [[1, 2, 3], [4, 5]], max_new_tokens=8)
        >>> result.outputs[0].tokens, result.acceptance_length
    """
    rows = [_token_ids(prompt, number) for number, prompt in enumerate(prompts)]
    limits = list(max_new_tokens) if isinstance(max_new_tokens, Iterable) else [max_new_tokens] * len(rows)
    if len(limits) != len(rows):
        raise ValueError(f"{len(rows)} prompts, but {len(limits)} values of max_new_tokens")
    engine = Engine(model, cm, speculative, overlap)
    engine.on_tokens = on_tokens
    for prompt, limit in zip(rows, limits, strict=True):
        engine.submit(Request(prompt, limit, frozenset(eos_token_ids)))
    while engine.has_work:
        added = engine.step()
        if progress is not None:
            progress(added)
    return engine.result()
