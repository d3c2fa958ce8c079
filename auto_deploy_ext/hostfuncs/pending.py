"""Which host functions may still be outstanding, per owner: `hostfuncs_pending()` and `drain_hostfuncs()`.

An owner is whoever runs a model: an engine. Whether something is pending is host state, set by a launch or a replay and
cleared by a drain; the device is never asked, so that all ranks, which launch and drain alike, answer alike.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .hostfunc import (
    HostCall,
    HostFuncError,
    HostFuncFailure,
    HostFuncUsageError,
    free_leftovers,
    gc_guard,
    refuse_inside,
)
from .launch import LaunchLayer, OrderedLayer


@dataclass
class HostFuncStats:
    """What an owner has done so far.

    Attributes:
        launches: host functions launched outside of captures.
        replays: replays of graphs that contain host functions.
        runs: host functions that have run.
        drains: drains with something pending.
        drained_seconds: time spent in these.
        idle_drains: drains that found nothing pending.
    """

    launches: int = 0
    replays: int = 0
    runs: int = 0
    drains: int = 0
    drained_seconds: float = 0.0
    idle_drains: int = 0


class CapturedCalls:
    """The host functions in a captured graph; whoever owns the graph keeps this beside it.

    Attributes:
        calls: in the order in which they were launched.
    """

    def __init__(self, owner: HostFuncOwner) -> None:
        self.owner = owner
        self.calls: list[HostCall] = []
        self.last_event: Any = None
        self._batches: deque[int] = deque()
        self._batch = owner.batch

    def __len__(self) -> int:
        return len(self.calls)

    def expect(self, batch: int) -> None:
        """Note that a replay for `batch` is about to begin."""
        self._batches.append(batch)

    def unexpect(self) -> None:
        """Take the last `expect` back: the replay could not be launched."""
        with contextlib.suppress(IndexError):  # a replay that was launched after all may take it
            self._batches.pop()

    def batch_of(self, call: HostCall) -> int:
        """The batch for which `call` runs: each run of the first call takes the next replay's."""
        if call.first:
            with contextlib.suppress(IndexError):
                self._batch = self._batches.popleft()
        return self._batch

    def release(self) -> None:
        """Let go of the calls once no replay can reach them any more; the graph must not be replayed after this."""
        calls, self.calls = self.calls, []
        self.owner.layer.forget(calls, self.last_event)


