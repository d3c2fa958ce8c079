"""The pass scope_host_mirrors on eager wrappers and on real interfaces: same values, fewer transfers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx, nn

from auto_deploy_ext import SharedConfig, TransformRegistry, orchestrator_graphs, plan, record_mirrors
from auto_deploy_ext.effects import buffer_of, is_mirror
from auto_deploy_ext.orchestrator import OrchestratorError, UntraceableError, ops
from auto_deploy_ext.rewriting.scoping import ScopeOptions, scope_graphs
from tests.orchestrator.wrappers import DraftLoop, interface, nest
from tests.orchestrator_programs import OFFSET, SWITCH, build, overrides

OVERRIDE = {"stage": "cache_init", "strategy": "override"}


def scope(module: nn.Module, cm: Any, **fields: Any) -> Any:
    transform = TransformRegistry.get("scope_host_mirrors").from_kwargs(**{**OVERRIDE, **fields})
    assert transform(module, cm, None, SharedConfig(), 0) is module
    return module.meta["_autodeploy"]["transform_history"]["scope_host_mirrors"]


def run(wrapper: nn.Module, batch: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """The wrapper's result on a fresh interface with this batch, and the transfers."""
    cm = interface()
    torch.manual_seed(0)
    nest(cm, *batch)
    with record_mirrors(cm.info) as transfers:
        result = wrapper(csi=cm)
    return result, transfers


BATCHES = [([], 3, 3), ([5, 2], 0, 3), ([4], 2, 3)]


@pytest.mark.parametrize("batch", BATCHES, ids=["extend", "prefill", "mixed"])
def test_a_scoped_wrapper_gives_the_same_and_moves_what_the_draft_reads(batch: tuple[Any, ...]) -> None:
    wrapper = DraftLoop()
    expected, full = run(wrapper, batch)
    assert scope(wrapper, interface()).num_matches > 0
    result, transfers = run(wrapper, batch)
    assert torch.equal(result.tokens, expected.tokens) and torch.equal(result.lengths, expected.lengths)
    assert [(t.trigger, t.names) for t in transfers] == [
        (SWITCH, ("cu_seqlen_host",)),
        (OFFSET, ("last_page_len_host",)),
        (OFFSET, ("last_page_len_host",)),
    ]
    assert len(full) == 3 and sum(t.nbytes for t in transfers) < sum(t.nbytes for t in full)


def test_a_scoped_wrapper_copied_or_pickled_is_scoped() -> None:
    wrapper = DraftLoop()
    scope(wrapper, interface())
    expected, transfers = run(wrapper, BATCHES[0])
    for other in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
        result, moved = run(other, BATCHES[0])
        assert torch.equal(result.tokens, expected.tokens)
        assert [t.names for t in moved] == [t.names for t in transfers]


def test_a_second_run_on_a_wrapper_binds_the_same_code() -> None:
    wrapper, cm = DraftLoop(), interface()
    scope(wrapper, cm)
    first = {name: graph.code for name, graph in orchestrator_graphs(wrapper).items()}
    scope(wrapper, cm)
    assert {name: graph.code for name, graph in orchestrator_graphs(wrapper).items()} == first


def test_a_batch_that_no_variant_covers_is_traced_and_scoped_then() -> None:
    wrapper = DraftLoop()
    scope(wrapper, interface())
    known = set(orchestrator_graphs(wrapper))
    cm = interface()
    wrapper.max_draft_len = 2
    nest(cm, [3], 1, 2)
    expected = wrapper(csi=cm).tokens
    (new,) = set(orchestrator_graphs(wrapper)) - known
    assert [names for _, names in overrides(orchestrator_graphs(wrapper)[new])] == [
        ("cu_seqlen_host",),
        ("last_page_len_host",),
    ]
    assert expected.shape == (2, 2)


def test_the_plan_of_a_wrapper_is_the_same_before_and_after_the_pass() -> None:
    wrapper, cm = DraftLoop(), interface()
    before = plan(wrapper, cm, strategy="override")
    assert "forward" not in wrapper.__dict__
    scope(wrapper, cm)
    after = plan(wrapper, cm, strategy="override")
    moved = [(s.variant, s.call, s.mirrored_before, s.mirrored_after) for s in before.call_sites]
    assert [(s.variant, s.call, s.mirrored_before, s.mirrored_after) for s in after.call_sites] == moved
    assert {s.mirrored_after for s in after.call_sites if s.call == OFFSET} == {("last_page_len_host",)}


