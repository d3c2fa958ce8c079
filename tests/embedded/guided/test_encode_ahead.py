"""Encoding ahead of a step that runs: the same results as between steps, behind drains, and a hang without them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from auto_deploy_ext.embedded.guided import GrammarSpec, GuidedEngine, GuidedRequest
from auto_deploy_ext.embedded.guided.images import ImageItem
from auto_deploy_ext.hostfuncs import OrderedLayer, ThreadStreams

from .conftest import IMAGE

pytest.importorskip("xgrammar", reason="guided decoding needs extra guided")

BOUND_SECONDS = 300
ROOT = Path(__file__).resolve().parents[3]
JSON = GrammarSpec.json_schema({"type": "array", "items": {"enum": ["cat", "dog"]}, "minItems": 2, "maxItems": 3})


@pytest.fixture
def engine_of(pipeline, vocabulary):
    """A function that makes an engine on the pipeline."""

    def make(layer: Any = None, **options: Any) -> GuidedEngine:
        layer = layer or OrderedLayer()
        return GuidedEngine(pipeline.model, pipeline.cm, vocabulary, layer=layer, image_token_id=IMAGE, **options)

    return make


def request(prompt: str, *images: torch.Tensor, grammar: GrammarSpec | None = JSON, limit: int = 40) -> GuidedRequest:
    patches = [IMAGE] * sum(image.shape[1] * image.shape[2] // 64 for image in images)
    return GuidedRequest((*prompt.encode(), *patches), limit, grammar=grammar, images=images)


def busy(engine: GuidedEngine, rows: int = 1) -> list[int]:
    """Bring guided texts so far that replays with host functions are pending."""
    spec = GrammarSpec.regex("[a-z]{60}")
    ids = [engine.submit(request(f"busy {n}", grammar=spec, limit=60)) for n in range(rows)]
    replays = engine.stats.replays
    while engine.stats.replays == replays:
        engine.step()
    assert engine.owner.pending
    return ids


def finish(engine: GuidedEngine) -> None:
    while engine.has_work:
        engine.step()


# ---------------------------------------------------------------- the same results


def seen(engine: GuidedEngine, pipeline: Any, requests: list[GuidedRequest]) -> dict[str, Any]:
    """Everything that an engine leaves when it has run requests, the first alone, and its rows step by step."""
    caches = pipeline.cm.kv_cache_manager.resources
    for cache in caches.values():
        cache.zero_()
    first, *others = requests
    ids = [engine.submit(first)]
    finish(engine)
    ids += [engine.submit(submitted) for submitted in others]
    states = {number: engine._states[number] for number in ids if number in engine._states}
    rows = []
    while engine.has_work:
        engine.step()
        rows.append([seq.request_id for seq in engine._running])
    masks = {}
    for number, state in states.items():
        mask = np.zeros((1, 9), dtype=np.int32)
        if not state.terminated:
            state.fill(mask, 0)
        masks[number] = (state.terminated, mask.tolist())
    outcomes = [engine.outcome(number) for number in ids]
    return {
        "tokens": [outcome.output.tokens for outcome in outcomes],
        "accepted": [outcome.output.accepted for outcome in outcomes],
        "reasons": [outcome.finish_reason for outcome in outcomes],
        "grammars": masks,
        "features": {key: features.clone() for key, features in engine.images.cache._features.items()},
        "caches": {name: cache.clone() for name, cache in caches.items()},
        "rows": rows,
    }


def test_tokens_grammar_states_and_caches_are_those_of_an_engine_that_encodes_between_steps(
    engine_of, layer, image, pipeline
):
    requests = [
        request("first", image(4), limit=2),
        request("a", image(1)),
        request("b", image(2), image(3, 1, 2), limit=9),
        request("c", image(3, 1, 2), image(4), grammar=None, limit=12),
        request("d", image(5, 3, 1), grammar=GrammarSpec.regex("[xyz]{9,12}!")),
    ]
    ahead, between = engine_of(layer, images_per_step=1), engine_of(layer, images_per_step=1, encode_ahead=False)
    first, second = seen(ahead, pipeline, requests), seen(between, pipeline, requests)
    for what in ("tokens", "accepted", "reasons", "grammars", "rows"):
        assert first[what] == second[what], what
    for what in ("features", "caches"):
        assert first[what].keys() == second[what].keys()
        for name, tensor in first[what].items():
            assert torch.equal(tensor, second[what][name]), (what, name)
    assert "length" in first["reasons"] and "stop" in first["reasons"]
    assert (ahead.images.stats.calls_ahead, between.images.stats.calls_ahead) == (3, 0)
    assert ahead.images.stats.images == between.images.stats.images
    assert ahead.images.stats.partial_hits == between.images.stats.partial_hits > 0


def test_with_more_requests_than_room_the_tokens_are_the_same(engine_of, layer, image):
    spec = GrammarSpec.regex("[a-z]{40}")
    requests = [request(f"text {n}", grammar=spec, limit=8 + 5 * n) for n in range(4)]
    requests += [request(f"look {n}", image(10 + n % 2), image(20 + n), limit=6 + 3 * n) for n in range(4)]

    def tokens(**options: Any) -> list[Any]:
        engine = engine_of(layer, images_per_step=1, **options)
        ids = [engine.submit(submitted) for submitted in requests]
        finish(engine)
        assert (engine.images.stats.calls_ahead > 0) == options["encode_ahead"]
        assert engine.images.stats.prefetch_skipped > 0
        return [engine.outcome(number).output.tokens for number in ids]

    assert tokens(encode_ahead=True) == tokens(encode_ahead=False)


# ---------------------------------------------------------------- when, and what is drained


def test_an_image_is_encoded_after_the_launch_and_before_the_tokens_are_read(engine_of, image, pipeline, monkeypatch):
    layer = ThreadStreams()
    engine = engine_of(layer)
    busy(engine)
    order: list[str] = []

    def note(target: Any, name: str) -> None:
        original = getattr(target, name)
        monkeypatch.setattr(target, name, lambda *args, **kwargs: (order.append(name), original(*args, **kwargs))[1])

    for target, name in ((engine.runner, "replay"), (engine.owner, "drain"), (engine.owner, "synchronize")):
        note(target, name)
    handle = pipeline.model.vision_encoder.tower.register_forward_pre_hook(lambda *args: order.append("encode"))
    engine.submit(request("look", image(30)))
    engine.step()
    handle.remove()
    assert order == ["replay", "drain", "encode", "synchronize"]
    finish(engine)
    layer.close()


def test_what_one_drain_cleared_no_second_encoder_waits_for(engine_of, layer, image):
    """Two calls ahead, one step after the other: a drain each, because each step launches anew."""
    engine = engine_of(layer, images_per_step=1)
    busy(engine)
    drains = engine.owner.stats.drains
    engine.submit(request("two", image(31), image(32), limit=2))
    engine.step()
    engine.step()
    assert engine.owner.stats.drains == drains + 2 and engine.images.stats.calls_ahead == 2
    finish(engine)


def test_nothing_is_encoded_ahead_for_a_request_without_room_while_host_functions_are_pending(engine_of, layer, image):
    engine = engine_of(layer)
    busy(engine, rows=4)
    engine.submit(request("waits", image(33)))
    drains = engine.owner.stats.drains
    engine.step()
    stats = engine.images.stats
    assert (stats.calls, stats.prefetch_skipped, engine.owner.stats.drains) == (0, 1, drains)
    finish(engine)
    assert stats.calls == 1


def test_of_a_partial_hit_only_the_rest_is_encoded_ahead_and_of_a_full_one_nothing(engine_of, layer, image):
    engine = engine_of(layer)
    engine.submit(request("one", image(34), limit=2))
    finish(engine)
    busy(engine)
    engine.submit(request("two", image(34), image(35), limit=2))
    engine.step()
    stats = engine.images.stats
    assert (stats.partial_hits, stats.calls_ahead, stats.images["schedule"]) == (1, 1, 2)
    drains = engine.owner.stats.drains
    engine.submit(request("again", image(35), image(34), limit=2))
    engine.step()
    assert (stats.full_hits, stats.calls_ahead, engine.owner.stats.drains) == (1, 1, drains)
    finish(engine)


def test_a_request_that_is_cancelled_after_its_image_was_encoded_ahead_leaves_only_the_cached_image(
    engine_of, layer, image
):
    alone = engine_of()
    (kept,) = busy(alone)
    finish(alone)
    engine = engine_of(layer)
    (number,) = busy(engine)
    goes = engine.submit(request("goes", image(36)))
    engine.step()
    assert engine.images.is_encoded(goes) and engine.images.stats.calls_ahead == 1
    assert engine.cancel(goes)
    assert goes not in engine.images._held and len(engine._running) == 1
    again = engine.submit(request("again", image(36), limit=3))
    finish(engine)
    assert engine.images.stats.calls == 1 and engine.outcome(again).output.tokens
    assert engine.outcome(number).output.tokens == alone.outcome(kept).output.tokens


def test_images_stay_on_the_host_unpinned_where_the_encoder_does(engine_of, image):
    (item,) = engine_of().images.items_of((IMAGE,) * 4, (image(37),))
    assert not item.pixels.is_pinned() and isinstance(item, ImageItem)


# ---------------------------------------------------------------- the deadlock


@pytest.mark.skipif(sys.platform != "linux", reason="the wait that keeps the GIL is a POSIX semaphore")
def test_an_encoder_ahead_hangs_without_drains_and_not_with_them():
    spec = importlib.util.spec_from_file_location("watchdog_of_benchmarks", ROOT / "benchmarks" / "watchdog.py")
    assert spec is not None and spec.loader is not None
    watchdog = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = watchdog  # dataclasses look their module up
    spec.loader.exec_module(watchdog)
    rounds = 20
    command = [sys.executable, "-m", "tests.embedded.guided.ahead", str(rounds)]
    # Silence before the hang may only be a busy machine's; the lines tell which it was.
    watched = watchdog.watch_child(command, bound=8.0, start_bound=140.0, total_bound=200.0, cwd=ROOT)
    with_drains = [line for line in watched.lines if line.startswith("with drains")]
    assert len(with_drains) == rounds, watched
    assert with_drains[-1] == f"with drains: {rounds + 1} of {rounds + 1} ahead"
    assert (watched.lines[-1], watched.killed) == ("without drains:", "progress"), watched
