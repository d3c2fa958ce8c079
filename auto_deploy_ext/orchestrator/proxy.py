"""Proxies that record what an orchestrator does while carrying the value that the example batch gives."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.fx import Node, Proxy

from . import ops
from .errors import UntraceableError, is_own_frame, where_in_source

if TYPE_CHECKING:
    from .tracer import OrchestratorTracer


COMPARISONS = ("eq", "ne", "lt", "gt", "le", "ge")
UNARY = ("pos", "neg", "invert", "abs")
BINARY = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "lshift", "rshift", "and_", "or_", "xor", "matmul")


class ValueProxy(Proxy):
    """A node of the graph under construction together with its value in the example batch.

    A tensor's value is a fake tensor: it has shape, dtype and device but no data, so anything that needs its data
    raises UntraceableError. Anything else carries its real value; where Python needs that value to go on (`bool`,
    `int`, `len`, iteration over a list) a guard is recorded that later batches must have the same.
    """

    tracer: OrchestratorTracer
    node: Node

    def __init__(self, node: Node, tracer: OrchestratorTracer) -> None:
        super().__init__(node, tracer)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        """The value's class, so that the orchestrator's `isinstance` tests answer as they would without tracing."""
        if is_own_frame(sys._getframe(1)):
            return ValueProxy
        value = self.tracer.values[self.node]
        if not isinstance(value, (torch.Tensor, bool, int, float, str, tuple, list, dict)):
            self.tracer.guards.require_type(self.node, type(value))
        return type(value)

    def __getattr__(self, name: str) -> Any:
        return self.tracer.read_attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("node", "tracer"):
            object.__setattr__(self, name, value)
        else:
            self.tracer.record("call_function", ops.set_attribute, (self, name, value), {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record a call of a callable object that the interface holds."""
        return self.tracer.record_call(self, args, kwargs)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.record("call_function", ops.setitem, (self, index, value), {})

    def __getitem__(self, index: Any) -> Any:
        return self.tracer.record("call_function", operator.getitem, (self, index), {})

    def __bool__(self) -> bool:
        value = self._host_value("branches on")
        self.tracer.guards.require_truth(self.node, bool(value))
        return bool(value)

    def __int__(self) -> int:
        return int(self._concrete())

    def __index__(self) -> int:
        return operator.index(self._concrete())

    def __float__(self) -> float:
        return float(self._concrete())

    def __len__(self) -> int:
        with self.tracer.evaluation():
            length = len(self.tracer.values[self.node])
        if not self.tracer.is_fixed_container(self.node):
            self.tracer.guards.require_length(self.node, length)
        return length

    def __iter__(self) -> Iterator[Any]:
        value = self.tracer.values[self.node]
        if isinstance(value, dict):
            return iter(self.keys())
        return iter([self[i] for i in range(len(self))])

    def __contains__(self, item: Any) -> bool:
        value = self.tracer.values[self.node]
        if isinstance(value, dict):
            return item in value
        return any(element is item or bool(element == item) for element in self)

    def __hash__(self) -> int:
        value = self.tracer.values[self.node]
        if isinstance(value, (bool, int, float, str)) and not is_own_frame(sys._getframe(1)):
            return hash(self._concrete())
        return id(self)

    def __repr__(self) -> str:
        return f"ValueProxy({self.node.name}={self.tracer.values.get(self.node)!r})"

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str) -> str:
        return repr(self)

    def keys(self) -> Any:
        """The keys of a mapping, which are plain values; any other object's own `keys` attribute."""
        value = self.tracer.values[self.node]
        return list(value) if isinstance(value, dict) else self.tracer.read_attribute(self, "keys")()

    def values(self) -> Any:
        """The values of a mapping, each a proxy."""
        value = self.tracer.values[self.node]
        return [self[k] for k in value] if isinstance(value, dict) else self.tracer.read_attribute(self, "values")()

    def items(self) -> Any:
        """The items of a mapping: plain keys, proxies as values."""
        value = self.tracer.values[self.node]
        if isinstance(value, dict):
            return [(k, self[k]) for k in value]
        return self.tracer.read_attribute(self, "items")()

    def _host_value(self, verb: str) -> Any:
        value = self.tracer.values[self.node]
        if isinstance(value, torch.Tensor) and self.tracer.is_device_data(value):
            self._refuse(verb)
        return value

    def _concrete(self) -> Any:
        value = self._host_value("turns into a Python number")
        self.tracer.guards.require_equal(self.node, value)
        return value

    def _refuse(self, verb: str) -> NoReturn:
        raise UntraceableError(
            f"{verb} device data ({self.node.name}), which the host does not know without waiting for the device",
            where_in_source(),
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from .tracer import OrchestratorTracer

        return OrchestratorTracer.active().torch_call(function, args, kwargs or {})


class MethodProxy:
    """A method read from a ValueProxy: it becomes a node when it is called, also through a variable."""

    def __init__(self, receiver: ValueProxy, name: str) -> None:
        self._receiver = receiver
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call."""
        return self._receiver.tracer.record_method(self._receiver, self._name, args, kwargs)


def _install_operators() -> None:
    def forward(name: str) -> Any:
        target = getattr(operator, name)

        def method(self: ValueProxy, *args: Any) -> Any:
            return self.tracer.record("call_function", target, (self, *args), {})

        return method

    def reflected(name: str) -> Any:
        target = getattr(operator, name)

        def method(self: ValueProxy, other: Any) -> Any:
            return self.tracer.record("call_function", target, (other, self), {})

        return method

    def inplace(name: str) -> Any:
        def method(self: ValueProxy, other: Any) -> Any:
            if not isinstance(self.tracer.values[self.node], (torch.Tensor, list)):
                return NotImplemented
            self.tracer.record("call_function", ops.call_inplace, (self, name, other), {})
            return self

        return method

    for name in (*COMPARISONS, *UNARY, *BINARY):
        setattr(ValueProxy, f"__{name.strip('_')}__", forward(name))
    for name in BINARY:
        setattr(ValueProxy, f"__r{name.strip('_')}__", reflected(name))
    for dunder in ops.INPLACE_OPERATORS:
        setattr(ValueProxy, dunder, inplace(dunder))


_install_operators()
