"""The guided engine: texts obey their grammars however they are computed; images, drains, prefetch, ends, failures."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from auto_deploy_ext.transforms.drain_hostfuncs import drain_plan

from auto_deploy_ext.embedded.generation import generate
from auto_deploy_ext.embedded.guided import GrammarSpec, GuidedEngine, GuidedRequest, GuidedRow
from auto_deploy_ext.embedded.models.custom.modeling_eagle import EagleWrapper
from auto_deploy_ext.embedded.requests import Request
from auto_deploy_ext.hostfuncs import HostFuncError, HostFuncOwner, OrderedLayer, ThreadStreams, hostfuncs_pending
from auto_deploy_ext.hostfuncs.drains import drain_before, drain_hook
from auto_deploy_ext.hostfuncs.pending import being_traced
from auto_deploy_ext.orchestrator import original_forward
from auto_deploy_ext.orchestrator.dispatch import dispatcher_of

from .conftest import IMAGE, VOCAB_SIZE

pytest.importorskip("xgrammar", reason="guided decoding needs extra guided")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
JSON = GrammarSpec.json_schema(PERSON)


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "kind", "age"]
        and len(value["name"]) <= 4
        and value["kind"] in ("cat", "dog")
        and 0 <= value["age"] <= 99
    )


@pytest.fixture
def engine_of(pipeline, vocabulary):
    """A function that makes an engine on the pipeline."""

    def make(layer=None, guided: bool = True, **options: Any) -> GuidedEngine:
        return GuidedEngine(
            pipeline.model,
            pipeline.cm,
            vocabulary if guided else None,
            layer=layer or OrderedLayer(),
            image_token_id=IMAGE,
            **options,
        )

    return make


def request(prompt: str, *images: torch.Tensor, grammar: GrammarSpec | None = JSON, limit: int = 80) -> GuidedRequest:
    patches = [IMAGE] * sum(image.shape[1] * image.shape[2] // 64 for image in images)
    return GuidedRequest((*prompt.encode(), *patches), limit, grammar=grammar, images=images)


def run(engine: GuidedEngine, *requests: Request) -> list[Any]:
    ids = [engine.submit(r) for r in requests]
    while engine.has_work:
        engine.step()
    return [engine.outcome(request_id) for request_id in ids]


# ---------------------------------------------------------------- texts


def test_all_complete_texts_obey_their_grammars_and_a_truncation_is_reported(engine_of, layer, image):
    requests = [
        request("a"),
        request("b", image(1)),
        request("c", grammar=GrammarSpec.regex("[xyz]{5,12}!")),
        request("d", grammar=GrammarSpec.ebnf('root ::= "(" root ")" | "o"'), limit=30),
        request("e", limit=7),
        request("f", image(2, 3, 2), image(3)),
    ]
    engine = engine_of(layer)
    outcomes = run(engine, *requests)
    reasons = [outcome.finish_reason for outcome in outcomes]
    assert reasons[4] == "length" and len(outcomes[4].output.tokens) == 7
    assert reasons[:3] == ["stop"] * 3 and reasons[5] == "stop"
    assert all(is_person(outcomes[i].text) for i in (0, 1, 5))
    assert set(outcomes[2].text[:-1]) <= set("xyz") and outcomes[2].text[-1] == "!"
    if reasons[3] == "stop":
        assert outcomes[3].text.strip("()") == "o"
    else:
        assert set(outcomes[3].text) <= set("(o)")
    assert engine.stats.replays > 0 and engine.owner.stats.runs > 0


def test_graphs_and_eager_forwards_give_the_same_texts_on_every_layer(engine_of, image):
    def texts(**options: Any) -> list[str]:
        engine = engine_of(**options)
        return [o.text for o in run(engine, request("a"), request("b", image(1)), request("c", grammar=None, limit=20))]

    layer = ThreadStreams()
    expected = texts(graphs=False)
    assert texts(graphs=True) == expected
    assert texts(graphs=True, layer=layer) == expected
    assert texts(graphs=False, layer=layer, encode="forward") == expected
    layer.close()


def test_the_rewritten_wrapper_gives_what_the_wrapper_as_written_gives(engine_of, pipeline, image):
    requests = [request("a", image(5)), request("b")]
    rewritten = [o.text for o in run(engine_of(encode="forward"), *requests)]
    with original_forward(pipeline.model):
        assert [o.text for o in run(engine_of(encode="forward"), *requests)] == rewritten


def test_speculation_gives_the_same_texts_as_decoding_one_token_at_a_time(engine_of):
    requests = [request("a"), request("q")]
    speculative = [o.output.tokens for o in run(engine_of(), *requests)]
    engine = engine_of()
    engine.set_draft_len(0)
    assert [o.output.tokens for o in run(engine, *requests)] == speculative


def test_guided_drafts_are_int32_in_the_targets_vocabulary_as_the_wrappers_own_are(pipeline, monkeypatch):
    model, hidden = pipeline.model, torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(model.draft_model, "d2t", torch.arange(VOCAB_SIZE) % 7, raising=False)
    drafts = model.sample_draft(hidden)
    assert drafts.dtype == torch.int32
    assert drafts.tolist() == EagleWrapper.sample_draft(model, hidden).tolist()
    assert drafts.tolist() != model.draft_logits(hidden).argmax(-1).tolist()


def test_an_unconstrained_request_is_what_the_plain_engine_generates(engine_of, pipeline):
    prompt = tuple(b"plain")
    (outcome,) = run(engine_of(), request("plain", grammar=None, limit=12))
    assert outcome.output.tokens == generate(pipeline.model, pipeline.cm, [prompt], 12).outputs[0].tokens


def test_a_text_is_the_same_alone_and_among_others(engine_of):
    (alone,) = run(engine_of(), request("same"))
    among = run(engine_of(), request("x"), request("same"), request("y", grammar=None), request("z", limit=3))
    assert among[1].output.tokens == alone.output.tokens


# ---------------------------------------------------------------- the draft length reaches 0 and comes back


def test_the_draft_length_may_reach_zero_and_come_back_within_a_text(engine_of, layer):
    (expected,) = run(engine_of(), request("draft"))
    engine = engine_of(layer)
    request_id = engine.submit(request("draft"))
    for draft_len in (3, 0, 0, 3, 3, 0):
        engine.set_draft_len(draft_len)
        engine.step()
    engine.set_draft_len(3)
    while engine.has_work:
        engine.step()
    assert engine.outcome(request_id).output.tokens == expected.output.tokens


def test_another_draft_length_is_refused(engine_of):
    with pytest.raises(ValueError, match="draft_len is 0 or the wrapper's 3, not 2"):
        engine_of().set_draft_len(2)


# ---------------------------------------------------------------- ends


def test_cancelled_requests_end_at_once_and_do_not_disturb_the_others(engine_of, layer):
    (expected,) = run(engine_of(), request("stays"))
    engine = engine_of(layer)
    stays, running = engine.submit(request("stays")), engine.submit(request("goes"))
    for _ in range(4):
        engine.step()
    waiting = engine.submit(request("never", limit=5))
    assert engine.cancel(running) and engine.cancel(waiting)
    assert not engine.cancel(running)
    while engine.has_work:
        engine.step()
    assert engine.outcome(stays).output.tokens == expected.output.tokens
    assert engine.outcome(running).finish_reason == engine.outcome(waiting).finish_reason == "cancelled"
    assert engine.outcome(waiting).output.tokens == ()
    assert 0 < len(engine.outcome(running).output.tokens) < 80
    assert engine.slot_allocator.num_free == 4


def test_the_outcome_of_a_running_request_is_none(engine_of):
    engine = engine_of()
    request_id = engine.submit(request("a"))
    engine.step()
    assert engine.outcome(request_id) is None
    engine.cancel(request_id)


# ---------------------------------------------------------------- cost for those who are not guided


def test_eager_unguided_batches_launch_no_host_function_and_copy_nothing(engine_of):
    engine = engine_of(graphs=False)
    run(engine, request("a", grammar=None, limit=10), request("b", grammar=None, limit=10))
    assert (engine.owner.stats.launches, engine.owner.stats.runs, engine.guided.copies) == (0, 0, 0)
    assert not engine.owner.pending


def test_an_engine_without_a_vocabulary_captures_graphs_without_host_functions(engine_of):
    engine = engine_of(guided=False)
    run(engine, request("a", grammar=None, limit=20))
    assert engine.stats.replays > 0 and len(engine.runner) == 1
    assert not engine.runner.contains_hostfuncs((1, 3))
    assert (engine.owner.stats.launches, engine.owner.stats.replays) == (0, 0)


def test_guided_and_unguided_batches_in_turn_share_a_graph(engine_of, layer):
    (guided,) = run(engine_of(), request("guided"))
    (free,) = run(engine_of(), request("free", grammar=None, limit=20))
    engine = engine_of(layer)
    for expected, submitted in (
        (guided, request("guided")),
        (free, request("free", grammar=None, limit=20)),
        (guided, request("guided")),
    ):
        assert run(engine, submitted)[0].output.tokens == expected.output.tokens
    assert len(engine.runner) == 1 and engine.runner.contains_hostfuncs((1, 3))


# ---------------------------------------------------------------- encoders


@pytest.fixture
def encoder_calls(pipeline):
    """For each real call of the encoder: were host functions pending, and how many images."""
    calls: list[tuple[bool, int]] = []

    def note(module: Any, args: Any) -> None:
        if not being_traced():
            calls.append((hostfuncs_pending(), sum(batch.shape[0] for batch in args[0])))

    handle = pipeline.model.vision_encoder.register_forward_pre_hook(note)
    yield calls
    handle.remove()


def busy(engine: GuidedEngine) -> None:
    """Bring a guided text so far that replays with host functions are pending."""
    engine.submit(request("busy", limit=60))
    while not engine.stats.replays:
        engine.step()
    assert engine.owner.pending


@pytest.mark.parametrize("way", ["forward", "schedule"])
def test_encoders_meet_no_pending_host_function(engine_of, layer, image, encoder_calls, way):
    engine = engine_of(layer, encode=way)
    busy(engine)
    drains = engine.owner.stats.drains
    engine.submit(request("look", image(20)))
    engine.step()
    assert encoder_calls == [(False, 1)]
    assert engine.owner.stats.drains == drains + 1
    assert engine.images.stats.images[way] == 1
    while engine.has_work:
        engine.step()


def test_without_the_drain_an_encoder_would_meet_them(engine_of, image, encoder_calls, pipeline):
    """What the tests above would see if the transform had not run."""
    encoder = pipeline.model.vision_encoder
    hook = next(key for key, hook in encoder._forward_pre_hooks.items() if hook is drain_hook)
    del encoder._forward_pre_hooks[hook]
    try:
        engine = engine_of()
        busy(engine)
        engine.submit(request("look", image(21)))
        engine.step()
        assert encoder_calls == [(True, 1)]
        while engine.has_work:
            engine.step()
    finally:
        encoder.register_forward_pre_hook(drain_hook, prepend=True)


def test_the_graph_of_a_batch_with_new_images_drains_before_the_encoder_by_a_node(engine_of, image, pipeline):
    run(engine_of(encode="forward"), request("look", image(22)), request("again", image(22)))
    shapes = []
    for variant in dispatcher_of(pipeline.model).variants:
        nodes = list(variant.graph.nodes)
        for before, node in pairwise(nodes):
            if node.target == "vision_encoder":
                shapes.append(before.target is drain_before)
    assert shapes and all(shapes)
    sites = {(site.encoder, site.kind) for site in drain_plan(pipeline.model).sites}
    assert sites == {("vision_encoder", "node"), ("vision_encoder", "hook")}


@pytest.mark.parametrize("way", ["forward", "schedule"])
def test_a_cached_image_means_no_encoder_and_no_drain(engine_of, image, encoder_calls, way):
    engine = engine_of(encode=way)
    run(engine, request("first", image(30), limit=4))
    busy(engine)
    calls, stats = len(encoder_calls), (engine.owner.stats.drains, engine.owner.stats.idle_drains)
    engine.submit(request("second", image(30), limit=4))
    engine.step()
    assert len(encoder_calls) == calls
    assert (engine.owner.stats.drains, engine.owner.stats.idle_drains) == stats
    assert engine.owner.pending
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("way", ["forward", "schedule"])
def test_of_a_partial_hit_only_the_rest_is_encoded_and_the_text_is_the_same(engine_of, image, encoder_calls, way):
    both = request("two", image(40), image(41, 3, 2))
    (expected,) = run(engine_of(encode=way), both)
    engine = engine_of(encode=way)
    run(engine, request("one", image(41, 3, 2), limit=3))
    del encoder_calls[:]
    (outcome,) = run(engine, both)
    assert encoder_calls == [(False, 1)]
    assert outcome.output.tokens == expected.output.tokens
    assert (engine.images.stats.partial_hits, engine.images.stats.full_hits) == (1, 0)
    run(engine, request("again", image(40), image(41, 3, 2), limit=3))
    assert (engine.images.stats.partial_hits, engine.images.stats.full_hits) == (1, 1)
    assert encoder_calls == [(False, 1)]


def test_an_image_decides_what_is_said(engine_of, image):
    prompts = [request("look", image(n), grammar=GrammarSpec.regex("[a-z]{12}")) for n in (50, 51, 50)]
    first, other, again = (outcome.text for outcome in run(engine_of(), *prompts))
    assert first == again != other


def test_prefetch_runs_beside_a_forward_when_nothing_is_pending(engine_of, layer, image, encoder_calls):
    engine = engine_of(layer, guided=False, images_per_step=1)
    for number in range(6):  # two more than the batch has room for
        engine.submit(request("p", image(60 + number), grammar=None, limit=40))
    while engine.has_work:
        engine.step()
    stats = engine.images.stats
    assert stats.images["prefetch"] > 0 and stats.prefetch_skipped == 0
    assert sum(stats.images.values()) == len(encoder_calls) == 6


def test_what_a_forward_encodes_and_what_is_prefetched_beside_it_are_kept_apart(engine_of, layer, image, pipeline):
    engine = engine_of(layer, guided=False, images_per_step=1, encode="forward")
    requests = [request("p", image(80 + number), grammar=None, limit=10) for number in range(7)]
    run(engine, *requests)
    ways = engine.images.stats.images
    assert ways["prefetch"] > 0 and ways["forward"] >= 4
    for submitted in requests:
        (item,) = engine.images.items_of(submitted.prompt, submitted.images)
        with torch.no_grad():
            expected = pipeline.model.vision_encoder([item.pixels[None]])
        torch.testing.assert_close(engine.images.cache.get(item.key), expected)


@pytest.mark.parametrize("way", ["schedule", "prefetch"])
def test_images_that_do_not_fit_the_encoder_cache_together_are_encoded_once_each(engine_of, layer, image, way):
    engine = engine_of(layer, guided=False, encoder_cache_tokens=6)
    rows = 4 if way == "prefetch" else 0  # a full batch: there is no room, so images are prefetched
    for number in range(rows):
        engine.submit(request(f"row {number}", grammar=None, limit=30))
    if rows:
        engine.step()
    ids = [
        engine.submit(request("two", image(90), image(91), grammar=None, limit=3)),
        engine.submit(request("one", image(90), grammar=None, limit=3)),
    ]
    while engine.has_work:
        engine.step()
    stats = engine.images.stats
    assert stats.images == {"forward": 0, "schedule": 0, "prefetch": 0, way: 2}
    assert (stats.calls, engine.images.cache.num_tokens) == (1, 4)
    assert all(engine.outcome(request_id).output.tokens for request_id in ids)


def test_features_are_let_go_once_the_prompt_has_run(engine_of, image):
    engine = engine_of(encoder_cache_tokens=6)
    number = engine.submit(request("two", image(92), image(93), limit=20))
    engine.step()
    assert len(engine.images._held[number]) == 2
    engine.step()
    assert number not in engine.images._held and engine.outcome(number) is None
    engine.cancel(number)


def trace_of(engine: GuidedEngine, requests: list[GuidedRequest]) -> list[tuple[Any, ...]]:
    """What an engine decides, step by step."""
    for submitted in requests:
        engine.submit(submitted)
    trace = []
    while engine.has_work:
        engine.step()
        stats = engine.images.stats
        trace.append(
            (engine.owner.pending, stats.prefetch_skipped, *stats.images.values(), *map(len, [engine._running]))
        )
    return trace


class SlowStreams(ThreadStreams):
    """Streams whose host functions come late: a rank whose device is behind."""

    def _submit(self, work: Any) -> None:
        super()._submit(lambda: time.sleep(0.003))
        super()._submit(work)


def test_ranks_with_different_progress_decide_alike_about_prefetch(engine_of, image):
    requests = [request("r", image(70 + n, 2 + n % 2), limit=12 + n) for n in range(6)]
    slow, fast = SlowStreams(), ThreadStreams()
    traces = [trace_of(engine_of(layer, images_per_step=1), requests) for layer in (fast, slow, OrderedLayer())]
    assert traces[0] == traces[1] == traces[2]
    assert traces[0][-1][1] > 0, "the gate never closed"
    slow.close()
    fast.close()


# ---------------------------------------------------------------- what is refused, and failures


def test_requests_that_do_not_fit_the_engine_are_refused(engine_of, image, pipeline):
    with pytest.raises(ValueError, match="the prompt has 1 placeholders, its images need 4"):
        engine_of().submit(GuidedRequest((1, IMAGE), 4, images=(image(1),)))
    with pytest.raises(ValueError, match="does not divide into patches of 8"):
        engine_of().submit(GuidedRequest((1,), 4, images=(torch.zeros(3, 9, 8),)))
    for shape in ([1, 16, 16], [16, 16], [2, 3, 16, 16], [3, 0, 16], [3, 16, 0]):
        wrong = GuidedRequest((1, *[IMAGE] * 8), 4, images=(image(1), torch.zeros(shape)))
        shown = ", ".join(map(str, shape))
        with pytest.raises(
            ValueError, match=rf"image 1 of the request .*shape \[{shown}\] is not \[3, height, width\]"
        ):
            engine_of().submit(wrong)
    with pytest.raises(ValueError, match="without a vocabulary"):
        engine_of(guided=False).submit(request("a"))
    with pytest.raises(ValueError, match="no vision encoder"):
        GuidedEngine(pipeline.model, pipeline.cm, layer=OrderedLayer()).submit(request("a", image(1), grammar=None))


def test_a_failing_host_function_reaches_the_caller_with_its_batch_and_the_engine_goes_on(engine_of, layer):
    engine = engine_of(layer)
    request_id = engine.submit(request("a"))
    engine.step()

    def broken(bits: torch.Tensor, row: int) -> None:
        raise RuntimeError("broken matcher")

    engine._states[request_id].fill = broken
    with pytest.raises(HostFuncError, match=r"in batch 2 of engine: RuntimeError: broken matcher"):
        engine.step()
    assert engine.outcome(request_id).finish_reason == "failed" and not engine.cancel(request_id)
    assert engine.slot_allocator.num_free == 4
    (outcome,) = run(engine, request("b"))
    assert is_person(outcome.text)


def broken_target(engine: GuidedEngine, state: Any) -> None:
    """The state breaks when the target's mask is filled: before any state has moved."""

    def fill(bits: Any, row: int) -> None:
        raise RuntimeError("broken matcher")

    state.fill = fill


