"""CapturedModule on ordered calls: what is captured when, what is copied, what is checked, what stays visible."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, symbolic_trace

from auto_deploy_ext.active_args import consumer_args
from auto_deploy_ext.embedded.compile.captured_module import CapturedModule
from auto_deploy_ext.embedded.custom_ops.plan_ops import PLAN_OPS, current_graph, on_forget, register_plan_op
from auto_deploy_ext.embedded.export import ExportedGraphModule
from auto_deploy_ext.hostfuncs.drains import may_launch
from auto_deploy_ext.reports.capture import CaptureError

NAMES = ("batch_info_host", "input_pos", "input_pos_host", "kv_cache")


class Consumer(nn.Module):
    """Writes its cache, reads counts on the host, and computes with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.proj = nn.Linear(3, 3)
        self.register_buffer("d2t", torch.arange(4), persistent=False)

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        batch_info_host: torch.Tensor,
        input_pos: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kv_cache.add_(1)
        hidden = self.proj(inputs_embeds) + input_pos[0]
        return hidden, hidden.sum() * host_count(batch_info_host)


seen_on_the_host: list[int] = []


def host_count(batch_info_host: torch.Tensor) -> int:
    """What a kernel's launcher does: it reads a count on the host."""
    seen_on_the_host.append(int(batch_info_host[4]) + int(batch_info_host[2]))
    return seen_on_the_host[-1]


torch.fx.wrap("host_count")


class Interface:
    """The arguments that never move."""

    def __init__(self) -> None:
        self.batch_info_host = torch.zeros(13, dtype=torch.int32)
        self.input_pos = torch.zeros(8)
        self.kv_cache = torch.zeros(2)

    def batch(self, kind: str, rows: int, length: int = 1) -> dict[str, Any]:
        place = {"prefill": 0, "extend": 2, "decode": 4}[kind]
        self.batch_info_host.zero_()
        self.batch_info_host[place : place + 2] = torch.tensor([rows, rows * length])
        return {name: value for name, value in vars(self).items() if name != "embeds"}


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    seen_on_the_host.clear()
    with torch.no_grad():
        yield


@pytest.fixture
def interface() -> Interface:
    return Interface()


@pytest.fixture
def module() -> CapturedModule:
    torch.manual_seed(0)
    traced = symbolic_trace(Consumer())
    return CapturedModule(
        ExportedGraphModule(traced, traced.graph), NAMES, (1, 2, 4), max_draft_len=2, name="draft_model"
    )


def call(module: Any, interface: Interface, kind: str = "decode", rows: int = 2, length: int = 1, seed: int = 0) -> Any:
    embeds = torch.randn(rows, length, 3, generator=torch.Generator().manual_seed(seed))
    return module(inputs_embeds=embeds, **interface.batch(kind, rows, length))


def counts(module: CapturedModule) -> tuple[int, int, int]:
    return module.stats.eager, module.stats.captures, module.stats.replays


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------- when


def test_first_call_warms_up_second_captures_later_ones_replay(module: CapturedModule, interface: Interface) -> None:
    plain, other = module.graph_module, Interface()
    for i in range(5):
        interface.input_pos.fill_(i)
        other.input_pos.fill_(i)
        assert equal(call(module, interface, seed=i), call(plain, other, seed=i))
        assert torch.equal(interface.kv_cache, other.kv_cache), "each call's work is done once"
    assert counts(module) == (1, 1, 3)


def test_kinds_and_sizes_have_graphs_of_their_own(module: CapturedModule, interface: Interface) -> None:
    for kind, rows, length in (("decode", 2, 1), ("extend", 2, 3), ("decode", 4, 1)):
        before = module.stats.captures
        expected = call(module, interface, kind, rows, length)
        for _ in range(3):
            assert equal(call(module, interface, kind, rows, length), expected)
        assert module.stats.captures == before + 1
    assert len(module._entries) == 3


@pytest.mark.parametrize(
    ("kind", "rows", "length"),
    [("prefill", 1, 3), ("decode", 3, 1), ("extend", 2, 2), ("decode", 8, 1)],
    ids=["prefill", "size not listed", "rows too short for the draft length", "too many rows"],
)
def test_other_batches_run_eagerly(
    module: CapturedModule, interface: Interface, kind: str, rows: int, length: int
) -> None:
    for _ in range(3):
        call(module, interface, kind, rows, length)
    assert counts(module) == (3, 0, 0)


