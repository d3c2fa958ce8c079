"""Fused runs of mutations: the same buffers, mirrors, versions and transfers, and passes that see through them."""

from __future__ import annotations

import copy
import pickle
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule, Interpreter

import auto_deploy_ext
from auto_deploy_ext import StaleHostMirrorError, record_mirrors, sanitize
from auto_deploy_ext.analysis.events import Setting
from auto_deploy_ext.analysis.fused_nodes import is_fused, take_apart_graphs
from auto_deploy_ext.analysis.program import collect
from auto_deploy_ext.effects import mirror_of
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.reports.as_run import as_run, stale_as_run
from auto_deploy_ext.reports.capture import obstacles_in_orchestrator
from auto_deploy_ext.rewriting.fusion import fuse_graphs, fused_runs
from auto_deploy_ext.rewriting.scoping import ScopeOptions, host_traits, scope_graphs
from auto_deploy_ext.runtime import fused_launch, fused_mutations
from tests.metadata_runs import in_use
from tests.strategy_programs import (
    OFFSET,
    SWITCH,
    WRITABLE,
    Batch,
    Reader,
    Run,
    active_buffers,
    make_interface,
    random_batch,
    random_reads,
    random_size,
    random_steps,
    run,
    write,
)

STRATEGIES = (None, "override", "copy", "replay", "auto")
BATCH = Batch((("prefill", 3, 41), ("extend", 2, 44), ("decode", 1, 47)), (2, -1, 4))
READS = {"draft": Reader(("cu_num_pages_host", "cu_seqlen_host", "last_page_len_host", "seq_len_with_cache_host"))}
ITERATION = [("switch",), ("offset",), ("consume", "draft")]
LOOP = [("consume", "draft"), *ITERATION, *ITERATION]


@pytest.fixture(scope="module")
def cm() -> Any:
    return make_interface()


def built(cm: Any, steps: Any, consumers: dict[str, Reader], batch: Batch, strategy: str | None) -> GraphModule:
    gm = write(steps, consumers, len(batch.rows))
    if strategy is not None:
        scope_graphs({"graph": gm}, cm, ScopeOptions(strategy=strategy))
    return gm


def draft_loop(cm: Any, strategy: str | None) -> GraphModule:
    """Two iterations of an Eagle wrapper's draft loop: behind each switch, a copy of new tokens."""
    gm = write(LOOP, READS, len(BATCH.rows))
    for switch in list(gm.graph.find_nodes(op="call_method", target=SWITCH)):
        with gm.graph.inserting_after(switch):
            stored = gm.graph.call_method("copy_", (switch.args[0], "input_ids"))
        with gm.graph.inserting_before(switch):
            stored.args += (gm.graph.call_function(torch.full, ((len(BATCH.rows),), 7)),)
    gm.meta["generate_only"] = False
    gm.recompile()
    if strategy is not None:
        scope_graphs({"graph": gm}, cm, ScopeOptions(strategy=strategy))
    return gm


def outcome(gm: GraphModule, consumers: dict[str, Reader], cm: Any, batch: Batch) -> tuple[Any, ...]:
    """All that one can tell of a run: what consumers found, what travelled, how things are afterwards."""
    batch.nest(cm)
    base = dict(cm.info._input_buffer.device_version), dict(cm.info._input_buffer.mirror_version)
    result: Run = run(gm, consumers, cm, batch)
    state = in_use(cm.info)
    state["versions"] = [
        {name: version - before[name] for name, version in after.items()}
        for before, after in zip(base, state["versions"], strict=True)
    ]
    travelled = [(t.names, t.nbytes, t.waited, t.trigger) for t in (*result.moved, *result.operands)]
    return result.seen, sorted(travelled), state, cm.info._input_buffer.stale_names()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.sampled_from(STRATEGIES), st.integers(1, 2))
