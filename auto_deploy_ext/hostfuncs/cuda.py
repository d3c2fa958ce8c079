"""The launch layer of CUDA: `cudaLaunchHostFunc` on torch's streams, torch's events and graphs."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableSequence
from typing import Any

import torch

from .launch import Call, Graph, LaunchError, LaunchLayer

HostFunctionType = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

#: calls that a stream or a graph may still make, by the number that CUDA passes as user data.
_live: dict[int, Call] = {}
#: of these, the ones that run once; they are freed after that, by a thread that may call CUDA.
_once: set[int] = set()
_ran: list[int] = []
_numbers = itertools.count(1)


def _run(number: int) -> None:
    """What CUDA calls; nothing is freed here, because freeing a tensor or an event may call CUDA."""
    _live[number]()
    if number in _once:
        _ran.append(number)


_trampoline = HostFunctionType(_run)  # alive as long as the process: a stream may call it at any time

Launcher = Callable[[int, int], None]
"""Launches the trampoline on a stream handle with a call's number as user data."""


def _check(code: int, what: str) -> None:
    if code:
        raise LaunchError(f"{what} failed with CUDA error {int(code)}")


def _launcher() -> Launcher:
    """`cudaLaunchHostFunc` of the runtime that torch has loaded; `ctypes.CDLL` releases the GIL around the call."""
    library = ctypes.CDLL(_cudart_path())
    function = library.cudaLaunchHostFunc
    function.argtypes = (ctypes.c_void_p, HostFunctionType, ctypes.c_void_p)
    function.restype = ctypes.c_int

    def launch(stream: int, number: int) -> None:
        _check(function(stream, _trampoline, number), "cudaLaunchHostFunc")

    return launch


def _cudart_path() -> str:
    """The CUDA runtime that this process uses."""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            path = line.rstrip("\n").rpartition(" ")[2]
            if "libcudart.so" in path:
                return path
    return f"libcudart.so.{(torch.version.cuda or '13').split('.')[0]}"


class _CudaGraph(Graph):
    """A `torch.cuda.CUDAGraph` and what its function returned."""

    def __init__(self, function: Callable[[], Any], pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Thread-local: another thread may allocate or wait while this one captures.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.result = function()

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


class CudaLayer(LaunchLayer):
    """Host functions on CUDA streams of one device.

    Args:
        device: the device; the current one when left out.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__()
        torch.cuda.init()
        self.device = torch.device(device if device is not None else torch.cuda.current_device())
        self._launch = _launcher()
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None

    def current_stream(self) -> Hashable:
        """torch's current stream on the device."""
        return torch.cuda.current_stream(self.device)

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def launch(self, call: Call, once: bool) -> None:
        """See `LaunchLayer.launch`."""
        self.sweep()
        number = next(_numbers)
        _live[number] = call
        if once:
            _once.add(number)
        try:
            self._launch(torch.cuda.current_stream(self.device).cuda_stream, number)
        except LaunchError:
            _once.discard(number)
            _live.pop(number, None)
            raise

    def record_event(self, stream: Hashable, event: Any = None) -> torch.cuda.Event:
        """Record a torch event on the stream."""
        event = event or torch.cuda.Event()
        event.record(stream)
        return event

    def wait_event(self, event: torch.cuda.Event) -> None:
        """`torch.cuda.Event.synchronize`, which releases the GIL."""
        event.synchronize()

    def event_done(self, event: torch.cuda.Event) -> bool:
        """See `LaunchLayer.event_done`."""
        return event.query()

    def synchronize(self) -> None:
        """`torch.cuda.Stream.synchronize`, which releases the GIL."""
        torch.cuda.current_stream(self.device).synchronize()

    def capture(self, function: Callable[[], Any], pool: Any = None) -> Graph:
        """Capture `function`; the graphs of a pool share its memory, so they are replayed one at a time."""
        if pool is None:
            if self._pool is None:
                self._pool = self.new_pool()
            pool = self._pool
        return _CudaGraph(function, pool)

    def new_pool(self) -> Any:
        """See `LaunchLayer.new_pool`."""
        return torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """While active, work goes on the layer's side stream, beside what the current one holds."""
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._side):
            yield

    def join_side_stream(self, used: Iterable[torch.Tensor] = ()) -> None:
        """Let the current stream wait for the side stream, and the allocator for the current one's use of `used`."""
        current = torch.cuda.current_stream(self.device)
        if self._side is not None:
            current.wait_stream(self._side)
        for tensor in used:
            tensor.record_stream(current)

    def sweep(self) -> None:
        """Also frees what ran once."""
        with contextlib.suppress(IndexError):  # other threads take from it as well
            while True:
                number = _ran.pop()
                _once.discard(number)
                _live.pop(number, None)
        super().sweep()

    def _free(self, calls: MutableSequence[Any]) -> None:
        freed = set(map(id, calls))
        for number in [number for number, call in list(_live.items()) if id(call) in freed]:
            _live.pop(number, None)
        calls.clear()
