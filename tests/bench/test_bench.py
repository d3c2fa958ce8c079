"""`auto-deploy-ext bench`: what is measured, what each policy brings to the host, files, and the time budget."""

from __future__ import annotations

import copy
import dataclasses
import gzip
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch

from auto_deploy_ext.bench import command
from auto_deploy_ext.bench import session as session_module
from auto_deploy_ext.bench.batches import RING, longest_sequence, make_ring
from auto_deploy_ext.bench.cells import POLICIES, Backend, BenchError, Group, Variant, groups_of, rotated, variants_of
from auto_deploy_ext.bench.launches import launches_in, write_trace
from auto_deploy_ext.bench.measure import Block, RunAhead, Steps, Traffic
from auto_deploy_ext.bench.pipelines import Limits, ModelSource
from auto_deploy_ext.bench.plot import draw, write_plot
from auto_deploy_ext.bench.policies import make_forwards
from auto_deploy_ext.bench.results import CELL_FIELDS, MergeError, load_result, merge_results, targets
from auto_deploy_ext.bench.session import Effort, Measured, Session, _median_pass, _ratios, _standard_error
from auto_deploy_ext.commands.cli import EXIT_OK, EXIT_USAGE, main
from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.models.random_weights import RandomCausalLMFactory
from auto_deploy_ext.orchestrator import original_forward

ROOT = Path(__file__).resolve().parents[2]
K, ROWS, CONTEXT = 3, 2, 30
BACKEND = Backend("torch_paged", "torch-simple", K)


@pytest.fixture(scope="module")
def source() -> ModelSource:
    """The tiny model, which is exported once."""
    return ModelSource("bench_tiny")


@pytest.fixture(scope="module")
def steps(source) -> Steps:
    """Steps of a pipeline with all policies, fused and not."""
    pipeline = source.build(BACKEND, Limits(ROWS, 128), [ROWS])
    forwards = make_forwards(pipeline, variants_of(POLICIES, [True, False]))
    pipeline.compile()
    return Steps(pipeline, forwards, make_ring(pipeline.cm, ROWS, K, CONTEXT))


# ---------------------------------------------------------------- what is measured


def test_important_groups_come_first_and_pipelines_stay_together():
    groups = groups_of(["triton", "flashinfer"], ["torch-simple", "torch-cudagraph"], [3, 6], [1, 64, 8], 1024)
    assert [str(group) for group in groups[:4]] == [
        "flashinfer torch-cudagraph K=6 batch=8",
        "flashinfer torch-cudagraph K=6 batch=1",
        "flashinfer torch-cudagraph K=6 batch=64",
        "triton torch-cudagraph K=6 batch=8",
    ]
    assert len(groups) == len(set(groups)) == 24
    backends = [group.backend for group in groups]
    assert [backend for i, backend in enumerate(backends) if i == 0 or backends[i - 1] != backend] == list(
        dict.fromkeys(backends)
    )


def test_the_limit_is_measured_whatever_is_asked_for():
    assert variants_of(["scoped"], [True, False]) == [
        Variant("none", True),
        Variant("scoped", True),
        Variant("none", False),
        Variant("scoped", False),
    ]


def test_each_variant_has_each_place_in_the_order_equally_often():
    variants = variants_of(POLICIES, [True])
    places = [rotated(variants, repetition).index(variants[0]) for repetition in range(2 * len(variants))]
    assert all(set(rotated(variants, repetition)) == set(variants) for repetition in range(len(variants)))
    assert Counter(places) == dict.fromkeys(range(len(variants)), 2)


