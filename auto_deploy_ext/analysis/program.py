"""Reads an orchestrator graph as a program: the events that matter to mirrors, in order."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import GraphModule, Node

from auto_deploy_ext.active_args import consumer_args, wrapped_graph
from auto_deploy_ext.analysis import aliasing
from auto_deploy_ext.analysis.events import EVERYTHING, Entry, Event, Kind, NameTable, Program, Setting
from auto_deploy_ext.analysis.fused_nodes import taken_apart
from auto_deploy_ext.analysis.interface_nodes import AMBIGUOUS_MUTATIONS, bind_arguments, interface_roots, submodule_at
from auto_deploy_ext.effects import (
    BATCH_KIND_METHODS,
    HOST_READERS,
    MUTATIONS,
    NEUTRAL_METHODS,
    MutationSpec,
    buffer_of,
    is_mirror,
    mirror_of,
)
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.runtime.refresh import is_placed
from auto_deploy_ext.spelling import suggestion

#: `meta` key: whether the batch is known to be generate-only (True) or known not to be (False).
GENERATE_ONLY_KEY = "generate_only"

#: `node.meta` key: the pass has rewritten this mutation; what it gave the call says nothing of the orchestrator.
SCOPED_KEY = "scoped"

#: `node.meta` key of such a mutation: the names of the override that a person had given it.
HAND_WRITTEN_KEY = "hand_written"

#: keyword arguments that the pass gives `ops.mutate`.
REPLAY_KWARGS = ("replays", "host_operand")


class UnknownBufferError(ValueError):
    """A mutation, as registered, writes a buffer that the interface does not have."""


class UnknownEffectError(RuntimeError):
    """A call whose effect on mirrors is unknown, with `on_unknown: error`."""


def collect(gm: GraphModule, setting: Setting, interface_arg: str | None = None) -> Program:
    """Return the events of an orchestrator graph in program order, those of nested orchestrator graphs in place.

    Args:
        gm: the graph; it is not changed. One that the pass has rewritten gives the program that it was before: the
            pass sees through what it put there, and takes fused nodes apart (in a copy, then).
            `meta["generate_only"]`, on it for the batch at entry or on a node for the batch that the node finds, is
            what the graph's guards assure.
        setting: what is known of the interface.
        interface_arg: the placeholder that receives the interface, where it cannot be told from its use.

    Raises:
        UnknownEffectError: with `on_unknown: error`, a call whose effect on mirrors is unknown.
    """
    gm = taken_apart(gm)
    program = Program(gm, [], NameTable(setting.buffers or ()), setting)
    collector = _Collector(program, gm.meta.get(GENERATE_ONLY_KEY))
    roots = dict.fromkeys(interface_roots(gm, interface_arg), _Object.INTERFACE)
    program.events = collector.root(gm, roots)
    program.number()
    return program


class _Object(Enum):
    """What a node that belongs to the interface is."""

    INTERFACE = "the interface or its SequenceInfo"
    NAMED_ARGS = "the mapping named_args"
    BATCH_INFO = "batch_info"
    BUFFER = "the InputBuffer"
    NAMESPACE = "a namespace that holds the interface"


#: what an attribute of the interface is; any other is a plain value.
_ATTRIBUTES = {
    "info": _Object.INTERFACE,
    "named_args": _Object.NAMED_ARGS,
    "batch_info": _Object.BATCH_INFO,
    "_input_buffer": _Object.BUFFER,
}

#: (buffers, mirrors) whose memory a node may share.
_Views = tuple[int, int]
_NO_VIEWS: _Views = (0, 0)
_ALL_VIEWS: _Views = (EVERYTHING, EVERYTHING)
#: a node, the interface in its graph, and how that graph was entered.
_Anchor = tuple[Node, Node, Entry | None]


def _both(views: Iterable[_Views]) -> _Views:
    device = mirrors = 0
    for d, m in views:
        device |= d
        mirrors |= m
    return device, mirrors


@dataclass
class _Scope:
    """The walk of one graph: what its nodes are and share memory with."""

    gm: GraphModule
    where: str
    objects: dict[Node, _Object]
    views: dict[Node, _Views]
    anchor: _Anchor | None
    entry: Entry | None = None
    modules: dict[str, Any] = field(default_factory=dict)
    exact: set[Node] = field(default_factory=set)
    batch_tensors: set[Node] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)
    interface: Node | None = None
    returned: _Views = _NO_VIEWS


class _Collector:
    """Walks orchestrator graphs; one instance per program."""

    def __init__(self, program: Program, generating: bool | None) -> None:
        self._program = program
        self._table = program.table
        self._setting = program.setting
        self._generating = generating
        self._effects: dict[int, aliasing.ModuleEffects | None] = {}
        self._consumer_reads: dict[int, int | None] = {}
        self._written: dict[int, int] = {}
        self._taken_apart: dict[int, GraphModule] = {}

    # -- graphs --------------------------------------------------------------------------------------------------

    def root(self, gm: GraphModule, objects: dict[Node, _Object]) -> list[Event]:
        """Return the events of the root graph, of whose nodes `objects` says what they are."""
        scope = self._scope(gm, "", objects, {}, None)
        self._program.interface = scope.interface
        return scope.events

    def _scope(
        self,
        gm: GraphModule,
        where: str,
        objects: dict[Node, _Object],
        views: dict[Node, _Views],
        anchor: _Anchor | None,
        entry: Entry | None = None,
    ) -> _Scope:
        scope = _Scope(gm, where, dict(objects), dict(views), anchor, entry)
        scope.interface = next((n for n, o in objects.items() if o is _Object.INTERFACE), None)
        self._program.owners[gm.graph] = gm
        objects, views = scope.objects, scope.views
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "get_attr") or is_placed(node):
                continue
            inputs = node.all_input_nodes
            if node.op == "call_module":
                self._module_call(scope, node, inputs)
            elif not objects.keys().isdisjoint(inputs):
                self._interface_node(scope, node)
            elif self._is_branch(node):
                self._branch(scope, node)
            elif not views.keys().isdisjoint(inputs):
                self._tensor_node(scope, node)
            elif not scope.batch_tensors.isdisjoint(inputs):
                self._batch_tensor_node(scope, node)
        return scope

    def _add(self, scope: _Scope, kind: Kind, node: Node, label: str, **fields: Any) -> Event:
        event = Event(kind, node, label, scope.where, entry=scope.entry, **fields)
        if scope.interface is not None:
            event.anchor, event.interface, event.anchor_entry = node, scope.interface, scope.entry
        elif scope.anchor is not None:
            event.anchor, event.interface, event.anchor_entry = scope.anchor
        scope.events.append(event)
        return event

    def _unknown(self, scope: _Scope, node: Node, label: str, reason: str, writes: int = EVERYTHING) -> None:
        if self._setting.on_unknown == "error":
            raise UnknownEffectError(
                f"{label} in {scope.where or 'the orchestrator'} ({node.format_node()}): {reason}. Register it with "
                "auto_deploy_ext.register_mutation or register_host_reader, or set on_unknown: full"
            )
        self._add(scope, Kind.UNKNOWN, node, label, reads=EVERYTHING, writes=writes, reason=reason)
        if writes:
            self._generating = None

    # -- tensors -------------------------------------------------------------------------------------------------

    def _inputs_views(self, scope: _Scope, node: Node) -> _Views:
        views = scope.views
        return _both(views[n] for n in node.all_input_nodes if n in views)

    def _tensor_node(self, scope: _Scope, node: Node) -> None:
        """A node that works on tensors which may share memory with buffers or mirrors."""
        device, mirrors = views = self._inputs_views(scope, node)
        if node.op == "output":
            scope.returned = views
            if mirrors and not scope.where:
                self._add(scope, Kind.READ, node, "output", reads=mirrors)
            return
        written = aliasing.written_inputs(node)
        if mirrors and not aliasing.is_view(node):
            read = _both(scope.views[n] for n in self._read_inputs(node, written) if n in scope.views)[1]
            if read:
                self._add(scope, Kind.READ, node, _call_label(node), reads=read)
        for target in written:
            if target in scope.views:
                self._write_in_place(scope, node, target)
        if aliasing.result_may_alias(node):
            scope.views[node] = views
            if device | mirrors and node.target is ops.call_inplace and node.args[0] in scope.exact:
                scope.exact.add(node)

    @staticmethod
    def _read_inputs(node: Node, written: tuple[Node, ...]) -> list[Node]:
        replaced = written if aliasing.overwrites(node) else ()
        return [n for n in node.all_input_nodes if n not in replaced]

    def _write_in_place(self, scope: _Scope, node: Node, target: Node) -> None:
        device, mirrors = scope.views[target]
        whole = target in scope.exact and aliasing.overwrites(node)
        if device:
            kills = device if whole else 0
            self._add(scope, Kind.WRITE, node, _call_label(node), writes=device, kills=kills)
        if mirrors and whole:
            self._add(scope, Kind.HOST_WRITE, node, _call_label(node), kills=mirrors, freshens=mirrors)

    def _batch_tensor_node(self, scope: _Scope, node: Node) -> None:
        """A node that works on batch_info's own tensor: writing it may change whether the batch is generate-only."""
        if not scope.batch_tensors.isdisjoint(aliasing.written_inputs(node)):
            self._generating = None
        elif aliasing.result_may_alias(node):
            scope.batch_tensors.add(node)

    def _view_of(self, scope: _Scope, node: Node, name: Any) -> None:
        """Note that a node is the interface's argument `name`."""
        if not isinstance(name, str):
            scope.views[node] = _ALL_VIEWS
        elif name == "batch_info_host":
            scope.batch_tensors.add(node)
        elif self._is_buffer(buffer_of(name)) and (is_mirror(name) or name == buffer_of(name)):
            bit = self._table.bit(buffer_of(name))
            scope.views[node] = (0, bit) if is_mirror(name) else (bit, 0)
            scope.exact.add(node)

    def _is_buffer(self, name: str) -> bool:
        return self._setting.buffers is None or name in self._setting.buffers

    def _mirror_bits(self, names: Iterable[str]) -> int:
        return self._table.bits(n for n in names if is_mirror(n) and self._is_buffer(buffer_of(n)))

    # -- the interface -------------------------------------------------------------------------------------------

    def _interface_node(self, scope: _Scope, node: Node) -> None:
        target = node.target
        if node.op == "output":
            return
        if node.op == "call_method":
            self._method(scope, node, node.args[0], str(target), node.args[1:], node.kwargs)
        elif target is getattr:
            self._attribute(scope, node)
        elif target is operator.getitem:
            self._item(scope, node)
        elif target is ops.mutate or target is ops.invoke:
            self._method(scope, node, node.args[0], str(node.args[1]), node.args[2:], node.kwargs)
        elif target is ops.make_namespace:
            scope.objects[node] = _Object.NAMESPACE
        elif target is ops.setitem or target is operator.setitem:
            self._set_item(scope, node)
        elif target is ops.set_attribute:
            self._set_attribute(scope, node)
        elif target is ops.call:
            name = str(node.args[0])
            self._function(scope, node, name, node.args[1:])
        elif self._is_branch(node):
            self._branch(scope, node)
        else:
            module = getattr(target, "__module__", "") or ""
            self._function(scope, node, f"{module}.{getattr(target, '__name__', target)}", node.args)

    def _attribute(self, scope: _Scope, node: Node) -> None:
        owner, name = node.args[0], node.args[1]
        assert isinstance(owner, Node) and isinstance(name, str)
        kind = scope.objects.get(owner)
        if kind is _Object.NAMESPACE:
            self._same_as(scope, node, owner.kwargs.get(name))
        elif kind is _Object.INTERFACE and name in _ATTRIBUTES:
            scope.objects[node] = _ATTRIBUTES[name]
        elif kind is _Object.INTERFACE and name == "args":
            scope.views[node] = _ALL_VIEWS

    def _same_as(self, scope: _Scope, node: Node, other: Any) -> None:
        if other in scope.objects:
            scope.objects[node] = scope.objects[other]
        if other in scope.views:
            scope.views[node] = scope.views[other]

    def _item(self, scope: _Scope, node: Node) -> None:
        if _object_of(scope, node.args[0]) is _Object.NAMED_ARGS:
            self._view_of(scope, node, node.args[1])

    def _set_item(self, scope: _Scope, node: Node) -> None:
        if _object_of(scope, node.args[0]) is not _Object.NAMED_ARGS:
            self._unknown(scope, node, "setitem", "an item of the interface is assigned")

    def _set_attribute(self, scope: _Scope, node: Node) -> None:
        if node.args[0] in scope.objects:
            self._unknown(scope, node, f"{node.args[1]} =", "an attribute of the interface is assigned")

    def _function(self, scope: _Scope, node: Node, name: str, args: tuple[Any, ...]) -> None:
        """A call of a function that is given part of the interface."""
        module, _, leaf = name.rpartition(".")
        for key in (name, leaf):
            if key in MUTATIONS and key not in AMBIGUOUS_MUTATIONS:
                self._expose(node)
                return self._mutation(scope, node, MUTATIONS[key], args[1:], dict(node.kwargs))
            if key in HOST_READERS:
                return self._reader(scope, node, key, args[1:], node.kwargs)
        if module in ("builtins", "_operator") and leaf not in ("setattr", "setitem"):
            return None
        if all(scope.objects.get(n) in (None, _Object.BATCH_INFO) for n in node.all_input_nodes):
            self._generating = None
            return None
        self._expose(node)
        return self._unknown(scope, node, leaf, f"{name} is not registered and receives the interface")

    def _method(
        self, scope: _Scope, node: Node, receiver: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        kind = _object_of(scope, receiver)
        if kind is None and node.target is ops.mutate and not MUTATIONS[name].restages:
            kind = _Object.INTERFACE
            scope.interface = scope.interface or receiver
        if kind is _Object.INTERFACE:
            self._expose(node)
            self._interface_method(scope, node, name, args, kwargs)
        elif kind is _Object.BATCH_INFO:
            self._expose(node)
            if name in BATCH_KIND_METHODS:
                self._generating = None
            elif name == "serialize":
                scope.batch_tensors.add(node)
        elif kind is _Object.NAMED_ARGS:
            self._view_of(scope, node, args[0] if name == "get" and args else None)
        elif kind is _Object.BUFFER:
            self._expose(node)
            self._buffer_method(scope, node, name, args, kwargs)
        elif any(scope.objects.get(n) is not _Object.BATCH_INFO for n in node.all_input_nodes if n in scope.objects):
            self._expose(node)
            self._unknown(scope, node, name, f"{name}() is not registered and receives the interface")

    def _interface_method(
        self, scope: _Scope, node: Node, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._read_operands(scope, node, name)
        if name in MUTATIONS:
            self._mutation(scope, node, MUTATIONS[name], args, dict(kwargs))
        elif name in HOST_READERS:
            self._reader(scope, node, name, args, kwargs)
        elif name not in NEUTRAL_METHODS:
            self._unknown(scope, node, name, f"{name}() is not registered")
        if name == "get_arg":
            self._view_of(scope, node, args[0] if args else kwargs.get("name"))
        elif name in NEUTRAL_METHODS or name == "unnest_sequences":
            views = self._inputs_views(scope, node)
            if any(views):
                scope.views[node] = views

    def _read_operands(self, scope: _Scope, node: Node, label: str) -> None:
        """Mirrors that travel as operands of a call are read by it."""
        mirrors = self._inputs_views(scope, node)[1]
        if mirrors:
            self._add(scope, Kind.READ, node, label, reads=mirrors)

    def _buffer_method(
        self, scope: _Scope, node: Node, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        first = args[0] if args else kwargs.get("name")
        if name == "get_view":
            self._view_of(scope, node, first)
        elif name in ("get_host_view", "get_host_memory"):
            self._view_of(scope, node, mirror_of(first) if isinstance(first, str) else None)
        elif name == "copy_to_host" and not (args or kwargs):
            self._add(scope, Kind.REFRESH, node, name, freshens=EVERYTHING, kills=EVERYTHING)
        elif name not in ("get_capacity", "get_current_length", "copy_to_host"):
            self._unknown(scope, node, name, f"InputBuffer.{name}() is called directly")

    def _reader(self, scope: _Scope, node: Node, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        names = HOST_READERS[name].read(self._setting.info, args, dict(kwargs))
        if names is None:
            self._unknown(scope, node, name, f"which mirrors {name}() reads depends on its arguments", writes=0)
            return
        bits = self._mirror_bits(names)
        if bits:
            shown = ", ".join(self._table.mirrors(bits))
            self._add(scope, Kind.READ, node, f"{name}({shown})", reads=bits)

    # -- mutations -----------------------------------------------------------------------------------------------

    def _mutation(
        self, scope: _Scope, node: Node, spec: MutationSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        args, kwargs, given, dynamic = as_written(node, spec, args, kwargs)
        if spec.restages:
            self._restage(scope, node, spec, kwargs)
            return
        bits = self._written_bits(spec, args, kwargs)
        if bits is None:
            self._unknown(scope, node, spec.name, f"which buffers {spec.name}() writes depends on its arguments")
            return
        if spec.name == "copy_" and self._copies_to_host(args, kwargs):
            self._add(scope, Kind.HOST_WRITE, node, spec.name, kills=bits, freshens=bits)
            return
        status = self._status(spec, node)
        operand = operand_of(spec, args, kwargs)
        self._add(
            scope,
            Kind.MUTATION,
            node,
            spec.name,
            writes=0 if status == "noop" else bits,
            kills=bits if status == "effective" else 0,
            spec=spec,
            status=status,
            given=given,
            dynamic=dynamic,
            operand=operand,
            operand_shared=isinstance(operand, Node) and any(scope.views.get(operand, _NO_VIEWS)),
        )
        if spec.generates is not False:
            self._generating = spec.generates

    def _written_bits(self, spec: MutationSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The buffers that a call writes; None when its arguments do not tell.

        Raises:
            UnknownBufferError: the mutation was registered to write something that the interface does not have.
        """
        known = self._written.get(id(spec))
        if known is not None:
            return known
        names = spec.written(self._setting.info, args, kwargs, self._setting.buffers or ())
        if names is None:
            return None
        for name in names:
            if not self._is_buffer(name):
                hint = suggestion(name, self._setting.buffers or ())
                raise UnknownBufferError(f"{spec.name} writes {name!r}, which is no buffer of the interface{hint}")
        bits = self._table.bits(names)
        if not callable(spec.writes):
            self._written[id(spec)] = bits
        return bits

    def _status(self, spec: MutationSpec, node: Node) -> Literal["effective", "noop", "maybe"]:
        if not spec.may_be_noop:
            return "effective"
        generating = node.meta.get(GENERATE_ONLY_KEY, self._generating)
        if spec.generates is not True or generating is None:
            return "maybe"
        return "noop" if generating else "effective"

    def _copies_to_host(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether `copy_` is known to write the mirror: its name says so, or its source lives on the host."""
        name = args[0] if args else kwargs.get("name")
        if isinstance(name, str) and is_mirror(name):
            return True
        source = args[1] if len(args) > 1 else kwargs.get("src")
        device = _device_of(source)
        return device == "cpu" and self._setting.device_type not in (None, "cpu")

    def _restage(self, scope: _Scope, node: Node, spec: MutationSpec, kwargs: dict[str, Any]) -> None:
        self._add(scope, Kind.MUTATION, node, spec.name, spec=spec, kills=EVERYTHING, freshens=EVERYTHING)
        self._generating = spec.generates
        if kwargs.get("_ungathered_input_ids") is not None:
            self._inner_mutation(scope, node, MUTATIONS["rescatter_input_ids_"])
        if kwargs.get("_ungathered_new_lens") is not None:
            self._inner_mutation(scope, node, MUTATIONS["offset_with_new_lens_"])

    def _inner_mutation(self, scope: _Scope, node: Node, spec: MutationSpec) -> None:
        bits = self._written_bits(spec, (), {}) or 0
        self._add(scope, Kind.MUTATION, node, spec.name, writes=bits, spec=spec, status="maybe")

    def _expose(self, node: Node) -> None:
        if node.op == "call_method" or (node.op == "call_function" and node.target not in ops.EFFECTS):
            self._program.exposed.append(node)

    # -- modules and branches ------------------------------------------------------------------------------------

    def _module_call(self, scope: _Scope, node: Node, inputs: list[Node]) -> None:
        label = str(node.target)
        if label not in scope.modules:
            scope.modules[label] = submodule_at(scope.gm, label)
        module = scope.modules[label]
        if not scope.objects.keys().isdisjoint(inputs):
            if isinstance(module, GraphModule):
                self._inline(scope, node, module, label)
            else:
                self._unknown(scope, node, label, f"{type(module).__name__} receives the interface and is no graph")
            return
        self._consumer(scope, node, module, label)

    def _consumer(self, scope: _Scope, node: Node, module: Any, label: str) -> None:
        device, mirrors = views = self._inputs_views(scope, node)
        names = self._reads_of(module)
        if names is None and isinstance(module, GraphModule):
            self._unknown(
                scope, node, label, "it takes **kwargs, so its placeholders do not say what it reads", writes=0
            )
        else:
            reads = mirrors | (names or 0)
            if names is None:
                reads |= self._mirror_bits(node.kwargs)
            if reads or names is not None:
                self._add(scope, Kind.READ, node, label, reads=reads)
        if device | mirrors:
            self._consumer_effects(scope, node, module, views)

    def _reads_of(self, module: Any) -> int | None:
        """The mirrors among a consumer's placeholders; None when the module does not say."""
        if id(module) not in self._consumer_reads:
            names = consumer_args(module) if isinstance(module, nn.Module) else None
            self._consumer_reads[id(module)] = None if names is None else self._mirror_bits(names)
        return self._consumer_reads[id(module)]

    def _consumer_effects(self, scope: _Scope, node: Node, module: Any, views: _Views) -> None:
        graph = wrapped_graph(module)
        if graph is None:
            if not aliasing.makes_new_tensors(module):
                scope.views[node] = views
            return
        if id(graph) not in self._effects:
            self._effects[id(graph)] = aliasing.module_effects(graph)
        effects = self._effects[id(graph)]
        assert effects is not None
        if not (effects.written or effects.returned):
            return
        bound = {str(p.target): v for p, v in bind_arguments(graph.graph, node.args, node.kwargs).items()}
        arguments = {name: scope.views[v] for name, v in bound.items() if isinstance(v, Node) and v in scope.views}
        written = _both(v for name, v in arguments.items() if name in effects.written)[0]
        returned = _both(v for name, v in arguments.items() if name in effects.returned)
        if written:
            self._add(scope, Kind.WRITE, node, str(node.target), writes=written)
        if any(returned):
            scope.views[node] = returned

    def _inline(self, scope: _Scope, node: Node, module: GraphModule, label: str) -> None:
        inner = self._enter(scope, node, module, label, node.args, node.kwargs)
        scope.events.extend(inner.events)
        if any(inner.returned):
            scope.views[node] = inner.returned

    def _enter(
        self,
        scope: _Scope,
        node: Node,
        module: GraphModule,
        label: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> _Scope:
        module = self._taken_apart.setdefault(id(module), taken_apart(module))
        bound = {p: v for p, v in bind_arguments(module.graph, args, kwargs).items() if isinstance(v, Node)}
        objects = {p: scope.objects[v] for p, v in bound.items() if v in scope.objects}
        views = {p: scope.views[v] for p, v in bound.items() if v in scope.views}
        anchor = scope.anchor if scope.interface is None else (node, scope.interface, scope.entry)
        where = f"{scope.where}.{label}" if scope.where else label
        return self._scope(module, where, objects, views, anchor, Entry(node, scope.entry))

    @staticmethod
    def _is_branch(node: Node) -> bool:
        if node.op != "call_function" or node.target in ops.EFFECTS:
            return False
        is_cond = getattr(node.target, "__name__", "") == "cond"
        return is_cond or isinstance(node.target, torch._ops.HigherOrderOperator)

    def _branch(self, scope: _Scope, node: Node) -> None:
        bodies = [
            (str(n.target), _attribute_at(scope.gm, str(n.target))) for n in node.all_input_nodes if n.op == "get_attr"
        ]
        bodies = [(name, body) for name, body in bodies if isinstance(body, GraphModule)]
        if getattr(node.target, "__name__", "") != "cond" or len(bodies) != 2:
            name = getattr(node.target, "__name__", str(node.target))
            if any(n in scope.objects for n in node.all_input_nodes):
                self._unknown(scope, node, name, f"{name} is no two-sided branch and receives the interface")
            elif any(n in scope.views for n in node.all_input_nodes):
                self._tensor_node(scope, node)
            return
        operands: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("operands", ())
        before, after, branches, returned = self._generating, [], [], []
        for label, body in bodies:
            self._generating = before
            inner = self._enter(scope, node, body, label, tuple(operands), {})
            after.append(self._generating)
            branches.append(inner.events)
            returned.append(inner.returned)
        self._generating = after[0] if after[0] == after[1] else None
        if any(branches):
            self._add(scope, Kind.BRANCH, node, "cond", branches=tuple(branches))
        views = _both(returned)
        if any(views):
            scope.views[node] = views


def _object_of(scope: _Scope, value: Any) -> _Object | None:
    return scope.objects.get(value) if isinstance(value, Node) else None


def as_written(
    node: Node, spec: MutationSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...] | None, bool]:
    """Take what the pass or a person gave a mutation out of its arguments; see `split_override` for the result.

    The override is the person's, also where the pass has replaced it.
    """
    args, kwargs, given, dynamic = split_override(spec, args, kwargs)
    if node.target is ops.mutate:
        kwargs = {k: v for k, v in kwargs.items() if k not in REPLAY_KWARGS}
    if node.meta.get(SCOPED_KEY):
        return args, kwargs, node.meta.get(HAND_WRITTEN_KEY), False
    return args, kwargs, given, dynamic


def operand_of(spec: MutationSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A mutation's device operand among its arguments, None without one."""
    if spec.operand is None:
        return None
    if len(args) > spec.operand:
        return args[spec.operand]
    others = list(kwargs.values())
    return others[0] if len(others) == 1 else None


def split_override(
    spec: MutationSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...] | None, bool]:
    """Take a hand-written override out of a mutation's arguments.

    Returns:
        Arguments and keyword arguments without it, the names that it gives (sorted, None without one), and whether
        it is computed at run time.
    """
    kwargs = dict(kwargs)
    if not spec.takes_override:
        return args, kwargs, None, False
    value = kwargs.pop("active_args", None)
    hand_written = kwargs.pop("active_args_override", None)
    value = hand_written if value is None else value
    position = 0 if spec.operand is None else spec.operand + 1
    if value is None and len(args) > position:
        value, args = args[position], args[:position]
    if value is None:
        return args, kwargs, None, False
    names = _constant_names(value)
    return args, kwargs, names, names is None


def _constant_names(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, Node):
        if value.op != "call_function" or value.target not in (ops.make_set, set, frozenset):
            return None
        items = value.args if value.target is ops.make_set else value.args[0] if value.args else ()
        return _constant_names(items)
    if isinstance(value, (set, frozenset, tuple, list)) and all(isinstance(item, str) for item in value):
        return tuple(sorted(value))
    return None


def _attribute_at(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part, None)
    return module


def _device_of(value: Any) -> str | None:
    """The type of the device that a node's tensor is known to live on."""
    for key in ("val", "example_value"):
        known = value.meta.get(key) if isinstance(value, Node) else None
        if isinstance(known, torch.Tensor):
            return known.device.type
    return None


def _call_label(node: Node) -> str:
    if node.target in (ops.call_inplace, ops.invoke):
        return str(node.args[1])
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target)
