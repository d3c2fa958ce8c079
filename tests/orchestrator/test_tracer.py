"""Tracing: the graph does what the forward does for every batch its guards accept; what no graph can do is refused."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from auto_deploy_ext import trace_orchestrator
from auto_deploy_ext.orchestrator import UntraceableError, ops, trace_variants
from auto_deploy_ext.orchestrator.example_batches import set_batch

from .wrappers import DRAFT_ARGS, DraftLoop, Output, consumer, example, interface, nest


def snapshot(cm: Any) -> dict[str, Any]:
    info = cm.info
    state = {name: info._input_buffer.get_view(name).clone() for name in info._input_buffer.tensor_names}
    state |= {
        f"{name}_host": info._input_buffer.get_host_view(name).clone() for name in info._input_buffer.tensor_names
    }
    state["batch_info"] = info.batch_info.serialize().clone()
    return state


def same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def effects(graph: Any) -> list[str]:
    return [str(n.args[1]) for n in graph.nodes if n.target is ops.mutate]


@pytest.mark.parametrize(
    ("kind", "prefill", "extend"),
    [
        ("prefill", [5], 0),
        ("prefill", [3, 4, 2], 0),
        ("extend", [], 1),
        ("extend", [], 4),
        ("mixed", [6], 1),
        ("mixed", [2, 3], 2),
    ],
)
def test_the_graph_gives_what_the_forward_gives_for_other_batches_of_its_kind(
    kind: str, prefill: list[int], extend: int
) -> None:
    torch.manual_seed(0)
    wrapper, cm = DraftLoop(), interface()
    graph = trace_variants(wrapper, cm)[kind]
    nest(cm, prefill, extend, 3)
    before = copy.deepcopy(cm)
    assert graph.guards(cm, wrapper)
    traced, eager = graph(cm), wrapper(before)
    assert type(traced) is Output
    assert torch.equal(traced.tokens, eager.tokens)
    assert torch.equal(traced.lengths, eager.lengths)
    assert same_state(snapshot(cm), snapshot(before))


def test_one_variant_is_made_for_each_kind_the_wrapper_takes() -> None:
    variants = trace_variants(DraftLoop(), interface())
    assert list(variants) == ["extend", "mixed", "prefill"]
    assert effects(variants["extend"].graph) == ["switch_to_generate_", "copy_", "offset_pos_and_cache_"] * 2


def test_guards_accept_exactly_the_batches_that_take_the_same_branches() -> None:
    wrapper, cm = DraftLoop(), interface()
    variants = trace_variants(wrapper, cm)
    for prefill, extend, expected in [
        ([4], 0, "prefill"),
        ([], 2, "extend"),
        ([4], 3, "mixed"),
        ([1, 2, 3], 1, "mixed"),
    ]:
        nest(cm, prefill, extend, 3)
        assert [name for name, v in variants.items() if v.guards(cm, wrapper)] == [expected]
    nest(cm, [], 2, 2)  # rows of another draft length: the wrapper's own assertion would fail
    assert not any(v.guards(cm, wrapper) for v in variants.values())


def test_equal_conditions_are_one_guard_in_the_order_in_which_they_arose() -> None:
    class Repeats(nn.Module):
        def forward(self, csi: Any) -> Any:
            for _ in range(3):
                if csi.info.batch_info.get_num_sequences()[1] > 0:
                    pass
            _, extend, _ = csi.info.batch_info.get_num_sequences()
            if csi.info.batch_info.get_num_tokens()[1] // extend == 4:
                return extend
            return 0

    cm = example("extend")
    graph = trace_orchestrator(Repeats(), cm)
    assert len(graph.guards.conditions) == 2
    nest(cm, [3], 0, 3)
    assert graph.guards(cm, graph.owner) is False  # and the division by zero behind it is never reached


def test_a_number_that_python_needs_is_an_equality_guard() -> None:
    class Unrolled(nn.Module):
        def forward(self, csi: Any) -> Any:
            rows = [csi.get_arg("input_pos")[i] for i in range(csi.info.num_sequences)]
            return torch.stack(rows)

    cm = interface()
    nest(cm, [], 3, 3)
    graph = trace_orchestrator(Unrolled(), cm)
    assert torch.equal(graph(cm), torch.tensor([9, 10, 11], dtype=torch.int32))
    assert graph.guards(cm, graph.owner)
    nest(cm, [], 2, 3)
    assert not graph.guards(cm, graph.owner)


def test_a_branch_on_a_shape_is_guarded_by_the_whole_batch() -> None:
    class Shapes(nn.Module):
        def forward(self, csi: Any) -> Any:
            tokens = csi.get_arg("input_ids").flatten() + 1
            return tokens * 2 if tokens.shape[0] > 8 else tokens

    cm = interface()
    nest(cm, [4], 0, 3)
    graph = trace_orchestrator(Shapes(), cm)
    assert torch.equal(graph(cm), cm.get_arg("input_ids").flatten() + 1)
    nest(cm, [5, 6], 0, 3)
    assert not graph.guards(cm, graph.owner)


def test_a_python_attribute_that_was_read_is_guarded() -> None:
    wrapper, cm = DraftLoop(2), interface(2)
    graph = trace_variants(wrapper, cm)["extend"]
    nest(cm, [], 2, 2)
    assert graph.guards(cm, wrapper)
    wrapper.max_draft_len = 3
    assert not graph.guards(cm, wrapper)


def test_host_integers_read_after_a_switch_are_those_after_the_switch() -> None:
    class AfterSwitch(nn.Module):
        def forward(self, csi: Any) -> Any:
            csi.info.switch_to_generate_()
            _, _, num_decode = csi.info.batch_info.get_num_sequences()
            if csi.info.is_generate_only:
                return torch.full((num_decode,), 7)
            return torch.zeros(1)

    cm = interface()
    nest(cm, [], 2, 3)
    graph = trace_orchestrator(AfterSwitch(), cm)
    nest(cm, [4], 2, 3)
    state = snapshot(cm)
    assert graph.guards(cm, graph.owner)
    assert same_state(snapshot(cm), state)  # the guard repeats the switch on a shadow only
    assert graph(cm).tolist() == [7, 7, 7]


@pytest.mark.parametrize("needs", ["bool", "item", "int", "tolist", "nonzero", "range"])
def test_a_branch_on_device_data_is_refused_with_its_line(needs: str) -> None:
    class Peeks(nn.Module):
        def forward(self, csi: Any) -> Any:
            tokens = csi.get_arg("input_ids")
            if needs == "bool" and tokens.sum() > 3:
                return tokens
            if needs == "item":
                return torch.zeros(tokens.sum().item())
            if needs == "int":
                return torch.zeros(int(tokens[0, 0]))
            if needs == "tolist":
                return tokens.tolist()
            if needs == "nonzero":
                return tokens[tokens > 0]
            return [tokens for _ in range(tokens.sum())]

    cm = example("extend")
    state = snapshot(cm)
    with pytest.raises(UntraceableError, match=r"test_tracer\.py:\d+: .*device data") as caught:
        trace_orchestrator(Peeks(), cm)
    line = int(caught.value.where.rsplit(":", 1)[1])
    source = Path(__file__).read_text().splitlines()[line - 1]
    assert {
        "bool": "sum() > 3",
        "item": ".item()",
        "int": "int(tokens",
        "tolist": ".tolist()",
        "nonzero": "tokens > 0",
    }.get(needs, "range(tokens") in source
    assert same_state(snapshot(cm), state)


def test_tracing_leaves_the_interface_and_the_wrapper_as_they_were() -> None:
    class Assigns(DraftLoop):
        steps = 0

        def forward(self, csi: Any) -> Any:
            self.last_scores = self.target_model(**self.args_of(csi, self.target_model))[0]
            self.steps = self.steps + 1
            csi.info.switch_to_generate_()
            return self.last_scores

    wrapper, cm = Assigns(), example("extend")
    state, fields = snapshot(cm), dict(wrapper.__dict__)
    graph = trace_orchestrator(wrapper, cm)
    assert same_state(snapshot(cm), state)
    assert wrapper.__dict__ == fields
    assert type(wrapper) is Assigns
    result = graph(cm)
    assert wrapper.last_scores is result
    graph(cm)
    assert wrapper.steps == 2


def test_a_change_of_python_state_that_no_graph_repeats_is_refused_and_undone() -> None:
    class Logs(DraftLoop):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[Any] = []
            self.stats = SimpleNamespace(calls=0)

        def forward(self, csi: Any) -> Any:
            self.history.append(csi.info.num_sequences)
            self.stats.calls += 1
            return csi.get_arg("input_ids")

    wrapper = Logs()
    with pytest.raises(UntraceableError, match=r"self\.history, self\.stats"):
        trace_orchestrator(wrapper, example("extend"))
    assert wrapper.history == []
    assert wrapper.stats.calls == 0


def test_effects_without_a_proxy_among_their_arguments_are_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    class Prints(nn.Module):
        def forward(self, csi: Any) -> Any:
            print("before")
            csi.info.switch_to_generate_()
            print("after")
            return None

    cm = example("extend")
    graph = trace_orchestrator(Prints(), cm)
    assert capsys.readouterr().out == ""
    graph.graph.eliminate_dead_code()
    graph.recompile()
    graph(cm)
    assert capsys.readouterr().out == "before\nafter\n"
    assert [n.target for n in graph.graph.nodes if n.op == "call_function" and n.target in ops.EFFECTS] == [
        ops.call,
        ops.mutate,
        ops.call,
    ]


def test_cuda_streams_of_the_orchestrators_own_are_refused() -> None:
    class Streams(nn.Module):
        def forward(self, csi: Any) -> Any:
            torch.cuda.current_stream().synchronize()
            return csi.get_arg("input_ids")

    with pytest.raises(UntraceableError, match=r"torch\.cuda\.current_stream"):
        trace_orchestrator(Streams(), example("extend"))


def test_tensors_made_by_the_forward_are_made_anew_by_every_run() -> None:
    class Makes(nn.Module):
        def forward(self, csi: Any) -> Any:
            made = torch.tensor([1, 2, 3])
            made += 1
            noise = torch.arange(3)
            noise[0] = 5
            return made + noise

    cm = example("extend")
    graph = trace_orchestrator(Makes(), cm)
    assert graph(cm).tolist() == [7, 4, 6]
    assert graph(cm).tolist() == [7, 4, 6]


def test_in_place_arithmetic_writes_through_a_view() -> None:
    class Views(nn.Module):
        def forward(self, csi: Any) -> Any:
            total = torch.zeros(csi.info.num_sequences)
            first = total[:1]
            first += 3
            first -= 1
            torch.add(first, 2, out=first)
            return total

    cm = example("extend")
    assert trace_orchestrator(Views(), cm)(cm).tolist() == [4.0, 0.0]


def test_every_effect_survives_dead_code_elimination() -> None:
    wrapper, cm = DraftLoop(), interface()
    graph = trace_variants(wrapper, cm)["mixed"]
    before = [n.name for n in graph.graph.nodes]
    graph.graph.eliminate_dead_code(lambda n: n.op == "call_module" or n.is_impure())
    assert [n.name for n in graph.graph.nodes] == before
    nest(cm, [2], 2, 3)
    other = copy.deepcopy(cm)
    assert torch.equal(graph(cm).tokens, wrapper(other).tokens)


def test_a_graph_survives_pickle_and_deepcopy_with_effects_and_meta() -> None:
    wrapper, cm = DraftLoop(), interface()
    graph = trace_variants(wrapper, cm)["extend"]
    nest(cm, [], 3, 3)
    expected = wrapper(copy.deepcopy(cm)).tokens
    next(n for n in graph.graph.nodes if n.target is ops.mutate).meta["active_args"] = ("cu_seqlen_host",)
    for twin in (pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph)):
        assert twin.code == graph.code
        assert next(n for n in twin.graph.nodes if n.target is ops.mutate).meta["active_args"] == ("cu_seqlen_host",)
        assert torch.equal(twin(copy.deepcopy(cm)).tokens, expected)


def test_a_graph_finds_a_submodule_that_was_replaced_afterwards() -> None:
    wrapper, cm = DraftLoop(), interface()
    graph = trace_variants(wrapper, cm)["extend"]
    names = {name for name, _ in wrapper.named_modules()}
    wrapper.draft_model = consumer(*reversed(DRAFT_ARGS[1:]), DRAFT_ARGS[0])
    nest(cm, [], 3, 3)
    assert torch.equal(graph(copy.deepcopy(cm)).tokens, wrapper(copy.deepcopy(cm)).tokens)
    assert {name for name, _ in wrapper.named_modules()} >= names - {n for n in names if n.startswith("draft_model.")}
    graph.delete_all_unused_submodules()
    assert wrapper.target_model is not None


def test_the_ways_in_which_people_write_a_mutation_are_all_seen() -> None:
    class Context:
        def __init__(self, csi: Any) -> None:
            self.csi = csi

    class Written(nn.Module):
        def advance(self, info: Any, offset: Any) -> None:
            info.offset_pos_and_cache_(offset, active_args_override={"last_page_len_host", "cu_seqlen_host"})

        def forward(self, csi: Any) -> Any:
            context = Context(csi)
            switch = context.csi.info.switch_to_generate_
            switch()
            self.advance(context.csi.info, torch.ones(csi.info.num_sequences, dtype=torch.int32))
            return {"set": {1, 2}, "space": SimpleNamespace(x=csi.info.num_sequences)}

    cm = example("extend")
    graph = trace_orchestrator(Written(), cm)
    mutations = [n for n in graph.graph.nodes if n.target is ops.mutate]
    assert [n.args[1] for n in mutations] == ["switch_to_generate_", "offset_pos_and_cache_"]
    assert "active_args" not in mutations[0].kwargs
    assert mutations[1].kwargs["active_args"] == ("cu_seqlen_host", "last_page_len_host")
    result = graph(cm)
    assert result["set"] == {1, 2}
    assert result["space"].x == 2


def test_an_error_of_the_forward_names_its_line() -> None:
    class Fails(nn.Module):
        def forward(self, csi: Any) -> Any:
            return csi.info.no_such_thing

    with pytest.raises(UntraceableError, match=r"test_tracer\.py:\d+: AttributeError"):
        trace_orchestrator(Fails(), example("extend"))


def test_two_traces_give_the_same_code_and_guards() -> None:
    first, second = (trace_variants(DraftLoop(), interface()) for _ in range(2))
    assert [v.code for v in first.values()] == [v.code for v in second.values()]
    assert [v.guards.source for v in first.values()] == [v.guards.source for v in second.values()]


def test_a_switch_is_guarded_to_find_the_kind_of_batch_that_it_found_when_traced() -> None:
    class Switches(nn.Module):
        def forward(self, csi: Any) -> Any:
            csi.info.batch_info.update_tokens_gather_info(csi.info.num_sequences, True)
            csi.info.switch_to_generate_()
            csi.info.switch_to_generate_()
            return None

    cm = example("extend")
    graph = trace_orchestrator(Switches(), cm)
    switches = [n for n in graph.graph.nodes if n.target is ops.mutate]
    assert [n.meta.get("generate_only") for n in switches] == [False, None]
    assert graph.guards.conditions == ("not interface.info.batch_info.is_generate_only()",)
    set_batch(cm, "decode", 3)
    assert not graph.guards(cm, graph.owner)
