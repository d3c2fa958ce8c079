"""Liveness and staleness: what is still going to be read, what is found stale, and which write is to blame."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from auto_deploy_ext import register_mutation
from auto_deploy_ext.analysis.events import Event, Kind, Program, Setting
from auto_deploy_ext.analysis.interface_nodes import interface_roots, is_orchestrator_graph
from auto_deploy_ext.analysis.liveness import StaleRead, liveness, nothing_moved, proof_path, stale_reads
from auto_deploy_ext.analysis.program import UnknownEffectError, collect
from auto_deploy_ext.effects import MUTATIONS
from auto_deploy_ext.orchestrator import ops
from tests.orchestrator_programs import Builder, build, consumer, make_interface

CM = make_interface(["cu_seqlen_host", "input_pos_host", "seq_len_host"], pools=2, prepared=["seq_len_host"])
CONSUMERS = {"a": ("input_pos_host",), "b": ("cu_seqlen_host", "input_pos_host")}


def program(steps: list[Any], generate_only: bool | None = None, **setting: Any) -> Program:
    gm = build(steps, CONSUMERS)
    if generate_only is not None:
        gm.meta["generate_only"] = generate_only
    return collect(gm, Setting.of(CM, **setting))


def of_mutations(steps: list[Any], live_out: tuple[str, ...] = (), **options: Any) -> list[tuple[str, ...]]:
    """The mirrors that are live after each mutation, among what it writes."""
    result = program(steps, **options)
    live = liveness(result, result.table.bits(live_out)).live
    return [
        result.table.mirrors(e.writes & live[e.order])
        for e in result.flat
        if e.kind is Kind.MUTATION and e.label != "copy_"
    ]


def arrivals(steps: list[Any]) -> list[tuple[str, tuple[str, ...], list[str]]]:
    """Of each consumer that finds something stale when nothing is mirrored: name, mirrors and last writes."""
    result = program(steps)
    found = [r for r in stale_reads(result, nothing_moved) if r.stale]
    return [(r.consumer.name, result.table.mirrors(r.stale), [e.name for e, _ in r.writes]) for r in found]


def test_a_mirror_is_live_until_its_buffer_is_written_again() -> None:
    steps = ["offset", ("consume", "a"), "offset", "offset", ("consume", "a"), "offset"]
    assert of_mutations(steps) == [("input_pos_host",), (), ("input_pos_host",), ()]


def test_what_is_known_of_the_batch_decides_what_a_switch_ends() -> None:
    steps = ["offset", "switch", ("consume", "a"), "switch"]
    assert of_mutations(steps) == [("input_pos_host",), ("input_pos_host",), ()]
    assert of_mutations(steps, generate_only=False) == [(), ("input_pos_host",), ()]
    assert of_mutations(steps, generate_only=True) == [("input_pos_host",), (), ()]


def test_after_a_branch_the_batch_is_what_both_sides_leave() -> None:
    one = [("branch", ["switch"], []), "switch", ("consume", "a")]
    both = [("branch", ["switch"], ["switch"]), "switch", ("consume", "a")]
    assert of_mutations(one) == [("input_pos_host",), ("input_pos_host",)]
    assert of_mutations(both) == [("input_pos_host",), ("input_pos_host",), ()]


def test_writing_batch_info_makes_the_batch_unknown_again() -> None:
    def with_update(*calls: str) -> list[str]:
        builder = Builder({})
        builder.add(["switch"])
        batch_info = builder.graph.call_function(getattr, (builder.info, "batch_info"))
        for call in calls:
            if call == "serialize":
                tensor = builder.graph.call_method("serialize", (batch_info,))
                first = builder.graph.call_function(operator.getitem, (tensor, slice(0, 6)))
                builder.graph.call_method("fill_", (first, 1))
            else:
                builder.graph.call_method(call, (batch_info, [1, 1, 0, 0, 0, 0]))
        builder.add(["switch"])
        return [e.status for e in collect(builder.finish(), Setting.of(CM)).flat if e.kind is Kind.MUTATION]

    assert with_update() == ["maybe", "noop"]
    assert with_update("update_tokens_gather_info") == ["maybe", "noop"]
    assert with_update("update") == ["maybe", "maybe"]
    assert with_update("serialize") == ["maybe", "maybe"]


def test_restaging_makes_everything_fresh_and_the_batch_unknown() -> None:
    builder = Builder({"a": consumer("input_pos_host")})
    builder.add(["offset", "switch"])
    builder.graph.call_method("nest_sequences", (builder.info, [1], [0, 1], 0))
    builder.add([("consume", "a"), "switch", "offset"])
    result = collect(builder.finish(), Setting.of(CM))
    assert [r for r in stale_reads(result, nothing_moved) if r.stale] == []
    assert [e.status for e in result.flat if e.label == "switch_to_generate_"] == ["maybe", "maybe"]


def test_overlap_inputs_of_restaging_write_the_device_afterwards() -> None:
    builder = Builder({"a": consumer("input_ids_host", "input_pos_host")})
    overlap = {"_ungathered_input_ids": builder.tokens, "_ungathered_new_lens": builder.offset}
    builder.graph.call_method("nest_sequences", (builder.info, [1], [0, 1], 0), overlap)
    builder.add([("consume", "a")])
    result = collect(builder.finish(), Setting.of(CM))
    (read,) = [r for r in stale_reads(result, nothing_moved) if r.stale]
    assert {e.label: result.table.mirrors(bits) for e, bits in read.writes} == {
        "rescatter_input_ids_": ("input_ids_host",),
        "offset_with_new_lens_": ("input_pos_host",),
    }


def test_live_out_counts_as_a_read_at_the_end() -> None:
    assert of_mutations(["offset", "switch"], live_out=("cu_seqlen_host",)) == [(), ("cu_seqlen_host",)]
    result = program(["offset"])
    (read,) = [r for r in stale_reads(result, nothing_moved, result.table.bits(["input_pos_host"])) if r.stale]
    assert (read.consumer.name, read.consumer.node) == ("live_out", None)


def test_the_next_consumers_are_those_of_every_path() -> None:
    result = program(["offset", ("branch", [("consume", "a")], []), ("consume", "b"), "offset"])
    consumers = liveness(result).consumers
    names = [[c.name for c in consumers[e.order]] for e in result.flat if e.kind is Kind.MUTATION]
    assert names == [["body_0.a", "b"], []]


def test_each_consumer_is_told_which_write_made_its_mirrors_stale() -> None:
    steps = ["switch", "offset", ("consume", "b"), ("inplace", "input_pos"), ("consume", "a"), "prepare"]
    switch, offset = "switch_to_generate_", "offset_pos_and_cache_"
    assert arrivals(steps) == [
        ("b", ("cu_seqlen_host", "input_pos_host"), [switch, offset]),
        ("a", ("input_pos_host",), [offset, "add_"]),  # the write through a slice is no whole one
        ("run_host_prepare_for_attention_forward(seq_len_host)", ("seq_len_host",), [switch]),
    ]


def test_a_whole_write_through_a_view_is_the_only_last_one() -> None:
    assert arrivals(["offset", ("fill", "input_pos"), ("consume", "a")]) == [("a", ("input_pos_host",), ["fill_"])]


def test_last_writes_of_both_sides_of_a_branch_are_kept() -> None:
    (arrival,) = arrivals(["offset", ("branch", ["offset"], [("copy", "input_pos")]), ("consume", "a")])
    assert arrival[2] == ["body_0.offset_pos_and_cache_", "body_1.copy_"]


def test_many_partial_writes_are_remembered_by_the_newest() -> None:
    (read,) = stale_reads(program(["offset", *[("inplace", "input_pos")] * 100, ("consume", "a")]), nothing_moved)[-1:]
    assert len(read.writes) <= 33
    assert read.last_write is not None and read.last_write.order == read.consumer.order - 1


def test_repaired_mirrors_are_fresh_for_the_next_consumer() -> None:
    result = program(["offset", ("consume", "a"), ("consume", "a")])

    def stale(repair: bool) -> list[StaleRead]:
        return [r for r in stale_reads(result, nothing_moved, repair=repair) if r.stale]

    assert [len(stale(repair)) for repair in (False, True)] == [2, 1]


def test_what_is_read_as_it_was_at_entry_is_told_apart() -> None:
    result = program([("consume", "b"), "switch", ("consume", "a")])
    first, second = stale_reads(result, nothing_moved)
    assert result.table.mirrors(first.at_entry) == ("cu_seqlen_host", "input_pos_host")
    assert (first.stale, first.last_write) == (0, None)
    assert result.table.mirrors(second.stale) == ("input_pos_host",)


def test_the_path_tells_the_way_from_the_write_to_the_read() -> None:
    result = program([*["switch"], *[("copy", "input_ids")] * 6, ("consume", "b")])
    (read,) = [r for r in stale_reads(result, nothing_moved) if r.stale]
    steps = proof_path(result, read, "cu_seqlen")
    assert steps[0] == "switch_to_generate_ (%switch_to_generate_) writes cu_seqlen on the device"
    assert steps[1] == "then copy_ (%copy_), which leaves cu_seqlen and its mirror as they are"
    assert steps[-2:] == (
        "then 2 more calls that leave them as they are",
        "then b (%b) reads cu_seqlen_host",
    )
    at_entry = Event(Kind.READ, None, "live_out", order=0)
    assert "at entry" in proof_path(result, StaleRead(at_entry, 0, 1, ()), "cu_seqlen")[0]


# -- tensors that share memory -------------------------------------------------------------------------------------


def events_of(build_tail: Any) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Kind, reads and writes of each event of a graph whose tail `build_tail(builder)` adds."""
    builder = Builder({"a": consumer("input_pos_host")})
    build_tail(builder)
    result = collect(builder.finish(), Setting.of(CM))
    return [(e.kind.value, result.table.mirrors(e.reads), result.table.buffers(e.writes)) for e in result.flat]


