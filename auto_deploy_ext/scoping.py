"""Scopes an orchestrator's mirrors: finds its graphs, plans for all of them, then rewrites them or nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.fx import GraphModule

from auto_deploy_ext import host_mirrors
from auto_deploy_ext.events import Setting
from auto_deploy_ext.interface_nodes import is_orchestrator_graph
from auto_deploy_ext.mirror_plan import MirrorPlan, make_plan, mirrored_before
from auto_deploy_ext.orchestrator import (
    OrchestratorGraph,
    UntraceableError,
    bind_variants,
    find_interface_arg,
    find_orchestrator,
    orchestrator_graphs,
    trace_orchestrator,
    trace_variants,
)
from auto_deploy_ext.orchestrator.dispatch import Dispatcher
from auto_deploy_ext.program import collect
from auto_deploy_ext.rewrite import apply_edits
from auto_deploy_ext.strategies import STRATEGIES, Analysis, Edits, HostTraits, StaleReadError, describe_problems

logger = logging.getLogger("auto_deploy_ext")


class ScopeError(ValueError):
    """The options ask for something that this host or this orchestrator does not have."""


@dataclass(frozen=True)
class ScopeOptions:
    """The fields of the transform's config that decide what is rewritten; see `scope_host_mirrors`."""

    orchestrator: str | None = None
    interface_arg: str | None = None
    max_draft_len: int | None = None
    strategy: str = "override"
    mode: Literal["auto", "graph", "hooks"] = "auto"
    on_unknown: Literal["full", "error"] = "full"
    insert_missing: bool = True
    live_out: tuple[str, ...] = ()
    max_variants: int = 8

    def __post_init__(self) -> None:
        """Reject what no code stands behind."""
        if self.strategy not in STRATEGIES:
            raise ScopeError(f"strategy: {self.strategy!r} is not one of {', '.join(sorted(STRATEGIES))}")
        if self.mode == "hooks":
            raise ScopeError("mode: hooks is not available in this release; use auto or graph")


@dataclass(frozen=True)
class Recipe:
    """Traces and scopes one more variant; given to the dispatcher, which is pickled with the wrapper."""

    options: ScopeOptions

    def __call__(self, owner: nn.Module, interface: Any, name: str) -> OrchestratorGraph:
        """Return the scoped variant for the batch that `interface` holds."""
        variant = trace_orchestrator(owner, interface, interface_arg=self.options.interface_arg, variant=name)
        scope_graphs({name: variant}, interface, self.options)
        assert isinstance(variant, OrchestratorGraph)
        return variant


def analyse(graphs: Mapping[str, GraphModule], cm: Any, options: ScopeOptions) -> dict[str, Analysis]:
    """Analyse the variants of an orchestrator.

    Raises:
        UnknownEffectError: see `collect`.
        ScopeError: a name in `live_out` is no mirror of the interface.
    """
    setting = Setting.of(cm, options.on_unknown)
    traits = host_traits(cm)
    _check_live_out(options.live_out, setting)
    return {
        name: Analysis.of(collect(gm, setting, options.interface_arg), options.live_out, traits)
        for name, gm in graphs.items()
    }


def host_traits(cm: Any) -> HostTraits:
    """How the mutations of an interface mirror, in the rewritten graphs (see `host_mirrors.mutate`)."""
    info = cm.info if hasattr(cm, "info") else cm
    by_override = host_mirrors.is_tracked(info) and host_mirrors.takes_override(info, "switch_to_generate_")
    return HostTraits(narrowed_moves_whole=by_override, twins_trigger=not by_override)


def _check_live_out(names: tuple[str, ...], setting: Setting) -> None:
    known = {f"{buffer}_host" for buffer in setting.buffers or ()}
    wrong = sorted(set(names) - known)
    if wrong:
        raise ScopeError(f"live_out: {', '.join(wrong)} names no host mirror; mirrors are {', '.join(sorted(known))}")


