"""Strategies copy, replay and auto on hand-built graphs: what travels from where to where, what the host computes."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from auto_deploy_ext import CachedSequenceInterface, record_mirrors
from auto_deploy_ext.embedded.custom_ops.input_buffer import HostCopyTicket
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.reports.mirror_plan import MirrorPlan, plan
from auto_deploy_ext.rewriting.scoping import ScopeOptions, scope_graphs
from auto_deploy_ext.rewriting.strategies import StaleReadError
from tests.orchestrator_programs import OFFSET, SWITCH, Builder, build, consumer, make_interface, refreshed, walk

PAGED = ("cu_num_pages_host", "cu_seqlen_host", "last_page_len_host", "seq_len_with_cache_host")
PAGES = tuple(name for name in PAGED if name != "cu_seqlen_host")
DRAFT = {"draft": PAGED}
LOOP = [("consume", "draft"), *["switch", ("copy", "input_ids"), "offset", ("consume", "draft")] * 2]


def scope(gm: GraphModule, cm: Any, strategy: str, **options: Any) -> MirrorPlan:
    mirror_plan, _ = scope_graphs({"graph": gm}, cm, ScopeOptions(strategy=strategy, **options))
    gm.graph.lint()
    return mirror_plan


def scoped(steps: list[Any], consumers: dict[str, tuple[str, ...]], strategy: str, known: bool = True) -> GraphModule:
    """Build a program for a batch that is known not to be generate-only, and rewrite it."""
    gm = build(steps, consumers)
    if known:
        gm.meta["generate_only"] = False
    scope(gm, make_interface({n for names in consumers.values() for n in names}), strategy)
    return gm


def outline(gm: GraphModule) -> list[Any]:
    """What matters to mirrors in a rewritten graph, in order."""
    found: list[Any] = []
    for node in walk(gm):
        if node.op == "call_module" and not str(node.target).startswith("body_"):
            found.append(str(node.target))
        elif node.target is ops.mutate:
            replays = node.kwargs.get("replays")
            found.append(node.args[1] if replays is None else (node.args[1], *replays))
        elif node.target is ops.start_mirrors:
            found.append(("start", *node.args[1]))
        elif node.target is ops.wait_mirrors:
            found.append("wait")
        elif node.target is ops.snapshot_operand:
            found.append("snapshot")
    return found


def operands(gm: GraphModule) -> list[Any]:
    """What the host takes for the operand of each offset."""
    nodes = [n for n in walk(gm) if n.target is ops.mutate and n.args[1] == OFFSET]
    values = [n.kwargs.get("host_operand") for n in nodes]
    return ["ticket" if isinstance(value, Node) else value for value in values]


# -- copy ----------------------------------------------------------------------------------------------------------


def test_copy_starts_after_the_last_write_and_waits_before_the_consumer() -> None:
    gm = scoped(LOOP, DRAFT, "copy")
    step = [SWITCH, "copy_", OFFSET]
    assert outline(gm) == [
        *["draft", *step, ("start", *PAGED), "wait", "draft"],
        *[*step, ("start", *PAGES), "wait", "draft"],
    ]
    assert all(
        n.kwargs.get("active_args") == () for n in gm.graph.nodes if n.target is ops.mutate and n.args[1] != "copy_"
    )


def test_a_transfer_is_under_way_while_others_are_called() -> None:
    steps = ["offset", "switch", ("consume", "a"), ("consume", "b")]
    gm = scoped(steps, {"a": ("batch_info_host",), "b": ("last_page_len_host",)}, "copy")
    assert outline(gm) == [OFFSET, ("start", "last_page_len_host"), SWITCH, "a", "wait", "b"]


@pytest.mark.parametrize("write", [("copy", "input_ids"), ("inplace", "input_ids"), ("fill", "input_ids")])
def test_any_node_that_writes_counts_as_the_last_write(write: Any) -> None:
    gm = scoped(["switch", write, ("consume", "a")], {"a": ("input_ids_host", "seq_len_host")}, "copy")
    start = next(n for n in gm.graph.nodes if n.target is ops.start_mirrors)
    assert start.prev.target is (ops.mutate if write[0] == "copy" else ops.call_inplace)
    assert start.args[1] == ("input_ids_host", "seq_len_host")


def test_each_consumer_gets_one_transfer_of_what_it_reads() -> None:
    steps = ["switch", "offset", ("consume", "a"), ("consume", "b"), ("consume", "a")]
    gm = scoped(steps, {"a": ("input_pos_host",), "b": ("cu_seqlen_host", "input_pos_host")}, "copy")
    assert outline(gm) == [
        *[SWITCH, ("start", "cu_seqlen_host"), OFFSET, ("start", "input_pos_host")],
        *["wait", "a", "wait", "b", "a"],
    ]


def test_what_only_may_be_stale_travels_only_then() -> None:
    cm = make_interface(["cu_seqlen_host"])
    gm = build(["switch", ("consume", "a")], {"a": ("cu_seqlen_host",)})
    scope(gm, cm, "copy")
    with record_mirrors(cm) as transfers:
        cm.info.set_example_sequence([[1], [2]])
        assert cm.info.is_generate_only
        gm(cm, None, None)
        cm.info.set_example_sequence([[1, 2], [2, 3]])
        gm(cm, None, None)
    assert [t.names for t in transfers] == [("cu_seqlen_host",)]


def test_a_consumer_in_a_nested_graph_or_branch_gets_its_own_where_the_write_is_outside() -> None:
    inside = scoped(["switch", ("nested", ["offset", ("consume", "a")])], {"a": ("input_pos_host",)}, "copy")
    assert outline(inside) == [SWITCH, OFFSET, ("start", "input_pos_host"), "wait", "a"]
    outside = scoped(["offset", ("nested", [("consume", "a")])], {"a": ("input_pos_host",)}, "copy")
    assert (outline(outside), refreshed(outside)) == ([OFFSET, "a"], [("input_pos_host",)])
    branch = scoped(["offset", ("branch", [("consume", "a")], [])], {"a": ("input_pos_host",)}, "copy")
    assert refreshed(branch) == [("input_pos_host",)]
    after = scoped([("branch", ["offset"], []), ("consume", "a")], {"a": ("input_pos_host",)}, "copy")
    start = next(n for n in after.graph.nodes if n.target is ops.start_mirrors)
    assert start.prev.target is torch.cond
    assert start.args[3] == ("input_pos_host",)


def test_live_out_travels_to_the_end() -> None:
    cm = make_interface(["input_pos_host"])
    gm = build(["offset", "switch"], {})
    scope(gm, cm, "copy", live_out=("input_pos_host",))
    assert outline(gm) == [OFFSET, SWITCH, ("start", "input_pos_host"), "wait"]
    assert gm.graph.output_node().prev.target is ops.wait_mirrors


# -- replay --------------------------------------------------------------------------------------------------------


def test_replay_copies_nothing_but_an_operand_that_only_the_device_knows() -> None:
    gm = scoped(LOOP, DRAFT, "replay")
    offset = (OFFSET, "cu_num_pages", "last_page_len", "seq_len_with_cache")
    assert outline(gm) == [
        *["snapshot", "draft", (SWITCH, "cu_seqlen"), "copy_", offset, "draft"],
        *[SWITCH, "copy_", offset, "draft"],
    ]
    assert operands(gm) == ["ticket", "ticket"]
    tickets = {n.kwargs["host_operand"] for n in gm.graph.nodes if "host_operand" in n.kwargs}
    assert len(tickets) == 1, "both are given the same value"


def test_what_is_read_later_is_computed_at_every_mutation_before() -> None:
    gm = scoped(["offset", "switch", "offset", ("consume", "a")], {"a": ("position_ids_host",)}, "replay")
    assert outline(gm) == [
        "snapshot",
        (OFFSET, "input_pos"),
        (SWITCH, "cu_seqlen", "position_ids"),
        (OFFSET, "position_ids"),
        "a",
    ]


def test_a_write_that_the_host_does_not_know_is_copied_and_the_rest_computed() -> None:
    consumers = {"a": ("cu_seqlen_host", "input_ids_host")}
    steps = ["switch", ("copy", "input_ids"), ("consume", "a")]
    replayed, auto = (scoped(steps, consumers, strategy) for strategy in ("replay", "auto"))
    assert outline(replayed) == [(SWITCH, "cu_seqlen"), "copy_", ("start", "input_ids_host"), "wait", "a"]
    assert outline(auto) == [SWITCH, "copy_", ("start", "cu_seqlen_host", "input_ids_host"), "wait", "a"]


def test_arithmetic_that_starts_from_a_lost_mirror_is_not_repeated() -> None:
    steps = [("copy", "input_pos"), "offset", ("consume", "a"), "offset", ("consume", "a")]
    gm = scoped(steps, {"a": ("input_pos_host",)}, "replay")
    assert outline(gm) == [
        *["snapshot", "copy_", OFFSET, ("start", "input_pos_host"), "wait", "a"],
        *[(OFFSET, "input_pos"), "a"],
    ]


def test_twins_of_other_pools_are_computed_from_their_own_pool() -> None:
    names = ("cu_num_pages_g1_host",)
    gm = build(["offset", "offset", ("consume", "a")], {"a": names})
    scope(gm, make_interface(names, pools=2), "replay")
    assert outline(gm)[1:] == [(OFFSET, "cu_num_pages_g1", "last_page_len_g1"), (OFFSET, "cu_num_pages_g1"), "a"]


def test_a_nested_graph_called_twice_repeats_only_what_every_call_can() -> None:
    builder = Builder({"a": consumer("input_pos_host")})
    name, body = builder._body(["offset"])
    builder.root.add_module(name, body)
    for steps in ([("copy", "input_pos")], [("consume", "a")]):
        builder.graph.call_module(name, (builder.csi, builder.offset, builder.tokens))
        builder.add(steps)
    builder.graph.call_module(name, (builder.csi, builder.offset, builder.tokens))
    builder.add([("consume", "a")])
    gm = builder.finish()
    scope(gm, make_interface(["input_pos_host"]), "replay")
    assert outline(gm).count(OFFSET) == 3, "before the second call input_pos is lost"
    assert outline(gm).count(("start", "input_pos_host")) == 2


# -- operands ------------------------------------------------------------------------------------------------------


def offset_graph(write: Any, consumers: Any = None) -> GraphModule:
    """`[what `write(builder)` writes], offset, draft`; `write` returns the offset's node."""
    builder = Builder({"draft": consumer("input_pos_host"), **(consumers or {})})
    operand = write(builder)
    builder.graph.call_method(OFFSET, (builder.info, operand))
    builder.add([("consume", "draft")])
    gm = builder.finish()
    scope(gm, make_interface(["input_pos_host"]), "replay")
    return gm


