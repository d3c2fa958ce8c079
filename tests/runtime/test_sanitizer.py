"""sanitize: what it accepts, what it refuses and how it says so, and that it leaves nothing behind."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, GraphModule
from torch.nn.modules import module as torch_module

from auto_deploy_ext import (
    StaleHostMirrorError,
    record_mirrors,
    register_host_reader,
    register_mutation,
    sanitize,
    trace_orchestrator,
)
from auto_deploy_ext.effects import HOST_READERS, MUTATIONS, buffer_of, mirror_of
from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.custom_ops.batch_info import BatchInfo
from auto_deploy_ext.embedded.custom_ops.sequence_info import SequenceInfo
from auto_deploy_ext.embedded.generation import generate
from auto_deploy_ext.embedded.pipeline import build_pipeline
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.orchestrator.dispatch import original_forward
from auto_deploy_ext.reports.stale_check import REWRITTEN, check_module
from auto_deploy_ext.rewriting.scoping import ScopeOptions, scope_graphs, scope_module
from auto_deploy_ext.runtime import host_mirrors
from auto_deploy_ext.runtime.refresh import bring_up_to_date, ensure_fresh
from auto_deploy_ext.runtime.sanitizer import poison_, unpoisoned
from tests.orchestrator_programs import OFFSET, SWITCH, build, consumer, make_interface, walk

PAGED = ("cu_num_pages_host", "cu_seqlen_host", "last_page_len_host", "seq_len_with_cache_host")


def extend_batch(cm: Any) -> None:
    """Two rows of three tokens."""
    cm.info.set_example_sequence([[1, 2, 3], [4, 5, 6]], input_pos=[7, 2], batch_info=[0, 0, 2, 6, 0, 0])


def decode_batch(cm: Any) -> None:
    """Two rows of one token."""
    cm.info.set_example_sequence([[1], [4]], input_pos=[7, 2])


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def buffers(cm: Any) -> Any:
    return cm.info._input_buffer


class Wrapper(nn.Module):
    """An eager orchestrator that nobody has rewritten."""

    def __init__(self, *reads: str, override: set[str] | None = None) -> None:
        super().__init__()
        self.drafter = nn.Module()
        self.drafter.head = consumer(*reads)
        self.override = override

    def forward(self, csi: Any) -> Any:
        csi.info.switch_to_generate_(active_args_override=self.override)
        csi.info.offset_pos_and_cache_(offsets(1, 0), active_args_override=self.override)
        names = [str(n.target) for n in self.drafter.head.graph.find_nodes(op="placeholder")]
        return self.drafter.head(**{n: v for n, v in csi.named_args.items() if n in names})


# -- what it accepts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["override", "copy", "replay"])
@pytest.mark.parametrize("config", ["eagle3_llama", "eagle3_llama_paged", "mtp_hybrid"])
def test_the_decodes_of_shipped_configs_pass_before_and_after_the_pass(config: str, strategy: str) -> None:
    if config != "eagle3_llama_paged" and strategy != "replay":
        pytest.skip("its draft loop reads no mirror, whatever the strategy")
    pipeline = build_pipeline(load_config(config, overrides={"transforms.scope_host_mirrors.strategy": strategy}))
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]

    def decode() -> tuple[list[list[int]], list[int]]:
        result = generate(pipeline.model, pipeline.cm, prompts, 6)
        return [output.tokens for output in result.outputs], result.accepted

    expected = decode()
    with sanitize(pipeline.cm) as rewritten:
        assert decode() == expected
    with sanitize(pipeline.cm) as original, original_forward(pipeline.model):
        assert decode() == expected
    assert rewritten.checked == original.checked
    assert (rewritten.checked > 0) == (config != "eagle3_llama"), "only that one reads no mirror"


def test_an_eager_wrapper_that_mirrors_everything_or_enough_passes() -> None:
    cm = make_interface(PAGED)
    for override in (None, set(PAGED)):
        extend_batch(cm)
        with sanitize(cm.info) as sanitizer:
            Wrapper(*PAGED, override=override)(cm)
        assert sanitizer.checked == 1


def test_mirrors_on_demand_pass_where_the_orchestrator_cannot_be_traced() -> None:
    cm = make_interface(PAGED)
    wrapper = Wrapper(*PAGED)
    scope_module(wrapper, cm, ScopeOptions(mode="hooks"))
    extend_batch(cm)
    with sanitize(cm) as sanitizer, record_mirrors(cm) as transfers:
        wrapper(cm)
    assert sanitizer.checked == 1
    assert [t.names for t in transfers] == [PAGED]


def test_building_named_args_is_no_read() -> None:
    cm = make_interface(["cu_seqlen_host", "input_pos_host"])
    extend_batch(cm)
    with sanitize(cm.info) as sanitizer:
        cm.info.switch_to_generate_(active_args_override=set())
        assert {"cu_seqlen_host", "input_pos_host"} < set(cm.named_args)
        assert sanitizer.checked == 0
        assert set(sanitizer.stale_mirrors()) >= {"cu_seqlen_host", "input_pos_host"}


# -- what it refuses -----------------------------------------------------------------------------------------------


def refused(error: pytest.ExceptionInfo[StaleHostMirrorError]) -> tuple[str, str, str]:
    value = error.value
    for name in (value.mirror, value.consumer, value.mutation):
        assert name in str(value)
    return value.mirror, value.consumer, value.mutation


def test_a_too_narrow_override_in_an_eager_wrapper_is_refused_with_all_three_names() -> None:
    cm = make_interface(PAGED)
    extend_batch(cm)
    wrapper = Wrapper(*PAGED, override={"cu_seqlen_host", "cu_num_pages_host", "last_page_len_host"})
    with pytest.raises(StaleHostMirrorError) as error, sanitize(cm.info):
        wrapper(cm)
    assert refused(error) == ("seq_len_with_cache_host", "drafter.head", OFFSET)


def test_the_consumer_is_known_by_its_name_in_a_given_model_or_by_its_class() -> None:
    cm = make_interface(["cu_seqlen_host"])
    draft = consumer("cu_seqlen_host")
    outer = nn.Module()
    outer.add_module("model", nn.ModuleDict({"draft": draft}))
    for module, name in ((outer, "model.draft"), (None, "GraphModule")):
        extend_batch(cm)
        with pytest.raises(StaleHostMirrorError) as error, sanitize(cm.info, module):
            cm.info.switch_to_generate_(active_args_override=set())
            draft(cm.named_args["cu_seqlen_host"])
        assert refused(error) == ("cu_seqlen_host", name, SWITCH)


def test_a_compiled_replacement_with_active_args_is_a_consumer() -> None:
    cm = make_interface(["cu_seqlen_host"])
    extend_batch(cm)
    compiled = nn.Identity()
    compiled.meta = {"active_args": ("cu_seqlen_host", "input_ids")}  # type: ignore[assignment]
    with pytest.raises(StaleHostMirrorError) as error, sanitize(cm.info):
        cm.info.switch_to_generate_(active_args_override=set())
        compiled(1)
    assert refused(error) == ("cu_seqlen_host", "Identity", SWITCH)


def test_a_variadic_consumer_may_read_every_active_mirror() -> None:
    graph = Graph()
    graph.output(graph.placeholder("**kwargs"))
    cm = make_interface(["seq_len_host"])
    extend_batch(cm)
    with pytest.raises(StaleHostMirrorError) as error, sanitize(cm.info):
        cm.info.switch_to_generate_(active_args_override=set())
        GraphModule(nn.Module(), graph)(x=1)
    assert refused(error) == ("seq_len_host", "GraphModule", SWITCH)


def test_explicit_reads_host_prepare_functions_and_unnesting_are_consumers() -> None:
    cm = make_interface(["cu_seqlen_host"], prepared=["input_pos_host"])
    info = cm.info
    reads = {
        ("seq_len_host", "get_arg"): lambda: cm.get_arg("seq_len_host"),
        ("cu_seqlen_host", "get_arg"): lambda: info.get_arg(name="cu_seqlen_host"),
        ("input_pos_host", "run_host_prepare_for_attention_forward"): info.run_host_prepare_for_attention_forward,
        ("seq_len_host", "unnest_sequences"): lambda: info.unnest_sequences(torch.zeros(1, 2)),
    }
    for (mirror, who), read in reads.items():
        extend_batch(cm)
        with sanitize(cm):
            if who == "run_host_prepare_for_attention_forward":
                read = info.run_host_prepare_for_attention_forward
            info.switch_to_generate_(active_args_override=set())
            with pytest.raises(StaleHostMirrorError) as error:
                read()
            assert refused(error) == (mirror, who, SWITCH)
            buffers(cm).copy_to_host()
            read()


def test_overlap_scheduling_that_leaves_a_mirror_behind_is_found_inside_the_new_batch() -> None:
    cm = make_interface(prepared=["input_ids_host"])
    with pytest.raises(StaleHostMirrorError) as error, sanitize(cm.info):
        cm.info.set_example_sequence(
            [[1], [2]],
            input_pos=[3, 3],
            _gather_idx=[0],
            _mask_scatter_indices=[1],
            _ungathered_input_ids=torch.tensor([9], dtype=torch.int32),
        )
    assert refused(error) == (
        "input_ids_host",
        "run_host_prepare_for_attention_forward",
        "rescatter_input_ids_",
    )
    extend_batch(cm)
    cm.info.run_host_prepare_for_attention_forward()


def test_twins_of_other_pools_are_told_apart() -> None:
    names = ("cu_num_pages_host", "cu_num_pages_g1_host")
    cm = make_interface(names, pools=2)
    decode_batch(cm)
    with sanitize(cm.info):
        cm.info.offset_pos_and_cache_(offsets(1, 1), active_args_override={"cu_num_pages_host"})
        consumer("cu_num_pages_host")(cm.get_arg("cu_num_pages_host"))
        with pytest.raises(StaleHostMirrorError) as error:
            consumer("cu_num_pages_g1_host")(None)
        assert refused(error) == ("cu_num_pages_g1_host", "GraphModule", OFFSET)
        cm.info.offset_pos_and_cache_(offsets(1, 1))
        cm.get_arg("cu_num_pages_g1_host")


def test_a_device_only_copy_and_a_write_through_a_view_are_seen() -> None:
    cm = make_interface(["seq_len_host"])
    decode_batch(cm)
    with sanitize(cm.info):
        cm.info.copy_("seq_len", offsets(1, 1))
        with pytest.raises(StaleHostMirrorError) as error:
            cm.get_arg("seq_len_host")
        assert refused(error)[2] == "copy_"
    with sanitize(cm.info):
        buffers(cm).copy_to_host()
        cm.get_arg("seq_len")[:1].add_(1)
        assert "input_pos_host" not in cm.info._active_args
        cm.get_arg("input_pos_host")
        with pytest.raises(StaleHostMirrorError) as error:
            cm.get_arg("seq_len_host")
        assert refused(error)[2] == "add_"


def test_a_registered_mutation_and_a_registered_reader_take_part() -> None:
    class Info(SequenceInfo):
        def advance_(self) -> None:
            self.offset_pos_and_cache_(offsets(1, 1), active_args_override=set())

        def plan(self) -> int:
            return int(self._input_buffer.get_host_view("input_pos")[0])

    register_mutation("advance_", writes=["input_pos"])
    register_host_reader("plan", ["input_pos_host"])
    try:
        info = Info(max_seq_len=8, max_batch_size=2, max_num_tokens=8)
        info.set_example_sequence([[1], [2]], input_pos=[3, 3])
        with sanitize(info):
            assert info.plan() == 3
            info.advance_()
            with pytest.raises(StaleHostMirrorError) as error:
                info.plan()
            info._input_buffer.copy_names_to_host(["input_pos"])
            assert info.plan() == 4
    finally:
        del MUTATIONS["advance_"], HOST_READERS["plan"]
    assert refused(error) == ("input_pos_host", "plan", "advance_")


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(StaleHostMirrorError("a_host", "draft", "copy_")))
    assert (error.mirror, error.consumer, error.mutation) == ("a_host", "draft", "copy_")
    assert str(error).startswith("draft reads a_host, which is stale: copy_ has written a on the device")


# -- laws on rewritten graphs --------------------------------------------------------------------------------------

BUFFERS = ("cu_seqlen", "input_pos", "seq_len", "cu_num_pages", "cu_num_pages_g1", "use_initial_states")
MIRRORS = tuple(f"{name}_host" for name in BUFFERS)
INTERFACES = [
    make_interface(MIRRORS, pools=2, prepared=["input_pos_host"]),
    make_interface(("cu_num_pages_host", "cu_num_pages_g1_host", "seq_len_host"), pools=2, prepared=["seq_len_host"]),
]
steps = st.lists(
    st.one_of(
        st.sampled_from(["switch", "offset", "prepare"]),
        st.tuples(st.sampled_from(["copy", "inplace"]), st.sampled_from(["seq_len", "input_pos"])),
        st.tuples(st.just("get"), st.sampled_from(MIRRORS)),
        st.tuples(st.just("consume"), st.sampled_from(["a", "b"])),
    ),
    max_size=9,
)
consumers = st.fixed_dictionaries({n: st.lists(st.sampled_from(MIRRORS), unique=True, max_size=3) for n in "ab"})


READERS = (
    "a",
    "b",
    "get_arg",
    "run_host_prepare_for_attention_forward",
    f"{SWITCH} on the host",
    f"{OFFSET} on the host",
)


def run(gm: GraphModule, cm: Any) -> Iterator[StaleHostMirrorError]:
    """Run a graph on batches of both kinds under the sanitizer; the errors."""
    for batch in (extend_batch, decode_batch):
        batch(cm)
        try:
            with sanitize(cm.info, gm):
                gm(cm, offsets(1, 0), offsets(1, 2))
        except StaleHostMirrorError as error:
            yield error


def drop_entry_checks(gm: GraphModule) -> None:
    """The batches here are fresh at entry, and a check of that would also repair what is left out."""
    for node in [n for n in gm.graph.nodes if n.target is ensure_fresh]:
        gm.graph.erase_node(node)
    gm.recompile()


def needed(gm: GraphModule) -> Iterator[tuple[Any, str, Any]]:
    """Every name by which a rewritten graph brings a mirror up to date: its node, the name, and how to leave it out."""

    def of_argument(node: Any, index: int) -> Iterator[tuple[Any, str, Any]]:
        names = node.args[index]
        return ((node, n, lambda kept: node.update_arg(index, kept)) for n in names)

    def of_keyword(node: Any, key: str) -> Iterator[tuple[Any, str, Any]]:
        names = node.kwargs.get(key) or ()
        return ((node, n, lambda kept: node.update_kwarg(key, kept)) for n in names)

    for node in walk(gm):
        if node.target is ops.mutate:
            yield from of_keyword(node, "active_args")
            yield from of_keyword(node, "replays")
        elif node.target in (bring_up_to_date, ops.start_mirrors):
            yield from of_argument(node, 1)


def names_of(node: Any, name: str) -> tuple[str, ...]:
    """The list of a node that has a name."""
    lists = (node.args[1], *(node.kwargs.get(key) or () for key in ("active_args", "replays")))
    return next(names for names in lists if isinstance(names, tuple) and name in names)


def statically_stale(gm: GraphModule, cm: Any) -> set[str]:
    """What the static check finds stale in a rewritten graph."""
    return {f.mirror for f in check_module(gm, cm, ScopeOptions()).stale if f.form == REWRITTEN}


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps, consumers, st.sampled_from([0, 1]), st.sampled_from(["override", "copy", "replay", "auto"]))
def test_every_rewritten_program_passes_and_none_does_without_a_mirror_it_needs(
    steps: Any, consumers: Any, which: int, strategy: str
) -> None:
    cm = INTERFACES[which]
    consumers = {k: [n for n in names if n in cm.info._active_args] for k, names in consumers.items()}
    gm = build(steps, consumers)
    scope_graphs({"graph": gm}, cm, ScopeOptions(strategy=strategy))
    drop_entry_checks(gm)
    assert list(run(gm, cm)) == []
    assert statically_stale(gm, cm) == set()
    for node, name, leave in list(needed(gm)):
        names = names_of(node, name)
        leave(tuple(n for n in names if n != name))
        gm.recompile()
        found = list(run(gm, cm))
        assert mirror_of(buffer_of(name)) in [error.mirror for error in found], (node.format_node(), name)
        assert {error.mirror for error in found} <= statically_stale(gm, cm)
        for error in found:
            assert error.consumer in READERS
            assert error.mutation in (SWITCH, OFFSET, "copy_", "add_")
        leave(names)
    gm.recompile()
    assert list(run(gm, cm)) == []


def test_each_name_left_out_of_a_draft_loop_is_named_with_its_reader_and_its_writer() -> None:
    cm = make_interface([*PAGED, "seq_len_host"])
    program = ["switch", "offset", ("consume", "draft"), ("copy", "seq_len"), ("consume", "check")]
    gm = build(program, {"draft": PAGED, "check": ["seq_len_host"]})
    scope_graphs({"graph": gm}, cm, ScopeOptions(strategy="override"))
    drop_entry_checks(gm)
    found = []
    for node in list(gm.graph.nodes):
        if node.target is ops.mutate and node.kwargs.get("active_args"):
            names = node.kwargs["active_args"]
            for name in names:
                node.update_kwarg("active_args", tuple(n for n in names if n != name))
                gm.recompile()
                found += [(e.mirror, e.consumer, e.mutation) for e in run(gm, cm)]
            node.update_kwarg("active_args", names)
        elif node.target is bring_up_to_date:
            node.update_arg(1, ())
            gm.recompile()
            found += [(e.mirror, e.consumer, e.mutation) for e in run(gm, cm)]
    assert set(found) == {
        ("cu_seqlen_host", "draft", SWITCH),
        ("cu_num_pages_host", "draft", OFFSET),
        ("last_page_len_host", "draft", OFFSET),
        ("seq_len_with_cache_host", "draft", OFFSET),
        ("seq_len_host", "check", "copy_"),
    }


# -- poison --------------------------------------------------------------------------------------------------------


def mirror(cm: Any, name: str) -> torch.Tensor:
    return buffers(cm).get_host_memory(name, truncate=True)


def test_a_stale_mirror_holds_nothing_plausible_and_its_old_value_can_be_had() -> None:
    cm = make_interface()
    extend_batch(cm)
    old = mirror(cm, "cu_seqlen").clone()
    with sanitize(cm.info):
        cm.info.switch_to_generate_()
        shown = mirror(cm, "cu_seqlen").long()
        assert (shown.abs() > 2**28).all()
        assert ((shown[1:] - shown[:-1]).abs() > 2**28).all()
        assert (shown.to(torch.int32).diff().abs() > 2**28).all()
        assert torch.equal(mirror(cm, "slot_idx"), torch.tensor([0, 1])), "that one is fresh"
        with unpoisoned(buffers(cm)):
            assert torch.equal(mirror(cm, "cu_seqlen"), old)
        assert not torch.equal(mirror(cm, "cu_seqlen"), old)


def test_what_the_host_computes_from_old_values_is_kept_and_the_rest_is_absurd_again() -> None:
    cm = make_interface()
    decode_batch(cm)
    buffer = buffers(cm)
    with sanitize(cm.info):
        cm.info.offset_pos_and_cache_(offsets(1, 2))
        with unpoisoned(buffer):
            # What a replay on the host does: the same arithmetic, then the mirror is as new as the device.
            mirror(cm, "input_pos").add_(offsets(1, 2))
            buffer.mark_mirror("input_pos", buffer.device_version["input_pos"])
        assert cm.get_arg("input_pos_host", truncate=True).tolist() == [8, 4]
        assert mirror(cm, "seq_len_with_cache").abs().min() > 2**28
        cm.info.copy_("seq_len", offsets(1, 1))
        assert mirror(cm, "input_pos").tolist() == [8, 4]
        assert mirror(cm, "seq_len_with_cache").abs().min() > 2**28


def test_a_mirror_that_was_brought_up_to_date_keeps_what_lies_beyond_a_shorter_batch() -> None:
    """Old values come back beyond the length that a mirror had when it was refreshed, not beyond a later one."""
    cm = make_interface()
    cm.info.activate_arg("input_ids_host")
    cm.info.set_example_sequence([[1, 2, 3, 4], [5, 6, 7, 8]], input_pos=[7, 2])
    with sanitize(cm.info):
        cm.info.copy_("input_ids", torch.arange(50, 58, dtype=torch.int32))
        host_mirrors.move(cm.info, ("input_ids_host",))
        ops.mutate(cm.info, "switch_to_generate_", active_args=(), replays=("cu_seqlen", "input_ids"))
        assert cm.get_arg("input_ids_host", truncate=True).tolist() == [53, 57]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.float32, torch.bool])
def test_poison_of_each_type(dtype: torch.dtype) -> None:
    device = torch.tensor([1, 0, 1, 1]).to(dtype)
    poisoned = torch.zeros_like(device)
    poison_(poisoned, device)
    if dtype is torch.bool:
        assert poisoned.tolist() == [False, True, False, False]
    elif dtype.is_floating_point:
        assert poisoned.isnan().all()
    else:
        top = torch.iinfo(dtype).max
        assert (poisoned.double().abs() >= top // 4).all()
        assert (poisoned.double().diff().abs() >= top // 2).all()


def test_flags_stay_wrong_when_the_device_changes_again() -> None:
    cm = make_interface()
    decode_batch(cm)
    with sanitize(cm.info):
        for values in ([True, False], [False, True]):
            cm.info.copy_("use_initial_states", torch.tensor(values))
            assert mirror(cm, "use_initial_states").tolist() == [not v for v in values]


def test_what_brings_a_mirror_up_to_date_ends_its_poison_with_the_right_values() -> None:
    cm = make_interface(["input_pos_host"])
    info, buffer = cm.info, buffers(cm)

    def ticket() -> None:
        buffer.start_copy_to_host(["input_pos"]).wait()

    def unclaimed() -> None:
        buffer.copy_names_to_host(["input_pos"], non_blocking=True)

    ways = [buffer.copy_to_host, lambda: buffer.copy_names_to_host(["input_pos"]), ticket, unclaimed]
    ways += [lambda: ensure_fresh(cm, ("input_pos_host",)), lambda: bring_up_to_date(cm, ("input_pos_host",))]
    for way in ways:
        decode_batch(cm)
        beyond = buffer.get_host_memory("input_pos").clone()[2:]
        with sanitize(info):
            info.offset_pos_and_cache_(offsets(1, 1), active_args_override=set())
            with pytest.raises(StaleHostMirrorError):
                info.get_arg("input_pos_host")
            way()
            assert info.get_arg("input_pos_host", truncate=True).tolist() == [8, 3]
            assert torch.equal(buffer.get_host_memory("input_pos")[2:], beyond)


def test_poison_never_travels_to_the_device() -> None:
    cm = make_interface()
    decode_batch(cm)
    with sanitize(cm.info):
        cm.info.offset_pos_and_cache_(offsets(1, 1))
        buffers(cm).copy_to_device()
        assert cm.info.get_arg("input_pos", truncate=True).tolist() == [7, 2]
        cm.info.offset_pos_and_cache_(offsets(1, 1))
        decode_batch(cm)
        assert cm.info.get_arg("input_pos", truncate=True).tolist() == [7, 2]
        assert cm.info.get_arg("input_pos_host", truncate=True).tolist() == [7, 2]


def test_tracing_inside_neither_raises_nor_loses_the_old_values() -> None:
    cm = make_interface(["seq_len_host", "cu_seqlen_host"])
    extend_batch(cm)
    old = mirror(cm, "seq_len").clone()

    class Reads(nn.Module):
        def forward(self, csi: Any) -> Any:
            csi.info.switch_to_generate_()
            return csi.get_arg("seq_len_host") + 1

    with sanitize(cm.info):
        cm.info.copy_("seq_len", offsets(2, 2))
        graph_module = trace_orchestrator(Reads(), cm)
        assert SWITCH in graph_module.code
        assert mirror(cm, "seq_len").abs().min() > 2**28
        with unpoisoned(buffers(cm)):
            assert torch.equal(mirror(cm, "seq_len"), old)


# -- coming and going ----------------------------------------------------------------------------------------------


def traces(cm: Any) -> tuple[Any, ...]:
    hooks = torch_module._global_forward_pre_hooks
    return dict(vars(cm)), dict(vars(cm.info)), dict(vars(buffers(cm))), dict(hooks)


def test_nothing_is_left_behind_after_an_error_either() -> None:
    cm = make_interface(PAGED)
    extend_batch(cm)
    _ = cm.named_args  # which an interface remembers
    before, old = traces(cm), mirror(cm, "cu_seqlen").clone()
    with pytest.raises(StaleHostMirrorError), sanitize(cm):
        assert traces(cm) != before
        Wrapper(*PAGED, override=set())(cm)
    assert traces(cm) == before
    assert torch.equal(mirror(cm, "cu_seqlen"), old), "stale, but no longer absurd"
    assert "cu_seqlen" in buffers(cm).stale_names()


def test_a_nested_sanitizer_is_the_outer_one() -> None:
    cm = make_interface(["cu_seqlen_host"])
    extend_batch(cm)
    before = traces(cm)
    with sanitize(cm.info) as outer:
        with sanitize(cm, Wrapper("cu_seqlen_host")) as inner:
            assert inner is outer
        cm.info.switch_to_generate_(active_args_override=set())
        with pytest.raises(StaleHostMirrorError):
            cm.get_arg("cu_seqlen_host")
    assert traces(cm) == before


def test_it_goes_together_with_recording() -> None:
    cm = make_interface(["cu_seqlen_host"])
    extend_batch(cm)
    with sanitize(cm.info), record_mirrors(cm.info) as transfers:
        Wrapper("cu_seqlen_host", override={"cu_seqlen_host"})(cm)
    assert [t.names for t in transfers] == [("cu_seqlen_host",)]


# -- a host whose buffer keeps no versions -------------------------------------------------------------------------


class PlainBuffer:
    """Two memories, one copy of everything, no versions: AutoDeploy's."""

    def __init__(self) -> None:
        self.device = self.host_device = torch.device("cpu")
        self.tensor_names = ["cu_seqlen", "input_pos"]
        self.sides = [{n: torch.zeros(4, dtype=torch.int32) for n in self.tensor_names} for _ in range(2)]

    def get_view(self, name: str, truncate: bool = False) -> torch.Tensor:
        return self.sides[0][name][: 2 if truncate else 4]

    def get_host_view(self, name: str, truncate: bool = False) -> torch.Tensor:
        return self.sides[1][name][: 2 if truncate else 4]

    def get_current_length(self, name: str) -> int:
        return 2

    def get_capacity(self, name: str) -> int:
        return 4

    def copy_(self, name: str, src: torch.Tensor) -> None:
        self.get_view(name, truncate=True).copy_(src)

    def stage(self, name: str, data: list[int]) -> None:
        self.get_host_view(name, truncate=True).copy_(torch.tensor(data))

    def copy_to_device(self) -> None:
        for name in self.tensor_names:
            self.sides[0][name].copy_(self.sides[1][name])

    def copy_to_host(self, non_blocking: bool = False) -> None:
        for name in self.tensor_names:
            self.sides[1][name].copy_(self.sides[0][name])