def decide(analyses: Mapping[str, Analysis], options: ScopeOptions) -> Edits:
    """Let the strategy decide, and refuse to repair what `insert_missing: false` says must be right already.

    Raises:
        StaleReadError: a consumer reads a stale mirror in the orchestrator as it is written.
    """
    if not options.insert_missing:
        problems = [f"{name}: {text}" for name, analysis in analyses.items() for text in describe_problems(analysis)]
        if problems:
            raise StaleReadError("\n".join([*problems, "insert_missing: true repairs this"]))
    return STRATEGIES[options.strategy](list(analyses.values()))


def scope_graphs(graphs: Mapping[str, GraphModule], cm: Any, options: ScopeOptions) -> tuple[MirrorPlan, int]:
    """Rewrite orchestrator graphs in place; nothing is changed when an error is raised.

    Returns:
        The plan, and the number of mutation calls that changed.
    """
    analyses = analyse(graphs, cm, options)
    edits = decide(analyses, options)
    mirror_plan = make_plan(analyses, edits, options.strategy)
    before = mirrored_before(analyses.values())
    changed = apply_edits([a.program for a in analyses.values()], edits, before)
    return mirror_plan, changed


def scope_module(module: nn.Module, cm: Any, options: ScopeOptions) -> tuple[MirrorPlan, int]:
    """Scope the orchestrator in a module: rewrite it where it is a graph, else bind its rewritten variants.

    Returns:
        The plan, and the number of mutation calls that changed. An orchestrator that cannot be traced stays as it is
        with `mode: auto`; the plan's reasons say why.

    Raises:
        UntraceableError: it cannot be traced, with `mode: graph`.
    """
    owner = find_orchestrator(module, options.orchestrator)
    if isinstance(owner, GraphModule):
        graphs = {_variant_name(owner): owner} if is_orchestrator_graph(owner) else {}
        return scope_graphs(graphs, cm, options)
    try:
        variants = _trace(owner, cm, options)
    except UntraceableError as error:
        return _untraced(error, options), 0
    result = scope_graphs(variants, cm, options)
    parameter = find_interface_arg(_own_forward(owner), options.interface_arg)
    bind_variants(owner, parameter, variants, Recipe(options), options.max_variants)
    return result


def plan_module(module: nn.Module, cm: Any, options: ScopeOptions) -> MirrorPlan:
    """The plan for a module, which stays as it is; after the pass, that of its rewritten graphs."""
    owner = find_orchestrator(module, options.orchestrator)
    graphs: Mapping[str, GraphModule]
    if isinstance(owner, GraphModule):
        graphs = {_variant_name(owner): owner} if is_orchestrator_graph(owner) else {}
    else:
        try:
            graphs = orchestrator_graphs(owner) or _trace(owner, cm, options)
        except UntraceableError as error:
            return _untraced(error, options)
    analyses = analyse(graphs, cm, options)
    return make_plan(analyses, STRATEGIES[options.strategy](list(analyses.values())), options.strategy)


def _variant_name(gm: GraphModule) -> str:
    return str(getattr(gm, "variant", "graph"))


def _trace(owner: nn.Module, cm: Any, options: ScopeOptions) -> dict[str, OrchestratorGraph]:
    return trace_variants(owner, cm, interface_arg=options.interface_arg, max_draft_len=options.max_draft_len)


def _own_forward(owner: nn.Module) -> Any:
    bound = owner.__dict__.get("forward")
    return bound.original if isinstance(bound, Dispatcher) else owner.forward


def _untraced(error: UntraceableError, options: ScopeOptions) -> MirrorPlan:
    if options.mode == "graph":
        raise error
    logger.warning("the orchestrator is left as it is, with full mirrors: it cannot be traced: %s", error)
    reason = f"the orchestrator cannot be traced: {error}"
    return make_plan({}, Edits(), options.strategy, mode="eager", reasons=[reason])