def fill_first(builder: Builder, tensor: Node) -> Node:
    view = builder.graph.call_function(operator.getitem, (tensor, slice(None, 1)))
    return builder.graph.call_method("fill_", (view, 1))


def test_an_operand_is_snapshotted_after_its_last_write_through_any_alias() -> None:
    def write(builder: Builder) -> Node:
        made = builder.graph.call_function(operator.sub, (builder.offset, 3))
        fill_first(builder, made)
        builder.graph.call_function(torch.relu_, (builder.tokens,))
        builder.add([("consume", "draft")])
        return made

    gm = offset_graph(write)
    snapshot = next(n for n in gm.graph.nodes if n.target is ops.snapshot_operand)
    assert snapshot.prev.target is ops.call_inplace
    assert outline(gm) == ["snapshot", "draft", (OFFSET, "input_pos"), "draft"]


def test_arguments_may_be_views_of_one_tensor() -> None:
    gm = offset_graph(lambda builder: fill_first(builder, builder.tokens) and builder.offset)
    snapshot = next(n for n in gm.graph.nodes if n.target is ops.snapshot_operand)
    assert snapshot.prev.target is ops.call_inplace


def test_a_consumer_that_writes_the_operand_comes_first() -> None:
    def write(builder: Builder) -> Node:
        made = builder.graph.call_function(operator.sub, (builder.offset, 3))
        module = consumer("x")
        x = next(iter(module.graph.nodes))
        with module.graph.inserting_after(x):
            module.graph.call_method("add_", (x, 1))
        builder.root.add_module("writer", module)
        builder.graph.call_module("writer", (made,))
        return made

    assert outline(offset_graph(write)) == ["writer", "snapshot", (OFFSET, "input_pos"), "draft"]


