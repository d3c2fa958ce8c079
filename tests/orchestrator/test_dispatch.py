"""Dispatch: a wrapper stays itself, runs the variant that fits, and its own forward where none does."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from auto_deploy_ext import orchestrator_graphs, trace_orchestrator
from auto_deploy_ext.orchestrator import (
    OrchestratorGraph,
    UntraceableError,
    bind_variants,
    dispatcher_of,
    original_forward,
    trace_variants,
    tracer,
)

from .wrappers import DraftLoop, interface, nest

#: calls of the forward itself, tracing not counted; no attribute of the wrapper, for those become guards.
CALLS = [0]


class Counting(DraftLoop):
    """Counts how often its own Python forward runs."""

    def forward(self, csi: Any = None, scale: int = 1) -> Any:
        CALLS[0] += not tracer._active
        return super().forward(csi)


def learn(owner: nn.Module, cm: Any, name: str) -> OrchestratorGraph:
    graph = trace_orchestrator(owner, cm, variant=name)
    assert isinstance(graph, OrchestratorGraph)
    return graph


@pytest.fixture
def bound() -> tuple[Counting, Any]:
    wrapper, cm = Counting(), interface()
    variants = trace_variants(wrapper, cm)
    bind_variants(wrapper, "csi", {"extend": variants["extend"]}, learn, max_variants=2)
    CALLS[0] = 0
    return wrapper, cm


def test_a_batch_that_a_variant_covers_does_not_run_the_forward(bound: Any) -> None:
    wrapper, cm = bound
    nest(cm, [], 2, 3)
    twin = copy.deepcopy(cm)
    result = wrapper(cm)
    assert CALLS == [0]
    with original_forward(wrapper):
        assert torch.equal(wrapper(twin).tokens, result.tokens)
    assert CALLS == [1]


def test_a_batch_without_a_variant_runs_the_forward_and_is_covered_from_then_on(bound: Any) -> None:
    wrapper, cm = bound
    nest(cm, [3], 1, 3)
    twin = copy.deepcopy(cm)
    first = wrapper(cm)
    assert CALLS == [1]
    assert list(orchestrator_graphs(wrapper)) == ["extend", "batch1"]
    assert torch.equal(wrapper(twin).tokens, first.tokens)
    assert CALLS == [1]


def test_the_number_of_variants_is_bounded(bound: Any) -> None:
    wrapper, cm = bound
    for prefill, extend in [([3], 1), ([3], 0), ([3, 4], 0)]:
        nest(cm, prefill, extend, 3)
        wrapper(cm)
    assert len(orchestrator_graphs(wrapper)) == 2
    assert CALLS == [3]


def test_other_arguments_belong_to_the_forward(bound: Any) -> None:
    wrapper, cm = bound
    nest(cm, [], 2, 3)
    wrapper(cm, scale=2)
    assert CALLS == [1]


def test_the_wrapper_keeps_its_type_submodules_and_signature(bound: Any) -> None:
    wrapper, _ = bound
    assert type(wrapper) is Counting
    assert [name for name, _ in wrapper.named_children()] == ["target_model", "draft_model"]
    assert not any(isinstance(m, OrchestratorGraph) for m in wrapper.modules())
    assert list(inspect.signature(wrapper.forward).parameters) == ["csi", "scale"]
    assert list(wrapper.state_dict()) == ["d2t"]


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_a_copy_of_the_wrapper_runs_its_own_graphs_on_its_own_submodules(bound: Any, copied: str) -> None:
    wrapper, cm = bound
    twin = copy.deepcopy(wrapper) if copied == "deepcopy" else pickle.loads(pickle.dumps(wrapper))
    dispatcher = dispatcher_of(twin)
    assert dispatcher is not None
    assert dispatcher.owner is twin
    graph = orchestrator_graphs(twin)["extend"]
    assert graph.target_model is twin.target_model
    assert graph.target_model is not wrapper.target_model
    assert graph.code == orchestrator_graphs(wrapper)["extend"].code
    nest(cm, [], 2, 3)
    other = copy.deepcopy(cm)
    twin.d2t.fill_(0)
    changed, before = twin(cm).tokens, wrapper(other).tokens
    assert not torch.equal(changed, before)
    assert CALLS == [0]


def test_binding_again_replaces_the_variants_and_keeps_the_forward(bound: Any) -> None:
    wrapper, cm = bound
    bind_variants(wrapper, "csi", trace_variants(wrapper, cm))
    assert list(orchestrator_graphs(wrapper)) == ["extend", "mixed", "prefill"]
    assert wrapper.forward.original.__func__ is Counting.forward


def test_a_forward_that_was_bound_before_is_the_original() -> None:
    wrapper, cm = DraftLoop(), interface()
    wrapper.forward = lambda csi: "mine"
    bind_variants(wrapper, "csi", {}, None)
    nest(cm, [], 2, 3)
    assert wrapper(cm) == "mine"


def test_what_cannot_be_traced_keeps_running_its_own_forward() -> None:
    def refuse(owner: nn.Module, cm: Any, name: str) -> OrchestratorGraph:
        raise UntraceableError("never")

    wrapper, cm = Counting(), interface()
    bind_variants(wrapper, "csi", {}, refuse)
    nest(cm, [], 2, 3)
    CALLS[0] = 0
    wrapper(copy.deepcopy(cm))
    wrapper(cm)
    assert CALLS == [2]
    assert orchestrator_graphs(wrapper) == {}