def test_batches_move_on_and_own_their_pages(steps):
    cm = steps.pipeline.cm
    size = cm.info.tokens_per_block
    starts = [batch["input_pos"] for batch in steps.ring]
    assert len(starts) == RING
    assert [later[0] - earlier[0] for earlier, later in pairwise(starts)] == [1 + K // 2] * 3
    for batch in steps.ring:
        pages = [*batch["cache_loc_per_pool"][0], *batch["extra_page_per_seq_per_pool"][0]]
        assert len(set(pages)) == len(pages)
        counts = torch.tensor(batch["cu_num_pages_per_pool"][0]).diff().tolist()
        assert counts == [math.ceil((start + 1 + K) / size) for start in batch["input_pos"]]
        assert max(start + 2 * (K + 1) for start in batch["input_pos"]) <= longest_sequence(CONTEXT, K)


def test_a_batch_that_does_not_fit_is_refused(steps):
    with pytest.raises(ValueError, match="max_batch_size 2"):
        make_ring(steps.pipeline.cm, ROWS + 1, K, CONTEXT)
    with pytest.raises(ValueError, match="max_seq_len 128"):
        make_ring(steps.pipeline.cm, ROWS, K, 127)


# ---------------------------------------------------------------- policies


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "none"])
def test_every_policy_drafts_what_the_wrapper_as_it_is_written_drafts(steps, policy, fused):
    wrapper, cm = steps.pipeline.wrapper, steps.pipeline.cm
    for index, batch in enumerate(steps.ring):
        caches = {name: cache.clone() for name, cache in cm.kv_cache_manager.resources.items()}
        cm.info.nest_sequences(**batch)
        with original_forward(wrapper), torch.no_grad():
            expected = wrapper(cm).next_new_tokens.clone()
        for name, cache in cm.kv_cache_manager.resources.items():
            cache.copy_(caches[name])
        cm.info.nest_sequences(**batch)
        with steps.using(Variant(policy, fused)), torch.no_grad():
            assert torch.equal(wrapper(cm).next_new_tokens, expected), f"batch {index} of the ring"


@pytest.mark.parametrize("fused", [True, False])
def test_what_a_step_brings_to_the_host(steps, fused):
    traffic = {policy: steps.traffic(Variant(policy, fused)) for policy in POLICIES}
    assert traffic["none"] == Traffic(0, 0, 0)
    # The first offset alone is not known to the host: it travels, once.
    assert traffic["auto"] == Traffic(1, 4 * ROWS, 0)
    assert traffic["replay"] == traffic["auto"]
    # One transfer for each consumer that finds something stale: the second draft and all after it.
    assert (traffic["copy"].transfers, traffic["copy"].waits) == (K - 1, K - 1)
    # The switch and every offset write mirrors that the next draft reads.
    whole = K
    assert (traffic["scoped"].transfers, traffic["scoped"].waits) == (whole, whole)
    assert traffic["full"] == traffic["scoped"]
    packed = sum(t.nbytes for t in steps.pipeline.cm.info._input_buffer._device_regions.values())
    assert whole * 1000 < traffic["scoped"].bytes < whole * packed


def test_without_a_reader_a_scoped_call_brings_nothing(source):
    pipeline = source.build(Backend("torch", "torch-simple", K), Limits(ROWS, 128), [ROWS])
    forwards = make_forwards(pipeline, variants_of(["auto", "scoped", "full"], [True]))
    pipeline.compile()
    steps = Steps(pipeline, forwards, make_ring(pipeline.cm, ROWS, K, CONTEXT))
    assert {v.policy: steps.traffic(v).transfers for v in forwards} == dict.fromkeys(
        ("none", "auto", "scoped", "full"), 0
    )


def test_the_wrappers_forward_is_put_back(steps):
    before = steps.pipeline.wrapper.__dict__.get("forward")
    with steps.using(Variant("auto", False)):
        assert steps.pipeline.wrapper.forward is steps.forwards[Variant("auto", False)]
    assert steps.pipeline.wrapper.__dict__.get("forward") is before


def test_pipelines_share_the_weights_and_nothing_else(source, steps):
    base, wrapper = source.base(), steps.pipeline.wrapper
    assert wrapper.target_model is not base.target_model
    assert {id(p) for p in wrapper.parameters()} == {id(p) for p in base.parameters()}
    assert not base.target_model.graph.find_nodes(op="placeholder", sort=False)[-1].target.startswith("kv_cache")


# ---------------------------------------------------------------- random weights


def test_random_weights_are_drawn_again_the_same():
    config = load_config("bench_tiny")
    states = []
    for _ in range(2):
        factory = RandomCausalLMFactory.from_config(config)
        model = factory.build_model()
        assert factory.load_or_random_init(model, torch.device("cpu")) == 0
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    weight = states[0]["target_model.model.layers.0.mlp.up_proj.weight"]
    assert weight.std().item() == pytest.approx(32**-0.5, rel=0.1)
    assert torch.equal(states[0]["draft_model.norm.weight"], torch.ones(32))


def test_random_weights_refuse_a_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    factory = RandomCausalLMFactory(str(tmp_path))
    with pytest.raises(ValueError, match="leave out model"):
        factory.build_model()


# ---------------------------------------------------------------- launches


def span(name: str, ts: float, dur: float, cat: str = "user_annotation") -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1}


