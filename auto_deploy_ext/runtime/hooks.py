"""Mirrors on demand, for orchestrators that cannot be traced: mutations mark, and consumers fetch what they read.

The wrapper runs its own forward. While it does, the metadata mutations of the interface that it was given move nothing,
so what they write becomes stale; a forward pre-hook on every consumer, and every call that reads mirrors, brings
exactly its stale mirrors up to date right before it runs.

Rules:

1. Consumers are the GraphModules below the wrapper, annotated modules, and what takes their place later; a GraphModule
   that takes `**kwargs` reads everything; any other module reads the mirrors among its keyword arguments.
2. `run_host_prepare_for_attention_forward`, `get_arg("x_host")`, `unnest_sequences` and every registered host reader
   are consumers too. `named_args` is not, because it names every argument; a mirror that the wrapper's own Python takes
   out of it and works on with torch is brought up to date then. Only numpy views of it go unseen.
3. A write into a device buffer that is no registered mutation (`get_arg("input_pos").add_(1)`, a consumer that writes
   its argument) is noticed by torch's version counters, and makes every mirror stale: the counters do not say which
   buffer it was.
4. A method of the interface that is neither registered nor known to be harmless gets every mirror first
   (`on_unknown: full`) or is refused (`error`).
5. After the forward, the mirrors in `live_out` are brought up to date.

The hooks are installed by the call itself on the modules that it finds under the consumers' names, so a copy, an
unpickled wrapper and one whose consumers were compiled have them as soon as they run; what the interface needs is put
on it when the forward begins and taken off when it ends.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from auto_deploy_ext.active_args import META_KEY, consumer_args
from auto_deploy_ext.analysis.interface_nodes import is_orchestrator_graph
from auto_deploy_ext.analysis.program import UnknownEffectError, split_override
from auto_deploy_ext.effects import (
    BUILT_IN_MUTATIONS,
    HOST_READERS,
    MUTATIONS,
    NEUTRAL_METHODS,
    HostReader,
    MutationSpec,
    buffer_of,
    is_mirror,
    mirror_of,
)
from auto_deploy_ext.orchestrator.rebound import ReboundForward, unbound_original
from auto_deploy_ext.runtime import host_mirrors, late_offset, metadata_arithmetic, replay, tracked_mirrors
from auto_deploy_ext.runtime.consumer_check import ConsumerCheck

#: sorted `_host` names that a consumer reads; None: it does not say, so everything.
Reads = tuple[str, ...] | None

OnUnknown = Literal["full", "error"]


class HookedForward(ReboundForward):
    """Stands as the forward of a wrapper that cannot be traced.

    Args:
        owner: the wrapper.
        parameter: the parameter of its forward that receives the interface.
        consumers: qualified name of each consumer -> the names of its arguments, None where it does not say.
        live_out: `_host` names that something reads after the forward.
        reason: why the wrapper is not traced.
        on_unknown: what a call of unknown effect on the interface means.
        original: see `ReboundForward`.
    """

    def __init__(
        self,
        owner: nn.Module,
        parameter: str,
        consumers: Mapping[str, tuple[str, ...] | None],
        live_out: tuple[str, ...] = (),
        reason: str = "",
        on_unknown: OnUnknown = "full",
        original: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(owner, parameter, original)
        self.on_unknown = on_unknown
        self.live_out = live_out
        self.reason = reason
        self.reads: dict[str, Reads] = {
            path: None if names is None else tuple(n for n in names if is_mirror(n))
            for path, names in consumers.items()
        }
        self._check = ConsumerCheck({path: names for path, names in consumers.items() if names is not None})
        self._hooked: dict[str, nn.Module] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original forward with mirrors on demand; without an interface, as it is."""
        interface = self._interface_of(args, kwargs)
        if interface is None or self.bypassed:
            return self.original(*args, **kwargs)
        self._hook_consumers()
        reads = {id(module): (path, self.reads[path]) for path, module in self._hooked.items()}
        with _demand(interface, reads, self.on_unknown) as demand:
            with _WatchReads(demand):
                result = self.original(*args, **kwargs)
            demand.bring(self.live_out, "live_out")
        return result

    def _interface_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._position is not None and self._position < len(args):
            return args[self._position]
        return kwargs.get(self.parameter)

    def _hook_consumers(self) -> None:
        self._check(self.owner)
        if not self._hooked:
            for module in _eager_modules(self.owner, self.reads):
                _hook(module)
        for path in self.reads:
            module = self.owner.get_submodule(path)
            if self._hooked.get(path) is not module:
                _hook(module)
                self._hooked[path] = module

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "_hooked": {}, "_check": ConsumerCheck(self._check.expected)}


