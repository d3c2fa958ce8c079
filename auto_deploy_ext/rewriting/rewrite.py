"""Writes a strategy's edits into graphs, in forms that survive dead-code elimination, copies and pickling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import has_side_effect

from auto_deploy_ext.active_args import META_KEY, consumer_args
from auto_deploy_ext.analysis.events import Event, Kind, Program
from auto_deploy_ext.analysis.program import HAND_WRITTEN_KEY, REPLAY_KWARGS, SCOPED_KEY, split_override
from auto_deploy_ext.effects import MUTATIONS, MutationSpec
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.orchestrator.graph_module import graph_from_state, graph_to_state
from auto_deploy_ext.rewriting.placement import Placement
from auto_deploy_ext.rewriting.strategies import Edits, Override


class KeptGraphModule(GraphModule):
    """A GraphModule that is pickled as its graph; FX's own way, tracing the code again, loses effects and `meta`."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle attributes and graph."""
        derived = ("_graph", "_code", "_tracer_cls", "_tracer_extras", "_lineno_map", "_prologue_start")
        body = {k: v for k, v in self.__dict__.items() if k not in derived}
        return _rebuild, (body, graph_to_state(self.graph))


def _rebuild(body: dict[str, Any], state: list[tuple[Any, ...]]) -> KeptGraphModule:
    root = nn.Module()
    root.__dict__.update(body)
    graph = graph_from_state(state)
    module = KeptGraphModule(root, graph, "KeptGraphModule")
    module.__dict__.update(body)
    return module


def keep_graph(gm: GraphModule) -> bool:
    """Make a plain GraphModule a KeptGraphModule, the object staying the same; one that pickles by itself is left.

    Returns:
        Whether its class changed; then it must be recompiled, because FX keeps `forward` on the class.
    """
    if type(gm).__reduce__ is not GraphModule.__reduce__:
        return False

    class GraphModuleImpl(KeptGraphModule):  # FX gives each GraphModule a class of its own, of this name
        pass

    gm.__class__ = GraphModuleImpl
    return True


def apply_edits(programs: Sequence[Program], edits: Edits) -> int:
    """Write edits into the graphs of some programs, in place of what an earlier run of the pass put there.

    Args:
        programs: what the edits were made for.
        edits: see `Edits`.

    Returns:
        The number of mutation calls that changed.
    """
    graphs: dict[Graph, GraphModule] = {}
    exposed: dict[Node, None] = {}
    events: dict[Node, Event] = {}
    for program in programs:
        graphs.update(program.owners)
        exposed.update(dict.fromkeys(program.exposed))
        events.update((e.node, e) for e in program.flat if e.node is not None and e.kind is Kind.MUTATION)
    # Nodes to place things at may be replaced below, so placing comes first.
    placement = Placement(graphs, edits)
    touched: set[Graph] = set()
    changed = 0
    for node, names in edits.overrides.items():
        if _rewrite(node, events[node], names, placement.replay_arguments(node)):
            changed += 1
            touched.add(node.graph)
        exposed.pop(node, None)
    placement.finish()
    touched.update(placement.touched)
    for node in exposed:
        touched.add(node.graph)
        _protect(node)
    roots = [program.gm for program in programs]
    for graph, gm in graphs.items():
        stale_code = keep_graph(gm) or graph in touched
        if ops.normalize_effects(graph, lambda name: False) or stale_code:
            gm.recompile()
            graph.lint()
        annotate_calls(gm)
        if gm not in roots:
            gm.__dict__["_is_impure"] = True  # FX keeps the call of such a module although nobody uses its result
    return changed


def _rewrite(node: Node, event: Event, names: Override, replay: dict[str, Any]) -> bool:
    """Give a mutation node an override and what the host repeats of it; whether that changed the node."""
    assert event.spec is not None
    if node.target is ops.mutate:
        args, kwargs = _own_arguments(event.spec, node.args[2:], dict(node.kwargs))
        args, kwargs = (*node.args[:2], *args), _with_override(kwargs, names, replay)
        changed = args != node.args or kwargs != dict(node.kwargs)
        if changed:
            node.args, node.kwargs = args, kwargs
        _note(node, event, names)
        return changed
    first, rest = (node.args[0], node.args[1:]) if node.op == "call_method" else (None, node.args)
    if node.target is ops.invoke:
        first, rest = node.args[0], node.args[2:]
    if first is None:
        return _narrow_function(node, event, names)
    args, kwargs = _own_arguments(event.spec, rest, dict(node.kwargs))
    new = _replace(node, ops.mutate, (first, event.spec.name, *args), _with_override(kwargs, names, replay))
    _note(new, event, names)
    return True


def _own_arguments(
    spec: MutationSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A mutation's arguments without an override and without what the pass gives it."""
    args, kwargs, _, _ = split_override(spec, args, kwargs)
    return args, {k: v for k, v in kwargs.items() if k not in REPLAY_KWARGS}


def _with_override(kwargs: dict[str, Any], names: Override, replay: dict[str, Any]) -> dict[str, Any]:
    override = {} if names is None else {"active_args": names}
    return {**kwargs, **override, **replay}


def _narrow_function(node: Node, event: Event, names: Override) -> bool:
    """A registered mutation that is a function: its override is a set, which FX only takes as a node."""
    assert event.spec is not None
    offset = 1 if node.target is not ops.call else 2
    args, kwargs, given, dynamic = split_override(event.spec, node.args[offset:], dict(node.kwargs))
    changed = given != names or dynamic
    if changed:
        old = node.kwargs.get("active_args_override")
        node.args = (*node.args[:offset], *args)
        if names is not None and node.meta.get(SCOPED_KEY) and isinstance(old, Node) and old.target is ops.make_set:
            old.args = names
            kwargs["active_args_override"] = old
        elif names is not None:
            with node.graph.inserting_before(node):
                kwargs["active_args_override"] = node.graph.call_function(ops.make_set, names)
        node.kwargs = kwargs
    _note(_protect(node), event, names)
    return changed


def _note(node: Node, event: Event, names: Override) -> None:
    node.meta[SCOPED_KEY] = True
    if event.given is not None:
        node.meta[HAND_WRITTEN_KEY] = event.given
    if names is None:
        node.meta.pop(META_KEY, None)
    else:
        node.meta[META_KEY] = names


def _replace(node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    graph = node.graph
    with graph.inserting_before(node):
        new = graph.call_function(target, args, kwargs)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def _protect(node: Node) -> Node:
    """Give a call on the interface a form that dead-code elimination keeps."""
    if node.op == "call_method":
        name = str(node.target)
        function = ops.mutate if name in MUTATIONS else ops.invoke
        return _replace(node, function, (node.args[0], name, *node.args[1:]), dict(node.kwargs))
    target = node.target
    if node.op != "call_function" or target in ops.EFFECTS:
        return node
    assert callable(target)
    name = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"
    if ops.resolves_to(name, target):
        return _replace(node, ops.call, (name, *node.args), dict(node.kwargs))
    has_side_effect(target)
    return node


def annotate_calls(gm: GraphModule) -> None:
    """Write `node.meta["active_args"]` on every node of an orchestrator graph that calls a consumer."""
    known: dict[Any, tuple[str, ...] | None] = {}
    for node in gm.graph.find_nodes(op="call_module"):
        if node.target not in known:
            known[node.target] = consumer_args(gm.get_submodule(str(node.target)))
        names = known[node.target]
        if names is not None:
            node.meta[META_KEY] = names
