"""The event and launch layer under host functions: streams, events, captures; replaceable, with three implementations.

| layer | a stream is | a host function runs | a captured graph is |
| --- | --- | --- | --- |
| `OrderedLayer` | the calling thread | at once, where it is launched | its function, called again |
| `ThreadStreams` | a worker thread | later, in order, on the worker | its function, called on the worker |
| `CudaLayer` | a CUDA stream | later, in order, on a thread of the driver | a `torch.cuda.CUDAGraph` |

Nothing above this module calls CUDA, so all rules of host functions can be tested without a GPU.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableSequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

Call = Callable[[], None]
"""One launch of a host function, without arguments; it never raises."""


class LaunchError(RuntimeError):
    """A launch, a capture or a wait that the layer cannot do where it was asked for."""


class Graph(ABC):
    """What a layer captured.

    Attributes:
        result: what the captured function returned; a replay writes into its tensors.
    """

    result: Any

    @abstractmethod
    def replay(self) -> None:
        """Run it once more on the current stream."""


class LaunchLayer(ABC):
    """Streams, events and captures, as far as host functions need them.

    Attributes:
        capture_runs: whether a capture also does the work that it captures.
    """

    capture_runs: bool = False

    def __init__(self) -> None:
        self._retired: deque[tuple[Any, MutableSequence[Any]]] = deque()

    @abstractmethod
    def current_stream(self) -> Hashable:
        """The stream on which the caller's work goes."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the caller's work is being captured rather than run."""

    @abstractmethod
    def launch(self, call: Call, once: bool) -> None:
        """Put a call on the current stream, or into the capture that runs on it; the GIL is released around it.

        Args:
            call: kept alive until it has run (`once`) or until `forget`.
            once: false for a call that is captured.
        """

    @abstractmethod
    def record_event(self, stream: Hashable, event: Any = None) -> Any:
        """Record an event behind everything on `stream` so far; `event` is one of the stream's own, to be reused."""

    @abstractmethod
    def wait_event(self, event: Any) -> None:
        """Wait until an event has happened, with the GIL released."""

    @abstractmethod
    def event_done(self, event: Any) -> bool:
        """Whether an event has happened; only for freeing, never for a decision that ranks share."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the current stream, with the GIL released."""

    @abstractmethod
    def capture(self, function: Callable[[], Any], pool: Any = None) -> Graph:
        """Capture `function`; host functions that it launches are part of the graph and do not run meanwhile.

        Args:
            function: called once.
            pool: memory that the graph shares with others of the same pool (`new_pool`): a replay of one may overwrite
                what another one's returned. None: the layer's own.
        """

    def new_pool(self) -> Any:
        """A pool of memory for graphs."""
        return None

    def run(self, function: Callable[[], Any]) -> Any:
        """Run device work eagerly on the current stream; gives what it returns."""
        return function()

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """While active, work goes on a stream of its own; `join_side_stream` makes the current stream wait for it."""
        yield

    def join_side_stream(self, used: Iterable[torch.Tensor] = ()) -> None:  # noqa: B027 - one stream waits for nothing
        """Let the current stream wait for everything on the side stream.

        Args:
            used: tensors made there that the current stream is going to read.
        """

    def forget(self, calls: MutableSequence[Any], after: Any) -> None:
        """Let go of captured calls once the event `after` has happened (None: nothing may call them any more)."""
        self._retired.append((after, calls))
        self.sweep()

    def sweep(self) -> None:
        """Free what nothing can call any more; only ever from a thread that may call CUDA."""
        for _ in range(len(self._retired)):
            try:
                after, calls = self._retired.popleft()
            except IndexError:
                return
            if after is None or self.event_done(after):
                self._free(calls)
            else:
                self._retired.append((after, calls))

    def _free(self, calls: MutableSequence[Any]) -> None:
        calls.clear()


# ---------------------------------------------------------------- the two layers without a device


class _ReplayingCalls(threading.local):
    """Per thread: the calls of the graph that it replays, and those of the capture that it runs."""

    replay: Iterator[Call] | None = None
    capture: list[Call] | None = None


class _CalledGraph(Graph):
    """A graph that is its function: a replay calls it, and its k-th launch runs the k-th captured call."""

    def __init__(self, layer: _CallingLayer, function: Callable[[], Any]) -> None:
        self._layer = layer
        self._function = function
        self._calls: list[Call] = []
        local = layer._local
        if local.capture is not None:
            raise LaunchError("a capture inside a capture")
        local.capture = self._calls
        try:
            result = function()
        finally:
            local.capture = None
        self.result = tree_map_only(torch.Tensor, torch.clone, result)

    def replay(self) -> None:
        """Call the function on the current stream and copy what it returns into `result`."""
        self._layer._submit(self._run)

    def _run(self) -> None:
        calls = iter(self._calls)
        before, self._layer._local.replay = self._layer._local.replay, calls
        try:
            result = self._function()
        finally:
            self._layer._local.replay = before
        if next(calls, None) is not None:
            raise LaunchError("a replay launched fewer host functions than its capture did")
        for static, new in zip(_tensors(self.result), _tensors(result), strict=True):
            static.copy_(new)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


