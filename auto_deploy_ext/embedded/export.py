"""torch.export of a module into an `ExportedGraphModule` that keeps its graph, meta and embeddings through copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

EXPORT_META_KEY = "export"
"""`gm.meta` key: role of the graph ("target", "draft" or "model") and the names of the kept attributes."""

_EXPORT_CHECKS = (
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
)

# What fx.GraphModule's constructor and graph setter make themselves, so it is neither copied nor pickled.
_DERIVED_ATTRIBUTES = ("_graph", "_code", "_tracer_cls", "_tracer_extras", "_lineno_map", "_prologue_start")


class ExportedGraphModule(fx.GraphModule):
    """A traced target or draft model.

    It differs from a plain GraphModule in three ways: `forward` takes flat arguments (a placeholder's `target` is the
    argument's name); deepcopy and pickle keep the `fx.Graph` with its nodes' meta, instead of re-tracing the code, and
    every attribute, used by the graph or not; and `.to()` moves the devices written into the graph along.

    Args:
        root: Module or mapping that holds what the graph's `get_attr` and `call_module` nodes name.
        graph: The graph.
        class_name: Name of the generated class.
    """

    def __init__(
        self, root: nn.Module | Mapping[str, Any], graph: fx.Graph, class_name: str = "ExportedGraphModule"
    ) -> None:
        super().__init__(root if isinstance(root, nn.Module) else dict(root), graph, class_name)

    @property
    def role(self) -> str:
        """ "target", "draft" or "model"."""
        return self.meta.get(EXPORT_META_KEY, {}).get("role", "model")

    def keep(self, root: nn.Module, names: Iterable[str]) -> None:
        """Take over submodules, parameters or buffers of `root` that the graph itself does not use.

        Args:
            root: The module that was exported.
            names: Qualified names in it.

        Raises:
            AttributeError: `root` has no such attribute.
        """
        for name in names:
            prefix, _, leaf = name.rpartition(".")
            owner = root.get_submodule(prefix)
            value = getattr(owner, leaf)
            parent = _make_path(self, prefix)
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                parent.register_buffer(leaf, value, persistent=leaf not in owner._non_persistent_buffers_set)
            else:
                setattr(parent, leaf, value)

    def get_input_embeddings(self) -> nn.Module | None:
        """The token embedding, or None where the model has none of its own."""
        return self._kept_module("input_embeddings")

    def get_output_embeddings(self) -> nn.Module | None:
        """The language model head, or None where the model has none of its own."""
        return self._kept_module("output_embeddings")

    def delete_all_unused_submodules(self) -> None:
        """Do nothing: the embeddings are unused by the graph and are needed all the same."""

    def _kept_module(self, which: str) -> nn.Module | None:
        name = self.meta.get(EXPORT_META_KEY, {}).get(which)
        return None if name is None else self.get_submodule(name)

    def _apply(self, fn: Any, recurse: bool = True) -> ExportedGraphModule:
        super()._apply(fn, recurse)
        tensors = [*self.parameters(), *self.buffers()]
        if tensors:
            retarget_device(self, tensors[0].device)
        return self

    def _attributes(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _DERIVED_ATTRIBUTES}

    def __deepcopy__(self, memo: dict[int, Any]) -> ExportedGraphModule:
        clone = _empty(self.__class__.__name__)
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self._attributes(), memo))
        # FX uses the memo it is given as its own map from node to node, so it gets one of its own.
        clone.graph = copy.deepcopy(self.graph, {})
        return clone

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"attributes": self._attributes(), "graph": dump_graph(self.graph)}
        return _empty, (self.__class__.__name__,), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["attributes"])
        self.graph = load_graph(state["graph"])


def _empty(class_name: str) -> ExportedGraphModule:
    return ExportedGraphModule({}, fx.Graph(), class_name)


def _make_path(module: nn.Module, path: str) -> nn.Module:
    for part in path.split(".") if path else ():
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = getattr(module, part)
    return module


def export_module(
    module: nn.Module,
    example_inputs: Mapping[str, torch.Tensor],
    *,
    role: str = "model",
    dynamic_dims: Iterable[int] = (0, 1),
    kept: Iterable[str] = (),
) -> ExportedGraphModule:
    """Export a module whose inputs all share their leading dynamic dimensions.

    Args:
        module: Its forward takes the names in `example_inputs` as keywords and returns tensors or tuples of them.
        example_inputs: Tensors on the module's device; batch and sequence sizes above 1, or export specialises them.
        role: "target", "draft" or "model"; stored in `meta`.
        dynamic_dims: Dimensions of every input that stay dynamic.
        kept: Attributes that the result has beside what its graph uses. The module's own `get_input_embeddings()` and
            `get_output_embeddings()` are kept in any case.

    Returns:
        The graph module; it shares parameters and buffers with `module`.
    """
    dynamic = dict.fromkeys(dynamic_dims, torch.export.Dim.DYNAMIC)
    module.eval()
    with torch.no_grad():
        program = torch.export.export(
            module, (), dict(example_inputs), dynamic_shapes=dict.fromkeys(example_inputs, dynamic), strict=False
        )
    unlifted = program.module()
    graph = unlifted.graph
    _flatten_signature(graph, program.call_spec.out_spec)
    for node in list(graph.nodes):
        is_check = node.op == "call_function" and node.target in _EXPORT_CHECKS
        if is_check or (node.op == "call_module" and node.target == "_guards_fn"):
            graph.erase_node(node)
    graph.eliminate_dead_code()
    exported = ExportedGraphModule(unlifted, graph)
    exported.train(False)
    _copy_buffer_persistence(module, exported)
    embeddings = {
        "input_embeddings": _name_of(module, _accessor(module, "get_input_embeddings")),
        "output_embeddings": _name_of(module, _accessor(module, "get_output_embeddings")),
    }
    exported.keep(module, [name for name in (*embeddings.values(), *kept) if name is not None])
    exported.meta[EXPORT_META_KEY] = {"role": role, **embeddings}
    return exported


def _flatten_signature(graph: fx.Graph, out_spec: pytree.TreeSpec) -> None:
    """Give the graph plain arguments, ahead of all else, and a plain result instead of torch.export's pytrees."""
    arguments = list(graph.find_nodes(op="placeholder"))
    first = next(iter(graph.nodes))
    for node in arguments:
        if node is not first:
            first.prepend(node)
    output = graph.output_node()
    flat: Any = output.args[0]
    output.args = (pytree.tree_unflatten(list(flat), out_spec),)
    graph.set_codegen(fx.graph.CodeGen())


def _copy_buffer_persistence(module: nn.Module, exported: nn.Module) -> None:
    """FX registers every buffer as persistent; only those that the module saves belong in a state dict."""
    saved = set(module.state_dict())
    for prefix, child in exported.named_modules():
        for name in child._buffers:
            if ".".join(filter(None, (prefix, name))) not in saved:
                child._non_persistent_buffers_set.add(name)


def _accessor(module: nn.Module, name: str) -> nn.Module | None:
    getter = getattr(module, name, None)
    return None if getter is None else getter()


def _name_of(root: nn.Module, module: nn.Module | None) -> str | None:
    return next((name for name, child in root.named_modules() if module is not None and child is module), None)


def retarget_device(gm: fx.GraphModule, device: torch.device) -> int:
    """Replace every device constant in the graph that is of another type by `device`; returns how many there were."""
    count = 0

    def swap(value: Any) -> Any:
        nonlocal count
        if isinstance(value, torch.device) and value != device and value.type != "meta":
            count += 1
            return device
        return value

    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.args = fx.node.map_aggregate(node.args, swap)
            node.kwargs = fx.node.map_aggregate(node.kwargs, swap)
    if count:
        gm.recompile()
    return count


class _NodeIndex:
    """Stands for the n-th node of a dumped graph."""

    def __init__(self, index: int) -> None:
        self.index = index


class _OpName:
    """Stands for a torch operator overload in a dumped graph."""

    def __init__(self, op: torch._ops.OpOverload) -> None:
        self.name = op.name()
        self.overload = op._overloadname

    def resolve(self) -> torch._ops.OpOverload:
        """Look the operator up.

        Raises:
            AttributeError: The library that defines it has not been imported.
        """
        namespace, _, name = self.name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), name.split(".")[0])
        return getattr(packet, self.overload)