def test_a_fused_program_does_what_it_did(seed: int, strategy: str | None, pools: int) -> None:
    rng = Random(seed)
    pages = rng.random() < 0.8
    # What a stale mirror holds follows from all that was there before.
    cm, other = (make_interface(pools, pages) for _ in range(2))
    active = active_buffers(pools, pages)
    batch, consumers = random_batch(rng), random_reads(rng, active)
    writable = [name for name in WRITABLE if name in active]
    steps = random_steps(rng, random_size(rng), writable, depth=2)
    plain, fused = (built(cm, steps, consumers, batch, strategy) for _ in range(2))
    fuse_graphs([fused], cm)
    assert fuse_graphs([fused], cm) == 0
    nodes = [node for node in fused.graph.nodes if is_fused(node)]
    assert outcome(fused, consumers, cm, batch) == outcome(plain, consumers, other, batch)
    fused.graph.eliminate_dead_code()
    assert [node for node in fused.graph.nodes if is_fused(node)] == nodes


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.sampled_from(STRATEGIES), st.sampled_from(STRATEGIES[1:]))
def test_passes_see_through_fused_nodes(seed: int, first: str | None, second: str) -> None:
    rng = Random(seed)
    cm = make_interface()
    batch, consumers = random_batch(rng), random_reads(rng, active_buffers(2, True))
    steps = random_steps(rng, random_size(rng), WRITABLE, depth=1)
    plain, fused = (built(cm, steps, consumers, batch, first) for _ in range(2))
    fuse_graphs([fused], cm)
    setting, traits = Setting.of(cm), host_traits(cm)

    def told(gm: GraphModule) -> Any:
        program = as_run(collect(gm, setting))
        stale = [(read.consumer.name, program.table.mirrors(read.stale)) for read in stale_as_run(program, traits)]
        plan = auto_deploy_ext.plan(gm, cm)
        calls = sorted((s.call, s.mirrored_before, s.mirrored_after) for s in plan.call_sites)
        return sorted(stale), calls, sorted(o.text.split(" (")[0] for o in obstacles_in_orchestrator(gm, cm))

    assert told(fused) == told(plain)
    for gm in (plain, fused):
        scope_graphs({"graph": gm}, cm, ScopeOptions(strategy=second))
    assert not any(is_fused(node) for node in fused.graph.nodes)
    assert told(fused) == told(plain)
    assert outcome(fused, consumers, cm, batch) == outcome(plain, consumers, cm, batch)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_iteration_of_a_draft_loop_is_one_node(cm: Any, strategy: str | None) -> None:
    gm = draft_loop(cm, strategy)
    before = gm.code
    # Un-narrowed, the switch copies everything to the host, also what the others are going to write.
    whole = [(SWITCH, "copy_", OFFSET)] * 2 if strategy else [(SWITCH,), ("copy_", OFFSET)] * 2
    assert fuse_graphs([gm], cm) == len(whole)
    assert fused_runs({"graph": gm}) == {"graph": whole}
    again = draft_loop(cm, strategy)
    fuse_graphs([again], cm)
    assert again.code == gm.code
    if strategy is not None:
        assert take_apart_graphs([gm]) == 1
        assert gm.code == before


def test_copies_and_pickles_keep_fused_nodes_and_what_they_stand_for(cm: Any) -> None:
    gm = draft_loop(cm, "auto")
    code = gm.code
    fuse_graphs([gm], cm)
    expected = outcome(gm, READS, cm, BATCH)
    for other in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        consumers = {"draft": other.draft}
        assert outcome(other, consumers, cm, BATCH) == expected
        assert other.code == gm.code
        take_apart_graphs([other])
        assert other.code == code


def test_the_sanitizer_watches_fused_mutations(cm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_mutations, "_one_by_one", None)
    for strategy in ("auto", "copy", "override"):
        gm = draft_loop(cm, strategy)
        fuse_graphs([gm], cm)
        expected = outcome(gm, READS, cm, BATCH)
        with sanitize(cm) as sanitizer:
            assert outcome(gm, READS, cm, BATCH) == expected
        assert sanitizer.checked > 0
    gm = draft_loop(cm, "copy")
    for node in list(gm.graph.find_nodes(op="call_function", target=ops.wait_mirrors)):
        gm.graph.erase_node(node)
    gm.recompile()
    fuse_graphs([gm], cm)
    BATCH.nest(cm)
    with sanitize(cm), pytest.raises(StaleHostMirrorError) as caught:
        gm(cm, torch.tensor(BATCH.offset, dtype=torch.int32))
    assert (caught.value.mirror, caught.value.mutation) == ("cu_num_pages_host", OFFSET)