class _CallingLayer(LaunchLayer):
    """What the two layers without a device share: a capture runs its function and records the launches."""

    capture_runs = True

    def __init__(self) -> None:
        super().__init__()
        self._local = _ReplayingCalls()

    def is_capturing(self) -> bool:
        """Whether this thread runs a capture."""
        return self._local.capture is not None

    def capture(self, function: Callable[[], Any], pool: Any = None) -> Graph:
        """Run `function` once for its tensors, without its host functions."""
        return _CalledGraph(self, function)

    def launch(self, call: Call, once: bool) -> None:
        """See `LaunchLayer.launch`."""
        self.sweep()
        if self._local.capture is not None:
            self._local.capture.append(call)
        elif self._local.replay is not None:
            captured = next(self._local.replay, None)
            if captured is None:
                raise LaunchError("a replay launched more host functions than its capture did")
            captured()
        else:
            self._submit(call)

    @property
    def is_replaying(self) -> bool:
        """Whether this thread runs the function of a captured graph."""
        return self._local.replay is not None

    @abstractmethod
    def _submit(self, work: Callable[[], None]) -> None:
        """Put work on the current stream."""


class OrderedLayer(_CallingLayer):
    """Host functions as ordered calls: the layer of the CPU, where all work is done when its call returns."""

    def current_stream(self) -> Hashable:
        """The one stream: the caller."""
        return "host"

    def record_event(self, stream: Hashable, event: Any = None) -> Any:
        """An event that has happened."""
        return "done"

    def wait_event(self, event: Any) -> None:
        """Return: everything has happened."""

    def event_done(self, event: Any) -> bool:
        """Always."""
        return True

    def synchronize(self) -> None:
        """Return: everything has happened."""

    def _submit(self, work: Callable[[], None]) -> None:
        work()


class _Stream:
    """A worker thread that does what it is given, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name=f"stream-{name}", daemon=True)
        self.thread.start()

    def put(self, work: Callable[[], None] | None) -> None:
        self._queue.put(work)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException as error:
                self.error = self.error or error
            del work  # its data must not live until the next work comes


class ThreadStreams(_CallingLayer):
    """Streams as worker threads: host functions and replays run later, in order, while the caller goes on.

    `run` puts eager work on the stream as well and waits for it. An error of the work itself, which is none of a host
    function's, is raised by the next wait, as CUDA's are.
    """

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[str, _Stream] = {}
        self._lock = threading.Lock()
        self._current: contextvars.ContextVar[str] = contextvars.ContextVar("stream", default="main")

    def current_stream(self) -> Hashable:
        """The name of the current stream."""
        return self._current.get()

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """While active, work goes on the stream of that name."""
        token = self._current.set(name)
        try:
            yield
        finally:
            self._current.reset(token)

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """While active, work goes on the stream `side`."""
        with self.stream("side"):
            yield

    def join_side_stream(self, used: Iterable[torch.Tensor] = ()) -> None:
        """Let the current stream wait for the stream `side`."""
        event = self.record_event("side")

        def wait() -> None:
            event.wait()

        self._submit(wait)

    def record_event(self, stream: Hashable, event: Any = None) -> threading.Event:
        """An event that the stream's worker sets."""
        event = threading.Event()
        worker = self._worker(str(stream))
        if worker.thread is threading.current_thread():
            event.set()  # what the stream held before is what this thread has done
        else:
            worker.put(event.set)
        return event

    def wait_event(self, event: threading.Event) -> None:
        """See `LaunchLayer.wait_event`."""
        event.wait()
        self._raise_error()

    def event_done(self, event: threading.Event) -> bool:
        """Whether the worker has come to it."""
        return event.is_set()

    def synchronize(self) -> None:
        """Wait for the current stream."""
        if self._on_worker():
            raise LaunchError("a stream cannot wait for itself")
        self.wait_event(self.record_event(self.current_stream()))

    def run(self, function: Callable[[], Any]) -> Any:
        """Run device work on the stream and wait for it."""
        if self._on_worker() or self.is_capturing():
            return function()
        box: list[Any] = []
        self._submit(lambda: box.append(function()))
        self.synchronize()
        return box[0]

    def close(self) -> None:
        """End all workers once they have done what they were given."""
        with self._lock:
            streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.put(None)
            stream.thread.join()

    def _submit(self, work: Callable[[], None]) -> None:
        if self._on_worker():
            work()
            return
        context, grad = contextvars.copy_context(), torch.is_grad_enabled()

        def in_context() -> None:
            with torch.set_grad_enabled(grad):
                context.run(work)

        self._worker(self._current.get()).put(in_context)

    def _worker(self, name: str) -> _Stream:
        with self._lock:
            if name not in self._streams:
                self._streams[name] = _Stream(name)
            return self._streams[name]

    def _on_worker(self) -> bool:
        return any(stream.thread is threading.current_thread() for stream in self._streams.values())

    def _raise_error(self) -> None:
        for stream in self._streams.values():
            error, stream.error = stream.error, None
            if error is not None:
                raise error