def broken_verification(engine: GuidedEngine, state: Any) -> None:
    """It breaks when it moves past the accepted tokens, as the others do."""
    original = engine.guided._accept_row

    def accept_row(index: int, first: int, row: GuidedRow, moved: Any) -> None:
        if moved is state:
            raise RuntimeError("broken matcher")
        original(index, first, row, moved)

    engine.guided._accept_row = accept_row


def broken_last_draft(engine: GuidedEngine, state: Any) -> None:
    """It breaks at the last draft: all others stand behind accepted tokens and drafts."""
    original, fills = state.fill, iter(range(100))

    def fill(bits: Any, row: int) -> None:
        if bits is engine.guided._draft_mask.host and next(fills) == 2:
            raise RuntimeError("broken matcher")
        original(bits, row)

    state.fill = fill


@pytest.mark.parametrize("breaks", [broken_target, broken_verification, broken_last_draft])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_request_whose_grammar_fails_ends_so_and_the_text_beside_it_is_what_it_is_alone(
    engine_of, layer, breaks, steps
):
    (alone,) = run(engine_of(), request("beside"))
    (whole,) = run(engine_of(), request("fails"))
    engine = engine_of(layer)
    fails, beside = engine.submit(request("fails")), engine.submit(request("beside"))
    for _ in range(steps):
        engine.step()
    breaks(engine, engine._states[fails])
    with pytest.raises(HostFuncError, match="broken matcher"):
        for _ in range(4):  # the last draft is reached where no draft before it is refused
            engine.step()
    while engine.has_work:
        engine.step()
    failed, good = engine.outcome(fails), engine.outcome(beside)
    assert good.finish_reason == "stop" and is_person(good.text)
    assert (good.output.tokens, good.output.accepted) == (alone.output.tokens, alone.output.accepted)
    assert failed.finish_reason == "failed"
    assert 0 < len(failed.output.tokens) < len(whole.output.tokens)
    assert failed.output.tokens == whole.output.tokens[: len(failed.output.tokens)]


