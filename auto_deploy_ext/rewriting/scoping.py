"""Scopes an orchestrator's mirrors: finds its graphs, plans for all of them, then rewrites them or nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn
from torch.fx import GraphModule

from auto_deploy_ext.analysis.events import Setting
from auto_deploy_ext.analysis.fused_nodes import take_apart_graphs
from auto_deploy_ext.analysis.interface_nodes import is_orchestrator_graph
from auto_deploy_ext.analysis.program import collect
from auto_deploy_ext.effects import mirror_of
from auto_deploy_ext.orchestrator import (
    OrchestratorGraph,
    UntraceableError,
    bind_variants,
    find_interface_arg,
    find_orchestrator,
    orchestrator_graphs,
    own_forward,
    trace_orchestrator,
    trace_variants,
)
from auto_deploy_ext.reports.mirror_plan import ConsumerReads, MirrorPlan, make_plan
from auto_deploy_ext.rewriting.rewrite import apply_edits
from auto_deploy_ext.rewriting.strategies import (
    STRATEGIES,
    Analysis,
    Edits,
    HostTraits,
    StaleReadError,
    describe_problems,
)
from auto_deploy_ext.runtime import host_mirrors
from auto_deploy_ext.runtime.consumer_check import check_when_called
from auto_deploy_ext.runtime.hooks import HookedForward, find_consumers, install, would_hook

logger = logging.getLogger("auto_deploy_ext")

#: `meta` key of an orchestrator graph: the strategy by which the pass has rewritten it.
STRATEGY_KEY = "mirror_strategy"


class ScopeError(ValueError):
    """The options ask for something that this host or this orchestrator does not have."""


@dataclass(frozen=True)
class ScopeOptions:
    """The fields of the transform's config that decide what is rewritten; see `scope_host_mirrors`."""

    orchestrator: str | None = None
    interface_arg: str | None = None
    max_draft_len: int | None = None
    strategy: str = "auto"
    mode: Literal["auto", "graph", "hooks"] = "auto"
    on_unknown: Literal["full", "error"] = "full"
    insert_missing: bool = True
    live_out: tuple[str, ...] = ()
    max_variants: int = 8

    def __post_init__(self) -> None:
        """Reject what no code stands behind."""
        if self.strategy not in STRATEGIES:
            raise ScopeError(f"strategy: {self.strategy!r} is not one of {', '.join(sorted(STRATEGIES))}")


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

    def uncovered(self, owner: nn.Module, parameter: str) -> HookedForward:
        """What runs a batch that no variant covers: the original forward, with mirrors on demand."""
        reason = "no traced variant covers the batch"
        return would_hook(owner, parameter, self.options.live_out, reason, self.options.on_unknown)


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
    if take_apart_graphs(graphs.values()):
        # What was looked at was a copy without fused nodes.
        analyses = analyse(graphs, cm, options)
        edits = decide(analyses, options)
    mirror_plan = make_plan(analyses, edits, options.strategy)
    changed = apply_edits([a.program for a in analyses.values()], edits)
    for gm in graphs.values():
        gm.meta[STRATEGY_KEY] = options.strategy
    return mirror_plan, changed


def scope_module(module: nn.Module, cm: Any, options: ScopeOptions) -> tuple[MirrorPlan, int]:
    """Scope the orchestrator in a module: rewrite it where it is a graph, else bind its rewritten variants.

    Returns:
        The plan, and the number of mutation calls that changed. An orchestrator that cannot be traced runs with
        mirrors on demand (see `hooks`) with `mode: auto`, and always with `mode: hooks`; then the number is that of the
        consumers, and the plan's reasons say why.

    Raises:
        UntraceableError: it cannot be traced, with `mode: graph`.
    """
    owner = find_orchestrator(module, options.orchestrator)
    if isinstance(owner, GraphModule):
        graphs = {_variant_name(owner): owner} if is_orchestrator_graph(owner) else {}
        result = scope_graphs(graphs, cm, options)
        if graphs:
            check_when_called(owner)
        return result
    parameter = find_interface_arg(own_forward(owner), options.interface_arg)
    host_mirrors.mirrors_of(cm)  # tracked from now on, where that is needed
    if options.mode == "hooks":
        return _hook(owner, parameter, cm, options, "mode: hooks asks for mirrors on demand")
    try:
        variants = _trace(owner, cm, options)
    except UntraceableError as error:
        if options.mode == "graph":
            raise
        return _hook(owner, parameter, cm, options, f"the orchestrator cannot be traced: {error}")
    result = scope_graphs(variants, cm, options)
    bind_variants(owner, parameter, variants, Recipe(options), options.max_variants)
    return result


