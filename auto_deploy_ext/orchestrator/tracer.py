"""Traces an orchestrator's inference forward into an FX graph, for the batch that the interface holds.

The forward runs once on proxies. A proxy of host state carries its real value, so every branch takes the side that the
example batch takes and leaves a guard; a proxy of a tensor carries a fake tensor, so no model runs, no cache is
written, and whatever would need device data is refused. Metadata mutations really run (on saved state), because host
integers read after them must be right.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node, Tracer
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property, resolve_name
from torch.utils._pytree import tree_map, tree_map_only

from auto_deploy_ext.effects import BATCH_KIND_METHODS, MUTATIONS

from . import ops
from .errors import UntraceableError, where_in_source, where_in_traceback
from .guards import GuardBuilder, argument_names, entry_signature, is_pure_method
from .module_state import ModuleState
from .proxy import MethodProxy, ValueProxy

#: factory functions that refuse proxies as sizes; they are wrapped while tracing.
_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
)

#: calls whose effect no graph can repeat in the right place.
_UNTRACEABLE_CUDA = ("stream", "Event", "current_stream", "default_stream", "set_stream", "graph")

#: attributes that every interface has at all times.
_ALWAYS_THERE = frozenset(("info", "batch_info", "named_args", "device", "num_sequences", "total_num_tokens"))

#: methods of the interface and its SequenceInfo that leave `batch_info` alone.
_NEUTRAL_METHODS = frozenset(
    ("maybe_gather_and_squeeze", "flatten", "unflatten", "unnest_sequences", "run_host_prepare_for_attention_forward")
)

_active: list[OrchestratorTracer] = []


class _RecordTorchCalls(TorchFunctionMode):
    """Sends every torch call of the orchestrator's own code to the tracer, those without a proxy included."""

    def __init__(self, tracer: OrchestratorTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._tracer.torch_call(func, args, kwargs or {})


class _HostStateIsReal(FakeTensorMode):
    """A fake tensor mode in which host state stays real, so that the interface's own methods can read it."""

    def __init__(self, is_host_state: Callable[[Any], bool]) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._is_host_state = is_host_state

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = _tensors((args, kwargs))
        if tensors and all(map(self._is_host_state, tensors)):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class OrchestratorTracer(Tracer):
    """Records one forward of an orchestrator; `trace` is the entry point.

    Attributes:
        values: the value of each node in the example batch.
        guards: the conditions collected on the way.
    """

    @staticmethod
    def active() -> OrchestratorTracer:
        """The tracer that is running in this process."""
        return _active[-1]

    def trace_forward(
        self, owner: nn.Module, forward: Callable[..., Any], parameter: str, interface: Any, proxied: frozenset[str]
    ) -> Graph:
        """Trace `forward(parameter=interface)` of `owner` and return its graph.

        Args:
            owner: the wrapper whose submodules the graph calls.
            forward: its bound inference forward.
            parameter: the name of the parameter that receives the interface.
            interface: the CachedSequenceInterface, holding the example batch; it is left changed.
            proxied: attributes of the wrapper (dotted) that are read at run time rather than guarded, because the
                forward assigns them.

        Raises:
            UntraceableError: the forward does something that no graph can stand for; `owner` is as before.
        """
        self.root = owner
        self.graph = Graph(tracer_cls=type(self))
        self.values: dict[Node, Any] = {}
        self.phases: dict[Node, int] = {}
        self.guards = GuardBuilder(self.values, self.phases, entry_signature(interface), argument_names(interface))
        self.proxied = proxied
        self._interface = interface
        self.evaluating = False
        self._module_paths = {id(m): path for path, m in reversed(list(owner.named_modules(remove_duplicate=False)))}
        self._tensor_paths = {
            id(t): path
            for path, t in (
                *owner.named_parameters(remove_duplicate=False),
                *owner.named_buffers(remove_duplicate=False),
            )
        }
        self._attribute_proxies: dict[str, ValueProxy] = {}
        self._kind_changed = False
        info = interface.info
        # Tensors that were made in inference mode can be written in it only.
        self._inference = info.batch_info.serialize().is_inference() or info.get_arg("input_pos").is_inference()
        self._fixed: set[Node] = set()
        self._fake_mode = _HostStateIsReal(self._is_host_state)
        self._consumer_results: dict[Any, Any] = {}
        self._owner_node: Node | None = None
        node = self.graph.create_node("placeholder", parameter, (), {}, name=parameter, type_expr=None)
        argument = self._wrap(node, interface)
        self.module_state = ModuleState(owner, self)
        with self._recording():
            result = forward(**{parameter: argument})
            self.graph.output(self.create_arg(result))
        self.module_state.check_unchanged()
        # A consumer writes caches: it is no dead code, even where nobody uses what it returns.
        self.graph.eliminate_dead_code(lambda node: node.op == "call_module" or _is_impure(node))
        self.graph.lint()
        return self.graph

    # -- running ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.callback(_active.remove, self)
            _active.append(self)
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(self.module_state.watching())
            stack.enter_context(self._patches())
            stack.enter_context(_RecordTorchCalls(self))
            try:
                yield
            except UntraceableError as error:
                if error.where is None:
                    raise UntraceableError(error.reason, where_in_traceback(error.__traceback__)) from error
                raise
            except AssertionError:
                raise
            except Exception as error:
                raise UntraceableError(
                    f"{type(error).__name__} while tracing: {error}", where_in_traceback(error.__traceback__)
                ) from error

    @contextlib.contextmanager
    def _patches(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:

            def patch(obj: Any, name: str, replacement: Any) -> None:
                original = obj.__dict__[name] if isinstance(obj, type) else getattr(obj, name)
                stack.callback(setattr, obj, name, original)
                setattr(obj, name, replacement)

            original_call = nn.Module.__call__
            original_getattr = nn.Module.__getattr__

            @functools.wraps(original_call)
            def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if self.evaluating:
                    return original_call(module, *args, **kwargs)
                return self.call_submodule(module, functools.partial(original_call, module), args, kwargs)

            @functools.wraps(original_getattr)
            def get(module: nn.Module, name: str) -> Any:
                value = original_getattr(module, name)
                return self.read_parameter(value) if isinstance(value, torch.Tensor) else value

            patch(nn.Module, "__call__", call)
            patch(nn.Module, "__getattr__", get)
            for name in _FACTORIES:
                patch(torch, name, self._factory(getattr(torch, name)))
            patch(torch.cuda, "synchronize", self._recorded_call(torch.cuda.synchronize, "torch.cuda.synchronize"))
            patch(builtins, "print", self._recorded_call(builtins.print, "builtins.print"))
            for name in _UNTRACEABLE_CUDA:
                patch(torch.cuda, name, self._refused_call(getattr(torch.cuda, name), f"torch.cuda.{name}"))
            yield

    def _factory(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def factory(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.evaluating else self.torch_call(function, args, kwargs)

        return factory

    def _recorded_call(self, function: Callable[..., Any], qualified_name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self.evaluating:
                return function(*args, **kwargs)
            self._node("call_function", ops.call, (qualified_name, *args), kwargs, None)
            return None

        return recorded

    def _refused_call(self, function: Any, name: str) -> Any:
        def refused(*args: Any, **kwargs: Any) -> Any:
            if self.evaluating:
                return function(*args, **kwargs)
            raise UntraceableError(f"uses {name}, whose order a graph cannot keep", where_in_source())

        return refused

    # -- recording --------------------------------------------------------------------------------------------

    def record(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one node, evaluate it for the example batch, and return a proxy (None for None)."""
        values = self._values(args)
        value = self._evaluate(kind, target, values, self._values(kwargs))
        node = self._node(kind, target, args, kwargs, value)
        proxy = self._wrap(node, value)
        if target in (ops.setitem, ops.call_inplace) and self._is_host_state(values[0]):
            self.guards.host_effect(node)
            self._kind_changed = True
        return proxy

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *_: Any, **__: Any) -> Any:
        """FX's own way in; the same as `record`."""
        return self.record(kind, target, args, kwargs)

    def _node(self, kind: str, target: Any, args: Any, kwargs: Any, value: Any) -> Node:
        node = self.graph.create_node(kind, target, self.create_arg(tuple(args)), self.create_arg(dict(kwargs)))
        self.values[node] = value
        self.phases[node] = self.guards.phase
        if node.target in ops.EFFECTS or kind == "call_module":
            node.meta["source"] = _short(where_in_source())
        return node

    def _wrap(self, node: Node, value: Any) -> Any:
        self.values[node] = value = self._without_data(value)
        self.phases[node] = self.guards.phase
        if value is None:
            if node.target in (getattr, operator.getitem) or (node.target is ops.invoke and node.args[1] == "get"):
                self.guards.require_equal(node, None)
            return None
        if node.target is getattr and node.args[1] not in _ALWAYS_THERE and not self._is_tensor_node(node.args[0]):
            self.guards.require_present(node)
        return ValueProxy(node, self)

    def _is_tensor_node(self, node: Any) -> bool:
        return isinstance(self.values.get(node), torch.Tensor)

    def create_arg(self, a: Any) -> Any:
        """Turn an argument into what a node may hold; on top of FX's: dataclasses before dicts, sets, namespaces."""
        if isinstance(a, ValueProxy):
            return a.node
        if isinstance(a, MethodProxy):
            return self.create_arg(self.record("call_function", getattr, (a._receiver, a._name), {}))
        if dataclasses.is_dataclass(a) and not isinstance(a, type):
            fields = {f.name: self.create_arg(getattr(a, f.name)) for f in dataclasses.fields(a) if f.init}
            return self._plain_node(type(a), (), fields)
        if isinstance(a, (set, frozenset)):
            return self._plain_node(ops.make_set, tuple(self.create_arg(x) for x in sorted(a, key=repr)), {})
        if isinstance(a, SimpleNamespace):
            return self._plain_node(ops.make_namespace, (), {k: self.create_arg(v) for k, v in vars(a).items()})
        if isinstance(a, nn.Module) and id(a) in self._module_paths:
            path = self._module_paths[id(a)]
            return self.graph.get_attr(path) if path else self.owner_node()
        if isinstance(a, torch.Tensor):
            return self.create_arg(self.read_parameter(a))
        if isinstance(a, type):
            return a
        return super().create_arg(a)

    def _plain_node(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        self.values[node] = None
        self.phases[node] = self.guards.phase
        return node

    def owner_node(self) -> Node:
        """The node that stands for the wrapper itself."""
        if self._owner_node is None:
            first = next(n for n in self.graph.nodes if n.op == "placeholder")
            with self.graph.inserting_after(first):
                self._owner_node = self.graph.create_node("get_attr", "owner")
            self.values[self._owner_node] = self.root
            self.phases[self._owner_node] = 0
        return self._owner_node

    # -- evaluation -------------------------------------------------------------------------------------------

    def _values(self, args: Any) -> Any:
        def value(a: Any) -> Any:
            if isinstance(a, ValueProxy):
                return self.values[a.node]
            if isinstance(a, MethodProxy):
                return getattr(self.values[a._receiver.node], a._name)
            if isinstance(a, slice):
                return slice(value(a.start), value(a.stop), value(a.step))
            return a

        return tree_map(value, args, is_leaf=lambda a: isinstance(a, (ValueProxy, MethodProxy, slice)))

    def is_device_data(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's contents are unknown while tracing; only `batch_info`'s host tensor is known."""
        return isinstance(tensor, FakeTensor)

    def _is_host_state(self, tensor: Any) -> bool:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):
            return False
        with self.evaluation():
            state = self._interface.info.batch_info.serialize()
            return tensor.untyped_storage().data_ptr() == state.untyped_storage().data_ptr()

    def _without_data(self, value: Any) -> Any:
        """Replace tensors by fake ones, host state excepted; containers of the interface's own stay as they are."""
        if isinstance(value, torch.Tensor):
            if isinstance(value, FakeTensor) or self._is_host_state(value):
                return value
            with self.evaluation():
                return self._fake_mode.from_tensor(value.detach(), static_shapes=True)
        return value

    def _evaluate(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.evaluation():
            if kind == "call_method":
                receiver, *rest = args
                function: Callable[..., Any] = functools.partial(getattr(receiver, target), *rest)
                return self._run(function, (), kwargs, probe=(receiver, *rest))
            if kind == "call_module":
                return self._evaluate_submodule(target, args, kwargs)
            if target in (ops.mutate, ops.invoke):
                return self._evaluate_method(args, kwargs)
            return self._run(target, args, kwargs)

    def _evaluate_submodule(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a leaf on fake tensors; a call on arguments alike (the next draft step) runs no more."""
        key = (path, str(tree_map(_signature, (args, sorted(kwargs.items())))))
        with self._fake_mode:
            if key not in self._consumer_results:
                self._consumer_results[key] = self.root.get_submodule(path).forward(
                    *args, **kwargs
                )  # hooks are for real data
            return tree_map_only(torch.Tensor, torch.empty_like, self._consumer_results[key])

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """While active, torch calls and attribute reads are this package's own and are not recorded."""
        before, self.evaluating = self.evaluating, True
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            self.evaluating = before

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any, probe: Any = None) -> Any:
        tensors = _tensors((probe if probe is not None else args, kwargs))
        factory = not tensors and getattr(function, "__module__", None) in ("torch", None)
        fake = factory or any(map(self.is_device_data, tensors))
        with self._fake_mode if fake else torch.inference_mode(self._inference):
            try:
                return function(*args, **kwargs)
            except torch._subclasses.fake_tensor.DataDependentOutputException as error:
                raise UntraceableError(f"needs device data on the host ({error.func})", where_in_source()) from error
            except torch._subclasses.fake_tensor.DynamicOutputShapeException as error:
                raise UntraceableError(
                    f"makes a tensor whose shape depends on device data ({error.func})", where_in_source()
                ) from error

    def _evaluate_method(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        receiver, name, *operands = args
        kwargs = {k: v for k, v in kwargs.items() if k != "active_args"}
        method = getattr(receiver, name)
        if name in MUTATIONS:
            spec = MUTATIONS[name]
            if spec.takes_override and self._takes_override(method):
                kwargs["active_args_override"] = set()
            with torch.inference_mode(self._inference):
                return method(*map(self._zeros, operands), **{k: self._zeros(v) for k, v in kwargs.items()})
        if name == "run_host_prepare_for_attention_forward":
            return None
        try:
            return self._run(method, tuple(operands), kwargs)
        except (RuntimeError, TypeError, ValueError):
            if receiver is not self._interface.info:
                raise
            return method(*map(self._zeros, operands), **{k: self._zeros(v) for k, v in kwargs.items()})

    @staticmethod
    @functools.lru_cache
    def _takes_override_of(function: Any) -> bool:
        import inspect

        return "active_args_override" in inspect.signature(function).parameters

    def _takes_override(self, method: Any) -> bool:
        return self._takes_override_of(getattr(method, "__func__", method))

    def _zeros(self, value: Any) -> Any:
        """A real tensor of zeros for a fake one: mutations write real state, which the caller has saved."""
        if isinstance(value, FakeTensor):
            return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._zeros, value))
        return value

    # -- what proxies and patches call ------------------------------------------------------------------------

    def read_attribute(self, proxy: ValueProxy, name: str) -> Any:
        """`proxy.name`: a method waits for its call, anything else becomes a `getattr` node."""
        value = self.values[proxy.node]
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        with self.evaluation():
            try:
                attribute = getattr(value, name)
            except AttributeError:
                if not isinstance(value, torch.Tensor):
                    self.guards.require_missing(proxy.node, name)
                raise
        if name == "named_args":
            self.guards.require_same_names()
        if callable(attribute) and not isinstance(attribute, (nn.Module, torch.Tensor, type)):
            return MethodProxy(proxy, name)
        result = self.record("call_function", getattr, (proxy, name), {})
        if isinstance(result, ValueProxy) and isinstance(attribute, dict):
            self._fixed.add(result.node)
        return result

    def is_fixed_container(self, node: Node) -> bool:
        """Whether a container's length cannot differ between batches: tuples, and the interface's own mappings."""
        value = self.values[node]
        return isinstance(value, (tuple, dict)) or node in self._fixed

    def record_method(self, receiver: ValueProxy, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method call on a proxy: a tensor's own, a metadata mutation, or any other."""
        value = self.values[receiver.node]
        if isinstance(value, torch.Tensor):
            return self._record_tensor_method(receiver, name, args, kwargs)
        if name in MUTATIONS:
            return self._record_mutation(receiver, name, args, kwargs)
        result = self.record("call_function", ops.invoke, (receiver, name, *args), kwargs)
        if not is_pure_method(name) and name not in _NEUTRAL_METHODS:
            if value is self._interface.info.batch_info:
                self.guards.host_effect(self._last_node())
                self._kind_changed |= name in BATCH_KIND_METHODS
            elif value is self._interface or value is self._interface.info:
                self.guards.opaque_effect(self._last_node(), f"{name}()")
                self._kind_changed = True
        return result

    def _last_node(self) -> Node:
        return next(iter(reversed(self.graph.nodes)))

    def _record_tensor_method(self, receiver: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if ops.is_inplace_name(name) and name != "__setitem__":
            self.record("call_function", ops.call_inplace, (receiver, name, *args), kwargs)
            return receiver
        if name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"):
            value = self.values[receiver.node] if isinstance(receiver, ValueProxy) else receiver
            if self.is_device_data(value):
                receiver._refuse(f"calls .{name}() on")
        return self.record("call_method", name, (receiver, *args), kwargs)

    def _record_mutation(self, receiver: ValueProxy, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        override = kwargs.pop("active_args_override", None)
        spec = MUTATIONS[name]
        position = 0 if spec.operand is None else spec.operand + 1
        if spec.takes_override and len(args) > position:
            override, args = args[position], args[:position]
        if override is not None:
            if not all(isinstance(item, str) for item in override):
                raise UntraceableError(f"active_args_override of {name} is no set of names", where_in_source())
            kwargs["active_args"] = tuple(sorted(override))
        found = self._guard_generate_only() if spec.generates is True else None
        result = self.record("call_function", ops.mutate, (receiver, name, *args), kwargs)
        node = self._last_node()
        if found is not None:
            node.meta["generate_only"] = found
        if spec.host_effect is None and spec.generates is None:
            self.guards.opaque_effect(node, f"{name}()")
        elif spec.host_effect is not None and spec.generates is not False:
            self.guards.host_effect(node, spec.host_effect)
        self._kind_changed |= spec.generates is not False
        return result

    def _guard_generate_only(self) -> bool | None:
        """Guard whether a switch finds the batch generate-only, None where effects of the forward's own came before."""
        if self._kind_changed:
            return None
        with self.evaluation():
            found = bool(self._interface.info.batch_info.is_generate_only())
        self.guards.require_generate_only(found)
        return found

    def record_call(self, function: ValueProxy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of an object that is itself a proxy, a callable held by the interface."""
        return self.record("call_function", ops.invoke, (function, "__call__", *args), kwargs)

    def torch_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function called by the orchestrator's own code."""
        if self.evaluating:
            return function(*args, **kwargs)
        if function is torch._C._set_grad_enabled:
            self._node("call_function", ops.call, ("torch._C._set_grad_enabled", *args), kwargs, None)
            return function(*args, **kwargs)
        if is_tensor_method_or_property(function):
            return self._tensor_method_call(function, args, kwargs)
        if kwargs.get("out") is not None or kwargs.get("inplace") or ops.is_inplace_name(function.__name__):
            name = resolve_name(function)
            if name is None or not ops.resolves_to(name, function):
                raise UntraceableError(
                    f"calls {function}, which writes its argument and has no name", where_in_source()
                )
            value = self._evaluate("call_function", function, self._values(args), self._values(kwargs))
            self._node("call_function", ops.call, (name, *args), kwargs, value)
            return kwargs.get("out", args[0] if args else None)
        return self.record("call_function", function, args, kwargs)

    def _tensor_method_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        receiver, *rest = args
        name = function.__name__
        if name == "__get__":
            name = getattr(function.__self__, "__name__", name)
            if isinstance(receiver, torch.Tensor) and not isinstance(receiver, ValueProxy):
                with self.evaluation():
                    return function(receiver)
            return self.read_attribute(receiver, name)
        if not isinstance(receiver, ValueProxy):
            receiver = self.read_parameter(receiver)
        if name == "__getitem__":
            return self.record("call_function", operator.getitem, (receiver, *rest), {})
        if name == "__setitem__":
            return self.record("call_function", ops.setitem, (receiver, *rest), {})
        return self._record_tensor_method(receiver, name, tuple(rest), kwargs)

    def read_parameter(self, tensor: torch.Tensor) -> Any:
        """A parameter or buffer of the wrapper as a `get_attr` node; any other tensor is refused."""
        if self.evaluating or isinstance(tensor, ValueProxy):
            return tensor
        path = self._tensor_paths.get(id(tensor))
        if path is None:
            raise UntraceableError(
                f"uses a tensor of shape {tuple(tensor.shape)} that is no parameter, buffer or attribute of the "
                "wrapper and was not made while tracing",
                where_in_source(),
            )
        if path not in self._attribute_proxies:
            self._attribute_proxies[path] = self._wrap(self.graph.create_node("get_attr", path), tensor)
        return self._attribute_proxies[path]

    def read_module_attribute(self, path: str, name: str, value: Any) -> Any:
        """A plain attribute of the wrapper or of a traced submodule, read at run time instead of guarded."""
        owner: Any = ValueProxy(self.owner_node(), self)
        for part in filter(None, path.split(".")):
            owner = self.record("call_function", getattr, (owner, part), {})
        node = self._node("call_function", getattr, (owner, name), {}, value)
        self.guards.require_none_or_not(f"{path}.{name}".lstrip("."), value)
        return self._wrap(node, value)

    def assign_module_attribute(self, path: str, name: str, value: Any) -> None:
        """`owner.path.name = value` as an effect of the graph."""
        owner: Any = ValueProxy(self.owner_node(), self)
        for part in filter(None, path.split(".")):
            owner = self.record("call_function", getattr, (owner, part), {})
        self._node("call_function", ops.set_attribute, (owner, name, value), {}, None)

    def call_submodule(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A submodule call: consumers and torch.nn layers are leaves, everything else is traced through."""
        path = self._module_paths.get(id(module))
        if not is_leaf(module):
            if path:
                self.guards.require_module(path, module)
            return forward(*args, **kwargs)
        if path is None:
            raise UntraceableError(
                f"calls a {type(module).__name__} that is no submodule of {type(self.root).__name__}", where_in_source()
            )
        return self.record("call_module", path, args, kwargs)


def is_leaf(module: nn.Module) -> bool:
    """Whether the tracer keeps a call of `module` as one node: consumers and torch.nn's own layers."""
    if isinstance(module, GraphModule):
        return not has_mutations(module)
    if "active_args" in getattr(module, "meta", {}):
        return True
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential)


def has_mutations(module: nn.Module) -> bool:
    """Whether `module` is a GraphModule that calls metadata mutations: an orchestrator graph."""
    return isinstance(module, GraphModule) and any(is_mutation_node(node) for node in module.graph.nodes)


def is_mutation_node(node: Node) -> bool:
    """Whether `node` is a metadata mutation, in the tracer's form or as a plain `call_method`."""
    if node.target in (ops.mutate, ops.mutate_all):
        return True
    return node.op == "call_method" and node.target in MUTATIONS and not ops.is_tensor_copy(node)


def _is_impure(node: Node) -> bool:
    return node.op in ("placeholder", "output") or (node.op == "call_function" and node.is_impure())


def _tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, tree)
    return found


def _signature(value: Any) -> Any:
    return (value.shape, value.dtype, value.device) if isinstance(value, torch.Tensor) else value


def _short(where: str | None) -> str:
    return Path(where).name if where else ""
