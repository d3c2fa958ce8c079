"""Tracks the mirrors of AutoDeploy's own SequenceInfo, and moves them through its InputBuffer's views.

Its pinned host buffer is the staging area of uploads and the mirror at once, it keeps no versions, and it can only copy
everything. So the calls that matter are watched on the instance, and:

1. What travels lands in memory of its own and is written into the mirrors when it is waited for, so a copy in flight
   cannot overwrite what the next `nest_sequences` stages (hazard 1); a mirror that is newer by then keeps its value.
2. Mirrors are written only after the event that follows the pending upload, so the device cannot receive them in
   place of what was staged (hazard 2).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection
from functools import lru_cache
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch

from auto_deploy_ext.effects import MUTATIONS, MutationSpec, buffer_of, mirror_of
from auto_deploy_ext.runtime.copy_memory import LandingPool
from auto_deploy_ext.runtime.mirrors import Transfer

#: attribute of a SequenceInfo that holds what is tracked about its mirrors.
STATE_KEY = "_auto_deploy_ext_mirrors"

Observer = Callable[[Transfer], None]


class Ticket(Protocol):
    """A transfer that was started and whose result is written into the mirrors at `wait`.

    Attributes:
        transfer: what travels; its `waited` turns true when `wait` waits.
    """

    transfer: Transfer

    @property
    def names(self) -> tuple[str, ...]:
        """Sorted `_host` names that travel."""

    def wait(self) -> tuple[str, ...]:
        """Wait for the copy and write it into the mirrors that are not newer; a second call does nothing.

        Returns:
            Sorted `_host` names of the mirrors that were written.
        """


@lru_cache(maxsize=32)
def switch_writes_mirrors(kind: Any) -> bool:
    """Whether `switch_to_generate_` of this SequenceInfo class computes the host twins itself.

    Early releases of AutoDeploy do; they are told by `nest_sequences`, which takes one pool's pages instead of lists.
    """
    return "cache_loc_per_pool" not in inspect.signature(kind.nest_sequences).parameters


class TrackedMirrors:
    """Mirrors of an InputBuffer that keeps no versions and whose mirrors are its staging area.

    The methods that write either side are watched on the instances: `copy_to_device`, `copy_to_host` and `copy_` of
    the buffer, the registered mutations of the SequenceInfo. A mirror counts as stale until an upload or a copy was
    seen. It is copied and pickled with the SequenceInfo.

    Args:
        info: AutoDeploy's SequenceInfo.
    """

    def __init__(self, info: Any) -> None:
        self._info = info
        self._buffer = info._input_buffer
        self.device_version: dict[str, int] = dict.fromkeys(self._buffer.tensor_names, 1)
        self.mirror_version: dict[str, int] = {}
        self._page_bounds: dict[str, int] = {}
        self._observers: list[Observer] = []
        self._running: list[str] = []
        self._landing = LandingPool()
        self._uploaded = self._event()
        for name, action in (("copy_to_device", "_upload"), ("copy_to_host", "_copy_all"), ("copy_", "_copy_one")):
            self._watch(self._buffer, name, action)
        for name, spec in MUTATIONS.items():
            if not spec.restages:
                self._watch(info, name, "_mutation")

    def tracks(self, info: Any) -> bool:
        """Whether this is about `info` and the buffer that it has now."""
        return self._info is info and self._buffer is info._input_buffer

    def _watch(self, owner: Any, name: str, action: str) -> None:
        if callable(getattr(owner, name, None)):
            inner = vars(owner).get(name)
            inner = inner.inner if isinstance(inner, _Watched) else inner
            vars(owner)[name] = _Watched(self, owner, name, action, inner)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: events, landing areas and observers."""
        gone: dict[str, Any] = {"_landing": None, "_uploaded": None, "_observers": [], "_running": []}
        return {**self.__dict__, **gone}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _landing=LandingPool())

    # What is watched.

    def _upload(self, original: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = original(*args, **kwargs)
        self._uploaded = self._event()
        for buffer in self._buffer.tensor_names:
            self.device_version[buffer] = self.mirror_version[buffer] = self._next_version(buffer)
        self._page_bounds = {
            n: self._buffer.get_current_length(n) for n in self._buffer.tensor_names if n.startswith("cache_loc")
        }
        return result

    def _copy_all(self, original: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = original(*args, **kwargs)
        non_blocking = bool(args[0] if args else kwargs.get("non_blocking", False))
        names = sorted(self._buffer.tensor_names)
        views = [self._buffer.get_host_view(n, truncate=n.startswith("cache_loc")) for n in names]
        nbytes = sum(view.numel() * view.element_size() for view in views)
        trigger = self._running[-1] if self._running else _calling_method(sys._getframe(1), self._info)
        self._report(Transfer(tuple(map(mirror_of, names)), nbytes, not non_blocking, trigger))
        if not non_blocking:
            # A copy that is not waited for leaves its mirrors stale: nobody can say when it is done.
            self.mark_fresh(names)
        return result

    def _copy_one(self, original: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._note(MUTATIONS["copy_"], args, kwargs)
        return original(*args, **kwargs)

    def _mutation(self, original: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        spec = MUTATIONS[name]
        if spec.generates is True:
            if self._info.batch_info.is_generate_only():
                return original(*args, **kwargs)
            kind: Any = type(self._info)
            if switch_writes_mirrors(kind):
                self.before_host_write()
        # Before the call: a copy to the host inside it then leaves them fresh.
        self._note(spec, args, kwargs)
        self._running.append(name)
        try:
            return original(*args, **kwargs)
        finally:
            self._running.pop()

    def _note(self, spec: MutationSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if spec.name == "copy_" and self._is_host_copy(args, kwargs):
            self._bump(self.mirror_version, buffer_of(args[0] if args else kwargs["name"]))
            return
        kwargs = {k: v for k, v in kwargs.items() if k != "active_args_override"}
        names = spec.written(self._info, args, kwargs, self._buffer.tensor_names)
        self.mark_stale(self._buffer.tensor_names if names is None else names)
        if "cache_loc" in (names or ()):
            # A call inserts at most one page per sequence.
            rows = int(self._info.batch_info.get_total_num_sequences())
            self._page_bounds = {n: bound + rows for n, bound in self._page_bounds.items()}

    def _is_host_copy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        name = args[0] if args else kwargs.get("name", "")
        source = args[1] if len(args) > 1 else kwargs.get("src")
        on_host = isinstance(source, torch.Tensor) and source.device.type == "cpu" != self._device.type
        return buffer_of(name) != name or on_host

    # What is known.

    @property
    def _device(self) -> torch.device:
        return torch.device(self._buffer.device)

    @property
    def observers(self) -> list[Observer]:
        """Callables that are told of every transfer when it is started."""
        return self._observers

    def _report(self, transfer: Transfer) -> Transfer:
        for observer in list(self._observers):
            observer(transfer)
        return transfer

    def _next_version(self, name: str) -> int:
        return max(self.device_version.get(name, 0), self.mirror_version.get(name, 0)) + 1

    def _bump(self, versions: dict[str, int], name: str) -> None:
        versions[name] = self._next_version(name)

    def stale_names(self) -> tuple[str, ...]:
        """Return the sorted names of the buffers whose mirror is older than the device side."""
        return tuple(sorted(n for n, v in self.device_version.items() if self.mirror_version.get(n, 0) < v))

    def mark_stale(self, names: Collection[str]) -> None:
        """Note that these buffers were written on the device."""
        for name in map(buffer_of, names):
            self._bump(self.device_version, name)

    def mark_fresh(self, names: Collection[str]) -> None:
        """Note that these mirrors were given the values that the device has."""
        for name in map(buffer_of, names):
            self.mirror_version[name] = max(self.device_version.get(name, 0), self.mirror_version.get(name, 0))

    def host_view(self, name: str) -> torch.Tensor:
        """Return a mirror, `[capacity]`."""
        return self._buffer.get_host_view(buffer_of(name))

    def host_array(self, name: str) -> np.ndarray:
        """Return a mirror, `[capacity]`, as an array."""
        return self.host_view(name).numpy()

    # Moving.

    def _event(self) -> torch.cuda.Event | None:
        """An event that follows everything on the current stream; None without CUDA."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def before_host_write(self) -> None:
        """Wait until the host may write mirrors."""
        event, self._uploaded = self._uploaded, None
        if event is not None:
            event.synchronize()

    def _length(self, name: str) -> int:
        """Elements in use; of a page table the host may not know, so the bound counts."""
        length = int(self._buffer.get_current_length(name))
        return max(length, min(self._page_bounds.get(name, 0), int(self._buffer.get_capacity(name))))

    def move(self, names: Collection[str], trigger: str = "") -> None:
        """Bring exactly these mirrors up to date in one transfer and wait for it."""
        ticket = self._start(names, trigger, waited=True)
        # A mirror that was written alone is overwritten: a blocking copy takes the device's side.
        for piece in ticket.pieces:
            self.mirror_version[piece.name] = min(piece.version, self.mirror_version.get(piece.name, 0))
        ticket.wait()

    def start(self, names: Collection[str], trigger: str = "") -> Ticket:
        """Start that transfer on the current stream without waiting."""
        return self._start(names, trigger, waited=False)

    def _start(self, names: Collection[str], trigger: str, waited: bool) -> _TrackedTicket:
        bases = sorted({buffer_of(name) for name in names})
        sources = [self._buffer.get_view(name)[: self._length(name)].view(torch.uint8) for name in bases]
        nbytes = sum(source.numel() for source in sources)
        on_cuda = self._device.type == "cuda"
        landing = self._landing.take(nbytes, pinned=on_cuda)
        if on_cuda:
            packed = sources[0] if len(sources) == 1 else torch.cat(sources)
            landing[:nbytes].copy_(packed, non_blocking=True)
        else:
            torch.cat(sources, out=landing[:nbytes])
        transfer = self._report(Transfer(tuple(map(mirror_of, bases)), nbytes, waited, trigger))
        pieces = [
            _Piece(name, source.numel(), self.device_version.get(name, 0))
            for name, source in zip(bases, sources, strict=True)
        ]
        return _TrackedTicket(self, transfer, landing, pieces, self._event())


class _Watched:
    """Stands for a method on one instance and tells what is tracked about it when it is called."""

    def __init__(self, mirrors: TrackedMirrors, owner: Any, name: str, action: str, inner: Any) -> None:
        self.mirrors = mirrors
        self.owner = owner
        self.name = name
        self.action = action
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = self.inner or getattr(type(self.owner), self.name).__get__(self.owner)
        return getattr(self.mirrors, self.action)(original, self.name, args, kwargs)


class _Piece:
    """One tensor inside a landing area."""

    __slots__ = ("name", "nbytes", "version")

    def __init__(self, name: str, nbytes: int, version: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.version = version


class _TrackedTicket:
    """A transfer under way into a landing area; see `Ticket`."""

    def __init__(
        self,
        mirrors: TrackedMirrors,
        transfer: Transfer,
        landing: torch.Tensor,
        pieces: list[_Piece],
        event: torch.cuda.Event | None,
    ) -> None:
        self.transfer = transfer
        self.pieces = pieces
        self._mirrors = mirrors
        self._landing: torch.Tensor | None = landing
        self._event = event

    @property
    def names(self) -> tuple[str, ...]:
        """See `Ticket`."""
        return self.transfer.names

    def wait(self) -> tuple[str, ...]:
        """See `Ticket`; what was overtaken as a whole is dropped without waiting."""
        if self._landing is None:
            return ()
        landing, self._landing = self._landing, None
        versions = self._mirrors.mirror_version
        applied = [p for p in self.pieces if versions.get(p.name, 0) <= p.version]
        if applied:
            self.transfer.waited = True
            if self._event is not None:
                self._event.synchronize()
            self._mirrors.before_host_write()
        start = 0
        for piece in self.pieces:
            if piece in applied:
                mirror = self._mirrors.host_view(piece.name).view(torch.uint8)
                count = min(piece.nbytes, mirror.numel())
                mirror[:count].copy_(landing[start : start + count])
                versions[piece.name] = piece.version
            start += piece.nbytes
        self._mirrors._landing.give_back(landing, self._event)
        return tuple(sorted(mirror_of(p.name) for p in applied))


def _calling_method(frame: FrameType | None, info: Any) -> str:
    """Return the innermost public method of ``info`` on the stack, ``""`` when there is none."""
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_locals.get("self") is info and not name.startswith("_"):
            return name
        frame = frame.f_back
    return ""
