"""What is pending, per owner, whatever the device has done; and drains."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from auto_deploy_ext.embedded.graph_runner import GraphRunner
from auto_deploy_ext.hostfuncs import (
    HostFuncOwner,
    LaunchLayer,
    OrderedLayer,
    ThreadStreams,
    cuda,
    drain_hostfuncs,
    hostfunc,
    hostfuncs_pending,
    pending,
    use_owner,
)
from auto_deploy_ext.hostfuncs.hostfunc import free_leftovers

BOUND = 10.0


@hostfunc
def wait_for(gate: threading.Event) -> None:
    assert gate.wait(BOUND)


@hostfunc
def nothing() -> None:
    pass


@pytest.fixture
def layer():
    layer = ThreadStreams()
    yield layer
    layer.close()


def runner_of(owner: HostFuncOwner, gate: threading.Event | None = None) -> GraphRunner:
    """A runner with one graph, `key`, whose host function waits for the gate."""
    runner = GraphRunner(owner)
    runner.capture("key", lambda: nothing() if gate is None else wait_for(gate))
    return runner


def test_pending_is_set_by_a_replay_and_cleared_by_a_drain_whatever_the_device_has_done(layer):
    owner = HostFuncOwner("engine", layer)
    runner = runner_of(owner)
    with use_owner(owner):
        assert not hostfuncs_pending()
        runner.replay("key")
        owner.synchronize()  # the host function has run now, and the answer does not change for that
        assert owner.stats.runs == 1 and hostfuncs_pending()
        assert drain_hostfuncs() is True
        assert not hostfuncs_pending()


def test_an_eager_launch_is_pending_too(layer):
    owner = HostFuncOwner("engine", layer)
    gate = threading.Event()
    with use_owner(owner):
        wait_for(gate)
        assert hostfuncs_pending()
        threading.Timer(0.05, gate.set).start()
        drain_hostfuncs()
        assert owner.stats.runs == 1 and not hostfuncs_pending()


def test_a_drain_with_nothing_pending_does_nothing(layer):
    owner = HostFuncOwner("engine", layer)
    assert drain_hostfuncs(owner) is False
    assert (owner.stats.drains, owner.stats.idle_drains) == (0, 1)


def test_a_drain_waits_for_the_event_and_counts_its_time(layer):
    owner = HostFuncOwner("engine", layer)
    gate = threading.Event()
    runner = runner_of(owner, gate)
    runner.replay("key")
    threading.Timer(0.05, gate.set).start()
    drain_hostfuncs(owner)
    assert owner.stats.runs == 1
    assert owner.stats.drained_seconds >= 0.03


def test_a_drain_does_nothing_while_capturing(layer):
    owner = HostFuncOwner("engine", layer)
    gate = threading.Event()
    runner = runner_of(owner, gate)
    runner.replay("key")
    drained: list[bool] = []
    runner.capture("other", lambda: drained.append(drain_hostfuncs(owner)))
    assert drained == [False] and hostfuncs_pending(owner)
    gate.set()
    drain_hostfuncs(owner)


def test_owners_are_tracked_apart(layer):
    first, second = HostFuncOwner("first", layer), HostFuncOwner("second", layer)
    runner_of(first).replay("key")
    assert (first.pending, second.pending) == (True, False)
    runner_of(second).replay("key")
    drain_hostfuncs(first)
    assert (first.pending, second.pending) == (False, True)
    drain_hostfuncs(second)
    assert not second.pending


def test_a_drain_waits_for_other_owners_whose_gil_it_is_too_and_leaves_them_pending(layer):
    mine, other = HostFuncOwner("mine", layer), HostFuncOwner("other", layer)
    gate = threading.Event()
    with layer.stream("others"):
        runner_of(other, gate).replay("key")
    threading.Timer(0.05, gate.set).start()
    drain_hostfuncs(mine)
    assert other.stats.runs == 1 and other.pending


def test_a_drain_on_the_stream_itself_does_not_wait_for_itself(layer):
    owner = HostFuncOwner("engine", layer)
    with use_owner(owner):
        nothing()
        assert layer.run(drain_hostfuncs) is True
    assert owner.stats.runs == 1 and not owner.pending


def test_every_outstanding_event_is_kept_over_streams(layer):
    owner = HostFuncOwner("engine", layer)
    gates = [threading.Event() for _ in range(3)]
    for number, gate in enumerate(gates):
        runner = runner_of(owner, gate)
        with layer.stream(f"s{number}"):
            runner.replay("key")
    assert owner.outstanding_streams == ("s0", "s1", "s2")
    for gate in reversed(gates):  # the newest first: a global newest event would let the drain go
        assert owner.stats.runs < 3
        gate.set()
        time.sleep(0.01)
    drain_hostfuncs(owner)
    assert owner.stats.runs == 3 and owner.outstanding_streams == ()


def test_the_newest_event_of_a_stream_covers_the_older_ones(layer):
    owner = HostFuncOwner("engine", layer)
    runner = runner_of(owner)
    for _ in range(100):
        runner.replay("key")
    assert owner.outstanding_streams == ("main",)
    drain_hostfuncs(owner)
    assert owner.stats.runs == 100


def test_a_replay_that_cannot_be_launched_leaves_its_batch_to_nobody():
    owner = HostFuncOwner("engine", OrderedLayer())
    runner = runner_of(owner)
    captured = runner._entries["key"].captured
    owner.batch = 1
    with pytest.raises(RuntimeError, match="no launch"), owner.replaying(captured):
        raise RuntimeError("no launch")
    owner.batch = 2
    runner.replay("key")
    assert captured.batch_of(captured.calls[0]) == 2


# ---------------------------------------------------------------- threads that launch, and threads that drain


def in_a_thread(function: Callable[[], object]) -> None:
    """Call something in another thread and wait for it."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(BOUND)
    assert not thread.is_alive()


