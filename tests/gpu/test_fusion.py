"""Fused metadata mutations on a GPU: the kernel's results, its launches, its cost on the host, and its capture."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from auto_deploy_ext import orchestrator_graphs, record_mirrors, sanitize
from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.generation import generate
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.rewriting.fusion import fuse_graphs, fused_runs
from auto_deploy_ext.rewriting.scoping import ScopeOptions, scope_graphs, scope_module
from auto_deploy_ext.runtime import fused_launch, fused_mutations
from auto_deploy_ext.runtime.fused_mutations import COPY_NAME, OFFSET_NAME, SWITCH_NAME, Part
from tests.metadata_runs import TOKENS_PER_BLOCK, Batch, Row, batches, fused, in_use, one_by_one
from tests.no_waits import synchronising_is_an_error
from tests.strategy_programs import Batch as ProgramBatch
from tests.strategy_programs import Reader, make_interface, run, write

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and fused_launch.kernels.has_triton()), reason="needs a GPU and Triton"
)

TOKENS, GATHER = Part(COPY_NAME, "input_ids", False), Part(COPY_NAME, "token_gather_indices", False)
ITERATION = (Part(SWITCH_NAME), Part(COPY_NAME, "input_ids"), Part(OFFSET_NAME))
#: each is a kernel of its own to compile.
RUNS = {
    "draft loop": ITERATION,
    "offset": (Part(OFFSET_NAME),),
    "two offsets": (Part(OFFSET_NAME), Part(OFFSET_NAME)),
    "copies": (TOKENS, GATHER),
    "offset first": (Part(OFFSET_NAME), TOKENS, Part(SWITCH_NAME), GATHER),
}


def operands_of(parts: tuple[Part, ...], batch: Batch, values: list[int], integer: torch.dtype) -> list[torch.Tensor]:
    """Operands on the GPU; offsets take their values from the list."""
    rows, found, given = len(batch.rows), [], iter(values)
    for part in parts:
        if part.name == OFFSET_NAME:
            found.append(torch.tensor([next(given) for _ in range(rows)], dtype=integer, device="cuda"))
        elif part.name == COPY_NAME:
            found.append(torch.arange(700, 700 + rows, dtype=integer, device="cuda"))
    return found


def check(batch: Batch, parts: tuple[Part, ...], operands: list[torch.Tensor]) -> None:
    got, expected = batch.make("cuda"), batch.make("cuda")
    one_by_one(expected, parts, operands)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_mutations, "_one_by_one", None)  # it must not be called
        fused(got, parts, operands)
    states = in_use(got), in_use(expected)
    differing = {name: (states[0][name], states[1][name]) for name in states[0] if states[0][name] != states[1][name]}
    assert not differing, (batch, [operand.tolist() for operand in operands], differing)


@pytest.mark.parametrize("name", RUNS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_run_in_one_launch_leaves_what_its_mutations_leave(name: str, data: st.DataObject) -> None:
    batch = data.draw(batches())
    values = st.lists(st.integers(1 - TOKENS_PER_BLOCK, TOKENS_PER_BLOCK), min_size=16, max_size=16)
    check(batch, RUNS[name], operands_of(RUNS[name], batch, data.draw(values), torch.int32))


def test_operands_may_be_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch((Row("prefill", 5, 13), Row("extend", 2, 15)), 2, (True, True))
    check(batch, ITERATION, operands_of(ITERATION, batch, [4, -3], torch.int64))


def large_info(rows: int, pages: int, tokens_per_block: int = 32) -> Any:
    """A decode batch on the GPU whose rows end all over their last pages."""
    from auto_deploy_ext.embedded.custom_ops.attention_interface import SequenceInfo

    info = SequenceInfo(pages * tokens_per_block + 64, rows, max(rows, 64), tokens_per_block).to("cuda")
    info.update_cache_information(rows * (pages + 1))
    info.activate_arg("cache_loc")
    lengths = [(pages - 1) * tokens_per_block + 1 + (7 * i) % tokens_per_block for i in range(rows)]
    info.nest_sequences(
        [1] * rows,
        list(range(rows + 1)),
        [length - 1 for length in lengths],
        slot_idx=list(range(rows)),
        cache_loc_per_pool=[[(7919 * i) % (rows * pages) for i in range(rows * pages)]],
        cu_num_pages_per_pool=[[pages * i for i in range(rows + 1)]],
        extra_page_per_seq_per_pool=[[10**6 + i for i in range(rows)]],
    )
    return info


@pytest.mark.parametrize(("rows", "pages"), [(1, 3), (64, 40), (256, 1024)])
def test_large_page_tables_move_in_place(rows: int, pages: int) -> None:
    got, expected = large_info(rows, pages), large_info(rows, pages)
    for round_, sign in enumerate((1, -1, 1)):
        offset = torch.tensor([sign * (1 + (3 * i + round_) % 7) for i in range(rows)], device="cuda")
        offset[1::3] *= -1
        expected.offset_pos_and_cache_(offset)
        fused(got, (Part(OFFSET_NAME),), [offset])
    buffer, reference = got._input_buffer, expected._input_buffer
    for name in ("cu_num_pages", "last_page_len", "input_pos", "seq_len_with_cache", "position_ids"):
        assert torch.equal(buffer.get_view(name), reference.get_view(name)), name
    count = int(buffer.get_view("cu_num_pages")[rows])
    wrong = (buffer.get_view("cache_loc")[:count] != reference.get_view("cache_loc")[:count]).nonzero().flatten()
    assert wrong.numel() == 0, (count, wrong[:8].tolist(), wrong.numel())


# -- programs ----------------------------------------------------------------------------------------------------------

PROGRAM = ProgramBatch((("prefill", 3, 41), ("extend", 2, 44), ("decode", 1, 47)), (2, -1, 4))
READS = ("cu_num_pages_host", "cu_seqlen_host", "last_page_len_host", "position_ids_host", "seq_len_with_cache_host")
LOOP = [("consume", "draft"), *[("switch",), ("offset",), ("consume", "draft")] * 2]


@pytest.mark.parametrize("strategy", [None, "auto", "copy", "override", "replay"])
def test_consumers_of_fused_programs_find_what_they_found(strategy: str | None) -> None:
    seen = []
    for fusing in (False, True):
        cm = make_interface(device="cuda")
        consumers = {"draft": Reader(READS)}
        gm = write(LOOP, consumers, len(PROGRAM.rows))
        gm.meta["generate_only"] = False
        if strategy is not None:
            scope_graphs({"graph": gm}, cm, ScopeOptions(strategy=strategy))
        if fusing:
            assert fuse_graphs([gm], cm) == (2 if strategy else 4), fused_runs({"graph": gm})
        PROGRAM.nest(cm)
        result = run(gm, consumers, cm, PROGRAM)
        with sanitize(cm):
            PROGRAM.nest(cm)
            run(gm, consumers, cm, PROGRAM)
        seen.append((result.seen, [(t.names, t.nbytes, t.trigger) for t in (*result.moved, *result.operands)]))
    assert seen[0] == seen[1]


# -- launches and their cost -------------------------------------------------------------------------------------------


def launches(body: Callable[[], None]) -> list[str]:
    """The kernels, copies and fills that the device is given."""
    body()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        body()
        torch.cuda.synchronize()
    return [event.name for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("rows", [1, 64])
def test_an_iteration_is_one_launch_and_never_waits(rows: int) -> None:
    info = large_info(rows, 8)
    tokens = torch.arange(rows, dtype=torch.int32, device="cuda")
    one = torch.ones(rows, dtype=torch.int32, device="cuda")
    parts = tuple(map(tuple, ITERATION))

    def separately() -> None:
        one_by_one(info, ITERATION, [tokens, one])

    def together() -> None:
        fused_mutations.mutate_all(info, parts, (tokens, one))

    before, after = launches(separately), launches(together)
    assert len(after) == 1, after
    assert len(before) >= 20, before
    print(f"\n{rows} rows: {len(before)} launches before, {len(after)} after")
    with synchronising_is_an_error():
        for _ in range(3):
            together()


def microseconds(body: Callable[[], None], repeat: int = 300) -> float:
    """The host's time for one call, the median of some rounds that never fill the device's queue."""
    rounds = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeat):
            body()
        rounds.append((time.perf_counter() - start) / repeat * 1e6)
    return statistics.median(rounds)


def test_a_compiled_kernel_is_started_directly() -> None:
    info = large_info(1, 8)
    tokens = torch.arange(1, dtype=torch.int32, device="cuda")
    zero = torch.zeros(1, dtype=torch.int32, device="cuda")
    parts = tuple(map(tuple, ITERATION))
    operands = (tokens, zero)

    def together() -> None:
        fused_mutations.mutate_all(info, parts, operands)

    def separately() -> None:
        one_by_one(info, ITERATION, operands)

    for body in (together, separately):
        body()
    memory = fused_mutations.memory_of(info)
    (codes, launcher), *_ = memory._launchers.items()
    arguments = [memory._address, 1, 1, *[0] * 12]
    arguments[3:6] = tokens.data_ptr(), memory.targets["input_ids"][0], 1
    arguments[6:9] = zero.data_ptr(), 0, 1
    bare = microseconds(lambda: launcher(*arguments))
    through_triton = microseconds(
        lambda: launcher._kernel[launcher._grid](*arguments, *launcher._constants, num_warps=4, num_stages=1)
    )
    whole, before = microseconds(together), microseconds(separately)
    told = (
        f"bare {bare:.1f} us, through triton.jit {through_triton:.1f} us, fused {whole:.1f} us, apart {before:.1f} us"
    )
    print(f"\n{codes}: {told}")
    assert launcher._start is not None, "compiled kernels of this Triton cannot be started directly"


def test_a_captured_run_replays_as_it_ran() -> None:
    captured, eager = large_info(8, 6), large_info(8, 6)
    tokens = torch.arange(8, dtype=torch.int32, device="cuda")
    offset = torch.tensor([1, 2, 3, 4, -1, -2, 5, 6], dtype=torch.int32, device="cuda")
    parts = tuple(map(tuple, ITERATION))
    warm = large_info(8, 6)
    fused_mutations.mutate_all(warm, parts, (tokens, offset))  # compiles
    fused_mutations.memory_of(captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = captured._input_buffer.get_view("input_pos").clone()
    with torch.cuda.graph(graph):
        fused_mutations.mutate_all(captured, parts, (tokens, offset))
    assert torch.equal(captured._input_buffer.get_view("input_pos"), before)
    for step in range(6):
        offset.copy_(torch.tensor([(3 * i + step) % 8 - 2 for i in range(8)]))
        tokens.add_(1)
        graph.replay()
        if step:
            fused_mutations.note_on_host(captured, parts, (tokens, offset))
        one_by_one(eager, ITERATION, [tokens, offset])
    torch.cuda.synchronize()
    states = in_use(captured), in_use(eager)
    assert not {name: (states[0][name], states[1][name]) for name in states[0] if states[0][name] != states[1][name]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_rows_are_gathered(dtype: torch.dtype) -> None:
    source = torch.arange(300 * 1030, device="cuda").view(300, 1030).to(dtype)
    index = torch.tensor([299, 0, 7, 7, 150], device="cuda")
    for rows in (source, source[:, ::2], source[3:, :1], source[:, 0]):
        taken = index.clamp(max=rows.shape[0] - 1)
        assert torch.equal(fused_launch.gather_rows(rows, taken), rows.index_select(0, taken))


# -- decoding ----------------------------------------------------------------------------------------------------------

PROMPTS = [[7], [72, 101, 121, 33, 10], list(b"a longer prompt, over pages")]
LIMITS = [9, 12, 14]


@cache
def pipeline_on_gpu() -> tuple[Pipeline, list[Any]]:
    config = load_config("eagle3_llama_paged", overrides={"device": "cuda", "kv_cache_config.tokens_per_block": 4})
    pipeline = build_pipeline(config)
    greedy = generate(pipeline.model, pipeline.cm, PROMPTS, LIMITS, speculative=False)
    return pipeline, [output.tokens for output in greedy.outputs]


@pytest.mark.parametrize("strategy", ["auto", "copy", "override"])
def test_fused_decoding_gives_greedy_tokens(strategy: str) -> None:
    pipeline, greedy = pipeline_on_gpu()
    transfers = []
    for fusing in (False, True):
        scope_module(pipeline.model, pipeline.cm, ScopeOptions(strategy=strategy))
        if fusing:
            assert fuse_graphs(orchestrator_graphs(pipeline.model).values(), pipeline.cm) > 0
        with record_mirrors(pipeline.cm.info) as recorded:
            result = generate(pipeline.model, pipeline.cm, PROMPTS, LIMITS)
        assert [output.tokens for output in result.outputs] == greedy, fusing
        transfers.append([(t.names, t.nbytes, t.trigger) for t in recorded])
    assert transfers[0] == transfers[1]