def test_what_a_failed_step_was_to_prefill_is_prefilled_by_the_next(engine_of, layer, image):
    (alone,) = run(engine_of(), request("new", image(90)))
    engine = engine_of(layer, encode="forward")
    fails = engine.submit(request("fails"))
    engine.step()
    broken_verification(engine, engine._states[fails])
    new = engine.submit(request("new", image(90)))
    with pytest.raises(HostFuncError, match="broken matcher"):
        engine.step()
    while engine.has_work:
        engine.step()
    assert engine.outcome(fails).finish_reason == "failed"
    assert engine.outcome(new).output.tokens == alone.output.tokens


def test_two_engines_on_one_pipeline_are_tracked_apart(engine_of):
    first, second = engine_of(name="first"), engine_of(name="second")
    run(first, request("a"))
    assert first.owner.pending and not second.owner.pending
    run(second, request("b", grammar=None, limit=3))
    assert first.owner.pending
    first.owner.drain()
    assert isinstance(first.owner, HostFuncOwner) and not first.owner.pending


def test_rows_are_announced_in_the_order_of_the_logits(engine_of, monkeypatch):
    engine = engine_of()
    seen: list[list[GuidedRow]] = []
    original = engine.guided.add_batch
    monkeypatch.setattr(
        engine.guided,
        "add_batch",
        lambda rows, *args, **kwargs: (seen.append(list(rows)), original(rows, *args, **kwargs)),
    )
    first = engine.submit(request("a"))
    engine.step()
    second = engine.submit(request("b"))
    states = engine._states[first], engine._states[second]
    engine.step()
    assert [row.state for row in seen[1]] == [states[1], states[0]]  # the prefill first
    assert [len(row.drafts) for row in seen[1]] == [0, 3]
    engine.cancel(first), engine.cancel(second)
