"""The pass drain_hostfuncs: where drains stand, where none do, and that no encoder meets a pending host function."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import operator
import pickle
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.utils.checkpoint
from auto_deploy_ext.transforms.drain_hostfuncs import DrainError, drain_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, GraphModule

from auto_deploy_ext import SharedConfig, TransformRegistry
from auto_deploy_ext.hostfuncs import (
    HostFuncOwner,
    OrderedLayer,
    ThreadStreams,
    drain_hostfuncs,
    hostfunc,
    hostfuncs_pending,
    use_owner,
)
from auto_deploy_ext.hostfuncs.drains import drain_before, mark_encoder, may_launch
from auto_deploy_ext.hostfuncs.pending import _all_owners
from auto_deploy_ext.orchestrator import ops, orchestrator_graphs, trace_orchestrator
from auto_deploy_ext.runtime.refresh import ensure_fresh
from tests.bounded import bounded
from tests.orchestrator.wrappers import DRAFT_ARGS, TARGET_ARGS, consumer, interface, nest

__all__ = ["bounded"]


@hostfunc
def nothing() -> None:
    pass


@torch.library.custom_op("drain_test::launch", mutates_args=())
def launch(x: torch.Tensor) -> torch.Tensor:
    """An operator of another library, whose implementation launches a host function."""
    nothing()
    return x.clone()


#: what encoders note; not in the modules, whose state tracing must not change.
MET_PENDING: WeakKeyDictionary[nn.Module, list[bool]] = WeakKeyDictionary()


class Encoder(nn.Module):
    """Notes at every call whether host functions were pending."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 2)

    @property
    def met_pending(self) -> list[bool]:
        return MET_PENDING.setdefault(self, [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor:  # neither a proxy nor a fake tensor: a real call
            self.met_pending.append(hostfuncs_pending())
        return self.proj(x)


def launching_graph() -> GraphModule:
    """A GraphModule that launches a host function, as a captured one with guided decoding does."""
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(nothing)
    graph.output(graph.call_function(torch.add, (x, 1)))
    # FX would delete the launch as dead code if the graph were cleaned; it is not.
    return GraphModule(nn.Module(), graph)


def program(steps: list[str]) -> GraphModule:
    """A straight-line graph over `model`, `encoder_a`, `encoder_b`, and ordinary operations (`op`)."""
    root = nn.Module()
    root.model, root.encoder_a, root.encoder_b, root.plain = launching_graph(), Encoder(), Encoder(), nn.Linear(2, 2)
    graph = Graph()
    x = graph.placeholder("x")
    for step in steps:
        if step == "op":
            x = graph.call_module("plain", (graph.call_function(torch.mul, (x, 2)),))
        else:
            x = graph.call_module(step, (x,))
    graph.output(x)
    gm = GraphModule(root, graph)
    for name, module in root.named_children():  # FX keeps only those that the graph calls
        gm.add_module(name, module)
    return gm


def apply(mod: nn.Module, cm: Any = None, **fields: Any) -> Any:
    """Run the transform; returns its TransformInfo."""
    transform = TransformRegistry.get("drain_hostfuncs").from_kwargs(stage="cache_init", **fields)
    assert transform(mod, cm, None, SharedConfig(), 0) is mod
    return mod.meta["_autodeploy"]["transform_history"]["drain_hostfuncs"]


def shape(gm: GraphModule) -> list[str]:
    """The calls of a graph and its drains, in order."""
    names = []
    for node in gm.graph.nodes:
        if node.target is drain_before:
            names.append("drain")
        elif node.op == "call_module" and node.target != "plain":
            names.append(str(node.target))
    return names


@pytest.fixture
def owner():
    for other in _all_owners():  # what tests before have left pending would be drained in these tests' counts
        with contextlib.suppress(Exception):
            other.drain()
    owner = HostFuncOwner("engine", OrderedLayer())
    with use_owner(owner):
        yield owner


ENCODERS = ["encoder_*"]


# ---------------------------------------------------------------- where drains stand


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # At entry something may be pending from the forward before.
        (["encoder_a"], ["drain", "encoder_a"]),
        # Adjacent encoders share one, also with ordinary operations and torch.nn layers between them.
        (["encoder_a", "op", "encoder_b", "encoder_a"], ["drain", "encoder_a", "encoder_b", "encoder_a"]),
        # A graph may launch again.
        (["encoder_a", "model", "encoder_b"], ["drain", "encoder_a", "model", "drain", "encoder_b"]),
        (["model", "op", "encoder_a", "model"], ["model", "drain", "encoder_a", "model"]),
        # No encoder, no drain.
        (["model", "op", "model"], ["model", "model"]),
    ],
)
def test_a_drain_stands_before_an_encoder_exactly_where_something_can_be_pending(steps, expected):
    gm = program(steps)
    apply(gm, encoders=ENCODERS)
    assert shape(gm) == expected