@pytest.mark.parametrize(
    "write, value",
    [
        (lambda b: b.graph.call_function(torch.ones, (2,), {"dtype": torch.int32}), 1),
        (lambda b: b.graph.call_function(torch.full, ((2,), 3)), 3),
        (lambda b: b.graph.call_method("fill_", (b.offset, -1)), -1),
        (lambda b: b.graph.call_method("view", (b.graph.call_method("zero_", (b.offset,)), -1)), 0),
    ],
)
def test_an_operand_of_one_known_number_is_never_copied(write: Any, value: int) -> None:
    gm = offset_graph(write)
    assert operands(gm) == [value]
    assert "snapshot" not in outline(gm)


@pytest.mark.parametrize(
    "write",
    [
        lambda b: fill_first(b, b.graph.call_function(torch.ones, (2,))).args[0].args[0],
        lambda b: fill_first(b, b.graph.call_method("fill_", (b.offset, 1))).args[0].args[0],
        lambda b: b.graph.call_method("fill_", (b.offset, b.tokens)),
        lambda b: b.graph.call_function(torch.full, ((2,), 0.5)),
        lambda b: b.graph.call_function(operator.add, (b.graph.call_function(torch.ones, (2,)), b.offset)),
    ],
)
def test_an_operand_that_is_not_of_one_number_is_copied(write: Any) -> None:
    assert operands(offset_graph(write)) == ["ticket"]


