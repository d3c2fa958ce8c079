"""Finds runs of metadata mutations in orchestrator graphs and puts one node in the place of each.

A run stands between two consumers, or whatever else might see what a mutation does. See `FusionFinder` for the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from auto_deploy_ext import kernels
from auto_deploy_ext.analysis import aliasing
from auto_deploy_ext.analysis.events import Setting
from auto_deploy_ext.analysis.fused_nodes import fuse_nodes, is_fused, part_of, with_nested
from auto_deploy_ext.analysis.interface_nodes import interface_roots, submodule_at
from auto_deploy_ext.effects import MUTATIONS, buffer_of, mirror_of
from auto_deploy_ext.orchestrator import OrchestratorGraph, dispatcher_of, ops
from auto_deploy_ext.rewriting.rewrite import keep_graph
from auto_deploy_ext.runtime import fused_launch
from auto_deploy_ext.runtime.fused_mutations import COPY_NAME, FUSIBLE, Part, is_fusible_copy, reason_against
from auto_deploy_ext.runtime.refresh import bring_up_to_date, ensure_fresh


class FusionError(ValueError):
    """Mutations cannot be fused, and the configuration asks for an error then."""


def reason_not_to_fuse(cm: Any) -> str | None:
    """Why the mutations of an interface cannot be fused; None: they can."""
    info = getattr(cm, "info", cm)
    return reason_against(info) or reason_without_triton(info._input_buffer.device)


def reason_without_triton(device: torch.device) -> str | None:
    """Why mutations cannot be fused on a device, whatever the interface; None: they can."""
    if device.type == "cuda" and not kernels.has_triton():
        return "Triton is not installed (pip install 'auto_deploy_ext[gpu]')"
    return None


def fuse_graphs(graphs: Iterable[GraphModule], cm: Any, interface_arg: str | None = None) -> int:
    """Fuse runs of mutations in orchestrator graphs and in those that they call, in place.

    Args:
        graphs: rewritten or not; each mutation keeps its own way of bringing mirrors up to date.
        cm: the interface that they are given.
        interface_arg: the placeholder that receives the interface, where it cannot be told from its use.

    Returns:
        How many runs were fused now; a second call returns 0.
    """
    setting = Setting.of(cm)
    found = []
    owners = with_nested(graphs)
    for gm in owners:
        keeps = keep_graph(gm)
        if ops.normalize_effects(gm.graph, lambda name: name in FUSIBLE) or keeps:
            gm.recompile()
    # All are found before the first is changed.
    for gm in owners:
        found.append((gm, FusionFinder(gm, setting, interface_arg).find()))
    for gm, runs in found:
        for run in runs:
            node = fuse_nodes(run.nodes)
            for delayed in reversed(run.delayed):
                node.append(delayed)
        if runs:
            gm.graph.lint()
            gm.recompile()
    return sum(len(runs) for _, runs in found)


@dataclass
class Run:
    """Mutations to be fused.

    Attributes:
        nodes: in program order.
        delayed: starts of transfers among them, which go behind the fused node.
        written: the buffers that they write.
        moved: the buffers whose mirrors they or the delayed transfers bring up to date from the device.
        root: the node that stands for their interface.
    """

    nodes: list[Node] = field(default_factory=list)
    delayed: list[Node] = field(default_factory=list)
    written: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)
    root: Node | None = None

    def is_worth_it(self) -> bool:
        """Whether fusing saves a launch: of several mutations, or of one that has several."""
        return len(self.nodes) > 1 or (len(self.nodes) == 1 and self.nodes[0].args[1] != COPY_NAME)


class FusionFinder:
    """Finds the runs of one graph.

    1. A run consists of `switch_to_generate_`, `copy_` and `offset_pos_and_cache_` of one SequenceInfo, at most as many
       as the kernel takes, whose operands are no memory of the interface. `copy_` of part of a page table is none of
       them.
    2. The fused node stands in the place of the last. So what stands among them is done before the first: nodes that
       neither look at the interface nor write anything, operands on their way to the host, and refreshes of mirrors of
       what the mutations before them do not write.
    3. Transfers that are started among them begin behind the fused node instead, if no later mutation writes what
       travels.
    4. A mutation that writes what an earlier one copies to the host begins a new run: its values must not show there.
    5. Everything else ends a run.

    Args:
        gm: the graph, with effects normalised.
        setting: what is known of the interface.
        interface_arg: the placeholder that receives the interface, where it cannot be told from its use.
    """

    def __init__(self, gm: GraphModule, setting: Setting, interface_arg: str | None = None) -> None:
        self._gm = gm
        self._setting = setting
        self._touching: set[Node] = set(interface_roots(gm, interface_arg))
        self._runs: list[Run] = []
        self._run = Run()

    def find(self) -> list[Run]:
        """The runs that are worth fusing, in program order."""
        for node in list(self._gm.graph.nodes):
            self._note_memory(node)
            if not (self._extends(node) or self._stands_among(node)):
                self._end()
                self._extends(node)
        self._end()
        return [run for run in self._runs if run.is_worth_it()]

    def _end(self) -> None:
        if self._run.nodes:
            self._runs.append(self._run)
            self._run = Run()

    def _note_memory(self, node: Node) -> None:
        """Note whether a node is the interface, part of it, or may be memory of it."""
        if self._touching.isdisjoint(node.all_input_nodes):
            return
        if node.op == "call_module":
            module = submodule_at(self._gm, str(node.target))
            effects = aliasing.module_effects(module)
            if not aliasing.makes_new_tensors(module) and (effects is None or effects.returned):
                self._touching.add(node)
        elif node.op in ("call_function", "call_method") and aliasing.result_may_alias(node):
            self._touching.add(node)

    # -- mutations ---------------------------------------------------------------------------------------------------

    def _extends(self, node: Node) -> bool:
        """Add a node to the run if it is a mutation that can be part of it."""
        known = self._part(node)
        if known is None:
            return False
        part, written = known
        root = _root_of(node.args[0])
        run = self._run
        if run.nodes and (root is not run.root or len(run.nodes) == fused_launch.MAX_PARTS):
            return False
        if not run.moved.isdisjoint(written):
            return False
        run.root = root
        run.nodes.append(node)
        run.written |= written
        run.moved |= self._moved(part, written)
        return True

    def _part(self, node: Node) -> tuple[Part, set[str]] | None:
        """A fusible mutation and what it writes."""
        if node.op != "call_function" or node.target is not ops.mutate or node.args[1] not in FUSIBLE:
            return None
        known = part_of(node)
        if known is None or not self._touching.isdisjoint(known[1][: known[0].name != "switch_to_generate_"]):
            return None
        part = known[0]
        if part.name == COPY_NAME:
            return (part, {part.buffer}) if is_fusible_copy(self._setting.info, part.buffer) else None
        spec = MUTATIONS[part.name]
        return part, set(spec.written(self._setting.info, (), {}, self._setting.buffers or ()) or ())

    def _moved(self, part: Part, written: set[str]) -> set[str]:
        """The buffers whose mirrors a mutation copies to the host itself."""
        if part.name == COPY_NAME:
            return set()
        live = {name for name in written if mirror_of(name) in self._setting.watched}
        if part.active_args is None:
            return set(self._setting.buffers or ()) if live else set()
        return {name for name in live if mirror_of(name) in part.active_args}

    # -- what stands among them --------------------------------------------------------------------------------------

    def _stands_among(self, node: Node) -> bool:
        """Whether a node that is no mutation of the run leaves it open."""
        run = self._run
        if not run.nodes:
            return False
        if node.op == "get_attr":
            return True
        if node.op not in ("call_function", "call_method"):
            return False
        if node.target is ops.snapshot_operand:
            return True
        if node.target in (ensure_fresh, bring_up_to_date):
            return run.written.isdisjoint(map(buffer_of, node.args[1]))  # type: ignore[arg-type]
        if node.target is ops.start_mirrors:
            run.delayed.append(node)
            run.moved.update(map(buffer_of, node.args[1]))  # type: ignore[arg-type]
            return True
        if node.target is getattr and node.args[1] == "info":
            return True
        if is_fused(node) or node.target in ops.EFFECTS or not self._touching.isdisjoint(node.all_input_nodes):
            return False
        return aliasing.is_known(node) and not aliasing.written_inputs(node) and not node.is_impure()


def _root_of(node: Any) -> Any:
    """The node for the interface whose SequenceInfo a node is."""
    while isinstance(node, Node) and node.target is getattr and node.args[1] == "info":
        node = node.args[0]
    return node


# -- variants that are made later --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FusingRecipe:
    """Fuses what another recipe makes for a batch that no variant covers; given to the dispatcher.

    Attributes:
        inner: traces and scopes the variant.
        interface_arg: see `fuse_graphs`.
    """

    inner: Callable[[nn.Module, Any, str], OrchestratorGraph]
    interface_arg: str | None = None

    def __call__(self, owner: nn.Module, interface: Any, name: str) -> OrchestratorGraph:
        """Return the fused variant for the batch that `interface` holds."""
        variant = self.inner(owner, interface, name)
        if reason_not_to_fuse(interface) is None:
            fuse_graphs([variant], interface, self.interface_arg)
        return variant

    @property
    def uncovered(self) -> Any:
        """What `Dispatcher` asks a recipe for."""
        return getattr(self.inner, "uncovered")  # noqa: B009 - an AttributeError means that there is none


def fuse_variants_to_come(module: nn.Module, interface_arg: str | None = None) -> None:
    """Have variants that a wrapper traces later fused as well."""
    dispatcher = dispatcher_of(module)
    if dispatcher is not None and dispatcher.recipe is not None and not isinstance(dispatcher.recipe, FusingRecipe):
        dispatcher.recipe = FusingRecipe(dispatcher.recipe, interface_arg)


def fused_runs(graphs: Mapping[str, GraphModule]) -> dict[str, list[tuple[str, ...]]]:
    """The names of the mutations of each fused run, in program order, by graph."""
    shown: dict[str, list[tuple[str, ...]]] = {}
    for name, gm in graphs.items():
        nodes = [node for node in gm.graph.nodes if is_fused(node)]
        shown[name] = [tuple(part[0] for part in node.args[1]) for node in nodes]  # type: ignore[union-attr]
    return shown
