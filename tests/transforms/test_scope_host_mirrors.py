"""The pass scope_host_mirrors on hand-built graphs: what it narrows, keeps, repairs and refuses."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, GraphModule

from auto_deploy_ext import SharedConfig, TransformRegistry, record_mirrors, register_mutation
from auto_deploy_ext.analysis.program import UnknownEffectError
from auto_deploy_ext.effects import HOST_READERS, MUTATIONS, register_host_reader
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.rewriting.scoping import ScopeError, ScopeOptions, scope_graphs
from auto_deploy_ext.rewriting.strategies import StaleReadError
from tests.orchestrator_programs import (
    OFFSET,
    SWITCH,
    Builder,
    branches_of,
    build,
    consumer,
    make_interface,
    moved_names,
    overrides,
    refreshed,
    stale_reads,
)

PAGED = ("cu_num_pages_host", "cu_seqlen_host", "last_page_len_host", "seq_len_with_cache_host")


def scope(gm: nn.Module, cm: Any, **fields: Any) -> Any:
    """Run the transform; returns its TransformInfo."""
    transform = TransformRegistry.get("scope_host_mirrors").from_kwargs(
        **{"stage": "cache_init", "strategy": "override", **fields}
    )
    assert transform(gm, cm, None, SharedConfig(), 0) is gm
    return gm.meta["_autodeploy"]["transform_history"]["scope_host_mirrors"]


def scoped(steps: list[Any], consumers: dict[str, tuple[str, ...]], cm: Any = None, **fields: Any) -> GraphModule:
    """Build a program, run the transform, and check the graph's form."""
    if cm is None:
        cm = make_interface({n for names in consumers.values() for n in names})
    gm = build(steps, consumers)
    scope(gm, cm, **fields)
    gm.graph.lint()
    return gm


# -- what is narrowed ----------------------------------------------------------------------------------------------


def test_a_draft_loop_moves_what_the_draft_reads_at_the_call_that_wrote_it() -> None:
    loop = [("consume", "target"), *["switch", ("copy", "input_ids"), "offset", ("consume", "draft")] * 2]
    gm = scoped(loop, {"target": ("cu_seqlen_host", "input_pos_host"), "draft": PAGED})
    pages = ("cu_num_pages_host", "last_page_len_host", "seq_len_with_cache_host")
    assert overrides(gm) == [
        (SWITCH, ("cu_seqlen_host",)),
        (OFFSET, pages),
        (SWITCH, ()),  # the batch is generate-only by now
        (OFFSET, pages),
    ]


def test_a_mutation_without_a_consumer_after_it_moves_nothing() -> None:
    gm = scoped([("consume", "draft"), "switch", "offset"], {"draft": PAGED})
    assert overrides(gm) == [(SWITCH, ()), (OFFSET, ())]


def test_two_mutations_before_one_consumer_cost_one_transfer() -> None:
    gm = scoped(["offset", "offset", ("consume", "draft")], {"draft": ("input_pos_host",)})
    assert overrides(gm) == [(OFFSET, ()), (OFFSET, ("input_pos_host",))]


def test_two_consumers_with_different_needs_get_each_its_own() -> None:
    steps = ["offset", ("consume", "a"), "offset", ("consume", "b")]
    gm = scoped(steps, {"a": ("input_pos_host",), "b": ("cu_num_pages_host",)})
    assert overrides(gm) == [(OFFSET, ("input_pos_host",)), (OFFSET, ("cu_num_pages_host",))]


def test_a_consumer_reads_through_calls_that_do_not_write_its_buffers() -> None:
    """Liveness, not adjacency: `b` reads cu_seqlen long after the switch."""
    steps = ["switch", ("consume", "a"), "offset", ("consume", "b")]
    gm = scoped(steps, {"a": ("input_pos_host",), "b": ("cu_seqlen_host",)})
    assert overrides(gm) == [(SWITCH, ("cu_seqlen_host", "input_pos_host")), (OFFSET, ())]


