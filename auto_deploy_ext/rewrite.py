"""Writes a strategy's edits into graphs, in forms that survive dead-code elimination, copies and pickling."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import has_side_effect

from auto_deploy_ext.active_args import META_KEY, consumer_args
from auto_deploy_ext.effects import MUTATIONS
from auto_deploy_ext.events import Event, Kind, Program
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.orchestrator.graph_module import graph_from_state, graph_to_state
from auto_deploy_ext.program import GENERATE_ONLY_KEY, SCOPED_KEY, split_override
from auto_deploy_ext.refresh import bring_up_to_date, ensure_fresh
from auto_deploy_ext.strategies import Edits, Override

#: `node.meta` key: what the call mirrored before the pass, so that a later plan can still say so.
BEFORE_KEY = "mirrored_before"

#: `node.meta` keys that travel with a pickled graph.
KEPT_META = (META_KEY, BEFORE_KEY, SCOPED_KEY, GENERATE_ONLY_KEY, "source")


class KeptGraphModule(GraphModule):
    """A GraphModule that is pickled as its graph; FX's own way, tracing the code again, loses effects and `meta`."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle attributes and graph."""
        derived = ("_graph", "_code", "_tracer_cls", "_tracer_extras", "_lineno_map", "_prologue_start")
        body = {k: v for k, v in self.__dict__.items() if k not in derived}
        metas = [{k: v for k, v in node.meta.items() if k in KEPT_META} for node in self.graph.nodes]
        return _rebuild, (body, graph_to_state(self.graph), metas)


def _rebuild(body: dict[str, Any], state: list[tuple[Any, ...]], metas: list[dict[str, Any]]) -> KeptGraphModule:
    root = nn.Module()
    root.__dict__.update(body)
    graph = graph_from_state(state)
    for node, meta in zip(graph.nodes, metas, strict=True):
        node.meta.update(meta)
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


def apply_edits(programs: Sequence[Program], edits: Edits, before: dict[Node, tuple[str, ...]]) -> int:
    """Write edits into the graphs of some programs.

    Args:
        programs: what the edits were made for.
        edits: see `Edits`.
        before: for each mutation node what it mirrored before.

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
    # Anchors may be nodes that are replaced below, so the refreshes go in first.
    touched = {_insert(i.anchor, i.interface, i.names, i.if_stale) for i in edits.insertions.values()}
    changed = 0
    for node, names in edits.overrides.items():
        hand_written = events[node].given is not None and not events[node].scoped
        if _set_override(node, events[node], names, before[node], scoped=not hand_written):
            changed += 1
            touched.add(node.graph)
        exposed.pop(node, None)
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


def _insert(anchor: Node, interface: Node, names: tuple[str, ...], if_stale: bool) -> Graph:
    with anchor.graph.inserting_before(anchor):
        node = anchor.graph.call_function(ensure_fresh if if_stale else bring_up_to_date, (interface, names))
    node.meta[META_KEY] = names
    return anchor.graph


def _set_override(node: Node, event: Event, names: Override, before: tuple[str, ...], scoped: bool) -> bool:
    """Give a mutation node an override; whether its graph changed."""
    assert event.spec is not None
    is_mutate = node.target is ops.mutate
    if is_mutate and names == node.kwargs.get("active_args") and not event.dynamic:
        changed = len(node.args) > 2 and split_override(event.spec, node.args[2:], {})[0] != node.args[2:]
        if not changed:
            _note(node, names, before, scoped)
            return False
    if is_mutate:
        args, kwargs, _, _ = split_override(event.spec, node.args[2:], dict(node.kwargs))
        node.args = (*node.args[:2], *args)
        node.kwargs = kwargs if names is None else {**kwargs, "active_args": names}
        _note(node, names, before, scoped)
        return True
    first, rest = (node.args[0], node.args[1:]) if node.op == "call_method" else (None, node.args)
    if node.target is ops.invoke:
        first, rest = node.args[0], node.args[2:]
    if first is None:
        return _narrow_function(node, event, names, before, scoped)
    args, kwargs, _, _ = split_override(event.spec, rest, dict(node.kwargs))
    if names is not None:
        kwargs["active_args"] = names
    new = _replace(node, ops.mutate, (first, event.spec.name, *args), kwargs)
    _note(new, names, before, scoped)
    return True


def _narrow_function(node: Node, event: Event, names: Override, before: tuple[str, ...], scoped: bool) -> bool:
    """A registered mutation that is a function: its override is a set, which FX only takes as a node."""
    assert event.spec is not None
    offset = 1 if node.target is not ops.call else 2
    args, kwargs, given, dynamic = split_override(event.spec, node.args[offset:], dict(node.kwargs))
    changed = given != names or dynamic
    if changed:
        node.args = (*node.args[:offset], *args)
        if names is not None:
            with node.graph.inserting_before(node):
                kwargs["active_args_override"] = node.graph.call_function(ops.make_set, names)
        node.kwargs = kwargs
    _note(_protect(node), names, before, scoped)
    return changed


def _note(node: Node, names: Override, before: tuple[str, ...], scoped: bool) -> None:
    node.meta.setdefault(BEFORE_KEY, before)
    if names is not None:
        node.meta[META_KEY] = names
    if scoped and names is not None:
        node.meta[SCOPED_KEY] = True


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
    if _resolves_to(name, target):
        return _replace(node, ops.call, (name, *node.args), dict(node.kwargs))
    has_side_effect(target)
    return node


def _resolves_to(name: str, function: Any) -> bool:
    try:
        return pkgutil.resolve_name(name) is function
    except (ImportError, AttributeError, ValueError):
        return False


def annotate_calls(gm: GraphModule) -> None:
    """Write `node.meta["active_args"]` on every node of an orchestrator graph that calls a consumer."""
    known: dict[Any, tuple[str, ...] | None] = {}
    for node in gm.graph.find_nodes(op="call_module"):
        if node.target not in known:
            known[node.target] = consumer_args(gm.get_submodule(str(node.target)))
        names = known[node.target]
        if names is not None:
            node.meta[META_KEY] = names