def view(builder: Builder, name: str) -> Any:
    named = builder.graph.call_function(getattr, (builder.csi, "named_args"))
    return builder.graph.call_function(operator.getitem, (named, name))


def test_arithmetic_on_a_buffer_makes_a_new_tensor() -> None:
    def tail(b: Builder) -> None:
        total = b.graph.call_function(torch.add, (view(b, "input_pos"), 1))
        b.graph.call_method("fill_", (total, 0))
        b.graph.call_function(operator.setitem, (b.graph.call_function(torch.zeros_like, (total,)), 0, total))

    assert events_of(tail) == []


@pytest.mark.parametrize(
    "write",
    [
        lambda b, v: b.graph.call_function(operator.setitem, (v, 0, 1)),
        lambda b, v: b.graph.call_method("fill_", (b.graph.call_method("view", (v, -1)), 0)),
        lambda b, v: b.graph.call_function(operator.iadd, (v, 1)),
        lambda b, v: b.graph.call_function(torch.add, (b.tokens, 1), {"out": v}),
        lambda b, v: b.graph.call_function(torch.relu_, (b.graph.call_function(torch.unsqueeze, (v, 0)),)),
        lambda b, v: b.graph.call_function(torch.ops.aten.add_.Tensor, (v, 1)),
        lambda b, v: b.graph.call_function(ops.call_inplace, (v, "__iadd__", 1)),
        lambda b, v: b.graph.call_function(ops.setitem, (b.graph.call_function(ops.setitem, (v, 0, 1)), 0, 2)),
    ],
)
def test_every_way_to_write_in_place_counts(write: Any) -> None:
    events = events_of(lambda b: write(b, view(b, "input_pos")))
    assert events and set(events) == {("write", (), ("input_pos",))}