class PlainInfo:
    def __init__(self) -> None:
        self._input_buffer = PlainBuffer()
        self._active_args = ("cu_seqlen_host", "input_pos_host")
        self.device = torch.device("cpu")
        self.batch_info = BatchInfo()

    def nest_sequences(self, input_pos: list[int], cache_loc_per_pool: Any = None) -> None:
        self.batch_info.update([0, 0, 2, 4, 0, 0])
        self._input_buffer.stage("cu_seqlen", [0, 2])
        self._input_buffer.stage("input_pos", input_pos)
        self._input_buffer.copy_to_device()

    def get_arg(self, name: str) -> torch.Tensor:
        return self._input_buffer.get_host_view(name.removesuffix("_host"), truncate=True)

    @property
    def named_args(self) -> dict[str, torch.Tensor]:
        return {name: self.get_arg(name) for name in self._active_args}

    def switch_to_generate_(self, active_args_override: set[str] | None = None) -> None:
        if not self.batch_info.is_generate_only():
            self.batch_info.update([0, 0, 0, 0, 2, 2])
            self._input_buffer.copy_("cu_seqlen", torch.tensor([0, 1]))
            self._mirror({"cu_seqlen_host"}, active_args_override)

    def offset_pos_and_cache_(self, offset: torch.Tensor, active_args_override: set[str] | None = None) -> None:
        self._input_buffer.copy_("input_pos", self._input_buffer.get_view("input_pos", truncate=True) + offset)
        self._mirror({"input_pos_host"}, active_args_override)

    def _mirror(self, written: set[str], override: set[str] | None) -> None:
        if written & (set(self._active_args) if override is None else override):
            self._input_buffer.copy_to_host()