def test_launches_between_drafts_are_counted_without_those_of_the_models():
    events = [
        span("bench:target_model", 0, 5),
        span("cudaGraphLaunch", 1, 1, "cuda_runtime"),
        span("cudaLaunchKernel", 6, 1, "cuda_runtime"),  # before any draft
        *(span("bench:draft_model", start, 5) for start in (10, 30, 50)),
        span("cudaLaunchKernel", 12, 1, "cuda_runtime"),  # inside a draft
        span("bench:draft_model.lm_head", 16, 3),
        span("cudaLaunchKernelExC", 17, 1, "cuda_runtime"),  # the head's
        span("cudaLaunchKernel", 20, 1, "cuda_runtime"),
        span("cuLaunchKernelEx", 21, 1, "cuda_driver"),
        span("cudaMemcpyAsync", 22, 1, "cuda_runtime"),
        span("cudaLaunchKernel", 40, 1, "cuda_runtime"),
        span("void some_kernel()", 41, 1, "kernel"),
        span("cudaLaunchKernel", 60, 1, "cuda_runtime"),  # after the last draft
        {"ph": "M", "name": "process_name", "ts": 0},
    ]
    launches = launches_in(events, on_gpu=True)
    assert launches.what == "kernels"
    assert launches.per_draft_step == (2 + 1) / 2
    assert launches.copies_per_draft_step == 1 / 2
    assert launches.outside_models == 5
    assert launches.total == 8


def test_without_a_gpu_the_outermost_operators_are_counted():
    events = [
        span("bench:draft_model", 0, 5),
        span("aten::linear", 1, 3, "cpu_op"),
        span("aten::to", 10, 5, "cpu_op"),
        span("aten::copy_", 11, 2, "cpu_op"),
        span("aten::add", 16, 1, "cpu_op"),
        span("bench:draft_model", 20, 5),
    ]
    launches = launches_in(events, on_gpu=False)
    assert (launches.what, launches.per_draft_step, launches.total) == ("operators", 2, 3)


