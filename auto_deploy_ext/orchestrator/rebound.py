"""ReboundForward: what stands on a wrapper instance in place of its forward, and knows the forward it stands for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


class ReboundForward:
    """A wrapper's `forward` while the plugin runs its inference path.

    Args:
        owner: the wrapper.
        parameter: the parameter of its forward that receives the interface.
        original: the forward that was bound on the wrapper instance before, None for its class's.

    Attributes:
        bypassed: whether calls go straight to the original forward.
    """

    def __init__(self, owner: nn.Module, parameter: str, original: Callable[..., Any] | None = None) -> None:
        self.owner = owner
        self.parameter = parameter
        self.bypassed = False
        self._original = original
        parameters = inspect.signature(type(owner).forward).parameters
        positional = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
        self._position = positional.index(parameter) if parameter in positional else None

    @property
    def original(self) -> Callable[..., Any]:
        """The wrapper's own forward, bound."""
        return self._original or type(self.owner).forward.__get__(self.owner)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the inference path on the interface among the arguments."""
        raise NotImplementedError

    def _state(self) -> dict[str, Any]:
        """What a copy for another wrapper keeps."""
        return {k: v for k, v in self.__dict__.items() if k not in ("owner", "_original")}

    def __deepcopy__(self, memo: dict[int, Any]) -> ReboundForward:
        """Copy for the wrapper's copy, which is not complete yet: whatever needs it is built on first use."""
        owner = memo.get(id(self.owner), self.owner)
        return _rebuild(type(self), owner, self._state(), getattr(self._original, "__func__", self._original))

    def __reduce__(self) -> tuple[Any, ...]:
        original = getattr(self._original, "__func__", self._original)
        return _rebuild, (type(self), self.owner, self._state(), original)


def _rebuild(kind: type[ReboundForward], owner: nn.Module, state: dict[str, Any], original: Any) -> ReboundForward:
    rebound = kind.__new__(kind)
    rebound.__dict__.update(state)
    rebound.owner = owner
    rebound._original = original.__get__(owner) if inspect.isfunction(original) else original
    return rebound


def rebound_of(module: nn.Module) -> ReboundForward | None:
    """What is bound on `module` or on the first of its submodules on which something is."""
    for submodule in module.modules():
        forward = submodule.__dict__.get("forward")
        if isinstance(forward, ReboundForward):
            return forward
    return None


def own_forward(owner: nn.Module) -> Callable[..., Any]:
    """A wrapper's own forward, whatever stands in its place."""
    bound = owner.__dict__.get("forward")
    return bound.original if isinstance(bound, ReboundForward) else owner.forward


def unbound_original(owner: nn.Module) -> Callable[..., Any] | None:
    """The forward that was bound on a wrapper instance before the plugin's, None for its class's."""
    bound = owner.__dict__.get("forward")
    return bound._original if isinstance(bound, ReboundForward) else bound