def test_a_placeholder_is_known_by_its_target_not_by_its_node_name() -> None:
    graph = Graph()
    graph.call_function(len, ((),), name="cu_seqlen_host")  # takes the name, so FX renames the placeholder
    node = graph.placeholder("cu_seqlen_host")
    graph.output(node)
    assert node.name != node.target
    builder = Builder({"draft": GraphModule(nn.Module(), graph)})
    builder.add(["switch", ("consume", "draft")])
    gm = builder.finish()
    scope(gm, make_interface(["cu_seqlen_host"]))
    assert overrides(gm) == [(SWITCH, ("cu_seqlen_host",))]


def test_a_switch_that_may_do_nothing_does_not_end_what_came_before() -> None:
    gm = scoped(["offset", "switch", ("consume", "draft")], {"draft": ("input_pos_host",)})
    assert overrides(gm) == [(OFFSET, ("input_pos_host",)), (SWITCH, ("input_pos_host",))]


@pytest.mark.parametrize(
    "generating, expected", [(True, [("input_pos_host",), ()]), (False, [(), ("input_pos_host",)])]
)
def test_a_switch_whose_effect_the_guards_tell_is_taken_at_its_word(generating: bool, expected: Any) -> None:
    gm = build(["offset", "switch", ("consume", "draft")], {"draft": ("input_pos_host",)})
    gm.meta["generate_only"] = generating
    scope(gm, make_interface(["input_pos_host"]))
    assert [names for _, names in overrides(gm)] == expected


def test_only_activated_mirrors_enter_an_override() -> None:
    """The draft's placeholder is no active arg, so no override may name it: it is refreshed before the draft."""
    gm = build(["switch", ("get", "cu_seqlen_host"), ("consume", "draft")], {"draft": ("input_pos_host",)})
    scope(gm, make_interface(["input_pos_host"]))
    assert overrides(gm) == [(SWITCH, ("input_pos_host",))]
    assert refreshed(gm) == [("cu_seqlen_host",)]


def test_batch_info_is_no_mirror() -> None:
    gm = scoped(["switch", ("consume", "draft")], {"draft": ("batch_info_host",)})
    assert overrides(gm) == [(SWITCH, ())]


def test_twins_of_other_pools_are_written_and_moved_too() -> None:
    names = ("cu_num_pages_g1_host", "last_page_len_host", "seq_len_with_cache_g1_host")
    gm = scoped(["offset", ("consume", "draft")], {"draft": names}, make_interface(names, pools=2))
    assert overrides(gm) == [(OFFSET, names)]


def test_explicit_readers_and_host_prepare_functions_are_consumers() -> None:
    cm = make_interface(["cu_seqlen_host", "input_pos_host"], prepared=["input_pos_host"])
    gm = scoped(["switch", ("get", "cu_seqlen_host"), "offset", "prepare"], {}, cm)
    assert overrides(gm) == [(SWITCH, ("cu_seqlen_host",)), (OFFSET, ("input_pos_host",))]


def test_unnesting_reads_the_sequence_lengths() -> None:
    builder = Builder({})
    builder.add(["switch"])
    builder.graph.call_method("unnest_sequences", (builder.info, builder.tokens))
    gm = builder.finish()
    scope(gm, make_interface(["seq_len_host"]))
    assert overrides(gm) == [(SWITCH, ("seq_len_host",))]


def test_live_out_is_read_after_the_forward() -> None:
    cm = make_interface(["input_pos_host", "cu_seqlen_host"])
    gm = scoped(["switch", "offset"], {}, cm, live_out=["input_pos_host"])
    assert overrides(gm) == [(SWITCH, ()), (OFFSET, ("input_pos_host",))]


def test_live_out_of_a_buffer_that_no_call_mirrors_is_refreshed_at_the_end() -> None:
    cm = make_interface(["input_ids_host"])
    gm = scoped([("copy", "input_ids")], {}, cm, live_out=["input_ids_host"])
    assert refreshed(gm) == [("input_ids_host",)]
    assert [n.op for n in gm.graph.nodes][-1] == "output"