def test_a_mirror_is_read_where_its_view_is_used() -> None:
    def tail(b: Builder) -> None:
        mirror = view(b, "seq_len_host")
        part = b.graph.call_function(operator.getitem, (mirror, slice(0, 2)))
        b.add(["switch"])
        b.graph.call_method("sum", (part,))

    kinds = events_of(tail)
    assert [k for k, _, _ in kinds] == ["mutation", "read"]
    assert kinds[1] == ("read", ("seq_len_host",), ())


def test_overwriting_a_mirror_needs_no_older_value_and_partly_writing_it_does() -> None:
    def whole(b: Builder) -> None:
        b.graph.call_method("fill_", (view(b, "seq_len_host"), 0))

    def part(b: Builder) -> None:
        first = b.graph.call_function(operator.getitem, (view(b, "seq_len_host"), slice(0, 1)))
        b.graph.call_method("add_", (first, 1))

    assert events_of(whole) == [("host write", (), ())]
    assert events_of(part) == [("read", ("seq_len_host",), ())]


def test_a_copy_of_a_mirror_by_name_writes_the_host_only() -> None:
    def tail(b: Builder) -> None:
        b.graph.call_method("copy_", (b.info, "seq_len_host", b.tokens))

    assert events_of(tail) == [("host write", (), ())]


