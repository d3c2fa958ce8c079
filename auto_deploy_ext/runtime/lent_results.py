"""Lends what captured consumers return to orchestrator graphs that are done with it in time.

A consumer that replays a device graph leaves its result in memory that its next call overwrites. Such a module has an
attribute `copies_results`, true by default: it hands out copies. An orchestrator's graph shows how long a result lives;
where each one is used before the next call only, the graph is lent the memory itself while it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.fx import GraphModule

from auto_deploy_ext.active_args import COPIES_RESULTS, META_KEY, module_at

#: attribute of an orchestrator graph that holds what was found for the modules that it calls.
_ATTRIBUTE = "_lent_results"


@contextlib.contextmanager
def lent(gm: GraphModule, root: nn.Module) -> Iterator[None]:
    """While active, what the captured consumers of an orchestrator graph return need not be copied for its sake.

    Args:
        gm: the graph that runs meanwhile.
        root: where the names of its consumers are looked up.
    """
    lenders = _lenders(gm, root)
    for module in lenders:
        module.__dict__[COPIES_RESULTS] = False
    try:
        yield
    finally:
        for module in lenders:
            module.__dict__[COPIES_RESULTS] = True


def _lenders(gm: GraphModule, root: nn.Module) -> tuple[Any, ...]:
    """The modules whose results the graph is done with in time; looked for again when modules are replaced."""
    known = gm.__dict__.get(_ATTRIBUTE)
    if known is None or any(module_at(root, path) is not module for path, module in known[0]):
        nodes = list(gm.graph.find_nodes(op="call_module"))
        consumers = [node for node in nodes if META_KEY in node.meta] or nodes
        modules = [(path, root.get_submodule(path)) for path in dict.fromkeys(str(node.target) for node in consumers)]
        captured = [(path, module) for path, module in modules if COPIES_RESULTS in vars(module)]
        late: frozenset[str] = frozenset()
        if captured:
            from auto_deploy_ext.analysis.outlived import outlived

            late = outlived(gm)
        done = [m for path, m in captured if path not in late and not _is_inside(m, modules)]
        known = modules, tuple({id(module): module for module in done}.values())
        gm.__dict__[_ATTRIBUTE] = known
    return known[1]


def _is_inside(module: nn.Module, called: list[tuple[str, nn.Module]]) -> bool:
    """Whether another module that the graph calls may call this one in turn."""
    others = (other for _, other in called if other is not module)
    return any(inner is module for other in others for inner in other.modules())
