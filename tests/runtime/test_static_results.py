"""Consumers that return memory of their own, which their next call overwrites: operands among it, and lent results."""

from __future__ import annotations

import operator
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, GraphModule

from auto_deploy_ext.active_args import COPIES_RESULTS
from auto_deploy_ext.analysis.outlived import outlived
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.rewriting.scoping import ScopeOptions, scope_graphs
from auto_deploy_ext.runtime.lent_results import lent
from tests.strategy_programs import (
    Batch,
    Reader,
    _Writer,
    make_interface,
    random_batch,
    run,
)

CM = make_interface(pools=1)
READS = ("cu_num_pages_host", "input_pos_host", "last_page_len_host", "seq_len_with_cache_host")
laws = settings(deadline=None, suppress_health_check=list(HealthCheck))


# ---------------------------------------------------------------- operands


class Sampler(nn.Module):
    """A compiled consumer: each call writes what it returns into the same memory."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.meta: dict[str, Any] = {"active_args": ()}
        self.results = torch.zeros(rows, 2, dtype=torch.int32)
        self.calls = 0

    def forward(self) -> torch.Tensor:
        self.calls += 1
        self.results += 1 if self.calls % 3 else -2
        return self.results


class Writer(_Writer):
    """Writes programs with two more steps: the offset becomes a view of what a sampler returns, or that is called."""

    def add_sampler(self) -> None:
        self.root.add_module("sampler", Sampler(self.rows))

    def _sample(self) -> None:
        result = self.graph.call_module("sampler")
        self.offset = self.graph.call_function(operator.getitem, (result, (slice(None), 0)))

    def _resample(self) -> None:
        self.graph.call_module("sampler")


def write(steps: list[tuple[Any, ...]], reader: Reader, rows: int) -> GraphModule:
    writer = Writer({"draft": reader}, rows)
    writer.add_sampler()
    return writer.write(steps)


@laws
@given(st.integers(0, 2**48), st.sampled_from(["auto", "copy", "override", "replay"]))
def test_what_an_operand_is_when_the_device_uses_it_is_what_the_host_repeats(seed: int, strategy: str) -> None:
    rng = Random(seed)
    kinds = [("sample",), ("resample",), ("offset",), ("consume", "draft"), ("switch",)]
    steps = rng.choices(kinds, [3, 3, 5, 4, 1], k=rng.randint(3, 16))
    batch = random_batch(rng)
    note(f"{steps}, {batch}")
    reader = Reader(READS)
    gm = write(steps, reader, len(batch.rows))
    scope_graphs({"graph": gm}, CM, ScopeOptions(strategy=strategy))
    batch.nest(CM)
    for seen in run(gm, {"draft": reader}, CM, batch).seen:
        assert seen.mirrors == seen.device


def test_a_result_is_taken_before_the_next_call_that_follows_its_use() -> None:
    steps = [("sample",), ("offset",), ("resample",), ("consume", "draft"), ("offset",), ("consume", "draft")]
    batch = Batch((("decode", 1, 45), ("decode", 1, 46)), (0, 0))
    reader = Reader(READS)
    gm = write(steps, reader, 2)
    scope_graphs({"graph": gm}, CM, ScopeOptions(strategy="replay"))
    order = [
        "snapshot" if node.target is ops.snapshot_operand else str(node.target)
        for node in gm.graph.nodes
        if node.op == "call_module" or node.target is ops.snapshot_operand
    ]
    assert order == ["sampler", "snapshot", "sampler", "snapshot", "draft", "draft"]
    batch.nest(CM)
    first, second = run(gm, {"draft": reader}, CM, batch).seen
    assert first.mirrors == first.device and first.mirrors["input_pos_host"] == [46, 47]
    assert second.mirrors == second.device and second.mirrors["input_pos_host"] == [48, 49]


# ---------------------------------------------------------------- lent results


class Lender(nn.Module):
    """What a captured consumer does: it leaves its result in its own memory, and copies it unless that is lent."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.meta: dict[str, Any] = {"active_args": ("x",)}
        self.factor = factor
        self.memory = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)
        self.copies_results = True
        graph = Graph()
        x = graph.placeholder("x")
        scaled = graph.call_function(torch.mul, (x, factor))
        graph.output((graph.call_function(torch.add, (scaled, 1)), graph.call_function(torch.sub, (scaled, 1))))
        self.__dict__["graph_module"] = GraphModule({}, graph)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for own, new in zip(self.memory, self.graph_module(x), strict=True):
            own.copy_(new)
        return tuple(t.clone() for t in self.memory) if self.copies_results else self.memory