def test_a_mirror_handed_to_the_caller_is_read() -> None:
    builder = Builder({})
    builder.add(["switch"])
    builder.results.append(view(builder, "seq_len_host"))
    result = collect(builder.finish(), Setting.of(CM))
    assert [e.label for e in result.flat if e.kind is Kind.READ] == ["output"]


def test_a_consumer_may_write_the_buffers_it_is_given() -> None:
    graph = Graph()
    lengths = graph.placeholder("seq_len")
    graph.call_function(torch.ops.aten.add_.Tensor, (lengths, 1))
    graph.output(graph.placeholder("x"))
    builder = Builder({"a": consumer("seq_len_host")})
    builder.root.add_module("writer", GraphModule(nn.Module(), graph))
    builder.graph.call_module("writer", (), {"seq_len": view(builder, "seq_len"), "x": builder.tokens})
    builder.add([("consume", "a")])
    result = collect(builder.finish(), Setting.of(CM))
    (read,) = [r for r in stale_reads(result, nothing_moved) if r.stale]
    assert [e.label for e, _ in read.writes] == ["writer"]


def test_a_consumers_result_may_be_a_view_of_its_argument() -> None:
    graph = Graph()
    graph.output(graph.call_method("view", (graph.placeholder("input_pos"), -1)))
    builder = Builder({})
    builder.root.add_module("identity", GraphModule(nn.Module(), graph))
    out = builder.graph.call_module("identity", (view(builder, "input_pos"),))
    builder.graph.call_method("zero_", (out,))
    result = collect(builder.finish(), Setting.of(CM))
    assert [(e.kind.value, e.label) for e in result.flat] == [("read", "identity"), ("write", "zero_")]


def test_layers_that_make_new_tensors_share_nothing() -> None:
    builder = Builder({})
    builder.root.add_module("embed", nn.Embedding(4, 2))
    out = builder.graph.call_module("embed", (view(builder, "input_ids"),))
    builder.graph.call_method("zero_", (out,))
    assert collect(builder.finish(), Setting.of(CM)).flat == []


# -- the interface -------------------------------------------------------------------------------------------------


def test_the_interface_is_found_by_name_by_use_and_by_request() -> None:
    graph = Graph()
    used, plain = graph.placeholder("context"), graph.placeholder("x")
    graph.call_method("switch_to_generate_", (graph.call_function(getattr, (used, "info")),))
    graph.output(plain)
    gm = GraphModule(nn.Module(), graph)
    assert interface_roots(gm) == (used,)
    assert interface_roots(gm, "x") == (plain, used)
    assert is_orchestrator_graph(gm)
    assert not is_orchestrator_graph(consumer("seq_len"))