class HostFuncOwner:
    """Tracks the host functions of one engine.

    Args:
        name: for messages.
        layer: where they are launched; the default layer when left out.

    Attributes:
        batch: the number of the batch that launches and replays belong to; set it before each.
        stats: counts and times.
    """

    def __init__(self, name: str, layer: LaunchLayer | None = None) -> None:
        self.name = name
        self.layer = layer if layer is not None else default_layer()
        self.batch = 0
        self.stats = HostFuncStats()
        self._lock = threading.RLock()
        self._pending = False
        self._events: dict[Hashable, Any] = {}
        self._unrecorded: dict[Hashable, None] = {}
        self._spare_events: dict[Hashable, Any] = {}
        self._failures: deque[HostFuncFailure] = deque()
        self._holds_gc = False
        self._capture: CapturedCalls | None = None
        with _owners_lock:
            _owners.add(self)

    def __del__(self) -> None:
        """An owner that nothing can launch for any more does not keep the garbage collector off."""
        if self.__dict__.get("_holds_gc"):
            gc_guard.release()

    # ---------------------------------------------------------------- launching

    def launch(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Launch a host function on the current stream.

        Raises:
            HostFuncUsageError: inside a host function, or in a capture outside of `capture_hostfuncs`.
        """
        refuse_inside(f"a launch of {function.__qualname__}")
        _refuse_tracing(function)
        if self.layer.is_capturing():
            if self._capture is None:
                raise HostFuncUsageError(
                    f"{function.__qualname__} is launched in a capture that does not collect host functions: capture "
                    "with GraphRunner, or inside capture_hostfuncs(), so that its arguments live as long as the graph"
                )
            call = HostCall(self, function, args, kwargs, self._capture)
            self._capture.calls.append(call)
            self.layer.launch(call, once=False)
            return
        call = HostCall(self, function, args, kwargs, None)
        if getattr(self.layer, "is_replaying", False):
            self.layer.launch(call, once=True)
            return
        stream = self.layer.current_stream()
        with self._lock:
            self.stats.launches += 1
            self._set_pending(stream)
        self._tidy()
        self.layer.launch(call, once=True)
        with self._lock:
            self._set_pending(stream)  # a drain of another thread may have come between

    @contextlib.contextmanager
    def capture_hostfuncs(self) -> Iterator[CapturedCalls]:
        """Around a capture: collects the host functions that go into the graph."""
        refuse_inside("a capture")
        if self._capture is not None:
            raise HostFuncUsageError(f"{self.name} is capturing already")
        self._capture = CapturedCalls(self)
        try:
            with use_owner(self):
                yield self._capture
        finally:
            self._capture = None

    @contextlib.contextmanager
    def replaying(self, captured: CapturedCalls) -> Iterator[None]:
        """Around each replay of a graph: marks its host functions pending and records the event after it.

        Does nothing for a graph without host functions.
        """
        refuse_inside("a replay")
        if not captured:
            yield
            return
        stream = self.layer.current_stream()
        with self._lock:
            self._set_pending(stream)
            self.stats.replays += 1
        captured.expect(self.batch)
        self._tidy()
        try:
            with use_owner(self):
                yield
        except BaseException:
            captured.unexpect()
            raise
        with self._lock:
            self._set_pending(stream)  # a drain of another thread may have come between
            # A stream runs in order: its newest event stands for the older ones too.
            spare = self._events.get(stream) or self._spare_events.pop(stream, None)
            captured.last_event = self._events[stream] = self.layer.record_event(stream, spare)
            self._unrecorded.pop(stream, None)

    def _set_pending(self, stream: Hashable) -> None:
        """Under the lock: something is on a stream, or is about to be, and no event stands behind it."""
        self._pending = True
        self._unrecorded[stream] = None
        self._keep_gc()

    def _keep_gc(self) -> None:
        if not self._holds_gc:
            self._holds_gc = True
            gc_guard.hold()

    def _release_gc(self) -> None:
        if self._holds_gc:
            self._holds_gc = False
            gc_guard.release()

    def _tidy(self) -> None:
        """What only a thread that may call CUDA can do."""
        gc_guard.collect_if_due()
        free_leftovers()

    # ---------------------------------------------------------------- waiting

    @property
    def pending(self) -> bool:
        """Whether host functions may be outstanding: from host state alone."""
        return self._pending

    @property
    def outstanding_streams(self) -> tuple[Hashable, ...]:
        """The streams on which something may be outstanding."""
        with self._lock:
            return tuple({**self._events, **self._unrecorded})

    def drain(self) -> bool:
        """Wait for all outstanding host functions with the GIL released, then raise what they raised.

        Other owners' outstanding ones are waited for as well, because the GIL is theirs too, but stay pending for
        them. Does nothing with nothing pending anywhere, and while capturing.

        Returns:
            Whether something of this owner was pending.

        Raises:
            HostFuncError: host functions of this owner failed.
            HostFuncUsageError: inside a host function.
        """
        refuse_inside("a drain")
        if self.layer.is_capturing():
            return False
        start = time.perf_counter()
        with self._lock:
            events = self._take_events()
            was_pending, self._pending, self._events = self._pending, False, {}
            self._unrecorded.clear()
        try:
            for event in events.values():
                self.layer.wait_event(event)
        except BaseException:
            with self._lock:  # nobody knows what has run: what is launched since then has newer events
                self._events = {**events, **self._events}
                if was_pending:
                    self._pending = True
                    self._keep_gc()
            raise
        with self._lock:
            self._spare_events.update(events)
            if not self._pending:
                self._release_gc()
        for owner in _all_owners():
            if owner is not self and owner.pending:
                owner._wait()
        if was_pending:
            self.stats.drains += 1
            self.stats.drained_seconds += time.perf_counter() - start
        else:
            self.stats.idle_drains += 1
        self._tidy()
        self.layer.sweep()
        self.raise_failures()
        return was_pending

    def _take_events(self) -> dict[Hashable, Any]:
        """An event for every stream with something outstanding."""
        for stream in self._unrecorded:
            self._events[stream] = self.layer.record_event(stream, self._events.get(stream))
        return self._events

    def _wait(self) -> None:
        """Wait for what is outstanding; it stays pending."""
        with self._lock:
            events = list(self._take_events().values())
        for event in events:
            self.layer.wait_event(event)

    def synchronize(self) -> None:
        """Wait for the current stream with the GIL released, then raise what host functions raised.

        What is pending stays so: only a drain clears it.

        Raises:
            HostFuncError: host functions of this owner failed.
        """
        refuse_inside("a synchronisation")
        begun = self.stats.launches + self.stats.replays
        self.layer.synchronize()
        with self._lock:
            is_all = set(self.outstanding_streams) <= {self.layer.current_stream()}
            if is_all and begun == self.stats.launches + self.stats.replays:
                self._release_gc()  # nothing runs any more, though it stays pending
        self._tidy()
        self.raise_failures()

    # ---------------------------------------------------------------- failures

    def record_failure(self, failure: HostFuncFailure) -> None:
        """Keep a failure for the next drain or synchronisation."""
        self._failures.append(failure)

    def count_run(self) -> None:
        """Note that a host function has run."""
        self.stats.runs += 1

    def raise_failures(self) -> None:
        """Raise what host functions raised since the last time.

        Raises:
            HostFuncError: they did.
        """
        failures: list[HostFuncFailure] = []
        with contextlib.suppress(IndexError):  # other threads take from it as well
            while True:
                failures.append(self._failures.popleft())
        if failures:
            raise HostFuncError(tuple(failures)) from failures[0].exception


def being_traced() -> bool:
    """Whether an orchestrator is being traced, so that nothing that is called really happens."""
    tracer = sys.modules.get("auto_deploy_ext.orchestrator.tracer")
    return bool(tracer is not None and tracer._active)


def _refuse_tracing(function: Callable[..., Any]) -> None:
    """A launch while an orchestrator is traced would run now, and never again in the graph."""
    if being_traced():
        raise HostFuncUsageError(
            f"{function.__qualname__} is launched by an orchestrator's own code while it is traced: launch it in the "
            "forward of a submodule with meta = {'active_args': ()}, which a graph calls as a whole"
        )


# ---------------------------------------------------------------- the current owner

_owners: weakref.WeakSet[HostFuncOwner] = weakref.WeakSet()
_owners_lock = threading.RLock()
_current: contextvars.ContextVar[HostFuncOwner | None] = contextvars.ContextVar("hostfunc_owner", default=None)
_defaults: dict[str, Any] = {}
_defaults_lock = threading.Lock()


def _all_owners() -> list[HostFuncOwner]:
    """The owners of this process; other threads may make more meanwhile, or drop some."""
    while True:
        try:
            with _owners_lock:
                return list(_owners)
        except RuntimeError:  # "Set changed size": another thread has dropped one between two of them
            continue


def anything_pending() -> bool:
    """Whether host functions of any owner may be outstanding: what a drain would wait for."""
    return any(owner.pending for owner in _all_owners())


def default_layer() -> LaunchLayer:
    """The layer of owners that name none: CUDA's where there is a CUDA device, else ordered calls."""
    with _defaults_lock:
        if "layer" not in _defaults:
            if torch.cuda.is_available():
                from .cuda import CudaLayer

                _defaults["layer"] = CudaLayer()
            else:
                _defaults["layer"] = OrderedLayer()
        return _defaults["layer"]


def current_owner() -> HostFuncOwner:
    """The owner of this context: the innermost `use_owner`, else the process's own."""
    owner = _current.get()
    if owner is not None:
        return owner
    layer = default_layer()
    with _defaults_lock:
        if "owner" not in _defaults:
            _defaults["owner"] = HostFuncOwner("process", layer)
        return _defaults["owner"]


@contextlib.contextmanager
def use_owner(owner: HostFuncOwner) -> Iterator[HostFuncOwner]:
    """While active, launches and drains of this context are `owner`'s."""
    token = _current.set(owner)
    try:
        yield owner
    finally:
        _current.reset(token)


def hostfuncs_pending(owner: HostFuncOwner | None = None) -> bool:
    """Whether host functions of an owner (the current one) may be outstanding; never asks the device."""
    return (owner or current_owner()).pending


def drain_hostfuncs(owner: HostFuncOwner | None = None) -> bool:
    """Wait until no host function is outstanding, with the GIL released; see `HostFuncOwner.drain`.

    Call it before anything that may hold the GIL while it waits for the device.

    Returns:
        Whether something of the owner was pending.

    Raises:
        HostFuncError: host functions failed.

    Example:
        >>> drain_hostfuncs()
        >>> features = vision_tower(pixel_values)
    """
    return (owner or current_owner()).drain()


@contextlib.contextmanager
def capture_hostfuncs(owner: HostFuncOwner | None = None) -> Iterator[CapturedCalls]:
    """Around a capture by a graph runner of your own; see `HostFuncOwner.capture_hostfuncs`."""
    with (owner or current_owner()).capture_hostfuncs() as captured:
        yield captured


@atexit.register
def _drain_all() -> None:
    """At exit: a host function must not meet an interpreter that is going away."""
    for owner in _all_owners():
        with contextlib.suppress(Exception):
            owner._wait()