def dump_graph(graph: fx.Graph) -> dict[str, Any]:
    """Describe a graph by picklable values: every node with name, target, arguments and meta.

    Meta values that cannot be pickled (fake tensors, symbolic sizes) are left out.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}

    def encode(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return _NodeIndex(position[value])
        return _OpName(value) if isinstance(value, torch._ops.OpOverload) else value

    nodes = [
        {
            "op": node.op,
            "target": encode(node.target),
            "args": fx.node.map_aggregate(node.args, encode),
            "kwargs": fx.node.map_aggregate(node.kwargs, encode),
            "name": node.name,
            "type": node.type,
            "meta": {key: value for key, value in node.meta.items() if _is_picklable(value)},
        }
        for node in graph.nodes
    ]
    return {"nodes": nodes, "codegen": graph._codegen}


def load_graph(record: Mapping[str, Any]) -> fx.Graph:
    """Make the graph that `dump_graph` described."""
    graph = fx.Graph()
    made: list[fx.Node] = []

    def decode(value: Any) -> Any:
        if isinstance(value, _NodeIndex):
            return made[value.index]
        return value.resolve() if isinstance(value, _OpName) else value

    for entry in record["nodes"]:
        node = graph.create_node(
            entry["op"],
            decode(entry["target"]),
            fx.node.map_aggregate(entry["args"], decode),
            fx.node.map_aggregate(entry["kwargs"], decode),
            entry["name"],
            entry["type"],
        )
        node.meta.update(entry["meta"])
        made.append(node)
    graph.set_codegen(record["codegen"])
    return graph


def _is_picklable(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    if any(isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) for leaf in leaves):
        return False
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, RuntimeError):
        return False
    return True