def random_graph(rng: Random, size: int) -> GraphModule:
    """Calls of two lenders, one of them under two names, on views, sums and pieces of what there is."""
    root = nn.Module()
    root.add_module("a", Lender(3))
    root.add_module("b", Lender(5))
    root.add_module("again", root.get_submodule("a"))
    graph = Graph()
    values = [graph.placeholder("x")]
    for _ in range(size):
        value = rng.choice(values[-4:])
        kind = rng.choice(["call", "call", "view", "sum", "write", "new"])
        if kind == "call":
            result = graph.call_module(rng.choice(["a", "b", "again"]), (value,))
            result.meta["active_args"] = ("x",)
            values.append(graph.call_function(operator.getitem, (result, rng.randint(0, 1))))
        elif kind == "view":
            values.append(graph.call_method("view", (value, 2, 3)))
        elif kind == "sum":
            values.append(graph.call_function(torch.add, (value, rng.choice(values))))
        elif kind == "write":
            graph.call_function(ops.setitem, (value, 0, graph.call_function(operator.getitem, (rng.choice(values), 1))))
        else:
            values.append(graph.call_function(torch.zeros_like, (value,)))
    graph.output(graph.call_function(torch.stack, (values[-3:],)))
    return GraphModule(root, graph)


@laws
@given(st.integers(0, 2**48))
def test_a_graph_computes_on_lent_results_what_it_computes_on_copies(seed: int) -> None:
    rng = Random(seed)
    gm = random_graph(rng, rng.randint(2, 20))
    note(gm.code)
    x = torch.arange(6).view(2, 3)
    expected = gm(x.clone())
    for _ in range(2):
        with lent(gm, gm):
            assert torch.equal(gm(x.clone()), expected)
    assert all(module.copies_results for module in gm.children())


def calls(*uses: Any, output: bool = False) -> GraphModule:
    """`first = a(x); second = a(first[0])`, uses of the first result behind that."""
    root = nn.Module()
    root.add_module("a", Lender(2))
    graph = Graph()
    first = graph.call_function(operator.getitem, (graph.call_module("a", (graph.placeholder("x"),)), 0))
    graph.call_module("a", (first,))
    for use in uses:
        use(graph, first)
    graph.output(first if output else None)
    return GraphModule(root, graph)


def test_results_are_lent_while_they_are_used_in_time_and_only_then() -> None:
    assert outlived(calls()) == frozenset()
    assert outlived(calls(lambda graph, first: graph.call_function(torch.add, (first, 1)))) == {"a"}
    assert outlived(calls(output=True)) == {"a"}
    view = calls(lambda graph, first: graph.call_method("sum", (graph.call_method("view", (first, 6)),)))
    assert outlived(view) == {"a"}


@pytest.mark.parametrize(
    "keep",
    [
        lambda graph, first: graph.call_function(ops.set_attribute, (graph.get_attr("a"), "kept", first)),
        lambda graph, first: graph.call_function(ops.call, ("somewhere.keep", first)),
        lambda graph, first: graph.call_function(ops.invoke, (graph.get_attr("a"), "remember", first)),
    ],
)
def test_what_may_be_kept_is_not_lent(keep: Any) -> None:
    root = nn.Module()
    root.add_module("a", Lender(2))
    graph = Graph()
    first = graph.call_function(operator.getitem, (graph.call_module("a", (graph.placeholder("x"),)), 0))
    keep(graph, first)
    graph.output(None)
    assert outlived(GraphModule(root, graph)) == {"a"}


def test_lending_ends_with_the_call_also_after_an_error_and_follows_a_replaced_module() -> None:
    gm = calls()
    module = gm.get_submodule("a")
    with pytest.raises(RuntimeError, match="in the midst"), lent(gm, gm):
        assert getattr(module, COPIES_RESULTS) is False
        raise RuntimeError("in the midst")
    assert getattr(module, COPIES_RESULTS) is True
    gm.add_module("a", Lender(2))
    with lent(gm, gm):
        assert getattr(module, COPIES_RESULTS) is True
        assert getattr(gm.get_submodule("a"), COPIES_RESULTS) is False


def test_a_module_that_another_one_may_call_is_not_lent_from() -> None:
    gm = calls()

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.meta: dict[str, Any] = {"active_args": ()}
            self.inner = gm.get_submodule("a")

    gm.add_module("around", Around())
    graph = gm.graph
    with graph.inserting_before(graph.output_node()):
        graph.call_module("around", ())
    with lent(gm, gm):
        assert getattr(gm.get_submodule("a"), COPIES_RESULTS) is True
