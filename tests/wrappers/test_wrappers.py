"""Real wrappers: rewritten as graphs and with mirrors on demand, they read what they would read fully mirrored.

This file runs on whichever host is bound; test_hosts runs it again in processes bound to other hosts.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import auto_deploy_ext
from auto_deploy_ext import host, orchestrator_graphs, plan
from auto_deploy_ext.orchestrator import Dispatcher
from auto_deploy_ext.rewriting.strategies import STRATEGIES
from auto_deploy_ext.runtime.consumer_check import ChangedConsumerError
from auto_deploy_ext.runtime.hooks import HookedForward

from .harness import BATCHES, Run, make_interface, nest, reference, same, scoped, step, transform
from .library import EVERY, TRACEABLE, Eagle, HandNarrowed, Mtp, StopsOnMirror, TwoDrafters

#: AutoDeploy's narrowed mutations move the whole buffer.
MOVES_WHOLE = host.takes_override and not host.features["exact_copies"]


def mirrors(run: Run) -> Counter[str]:
    """What was moved, operands of replayed mutations left out."""
    return Counter({name: n for name, n in run.moved.items() if name.endswith("_host")})


def runs(kind: type[nn.Module], **fields: Any) -> Iterator[tuple[Run, Run]]:
    """A reference run and one of the rewritten wrapper for each batch that the wrapper accepts."""
    wrapper, cm = scoped(kind, **fields)
    for prefill, extend in BATCHES:
        yield reference(kind, prefill, extend), step(wrapper, cm, prefill, extend)


#: on another host than the embedded one the tests are fewer: what does not depend on the host runs once.
COMPACT = host.name != "embedded"

#: every wrapper under the default strategy, one or two under the others.
CASES = [
    *((kind, "auto") for kind in TRACEABLE),
    *(
        (kind, name)
        for kind in ((Eagle,) if COMPACT else (Eagle, Mtp))
        for name in sorted(STRATEGIES)
        if name != "auto"
    ),
]


@pytest.mark.parametrize(("kind", "strategy"), CASES)
def test_a_rewritten_wrapper_reads_what_it_would_read_fully_mirrored(kind: type[nn.Module], strategy: str) -> None:
    for expected, got in runs(kind, mode="graph", strategy=strategy):
        assert same(got.output, expected.output)
        assert got.reads == expected.reads
        if strategy == "copy" or (strategy == "override" and not MOVES_WHOLE):
            assert mirrors(got) == expected.needed
        if strategy == "override" and MOVES_WHOLE:
            assert len(got.transfers) <= sum(kind != "read" for kind, _ in expected.events)


@pytest.mark.parametrize("kind", EVERY)
def test_mirrors_on_demand_are_read_alike_and_moved_as_needed(kind: type[nn.Module]) -> None:
    for expected, got in runs(kind, mode="hooks"):
        assert same(got.output, expected.output)
        assert got.reads == expected.reads
        assert got.moved == expected.needed


def test_what_cannot_be_traced_gets_its_mirrors_on_demand_and_says_why(caplog: Any) -> None:
    wrapper, cm = scoped(StopsOnMirror)
    assert isinstance(wrapper.forward, HookedForward)
    made = plan(wrapper, cm)
    assert made.mode == "hooks"
    (reason,) = made.reasons
    assert "cannot be traced" in reason and "library.py" in reason
    assert reason in caplog.text
    assert {c.consumer: c.checked for c in made.consumers}["draft_model"] == (
        *("cache_loc_host", "cu_seqlen_host", "last_page_len_host", "seq_len_with_cache_host"),
    )


def test_the_plan_says_when_narrowed_calls_move_the_whole_buffer() -> None:
    made = plan(Eagle(), make_interface(3), strategy="override")
    assert any("whole buffer" in reason for reason in made.reasons) == MOVES_WHOLE
    made = plan(Eagle(), make_interface(3), strategy="copy")
    assert not any("whole buffer" in reason for reason in made.reasons)


def test_what_can_be_traced_is() -> None:
    wrapper, _ = scoped(Eagle)
    assert isinstance(wrapper.forward, Dispatcher)
    assert list(orchestrator_graphs(wrapper)) == ["extend", "mixed", "prefill"]


@pytest.mark.skipif(not host.takes_override, reason="this host's mutations take no override to write by hand")
def test_an_override_by_hand_that_is_too_small_is_reported_and_repaired() -> None:
    wrapper, cm = scoped(HandNarrowed, mode="graph", strategy="override")
    made = plan(HandNarrowed(), make_interface(3), mode="graph", strategy="override")
    assert any("too narrow" in w and "seq_len_with_cache_host" in w for w in made.warnings)
    assert any("draft_model reads seq_len_with_cache_host" in p for p in made.problems)
    for prefill, extend in BATCHES:
        expected, got = reference(HandNarrowed, prefill, extend), step(wrapper, cm, prefill, extend)
        assert got.reads == expected.reads
    hooked, cm = scoped(HandNarrowed, mode="hooks")
    assert step(hooked, cm, [], 2).reads == reference(HandNarrowed, [], 2).reads


@pytest.mark.parametrize("mode", ["graph", "hooks"])
@pytest.mark.parametrize("how", ["pickle"] if COMPACT else ["deepcopy", "pickle", "to"])
def test_a_copied_pickled_or_moved_wrapper_runs_right(mode: str, how: str) -> None:
    wrapper, cm = scoped(Mtp, mode=mode)
    step(wrapper, cm, [], 2)
    twin = {
        "deepcopy": lambda: copy.deepcopy(wrapper),
        "pickle": lambda: pickle.loads(pickle.dumps(wrapper)),
        "to": lambda: wrapper.to("cpu").to(torch.float64),
    }[how]()
    fresh = make_interface(3)
    expected, got = reference(Mtp, [3, 4], 2), step(twin, fresh, [3, 4], 2)
    assert same(got.output, expected.output)
    assert got.reads == expected.reads


def test_a_copied_interface_goes_on_by_itself() -> None:
    wrapper, cm = scoped(TwoDrafters, mode="hooks")
    nest(cm, [], 2, 4)
    twin = copy.deepcopy(cm)
    with torch.inference_mode():
        first, second = wrapper(cm), wrapper(twin)
    assert same(first, second)
    assert step(wrapper, twin, [], 2).reads == reference(TwoDrafters, [], 2).reads


class Captured(nn.Module):
    """What a compile backend may leave in place of a GraphModule."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Any) -> Any:
        return self.model(**kwargs)