def graph_of(*calls: Any) -> GraphModule:
    """Mutations of a SequenceInfo `info` with operands `offset` and `tokens`; functions add what they like."""
    graph = torch.fx.Graph()
    info, offset, tokens = map(graph.placeholder, ("info", "offset", "tokens"))
    for call in calls:
        if callable(call):
            call(graph, info, offset, tokens)
        elif call == SWITCH:
            graph.call_function(ops.mutate, (info, SWITCH), {"active_args": ()})
        elif call == OFFSET:
            graph.call_function(ops.mutate, (info, OFFSET, offset), {"active_args": ()})
        else:
            graph.call_function(ops.mutate, (info, "copy_", call, tokens), {"strict": False})
    graph.output(None)
    return GraphModule(torch.nn.Module(), graph)


def fused_in(cm: Any, *calls: Any) -> list[tuple[str, ...]]:
    gm = graph_of(*calls)
    fuse_graphs([gm], cm)
    return fused_runs({"graph": gm})["graph"]


def test_what_may_stand_among_mutations(cm: Any) -> None:
    whole = [(SWITCH, OFFSET)]

    def new_tensor(graph: Any, info: Any, offset: Any, tokens: Any) -> None:
        graph.call_function(torch.add, (graph.call_method("view", (tokens, -1)), 1))

    def in_place(graph: Any, info: Any, offset: Any, tokens: Any) -> None:
        graph.call_function(ops.call_inplace, (offset, "fill_", 1))

    def view(graph: Any, info: Any, offset: Any, tokens: Any) -> None:
        graph.call_function(ops.invoke, (info, "get_arg", "input_ids"))

    def snapshot(graph: Any, info: Any, offset: Any, tokens: Any) -> None:
        graph.call_function(ops.snapshot_operand, (info, offset, OFFSET))

    def starting(name: str) -> Any:
        def start(graph: Any, info: Any, offset: Any, tokens: Any) -> None:
            graph.call_function(ops.start_mirrors, (info, (mirror_of(name),), SWITCH))

        return start

    assert fused_in(cm, SWITCH, new_tensor, OFFSET) == whole
    assert fused_in(cm, SWITCH, snapshot, OFFSET) == whole
    assert fused_in(cm, SWITCH, starting("seq_len"), OFFSET) == whole
    assert fused_in(cm, SWITCH, starting("input_pos"), OFFSET) == [(SWITCH,), (OFFSET,)]
    assert fused_in(cm, SWITCH, in_place, OFFSET) == [(SWITCH,), (OFFSET,)]
    assert fused_in(cm, SWITCH, view, OFFSET) == [(SWITCH,), (OFFSET,)]


def test_what_is_no_part_of_a_run(cm: Any) -> None:
    def from_the_interface(graph: Any, info: Any, offset: Any, tokens: Any) -> None:
        own = graph.call_function(ops.invoke, (info, "get_arg", "prompt_lens"))
        graph.call_function(ops.mutate, (info, OFFSET, own), {"active_args": ()})

    assert fused_in(cm, "input_ids") == []
    assert fused_in(cm, "input_ids", "token_gather_indices") == [("copy_", "copy_")]
    assert fused_in(cm, "input_ids", "cache_loc", "last_page_len_g1", "input_ids_host") == []
    assert fused_in(cm, SWITCH, from_the_interface) == [(SWITCH,)]
    assert fused_in(cm, *["input_ids"] * 9) == [("copy_",) * 4] * 2


def test_a_started_transfer_goes_behind_the_fused_node(cm: Any) -> None:
    def start(graph: Any, info: Any, offset: Any, tokens: Any) -> None:
        graph.call_function(ops.start_mirrors, (info, ("seq_len_host",), SWITCH))

    gm = graph_of(SWITCH, start, OFFSET)
    fuse_graphs([gm], cm)
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [ops.mutate_all, ops.start_mirrors]


def test_an_operand_of_another_size_raises_what_the_mutation_raises(cm: Any) -> None:
    gm = graph_of(SWITCH, OFFSET)
    fuse_graphs([gm], cm)
    BATCH.nest(cm)
    with pytest.raises(ValueError, match="one offset for each of 3 sequences, got 2"):
        gm(cm.info, torch.ones(2, dtype=torch.int32), None)