def plan_module(module: nn.Module, cm: Any, options: ScopeOptions, strategy: str | None = None) -> MirrorPlan:
    """The plan for a module, which stays as it is; after the pass, that of its rewritten graphs.

    Args:
        module: the model.
        cm: the interface; its state is the same afterwards.
        options: see `ScopeOptions`.
        strategy: None: the one by which the graphs have been rewritten, before the pass that of `options`.
    """
    owner = find_orchestrator(module, options.orchestrator)
    graphs: Mapping[str, GraphModule]
    if isinstance(owner, GraphModule):
        graphs = {_variant_name(owner): owner} if is_orchestrator_graph(owner) else {}
    else:
        bound = owner.__dict__.get("forward")
        if isinstance(bound, HookedForward):
            return _demand_plan(bound, cm, options)
        parameter = find_interface_arg(own_forward(owner), options.interface_arg)
        if options.mode == "hooks":
            reason = "mode: hooks asks for mirrors on demand"
            return _demand_plan(would_hook(owner, parameter, options.live_out, reason, options.on_unknown), cm, options)
        try:
            graphs = orchestrator_graphs(owner) or _trace(owner, cm, options)
        except UntraceableError as error:
            if options.mode == "graph":
                raise
            reason = f"the orchestrator cannot be traced: {error}"
            return _demand_plan(would_hook(owner, parameter, options.live_out, reason, options.on_unknown), cm, options)
    analyses = analyse(graphs, cm, options)
    done = {gm.meta[STRATEGY_KEY] for gm in graphs.values() if STRATEGY_KEY in gm.meta}
    strategy = strategy or (done.pop() if len(done) == 1 else options.strategy)
    return make_plan(analyses, STRATEGIES[strategy](list(analyses.values())), strategy)


def _variant_name(gm: GraphModule) -> str:
    return str(getattr(gm, "variant", "graph"))


def _trace(owner: nn.Module, cm: Any, options: ScopeOptions) -> dict[str, OrchestratorGraph]:
    return trace_variants(owner, cm, interface_arg=options.interface_arg, max_draft_len=options.max_draft_len)


def _hook(owner: nn.Module, parameter: str, cm: Any, options: ScopeOptions, reason: str) -> tuple[MirrorPlan, int]:
    _check_live_out(options.live_out, Setting.of(cm))
    if not find_consumers(owner):
        raise ScopeError(
            f"{type(owner).__name__} holds no GraphModule, so no consumer could be given its mirrors ({reason}): "
            "run the pass after export, at the end of stage cache_init"
        )
    logger.warning("%s: %s; its mirrors are brought up to date on demand", type(owner).__name__, reason)
    hooked = install(owner, parameter, options.live_out, reason, options.on_unknown)
    return _demand_plan(hooked, cm, options), len(hooked.reads)


def _demand_plan(hooked: HookedForward, cm: Any, options: ScopeOptions) -> MirrorPlan:
    """The plan of a wrapper with mirrors on demand: what each consumer reads, and nothing about call sites."""
    setting = Setting.of(cm)
    _check_live_out(options.live_out, setting)
    everything = tuple(sorted(mirror_of(name) for name in setting.buffers or ()))
    consumers = tuple(
        ConsumerReads(
            "hooks", path, "", everything if reads is None else reads, (), everything if reads is None else reads
        )
        for path, reads in sorted(hooked.reads.items())
    )
    plan = make_plan({}, Edits(), options.strategy, mode="hooks", reasons=[hooked.reason])
    return replace(plan, variants=("hooks",), active=tuple(sorted(setting.active)), consumers=consumers)
