"""One of two ranks that run the same requests on devices of different speed; started by test_two_ranks.py.

python -m tests.embedded.guided.rank RANK STORE
"""

from __future__ import annotations

import datetime
import sys
import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist

from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.guided import GrammarSpec, GuidedEngine, GuidedRequest, Vocabulary
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.hostfuncs import ThreadStreams
from tests.bounded import arm
from tests.embedded.guided.conftest import OVERRIDES

BOUND = 120.0


class PromptStreams(ThreadStreams):
    """A device that has always done everything by the time the host looks."""

    def record_event(self, stream: Hashable, event: Any = None) -> threading.Event:
        recorded = super().record_event(stream, event)
        assert recorded.wait(BOUND)
        return recorded


class LateStreams(ThreadStreams):
    """A device that does nothing before the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._is_awaited = threading.Event()

    def _submit(self, work: Callable[[], None]) -> None:
        if not self._on_worker():
            super()._submit(lambda: self._is_awaited.wait(BOUND) and None)
        super()._submit(work)

    def wait_event(self, event: threading.Event) -> None:
        self._is_awaited.set()
        try:
            super().wait_event(event)
        finally:
            self._is_awaited.clear()


def requests() -> list[GuidedRequest]:
    """Four without grammars, which fill the batch while nothing is pending; then eight with grammars and images."""
    generator = torch.Generator().manual_seed(0)
    grammar = GrammarSpec.regex("[a-z]{8,16}")
    free = [GuidedRequest(tuple(f"free {n}".encode()), 6 + 4 * n) for n in range(4)]
    look = [
        GuidedRequest(
            (*f"look {n}".encode(), *[257] * 4),
            24,
            grammar=grammar,
            images=(torch.randn(3, 16, 16, generator=generator),),
        )
        for n in range(8)
    ]
    return [*free, *look]


def run(pipeline: Pipeline, rank: int, asks_device: bool) -> dict[str, Any]:
    """Run the requests to their end; gives what both ranks decided, where their devices were, and their tokens."""
    layer = LateStreams() if rank else PromptStreams()
    engine = GuidedEngine(
        pipeline.model,
        pipeline.cm,
        Vocabulary.of_bytes(258, 256),
        layer=layer,
        image_token_id=257,
        images_per_step=1,
    )
    assert engine.images is not None
    gates: list[tuple[bool, bool]] = []
    host_state = engine.images.may_prefetch

    def may_prefetch() -> bool:
        is_done = all(map(layer.event_done, engine.owner._events.values()))
        gates.append((is_done if asks_device else host_state(), is_done))
        return gates[-1][0]

    engine.images.may_prefetch = may_prefetch  # type: ignore[method-assign]
    ids = [engine.submit(request) for request in requests()]
    steps = []
    while engine.has_work:
        del gates[:]
        engine.step()
        both: list[Any] = [None, None]
        # Collective in every step, as the encoder's own reductions would be where ranks do prefetch.
        dist.all_gather_object(both, list(gates))
        steps.append(both)
    tokens: list[Any] = [None, None]
    dist.all_gather_object(tokens, [engine.outcome(request_id).output.tokens for request_id in ids])
    images: list[Any] = [None, None]
    dist.all_gather_object(images, engine.images.stats.images)
    engine.owner.drain()
    return {"gates": [both for both in steps if any(both)], "tokens": tokens, "images": images}


def main(pipeline: Pipeline, rank: int, store: str) -> dict[str, Any]:
    """What both ranks saw with the engine's own gate (`host`), then with one that asks the device (`device`)."""
    timeout = datetime.timedelta(seconds=BOUND)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    try:
        return {"host": run(pipeline, rank, asks_device=False), "device": run(pipeline, rank, asks_device=True)}
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    arm(2 * BOUND)
    torch.set_num_threads(1)
    main(build_pipeline(load_config("guided_vlm", overrides=OVERRIDES)), 1, sys.argv[1])
