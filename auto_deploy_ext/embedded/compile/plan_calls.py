"""Takes the operators that plan on the host out of a consumer's graph, so that they run before its captured rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map

from ..custom_ops.plan_ops import implementation, is_plan_op


@dataclass(frozen=True)
class _Argument:
    """Stands for a placeholder among the arguments of a plan."""

    name: str


@dataclass(frozen=True)
class PlanCall:
    """A call of an operator that plans.

    Attributes:
        name: the argument by which the rest of the graph is given what the plan returns.
    """

    name: str
    op: Callable[..., Any]
    args: Any
    kwargs: Any

    @cached_property
    def _is_flat(self) -> bool:
        """Whether no argument is a list or the like, which is usual, and quicker to fill in."""
        return not self.kwargs and all(isinstance(a, (_Argument, int, float, str)) or a is None for a in self.args)

    def __call__(self, given: Mapping[str, Any]) -> Any:
        """Plan with the arguments of a call of the consumer."""
        if self._is_flat:
            return self.op(*[given[a.name] if type(a) is _Argument else a for a in self.args])

        def value(argument: Any) -> Any:
            return given[argument.name] if isinstance(argument, _Argument) else argument

        return self.op(*tree_map(value, self.args), **tree_map(value, self.kwargs))


def split_plans(gm: GraphModule) -> tuple[tuple[PlanCall, ...], Callable[..., Any]]:
    """Split a consumer into its plans and the rest.

    Args:
        gm: not changed.

    Returns:
        The plans in their order, and a function that takes the consumer's arguments and one more per plan, by keyword.

    Raises:
        ValueError: a plan takes something that the graph computes.
    """
    if not any(is_plan_op(node.target) for node in gm.graph.nodes):
        return (), gm.forward
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    plans: list[PlanCall] = []
    last = [copies[node] for node in gm.graph.find_nodes(op="placeholder")][-1]
    for node in gm.graph.nodes:
        if not is_plan_op(node.target):
            continue
        copied = copies[node]
        with graph.inserting_after(last):
            last = graph.placeholder(f"plan_{len(plans)}")
        copied.replace_all_uses_with(last)
        graph.erase_node(copied)
        args, kwargs = (map_arg(a, _argument_of(node)) for a in (node.args, node.kwargs))
        plans.append(PlanCall(str(last.target), implementation(node.target), args, kwargs))
    return tuple(plans), GraphModule(gm, graph).forward


def _argument_of(plan: Node) -> Callable[[Node], Any]:
    def argument(node: Node) -> Any:
        if node.op != "placeholder":
            raise ValueError(f"{plan.format_node()} plans with what {node.name} computes: it may take arguments only")
        return _Argument(str(node.target))

    return argument


def update_plan(static: Any, new: Any) -> None:
    """Bring what a captured graph was given of a plan up to date.

    Raises:
        ValueError: something else than a tensor differs, which a captured graph cannot be told.
    """
    for old, value in zip(tree_leaves(static), tree_leaves(new), strict=True):
        if isinstance(old, torch.Tensor):
            if old.data_ptr() != value.data_ptr():
                old.copy_(value)
        elif old != value:
            raise ValueError(f"a plan returned {value!r} after {old!r}: only tensors may differ between replays")