def test_a_trace_shows_the_steps_that_are_measured(tmp_path):
    """Hooks on the consumers would have it show captured consumers instead of segments."""
    segments = ModelSource("bench_tiny", capture="segments")
    pipeline = segments.build(Backend("torch", "torch-cudagraph", K), Limits(ROWS, 128), [ROWS])
    variant = Variant("auto", False)
    forwards = make_forwards(pipeline, [variant])
    pipeline.compile()
    steps = Steps(pipeline, forwards, make_ring(pipeline.cm, ROWS, K, CONTEXT))
    steps.warm_up(variant)
    stats = forwards[variant].runner.stats
    before = stats.replays, stats.eager
    write_trace(steps, variant, tmp_path / "trace.json", 3)
    assert (stats.replays, stats.eager) == (before[0] + 2 + 3, before[1])
    names = Counter(event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    assert names["bench:segment"] == 3


# ---------------------------------------------------------------- the time budget


def test_what_the_time_does_not_suffice_for_is_left_out_and_reported(source):
    ticks = count()  # a second for each look at the clock
    effort = Effort(seconds=15.0, repetitions=50, block_seconds=0.0)
    session = Session(source, effort, clock=lambda: float(next(ticks)))
    groups = [Group(BACKEND, batch, CONTEXT) for batch in (1, 2, 4)]
    session.measure_cells(groups, [Variant("none", True), Variant("auto", True)])
    measured = {measured.group.batch for measured in session.findings.cells}
    assert measured and measured != {1, 2, 4}
    assert all(3 <= len(cell.blocks) < 50 for cell in session.findings.cells)
    left_out = " ".join(entry.what for entry in session.findings.left_out)
    assert all(f"batch={batch}" in left_out for batch in {1, 2, 4} - measured)


def test_a_group_is_repeated_until_its_ratios_are_known_well_enough(source):
    variants = [Variant("none", True), Variant("auto", True)]
    found = {}
    for precision in (math.inf, 0.0):
        session = Session(source, Effort(60.0, repetitions=7, block_seconds=0.0, precision=precision))
        session.measure_cells([Group(BACKEND, 1, CONTEXT)], variants)
        found[precision] = {len(cell.blocks) for cell in session.findings.cells}
    assert found == {math.inf: {5}, 0.0: {7}}


def test_a_group_is_judged_settled_after_five_repetitions_at_the_earliest(source, monkeypatch):
    session = Session(source, Effort(60.0, repetitions=9, block_seconds=0.0, precision=0.1))
    settled = iter([False, True])
    monkeypatch.setattr(session, "_is_settled", lambda blocks: next(settled))
    session.measure_cells([Group(BACKEND, 1, CONTEXT)], [Variant("none", True)])
    assert [len(cell.blocks) for cell in session.findings.cells] == [6]


def test_the_command_asks_for_the_precision_that_it_is_told(monkeypatch, capsys):
    asked = []

    class Stopped(BenchError):
        pass

    def stop(source, effort, *_):
        asked.append(effort)
        raise Stopped("stopped")

    monkeypatch.setattr(session_module, "Session", stop)
    given = ["bench", "--config", "bench_tiny", "--precision", "0.125", "--repetitions", "7", "--budget-seconds", "9"]
    assert main(given) == EXIT_USAGE
    assert [(e.precision, e.repetitions, e.seconds) for e in asked] == [(0.125, 7, 9.0)]


def test_a_host_that_becomes_slower_favours_no_policy():
    """Three repetitions, each twice as slow as the one before; in each, auto takes a tenth longer than the limit."""
    limit, auto = Variant("none", True), Variant("auto", True)
    host = (1000.0, 2000.0, 4000.0)
    # The order rotates, so one of auto's blocks may fall into the next repetition's pace.
    blocks = {limit: [Block(us, us) for us in host], auto: [Block(1.1 * us, us) for us in (*host[:2], 8000.0)]}
    ratios = _ratios(auto, blocks)
    assert statistics.median(ratios) == pytest.approx(1.1)
    assert _ratios(limit, blocks) == (1.0, 1.0, 1.0)
    assert _standard_error(ratios) > _standard_error([1.1, 1.1, 1.1]) == 0


def test_a_pipeline_that_cannot_be_built_does_not_stop_the_others(source, caplog):
    session = Session(source, Effort(seconds=60.0, repetitions=3, block_seconds=0.0))
    groups = [Group(Backend("flashinfre", "torch-simple", K), 1, CONTEXT), Group(BACKEND, 1, CONTEXT)]
    session.measure_cells(groups, [Variant("none", True)])
    assert [cell.group.backend for cell in session.findings.cells] == [BACKEND]
    (entry,) = session.findings.left_out
    assert entry.what == "flashinfre torch-simple K=3"
    assert "flashinfer" in entry.why


# ---------------------------------------------------------------- results


def measured(
    policy: str,
    fused: bool,
    step_us: float,
    limit_us: float,
    batch: int = 8,
    ahead: float = 1.0,
    noise: float = 0.0,
) -> Measured:
    group = Group(Backend("flashinfer", "torch-cudagraph", 6), batch, 1024)
    blocks = tuple(Block(step_us * factor, step_us * factor) for factor in (1 - noise, 1, 1 + noise))
    ratios = tuple(block.step_us / limit_us for block in blocks)
    return Measured(group, Variant(policy, fused), blocks, 4, ratios, Traffic(1, 32, 0.5), RunAhead(ahead, ()))


def result_of(*cells: Measured, launches: tuple = (), **about) -> dict:
    from auto_deploy_ext.bench.results import make_result
    from auto_deploy_ext.bench.session import Findings

    fields = {"config": "c", "device": {"is_gpu": True, "name": "g"}, "versions": {"torch": "2"}, "settings": {"a": 1}}
    return make_result(Findings(cells=list(cells), launches=list(launches)), fields | about)


def test_targets_are_judged_by_the_worst_cell():
    cells = [
        measured("none", True, 1000, 1000),
        measured("auto", True, 1010, 1000),
        measured("scoped", True, 1200, 1000),
        measured("none", True, 500, 500, batch=1),
        measured("auto", True, 515, 500, batch=1, ahead=0.9),
    ]
    found = {target.name: target for target in targets(result_of(*cells))}
    limit = found["auto / limit with CUDA graphs"]
    assert (limit.measured, limit.where, limit.met) == (1.03, "flashinfer torch-cudagraph K=6 batch=1", False)
    assert not found["run-ahead with CUDA graphs"].met
    scoped = found["scoped / auto where the draft reads mirrors"]
    assert scoped.measured == pytest.approx(1.188, abs=1e-3)
    assert scoped.met
    assert "auto / limit with torch-simple" not in found


def test_a_target_is_judged_by_the_repetitions_own_ratios():
    """The host becomes twice as slow from one repetition to the next, so medians of steps would compare two paces."""
    host = (1000.0, 2000.0, 4000.0)
    cells = [
        dataclasses.replace(measured(policy, True, 1, 1), blocks=tuple(Block(us, us) for us in steps))
        for policy, steps in (("none", host), ("auto", host), ("scoped", (1200.0, 8000.0, 4800.0)))
    ]
    found = {target.name: target for target in targets(result_of(*cells))}
    assert found["scoped / auto where the draft reads mirrors"].measured == 1.2


def test_nothing_is_claimed_of_a_gpu_without_one():
    assert targets(result_of(measured("auto", True, 1, 1), device={"is_gpu": False, "name": "cpu"})) == []


def test_merging_takes_the_later_file_for_a_group_that_both_have():
    first = result_of(measured("none", True, 1000, 1000), measured("auto", True, 1100, 1000))
    second = result_of(measured("none", True, 900, 900), measured("none", True, 500, 500, batch=1))
    merged = merge_results([first, second])
    assert [(cell["batch"], cell["policy"], cell["step_us"]) for cell in merged["cells"]] == [
        (8, "none", 900),
        (1, "none", 500),
    ]
    assert len(merged["details"]) == 2
    assert merged["settings"] == [{"a": 1}]


def test_a_merged_result_merges_with_itself():
    once = merge_results([result_of(measured("none", True, 1000, 1000), settings={"context": 1, "sources": "x"})])
    assert merge_results([once, once]) == once


def test_what_another_part_has_measured_is_not_left_out():
    whole = result_of(measured("none", True, 1000, 1000))
    whole["left_out"] = [
        {"what": "flashinfer torch-cudagraph K=6 batch=8 context=1024", "why": "the time is over"},
        {"what": "flashinfer torch-cudagraph K=6 batch=8 context=4096", "why": "the time is over"},
    ]
    merged = merge_results([whole, whole])
    assert [entry["what"] for entry in merged["left_out"]] == ["flashinfer torch-cudagraph K=6 batch=8 context=4096"]


@pytest.mark.parametrize("what", ["context", "capture", "dtype", "tokens_per_block", "model_kwargs"])
def test_parts_that_were_set_up_differently_are_not_merged(what):
    with pytest.raises(MergeError, match=f"differ in {what}: one and other; measure all parts alike"):
        merge_results([result_of(settings={what: "one"}), result_of(settings=[{what: "one"}, {what: "other"}])])


def test_parts_from_different_states_of_the_code_are_told(caplog):
    merge_results([result_of(settings={"sources": "one"}), result_of(settings={"sources": "one"})])
    assert not caplog.records
    merge_results([result_of(settings={"sources": "one"}), result_of(settings={"sources": "other"})])
    assert "different states of the code" in caplog.text


def test_the_digest_of_the_code_changes_with_each_file_that_decides_what_is_measured(tmp_path, monkeypatch):
    for name in ("auto_deploy_ext", "transforms", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "heads"))
    (tmp_path / "pyproject.toml").touch()

    def digest(folder) -> str:
        code = "from auto_deploy_ext.bench.results import sources; print(sources())"
        environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout

    found = [digest(tmp_path)]
    for path in ("transforms/scope_host_mirrors.py", "configs/embedded/bench_tiny.yaml", "auto_deploy_ext/effects.py"):
        with (tmp_path / path).open("a") as file:
            file.write("# more\n")
        found.append(digest(tmp_path))
    assert len(set(found)) == 4
    # As it is installed, two folders lie in the package.
    (tmp_path / "pyproject.toml").unlink()
    for name in ("transforms", "configs"):
        (tmp_path / name).rename(tmp_path / "auto_deploy_ext" / name)
    assert digest(tmp_path) == found[-1]


