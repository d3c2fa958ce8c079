"""Which consumers of an orchestrator graph return something that is still used after their next call."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from auto_deploy_ext.analysis.interface_nodes import submodule_at
from auto_deploy_ext.analysis.operands import OperandFinder
from auto_deploy_ext.effects import HOST_READERS, MUTATIONS, NEUTRAL_METHODS
from auto_deploy_ext.orchestrator import ops


def outlived(gm: GraphModule) -> frozenset[str]:
    """The consumers of which a result may be used after their next call.

    Args:
        gm: an orchestrator graph.

    Returns:
        Qualified names. A result that leaves the graph is used afterwards, when the consumer may be called again.
    """
    calls: dict[str, list[Node]] = {}
    modules: dict[int, str] = {}
    for node in gm.graph.find_nodes(op="call_module"):
        path = str(node.target)
        same = modules.setdefault(id(submodule_at(gm, path)), path)
        calls.setdefault(same, []).append(node)
    memory = OperandFinder({gm.graph: gm}).memory(gm.graph)
    users: dict[Node, list[Node]] = {}
    for node in gm.graph.nodes:
        users.setdefault(memory.root(node), []).extend(node.users)
    found = set()
    for path, nodes in calls.items():
        for call, following in zip(nodes, [*nodes[1:], None], strict=True):
            end = None if following is None else memory.index[following]
            if any(_is_late(user, end, memory.index) for user in users[memory.root(call)]):
                found.add(path)
    names = {str(n.target): modules[id(submodule_at(gm, str(n.target)))] for nodes in calls.values() for n in nodes}
    return frozenset(path for path, same in names.items() if same in found)


def _is_late(user: Node, end: int | None, index: dict[Node, int]) -> bool:
    """Whether a node uses a result after a call (at `end`) of the same consumer, or keeps it."""
    return user.op == "output" or _keeps(user) or (end is not None and index[user] > end)


def _keeps(node: Node) -> bool:
    """Whether a call may store what it is given."""
    if node.target is ops.set_attribute:
        return True
    if node.target is ops.invoke:
        name = str(node.args[1])
        return not (name in MUTATIONS or name in HOST_READERS or name in NEUTRAL_METHODS or name.startswith("get_"))
    if node.target is ops.call:
        return not str(node.args[0]).startswith(("torch.", "builtins."))
    # A tensor copies what is assigned to a part of it; a container of the wrapper's or the interface's keeps it.
    return node.target is ops.setitem and isinstance(node.args[0], Node) and node.args[0].target is getattr