# -- nested graphs and branches ------------------------------------------------------------------------------------


def test_a_mutation_inside_a_branch_joins_with_the_other_side() -> None:
    steps = ["offset", ("branch", ["offset"], []), ("consume", "draft")]
    gm = scoped(steps, {"draft": ("input_pos_host",)})
    assert overrides(gm) == [(OFFSET, ("input_pos_host",)), (OFFSET, ("input_pos_host",))]


def test_a_buffer_that_both_sides_write_is_dead_before_the_branch() -> None:
    steps = ["offset", ("branch", ["offset"], ["offset", ("consume", "draft")]), ("consume", "draft")]
    gm = scoped(steps, {"draft": ("input_pos_host",)})
    assert [names for _, names in overrides(gm)] == [(), ("input_pos_host",), ("input_pos_host",)]


def test_events_of_a_nested_graph_take_part_in_order_and_its_calls_survive() -> None:
    steps = ["offset", ("nested", ["switch", ("consume", "draft")]), "offset", ("nested", [("consume", "draft")])]
    gm = scoped(steps, {"draft": ("cu_seqlen_host", "input_pos_host")})
    expected = [
        (OFFSET, ("input_pos_host",)),
        (SWITCH, ("cu_seqlen_host", "input_pos_host")),
        (OFFSET, ("input_pos_host",)),
    ]
    assert overrides(gm) == expected
    gm.graph.eliminate_dead_code()
    assert overrides(gm) == expected


def test_a_nested_graph_called_twice_gets_what_either_call_needs() -> None:
    builder = Builder({"a": consumer("input_pos_host"), "b": consumer("cu_num_pages_host")})
    name, body = builder._body(["offset"])
    builder.root.add_module(name, body)
    for reader in ("a", "b"):
        builder.graph.call_module(name, (builder.csi, builder.offset, builder.tokens))
        builder.add([("consume", reader)])
    gm = builder.finish()
    scope(gm, make_interface(["input_pos_host", "cu_num_pages_host"]))
    assert [n.kwargs["active_args"] for n in body.graph.nodes if n.target is ops.mutate] == [
        ("cu_num_pages_host", "input_pos_host")
    ]


def test_consumers_two_levels_down_are_found() -> None:
    builder = Builder({})
    inner = nn.Module()
    inner.add_module("draft", consumer("cu_seqlen_host"))
    builder.root.add_module("outer", inner)
    builder.add(["switch"])
    named = builder.graph.call_function(getattr, (builder.csi, "named_args"))
    mirror = builder.graph.call_function(operator.getitem, (named, "cu_seqlen_host"))
    builder.results.append(builder.graph.call_module("outer.draft", (mirror,)))
    gm = builder.finish()
    scope(gm, make_interface(["cu_seqlen_host"]))
    assert overrides(gm) == [(SWITCH, ("cu_seqlen_host",))]


# -- writes that no mutation mirrors -------------------------------------------------------------------------------


def test_a_device_only_copy_is_refreshed_before_its_reader_and_nowhere_else() -> None:
    gm = scoped(["switch", ("copy", "input_ids"), ("consume", "draft")], {"draft": ("input_ids_host",)})
    assert overrides(gm) == [(SWITCH, ())]
    assert refreshed(gm) == [("input_ids_host",)]


def test_a_write_through_a_view_makes_the_mirror_stale() -> None:
    gm = scoped(["switch", ("inplace", "seq_len"), ("consume", "draft")], {"draft": ("seq_len_host",)})
    assert overrides(gm) == [(SWITCH, ())]
    assert refreshed(gm) == [("seq_len_host",)]


def test_an_untouched_copy_costs_nothing() -> None:
    gm = scoped([("copy", "token_gather_indices"), ("consume", "draft")], {"draft": ("seq_len_host",)})
    assert refreshed(gm) == []


