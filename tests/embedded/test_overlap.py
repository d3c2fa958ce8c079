"""Overlap: each step is launched before the tokens of the one before it are read, and nothing else is different."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from auto_deploy_ext import record_mirrors, sanitize
from auto_deploy_ext.embedded.generation import Engine, generate
from auto_deploy_ext.embedded.in_flight import Landing
from auto_deploy_ext.embedded.models.custom.modeling_eagle import EagleWrapperOutput
from auto_deploy_ext.embedded.pipeline import Pipeline
from auto_deploy_ext.embedded.requests import GenerationResult, Request, RequestTooLargeError, TokenEvent
from auto_deploy_ext.embedded.shim.interface import CachedSequenceInterface, KvCacheConfig
from auto_deploy_ext.orchestrator.dispatch import original_forward
from auto_deploy_ext.rewriting.scoping import ScopeOptions, scope_module
from auto_deploy_ext.runtime.late_offset import TRIGGER as LATE
from tests.test_decoding_equality import CONFIGS, LIMITS, OFFSET, PROMPTS, make_pipeline, shared_pipeline


def tokens_of(result: GenerationResult) -> list[tuple[int, ...]]:
    return [output.tokens for output in result.outputs]


def run(pipeline: Pipeline, **options) -> GenerationResult:
    return generate(pipeline.model, pipeline.cm, PROMPTS, LIMITS, **options)


# -- the tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_accepted_drafts_are_those_without_overlap(name):
    pipeline, greedy = shared_pipeline(name)
    waiting = run(pipeline)
    with sanitize(pipeline.cm, pipeline.model) as sanitizer:
        ahead = run(pipeline, overlap=True)
        assert tokens_of(run(pipeline, overlap=True, speculative=False)) == greedy
    assert ahead.outputs == waiting.outputs
    assert ahead.steps > waiting.steps, "rows that had ended were run once more"
    assert (sanitizer.checked > 0) == (name != "eagle3_llama")


def test_a_drafter_of_one_token_overlaps_too():
    pipeline = make_pipeline("eagle3_llama_paged", 1, tokens_per_block=2)
    with sanitize(pipeline.cm, pipeline.model):
        ahead = run(pipeline, overlap=True)
    assert ahead.outputs == run(pipeline).outputs


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *(("eagle3_llama_paged", strategy) for strategy in ("auto", "copy", "override", "hooks", "as written")),
        *(("mtp_hybrid", strategy) for strategy in ("hooks", "as written")),
    ],
)
def test_every_strategy_deals_with_mirrors_that_are_stale_at_entry(name, strategy, monkeypatch):
    pipeline, greedy = shared_pipeline(name)
    if strategy == "hooks":
        scope_module(pipeline.model, pipeline.cm, ScopeOptions(mode="hooks"))
    elif strategy != "as written":
        scope_module(pipeline.model, pipeline.cm, ScopeOptions(strategy=strategy))
    as_written = original_forward(pipeline.model) if strategy == "as written" else nullcontext()
    with as_written, sanitize(pipeline.cm, pipeline.model), record_mirrors(pipeline.cm) as transfers:
        result = run(pipeline, overlap=True)
    assert tokens_of(result) == greedy
    assert any(transfer.trigger == LATE for transfer in transfers)
    if strategy == "auto":
        assert {transfer.names for transfer in transfers} == {(OFFSET,), (LATE,)}, "no mirror was copied"
        monkeypatch.setattr(Engine, "_announce_lengths", lambda self: None)
        with sanitize(pipeline.cm, pipeline.model), record_mirrors(pipeline.cm) as transfers:
            assert tokens_of(run(pipeline, overlap=True)) == greedy
        assert {t.names for t in transfers if t.trigger == "ensure_fresh"} == {
            ("cu_num_pages_host", "last_page_len_host", "seq_len_with_cache_host")
        }


def test_a_consumer_that_finds_its_mirrors_stale_at_entry_is_caught(monkeypatch):
    pipeline, _ = shared_pipeline("eagle3_llama_paged")
    monkeypatch.setattr(Engine, "_bring_mirrors", lambda self: None)
    with (
        original_forward(pipeline.model),
        sanitize(pipeline.cm, pipeline.model),
        pytest.raises(RuntimeError, match=r"target_model reads \w+_host, which is stale: offset_with_new_lens_"),
    ):
        run(pipeline, overlap=True)


def test_end_tokens_end_requests_whose_next_step_runs_already():
    pipeline, greedy = shared_pipeline("eagle3_llama_paged")
    ends = {tokens[len(tokens) // 2] for tokens in greedy}
    waiting = run(pipeline, eos_token_ids=ends)
    events: list[TokenEvent] = []
    with sanitize(pipeline.cm, pipeline.model):
        ahead = run(pipeline, eos_token_ids=ends, overlap=True, on_tokens=events.append)
    assert ahead.outputs == waiting.outputs
    assert sum(len(output.tokens) for output in ahead.outputs) < sum(map(len, greedy))
    for request_id, output in enumerate(ahead.outputs):
        own = [event for event in events if event.request_id == request_id]
        assert tuple(token for event in own for token in event.tokens) == output.tokens
        assert [event.finished for event in own] == [False] * (len(own) - 1) + [True]


# -- who waits for whom -----------------------------------------------------------------------------------------------


def test_results_are_read_after_the_next_step_was_launched(monkeypatch):
    pipeline, _ = shared_pipeline("eagle3_llama")
    engine = Engine(pipeline.model, pipeline.cm, overlap=True)
    launched_when_read: list[int] = []
    read = Landing.tokens
    monkeypatch.setattr(Landing, "tokens", lambda self: launched_when_read.append(engine.steps) or read(self))
    for prompt in PROMPTS[:3]:
        engine.submit(Request(tuple(prompt), 12))
    while engine.has_work:
        engine.step()
    last = engine.steps
    assert launched_when_read == [*range(2, last + 1), last]


def test_what_a_launched_step_uses_belongs_to_nobody_else():
    pipeline, greedy = shared_pipeline("eagle3_llama_paged")
    ends = frozenset(tokens[0] for tokens in greedy[:2]) | {greedy[2][3]}
    engine = Engine(pipeline.model, pipeline.cm, overlap=True)
    for prompt in [*PROMPTS, *PROMPTS]:
        engine.submit(Request(tuple(prompt), 12, ends))
    ran_for_nothing = 0
    while engine.has_work:
        engine.step()
        step = engine._in_flight
        for seq in step.rows if step is not None else ():
            assert engine.page_allocator.pages(seq.request_id)
            assert seq.slot not in engine.slot_allocator._free
            ran_for_nothing += seq.has_ended
    assert ran_for_nothing > 0
    assert engine.page_allocator.num_free == engine.page_allocator.num_pages
    assert engine.slot_allocator.num_free == pipeline.cm.info.max_batch_size


def test_a_row_that_certainly_ends_in_flight_is_not_launched_again():
    pipeline, _ = shared_pipeline("eagle3_llama")
    result = generate(pipeline.model, pipeline.cm, [[1], [2]], [1, 2], overlap=True)
    assert (result.steps, result.batches) == (2, {"prefill": 1, "extend": 1})
    assert [len(output.tokens) for output in result.outputs] == [1, 2]


def test_requests_may_be_submitted_while_a_step_is_in_flight():
    pipeline, greedy = shared_pipeline("eagle3_llama_paged")
    engine = Engine(pipeline.model, pipeline.cm, overlap=True)
    for prompt, limit in zip(PROMPTS, LIMITS, strict=True):
        assert engine.submit(Request(tuple(prompt), limit)) == len(engine._outputs) + len(engine._running)
        engine.step()
        engine.step()
    while engine.has_work:
        engine.step()
    assert tokens_of(engine.result()) == greedy


# -- limits -----------------------------------------------------------------------------------------------------------


def test_the_longest_request_that_fits_with_its_lookahead_runs_and_one_token_more_is_refused():
    pipeline, _ = shared_pipeline("eagle3_llama_paged")
    draft_len, max_seq_len = 3, pipeline.cm.info.max_seq_len
    start = list(range(max_seq_len - 40))
    limit = max_seq_len - len(start) + 1 - (3 * draft_len - 1)
    result = generate(pipeline.model, pipeline.cm, [start], limit, overlap=True)
    assert len(result.outputs[0].tokens) == limit
    with pytest.raises(RequestTooLargeError, match=f"and overlap reaches {max_seq_len + 1} tokens"):
        generate(pipeline.model, pipeline.cm, [start], limit + 1, overlap=True)
    assert len(generate(pipeline.model, pipeline.cm, [start], limit + 1).outputs[0].tokens) == limit + 1


# -- page tables, against a model of what they must be ----------------------------------------------------------------


@dataclass
class Truth:
    """What is really so of one sequence.

    Attributes:
        cached: tokens whose cache entries are final.
        row: its next row: last token and drafts.
    """

    cached: int
    row: list[int] = field(default_factory=list)


class Words(nn.Embedding):
    """A target as far as the engine asks it for its vocabulary."""

    def get_input_embeddings(self) -> nn.Embedding:
        return self


class ScriptedWrapper(nn.Module):
    """Changes metadata as the Eagle wrapper does and computes nothing: acceptance is drawn, tokens are counted.

    At the place of every consumer it compares what the device has with what must be there.
    """

    def __init__(self, max_draft_len: int, draws: Iterator[int]) -> None:
        super().__init__()
        self.max_draft_len = max_draft_len
        self.target_model = Words(1000, 1)
        self.draft_model = nn.Identity()
        self.draws = draws
        self.truth: dict[int, Truth] = {}
        self.next_token = 1000
        self.engine: Engine
        self.crossings = {"taken back": 0, "inserted": 0}

    def new_tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def owned(self, row: int) -> list[int]:
        rows = self.rows
        return list(self.engine.page_allocator.pages(rows[row].request_id)) if row < len(rows) else []

    def check(self, info, ends: list[int], firsts: list[int], tokens: list[list[int]]) -> None:
        """Compare the device's metadata: each row's end, first position and tokens."""
        n = len(ends)
        view = {
            name: info.get_arg(name, truncate=False).tolist() for name in ("cu_seqlen", "cu_num_pages", "cache_loc")
        }
        ids = info.get_arg("input_ids", unflatten=False).tolist()
        positions = info.get_arg("position_ids", unflatten=False).tolist()
        assert info.get_arg("seq_len_with_cache")[:n].tolist() == ends
        assert info.get_arg("input_pos")[:n].tolist() == firsts
        used: list[int] = []
        for row in range(n):
            start, end = view["cu_seqlen"][row : row + 2]
            assert ids[start:end] == tokens[row]
            assert positions[start:end] == list(range(firsts[row], ends[row]))
            table = view["cache_loc"][view["cu_num_pages"][row] : view["cu_num_pages"][row + 1]]
            page = info.tokens_per_block
            assert len(table) == -(-ends[row] // page)
            assert int(info.get_arg("last_page_len")[row]) == (ends[row] - 1) % page + 1
            used += table
            if row < len(self.rows):
                own = self.owned(row)
                assert set(table) <= set(own)
                # Whatever later steps read lies where the engine takes it to be.
                final = -(-self.truth[self.rows[row].slot].cached // page)
                assert table[:final] == own[:final]
        assert len(set(used)) == len(used), "a page is written by one row, and holds one stretch of it"

    def forward(self, cm: CachedSequenceInterface) -> EagleWrapperOutput:
        info, k = cm.info, self.max_draft_len
        num_prefill, num_extend, _ = info.batch_info.get_num_sequences()
        n = num_prefill + num_extend
        self.rows = self.engine.launching
        slots = [seq.slot for seq in self.rows]
        for seq in self.rows[:num_prefill]:
            self.truth[seq.slot] = Truth(0, list(seq.request.prompt))
        truths = [self.truth[slot] for slot in slots]
        before = [truth.cached for truth in truths]
        ends = [truth.cached + len(truth.row) for truth in truths]
        self.check(info, ends, before, [truth.row for truth in truths])
        lens = [1 if row < num_prefill else 1 + next(self.draws) % (1 + k) for row in range(n)]
        # The drafter's own rows, as the target's.
        info.copy_("input_ids", info.get_arg("input_ids", unflatten=False).clone())
        offset = torch.tensor([1 if row < num_prefill else lens[row] - k for row in range(n)], dtype=torch.int32)
        moved = ends
        for draft in range(k):
            if draft == 1:
                offset.fill_(1)
            if draft < k - 1:
                info.switch_to_generate_()
                tokens = self.new_tokens(n)
                info.copy_("input_ids", torch.tensor(tokens, dtype=torch.int32))
                info.offset_pos_and_cache_(offset)
                pages = [-(-end // info.tokens_per_block) for end in moved]
                moved = [end + int(by) for end, by in zip(moved, offset, strict=True)]
                change = [-(-end // info.tokens_per_block) - p for end, p in zip(moved, pages, strict=True)]
                self.crossings["inserted"] += change.count(1)
                self.check(info, moved, [end - 1 for end in moved], [[token] for token in tokens])
        for row, truth in enumerate(truths):
            truth.cached = ends[row] if row < num_prefill else truth.cached + lens[row]
            truth.row = self.new_tokens(1 + k)
        given = torch.zeros(n, 1 + k, dtype=torch.int32)
        for row, truth in enumerate(truths):
            given[row, : lens[row]] = torch.tensor([*self.new_tokens(lens[row] - 1), truth.row[0]])
        following = torch.tensor([truth.row for truth in truths], dtype=torch.int32)
        return EagleWrapperOutput(given, torch.tensor(lens, dtype=torch.int32), following[:, 1:], following)


class WatchedEngine(Engine):
    """Says which rows it is launching."""

    def _nest(self, rows):
        self.launching = rows
        super()._nest(rows)


@settings(max_examples=40, deadline=None)
@given(
    max_draft_len=st.integers(1, 6),
    larger=st.integers(1, 4),
    max_batch_size=st.integers(1, 4),
    requests=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 25)), min_size=1, max_size=7),
    draws=st.lists(st.integers(0, 419), min_size=1, max_size=40),
    spare_pages=st.integers(0, 8),
    overlap=st.booleans(),
)
def test_every_row_has_its_pages_whatever_is_accepted(
    max_draft_len, larger, max_batch_size, requests, draws, spare_pages, overlap
):
    cm = CachedSequenceInterface(
        96, max_batch_size, 120, device="cpu", kv_cache_config=KvCacheConfig(tokens_per_block=max_draft_len + larger)
    )
    for name in ("cache_loc", "cu_num_pages", "last_page_len", "seq_len_with_cache"):
        cm.info.activate_arg(name)
    cm.info.update_cache_information(1000)
    draw_forever = (draws[i % len(draws)] for i in range(10**6))
    model = ScriptedWrapper(max_draft_len, draw_forever)
    largest = WatchedEngine(model, cm, overlap=overlap)
    most = max(largest._most_pages(Request((1,) * length, limit)) for length, limit in requests)
    cm.info.update_cache_information(most + spare_pages)
    engine = model.engine = WatchedEngine(model, cm, overlap=overlap)
    for length, limit in requests:
        engine.submit(Request(tuple(range(length)), limit))
    while engine.has_work:
        engine.step()
    assert [len(output.tokens) for output in engine.result().outputs] == [limit for _, limit in requests]
    assert engine.page_allocator.num_free == most + spare_pages


def test_no_more_pages_are_asked_for_than_are_used():
    """The bound is sharp: with one page less, a request whose drafts are all accepted would run out of pages."""
    cm = CachedSequenceInterface(96, 1, 120, device="cpu", kv_cache_config=KvCacheConfig(tokens_per_block=4))
    cm.info.activate_arg("cache_loc")
    cm.info.update_cache_information(1000)
    model = ScriptedWrapper(3, iter([0] * 100))
    engine = model.engine = WatchedEngine(model, cm, overlap=True)
    engine.submit(Request((1, 2, 3), 11))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.page_allocator.num_pages - engine.page_allocator.num_free)
    assert most == engine._most_pages(Request((1, 2, 3), 11))


# -- rows that fill a batch up ----------------------------------------------------------------------------------------


@contextmanager
def captured(pipeline: Pipeline, *sizes: int) -> Iterator[None]:
    pipeline.model.captured_batch_sizes = sizes
    try:
        yield
    finally:
        del pipeline.model.captured_batch_sizes


class CacheWatcher(Engine):
    """Compares every byte of every cache before and after each step."""

    seen: list[tuple[int, int]]

    def _nest(self, rows):
        super()._nest(rows)
        info = self.cm.info
        self.seen.append((len(rows), info.num_sequences))
        self.launching = rows
        self.before = {name: value.clone() for name, value in self.cm._caches.items()}

    def compare(self) -> None:
        info = self.cm.info
        slots = [seq.slot for seq in self.launching]
        pages = [page for seq in self.launching for page in self.owned_by[seq.request_id]]
        for name, before in self.before.items():
            after = self.cm._caches[name]
            if name.startswith("hidden_states"):
                continue  # what is left here for the drafter is by token, and forgotten with the step
            mine = torch.zeros(len(after), dtype=torch.bool)
            mine[[*pages, self._spare_page] if "kv_cache" in name else [*slots, info.max_num_state_slots - 1]] = True
            assert torch.equal(after[~mine], before[~mine]), name

    def step(self) -> int:
        self.launching = []
        self.owned_by = {}
        release = self.page_allocator.release
        self.page_allocator.release = lambda owner: self.note_pages() or release(owner)
        added = super().step()
        del self.page_allocator.release
        self.note_pages()
        if self.launching:
            self.compare()
        return added

    def note_pages(self) -> None:
        for seq in self.launching:
            pages = self.page_allocator.pages(seq.request_id)
            if pages:
                self.owned_by[seq.request_id] = pages


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_that_fill_a_batch_up_write_to_the_spare_page_and_slot_alone(name, overlap):
    pipeline, greedy = shared_pipeline(name)
    with captured(pipeline, 2, 3):
        engine = CacheWatcher(pipeline.model, pipeline.cm, overlap=overlap)
    engine.seen = []
    for prompt, limit in zip(PROMPTS, LIMITS, strict=True):
        engine.submit(Request(tuple(prompt), limit))
    while engine.has_work:
        engine.step()
    assert tokens_of(engine.result()) == greedy
    assert (1, 2) in engine.seen
    assert engine.page_allocator.num_free == engine.page_allocator.num_pages - 1


@pytest.mark.parametrize(
    ("sizes", "speculative", "expected"),
    [((3,), True, {3}), ((3,), False, {3}), ((64,), True, {1, 2, 3}), ((1,), True, {1, 2, 3}), ((), True, {1, 2, 3})],
)
def test_only_batches_that_verify_or_decode_are_filled_up_and_only_where_they_fit(sizes, speculative, expected):
    pipeline, greedy = shared_pipeline("eagle3_llama_paged")
    with captured(pipeline, *sizes):
        engine = Engine(pipeline.model, pipeline.cm, speculative)
    for prompt, limit in zip(PROMPTS, LIMITS, strict=True):
        engine.submit(Request(tuple(prompt), limit))
    rows: set[int] = set()
    while engine.has_work:
        before = engine.batches["prefill"] + engine.batches["mixed"]
        running = len(engine._running)
        engine.step()
        if engine.batches["prefill"] + engine.batches["mixed"] == before:
            assert pipeline.cm.info.num_sequences >= running
            rows.add(pipeline.cm.info.num_sequences)
    assert tokens_of(engine.result()) == greedy
    assert rows == expected