def test_mixed_batches_run_eagerly(module: CapturedModule, interface: Interface) -> None:
    for _ in range(3):
        arguments = interface.batch("extend", 1, 3)
        arguments["batch_info_host"][4:6] = 1
        module(inputs_embeds=torch.zeros(1, 4, 3), **arguments)
    assert counts(module) == (3, 0, 0)


def test_whatever_records_gradients_runs_eagerly(module: CapturedModule, interface: Interface) -> None:
    for _ in range(3):
        with torch.enable_grad():
            assert call(module, interface)[0].requires_grad
    assert counts(module) == (3, 0, 0)


def test_inference_mode_has_graphs_of_its_own(module: CapturedModule, interface: Interface) -> None:
    expected = call(module, interface)
    for _ in range(3):
        with torch.inference_mode():
            assert equal(call(module, interface), expected)
        assert equal(call(module, interface), expected)
    assert module.stats.captures == 2


def test_fake_tensors_are_traced_and_never_replayed() -> None:
    class AddsOne(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    module = CapturedModule(symbolic_trace(AddsOne()), NAMES, (2,))
    for _ in range(3):
        module(torch.ones(2, 3))
    with FakeTensorMode():
        fake = torch.empty(2, 3)
        result = module(fake)
    assert type(result) is type(fake) and result.shape == (2, 3)
    assert counts(module) == (2, 1, 1)


# ---------------------------------------------------------------- arguments


def test_what_is_read_on_the_host_is_that_of_the_capture(module: CapturedModule, interface: Interface) -> None:
    """A replay of a device graph reads nothing on the host, so ordered calls must show what it would have read."""
    for rows in (2, 2, 4, 4):
        call(module, interface, rows=rows)
    seen_on_the_host.clear()
    embeds = torch.ones(2, 1, 3)
    entry = next(e for k, e in module._entries.items() if k[0][4] == 2)
    interface.batch("decode", 4)
    entry.replay()
    assert seen_on_the_host == [2]
    del embeds


@pytest.mark.parametrize("name", ["input_pos", "kv_cache"])
def test_an_argument_that_moves_is_noticed(module: CapturedModule, interface: Interface, name: str) -> None:
    for _ in range(3):
        call(module, interface)
    setattr(interface, name, getattr(interface, name).clone() + 5)
    plain, other = module.graph_module, copy.deepcopy(interface)
    for _ in range(3):
        assert equal(call(module, interface), call(plain, other))
        assert torch.equal(interface.kv_cache, other.kv_cache)
    assert counts(module) == (2, 2, 2)


def test_arguments_that_never_stay_end_in_eager_calls(
    module: CapturedModule, interface: Interface, caplog: pytest.LogCaptureFixture
) -> None:
    keep = []
    with caplog.at_level(logging.WARNING, logger="auto_deploy_ext"):
        for _ in range(40):
            keep.append(interface.kv_cache)
            interface.kv_cache = interface.kv_cache.clone()
            call(module, interface)
    assert module.stats.captures == 8 and module.stats.replays == 0
    assert "draft_model runs eagerly from now on" in caplog.text


def test_an_argument_that_the_consumer_writes_is_written_back() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return x + 1

    module = CapturedModule(symbolic_trace(Writes()), (), (2,))
    for i in range(4):
        x = torch.full((2, 3), float(i))
        assert module(x).tolist() == [[2.0 * i + 1] * 3] * 2
        assert x.tolist() == [[2.0 * i] * 3] * 2
    assert counts(module) == (1, 1, 2)


def test_a_written_metadata_buffer_shows_in_its_version() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
            input_pos.add_(1)
            return x + 1

    module = CapturedModule(symbolic_trace(Writes()), NAMES, (2,))
    assert module._written_metadata == ("input_pos",)
    position = torch.zeros(2)
    for _ in range(4):
        before = position._version
        module(torch.zeros(2, 1), position)
        assert position._version > before


# ---------------------------------------------------------------- results


def test_results_are_copies_unless_they_are_lent(module: CapturedModule, interface: Interface) -> None:
    results = [call(module, interface, seed=i) for i in range(5)]
    expected = [call(module.graph_module, interface, seed=i) for i in range(5)]
    assert all(map(equal, results, expected))
    module.__dict__["copies_results"] = False
    first, second = call(module, interface, seed=1), call(module, interface, seed=2)
    assert first[0].data_ptr() == second[0].data_ptr() and equal(first, second)


@pytest.mark.parametrize("kind", ["tensor", "list", "dict"])
def test_results_of_any_form_are_copied(kind: str) -> None:
    class Returns(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            y = x + 1
            return {"tensor": y, "list": [y, y * 2], "dict": {"y": y, "two": 2}}[kind]

    module = CapturedModule(symbolic_trace(Returns()), (), (2,))
    results = [module(torch.full((2, 1), float(i))) for i in range(4)]
    values = [torch.utils._pytree.tree_leaves(result)[0] for result in results]
    assert [value.flatten().tolist() for value in values] == [[i + 1.0] * 2 for i in range(4)]
    assert all(type(result) is type(results[0]) for result in results)


# ---------------------------------------------------------------- plans


@pytest.fixture
def planner() -> Any:
    """An operator that plans from a mirror, and what happened."""
    log: list[tuple[Any, ...]] = []
    table = torch.zeros(1)

    def plan(input_pos_host: torch.Tensor, factor: int) -> torch.Tensor:
        log.append(("plan", current_graph(), float(input_pos_host[0])))
        table.fill_(float(input_pos_host[0]) * factor)
        return table

    def attend(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        log.append(("attend",))
        return x + table

    graph = Graph()
    x = graph.placeholder("inputs_embeds")
    mirror = graph.placeholder("input_pos_host")
    planned = graph.call_function(plan, (mirror, 10))
    graph.output(graph.call_function(attend, (graph.call_function(attend, (x, planned)), planned)))
    register_plan_op(plan)
    yield CapturedModule(GraphModule({}, graph), NAMES, (2,), name="planned"), log
    PLAN_OPS.pop(plan, None)


def test_plans_are_made_before_every_replay_with_the_calls_own_mirrors(planner: Any) -> None:
    module, log = planner
    for i in range(4):
        log.clear()
        result = module(inputs_embeds=torch.ones(2, 1), input_pos_host=torch.full((2,), float(i)))
        assert result.flatten().tolist() == [1.0 + 20 * i] * 2
        assert [entry[0] for entry in log] == ["plan", "attend", "attend"]
        assert log[0][2] == i
        graph = log[0][1]
        assert (graph is None) is (i == 0), "the warm-up plans for an eager run, the rest for one graph"
    forgotten: list[Any] = []
    on_forget(forgotten.append)
    module.forget_graphs()
    assert forgotten == [graph]


@pytest.mark.parametrize("fails", [False, True])
def test_planners_are_told_of_the_graphs_of_a_module_that_is_dropped(fails: bool) -> None:
    """Also of one whose capture fails, for which a plan was made."""
    planned: list[Any] = []

    def plan(input_pos_host: torch.Tensor) -> int:
        planned.append(current_graph())
        return 3

    def attend(x: torch.Tensor, plan: int) -> torch.Tensor:
        if fails and planned[-1] is not None:
            raise RuntimeError("not in a capture")
        return x + plan

    graph = Graph()
    x, mirror = graph.placeholder("x"), graph.placeholder("input_pos_host")
    graph.output(graph.call_function(attend, (x, graph.call_function(plan, (mirror,)))))
    register_plan_op(plan)
    forgotten: list[Any] = []
    on_forget(forgotten.append)
    module = CapturedModule(GraphModule({}, graph), NAMES, (2,))
    module(torch.ones(2, 1), torch.zeros(2))
    with pytest.raises(CaptureError, match="not in a capture") if fails else nullcontext():
        module(torch.ones(2, 1), torch.zeros(2))
    assert planned[-1] is not None and not forgotten
    del module
    gc.collect()
    assert forgotten == [planned[-1]]
    PLAN_OPS.pop(plan, None)


def test_a_plan_that_returns_another_tensor_is_copied_and_another_number_refused() -> None:
    returned: list[Any] = []

    def plan(input_pos_host: torch.Tensor) -> Any:
        return returned[-1]

    graph = Graph()
    x, mirror = graph.placeholder("x"), graph.placeholder("input_pos_host")
    graph.output(graph.call_function(torch.mul, (x, graph.call_function(plan, (mirror,)))))
    register_plan_op(plan)
    module = CapturedModule(GraphModule({}, graph), NAMES, (2,))
    for i in range(4):
        returned.append(torch.tensor(float(i)))
        assert module(torch.ones(2, 1), torch.zeros(2)).flatten().tolist() == [float(i)] * 2
    module.forget_graphs()
    for number in (2, 2, 2, 3):
        returned.append(number)
        if number == 3:
            with pytest.raises(ValueError, match="returned 3 after 2"):
                module(torch.ones(2, 1), torch.zeros(2))
        else:
            module(torch.ones(2, 1), torch.zeros(2))
    PLAN_OPS.pop(plan, None)


def test_a_plan_of_something_computed_is_refused() -> None:
    def plan(x: torch.Tensor) -> Any:
        return x

    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(plan, (graph.call_function(torch.neg, (x,)),)))
    register_plan_op(plan)
    with pytest.raises(ValueError, match="plans with what neg computes"):
        CapturedModule(GraphModule({}, graph), NAMES, (2,))
    PLAN_OPS.pop(plan, None)


# ---------------------------------------------------------------- the consumer behind it


def test_a_changed_graph_is_captured_anew(module: CapturedModule, interface: Interface) -> None:
    for _ in range(3):
        call(module, interface)
    gm = module.graph_module
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        doubled = gm.graph.call_function(torch.mul, (output.args[0][0], 2))  # type: ignore[index]
    output.args = ((doubled, output.args[0][1]),)  # type: ignore[index]
    gm.recompile()
    expected = call(gm, Interface())
    for _ in range(3):
        assert equal(call(module, interface), expected)
    assert counts(module) == (2, 2, 2) and module._moves == 0


def test_names_of_parameters_and_what_the_consumer_offers_stay(module: CapturedModule) -> None:
    gm = module.graph_module
    assert list(module.state_dict()) == list(gm.state_dict()) == ["proj.weight", "proj.bias"]
    assert module.proj is gm.proj and module.meta is gm.meta
    assert consumer_args(module) == ("batch_info_host", "input_pos", "inputs_embeds", "kv_cache")
    assert not hasattr(module, "no_such_thing")
    with pytest.raises(AttributeError, match="no_such_thing"):
        module.no_such_thing  # noqa: B018
    assert module.eval().training is gm.training is False
    assert "graphs=0" in repr(module)


def test_hooks_run_once_whoever_they_were_given_to(module: CapturedModule, interface: Interface) -> None:
    ran: list[str] = []
    module.graph_module.register_forward_pre_hook(lambda *_: ran.append("graph"))
    module.register_forward_hook(lambda *_: ran.append("stand-in"))
    for _ in range(4):
        call(module, interface)
    assert ran == ["graph", "stand-in"] * 4


def test_a_drain_stands_behind_it(module: CapturedModule) -> None:
    graph = Graph()
    node = graph.call_module("draft")
    graph.output(node)
    root = nn.Module()
    root.add_module("draft", module)
    assert may_launch(GraphModule(root, graph), node)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_starts_without_graphs(module: CapturedModule, interface: Interface, how: str) -> None:
    for _ in range(3):
        call(module, interface)
    twin = copy.deepcopy(module) if how == "deepcopy" else pickle.loads(pickle.dumps(module))
    assert len(twin._entries) == 0 and len(module._entries) == 1
    assert (twin.batch_sizes, twin.max_draft_len, twin.name) == (module.batch_sizes, 2, "draft_model")
    twin.proj.weight.mul_(2)
    expected = call(twin.graph_module, Interface())
    other = Interface()
    for _ in range(3):
        assert equal(call(twin, other), expected)
    assert counts(twin) == (1, 1, 1)
    assert not equal(call(module, interface), expected)


def test_moving_the_module_frees_its_graphs(module: CapturedModule, interface: Interface) -> None:
    for _ in range(3):
        call(module, interface)
    module.to(torch.float64)
    assert module.graph_module.proj.weight.dtype == torch.float64 and len(module._entries) == 0
    module.to(torch.float32)
    for _ in range(3):
        call(module, interface)
    assert counts(module) == (2, 2, 2)


def test_an_error_in_a_capture_names_the_consumer_and_the_batch(interface: Interface) -> None:
    ran: list[int] = []

    def breaks(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        if len(ran) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return x

    graph = Graph()
    x = graph.placeholder("inputs_embeds")
    graph.placeholder("batch_info_host")
    graph.output(graph.call_function(breaks, (x,)))
    module = CapturedModule(GraphModule({}, graph), NAMES, (2,), name="target_model")
    arguments = interface.batch("decode", 2)
    call_it = {"inputs_embeds": torch.ones(2, 1, 3), "batch_info_host": arguments["batch_info_host"]}
    module(**call_it)
    with pytest.raises(
        CaptureError, match=r"target_model cannot be captured for a batch of generate, inputs_embeds \[2, 1, 3\]"
    ):
        module(**call_it)