@pytest.mark.parametrize("what", ["config", "device", "versions"])
def test_files_of_different_machines_or_software_are_not_merged(what):
    other = result_of(**{what: {"is_gpu": True, "name": "other"}})
    with pytest.raises(MergeError, match=f"differ in {what}"):
        merge_results([result_of(), other])


def test_a_plot_shows_all_parts(tmp_path):
    result = result_of(measured("none", True, 1000, 1000), measured("auto", True, 1100, 1000))
    result["scale"] = [
        {**result["cells"][1], "batch": batch, "context": context} for batch in (1, 8) for context in (128, 1024)
    ]
    write_plot(result, tmp_path / "made" / "plot.png")
    assert (tmp_path / "made" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_takes_any_name_and_is_a_png_whatever_its_file_is_called(tmp_path):
    cells = measured("none", True, 1000, 1000), measured("auto", True, 1100, 1000)
    result = result_of(*cells, config="a$_{$.yaml", device={"is_gpu": True, "name": "$\\x$"})
    write_plot(result, tmp_path / "plot")
    assert (tmp_path / "plot").read_bytes().startswith(b"\x89PNG")


def error_bars(result: dict) -> dict[str, list[tuple[float, float]]]:
    """By policy, the ends of the error bars in the first picture, from left to right."""
    from matplotlib.container import BarContainer

    ends = {}
    for bars in draw(result).axes[0].containers:
        if isinstance(bars, BarContainer):
            _, _, (lines,) = bars.errorbar.lines
            ends[bars.get_label()] = [tuple(line[:, 1]) for line in lines.get_segments() if len(line)]
    return ends


def test_a_bar_of_a_plot_shows_the_quartiles_of_its_ratio():
    cells = [
        measured("none", True, 1000, 1000),
        measured("auto", True, 1100, 1000, noise=0.1),
        measured("none", False, 1000, 1000),
        measured("auto", False, 1100, 1000, noise=0.3),  # not drawn: there are fused cells
        measured("none", True, 500, 500, batch=1),
        measured("auto", True, 1000, 500, batch=1, noise=0.2),
        measured("scoped", True, 600, 500, batch=1),  # without noise
    ]
    result = result_of(*cells)
    # Of three values, the quartiles are the outer ones; batch 1 comes first, in whatever order was measured.
    expected = {"auto": [(1.6, 2.4), (0.99, 1.21)], "scoped": [(1.2, 1.2)]}
    found = error_bars(result)
    assert found.keys() == expected.keys()
    assert all(found[policy] == [pytest.approx(ends) for ends in expected[policy]] for policy in expected)
    bottom, top = draw(result).axes[0].get_ylim()
    assert bottom < 0.95 and top > 2.4
    assert error_bars({**result, "details": []}) == {"auto": [], "scoped": []}
    del result["details"]
    assert error_bars(result) == {"auto": [], "scoped": []}


# ---------------------------------------------------------------- the command


def test_the_command_measures_and_its_files_merge(tmp_path, capsys):
    out, traces = tmp_path / "made" / "out.json", tmp_path / "traces"
    common = ["bench", "--config", "bench_tiny", "--policies", "auto", "--fusion", "on", "--batch", "2"]
    short = ["--repetitions", "3", "--block-ms", "0.01", "--context", "16", "--traces", str(traces)]
    assert main([*common, *short, "--json", str(out)]) == EXIT_OK
    assert "say nothing about a decode step on a GPU" in capsys.readouterr().out
    whole = json.loads(out.read_text())
    parts = [tmp_path / "cells.json", tmp_path / "launches.json"]
    parts[0].write_text(json.dumps({**whole, "launches": []}))
    parts[1].write_text(json.dumps({**whole, "cells": [], "details": []}))
    assert main(["bench", "--merge", *map(str, parts), "--json", str(out)]) == EXIT_OK
    result = json.loads(out.read_text())
    assert {**result, "settings": None} == {**whole, "settings": None}
    assert [tuple(cell) for cell in result["cells"]] == [CELL_FIELDS] * 2
    limit, auto = result["cells"]
    assert (limit["policy"], limit["ratio_to_limit"], limit["transfers"]) == ("none", 1.0, 0)
    assert (auto["policy"], auto["transfers"], auto["bytes"], auto["host_waits"]) == ("auto", 1, 8, 0)
    steps = [detail["repetition_step_us"] for detail in result["details"]]
    expected = statistics.median(own / least for least, own in zip(*steps, strict=True))
    assert auto["ratio_to_limit"] == pytest.approx(expected, rel=1e-3)
    assert auto["run_ahead"] is None
    assert result["versions"]["torch"] == torch.__version__
    assert result["device"]["is_gpu"] is False
    assert [detail["repetitions"] for detail in result["details"]] == [3, 3]
    (counted,) = result["launches"]
    assert counted["what"] == "operators"
    assert 0 < counted["per_draft_step"] < counted["outside_models"] < counted["total"]
    files = sorted(traces.iterdir())
    names = [f"torch_paged_torch-simple_K3_batch2_{policy}+fused.json.gz" for policy in ("auto", "none")]
    assert [path.name for path in files] == names
    events = json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"]
    assert sum(event["name"] == "bench:draft_model" for event in events) == 4 * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repetitions", "2"], "a median needs at least 3"),
        (["--k", "9"], "a page of 8 tokens"),
        (["--attn", "torch_pagde"], "unknown attention backend 'torch_pagde'; did you mean 'torch_paged'?"),
        (
            ["--compile", "torch-cudagraf"],
            "--compile: unknown compile backend 'torch-cudagraf'; did you mean 'torch-cudagraph'?",
        ),
        (["--config", "nowhere"], "no config of this name"),
    ],
)
def test_wrong_usage_says_what_is_wrong(arguments, message, capsys):
    given = ["bench", "--config", "bench_tiny", "--parts", "cells", *arguments]
    assert main(given) == EXIT_USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--budget-seconds", "--block-ms"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_times_are_above_zero(option, value, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--config", "nowhere", f"{option}={value}"])
    assert exit_.value.code == EXIT_USAGE
    assert f"must be a number above 0, got '{value}'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot", "--traces"])