def test_a_tensors_copy_makes_no_orchestrator() -> None:
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.output(graph.call_method("copy_", (a, b)))
    assert not is_orchestrator_graph(GraphModule(nn.Module(), graph))


def test_a_graph_that_hands_the_interface_to_an_orchestrator_is_one() -> None:
    builder = Builder({})
    name, body = builder._body(["switch"])
    graph, root = Graph(), nn.Module()
    root.add_module(name, body)
    context = graph.placeholder("context")
    graph.output(graph.call_module(name, (context, None, None)))
    assert interface_roots(GraphModule(root, graph)) == (context,)


def test_the_interface_inside_a_namespace_is_followed() -> None:
    builder = Builder({})
    bundle = builder.graph.call_function(ops.make_namespace, (), {"csi": builder.csi})
    csi = builder.graph.call_function(getattr, (bundle, "csi"))
    info = builder.graph.call_function(getattr, (csi, "info"))
    builder.graph.call_function(ops.mutate, (info, "switch_to_generate_"))
    (event,) = collect(builder.finish(), Setting.of(CM)).flat
    assert (event.kind, event.label) == (Kind.MUTATION, "switch_to_generate_")


@pytest.mark.parametrize(
    "call, reason",
    [
        (lambda b: b.graph.call_method("frobnicate", (b.info,)), "frobnicate"),
        (lambda b: b.graph.call_function(torch.is_tensor, (b.csi,)), "is_tensor"),
        (lambda b: b.graph.call_function(ops.call, ("json.dumps", b.info)), "dumps"),
        (lambda b: b.graph.call_function(ops.set_attribute, (b.info, "x", 1)), "attribute"),
        (lambda b: b.graph.call_method("copy_", (b.info, "cu_seqlen", b.info)), None),
        (lambda b: b.graph.call_function(id, (b.csi,)), None),
        (lambda b: b.graph.call_method("unflatten", (b.info, b.tokens)), None),
        (lambda b: b.graph.call_method("get_arg", (b.info, b.tokens)), "get_arg"),
    ],
)
def test_an_unregistered_call_with_the_interface_is_unknown(call: Any, reason: str | None) -> None:
    builder = Builder({})
    call(builder)
    gm = builder.finish()
    unknown = [e for e in collect(gm, Setting.of(CM)).flat if e.kind is Kind.UNKNOWN]
    assert [reason in e.reason for e in unknown] == ([] if reason is None else [True])
    if reason is not None:
        with pytest.raises(UnknownEffectError, match=reason):
            collect(gm, Setting.of(CM, "error"))


def test_an_eager_module_that_receives_the_interface_is_unknown() -> None:
    builder = Builder({})
    builder.root.add_module("eager", nn.Identity())
    builder.graph.call_module("eager", (builder.csi,))
    (event,) = collect(builder.finish(), Setting.of(CM)).flat
    assert event.kind is Kind.UNKNOWN and "Identity" in event.reason


def test_a_registered_buffer_that_does_not_exist_is_an_error_with_a_suggestion() -> None:
    register_mutation("frobnicate", writes=["cu_seqlens"])
    try:
        with pytest.raises(ValueError, match="did you mean 'cu_seqlen'"):
            program(["unknown"])
    finally:
        del MUTATIONS["frobnicate"]


def test_a_registered_function_is_a_mutation() -> None:
    register_mutation("is_tensor", writes=["seq_len"])
    try:
        builder = Builder({"a": consumer("seq_len_host")})
        builder.graph.call_function(torch.is_tensor, (builder.csi,))
        builder.add([("consume", "a")])
        result = collect(builder.finish(), Setting.of(CM))
    finally:
        del MUTATIONS["is_tensor"]
    (read,) = [r for r in stale_reads(result, nothing_moved) if r.stale]
    assert [e.label for e, _ in read.writes] == ["is_tensor"]
