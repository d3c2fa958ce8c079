"""Binds traced variants to a wrapper: it runs the variant whose guards hold, else its original forward."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from auto_deploy_ext.runtime.consumer_check import check_graph
from auto_deploy_ext.runtime.lent_results import lent

from .errors import UntraceableError
from .finding import is_orchestrator_graph
from .graph_module import OrchestratorGraph, graph_module_from_state, graph_to_state
from .guards import Guards
from .rebound import ReboundForward, rebound_of, unbound_original

logger = logging.getLogger("auto_deploy_ext")

#: makes one more variant for the batch that the interface holds: `(owner, interface, name) -> graph`.
Recipe = Callable[[nn.Module, Any, str], OrchestratorGraph]

#: runs a variant on the interface that it fits, for example as a device graph.
Runner = Callable[[OrchestratorGraph, Any], Any]


@dataclass
class _VariantState:
    """A variant without its module, which can only be built once the wrapper is complete."""

    name: str
    graph: list[tuple[Any, ...]]
    guards: Guards
    meta: dict[str, Any]


class Dispatcher(ReboundForward):
    """Stands as a wrapper's `forward`.

    Args:
        owner: the wrapper.
        parameter: the parameter that receives the interface.
        variants: rewritten graphs, tried in this order (the one that ran last is tried first).
        recipe: traces and rewrites a variant for a batch that no guard accepts; None: never. Its method `uncovered`,
            where it has one, gives what runs such a batch in place of the original forward.
        max_variants: how many variants are kept at most; beyond it such batches run the original forward.
        original: the forward that was bound on the wrapper instance before, None for its class's.

    Attributes:
        runner: what runs a variant on the interface; None: it is called.
    """

    def __init__(
        self,
        owner: nn.Module,
        parameter: str,
        variants: Mapping[str, OrchestratorGraph],
        recipe: Recipe | None = None,
        max_variants: int = 8,
        original: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(owner, parameter, original)
        self.recipe = recipe
        self.max_variants = max_variants
        self.runner: Runner | None = None
        self._states: list[_VariantState] = []
        self._variants: list[OrchestratorGraph] | None = list(variants.values())
        self._last = 0
        self._refused: set[str] = set()
        self._fallback: Callable[..., Any] | None = None

    @property
    def variants(self) -> list[OrchestratorGraph]:
        """The rewritten graphs, in the order in which they are tried."""
        if self._variants is None:
            self._variants = [
                graph_module_from_state(self.owner, s.graph, s.name, s.guards, dict(s.meta)) for s in self._states
            ]
        return self._variants

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the variant that fits the batch, or the original forward."""
        interface = self._interface_of(args, kwargs)
        if interface is None or self.bypassed:
            return self.original(*args, **kwargs)
        variant = self.select(interface)
        if variant is not None:
            check_graph(variant, self.owner)
            with lent(variant, self.owner):
                return variant(interface) if self.runner is None else self.runner(variant, interface)
        self._learn(interface)
        return self._uncovered(*args, **kwargs)

    @property
    def _uncovered(self) -> Callable[..., Any]:
        """What runs a batch that no variant covers."""
        if self._fallback is None:
            make = getattr(self.recipe, "uncovered", None)
            self._fallback = self.original if make is None else make(self.owner, self.parameter)
        return self._fallback

    def _interface_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The interface when nothing else was passed; other arguments belong to the original forward."""
        if not args and len(kwargs) == 1:
            return kwargs.get(self.parameter)
        if len(args) == 1 and not kwargs and self._position == 0:
            return args[0]
        return None

    def select(self, interface: Any) -> OrchestratorGraph | None:
        """The variant whose guards hold for the batch that `interface` holds, None when there is none."""
        variants = self.variants
        if self._last < len(variants) and variants[self._last].guards(interface, self.owner):
            return variants[self._last]
        for index, variant in enumerate(variants):
            if index != self._last and variant.guards(interface, self.owner):
                self._last = index
                return variant
        return None

    def _learn(self, interface: Any) -> None:
        if self.recipe is None or len(self.variants) + len(self._refused) >= self.max_variants:
            return
        name = f"batch{len(self.variants) + len(self._refused)}"
        try:
            variant = self.recipe(self.owner, interface, name)
        except (UntraceableError, AssertionError) as error:
            self._refused.add(name)
            logger.warning("no traced variant covers this batch, and none can be made: %s", error)
            return
        logger.info(
            "traced variant %r for a batch that no variant covered: %s", name, "; ".join(variant.guards.conditions)
        )
        self.variants.append(variant)

    def _state(self) -> dict[str, Any]:
        states = self._states
        if self._variants is not None:
            states = [_VariantState(g.variant, graph_to_state(g.graph), g.guards, dict(g.meta)) for g in self._variants]
        runner = copy.deepcopy(self.runner)
        derived = {
            **{"_states": states, "_variants": None, "_refused": set(self._refused)},
            **{"_fallback": None, "runner": runner},
        }
        return {**super()._state(), **derived}


def dispatcher_of(module: nn.Module) -> Dispatcher | None:
    """The Dispatcher bound on `module` or on the first of its submodules that has one."""
    for submodule in module.modules():
        forward = submodule.__dict__.get("forward")
        if isinstance(forward, Dispatcher):
            return forward
    return None


def bind_variants(
    owner: nn.Module,
    parameter: str,
    variants: Mapping[str, OrchestratorGraph],
    recipe: Recipe | None = None,
    max_variants: int = 8,
) -> Dispatcher:
    """Make the inference path of `owner` run `variants`; a second call replaces the first's.

    Args:
        owner: the wrapper; the object, its attributes and its `meta` stay.
        parameter: the parameter of its forward that receives the interface.
        variants: rewritten graphs by name.
        recipe: see `Dispatcher`.
        max_variants: see `Dispatcher`.
    """
    dispatcher = Dispatcher(owner, parameter, variants, recipe, max_variants, unbound_original(owner))
    owner.forward = dispatcher
    return dispatcher


def orchestrator_graphs(module: nn.Module) -> dict[str, Any]:
    """The rewritten GraphModules of `module` by variant name; empty before the pass.

    A module that is itself an FX orchestrator graph is its own only variant, called `graph`.
    """
    if is_orchestrator_graph(module):
        return {getattr(module, "variant", "graph"): module}
    dispatcher = dispatcher_of(module)
    return {graph.variant: graph for graph in dispatcher.variants} if dispatcher else {}


@contextlib.contextmanager
def original_forward(module: nn.Module) -> Iterator[None]:
    """While active, the wrapper runs its own forward, as if no pass had run; mirrors are then full."""
    bound = rebound_of(module)
    if bound is None:
        yield
        return
    before, bound.bypassed = bound.bypassed, True
    try:
        yield
    finally:
        bound.bypassed = before
