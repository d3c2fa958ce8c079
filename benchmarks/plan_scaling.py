"""How long planning and rewriting an orchestrator takes beside FX's own `graph.lint()` and `recompile()` of its graph.

The graph is a draft loop, unrolled: consumers that read mirrors, sampling, `switch_to_generate_`, `copy_`,
`offset_pos_and_cache_`. Repetitions are interleaved: each builds the graph anew, checks and compiles it as FX does, and
has the pass plan and rewrite it, which ends with FX's checking and compiling too. Medians count.

    python benchmarks/plan_scaling.py --json benchmarks/results/plan_scaling.json

Exits with 1 when the largest graph takes the default strategy more than the limit, or when time grows faster than the
number of nodes.
"""

from __future__ import annotations

import argparse
import gc
import json
import operator
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.fx import Graph, GraphModule, Node

from auto_deploy_ext import CachedSequenceInterface
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.rewriting.scoping import ScopeOptions, scope_graphs

SIZES = (1_000, 10_000, 100_000)
STRATEGIES = ("auto", "override", "copy", "replay")

#: planning and rewriting the largest graph, as a multiple of FX's checking and compiling of it.
LIMIT = 2.0
#: time per node on the largest graph, as a multiple of the time per node on the one before it.
GROWTH_LIMIT = 1.5

METADATA = ("batch_info_host", "cu_seqlen", "input_pos")
MIRRORS = ("cu_num_pages_host", "cu_seqlen_host", "last_page_len_host", "seq_len_with_cache_host")


def make_interface() -> Any:
    """An interface on the CPU with what the consumers read."""
    cm = CachedSequenceInterface(max_seq_len=64, max_batch_size=4, max_num_tokens=64, device="cpu")
    for name in (*METADATA, *MIRRORS):
        cm.info.activate_arg(name)
    return cm


def make_consumer(*names: str) -> GraphModule:
    """A consumer with these arguments."""
    graph = Graph()
    arguments = [graph.placeholder(name) for name in names]
    graph.output((arguments[0], arguments[0]))
    return GraphModule(nn.Module(), graph)


class LoopBuilder:
    """Writes a draft loop of a given number of nodes, in the form that tracing gives."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.root = nn.Module()
        self.root.add_module("draft_model", make_consumer("hidden_states", *METADATA, *MIRRORS))
        self.csi = self.graph.placeholder("csi")
        self.hidden = self.graph.placeholder("hidden_states")
        self.lengths = self.graph.placeholder("new_tokens_lens")

    def build(self, nodes: int) -> GraphModule:
        """A graph of about `nodes` nodes."""
        info = self.graph.call_function(getattr, (self.csi, "info"))
        offset = self.graph.call_function(torch.sub, (self.lengths, 3))
        self.graph.call_function(ops.call_inplace, (offset, "fill_", 1))
        tokens: list[Node] = []
        while len(self.graph.nodes) < nodes - 1:
            tokens.append(self._iteration(info, offset))
        self.graph.output(tuple(tokens[-8:]))
        return GraphModule(self.root, self.graph)

    def _iteration(self, info: Node, offset: Node) -> Node:
        graph = self.graph
        named = graph.call_function(getattr, (self.csi, "named_args"))
        arguments = {name: graph.call_function(operator.getitem, (named, name)) for name in (*METADATA, *MIRRORS)}
        result = graph.call_module("draft_model", (self.hidden,), arguments)
        norm = graph.call_function(operator.getitem, (result, 0))
        self.hidden = graph.call_function(operator.getitem, (result, 1))
        logits = graph.call_function(torch.nn.functional.linear, (norm, norm))
        best = graph.call_function(torch.argmax, (logits,), {"dim": -1})
        token = graph.call_method("to", (best, torch.int32))
        graph.call_function(ops.mutate, (info, "switch_to_generate_"))
        graph.call_function(ops.mutate, (info, "copy_", "input_ids", token))
        graph.call_function(ops.mutate, (info, "offset_pos_and_cache_", offset))
        return token


def timed(function: Callable[[], Any]) -> float:
    """Seconds of the processor that a call takes: other processes on the machine do not count."""
    gc.collect()
    begin = time.process_time()
    function()
    return time.process_time() - begin


def measure_once(nodes: int, strategy: str, cm: Any) -> tuple[float, float]:
    """Seconds of FX's checking and compiling, and of planning and rewriting, for a new graph."""
    gm = LoopBuilder().build(nodes)

    def check_and_compile() -> None:
        gm.graph.lint()
        gm.recompile()

    fx = timed(check_and_compile)
    return fx, timed(lambda: scope_graphs({"graph": gm}, cm, ScopeOptions(strategy=strategy)))


def measure(sizes: tuple[int, ...], strategies: tuple[str, ...], repeat: int) -> list[dict[str, Any]]:
    """One row per size and strategy; the repetitions of all rows are interleaved."""
    cm = make_interface()
    times: dict[tuple[int, str], list[tuple[float, float]]] = {(n, s): [] for n in sizes for s in strategies}
    for strategy in strategies:
        measure_once(min(sizes), strategy, cm)  # the first time pays for imports and caches
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=repeat * len(times))
        for _ in range(repeat):
            for nodes, strategy in times:
                progress.update(task, description=f"{nodes:>7} nodes, {strategy}")
                times[nodes, strategy].append(measure_once(nodes, strategy, cm))
                progress.advance(task)
    return [row for key, pairs in times.items() for row in _row(*key, pairs)]


def _row(nodes: int, strategy: str, pairs: list[tuple[float, float]]) -> Iterator[dict[str, Any]]:
    fx, scope = (statistics.median(column) for column in zip(*pairs, strict=True))
    yield {
        "nodes": nodes,
        "strategy": strategy,
        "fx_ms": round(fx * 1e3, 2),
        "scope_ms": round(scope * 1e3, 2),
        "ratio": round(statistics.median(s / f for f, s in pairs), 3),
        "scope_us_per_node": round(scope / nodes * 1e6, 3),
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    """The rows for a terminal."""
    table = Table(title="Planning and rewriting beside lint() and recompile()", title_justify="left")
    for heading in ("nodes", "strategy", "lint+recompile ms", "plan+rewrite ms", "ratio", "us/node"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for row in rows:
        table.add_row(*(str(row[key]) for key in row))
    return table


def shortfalls(rows: list[dict[str, Any]], strategy: str) -> list[str]:
    """What misses a limit."""
    own = [row for row in rows if row["strategy"] == strategy]
    missed = []
    if own[-1]["ratio"] >= LIMIT:
        missed.append(
            f"{strategy}: {own[-1]['nodes']} nodes take {own[-1]['ratio']} times as long as FX, not < {LIMIT}"
        )
    if len(own) > 1:
        growth = own[-1]["scope_us_per_node"] / own[-2]["scope_us_per_node"]
        if growth >= GROWTH_LIMIT:
            missed.append(f"{strategy}: a node of the largest graph takes {growth:.2f} times as long as before")
    return missed


def main() -> int:
    """Measure, print, write; 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="N", help="numbers of nodes")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES, metavar="NAME")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="repetitions (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    arguments = parser.parse_args()
    rows = measure(tuple(sorted(arguments.sizes)), tuple(arguments.strategies), arguments.repeat)
    Console(width=110).print(table_of(rows))
    missed = shortfalls(rows, arguments.strategies[0])
    result = {
        "benchmark": "plan_scaling",
        "machine": {"cpu_count": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "repeat": arguments.repeat,
        "limit": LIMIT,
        "rows": rows,
        "missed": missed,
    }
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    for line in missed:
        print(f"plan_scaling: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
