"""OrchestratorGraph: the GraphModule of an orchestrator, which looks its submodules up through the wrapper."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from .guards import Guards

#: `node.meta` keys that travel with a pickled graph: what the passes and their plans know of a node.
KEPT_META = frozenset({"active_args", "fused", "generate_only", "hand_written", "scoped", "source"})


class OrchestratorGraph(GraphModule):
    """One traced variant of a wrapper's inference forward.

    It shares the wrapper's dictionaries of submodules, parameters and buffers, so it finds what later transforms put
    there, and it is never registered as a submodule itself, because AutoDeploy compiles every GraphModule it finds.

    Attributes:
        owner: the wrapper.
        variant: the variant's name, for example `extend`.
        guards: when the variant is the right one.
    """

    owner: nn.Module
    variant: str
    guards: Guards

    def __init__(self, owner: nn.Module, graph: Graph, variant: str, guards: Guards) -> None:
        """Build the module of `graph`, whose call_module and get_attr targets are names in `owner`."""
        super().__init__(_Root(owner), graph, class_name="OrchestratorGraph")
        self._share(owner)
        self.__dict__.update(variant=variant, guards=guards)

    def _share(self, owner: nn.Module) -> None:
        for name in ("_modules", "_parameters", "_buffers"):
            self.__dict__[name] = owner.__dict__[name]
        self.__dict__["owner"] = owner

    def delete_all_unused_submodules(self) -> None:
        """Do nothing: the submodules are the wrapper's."""

    def with_owner(self, owner: nn.Module) -> OrchestratorGraph:
        """Return this graph for another wrapper of the same structure."""
        return graph_module_from_state(owner, graph_to_state(self.graph), self.variant, self.guards, dict(self.meta))

    def __deepcopy__(self, memo: dict[int, Any]) -> OrchestratorGraph:
        """Copy the graph; its owner is the wrapper's copy where that is being copied too, else the wrapper itself."""
        result = self.with_owner(memo.get(id(self.owner), self.owner))
        result.meta = copy.deepcopy(self.meta, memo)
        memo[id(self)] = result
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the graph itself: FX would trace its code again and lose effects and `meta`."""
        state = graph_to_state(self.graph)
        return graph_module_from_state, (self.owner, state, self.variant, self.guards, dict(self.meta))


class _Root(nn.Module):
    """A root for GraphModule's constructor that answers every name from the wrapper without owning anything."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.__dict__["_modules"] = owner._modules
        self.__dict__["_parameters"] = owner._parameters
        self.__dict__["_buffers"] = owner._buffers
        self.__dict__["owner"] = owner


class _Ref:
    """Stands for the node of that position in a serialised graph."""

    def __init__(self, index: int) -> None:
        self.index = index


def graph_to_state(graph: Graph) -> list[tuple[Any, ...]]:
    """Turn a graph into a list of `(name, op, target, args, kwargs, meta)`, nodes among the arguments by position."""
    position = {node: _Ref(i) for i, node in enumerate(graph.nodes)}

    def reference(node: Node) -> Any:
        return position[node]

    return [
        (
            node.name,
            node.op,
            node.target,
            map_arg(node.args, reference),
            map_arg(node.kwargs, reference),
            {k: v for k, v in node.meta.items() if k in KEPT_META},
        )
        for node in graph.nodes
    ]


def graph_from_state(state: list[tuple[Any, ...]]) -> Graph:
    """The inverse of `graph_to_state`."""
    graph = Graph()
    nodes: list[Node] = []

    def restore(value: Any) -> Any:
        if isinstance(value, _Ref):
            return nodes[value.index]
        if isinstance(value, (list, tuple)):
            items = [restore(item) for item in value]
            return items if isinstance(value, list) else _tuple_like(value, items)
        if isinstance(value, dict):
            return {k: restore(v) for k, v in value.items()}
        if isinstance(value, slice):
            return slice(restore(value.start), restore(value.stop), restore(value.step))
        return value

    for name, op, target, args, kwargs, meta in state:
        if op == "output":
            node = graph.output(restore(args[0]))
        else:
            node = graph.create_node(op, target, restore(args), restore(kwargs), name=name)
        node.meta.update(meta)
        nodes.append(node)
    return graph


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def graph_module_from_state(
    owner: nn.Module, state: list[tuple[Any, ...]], variant: str, guards: Guards, meta: dict[str, Any]
) -> OrchestratorGraph:
    """Rebuild an OrchestratorGraph from its serialised graph."""
    module = OrchestratorGraph(owner, graph_from_state(state), variant, guards)
    module.meta.update(meta)
    return module
