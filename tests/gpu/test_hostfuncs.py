"""Host functions and guided decoding on a GPU: order with kernels, graphs, lifetimes, failures, the deadlock."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from auto_deploy_ext.embedded.graph_runner import GraphRunner
from auto_deploy_ext.hostfuncs import (
    HostFuncError,
    HostFuncOwner,
    HostFuncUsageError,
    drain_hostfuncs,
    hostfunc,
    hostfuncs_pending,
    use_owner,
)
from tests.bounded import bounded

__all__ = ["bounded"]

BOUND_SECONDS = 600
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def owner():
    from auto_deploy_ext.hostfuncs.cuda import CudaLayer

    owner = HostFuncOwner("engine", CudaLayer())
    with use_owner(owner):
        yield owner
        owner.drain()


class Data:
    """User data that a weak reference can watch."""


@hostfunc
def append(log: list, value: Any) -> None:
    log.append(value)


def busy(milliseconds: float = 20) -> None:
    """Keep the stream busy."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


# ---------------------------------------------------------------- order


def test_a_host_function_runs_between_the_kernels_around_it(owner):
    """It reads what a copy before it brought to the host, and a copy after it brings back what it wrote."""
    device = torch.zeros(4, device="cuda")
    pinned = torch.zeros(4, pin_memory=True)
    view = pinned.numpy()

    @hostfunc
    def square() -> None:
        view[:] = view**2

    torch.cuda.synchronize()
    busy()
    device.fill_(3.0)
    pinned.copy_(device, non_blocking=True)
    square()
    device.copy_(pinned, non_blocking=True)
    device.add_(1)
    assert hostfuncs_pending()
    drain_hostfuncs()
    assert device.tolist() == [10.0] * 4 and not hostfuncs_pending()


def test_a_launch_does_not_wait(owner):
    log: list[int] = []
    torch.cuda.synchronize()
    busy(200)
    work = torch.cuda.Event()
    work.record()
    append(log, 1)
    assert not work.query() and log == []
    drain_hostfuncs()
    assert log == [1]


def test_replays_run_the_captured_host_functions_on_the_data_of_each_replay(owner):
    static = torch.zeros(2, device="cuda")
    pinned = torch.zeros(2, pin_memory=True)
    view, seen = pinned.numpy(), []

    @hostfunc
    def note() -> None:
        seen.append(view.tolist())
        view[:] += 0.5

    def forward() -> torch.Tensor:
        pinned.copy_(static * 2, non_blocking=True)
        note()
        return pinned.to("cuda", non_blocking=True) + 1

    forward()
    owner.drain()
    seen.clear()
    runner = GraphRunner(owner)
    result = runner.capture("key", forward)
    assert seen == [] and runner.contains_hostfuncs("key")
    for value in (1.0, 2.0, 3.0):
        static.fill_(value)
        runner.replay("key")
        owner.synchronize()
        assert result.tolist() == [2 * value + 1.5] * 2
    assert seen == [[2.0] * 2, [4.0] * 2, [6.0] * 2]
    assert hostfuncs_pending()
    drain_hostfuncs()
    assert not hostfuncs_pending()
    runner.release()


def test_many_replays_without_a_drain_lose_nothing(owner):
    log: list[int] = []
    static = torch.zeros(1, device="cuda")
    runner = GraphRunner(owner)

    def forward() -> None:
        static.add_(1)
        append(log, 1)

    runner.capture("key", forward)
    for batch in range(2000):
        owner.batch = batch
        runner.replay("key")
    drain_hostfuncs()
    assert len(log) == 2000 and owner.stats.runs == 2000
    runner.release()


def test_a_drain_covers_all_streams(owner):
    log: list[int] = []
    streams = [torch.cuda.Stream() for _ in range(3)]
    for number, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            busy(30 * (3 - number))
            append(log, number)
    assert len(owner.outstanding_streams) == 3
    drain_hostfuncs()
    assert sorted(log) == [0, 1, 2]


def test_a_drain_does_nothing_while_capturing(owner):
    log: list[int] = []
    append(log, 1)
    drained: list[bool] = []
    runner = GraphRunner(owner)
    static = torch.zeros(1, device="cuda")

    def forward() -> None:
        static.add_(1)
        drained.append(drain_hostfuncs())

    runner.capture("key", forward)
    assert drained == [False] and hostfuncs_pending()
    drain_hostfuncs()
    assert log == [1]


def test_a_capture_that_nobody_collects_is_refused(owner):
    static = torch.zeros(1, device="cuda")

    def forward() -> None:
        static.add_(1)
        append([], 1)

    with pytest.raises(HostFuncUsageError, match="does not collect host functions"):
        owner.layer.capture(forward)
    torch.cuda.synchronize()


# ---------------------------------------------------------------- lifetimes, failures, the collector


def test_eager_data_lives_until_it_has_run_and_captured_data_as_long_as_its_graph(owner):
    eager, captured = Data(), Data()
    alive = weakref.ref(eager), weakref.ref(captured)
    static = torch.zeros(1, device="cuda")
    busy(50)
    append([], eager)
    del eager
    gc.collect()
    assert alive[0]() is not None
    drain_hostfuncs()
    assert alive[0]() is None

    def forward(data=captured) -> None:
        static.add_(1)
        append([], data)

    runner = GraphRunner(owner)
    runner.capture("key", forward)
    del captured, forward
    for _ in range(3):
        runner.replay("key")
    drain_hostfuncs()
    gc.collect()
    assert alive[1]() is not None
    runner.release()
    gc.collect()
    assert alive[1]() is None