@pytest.mark.parametrize("mode", ["graph", "hooks"])
def test_a_compiled_consumer_keeps_working(mode: str) -> None:
    wrapper, cm = scoped(Eagle, mode=mode)
    wrapper.draft_model = Captured(wrapper.draft_model)
    expected, got = reference(Eagle, [], 2), step(wrapper, cm, [], 2)
    assert [seen for _, seen in got.reads] == [seen for _, seen in expected.reads]
    transform("scope_host_mirrors", wrapper, cm, mode=mode)
    assert [seen for _, seen in step(wrapper, cm, [3, 4], 2).reads] == [
        seen for _, seen in reference(Eagle, [3, 4], 2).reads
    ]


#: whether the consumer was compiled, and whether the wrapper ran, before the placeholder came.
CHANGED = [(False, False), (False, True), (True, False), (True, True)]


@pytest.mark.parametrize("mode", ["graph", "hooks"])
@pytest.mark.parametrize(("compiled", "ran_before"), [(True, True)] if COMPACT else CHANGED)
def test_a_placeholder_that_is_added_later_fails_loudly(mode: str, compiled: bool, ran_before: bool) -> None:
    wrapper, cm = scoped(Eagle, mode=mode)
    gm = wrapper.draft_model
    if compiled:
        wrapper.draft_model = Captured(gm)
    if ran_before:
        step(wrapper, cm, [], 2)
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.placeholder("seq_len_host")
    gm.recompile()
    with pytest.raises(ChangedConsumerError, match=r"draft_model takes seq_len_host.*scope_host_mirrors after"):
        step(wrapper, cm, [], 2)


def test_the_bound_host_reports_itself() -> None:
    assert auto_deploy_ext.host.name in ("embedded", "llmc", "tensorrt_llm")
    assert auto_deploy_ext.BaseTransform.__module__ == f"{host.root}.transform.interface"
    assert host.lacks() == ()
    assert not torch.cuda.is_initialized()