def test_a_drain_stands_directly_before_its_encoder():
    gm = program(["op", "encoder_a"])
    apply(gm, encoders=ENCODERS)
    nodes = list(gm.graph.nodes)
    encoder = next(node for node in nodes if node.target == "encoder_a")
    assert nodes[nodes.index(encoder) - 1].target is drain_before


@given(st.lists(st.sampled_from(["op", "model", "encoder_a", "encoder_b"]), max_size=12))
@settings(max_examples=60, deadline=None)
def test_no_program_lets_an_encoder_meet_a_pending_host_function_and_none_drains_in_vain(steps):
    gm = program(steps)
    apply(gm, encoders=ENCODERS)
    pending, needed = True, 0
    for step in steps:
        if step == "model":
            pending = True
        elif step.startswith("encoder"):
            needed, pending = needed + pending, False
    assert shape(gm).count("drain") == needed
    owner = HostFuncOwner("engine", OrderedLayer())
    with use_owner(owner):
        nothing()  # from the forward before
        gm(torch.ones(1, 2))
    assert not any(gm.encoder_a.met_pending + gm.encoder_b.met_pending)


def test_a_module_that_says_it_launches_nothing_makes_nothing_pending():
    gm = program(["encoder_a", "model", "encoder_b"])
    gm.model.launches_hostfuncs = False
    apply(gm, encoders=ENCODERS)
    assert shape(gm) == ["drain", "encoder_a", "model", "encoder_b"]


class Runner:
    """An object that is nobody's interface."""

    def replay(self, key: str) -> None: ...


def python_function(x: Any) -> Any:
    return x


class LooksLikeTorch:
    """A callable object with the name and module of a function of torch."""

    __module__, __name__ = "torch", "add"

    def __call__(self, x: Any) -> Any:
        return x


