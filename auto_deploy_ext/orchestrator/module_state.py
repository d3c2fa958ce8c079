"""Watches a wrapper's Python attributes while it is traced: reads become guards, writes effects that are undone."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .errors import UntraceableError

if TYPE_CHECKING:
    from .tracer import OrchestratorTracer

_MISSING = object()
_PRIMITIVES = (bool, int, float, str, type(None))
_CONTAINERS = (list, dict, set, deque, bytearray)
_NN_MODULE_STATE = (frozenset(nn.Module().__dict__) | frozenset(dir(nn.Module))) - {"training"}


class ModuleState:
    """The Python state of a wrapper and of the submodules that are traced through.

    Args:
        owner: the wrapper.
        tracer: gets a guard for each plain attribute read and an effect for each attribute written.

    Attributes:
        assigned: dotted names of the attributes that the traced forward assigned.
        guarded: dotted names of the attributes that became guards.
    """

    def __init__(self, owner: nn.Module, tracer: OrchestratorTracer) -> None:
        from .tracer import is_leaf

        self._tracer = tracer
        self._modules = {p: m for p, m in owner.named_modules() if m is owner or not is_leaf(m)}
        self._before: dict[tuple[str, str], Any] = {}
        self._changed: list[str] = []
        self.assigned: set[str] = set()
        self.guarded: set[str] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While active, attribute access of the modules goes through this object; afterwards all is as before."""
        snapshots = [
            (f"{path}.{name}".lstrip("."), value, _snapshot(value))
            for path, module in self._modules.items()
            for name, value in module.__dict__.items()
            if name not in _NN_MODULE_STATE and _is_python_state(value)
        ]
        classes = {path: type(module) for path, module in self._modules.items()}
        try:
            for path, module in self._modules.items():
                object.__setattr__(module, "__class__", self._watched_class(path, type(module)))
            yield
        finally:
            for path, module in self._modules.items():
                object.__setattr__(module, "__class__", classes[path])
            self._undo()
            for name, value, snapshot in snapshots:
                if not _unchanged(value, snapshot):
                    self._changed.append(name)
                    _restore(value, snapshot)

    def check_unchanged(self) -> None:
        """Raise UntraceableError when the traced forward changed Python state that no graph would change."""
        if self._changed:
            names = ", ".join(f"self.{name}" for name in self._changed)
            raise UntraceableError(f"changes the Python state of {names}, which a graph would not repeat")

    def _watched_class(self, path: str, cls: type[nn.Module]) -> type[nn.Module]:
        state = self

        def read(module: nn.Module, name: str) -> Any:
            value = cls.__getattribute__(module, name)
            return state._read(path, module, name, value)

        def write(module: nn.Module, name: str, value: Any) -> None:
            if state._tracer.evaluating:
                cls.__setattr__(module, name, value)
            else:
                state._write(path, module, name, value)

        return type(
            cls.__name__,
            (cls,),
            {"__getattribute__": read, "__setattr__": write, "__module__": cls.__module__, "__traced__": True},
        )

    def _read(self, path: str, module: nn.Module, name: str, value: Any) -> Any:
        if self._tracer.evaluating or name.startswith("__") or name in _NN_MODULE_STATE:
            return value
        dotted = f"{path}.{name}".lstrip(".")
        if dotted in self.assigned:
            return value
        if isinstance(value, torch.Tensor) or dotted in self._tracer.proxied:
            return self._tracer.read_module_attribute(path, name, value)
        if isinstance(value, _PRIMITIVES) or (
            isinstance(value, (tuple, list)) and all(isinstance(item, _PRIMITIVES) for item in value)
        ):
            self.guarded.add(dotted)
            self._tracer.guards.require_attribute(dotted, value)
        return value

    def _write(self, path: str, module: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) or name in module._modules or name in module._parameters:
            raise UntraceableError(f"replaces the submodule or parameter self.{name}")
        self._tracer.assign_module_attribute(path, name, value)
        place = module._buffers if name in module._buffers else object.__getattribute__(module, "__dict__")
        self._before.setdefault((path, name), place.get(name, _MISSING))
        self.assigned.add(f"{path}.{name}".lstrip("."))
        place[name] = value

    def _undo(self) -> None:
        for (path, name), value in self._before.items():
            module = self._modules[path]
            place = module._buffers if name in module._buffers else module.__dict__
            if value is _MISSING:
                place.pop(name, None)
            else:
                place[name] = value


def _is_python_state(value: Any) -> bool:
    if isinstance(value, _CONTAINERS):
        return True
    if isinstance(value, (nn.Module, torch.Tensor, type)) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return not hasattr(value, "batch_info") and not hasattr(value, "info")


def _snapshot(value: Any) -> Any:
    if isinstance(value, _CONTAINERS):
        return value.copy()
    fields = {k: (v, _snapshot(v) if isinstance(v, _CONTAINERS) else None) for k, v in vars(value).items()}
    return fields


def _unchanged(value: Any, snapshot: Any) -> bool:
    if isinstance(value, dict):
        return value.keys() == snapshot.keys() and all(value[k] is snapshot[k] for k in value)
    if isinstance(value, (list, deque)):
        return len(value) == len(snapshot) and all(a is b for a, b in zip(value, snapshot, strict=True))
    if isinstance(value, (set, bytearray)):
        return bool(value == snapshot)
    fields = vars(value)
    return fields.keys() == snapshot.keys() and all(
        fields[k] is v and (s is None or _unchanged(v, s)) for k, (v, s) in snapshot.items()
    )


def _restore(value: Any, snapshot: Any) -> None:
    if isinstance(value, (dict, set)):
        value.clear()
        value.update(snapshot)
    elif isinstance(value, (list, bytearray)):
        value[:] = snapshot
    elif isinstance(value, deque):
        value.clear()
        value.extend(snapshot)
    else:
        for name, (field, inner) in snapshot.items():
            if inner is not None:
                _restore(field, inner)
            vars(value)[name] = field
        for name in vars(value).keys() - snapshot.keys():
            del vars(value)[name]
