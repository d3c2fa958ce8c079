"""Encodes ahead of steps that run, with a vision tower that waits for them with the GIL held; started by a test.

First with the drains that the transform has put there, then without them, which never ends.

python -m tests.embedded.guided.ahead ROUNDS
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.guided import GrammarSpec, GuidedEngine, GuidedRequest, Vocabulary
from auto_deploy_ext.embedded.pipeline import build_pipeline
from auto_deploy_ext.hostfuncs.drains import drain_hook
from tests.bounded import arm
from tests.embedded.guided.conftest import IMAGE, OVERRIDES

BOUND = 150.0


def look(number: int) -> GuidedRequest:
    """A request that ends with the step that it joins, with an image that nobody has seen."""
    image = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(number))
    return GuidedRequest((*b"look", *[IMAGE] * 4), 1, images=(image,))


def main(rounds: int) -> None:
    """A line for every image that was encoded."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
    from guided_soak import WaitableStreams, hold_gil_in_tower

    pipeline = build_pipeline(load_config("guided_vlm", overrides=OVERRIDES))
    layer = WaitableStreams()
    engine = GuidedEngine(pipeline.model, pipeline.cm, Vocabulary.of_bytes(258, 256), layer=layer, image_token_id=IMAGE)
    hold_gil_in_tower(pipeline, layer)
    assert engine.images is not None
    # On a busy machine the worker could else get the GIL between a launch and the tower's wait, and nothing hang.
    sys.setswitchinterval(1000)

    def encode(number: int) -> str:
        if not any(not seq.is_prefill and len(seq.tokens) < 80 for seq in engine._running):
            while engine.has_work:
                engine.step()
            engine.submit(GuidedRequest(tuple(b"busy"), 100, grammar=GrammarSpec.regex("[a-z]{100}")))
            replays = engine.stats.replays
            while engine.stats.replays == replays:
                engine.step()
        request_id = engine.submit(look(number))
        while engine.outcome(request_id) is None:
            engine.step()
        return f"{engine.images.stats.calls_ahead} of {engine.images.stats.calls} ahead"

    encode(-1)  # what is set up at first takes its time
    print("ready", flush=True)
    for number in range(rounds):
        print(f"with drains: {encode(number)}", flush=True)
    hooks = pipeline.model.vision_encoder._forward_pre_hooks
    del hooks[next(key for key, hook in hooks.items() if hook is drain_hook)]
    print("without drains:", flush=True)
    print(f"without drains: {encode(rounds)}", flush=True)


if __name__ == "__main__":
    arm(BOUND)
    torch.set_num_threads(1)
    main(int(sys.argv[1]))