def test_an_operand_in_the_interfaces_own_memory_is_not_repeated_and_the_plan_says_why() -> None:
    builder = Builder({"draft": consumer("input_pos_host")})
    builder.graph.call_method(OFFSET, (builder.info, builder.graph.call_method("get_arg", (builder.info, "seq_len"))))
    builder.add([("consume", "draft")])
    mirror_plan = scope(gm := builder.finish(), make_interface(["input_pos_host"]), "auto")
    assert outline(gm) == [OFFSET, ("start", "input_pos_host"), "wait", "draft"]
    (reason,) = mirror_plan.reasons
    assert reason.startswith("draft gets input_pos_host by a copy: offset_pos_and_cache_ (%")
    assert reason.endswith("cannot be repeated on the host: its operand may be memory of the interface")


# -- running -------------------------------------------------------------------------------------------------------


def paged_interface() -> CachedSequenceInterface:
    cm = make_interface(PAGED)
    nest(cm, 9)
    return cm


def nest(cm: CachedSequenceInterface, start: int) -> None:
    cm.info.set_example_sequence([[5, 6, 7], [8, 9, 10]], input_pos=start, batch_info=[0, 0, 2, 6, 0, 0])


@pytest.mark.parametrize("strategy, transfers", [("copy", 2), ("replay", 1), ("auto", 1), ("override", 3)])
def test_a_rewritten_loop_runs_and_mirrors_equal_the_device(strategy: str, transfers: int) -> None:
    cm = paged_interface()
    gm = build(LOOP, DRAFT)
    gm.meta["generate_only"] = False
    scope(gm, cm, strategy)
    buffer = cm.info._input_buffer
    found = []

    def compare(*_: Any) -> None:
        found.append(all(torch.equal(buffer.get_host_view(n, True), buffer.get_view(n, True)) for n in names))

    names = [name.removesuffix("_host") for name in PAGED]
    gm.get_submodule("draft").register_forward_pre_hook(compare)
    with record_mirrors(cm) as recorded:
        gm(cm, torch.tensor([2, -1], dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32))
    assert found == [True, True, True]
    assert len(recorded) == transfers
    if strategy in ("replay", "auto"):
        assert (recorded[0].names, recorded[0].nbytes, recorded[0].waited) == ((OFFSET,), 8, False)


def test_a_snapshot_is_the_value_of_its_place_whatever_is_written_later() -> None:
    cm = paged_interface()
    offset = torch.tensor([2, 1], dtype=torch.int32)
    ticket = ops.snapshot_operand(cm, offset, OFFSET)
    offset.fill_(7)
    assert ticket.wait().tolist() == [2, 1]