def test_a_host_without_versions_is_checked_too() -> None:
    info = PlainInfo()
    buffer = info._input_buffer
    methods = set(dir(type(info)))
    with sanitize(info):
        info.nest_sequences([7, 2])
        info.switch_to_generate_()
        info.offset_pos_and_cache_(offsets(1, 1))
        assert info.get_arg("input_pos_host").tolist() == [8, 3]
        info.offset_pos_and_cache_(offsets(1, 1), active_args_override=set())
        assert len(info.named_args) == 2
        assert info.get_arg("cu_seqlen_host").tolist() == [0, 1]
        with pytest.raises(StaleHostMirrorError) as error:
            info.get_arg("input_pos_host")
        assert refused(error) == ("input_pos_host", "get_arg", OFFSET)
        assert buffer.sides[1]["input_pos"].abs().min() > 2**28
        info.switch_to_generate_(active_args_override=set())
        assert info.get_arg("cu_seqlen_host").tolist() == [0, 1], "the batch was generate-only"
        buffer.copy_to_host()
        assert info.get_arg("input_pos_host").tolist() == [9, 4]
        info.offset_pos_and_cache_(offsets(1, 1), active_args_override=set())
        info.nest_sequences([5, 6])
        assert info.get_arg("input_pos_host").tolist() == buffer.get_view("input_pos", truncate=True).tolist() == [5, 6]
    assert not {n for n in vars(buffer) if n.startswith("_sanitizer")}
    assert methods == set(dir(type(info)))
