"""Host functions: order, lifetime of their data, failures, what is refused inside, and the garbage collector."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from auto_deploy_ext.embedded.graph_runner import GraphRunner
from auto_deploy_ext.hostfuncs import (
    HostFuncError,
    HostFuncOwner,
    HostFuncUsageError,
    OrderedLayer,
    ThreadStreams,
    drain_hostfuncs,
    hostfunc,
    hostfuncs_pending,
    inside_hostfunc,
    use_owner,
)

BOUND = 10.0  # seconds; nothing here takes a tenth of one


@pytest.fixture(params=[OrderedLayer, ThreadStreams])
def owner(request):
    layer = request.param()
    owner = HostFuncOwner("engine", layer)
    with use_owner(owner):
        yield owner
    if isinstance(layer, ThreadStreams):
        layer.close()


@pytest.fixture
def threaded():
    layer = ThreadStreams()
    owner = HostFuncOwner("engine", layer)
    with use_owner(owner):
        yield owner
    layer.close()


class Data:
    """User data that a weak reference can watch."""


@hostfunc
def append(log: list, value) -> None:
    log.append(value)


@hostfunc
def wait_for(gate: threading.Event) -> None:
    assert gate.wait(BOUND)


@hostfunc
def fail(message: str) -> None:
    raise ValueError(message)


# ---------------------------------------------------------------- order and capture


def test_eager_host_functions_run_in_the_order_of_their_launches(owner):
    log: list[int] = []
    for value in range(5):
        append(log, value)
    drain_hostfuncs()
    assert log == [0, 1, 2, 3, 4]
    assert owner.stats.launches == owner.stats.runs == 5


def test_on_the_cpu_a_host_function_has_run_when_its_launch_returns():
    log: list[int] = []
    with use_owner(HostFuncOwner("cpu", OrderedLayer())):
        append(log, 1)
    assert log == [1]


def test_on_a_thread_stream_a_launch_returns_before_the_host_function_has_run(threaded):
    gate, log = threading.Event(), []
    wait_for(gate)
    append(log, 1)
    assert log == []
    gate.set()
    threaded.synchronize()
    assert log == [1]


def test_a_capture_runs_no_host_function_and_every_replay_runs_those_of_the_graph(owner):
    log: list[int] = []
    static = torch.zeros(2)

    def forward() -> torch.Tensor:
        append(log, 1)
        append(log, 2)
        return static * 2

    runner = GraphRunner(owner)
    result = runner.capture("key", forward)
    assert log == [] and not hostfuncs_pending()
    for value in (1.0, 5.0):
        owner.synchronize()
        static.fill_(value)
        assert runner.replay("key") is result
    owner.synchronize()
    assert log == [1, 2, 1, 2]
    assert result.tolist() == [10.0, 10.0]


def test_a_captured_call_keeps_the_arguments_of_its_capture(owner):
    log: list[int] = []
    step = 0

    def forward() -> None:
        nonlocal step
        step += 1
        append(log, step)

    runner = GraphRunner(owner)
    runner.capture("key", forward)
    runner.replay("key")
    runner.replay("key")
    drain_hostfuncs()
    assert log == [1, 1]


def test_the_runner_knows_which_graphs_contain_host_functions(owner):
    runner = GraphRunner(owner)
    runner.capture("with", lambda: append([], 1))
    runner.capture("without", lambda: torch.ones(1))
    assert (runner.contains_hostfuncs("with"), runner.contains_hostfuncs("without")) == (True, False)
    runner.replay("without")
    assert not hostfuncs_pending()
    runner.replay("with")
    assert hostfuncs_pending()


def test_a_capture_that_nobody_collects_is_refused(owner):
    with pytest.raises(HostFuncUsageError, match="append is launched in a capture that does not collect"):
        owner.layer.capture(lambda: append([], 1))


def test_a_second_capture_under_a_key_is_refused(owner):
    runner = GraphRunner(owner)
    runner.capture("key", lambda: None)
    with pytest.raises(ValueError, match="'key' already"):
        runner.capture("key", lambda: None)


def test_a_method_can_be_a_host_function(owner):
    class Counter:
        def __init__(self) -> None:
            self.total = 0

        @hostfunc
        def add(self, n: int) -> None:
            self.total += n

    counter = Counter()
    counter.add(2)
    counter.add(n=3)
    drain_hostfuncs()
    assert counter.total == 5


# ---------------------------------------------------------------- lifetime of user data


def test_the_data_of_an_eager_launch_lives_until_it_has_run_and_no_longer(threaded):
    gate, data = threading.Event(), Data()
    alive = weakref.ref(data)
    wait_for(gate)
    append([], data)
    del data
    gc.collect()
    assert alive() is not None
    gate.set()
    drain_hostfuncs()
    threaded.synchronize()
    assert alive() is None


def test_captured_data_lives_as_long_as_the_graph(owner):
    data = Data()
    alive = weakref.ref(data)
    runner = GraphRunner(owner)
    runner.capture("key", lambda data=data: append([], data))
    del data
    runner.replay("key")
    drain_hostfuncs()
    gc.collect()
    assert alive() is not None
    runner.release()
    gc.collect()
    assert alive() is None


def test_a_graph_that_is_dropped_while_a_replay_is_outstanding_keeps_its_data_until_that_is_over(threaded):
    gate, data, log = threading.Event(), Data(), []
    alive = weakref.ref(data)
    runner = GraphRunner(threaded)

    def forward(data=data) -> None:
        wait_for(gate)
        append(log, id(data))

    runner.capture("key", forward)
    runner.replay("key")
    expected = id(data)
    del runner, data, forward
    gc.collect()
    assert alive() is not None
    gate.set()
    drain_hostfuncs()
    gc.collect()
    assert log == [expected] and alive() is None


def test_what_a_host_function_returns_is_freed_by_another_thread(threaded):
    freed_by: list[str] = []

    class Result:
        def __del__(self) -> None:
            freed_by.append(threading.current_thread().name)

    @hostfunc
    def make() -> Result:
        return Result()

    make()
    drain_hostfuncs()
    assert freed_by == [threading.current_thread().name]


# ---------------------------------------------------------------- failures


def test_a_failure_is_raised_by_the_next_drain_with_its_batch(owner):
    owner.batch = 7
    fail("no such token")
    with pytest.raises(HostFuncError, match=r"host function fail failed in batch 7 of engine: ValueError: no such"):
        drain_hostfuncs()
    assert not hostfuncs_pending()
    drain_hostfuncs()


def test_a_failure_is_raised_by_a_synchronisation_too(owner):
    fail("bad")
    with pytest.raises(HostFuncError, match="bad") as caught:
        owner.synchronize()
    assert isinstance(caught.value.__cause__, ValueError)


def test_no_failure_hides_another_and_later_host_functions_still_run(owner):
    log: list[int] = []
    for batch, message in enumerate(("first", "second")):
        owner.batch = batch
        fail(message)
    append(log, 1)
    with pytest.raises(HostFuncError) as caught:
        drain_hostfuncs()
    assert [(f.batch, str(f.exception)) for f in caught.value.failures] == [(0, "first"), (1, "second")]
    assert log == [1]


def test_a_failure_in_a_replay_names_the_batch_of_that_replay(threaded):
    gate, counter = threading.Event(), iter(range(3))

    @hostfunc
    def fails_second_time() -> None:
        if next(counter) == 1:
            raise RuntimeError("second")

    def forward() -> None:
        wait_for(gate)
        fails_second_time()

    runner = GraphRunner(threaded)
    runner.capture("key", forward)
    for batch in (10, 11, 12):  # all launched before the first runs
        threaded.batch = batch
        runner.replay("key")
    gate.set()
    with pytest.raises(HostFuncError) as caught:
        drain_hostfuncs()
    assert [failure.batch for failure in caught.value.failures] == [11]


def test_system_exit_in_a_host_function_does_not_end_anything(owner):
    @hostfunc
    def leave() -> None:
        raise SystemExit(3)

    leave()
    with pytest.raises(HostFuncError, match="SystemExit: 3"):
        drain_hostfuncs()


# ---------------------------------------------------------------- what is refused inside


@pytest.mark.parametrize(
    ("inside", "what"),
    [
        (drain_hostfuncs, "a drain inside a host function"),
        (lambda: append([], 1), "a launch of append inside a host function"),
        (
            lambda: torch.ops.aten.empty.memory_format([1], device=torch.device("cuda")),
            "on a CUDA tensor inside a host function",
        ),
    ],
)
def test_device_calls_inside_a_host_function_are_refused(owner, inside, what):
    hostfunc(lambda: inside())()
    with pytest.raises(HostFuncError, match=what):
        drain_hostfuncs()


def test_a_synchronisation_inside_a_host_function_is_refused(owner):
    hostfunc(lambda: owner.synchronize())()
    with pytest.raises(HostFuncError, match="a synchronisation inside a host function"):
        drain_hostfuncs()


def test_host_tensors_may_be_used_inside_a_host_function(owner):
    tensor = torch.zeros(3)
    hostfunc(lambda: tensor.add_(2))()
    drain_hostfuncs()
    assert tensor.tolist() == [2.0, 2.0, 2.0]


def test_a_thread_knows_whether_it_is_in_a_host_function(owner):
    seen: list[bool] = []
    hostfunc(lambda: seen.append(inside_hostfunc()))()
    drain_hostfuncs()
    assert seen == [True] and not inside_hostfunc()


# ---------------------------------------------------------------- the garbage collector


class Cycle:
    """Garbage that only the cyclic collector can free; notes which thread did."""

    freed_by: list[str]

    def __init__(self, freed_by: list[str]) -> None:
        self.freed_by = freed_by
        self.itself = self

    def __del__(self) -> None:
        self.freed_by.append(threading.current_thread().name)


@pytest.fixture
def eager_collector():
    """The collector runs after every ten allocations."""
    before, enabled = gc.get_threshold(), gc.isenabled()
    gc.collect()
    gc.enable()
    gc.set_threshold(10, 2, 2)
    yield
    gc.set_threshold(*before)
    (gc.enable if enabled else gc.disable)()


def test_the_collector_frees_nothing_inside_a_host_function(threaded, eager_collector):
    freed_by: list[str] = []
    finished: list[int] = []

    @hostfunc
    def allocate() -> None:
        Cycle(freed_by)
        kept = [[i] for i in range(5000)]  # far beyond the threshold
        finished.append(len(kept) + len(freed_by))

    for _ in range(3):
        allocate()
    drain_hostfuncs()
    gc.collect()
    assert finished == [5000] * 3
    assert freed_by == [threading.current_thread().name] * 3


def test_the_collector_stays_off_while_something_is_outstanding_and_comes_back_after(threaded, eager_collector):
    gate = threading.Event()
    wait_for(gate)
    assert not gc.isenabled()
    gate.set()
    drain_hostfuncs()
    assert gc.isenabled()


def test_a_synchronisation_brings_it_back_too_unless_another_stream_is_outstanding(threaded, eager_collector):
    gate = threading.Event()
    append([], 1)
    threaded.synchronize()
    assert gc.isenabled() and hostfuncs_pending()
    with threaded.layer.stream("other"):
        wait_for(gate)
    append([], 1)
    threaded.synchronize()
    assert not gc.isenabled()
    gate.set()
    drain_hostfuncs()
    assert gc.isenabled()


def test_garbage_is_still_freed_when_nothing_ever_drains(threaded, eager_collector):
    freed_by: list[str] = []
    for _ in range(50):
        Cycle(freed_by)
        append([], 1)
        time.sleep(0.001)
    assert len(freed_by) > 10
    assert set(freed_by) == {threading.current_thread().name}


def test_a_collector_that_was_off_stays_off(threaded):
    gc.disable()
    try:
        append([], 1)
        drain_hostfuncs()
        assert not gc.isenabled()
    finally:
        gc.enable()
