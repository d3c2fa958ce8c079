"""The generation engine: who is admitted when, where requests end, and what cannot run."""

from __future__ import annotations

import pytest

from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.generation import Engine, generate
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.embedded.requests import Request, RequestTooLargeError, TokenEvent

DRAFT_LEN = 3
PAGE = 4
MAX_SEQ_LEN, MAX_NUM_TOKENS, MAX_BATCH_SIZE = 64, 40, 3


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return build_pipeline(
        load_config(
            "eagle3_llama_paged",
            overrides={
                "model_kwargs.num_hidden_layers": 2,
                "speculative_config.max_draft_len": DRAFT_LEN,
                "speculative_config.eagle3_layers_to_capture": [0, 1],
                "speculative_model_kwargs.num_captured_layers": 2,
                "kv_cache_config.tokens_per_block": PAGE,
                "max_seq_len": MAX_SEQ_LEN,
                "max_num_tokens": MAX_NUM_TOKENS,
                "max_batch_size": MAX_BATCH_SIZE,
            },
        )
    )


@pytest.fixture
def full_cache(pipeline):
    """A function that sets the number of pages; the pages are as many as before afterwards."""
    before = pipeline.cm.info.num_blocks
    yield pipeline.cm.resize
    pipeline.cm.resize(before)


def engine_with(pipeline: Pipeline, *requests: tuple[int, int], speculative: bool = True) -> Engine:
    """An engine with a request for each (prompt length, new tokens)."""
    engine = Engine(pipeline.model, pipeline.cm, speculative)
    for length, limit in requests:
        engine.submit(Request(tuple(range(1, length + 1)), limit))
    return engine


def test_outputs_come_in_the_order_of_submission_with_as_many_tokens_as_asked(pipeline):
    result = generate(pipeline.model, pipeline.cm, [[5], [6, 7], [8], [9]], max_new_tokens=[7, 1, 3, 2])
    assert [output.prompt for output in result.outputs] == [(5,), (6, 7), (8,), (9,)]
    assert [len(output.tokens) for output in result.outputs] == [7, 1, 3, 2]
    assert result.generated_tokens == 13


def test_a_request_is_the_same_alone_and_among_others(pipeline):
    alone = generate(pipeline.model, pipeline.cm, [[11, 12]], max_new_tokens=10).outputs[0]
    among = generate(pipeline.model, pipeline.cm, [[1], [11, 12], [3, 4, 5], [9] * 20], max_new_tokens=10).outputs[1]
    assert among.tokens == alone.tokens
    assert sum(among.accepted) == sum(alone.accepted) > 0


def test_waiting_requests_join_when_a_row_gets_free(pipeline):
    engine = engine_with(pipeline, (4, 2), (4, 12), (4, 12), (4, 12))
    engine.step()
    assert engine.batches == {"prefill": 1}
    while engine.has_work:
        engine.step()
    assert engine.batches["mixed"] == 1
    assert engine.batches["extend"] > 0
    assert [len(output.tokens) for output in engine.result().outputs] == [2, 12, 12, 12]


def test_requests_may_be_submitted_between_steps(pipeline):
    engine = engine_with(pipeline, (4, 9))
    engine.step()
    engine.step()
    number = engine.submit(Request((1, 2), 4))
    assert number == 1
    while engine.has_work:
        engine.step()
    assert engine.batches["mixed"] == 1
    assert engine.result().outputs[1].prompt == (1, 2)


def test_prompts_that_do_not_fit_into_one_step_together_take_several(pipeline):
    engine = engine_with(pipeline, (30, 3), (30, 3))
    engine.step()
    assert pipeline.cm.info.num_sequences == 1
    while engine.has_work:
        engine.step()
    assert engine.batches["prefill"] + engine.batches["mixed"] == 2


