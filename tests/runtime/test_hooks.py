"""Mirrors on demand: each rule of `auto_deploy_ext.runtime.hooks`, on small wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from auto_deploy_ext import host, plan, record_mirrors, register_mutation
from auto_deploy_ext.effects import MUTATIONS
from auto_deploy_ext.orchestrator import bind_variants, original_forward
from auto_deploy_ext.runtime import host_mirrors
from auto_deploy_ext.runtime.hooks import HookedForward, install
from tests.wrappers.harness import make_interface, nest, scoped, step
from tests.wrappers.library import Eagle, StopsOnMirror, model

STEP = torch.tensor([1, 1], dtype=torch.int32)
#: early releases of AutoDeploy write the host twins themselves instead.
SWITCH_COPIES = int(host.features["pages_per_pool"])


class Scripted(nn.Module):
    """Runs a function of itself, the interface and its SequenceInfo."""

    def __init__(self, script: Callable[[Any, Any, Any], Any], **modules: nn.Module) -> None:
        super().__init__()
        self.script = script
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, csi: Any = None, extra: int = 0) -> Any:
        return self.script(self, csi, csi.info) if csi is not None else extra


def moved(script: Callable[[Any, Any, Any], Any], live_out: tuple[str, ...] = (), **modules: nn.Module) -> Any:
    """(names moved, triggers) of one forward of a hooked wrapper, on a batch of two extend rows."""
    cm = make_interface(3)
    host_mirrors.mirrors_of(cm)  # as the pass does; on an interface that was never seen everything counts as stale
    wrapper = Scripted(script, **modules)
    install(wrapper, "csi", live_out)
    nest(cm, [], 2, 3)
    with record_mirrors(cm) as transfers:
        wrapper(cm)
    return [t.names for t in transfers], [t.trigger for t in transfers]


def test_a_consumer_gets_its_stale_mirrors_in_one_transfer_and_no_other() -> None:
    def script(self: Any, csi: Any, info: Any) -> None:
        info.switch_to_generate_()
        info.offset_pos_and_cache_(STEP)
        self.reader(
            csi.get_arg("input_ids"), csi.get_arg("cu_seqlen"), csi.get_arg("input_pos"), csi.get_arg("slot_idx")
        )
        self.reader(
            csi.get_arg("input_ids"), csi.get_arg("cu_seqlen"), csi.get_arg("input_pos"), csi.get_arg("slot_idx")
        )

    reader = model("input_ids", "cu_seqlen_host", "input_pos_host", "slot_idx_host")
    assert moved(script, reader=reader) == ([("cu_seqlen_host", "input_pos_host")], ["reader"])


def test_a_consumer_that_takes_anything_reads_everything() -> None:
    graph = fx.Graph()
    graph.placeholder("**kwargs")
    graph.output(None)

    def script(self: Any, csi: Any, info: Any) -> None:
        info.switch_to_generate_()
        self.reader()

    names, _ = moved(script, reader=fx.GraphModule(nn.Module(), graph))
    assert len(names) == 1 and len(names[0]) == 6


def test_an_eager_module_reads_the_mirrors_among_its_arguments() -> None:
    class Reader(nn.Module):
        def forward(self, **kwargs: Any) -> None:
            self.seen = {name: value[:3].tolist() for name, value in kwargs.items()}

    def script(self: Any, csi: Any, info: Any) -> None:
        info.switch_to_generate_()
        self.reader(**{name: csi.named_args[name] for name in ("cu_seqlen_host", "input_pos")})

    reader = Reader()
    assert moved(script, reader=reader)[0] == [("cu_seqlen_host",)]
    assert reader.seen["cu_seqlen_host"] == [0, 1, 2]


def test_calls_that_read_mirrors_are_consumers_and_named_args_is_not() -> None:
    prepared: list[list[int]] = []

    def script(self: Any, csi: Any, info: Any) -> None:
        info.register_host_prepare_for_attention_forward(
            lambda seq_len_with_cache_host: prepared.append(seq_len_with_cache_host[:2].tolist()),
            ["seq_len_with_cache_host"],
        )
        info.switch_to_generate_()
        info.offset_pos_and_cache_(STEP)
        assert set(csi.named_args) and set(info.named_args)
        info.run_host_prepare_for_attention_forward()
        assert [len(t) for t in info.unnest_sequences(torch.zeros(2, 1))] == [1, 1]
        assert info.get_arg("cu_seqlen_host")[:3].tolist() == [0, 1, 2]
        assert csi.get_arg("input_pos_host")[:2].tolist() == [13, 15]
        csi.get_arg("input_pos")

    names, triggers = moved(script)
    assert names == [("seq_len_with_cache_host",), ("seq_len_host",), ("cu_seqlen_host",), ("input_pos_host",)]
    assert triggers == ["run_host_prepare_for_attention_forward", "unnest_sequences", "get_arg", "get_arg"]
    assert prepared == [[14, 16]]


@pytest.mark.parametrize("inference", [False, True])
def test_a_write_into_a_buffer_that_no_mutation_made_is_noticed(inference: bool) -> None:
    def script(self: Any, csi: Any, info: Any) -> None:
        with torch.inference_mode(inference):
            csi.get_arg("input_pos")[:1].add_(5)
            assert csi.get_arg("input_pos_host")[:2].tolist() == [14, 11]
            assert csi.get_arg("input_pos_host")[:2].tolist() == [14, 11]

    assert moved(script)[0] == [("input_pos_host",)]


def test_a_wrappers_own_mutation_marks_what_it_was_registered_to_write() -> None:
    register_mutation("advance_", writes=("slot_idx",), operand=0)

    def script(self: Any, csi: Any, info: Any) -> None:
        info.advance_(STEP)
        csi.get_arg("slot_idx_host")

    try:
        cm = make_interface(3)
        host_mirrors.mirrors_of(cm)
        wrapper = Scripted(script)
        install(wrapper, "csi")
        nest(cm, [], 2, 3)
        cm.info.advance_ = lambda offset: None
        with record_mirrors(cm) as transfers:
            wrapper(cm)
    finally:
        del MUTATIONS["advance_"]
    assert [t.names for t in transfers] == [("slot_idx_host",)]


def test_live_out_is_up_to_date_after_the_forward_and_nothing_else_is() -> None:
    def script(self: Any, csi: Any, info: Any) -> None:
        info.switch_to_generate_()

    assert moved(script, ("seq_len_host", "slot_idx_host")) == ([("seq_len_host",)], ["live_out"])


def test_the_interface_is_as_it_was_when_the_forward_ends_also_by_an_error() -> None:
    def script(self: Any, csi: Any, info: Any) -> None:
        info.switch_to_generate_()
        raise ZeroDivisionError

    cm = make_interface(3)
    wrapper = Scripted(script)
    install(wrapper, "csi")
    nest(cm, [], 2, 3)
    before = set(vars(cm)), set(vars(cm.info)), set(vars(cm.info._input_buffer))
    with pytest.raises(ZeroDivisionError):
        wrapper(cm)
    assert before == (set(vars(cm)), set(vars(cm.info)), set(vars(cm.info._input_buffer)))
    assert "cu_seqlen" in host_mirrors.stale_names(cm)
    nest(cm, [], 2, 3)
    with record_mirrors(cm) as transfers:
        cm.info.switch_to_generate_()
    assert len(transfers) == SWITCH_COPIES, "outside the forward the host mirrors as ever"


def test_a_call_without_an_interface_and_a_bypassed_one_run_the_forward_as_it_is() -> None:
    def script(self: Any, csi: Any, info: Any) -> str:
        info.switch_to_generate_()
        return "ran"

    cm = make_interface(3)
    wrapper = Scripted(script)
    install(wrapper, "csi")
    assert wrapper(extra=3) == 3
    nest(cm, [], 2, 3)
    with original_forward(wrapper), record_mirrors(cm) as transfers:
        assert wrapper(cm) == "ran"
    assert len(transfers) == SWITCH_COPIES and all(len(t.names) > 6 for t in transfers)


def test_hooks_and_graphs_replace_each_other() -> None:
    wrapper, _ = scoped(Eagle, mode="hooks")
    first = wrapper.forward
    assert isinstance(first, HookedForward)
    install(wrapper, "cache_seq_interface")
    assert wrapper.forward is not first
    assert wrapper.forward.original.__func__ is Eagle.forward
    bind_variants(wrapper, "cache_seq_interface", {})
    assert wrapper.forward.original.__func__ is Eagle.forward
    hooks = wrapper.draft_model._forward_pre_hooks
    assert len(hooks) == 1, "installed once, however often"


def test_the_plan_before_the_pass_is_that_after_it() -> None:
    before = plan(StopsOnMirror(), make_interface(3))
    wrapper, cm = scoped(StopsOnMirror)
    assert plan(wrapper, cm) == before
    assert before.mode == "hooks" and before.variants == ("hooks",)
    assert type(before).from_json(before.to_json()) == before
    assert step(wrapper, cm, [], 2).transfers