@pytest.mark.parametrize("protected", [True, False])
def test_a_transfer_overtaken_by_a_newer_batch_is_dropped(protected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard 1: what is under way must not overwrite what the next batch stages."""
    cm = paged_interface()
    if not protected:
        monkeypatch.setattr(HostCopyTicket, "_applies", lambda self, piece: True)
    cm.info.switch_to_generate_(active_args_override=set())
    ticket = ops.start_mirrors(cm, ("cu_seqlen_host", "input_pos_host"), SWITCH)
    nest(cm, 20)
    ops.wait_mirrors(cm, ticket)
    right = cm.info.get_arg("cu_seqlen_host", truncate=True).tolist() == [0, 3, 6]
    assert right is protected
    assert ticket.transfer.waited is not protected


# -- the rewritten graph lasts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["auto", "copy", "override", "replay"])
def test_a_rewritten_graph_survives_cleaning_copies_and_pickle_and_another_run(strategy: str) -> None:
    cm = make_interface(PAGED)
    gm = build(LOOP, DRAFT)
    scope(gm, cm, strategy)
    code = gm.code
    for other in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm)), pickle.loads(pickle.dumps(copy.deepcopy(gm)))):
        other.graph.eliminate_dead_code()
        other.recompile()
        assert other.code == code
        _, changed = scope_graphs({"graph": other}, cm, ScopeOptions(strategy=strategy))
        assert (changed, other.code) == (0, code)


def test_a_second_run_leaves_every_node_in_its_place() -> None:
    cm = make_interface(PAGED)
    gm = build([*LOOP, ("copy", "seq_len"), ("get", "seq_len_host")], DRAFT)
    scope(gm, cm, "replay")
    nodes = [(n, n.name, n.args, n.kwargs) for n in gm.graph.nodes]
    scope(gm, cm, "replay")
    assert [(n, n.name, n.args, n.kwargs) for n in gm.graph.nodes] == nodes


def test_a_hand_written_override_outlasts_another_strategy() -> None:
    steps = [("switch", {"cu_seqlen_host", "input_pos_host"}), ("consume", "a")]
    cm = make_interface(["cu_seqlen_host", "input_pos_host"])
    gm, other = (build(steps, {"a": ("cu_seqlen_host",)}) for _ in range(2))
    scope(gm, cm, "copy")
    (switch,) = [n for n in gm.graph.nodes if n.target is ops.mutate]
    assert switch.kwargs == {"active_args": ()}
    scope(gm, cm, "override")
    scope(other, cm, "override")
    assert gm.code == other.code
    assert switch.kwargs == {"active_args": ("cu_seqlen_host", "input_pos_host")}


@pytest.mark.parametrize("strategy", ["auto", "copy", "replay"])
def test_an_orchestrator_with_a_gap_is_refused_whatever_would_fill_it(strategy: str) -> None:
    cm = make_interface(["cu_seqlen_host", "input_pos_host"])
    gm = build([("switch", {"cu_seqlen_host"}), ("consume", "a")], {"a": ("input_pos_host",)})
    code = gm.code
    with pytest.raises(StaleReadError, match="input_pos_host"):
        scope(gm, cm, strategy, insert_missing=False)
    assert gm.code == code


# -- the plan ------------------------------------------------------------------------------------------------------


def test_the_plan_names_what_travels_because_of_each_call() -> None:
    cm = make_interface([*PAGED, "input_ids_host"])
    steps = ["switch", ("copy", "input_ids"), "offset", ("fill", "seq_len"), ("consume", "a")]
    gm = build(steps, {"a": ("cu_seqlen_host", "input_ids_host", "last_page_len_host", "seq_len_host")})
    gm.meta["generate_only"] = False
    mirror_plan = scope(gm, cm, "copy")
    assert [(s.call, s.mirrored_after) for s in mirror_plan.call_sites] == [
        (SWITCH, ("cu_seqlen_host",)),
        ("copy_", ("input_ids_host",)),
        (OFFSET, ("last_page_len_host",)),
        ("start_mirrors", ("seq_len_host",)),
    ]
    (reads,) = mirror_plan.consumers
    assert reads.transfer == ("cu_seqlen_host", "input_ids_host", "last_page_len_host", "seq_len_host")
    assert reads.transfer_bytes == 4 * (5 + 64 + 4 + 4)
    assert MirrorPlan.from_json(mirror_plan.to_json()) == mirror_plan


def test_the_plan_says_what_the_host_computes_and_from_what() -> None:
    gm = build(LOOP, DRAFT)
    gm.meta["generate_only"] = False
    mirror_plan = scope(gm, make_interface(PAGED), "auto")
    sites = {s.index: s for s in mirror_plan.call_sites}
    assert sites[0].replayed == ("cu_seqlen_host",)
    assert (sites[2].replayed, sites[2].mirrored_after) == (PAGES, ())
    assert sites[2].operand.startswith("offset, copied after")
    assert not mirror_plan.reasons
    assert all(not c.transfer for c in mirror_plan.consumers)
    for text in (mirror_plan.to_text(), mirror_plan._repr_html_()):
        assert "the host computes what is replayed" in " ".join(text.replace("│", " ").split())


def test_the_plan_of_a_rewritten_graph_is_by_its_own_strategy() -> None:
    cm = make_interface(PAGED)
    gm = build(LOOP, DRAFT)
    before = plan(gm, cm)
    assert before.strategy == "auto"
    scope(gm, cm, "copy")
    assert plan(gm, cm).strategy == "copy"
    assert plan(gm, cm, strategy="replay").strategy == "replay"
    assert [s.replayed for s in plan(gm, cm, strategy="auto").call_sites] == [s.replayed for s in before.call_sites]