def test_arguments_that_are_activated_later_are_taken_into_account(cm: Any) -> None:
    """A run that was found while nothing was copied to the host is done mutation by mutation once something is."""
    info = make_interface(1, pages=False).info
    info._active_args = ("input_ids", "position_ids")
    gms = [graph_of(SWITCH, OFFSET) for _ in range(2)]
    for gm in gms:
        for node in gm.graph.find_nodes(op="call_function", target=ops.mutate):
            node.kwargs = {}
        gm.recompile()
    assert fuse_graphs([gms[1]], info) == 1
    results = []
    for activated in (False, True):
        if activated:
            info.activate_arg("input_pos_host")
        for gm in gms:
            info.set_example_sequence([[1, 2, 3], [4, 5, 6]], input_pos=[4, 5])
            with record_mirrors(info) as transfers:
                gm(info, torch.tensor([1, 2], dtype=torch.int32), None)
            results.append((in_use(info)["input_pos"], [(t.names, t.trigger) for t in transfers]))
    assert results[0] == results[1] == ([7, 9], [])
    assert results[2] == results[3]
    assert [trigger for _, trigger in results[2][1]] == [SWITCH, OFFSET]


def test_an_interpreter_which_builds_arguments_anew_does_not_fill_the_memory(
    cm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_mutations, "_MOST_RUNS", 4)
    gm = graph_of(SWITCH, "input_ids", OFFSET)
    fuse_graphs([gm], cm)
    info, offset, tokens = make_interface().info, torch.ones(3, dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    found = []
    for call in range(10):
        info.set_example_sequence([[1, 2, 3], [4], [5, 6]], input_pos=[4, 5, 6])
        (Interpreter(gm).run if call % 3 else gm)(info, offset, tokens)
        state = in_use(info)
        found.append((state["input_pos"], state["input_ids"]))
        assert len(fused_mutations._RUNS[info]) <= 4
    assert found == found[:1] * 10 and found[0] == ([7, 6, 8], [0, 1, 2])
    # Compiled code has the same object each time, and finds its run again.
    (node,) = gm.graph.find_nodes(op="call_function", target=ops.mutate_all)
    parts = node.args[1]
    assert fused_mutations._run_of(info, parts) is fused_mutations._run_of(info, parts)


def test_methods_that_somebody_has_replaced_are_called(cm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gm = graph_of(SWITCH, OFFSET)
    fuse_graphs([gm], cm)
    called: list[str] = []
    original = cm.info.offset_pos_and_cache_
    monkeypatch.setitem(
        vars(cm.info), OFFSET, lambda *args, **kwargs: (called.append(OFFSET), original(*args, **kwargs))
    )
    BATCH.nest(cm)
    gm(cm.info, torch.ones(3, dtype=torch.int32), None)
    assert called == [OFFSET]


def test_what_the_host_knows_can_be_changed_alone(cm: Any) -> None:
    gm = graph_of(SWITCH, "input_ids", OFFSET)
    fuse_graphs([gm], cm)
    (node,) = gm.graph.find_nodes(op="call_function", target=ops.mutate_all)
    offset, tokens = torch.ones(3, dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    known = []
    for run_it in (True, False):
        BATCH.nest(cm)
        values = cm.info.get_arg("input_pos", truncate=True).tolist()
        if run_it:
            gm(cm.info, offset, tokens)
        else:
            fused_mutations.note_on_host(cm.info, node.args[1], (tokens, offset))
            assert cm.info.get_arg("input_pos", truncate=True).tolist() == values
        state = in_use(cm.info)
        known.append((state["batch_info"], state["lengths"], cm.info._input_buffer.stale_names()))
    assert known[0] == known[1]


@pytest.mark.parametrize("strategy", ["auto", "override"])
def test_the_kernel_gives_consumers_what_they_found(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tests.triton_interpreter")
    cm, other = make_interface(), make_interface()
    plain, fused = draft_loop(cm, strategy), draft_loop(cm, strategy)
    assert fuse_graphs([fused], cm) == 2
    expected = outcome(plain, READS, other, BATCH)
    monkeypatch.setattr(fused_launch, "runs_kernels", lambda device: True)
    monkeypatch.setattr(fused_mutations, "_one_by_one", None)
    assert outcome(fused, READS, cm, BATCH) == expected