# -- unknown calls -------------------------------------------------------------------------------------------------


def test_everything_is_up_to_date_at_an_unknown_call_and_after_it_for_who_reads() -> None:
    steps = ["switch", ("copy", "input_ids"), "unknown", ("consume", "draft")]
    gm = scoped(steps, {"draft": ("cu_seqlen_host",)})
    assert overrides(gm) == [(SWITCH, None)]
    assert refreshed(gm) == [("input_ids_host",), ("cu_seqlen_host",)]


def test_an_unknown_call_can_be_an_error_that_names_it_and_leaves_the_graph() -> None:
    gm = build(["switch", "unknown"], {})
    code = gm.code
    with pytest.raises(UnknownEffectError, match=r"frobnicate.*register_mutation"):
        scope(gm, make_interface(["cu_seqlen_host"]), on_unknown="error")
    assert gm.code == code
    assert gm.graph.python_code("self").src == gm.graph.python_code("self").src


def test_a_consumer_with_kwargs_is_unknown() -> None:
    graph = Graph()
    graph.output(graph.placeholder("**kwargs"))
    builder = Builder({"draft": GraphModule(nn.Module(), graph)})
    builder.root.add_module("draft", builder.consumers["draft"])
    builder.add(["switch"])
    builder.results.append(builder.graph.call_module("draft", (), {"x": builder.tokens}))
    gm = builder.finish()
    scope(gm, make_interface(["cu_seqlen_host"]))
    assert overrides(gm) == [(SWITCH, None)]


def test_a_registered_call_is_unknown_no_more() -> None:
    register_host_reader("frobnicate", ["seq_len_host"])
    try:
        gm = scoped(["switch", "unknown"], {}, make_interface(["cu_seqlen_host", "seq_len_host"]))
    finally:
        del HOST_READERS["frobnicate"]
    assert overrides(gm) == [(SWITCH, ("seq_len_host",))]


def test_a_registered_mutation_without_an_override_is_repaired_after() -> None:
    register_mutation("frobnicate", writes=["cu_seqlen"])
    try:
        gm = scoped(["switch", "unknown", ("consume", "draft")], {"draft": ("cu_seqlen_host", "seq_len_host")})
    finally:
        del MUTATIONS["frobnicate"]
    assert overrides(gm) == [(SWITCH, ("seq_len_host",))]
    assert refreshed(gm) == [("cu_seqlen_host",)]


# -- hand-narrowed calls -------------------------------------------------------------------------------------------


def test_a_sound_hand_narrowed_call_keeps_its_names() -> None:
    kept = {"cu_seqlen_host", "input_pos_host", "position_ids"}
    gm = scoped([("switch", kept), ("consume", "draft")], {"draft": ("cu_seqlen_host",)})
    assert overrides(gm) == [(SWITCH, tuple(sorted(kept)))]


def test_a_too_narrow_hand_written_override_is_widened_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    cm = make_interface(["cu_seqlen_host", "input_pos_host"])
    gm = build([("switch", {"cu_seqlen_host"}), ("consume", "draft")], {"draft": ("cu_seqlen_host", "input_pos_host")})
    with caplog.at_level("WARNING"):
        scope(gm, cm)
    assert overrides(gm) == [(SWITCH, ("cu_seqlen_host", "input_pos_host"))]
    assert "too narrow: input_pos_host" in caplog.text


def test_a_too_narrow_override_is_refused_with_the_path_that_proves_it() -> None:
    steps = [("switch", {"cu_seqlen_host"}), ("copy", "input_ids"), ("consume", "draft")]
    gm = build(steps, {"draft": ("cu_seqlen_host", "input_pos_host")})
    code = gm.code
    with pytest.raises(StaleReadError) as error:
        scope(gm, make_interface(["cu_seqlen_host", "input_pos_host"]), insert_missing=False)
    assert gm.code == code
    lines = [line.strip() for line in str(error.value).splitlines()]
    assert lines[0].endswith("draft reads input_pos_host, which is stale there:")
    assert lines[1:4] == [
        "switch_to_generate_ (%switch_to_generate_) writes input_pos on the device",
        "then copy_ (%copy_), which leaves input_pos and its mirror as they are",
        "then draft (%draft) reads input_pos_host",
    ]


