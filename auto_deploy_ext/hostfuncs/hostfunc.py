"""`hostfunc`: a decorator that makes calls of a Python function run in the order of the current stream.

Rules of a host function:

1. It runs after the work that the stream holds before it, and the work after it waits for it.
2. It makes no CUDA call: an operation on a CUDA tensor, a launch, a drain or a wait inside one is refused.
3. Python's cyclic garbage collector does not run inside one, nor while one is outstanding except at launches, replays
   and drains: it could free CUDA tensors or events on a thread that may not. Results and exceptions are freed later.
4. An exception is recorded with its batch and raised by the owner's next drain or synchronisation.
5. Its arguments live until it has run; captured, as long as its graph may run it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, overload

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from .pending import CapturedCalls, HostFuncOwner

P = ParamSpec("P")


class HostFuncUsageError(RuntimeError):
    """A host function does, or is asked to do, what it must not."""


@dataclass(frozen=True)
class HostFuncFailure:
    """An exception in a host function.

    Attributes:
        function: the function's qualified name.
        owner: the name of its owner.
        batch: the number of the batch that it worked for.
        exception: what it raised.
    """

    function: str
    owner: str
    batch: int
    exception: BaseException

    def __str__(self) -> str:
        return (
            f"host function {self.function} failed in batch {self.batch} of {self.owner}: "
            f"{type(self.exception).__name__}: {self.exception}"
        )


class HostFuncError(RuntimeError):
    """Host functions failed; raised from the first one's exception.

    Attributes:
        failures: all of them, in order.
    """

    def __init__(self, failures: tuple[HostFuncFailure, ...]) -> None:
        super().__init__("\n".join(map(str, failures)))
        self.failures = failures


# ---------------------------------------------------------------- where we are


class _Where(threading.local):
    inside: bool = False


_where = _Where()


def inside_hostfunc() -> bool:
    """Whether the calling thread is in a host function."""
    return _where.inside


def refuse_inside(what: str) -> None:
    """Raise when the calling thread is in a host function.

    Raises:
        HostFuncUsageError: it is.
    """
    if _where.inside:
        raise HostFuncUsageError(f"{what} inside a host function: no CUDA call may be made there")


class _RefuseCuda(TorchDispatchMode):
    """Refuses operations that read, write or make CUDA tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            device = getattr(leaf, "device", leaf)
            if isinstance(device, torch.device) and device.type == "cuda":
                raise HostFuncUsageError(f"{func} on a CUDA tensor inside a host function: use host memory there")
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------- the garbage collector


class GcGuard:
    """Switches automatic garbage collection off while anybody holds the guard.

    Whoever holds it for long calls `collect_if_due` on a thread that may call CUDA, so that garbage is still freed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._was_enabled = False

    def hold(self) -> None:
        """Switch collection off."""
        with self._lock:
            if self._holders == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._holders += 1

    def release(self) -> None:
        """Undo one `hold`; after the last, collection is as it was before the first."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._was_enabled:
                gc.enable()

    def collect_if_due(self) -> None:
        """Collect what Python would have collected by now."""
        with self._lock:
            held = self._holders > 0 and self._was_enabled
        if held and not _where.inside:
            # As Python does it: the oldest generation whose count is beyond its threshold. All of them more rarely,
            # because what Python goes by, how much has become old since the last time, cannot be seen from here.
            young, middle, old = zip(gc.get_count(), gc.get_threshold(), strict=True)
            if young[0] > young[1] > 0:
                is_old = old[0] > 10 * old[1] > 0
                gc.collect(2 if is_old else 1 if middle[0] > middle[1] > 0 else 0)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While active, the guard is held."""
        self.hold()
        try:
            yield
        finally:
            self.release()


gc_guard = GcGuard()

#: results and exceptions of host functions, to be freed by a thread that may call CUDA.
_leftovers: deque[Any] = deque()


def free_leftovers() -> None:
    """Free what host functions have left behind."""
    with contextlib.suppress(IndexError):  # other threads take from it as well
        while True:
            _leftovers.popleft()


# ---------------------------------------------------------------- calls


class HostCall:
    """One launch of a host function with its arguments; what a stream or a graph calls."""

    __slots__ = ("__weakref__", "args", "batch", "captured", "first", "function", "kwargs", "owner")

    def __init__(
        self,
        owner: HostFuncOwner,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        captured: CapturedCalls | None,
    ) -> None:
        self.owner = owner
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.captured = captured
        self.first = captured is None or not captured.calls
        self.batch = owner.batch

    def __call__(self) -> None:
        """Run it; never raises."""
        gc_guard.hold()
        batch = self.batch if self.captured is None else self.captured.batch_of(self)
        outer, _where.inside = _where.inside, True
        try:
            with _RefuseCuda():
                _leftovers.append(self.function(*self.args, **self.kwargs))
        except BaseException as error:
            name = getattr(self.function, "__qualname__", repr(self.function))
            self.owner.record_failure(HostFuncFailure(name, self.owner.name, batch, error))
        finally:
            _where.inside = outer
            self.owner.count_run()
            gc_guard.release()


class HostFunc(Generic[P]):
    """A function whose calls are launched on the current stream; see `hostfunc`.

    Attributes:
        function: the undecorated function.
    """

    def __init__(self, function: Callable[P, Any]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Launch on the current stream for the current owner, or into the capture that runs on it.

        Raises:
            HostFuncUsageError: inside a host function, or in a capture that nobody collects (`capture_hostfuncs`).
        """
        from .pending import current_owner

        current_owner().launch(self.function, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: bind the instance."""
        return self if instance is None else HostFunc(self.function.__get__(instance, owner))


@overload
def hostfunc(function: Callable[P, Any]) -> HostFunc[P]: ...
@overload
def hostfunc() -> Callable[[Callable[P, Any]], HostFunc[P]]: ...
def hostfunc(function: Callable[P, Any] | None = None) -> Any:
    """Make a Python function a host function: a call launches it on the current stream and returns at once.

    Args:
        function: takes whatever it is called with, host data only; its result is dropped.

    Example:
        >>> @hostfunc
        ... def note(step: int) -> None:
        ...     print("the stream has come to step", step)
        >>> note(1)
        >>> drain_hostfuncs()
    """
    return HostFunc if function is None else HostFunc(function)