def test_a_runner_that_is_dropped_while_a_replay_is_outstanding_frees_its_data_afterwards(owner):
    data, log = Data(), []
    alive = weakref.ref(data)
    static = torch.zeros(1, device="cuda")

    def forward(data=data) -> None:
        torch.cuda._sleep(int(50e6))
        static.add_(1)
        append(log, id(data))

    runner = GraphRunner(owner)
    runner.capture("key", forward)
    expected = id(data)
    runner.replay("key")
    del data, forward, runner
    drain_hostfuncs()
    drain_hostfuncs()
    gc.collect()
    assert log == [expected] and alive() is None


def test_failures_in_replays_name_their_batches(owner):
    static = torch.zeros(1, device="cuda")
    counter = iter(range(100))

    @hostfunc
    def fails_on_odd() -> None:
        if next(counter) % 2:
            raise ValueError("odd")

    def forward() -> None:
        static.add_(1)
        fails_on_odd()

    runner = GraphRunner(owner)
    runner.capture("key", forward)
    for batch in range(10, 16):
        owner.batch = batch
        runner.replay("key")
    with pytest.raises(HostFuncError) as caught:
        drain_hostfuncs()
    assert [failure.batch for failure in caught.value.failures] == [11, 13, 15]
    runner.release()


def test_operations_on_cuda_tensors_inside_are_refused(owner):
    tensor = torch.zeros(1, device="cuda")
    hostfunc(lambda: tensor.add_(1))()
    with pytest.raises(HostFuncError, match="on a CUDA tensor inside a host function"):
        drain_hostfuncs()
    assert tensor.item() == 0


def test_the_collector_frees_no_cuda_tensor_inside_a_host_function(owner):
    freed_by: list[str] = []

    class Cycle:
        def __init__(self) -> None:
            self.itself = self
            self.tensor = torch.zeros(1024, device="cuda")
            self.event = torch.cuda.Event()
            self.event.record()

        def __del__(self) -> None:
            freed_by.append(threading.current_thread().name)

    @hostfunc
    def allocate() -> None:
        kept = [[i] for i in range(20000)]
        assert len(kept) == 20000

    before = gc.get_threshold()
    gc.set_threshold(10, 2, 2)
    try:
        for _ in range(20):
            Cycle()
            allocate()
        drain_hostfuncs()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert set(freed_by) == {threading.current_thread().name} and len(freed_by) == 20


# ---------------------------------------------------------------- the deadlock


def test_the_deadlock_and_its_absence():
    """Without the transform every child hangs, with it 200 runs of 200 complete."""
    script = ROOT / "benchmarks" / "hostfunc_deadlock.py"
    done = subprocess.run(
        [sys.executable, str(script), "--children", "1", "--bound", "8"], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 children hung" in done.stdout and "200 of 200 runs completed" in done.stdout


# ---------------------------------------------------------------- guided decoding


@pytest.fixture(scope="module")
def pipeline():
    pytest.importorskip("xgrammar")
    from auto_deploy_ext.embedded.config import load_config
    from auto_deploy_ext.embedded.pipeline import build_pipeline

    return build_pipeline(load_config("guided_vlm", overrides={"device": "cuda"}))


def run(pipeline: Any, graphs: bool, encode: str) -> tuple[Any, list[str]]:
    from auto_deploy_ext.embedded.guided import GrammarSpec, GuidedEngine, GuidedRequest, Vocabulary

    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "kind": {"enum": ["cat", "dog"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "kind", "age"],
        "additionalProperties": False,
    }
    engine = GuidedEngine(
        pipeline.model,
        pipeline.cm,
        Vocabulary.of_bytes(258, 256),
        graphs=graphs,
        encode=encode,
        image_token_id=257,
    )
    generator = torch.Generator().manual_seed(0)
    ids = []
    for number in range(8):
        image = torch.randn(3, 8 * (1 + number % 3), 16, generator=generator)
        patches = (257,) * (image.shape[1] * image.shape[2] // 64)
        prompt = tuple(f"look {number}".encode())
        images = (image,) if number % 2 else ()
        request = GuidedRequest(
            prompt + (patches if images else ()), 96, grammar=GrammarSpec.json_schema(schema), images=images
        )
        ids.append(engine.submit(request))
    while engine.has_work:
        engine.step()
    outcomes = [engine.outcome(request_id) for request_id in ids]
    assert all(outcome is not None and outcome.finish_reason == "stop" for outcome in outcomes)
    for outcome in outcomes:
        value = json.loads(bytes(token for token in outcome.output.tokens if token < 256).decode())
        assert list(value) == ["name", "kind", "age"] and len(value["name"]) <= 6 and 0 <= value["age"] <= 99
    engine.owner.drain()
    return engine, [outcome.text for outcome in outcomes]


@pytest.mark.parametrize("encode", ["schedule", "forward"])
def test_texts_with_captured_graphs_obey_their_schema_and_equal_those_without(pipeline, encode):
    _, expected = run(pipeline, False, encode)
    engine, texts = run(pipeline, True, encode)
    assert engine.stats.replays > 0 and engine.owner.stats.replays == engine.stats.replays
    assert texts == expected
    engine.runner.release()


def test_eager_unguided_batches_launch_no_host_function(pipeline):
    from auto_deploy_ext.embedded.guided import GuidedEngine, GuidedRequest, Vocabulary

    engine = GuidedEngine(pipeline.model, pipeline.cm, Vocabulary.of_bytes(258, 256), graphs=False)
    engine.submit(GuidedRequest(tuple(b"free"), 16))
    while engine.has_work:
        engine.step()
    assert (engine.owner.stats.launches, engine.guided.copies) == (0, 0)