def test_a_right_orchestrator_is_not_refused() -> None:
    gm = build(["switch", ("consume", "draft")], {"draft": ("cu_seqlen_host",)})
    scope(gm, make_interface(["cu_seqlen_host"]), insert_missing=False)
    assert overrides(gm) == [(SWITCH, ("cu_seqlen_host",))]


def test_an_override_computed_in_the_graph_from_constants_is_read() -> None:
    builder = Builder({"draft": consumer("cu_seqlen_host")})
    names = builder.graph.call_function(ops.make_set, ("cu_seqlen_host", "input_pos_host"))
    builder.graph.call_method(SWITCH, (builder.info, names))
    builder.add([("consume", "draft")])
    gm = builder.finish()
    scope(gm, make_interface(["cu_seqlen_host", "input_pos_host"]))
    assert overrides(gm) == [(SWITCH, ("cu_seqlen_host", "input_pos_host"))]
    assert [n.args for n in gm.graph.nodes if n.target is ops.mutate] == [(builder.info, SWITCH)]


def test_an_override_that_nobody_can_read_is_replaced_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    builder = Builder({"draft": consumer("cu_seqlen_host")})
    names = builder.graph.call_function(set, (builder.tokens,))
    builder.graph.call_method(SWITCH, (builder.info,), {"active_args_override": names})
    builder.add([("consume", "draft")])
    gm = builder.finish()
    with caplog.at_level("WARNING"):
        scope(gm, make_interface(["cu_seqlen_host"]))
    assert overrides(gm) == [(SWITCH, ("cu_seqlen_host",))]
    assert "at run time" in caplog.text


# -- the rewritten graph lasts -------------------------------------------------------------------------------------

LOOP = [
    ("consume", "draft"),
    *["switch", ("copy", "input_ids"), "offset", ("consume", "draft")] * 2,
    ("fill", "seq_len"),
]


def test_a_second_run_changes_not_a_byte() -> None:
    cm = make_interface([*PAGED, "input_ids_host"])
    gm = build([*LOOP, "unknown", ("get", "input_ids_host")], {"draft": (*PAGED, "input_ids_host")})
    assert scope(gm, cm).num_matches == 4
    code, nodes = gm.code, [(n.name, n.op, n.args, n.kwargs) for n in gm.graph.nodes]
    assert scope(gm, cm).num_matches == 0
    assert gm.code == code
    assert [(n.name, n.op, n.args, n.kwargs) for n in gm.graph.nodes] == nodes


def test_it_survives_cleaning_deepcopy_and_pickle() -> None:
    gm = scoped(LOOP, {"draft": PAGED})
    code, expected = gm.code, overrides(gm)
    for other in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm)), pickle.loads(pickle.dumps(copy.deepcopy(gm)))):
        other.graph.eliminate_dead_code()
        other.recompile()
        other.graph.lint()
        assert other.code == code
        assert overrides(other) == expected
        metas = [n.meta.get("active_args") for n in other.graph.nodes if n.target is ops.mutate and n.args[1] == SWITCH]
        assert metas == [("cu_seqlen_host",), ()]


def test_nodes_carry_the_names_they_are_about() -> None:
    gm = scoped(LOOP, {"draft": PAGED})
    mutations = [n for n in gm.graph.nodes if n.target is ops.mutate and n.args[1] != "copy_"]
    assert all(n.meta["active_args"] == n.kwargs["active_args"] for n in mutations)
    calls = [n for n in gm.graph.nodes if n.op == "call_module"]
    assert [n.meta["active_args"] for n in calls] == [PAGED] * 3


