"""What is pending, per owner, whatever the device has done; and drains."""

from __future__ import annotations

import threading
import time

import pytest

from auto_deploy_ext.embedded.graph_runner import GraphRunner
from auto_deploy_ext.hostfuncs import (
    HostFuncOwner,
    OrderedLayer,
    ThreadStreams,
    drain_hostfuncs,
    hostfunc,
    hostfuncs_pending,
    use_owner,
)

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