def test_what_cannot_be_written_is_told_before_anything_is_measured(option, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "_measure", lambda arguments: pytest.fail("it measures"))
    (tmp_path / "file").touch()
    wrong = [tmp_path / "file" / "below", tmp_path / ("file" if option == "--traces" else "")]
    for path in wrong:
        assert main(["bench", "--config", "bench_tiny", option, str(path)]) == EXIT_USAGE
        assert f"{option} {path} cannot be written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_default_config_asks_for_a_gpu(capsys):
    assert main(["bench"]) == EXIT_USAGE
    assert "--config bench_tiny runs on the CPU" in capsys.readouterr().err


def without(result: dict, *path) -> dict:
    """A copy of a result without what lies at the path."""
    damaged = copy.deepcopy(result)
    holder = damaged
    for step in path[:-1]:
        holder = holder[step]
    del holder[path[-1]]
    return damaged


def altered(value, new, *path):
    """A deep copy in which the place that a path leads to has another value."""
    value = copy.deepcopy(value)
    place = value
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = new
    return value


WHOLE = result_of(measured("none", True, 1000, 1000), measured("auto", True, 1100, 1000))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"benchmark": "plan_scaling"}', "was not written by auto-deploy-ext bench"),
        ("[1, 2]", "was not written by auto-deploy-ext bench"),
        ("half a fi", "is no JSON file"),
        ("", "is no JSON file"),
        (json.dumps(without(WHOLE, "versions")), "versions is missing"),
        (json.dumps(without(WHOLE, "details")), "details is missing"),
        (json.dumps(without(WHOLE, "device", "is_gpu")), "device.is_gpu is missing"),
        (json.dumps(without(WHOLE, "cells", 1, "step_us")), "cells[1].step_us is missing"),
        (json.dumps({**WHOLE, "launches": None}), "launches is None"),
        (json.dumps(without(WHOLE, "details", 0, "ratio_quartiles")), "details[0].ratio_quartiles is missing"),
        (json.dumps(altered(WHOLE, [1, "2"], "details", 0, "repetition_step_us")), "[1, '2']"),
        (json.dumps(altered(WHOLE, [1.0], "details", 0, "ratio_quartiles")), "details[0].ratio_quartiles is [1.0]"),
        (json.dumps(altered(WHOLE, [2, 1], "details", 0, "ratio_quartiles")), "details[0].ratio_quartiles is [2, 1]"),
        (json.dumps(altered(WHOLE, [0, 0, 0], "details", 1, "repetition_step_us")), "is [0, 0, 0]"),
        (json.dumps(altered(WHOLE, [1, 1], "details", 1, "repetition_step_us")), "not as many entries as others"),
        (json.dumps(altered(WHOLE, math.nan, "cells", 1, "ratio_to_limit")), "NaN is no number of JSON"),
        (json.dumps(altered(WHOLE, math.inf, "device", "memory_gib")), "Infinity is no number of JSON"),
        (json.dumps(altered(WHOLE, 1.5, "cells", 1, "ratio_to_limit")), "are 1.1 and 1.1, and the cell's ratio is 1.5"),
        (json.dumps(altered(WHOLE, ["a"], "settings")), "settings[0] is 'a'"),
        (json.dumps({**WHOLE, "cells": WHOLE["cells"][1:], "details": WHOLE["details"][1:]}), "has no none beside it"),
        (json.dumps({**WHOLE, "scale": [{**WHOLE["cells"][0], "context": 8}] * 2}), "none True 8 more than once"),
        (json.dumps(altered(WHOLE, -5, "cells", 1, "step_us")), "cells[1].step_us is -5"),
        (json.dumps(altered(WHOLE, 10**400, "cells", 1, "run_ahead")), "cells[1].run_ahead is 1000"),
        (json.dumps(altered(WHOLE, True, "cells", 1, "k")), "cells[1].k is True"),
        (json.dumps(altered(WHOLE, 1, "cells", 1, "fused")), "cells[1].fused is 1"),
        (json.dumps(altered(WHOLE, "nonsense", "cells", 1, "policy")), "cells[1].policy is 'nonsense'"),
        (json.dumps(altered(WHOLE, "no", "device", "is_gpu")), "device.is_gpu is 'no'"),
        (json.dumps({**WHOLE, "cells": [*WHOLE["cells"], WHOLE["cells"][0]]}), "none True more than once"),
        (json.dumps({**WHOLE, "details": []}), "none True is in cells and not in details"),
        ("[" * 100_000, "is no JSON file"),
        (json.dumps({**WHOLE, "cells": ["auto"]}), "cells[0] is 'auto'"),
        (
            json.dumps({**WHOLE, "left_out": [{"what": "all", "why": ["no", "time"]}]}),
            "left_out[0].why is ['no', 'time']",
        ),
        (json.dumps({**WHOLE, "cells": [{**WHOLE["cells"][0], "step_us": None}]}), "cells[0].step_us is None"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_file_that_is_no_result_is_not_merged(tmp_path, capsys, text, message, place):
    files = [tmp_path / "whole.json", tmp_path / "whole_too.json"]
    files.insert(place, tmp_path / "other.json")
    for path in files:
        path.write_text(text if path.name == "other.json" else json.dumps(WHOLE))
    assert main(["bench", "--merge", *map(str, files)]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert str(tmp_path / "other.json") in said and message in said


def test_a_file_that_cannot_be_read_is_not_merged(tmp_path, capsys):
    assert main(["bench", "--merge", str(tmp_path)]) == EXIT_USAGE
    assert f"--merge {tmp_path} cannot be read: " in capsys.readouterr().err
    assert main(["bench", "--merge", str(tmp_path / "nosuch.json")]) == EXIT_USAGE
    assert f"--merge {tmp_path / 'nosuch.json'} cannot be read: No such file" in capsys.readouterr().err


def test_merging_takes_no_option_of_a_measurement(tmp_path, capsys):
    (tmp_path / "whole.json").write_text(json.dumps(WHOLE))
    options = ["--attn", "triton", "--precision", "0.1", "--json", str(tmp_path / "merged.json")]
    assert main(["bench", "--merge", str(tmp_path / "whole.json"), *options]) == EXIT_USAGE
    assert "so it takes no --attn, --precision" in capsys.readouterr().err
    assert not (tmp_path / "merged.json").exists()


@pytest.mark.parametrize(
    ("option", "text", "answer"),
    [("--policies", "rplay", "unknown policy 'rplay'; did you mean 'replay'?"), ("--parts", "cell", "'cells'?")],
)
def test_a_misspelled_name_gets_the_closest_one(option, text, answer, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", option, text])
    assert exit_.value.code == EXIT_USAGE
    assert answer in capsys.readouterr().err


def test_a_result_goes_through_links_and_into_pipes(tmp_path):
    """What is no plain file is written to, not replaced."""
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps(WHOLE))
    (tmp_path / "kept").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "kept" / "real.json")
    assert main(["bench", "--merge", str(whole), "--json", str(tmp_path / "link.json")]) == EXIT_OK
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "kept" / "real.json").read_text())["cells"] == WHOLE["cells"]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_text)
        command.write_json(pipe, WHOLE)
        assert json.loads(read.result(timeout=30)) == json.loads(whole.read_text())
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["--plot", "x.svg2"], "name a file that ends in .png"),
        (["--json", "x.png", "--plot", "./x.png"], "name two files"),
    ],
)
def test_a_picture_is_a_png_in_a_file_of_its_own(names, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "whole.json").write_text(json.dumps(WHOLE))
    assert main(["bench", "--merge", "whole.json", *names]) == EXIT_USAGE
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["whole.json"]


def test_a_file_in_another_encoding_is_not_merged(tmp_path):
    (tmp_path / "other.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(MergeError, match=r"other\.json is no JSON file"):
        load_result(tmp_path / "other.json")


def test_of_several_passes_the_one_in_the_middle_counts():
    passes = [RunAhead(share, (share,)) for share in (1.0, 0.2, 0.9)]
    assert _median_pass(passes) == RunAhead(0.9, (0.9,))
    assert _median_pass([]) is None


def test_the_run_ahead_fraction_is_split_by_the_calls_of_a_step() -> None:
    """Two steps of three calls, of which the very first has none before it; the second call of each came too late."""
    ahead = RunAhead.of([False, True, True, False, True], 2)
    assert ahead.share == 3 / 5
    assert ahead.by_call == (1.0, 0.0, 1.0)