def test_a_changed_consumer_is_followed_by_the_next_run() -> None:
    cm = make_interface(PAGED)
    gm = build(["switch", "offset", ("consume", "draft")], {"draft": ("cu_seqlen_host",)})
    scope(gm, cm)
    gm.draft = consumer("cu_num_pages_host")
    call = next(n for n in gm.graph.nodes if n.op == "call_module")
    getitem = call.kwargs["cu_seqlen_host"]
    getitem.args = (getitem.args[0], "cu_num_pages_host")
    call.kwargs = {"cu_num_pages_host": getitem}
    scope(gm, cm)
    assert overrides(gm) == [(SWITCH, ()), (OFFSET, ("cu_num_pages_host",))]


def test_the_rewritten_graph_runs_and_transfers_what_the_plan_says() -> None:
    cm = make_interface(PAGED)
    gm = scoped(["switch", "offset", ("consume", "draft")], {"draft": PAGED}, cm)
    cm.info.nest_sequences(
        [5, 6, 7, 8],
        [0, 3, 4],
        [0, 9],
        cache_loc_per_pool=[[0, 1]],
        cu_num_pages_per_pool=[[0, 1, 2]],
        slot_idx=[0, 1],
    )
    with record_mirrors(cm.info) as transfers:
        gm(cm, torch.tensor([1, 0], dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32))
    assert [(t.trigger, t.names) for t in transfers] == [
        (SWITCH, ("cu_seqlen_host",)),
        (OFFSET, ("cu_num_pages_host", "last_page_len_host", "seq_len_with_cache_host")),
    ]
    buffer = cm.info._input_buffer
    for name in ("cu_num_pages", "cu_seqlen", "last_page_len", "seq_len_with_cache"):
        assert torch.equal(buffer.get_host_view(name, True), buffer.get_view(name, True))


def test_a_mirror_stale_at_entry_is_moved_only_then() -> None:
    cm = make_interface(["seq_len_host"])
    gm = scoped([("consume", "draft")], {"draft": ("seq_len_host",)}, cm)
    cm.info.set_example_sequence([[1, 2], [3, 4]])
    with record_mirrors(cm.info) as transfers:
        gm(cm, None, None)
        cm.info.copy_("seq_len", torch.tensor([1, 1], dtype=torch.int32))
        gm(cm, None, None)
    assert [t.names for t in transfers] == [("seq_len_host",)]


# -- configuration -------------------------------------------------------------------------------------------------


def test_fields_that_do_not_exist_are_refused() -> None:
    transform = TransformRegistry.get("scope_host_mirrors")
    with pytest.raises(ValueError, match="on_unkown"):
        transform.from_kwargs(on_unkown="full")
    with pytest.raises(ValueError, match="run_per_gm"):
        transform.from_kwargs(run_per_gm=True)


def test_live_out_must_name_mirrors() -> None:
    gm = build(["switch"], {})
    with pytest.raises(ScopeError, match="cu_seqlens_host"):
        scope(gm, make_interface(), live_out=["cu_seqlens_host"])


def test_a_graph_that_is_no_orchestrator_is_left_alone() -> None:
    gm = consumer("cu_seqlen_host")
    code = gm.code
    info = scope(gm, make_interface(["cu_seqlen_host"]))
    assert (info.skipped, info.num_matches) == (True, 0)
    assert gm.code == code


# -- laws ----------------------------------------------------------------------------------------------------------

BUFFERS = ("cu_seqlen", "input_pos", "input_ids", "seq_len", "cu_num_pages", "cu_num_pages_g1", "token_gather_indices")
MIRRORS = tuple(f"{name}_host" for name in BUFFERS)
INTERFACES = {
    "all": make_interface(MIRRORS, pools=2, prepared=["input_pos_host"]),
    "some": make_interface(MIRRORS[::2], pools=2, prepared=["input_ids_host"]),
    "none": make_interface((), pools=2),
}