class OwnLayer(nn.Module):
    """Anything may happen in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        # torch's own: operators, functions, tensor methods.
        (lambda g, x: g.call_function(torch.ops.aten.add.Tensor, (x, 1)), False),
        (lambda g, x: g.call_function(torch.ops.aten.add, (x, 1)), False),
        (lambda g, x: g.call_function(torch.add, (x, 1)), False),
        (lambda g, x: g.call_function(torch.nn.functional.relu, (x,)), False),
        (lambda g, x: g.call_function(torch.nn.functional.linear, (x, x)), False),
        (lambda g, x: g.call_function(torch.linalg.norm, (x,)), False),
        (lambda g, x: g.call_function(torch.Tensor.add, (x, 1)), False),
        (lambda g, x: g.call_function(torch.zeros, (2,), {"device": torch.device("cpu"), "dtype": torch.int}), False),
        (lambda g, x: g.call_method("masked_fill_", (x, x, 0)), False),
        (lambda g, x: g.call_method("to", (x, torch.device("cpu"))), False),
        # Python's own.
        (lambda g, x: g.call_function(operator.getitem, (x, 0)), False),
        (lambda g, x: g.call_function(operator.iadd, (x, 1)), False),
        (lambda g, x: g.call_function(getattr, (x, "info")), False),
        (lambda g, x: g.call_function(max, (1, 2)), False),
        (lambda g, x: g.call_function(math.ceil, (1.5,)), False),
        # Our graph's ops, registered mutations, and what is asked of the interface.
        (lambda g, x: g.call_function(ops.mutate, (x, "switch_to_generate_")), False),
        (lambda g, x: g.call_function(ops.call_inplace, (x, "fill_", 0)), False),
        (lambda g, x: g.call_function(ops.invoke, (g.call_function(getattr, (x, "info")), "unnest_sequences")), False),
        (lambda g, x: g.call_function(ops.call, ("torch.cuda.synchronize",)), False),
        (lambda g, x: g.call_function(ensure_fresh, (x, ("cu_seqlen_host",))), False),
        (lambda g, x: g.call_method("switch_to_generate_", (x,)), False),
        # Host functions, and whatever is not known.
        (lambda g, x: g.call_function(nothing), True),
        (lambda g, x: g.call_function(python_function, (x,)), True),
        (lambda g, x: g.call_function(print, (x,)), True),
        (lambda g, x: g.call_function(LooksLikeTorch(), (x,)), True),
        (lambda g, x: g.call_function(functools.reduce, (python_function, x)), True),
        (lambda g, x: g.call_function(torch.utils.checkpoint.checkpoint, (python_function, x)), True),
        (lambda g, x: g.call_function(torch.cond, (x, python_function, python_function, (x,))), True),
        (lambda g, x: g.call_function(torch.ops.higher_order.cond, (x, x, x, (x,))), True),
        (lambda g, x: g.call_function(torch.ops.drain_test.launch, (x,)), True),
        (lambda g, x: g.call_function(torch.ops.drain_test.launch.default, (x,)), True),
        (lambda g, x: g.call_function(ops.call, ("tests.transforms.test_drain_hostfuncs.python_function", x)), True),
        (lambda g, x: g.call_function(ops.call, ("no.such.function", x)), True),
        (lambda g, x: g.call_function(ops.invoke, (Runner(), "replay", "key")), True),
        (lambda g, x: g.call_function(ops.invoke, (g.call_function(python_function, (x,)), "replay")), True),
        (lambda g, x: g.call_method("replay", (x, "key")), True),
        (lambda g, x: g.call_method("apply_", (x, python_function)), True),
    ],
)
def test_only_what_is_known_to_launch_nothing_counts_as_launching_nothing(call, expected):
    graph = Graph()
    node = call(graph, graph.placeholder("csi"))
    empty = GraphModule(nn.Module(), Graph())  # only its modules count; FX writes no code for functions as arguments
    assert may_launch(empty, node) is expected


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(2, 2), False),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), False),
        (nn.Sequential(nn.Linear(2, 2), OwnLayer()), True),
        (OwnLayer(), True),
        (mark_encoder(OwnLayer()), False),
        (launching_graph(), True),
    ],
)
def test_of_modules_only_encoders_and_torchs_own_layers_launch_nothing(module, expected):
    root, graph = nn.Module(), Graph()
    root.called = module
    node = graph.call_module("called", (graph.placeholder("x"),))
    assert may_launch(GraphModule(root, graph), node) is expected


def test_a_method_of_an_object_beside_the_interface_may_launch():
    graph = Graph()
    csi, runner = graph.placeholder("csi"), graph.placeholder("runner")
    of_interface, of_runner = (graph.call_function(ops.invoke, (obj, "replay", "key")) for obj in (csi, runner))
    gm = GraphModule(nn.Module(), graph)
    assert (may_launch(gm, of_interface), may_launch(gm, of_runner)) == (False, True)


def test_an_unknown_call_between_two_encoders_brings_the_second_drain():
    gm = program(["encoder_a", "op", "encoder_b"])
    first = next(node for node in gm.graph.nodes if node.target == "encoder_a")
    with gm.graph.inserting_after(first):
        gm.graph.call_function(python_function, (first,))
    apply(gm, encoders=ENCODERS)
    assert shape(gm) == ["drain", "encoder_a", "drain", "encoder_b"]
    assert [site.kind for site in drain_plan(gm).sites if site.graph] == ["node", "node"]


def test_a_second_run_changes_nothing():
    gm = program(["encoder_a", "model", "encoder_b"])
    assert apply(gm, encoders=ENCODERS).num_matches == 4  # two nodes, two hooks
    before = gm.code
    assert apply(gm, encoders=ENCODERS).num_matches == 0
    assert gm.code == before


def test_a_graph_without_a_launch_costs_no_wait(owner):
    gm = program(["encoder_a"])
    apply(gm, encoders=ENCODERS)
    gm(torch.ones(1, 2))
    assert (owner.stats.drains, owner.stats.drained_seconds) == (0, 0.0)


# ---------------------------------------------------------------- surviving


def test_drains_survive_dead_code_elimination_recompile_deepcopy_and_pickle(owner):
    gm = program(["encoder_a", "model", "encoder_b"])
    apply(gm, encoders=ENCODERS)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    gm.graph.lint()
    for copied in (gm, copy.deepcopy(gm)):
        assert shape(copied) == ["drain", "encoder_a", "model", "drain", "encoder_b"]
        nothing()
        copied(torch.ones(1, 2))
        assert copied.encoder_a.met_pending == [False]
    encoder = pickle.loads(pickle.dumps(gm.encoder_b))
    nothing()
    encoder(torch.ones(1, 2))
    assert encoder.met_pending[-1] is False


# ---------------------------------------------------------------- finding encoders


def test_a_name_that_matches_no_module_is_an_error_with_the_name_that_was_meant():
    gm = program(["encoder_a"])
    with pytest.raises(DrainError, match=r"encoders: 'encodr_a' matches no module of .*; did you mean 'encoder_a'"):
        apply(gm, encoders=["encodr_a"])
    assert shape(gm) == ["encoder_a"]


def test_marked_encoders_are_found_without_a_name():
    gm = program(["encoder_a", "model", "encoder_b"])
    mark_encoder(gm.encoder_b)
    info = apply(gm)
    assert shape(gm) == ["encoder_a", "model", "drain", "encoder_b"] and info.num_matches == 2


def test_of_a_match_and_a_match_inside_it_the_outer_one_counts():
    gm = program(["encoder_a"])
    apply(gm, encoders=["encoder_a*"])  # matches encoder_a.proj as well
    assert {(site.encoder, site.kind) for site in drain_plan(gm).sites} == {
        ("encoder_a", "node"),
        ("encoder_a", "hook"),
    }


def test_without_encoders_nothing_happens():
    gm = program(["encoder_a"])
    info = apply(gm)
    assert info.skipped and shape(gm) == ["encoder_a"]


def test_the_plan_says_where_drains_stand():
    gm = program(["encoder_a", "encoder_b"])
    apply(gm, encoders=ENCODERS)
    plan = drain_plan(gm)
    assert [(site.graph, site.encoder, site.kind) for site in plan.sites] == [
        ("graph", "encoder_a", "node"),
        ("graph", "encoder_b", "none"),
        ("", "encoder_a", "hook"),
        ("", "encoder_b", "hook"),
    ]
    assert "graph: encoder_b: nothing can be pending" in plan.to_text()
    assert json.loads(json.dumps(plan.to_json()))["sites"][0]["kind"] == "node"


# ---------------------------------------------------------------- orchestrators


class VisionLoop(nn.Module):
    """A wrapper that embeds images inside its forward, between two consumers."""

    def __init__(self) -> None:
        super().__init__()
        self.max_draft_len = 1
        self.target_model, self.draft_model = consumer(*TARGET_ARGS), consumer(*DRAFT_ARGS)
        self.vision = Encoder()
        self.register_buffer("pixels", torch.ones(1, 2))

    def args_of(self, csi: Any, module: GraphModule) -> dict[str, torch.Tensor]:
        names = {node.target for node in module.graph.nodes if node.op == "placeholder"}
        return {name: value for name, value in csi.named_args.items() if name in names}

    def forward(self, csi: Any) -> torch.Tensor:
        features = self.vision(self.pixels)
        tokens, _ = self.target_model(**self.args_of(csi, self.target_model))
        csi.info.switch_to_generate_()
        drafts, _ = self.draft_model(**self.args_of(csi, self.draft_model))
        return tokens.sum() + drafts.sum() + self.vision(features).sum()


def vision_shape(gm: GraphModule) -> list[str]:
    return [name for name in shape(gm) if name in ("drain", "vision")]


def scope(wrapper: nn.Module, cm: Any) -> None:
    transform = TransformRegistry.get("scope_host_mirrors").from_kwargs(stage="cache_init", mode="graph")
    transform(wrapper, cm, None, SharedConfig(), 0)


def test_a_traced_orchestrator_keeps_the_encoder_as_one_call_and_drains_before_each(owner):
    wrapper, cm = VisionLoop(), interface(1)
    apply(wrapper, cm, encoders=["vision"])
    nest(cm, [], 2, 1)
    expected = wrapper(copy.deepcopy(cm))
    traced = trace_orchestrator(wrapper, cm)
    assert vision_shape(traced) == ["drain", "vision", "drain", "vision"]
    nothing()
    assert torch.equal(traced(cm), expected)
    assert wrapper.vision.met_pending == [False] * 4


def test_scoping_after_draining_keeps_the_drains_in_every_variant(owner):
    wrapper, cm = VisionLoop(), interface(1)
    apply(wrapper, cm, encoders=["vision"])
    scope(wrapper, cm)
    graphs = orchestrator_graphs(wrapper)
    assert graphs
    for gm in graphs.values():
        assert vision_shape(gm) == ["drain", "vision", "drain", "vision"]
    copied = copy.deepcopy(wrapper)
    for gm in orchestrator_graphs(copied).values():
        assert vision_shape(gm) == ["drain", "vision", "drain", "vision"]


def test_draining_after_scoping_works_when_the_model_marks_its_encoder(owner):
    wrapper, cm = VisionLoop(), interface(1)
    mark_encoder(wrapper.vision)
    scope(wrapper, cm)
    assert {tuple(vision_shape(gm)) for gm in orchestrator_graphs(wrapper).values()} == {("vision", "vision")}
    apply(wrapper, cm)
    assert {tuple(vision_shape(gm)) for gm in orchestrator_graphs(wrapper).values()} == {
        ("drain", "vision", "drain", "vision")
    }


def test_draining_after_scoping_through_the_encoder_says_what_to_do(owner):
    wrapper, cm = VisionLoop(), interface(1)
    scope(wrapper, cm)
    with pytest.raises(DrainError, match=r"traced through encoder 'vision'.*in front of scope_host_mirrors"):
        apply(wrapper, cm, encoders=["vision"])


def test_drains_are_no_unknown_effect_for_mirrors(owner):
    with_drains, without = VisionLoop(), VisionLoop()
    mark_encoder(without.vision)
    apply(with_drains, None, encoders=["vision"])
    for wrapper in (with_drains, without):
        scope(wrapper, interface(1))

    def narrowed(wrapper: nn.Module) -> list[Any]:
        return [
            node.kwargs.get("active_args")
            for gm in orchestrator_graphs(wrapper).values()
            for node in gm.graph.nodes
            if getattr(node.target, "__name__", "") == "mutate"
        ]

    assert narrowed(with_drains) == narrowed(without) != []


def test_an_eager_wrapper_drains_by_hook(owner):
    wrapper, cm = VisionLoop(), interface(1)
    apply(wrapper, cm, encoders=["vision"], mode="hooks")
    nest(cm, [], 2, 1)
    nothing()
    wrapper(cm)
    assert wrapper.vision.met_pending == [False, False]
    assert owner.stats.drains == 1


def test_mode_hooks_leaves_graphs_without_nodes_also_those_that_are_traced_later(owner):
    gm = program(["encoder_a"])
    assert apply(gm, encoders=ENCODERS, mode="hooks").num_matches == 2
    assert apply(gm, encoders=ENCODERS, mode="hooks").num_matches == 0
    assert shape(gm) == ["encoder_a"]
    wrapper, cm = VisionLoop(), interface(1)
    apply(wrapper, cm, encoders=["vision"], mode="hooks")
    scope(wrapper, cm)
    assert {tuple(vision_shape(gm)) for gm in orchestrator_graphs(wrapper).values()} == {("vision", "vision")}
    assert {(site.encoder, site.kind) for site in drain_plan(wrapper).sites} == {("vision", "hook")}
    nest(cm, [], 2, 1)
    nothing()
    wrapper(cm)  # by its graph, which the hook drains for
    assert wrapper.vision.met_pending[-2:] == [False, False]
    assert owner.stats.drains == 1


def test_a_graphs_own_call_drains_once_whether_its_encoder_is_hooked_or_not(owner):
    gm = program(["encoder_a", "encoder_b"])
    apply(gm, encoders=ENCODERS)
    nothing()
    gm(torch.ones(1, 2))
    assert (owner.stats.drains, owner.stats.idle_drains) == (1, 0)
    nothing()
    gm.encoder_b(torch.ones(1, 2))
    assert (owner.stats.drains, owner.stats.idle_drains) == (2, 0)


def test_an_eager_call_waits_for_other_owners_too():
    layer = ThreadStreams()
    mine, other, log = HostFuncOwner("mine", layer), HostFuncOwner("other", layer), []
    gm = program(["encoder_a"])
    apply(gm, encoders=ENCODERS, mode="hooks")
    with use_owner(other):
        for value in range(100):
            hostfunc(log.append)(value)
    with use_owner(mine):
        gm.encoder_a(torch.ones(1, 2))
    assert len(log) == 100
    other.drain()
    layer.close()


def test_mode_graph_without_a_graph_is_an_error(owner):
    with pytest.raises(DrainError, match="has no orchestrator graph"):
        apply(VisionLoop(), interface(1), encoders=["vision"], mode="graph")


def test_a_launch_in_the_orchestrators_own_code_cannot_be_traced(owner):
    class Launches(VisionLoop):
        def forward(self, csi: Any) -> torch.Tensor:
            nothing()
            return super().forward(csi)

    cm = interface(1)
    nest(cm, [], 2, 1)
    with pytest.raises(Exception, match=r"launch it in the forward of a submodule with meta"):
        trace_orchestrator(Launches(), cm)
    assert owner.stats.launches == 0


def test_a_drain_node_waits_for_the_stream():
    layer = ThreadStreams()
    owner, log = HostFuncOwner("engine", layer), []
    gm = program(["encoder_a"])
    apply(gm, encoders=ENCODERS)
    with use_owner(owner):
        for value in range(100):
            hostfunc(log.append)(value)
        gm(torch.ones(1, 2))
        assert len(log) == 100 and not hostfuncs_pending()
        drain_hostfuncs()
    layer.close()