class DrainedMeanwhile(OrderedLayer):
    """Before a launch reaches the stream, another thread drains."""

    owner: HostFuncOwner

    def launch(self, call: Any, once: bool) -> None:
        in_a_thread(self.owner.drain)
        super().launch(call, once)


def test_a_launch_is_pending_though_another_thread_drained_before_it_reached_the_stream():
    layer = DrainedMeanwhile()
    owner = layer.owner = HostFuncOwner("engine", layer)
    with use_owner(owner):
        nothing()
    assert owner.pending and owner.outstanding_streams == ("host",)
    assert not gc.isenabled()
    assert owner.drain() and not owner.pending and gc.isenabled()


def test_a_replay_is_pending_though_another_thread_drained_before_it_reached_the_stream():
    owner = HostFuncOwner("engine", OrderedLayer())
    runner = runner_of(owner)
    captured = runner._entries["key"].captured
    with owner.replaying(captured):
        in_a_thread(owner.drain)
    assert owner.pending and owner.outstanding_streams == ("host",)
    assert owner.drain() and not owner.pending


def test_a_replay_that_fails_on_the_way_is_waited_for():
    owner = HostFuncOwner("engine", OrderedLayer())
    runner = runner_of(owner)
    captured = runner._entries["key"].captured
    with pytest.raises(RuntimeError, match="after the launch"), owner.replaying(captured):
        raise RuntimeError("after the launch")
    assert owner.pending and owner.outstanding_streams == ("host",)
    owner.drain()


def test_what_a_drain_could_not_wait_for_stays_pending(layer, monkeypatch):
    owner = HostFuncOwner("engine", layer)
    gate = threading.Event()
    runner_of(owner, gate).replay("key")

    def interrupted(event: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(layer, "wait_event", interrupted)
        with pytest.raises(KeyboardInterrupt):
            owner.drain()
    assert owner.pending and owner.outstanding_streams == ("main",) and owner.stats.runs == 0
    threading.Timer(0.05, gate.set).start()
    assert owner.drain()
    assert owner.stats.runs == 1 and not owner.pending and gc.isenabled()


class Emptied(deque):
    """A queue whose last entry another thread takes between a look and the taking."""

    def __bool__(self) -> bool:
        return True


class EmptiedList(list):
    """The same as a list."""

    def __bool__(self) -> bool:
        return True


def test_calls_that_another_thread_frees_first_are_nobodys_error(monkeypatch):
    layer = object.__new__(cuda.CudaLayer)  # what it frees is host data: no device is needed
    LaunchLayer.__init__(layer)
    monkeypatch.setattr(cuda, "_ran", EmptiedList([7]))
    monkeypatch.setattr(cuda, "_live", {7: print, 8: repr})
    layer.sweep()
    assert cuda._live == {8: repr}
    calls = [repr]
    layer._free(calls)
    assert (cuda._live, calls) == ({}, [])


def test_what_another_thread_takes_first_is_nobodys_error(monkeypatch):
    owner = HostFuncOwner("engine", OrderedLayer())
    runner = runner_of(owner)
    captured = runner._entries["key"].captured
    owner._failures, captured._batches = Emptied(), Emptied()
    module = sys.modules["auto_deploy_ext.hostfuncs.hostfunc"]  # the package has the function under its name
    monkeypatch.setattr(module, "_leftovers", Emptied())
    captured.unexpect()
    assert captured.batch_of(captured.calls[0]) == 0
    owner.raise_failures()
    free_leftovers()


def test_an_owner_that_another_thread_drops_meanwhile_is_nobodys_error(monkeypatch):
    class Shrinking(set):
        """Another thread takes something out of it while it is looked through for the first time."""

        disturbed = False

        def __iter__(self):
            if not self.disturbed:
                self.disturbed = True
                raise RuntimeError("Set changed size during iteration")
            return super().__iter__()

    owner = HostFuncOwner("engine", OrderedLayer())
    monkeypatch.setattr(pending, "_owners", Shrinking([owner]))
    assert pending._all_owners() == [owner]


def test_owners_may_be_made_while_others_drain():
    """A set must not grow while it is looked through."""
    stop, errors = threading.Event(), []

    def make() -> None:
        while not stop.is_set():
            HostFuncOwner("made", layer)

    def drain() -> None:
        try:
            for _ in range(2000):
                many[0].drain()
        except RuntimeError as error:
            errors.append(error)

    layer = OrderedLayer()
    many = [HostFuncOwner("engine", layer) for _ in range(300)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    maker = threading.Thread(target=make)
    maker.start()
    try:
        in_a_thread(drain)
    finally:
        stop.set()
        maker.join(BOUND)
        sys.setswitchinterval(before)
    assert errors == []


def test_the_wait_of_a_drain_releases_the_gil(layer):
    """The host function that a drain waits for needs the GIL itself: with the GIL kept, this would never end."""
    owner = HostFuncOwner("engine", layer)
    done: list[int] = []
    runner = GraphRunner(owner)
    runner.capture("key", lambda: hostfunc(lambda: done.append(sum(range(10000))))())
    for _ in range(20):
        runner.replay("key")
        drain_hostfuncs(owner)
    assert len(done) == 20