class ReadsTheDevice(DraftLoop):
    """Branches on a number that only the device knows."""

    def forward(self, csi: Any = None, **kwargs: Any) -> Any:
        csi.info.switch_to_generate_()
        if csi.get_arg("input_pos")[0].item() > 0:
            csi.info.offset_pos_and_cache_(csi.get_arg("seq_len"))
        return self.draft_model(**self.args_of(csi, self.draft_model))


def test_a_wrapper_that_cannot_be_traced_is_an_error_in_mode_graph() -> None:
    wrapper = ReadsTheDevice()
    with pytest.raises(UntraceableError, match=r"test_scope_wrappers\.py"):
        scope(wrapper, interface(), mode="graph")
    assert "forward" not in wrapper.__dict__


def test_a_wrapper_is_untouched_when_the_pass_raises() -> None:
    class HandNarrowed(DraftLoop):
        def forward(self, csi: Any = None, **kwargs: Any) -> Any:
            csi.info.switch_to_generate_(active_args_override=set())
            return self.draft_model(**self.args_of(csi, self.draft_model))

    wrapper = HandNarrowed()
    attributes = set(wrapper.__dict__)
    with pytest.raises(RuntimeError, match="draft_model reads cu_seqlen_host"):
        scope(wrapper, interface(), insert_missing=False)
    assert set(wrapper.__dict__) - attributes <= {"meta"}
    assert orchestrator_graphs(wrapper) == {}


def test_the_orchestrator_can_be_a_named_submodule() -> None:
    model = nn.Module()
    model.loop = DraftLoop()
    scope(model, interface(), orchestrator="loop")
    assert set(orchestrator_graphs(model.loop)) >= {"extend"}
    with pytest.raises(OrchestratorError, match="did you mean 'loop'"):
        scope(model, interface(), orchestrator="lop")


# -- a law on the real interface -----------------------------------------------------------------------------------


class Recorder(fx.Interpreter):
    """Runs an orchestrator graph node by node and keeps what each consumer saw of each mirror, at current lengths."""

    def __init__(self, gm: fx.GraphModule, cm: Any, mirror_everything: bool) -> None:
        super().__init__(gm)
        self.info = cm.info
        self.mirror_everything = mirror_everything
        self.seen: list[tuple[str, str, list[Any]]] = []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if self.mirror_everything:
            self.info._input_buffer.copy_to_host()
        return result

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        for name, value in kwargs.items():
            if is_mirror(name):
                length = self.info._input_buffer.get_current_length(buffer_of(name))
                self.seen.append((target, name, value.flatten()[:length].tolist()))
        return super().call_module(target, args, kwargs)


BUFFERS = ("cu_seqlen", "input_pos", "seq_len", "cu_num_pages", "last_page_len", "seq_len_with_cache", "input_ids")
MIRRORS = tuple(f"{name}_host" for name in BUFFERS)
real_steps = st.one_of(
    st.sampled_from(["switch", "offset", "offset"]),
    st.tuples(st.just("inplace"), st.sampled_from(["seq_len_with_cache", "slot_idx"])),
    st.tuples(st.just("consume"), st.sampled_from(["a", "b"])),
)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(real_steps, max_size=10),
    consumers=st.fixed_dictionaries({n: st.lists(st.sampled_from(MIRRORS), unique=True, max_size=4) for n in "ab"}),
    extends=st.integers(0, 2),
    prefills=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    offsets=st.lists(st.integers(-2, 2), min_size=4, max_size=4),
)
def test_each_consumer_sees_what_it_would_see_fully_mirrored(
    steps: Any, consumers: Any, extends: int, prefills: list[int], offsets: list[int]
) -> None:
    gm = build(steps, consumers)
    seen = []
    for scoped in (False, True):
        cm = interface()
        for name in MIRRORS:
            cm.info.activate_arg(name)
        nest(cm, [length + 4 for length in prefills], extends, 3, cached=20)
        cm.info.copy_("input_ids", torch.arange(cm.info.total_num_tokens, dtype=torch.int32))
        cm.info._input_buffer.copy_to_host()
        if scoped:
            scope_graphs({"graph": gm}, cm, ScopeOptions(strategy="override"))
        recorder = Recorder(gm, cm, mirror_everything=not scoped)
        count = len(prefills) + extends
        recorder.run(cm, torch.tensor(offsets[:count], dtype=torch.int32), torch.arange(count, dtype=torch.int32))
        seen.append(recorder.seen)
    assert seen[0] == seen[1]
    assert all(node.op != "call_method" or node.target != SWITCH for node in gm.graph.nodes)
    assert {node.args[1] for node in gm.graph.nodes if node.target is ops.mutate} <= {SWITCH, OFFSET}