def install(
    owner: nn.Module,
    parameter: str,
    live_out: tuple[str, ...] = (),
    reason: str = "",
    on_unknown: OnUnknown = "full",
) -> HookedForward:
    """Make a wrapper's inference path run with mirrors on demand; a second call replaces the first's.

    Args:
        owner: the wrapper; the object, its attributes and its `meta` stay.
        parameter: the parameter of its forward that receives the interface.
        live_out: `_host` names that something reads after the forward.
        reason: why it is not traced.
        on_unknown: see `HookedForward`.
    """
    hooked = would_hook(owner, parameter, live_out, reason, on_unknown)
    hooked._hook_consumers()
    owner.forward = hooked
    return hooked


def would_hook(
    owner: nn.Module,
    parameter: str,
    live_out: tuple[str, ...] = (),
    reason: str = "",
    on_unknown: OnUnknown = "full",
) -> HookedForward:
    """What `install` would bind; the wrapper is not changed."""
    consumers = find_consumers(owner)
    return HookedForward(owner, parameter, consumers, live_out, reason, on_unknown, unbound_original(owner))


def find_consumers(owner: nn.Module) -> dict[str, tuple[str, ...] | None]:
    """The consumers below a wrapper by qualified name, outermost ones, with the names of their arguments."""
    found: dict[str, tuple[str, ...] | None] = {}
    for path, module in owner.named_modules(remove_duplicate=False):
        if not path or any(path.startswith(f"{outer}.") for outer in found) or is_orchestrator_graph(module):
            continue
        if isinstance(module, GraphModule) or META_KEY in (getattr(module, "meta", None) or ()):
            found[path] = consumer_args(module)
    return found


def _eager_modules(owner: nn.Module, consumers: Collection[str]) -> Iterator[nn.Module]:
    """The modules that are no consumer, lie in none, and are not torch's own."""
    for path, module in owner.named_modules():
        inside = any(path == c or path.startswith(f"{c}.") for c in consumers)
        if path and not inside and not type(module).__module__.startswith("torch."):
            yield module


def _hook(module: nn.Module) -> None:
    if fetch_before not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(fetch_before, with_kwargs=True, prepend=True)
        module.register_forward_hook(leave_consumer, always_call=True)


def has_other_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks beside a consumer's own, which do nothing outside of such a forward."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    if not before and not after:
        return False
    return any(hook is not fetch_before for hook in before.values()) or any(
        hook is not leave_consumer for hook in after.values()
    )