STRATEGIES = ("auto", "copy", "override", "replay")


def graphs_of(gm: GraphModule) -> list[GraphModule]:
    """A graph and the nested ones in it."""
    return [m for m in gm.modules() if isinstance(m, GraphModule)]


leaf_steps = st.one_of(
    st.sampled_from(["switch", "offset", "rescatter", "prepare"]),
    st.tuples(st.just("copy"), st.sampled_from(BUFFERS)),
    st.tuples(st.sampled_from(["inplace", "fill"]), st.sampled_from(BUFFERS)),
    st.tuples(st.just("get"), st.sampled_from(MIRRORS)),
    st.tuples(st.just("consume"), st.sampled_from(["a", "b"])),
)
#: programs whose every transfer is the pass's own.
plain_steps = st.recursive(
    leaf_steps,
    lambda inner: st.one_of(
        st.tuples(st.just("branch"), st.lists(inner, max_size=3), st.lists(inner, max_size=3)),
        st.tuples(st.just("nested"), st.lists(inner, max_size=3)),
    ),
    max_leaves=6,
)
hand_narrowed = st.tuples(st.sampled_from(["switch", "offset"]), st.sets(st.sampled_from(MIRRORS), max_size=3))
consumer_args = st.fixed_dictionaries({n: st.lists(st.sampled_from(MIRRORS), unique=True, max_size=3) for n in "ab"})


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.one_of(plain_steps, hand_narrowed, st.just("unknown")), max_size=10),
    consumer_args,
    st.sampled_from(sorted(INTERFACES)),
    st.sampled_from(STRATEGIES),
    st.sampled_from(STRATEGIES),
)
def test_no_consumer_of_any_program_reads_a_stale_mirror_whatever_ran_before(
    steps: Any, consumers: Any, which: str, strategy: str, earlier: str
) -> None:
    assume(branches_of(steps) <= 3)
    cm = INTERFACES[which]
    gm = build(steps, consumers)
    scope_graphs({"graph": gm}, cm, ScopeOptions(strategy=strategy))
    assert list(stale_reads(gm, cm)) == []
    code = [g.code for g in graphs_of(gm)]
    again = build(steps, consumers)
    for each in (earlier, strategy, strategy):
        scope_graphs({"graph": again}, cm, ScopeOptions(strategy=each))
    assert [g.code for g in graphs_of(again)] == code


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(plain_steps, max_size=8), consumer_args, st.sampled_from(sorted(INTERFACES)), st.sampled_from(STRATEGIES)
)
def test_without_any_one_name_some_consumer_reads_a_stale_mirror(
    steps: Any, consumers: Any, which: str, strategy: str
) -> None:
    assume(branches_of(steps) <= 3)
    cm = INTERFACES[which]
    gm = build(steps, consumers)
    scope_graphs({"graph": gm}, cm, ScopeOptions(strategy=strategy))
    for node, name in moved_names(gm):
        assert any(stale_reads(gm, cm, drop=(node, name))), f"{name} of {node.format_node()} is of no use"


BETWEEN = ("annotate_active_args", "scope_host_mirrors", "fuse_metadata_mutations", "check_capture")


@pytest.mark.parametrize("key", BETWEEN)
@pytest.mark.parametrize(
    ("stage", "why"),
    [
        ("export", "comes before cache_init"),
        ("post_load_fusion", "comes before cache_init"),
        ("compile", "is too late: models are compiled by then"),
    ],
)
def test_a_stage_without_caches_or_behind_compilation_is_refused(key: str, stage: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"{key}: stage {stage} {why}.*; set stage: cache_init"):
        TransformRegistry.get(key).from_kwargs(stage=stage)


@pytest.mark.parametrize("key", BETWEEN)
def test_a_stage_between_caches_and_compilation_is_taken(key: str) -> None:
    for stage in ("cache_init", "visualize"):
        assert TransformRegistry.get(key).from_kwargs(stage=stage).config.stage.value == stage