def test_a_request_waits_for_pages(pipeline, full_cache):
    needed = -(-(6 + 8 - 1 + DRAFT_LEN) // PAGE) + 1
    full_cache(2 * needed - 1)
    engine = engine_with(pipeline, (6, 8), (6, 8))
    engine.step()
    assert pipeline.cm.info.num_sequences == 1
    while engine.has_work:
        engine.step()
    assert engine.batches["mixed"] == 0
    assert engine.page_allocator.num_free == engine.page_allocator.num_pages == 2 * needed - 1
    assert engine.slot_allocator.num_free == MAX_BATCH_SIZE
    full_cache(2 * needed)
    engine = engine_with(pipeline, (6, 8), (6, 8))
    engine.step()
    assert pipeline.cm.info.num_sequences == 2


def test_generation_ends_after_an_end_token(pipeline):
    free = generate(pipeline.model, pipeline.cm, [[17, 4]], max_new_tokens=12).outputs[0].tokens
    end = free[5]
    for speculative in (True, False):
        ended = generate(
            pipeline.model, pipeline.cm, [[17, 4]], 12, eos_token_ids=[end], speculative=speculative
        ).outputs[0]
        assert ended.tokens == free[: free.index(end) + 1]


def test_the_longest_request_that_fits_runs_and_one_token_more_is_refused(pipeline):
    # The last step begins with all tokens but one cached, verifies K drafts and drafts K - 1 positions further.
    limit = MAX_SEQ_LEN - 10 + 1 - (2 * DRAFT_LEN - 1)
    result = generate(pipeline.model, pipeline.cm, [list(range(10))], max_new_tokens=limit)
    assert len(result.outputs[0].tokens) == limit
    with pytest.raises(RequestTooLargeError, match=f"reaches {MAX_SEQ_LEN + 1} tokens, max_seq_len is {MAX_SEQ_LEN}"):
        generate(pipeline.model, pipeline.cm, [list(range(10))], max_new_tokens=limit + 1)


@pytest.mark.parametrize("speculative", [True, False])
def test_what_could_never_run_is_refused_before_anything_runs(pipeline, full_cache, speculative):
    engine = Engine(pipeline.model, pipeline.cm, speculative)
    with pytest.raises(RequestTooLargeError, match=r"needs 41 tokens in one step, max_num_tokens is 40"):
        engine.submit(Request(tuple(range(41)), 1))
    full_cache(5)
    engine = Engine(pipeline.model, pipeline.cm, speculative)
    with pytest.raises(RequestTooLargeError, match="the cache has 5"):
        engine.submit(Request(tuple(range(20)), 3))
    assert not engine.has_work


def test_requests_that_ask_for_nothing_are_refused():
    with pytest.raises(ValueError, match="at least one token"):
        Request((), 4)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Request((1,), 0)


def test_limits_must_be_as_many_as_prompts(pipeline):
    with pytest.raises(ValueError, match="2 prompts, but 1 values"):
        generate(pipeline.model, pipeline.cm, [[1], [2]], [3])


def test_pages_smaller_than_a_row_are_refused(pipeline):
    model_len = pipeline.model.max_draft_len
    pipeline.model.max_draft_len = PAGE
    try:
        with pytest.raises(ValueError, match=r"tokens_per_block is 4, .* at least 5 tokens"):
            Engine(pipeline.model, pipeline.cm)
    finally:
        pipeline.model.max_draft_len = model_len


def test_progress_adds_up_to_the_generated_tokens(pipeline):
    added: list[int] = []
    result = generate(pipeline.model, pipeline.cm, [[1, 2], [3]], [9, 4], progress=added.append)
    assert sum(added) == result.generated_tokens == 13
    assert len(added) == result.steps


@pytest.mark.parametrize("speculative", [True, False])
def test_streamed_tokens_are_the_outputs_and_say_what_was_drafted(pipeline, speculative):
    events: list[TokenEvent] = []
    result = generate(
        pipeline.model, pipeline.cm, [[1, 2], [3], [4]], [9, 4, 1], speculative=speculative, on_tokens=events.append
    )
    for request_id, output in enumerate(result.outputs):
        own = [event for event in events if event.request_id == request_id]
        assert [token for event in own for token in event.tokens] == list(output.tokens)
        assert [event.finished for event in own] == [False] * (len(own) - 1) + [True]
        accepted = sum(drafts * rows for drafts, rows in enumerate(output.accepted))
        # A last row may be cut, and what is cut off is not told.
        assert accepted - DRAFT_LEN <= sum(event.num_drafted_accepted for event in own) <= accepted
        # An uncut row ends with the token that the target itself gave.
        assert all(event.num_drafted_accepted == len(event.tokens) - 1 for event in own[:-1])
    assert any(event.num_drafted_accepted for event in events) == speculative


def test_acceptance_counts_every_verified_row(pipeline):
    result = generate(pipeline.model, pipeline.cm, [[1, 2], [3]], [9, 14])
    assert len(result.accepted) == DRAFT_LEN + 1
    by_request = [output.accepted for output in result.outputs]
    assert result.accepted == tuple(a + b for a, b in zip(*by_request, strict=True))
    # A request's first token comes from its prompt, all others from verified rows; the last row may overshoot.
    for output in result.outputs:
        yielded = sum((drafts + 1) * rows for drafts, rows in enumerate(output.accepted))
        assert len(output.tokens) - 1 <= yielded <= len(output.tokens) - 1 + DRAFT_LEN


def test_without_speculation_nothing_is_verified(pipeline):
    result = generate(pipeline.model, pipeline.cm, [[1, 2]], 4, speculative=False)
    assert result.accepted == ()
    assert result.acceptance_length == 1.0
    assert result.steps == 4
    assert result.batches == {"prefill": 1, "decode": 3}