def fetch(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Bring the stale mirrors of a consumer up to date; nothing outside of such a forward."""
    demand = _active.get()
    if demand is None:
        return
    path, reads = demand.reads.get(id(module)) or (type(module).__name__, tuple(filter(is_mirror, kwargs)))
    if reads is None:
        demand.bring_all(path)
    else:
        demand.bring(reads, path)


def fetch_before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The forward pre-hook of a consumer: fetch its mirrors, then let it be."""
    fetch(module, kwargs)
    demand = _active.get()
    if demand is not None and id(module) in demand.reads:
        demand.enter_consumer(module)


def leave_consumer(module: nn.Module, args: Any, result: Any) -> None:
    """The forward hook of a consumer: the wrapper's own code goes on, also after an error."""
    demand = _active.get()
    if demand is not None:
        demand.leave_consumer(module)


class _WatchReads(TorchFunctionMode):
    """Brings a mirror up to date before the wrapper's own code works on its memory; consumers have theirs already."""

    def __init__(self, demand: _Demand) -> None:
        super().__init__()
        self._demand = demand

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__" and not self._demand.is_host_code(sys._getframe(1)):
            self._demand.bring_touched((args, kwargs))
        return func(*args, **kwargs)


# -- one forward ------------------------------------------------------------------------------------------------------


class _Demand:
    """What happens to the mirrors of one interface during one forward."""

    def __init__(self, interface: Any, reads: dict[int, tuple[str, Reads]], on_unknown: OnUnknown) -> None:
        self.interface = interface
        self._on_unknown = on_unknown
        self._inside: list[tuple[nn.Module, Any]] = []
        self._memory: list[tuple[int, int, str]] | None = None
        self.info = getattr(interface, "info", interface)
        self.reads = reads
        self._buffers = frozenset(self.info._input_buffer.tensor_names)
        self._regions = [n for n in sorted(self._buffers) if n.startswith("cache_loc") or n == "input_pos"]
        kinds = (*type(self.info).__mro__, *type(interface).__mro__)
        self._host_code = {kind.__module__ for kind in kinds if kind is not object}
        #: the host's own code, and what moves mirrors.
        self._host_packages = (
            *(f"{name.rpartition('.')[0]}." for name in self._host_code if "." in name),
            *(module.__name__ for module in (host_mirrors, tracked_mirrors, metadata_arithmetic, late_offset, replay)),
        )
        self._counters = self._read_counters()

    def bring(self, names: Collection[str], trigger: str) -> None:
        """Bring those of these mirrors up to date that are stale, in one transfer."""
        bases = {buffer_of(name) for name in names if is_mirror(name)}
        if bases:
            self._notice_writes()
            late_offset.settle(self.info, bases)
            host_mirrors.move(self.info, bases.intersection(host_mirrors.stale_names(self.info)), trigger)

    def bring_all(self, trigger: str) -> None:
        """The same for every mirror."""
        self.bring(tuple(map(mirror_of, self._buffers)), trigger)

    # Reads by the wrapper's own code.

    def is_host_code(self, frame: FrameType) -> bool:
        """Whether a frame belongs to the host, or to what moves mirrors, rather than to the wrapper."""
        name = str(frame.f_globals.get("__name__"))
        return name in self._host_code or name.startswith(self._host_packages)

    def enter_consumer(self, module: nn.Module) -> None:
        """Stop watching: what runs now is a consumer, which may be compiled, and its mirrors are up to date."""
        guard = torch._C.DisableTorchFunction()
        guard.__enter__()
        self._inside.append((module, guard))

    def leave_consumer(self, module: nn.Module) -> None:
        """Watch again."""
        if self._inside and self._inside[-1][0] is module:
            self._inside.pop()[1].__exit__(None, None, None)

    def bring_touched(self, arguments: Any) -> None:
        """Bring the mirrors up to date whose memory one of these arguments shares."""
        touched: set[str] = set()

        def look(tensor: torch.Tensor) -> None:
            if tensor.device.type == "cpu" and type(tensor) is torch.Tensor and tensor.numel():
                start = tensor.data_ptr()
                touched.update(n for first, end, n in self._mirror_memory() if first <= start < end)

        tree_map_only(torch.Tensor, look, arguments)
        self.bring(touched, "the orchestrator's own code")

    def _mirror_memory(self) -> list[tuple[int, int, str]]:
        """First byte, end and name of every mirror."""
        if self._memory is None:
            views = {name: host_mirrors.host_view(self.info, name) for name in sorted(self._buffers)}
            self._memory = [(v.data_ptr(), v.data_ptr() + v.nbytes, mirror_of(n)) for n, v in views.items()]
        return self._memory

    # Writes that are no mutation.

    def _read_counters(self) -> tuple[int, ...]:
        buffer = self.info._input_buffer
        try:
            return tuple(buffer.get_view(name)._version for name in self._regions)
        except RuntimeError:  # buffers that were made in inference mode have none
            return ()

    def _notice_writes(self) -> None:
        counters = self._read_counters()
        if counters != self._counters:
            self._counters = counters
            host_mirrors.mark_stale(self.info, self._buffers)

    # Calls on the interface.

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While active, mutations and readers of the interface go through this object."""
        before: list[tuple[Any, str, Any]] = []
        for owner in dict.fromkeys((self.info, self.interface)):
            for name, wrap in self._wrappers(owner):
                before.append((owner, name, vars(owner).get(name)))
                vars(owner)[name] = wrap
        try:
            yield
        finally:
            for owner, name, value in before:
                if value is None:
                    del vars(owner)[name]
                else:
                    vars(owner)[name] = value

    def _wrappers(self, owner: Any) -> list[tuple[str, Callable[..., Any]]]:
        mutations = [(n, s) for n, s in MUTATIONS.items() if callable(getattr(owner, n, None))]
        readers = [(n, r) for n, r in HOST_READERS.items() if callable(getattr(owner, n, None))]
        unknown = [n for n in dir(type(owner)) if self._is_unknown(type(owner), n)]
        return [
            *((n, self._quietened(getattr(owner, n), s)) for n, s in mutations),
            *((n, self._fetching(getattr(owner, n), r)) for n, r in readers),
            *((n, self._refreshed(getattr(owner, n), n)) for n in unknown),
        ]

    @staticmethod
    def _is_unknown(kind: type, name: str) -> bool:
        known = name in MUTATIONS or name in HOST_READERS or name in NEUTRAL_METHODS or name.startswith("_")
        return not known and inspect.isfunction(inspect.getattr_static(kind, name))

    def _refreshed(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.is_host_code(sys._getframe(1)):
                if self._on_unknown == "error":
                    raise UnknownEffectError(
                        f"{name}() is not registered: register it with auto_deploy_ext.register_mutation or "
                        "register_host_reader, or set on_unknown: full"
                    )
                self.bring_all(name)
            return method(*args, **kwargs)

        return call

    def _quietened(self, method: Callable[..., Any], spec: MutationSpec) -> Callable[..., Any]:
        def mutation(*args: Any, **kwargs: Any) -> Any:
            args, kwargs, _, _ = split_override(spec, args, kwargs)
            self._notice_writes()
            if spec.restages:
                result = method(*args, **kwargs)
            else:
                self._mark_own(spec, args, kwargs)
                with host_mirrors.quiet(self.info):
                    result = method(*args, **kwargs)
            self._counters = self._read_counters()
            return result

        return mutation

    def _mark_own(self, spec: MutationSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Mark what a mutation that the host does not know of itself writes."""
        if spec.name not in BUILT_IN_MUTATIONS:
            names = spec.written(self.info, args, kwargs, self._buffers)
            host_mirrors.mark_stale(self.info, self._buffers if names is None else names)

    def _fetching(self, method: Callable[..., Any], reader: HostReader) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            # An argument that the interface's own code asks for (named_args does, for all of them) is no read.
            if reader.name != "get_arg" or sys._getframe(1).f_globals.get("__name__") not in self._host_code:
                names = reader.read(self.info, args, kwargs)
                if names is None:
                    self.bring_all(reader.name)
                else:
                    self.bring(names, reader.name)
            return method(*args, **kwargs)

        return read


_active: ContextVar[_Demand | None] = ContextVar("auto_deploy_ext_demand", default=None)


@contextmanager
def _demand(interface: Any, reads: dict[int, tuple[str, Reads]], on_unknown: OnUnknown) -> Iterator[_Demand]:
    demand = _Demand(interface, reads, on_unknown)
    token = _active.set(demand)
    try:
        with demand.watching():
            yield demand
    finally:
        _active.reset(token)
