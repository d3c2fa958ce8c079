"""One rewritten orchestrator per policy, all over the same consumers."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from ..analysis.events import Kind, Setting
from ..analysis.program import collect
from ..embedded.compile.captured_segments import SegmentedForward
from ..orchestrator import Dispatcher, OrchestratorGraph, find_interface_arg, own_forward, trace_orchestrator
from ..orchestrator.example_batches import set_batch
from ..orchestrator.interface_state import preserved
from ..orchestrator.rebound import unbound_original
from ..rewriting.fusion import fuse_graphs
from ..rewriting.rewrite import apply_edits
from ..rewriting.scoping import ScopeOptions, scope_graphs
from ..rewriting.strategies import STRATEGIES, Analysis, Edits, HostTraits
from .cells import Variant
from .pipelines import BenchPipeline


def make_forwards(pipeline: BenchPipeline, variants: Iterable[Variant]) -> dict[Variant, Dispatcher]:
    """What to bind as the wrapper's forward for each variant; the extend-only batch is traced once.

    Args:
        pipeline: before or after its compilation; the wrapper itself is left as it is.
        variants: policy and fusion.
    """
    wrapper, cm = pipeline.wrapper, pipeline.cm
    with preserved(cm):
        set_batch(cm, "extend", pipeline.backend.k)
        traced = trace_orchestrator(wrapper, cm, variant="extend")
    assert isinstance(traced, OrchestratorGraph)
    parameter = find_interface_arg(own_forward(wrapper))
    original = unbound_original(wrapper)
    forwards: dict[Variant, Dispatcher] = {}
    for variant in variants:
        graph = copy.deepcopy(traced)
        _APPLY.get(variant.policy, _strategy)(graph, cm, variant.policy)
        if variant.fused:
            fuse_graphs([graph], cm)
        forwards[variant] = Dispatcher(wrapper, parameter, {graph.variant: graph}, max_variants=1, original=original)
        if pipeline.segments:
            forwards[variant].runner = SegmentedForward(pipeline.segments, pipeline.backend.k)
    return forwards


def _strategy(graph: OrchestratorGraph, cm: Any, policy: str) -> None:
    scope_graphs({graph.variant: graph}, cm, ScopeOptions(strategy=policy))


def _none(graph: OrchestratorGraph, cm: Any, policy: str) -> None:
    """Narrow every mutation to nothing, and repair nothing."""
    _override_all(graph, cm, ())


def _full(graph: OrchestratorGraph, cm: Any, policy: str) -> None:
    """Leave every mutation un-narrowed."""
    _override_all(graph, cm, None)


def _override_all(graph: OrchestratorGraph, cm: Any, names: tuple[str, ...] | None) -> None:
    program = collect(graph, Setting.of(cm))
    narrowable = [
        event.node
        for event in program.flat
        if event.kind is Kind.MUTATION and event.spec is not None and event.spec.takes_override
    ]
    apply_edits([program], Edits(overrides={node: names for node in narrowable if node is not None}))


def _scoped(graph: OrchestratorGraph, cm: Any, policy: str) -> None:
    """Strategy `override` as on a host that copies its whole buffer for the sake of any name that it is given."""
    program = collect(graph, Setting.of(cm))
    edits = STRATEGIES["override"]([Analysis.of(program, traits=HostTraits(narrowed_moves_whole=True))])
    # The embedded host moves exactly what a narrowed call names, and everything for one that is not narrowed.
    edits.overrides = {node: None if names else () for node, names in edits.overrides.items()}
    apply_edits([program], edits)


_APPLY = {"none": _none, "full": _full, "scoped": _scoped}
