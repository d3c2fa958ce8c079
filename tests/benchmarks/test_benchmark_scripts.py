"""The command lines of overlap_stress, decoding_equality and step_profile in benchmarks/, and merging of results."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what it does without a GPU")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_script", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stress() -> ModuleType:
    return load("overlap_stress")


@pytest.fixture(scope="module")
def equality() -> ModuleType:
    return load("decoding_equality")


@pytest.fixture(scope="module")
def step_profile() -> ModuleType:
    return load("step_profile")


def refused(script: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What argparse says of wrong arguments."""
    with pytest.raises(SystemExit) as exit_:
        script.main(list(arguments))
    assert exit_.value.code == 2
    return capsys.readouterr().err.partition("error: ")[2].strip()


def one_line(script: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a script says of arguments that cannot be done: one line, and no traceback."""
    assert script.main(list(arguments)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    return line


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("value", ["0", "-5"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("stress", ("steps", "draft-len", "batch-size", "prompts", "tokens")),
        ("equality", ("tokens",)),
        ("step_profile", ("k", "batch", "context", "repetitions")),
    ],
)
def test_numbers_of_things_are_at_least_one(request, capsys, name, options, value):
    for option in options:
        message = refused(request.getfixturevalue(name), capsys, f"--{option}={value}")
        assert message == f"argument --{option}: must be at least 1, got {value}"


@pytest.mark.parametrize("name", ["stress", "equality"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_built(request, capsys, tmp_path, name):
    message = refused(request.getfixturevalue(name), capsys, "--json", str(tmp_path))
    assert message == f"argument --json: {tmp_path} cannot be written: it is a directory; name another file"


@pytest.mark.parametrize(
    ("name", "option", "wrong", "message"),
    [
        ("stress", "cases", "torch_pagd", "unknown case 'torch_pagd'; did you mean 'torch_paged'?"),
        (
            "equality",
            "attn",
            "triton:tritn",
            "unknown pair of attention backends 'triton:tritn'; did you mean 'triton:triton'?",
        ),
        ("equality", "dtype", "float23", "unknown dtype 'float23'; did you mean 'float32'?"),
        (
            "step_profile",
            "compile",
            "torch-simpel",
            "unknown compile backend 'torch-simpel'; did you mean 'torch-simple'?",
        ),
    ],
)
def test_a_misspelled_name_is_answered_with_the_right_one(request, capsys, name, option, wrong, message):
    script = request.getfixturevalue(name)
    assert refused(script, capsys, f"--{option}", wrong) == f"argument --{option}: {message}"
    assert refused(script, capsys, f"--{option}").startswith(f"argument --{option}: expected ")


def test_two_policies_are_compared(step_profile, capsys):
    message = refused(step_profile, capsys, "--policies", "auto", "rplay")
    assert message == "argument --policies: unknown policy 'rplay'; did you mean 'replay'?"
    message = refused(step_profile, capsys, "--policies", "auto", "auto")
    assert message == "argument --policies: auto is compared with itself; name two"


@no_gpu
@pytest.mark.parametrize(
    ("name", "options"),
    [("hostfunc_deadlock", []), ("fusion_launches", ["--device", "cuda"]), ("guided_soak", ["control"])],
)
def test_without_a_gpu_nothing_begins_that_needs_one(capsys, monkeypatch, tmp_path, name, options):
    monkeypatch.syspath_prepend(BENCHMARKS)  # as it is for a script that is run
    script = load(name)
    found = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", [name, *options, "--json", str(found)])
    with pytest.raises(SystemExit) as exit_:
        script.main()
    assert exit_.value.code == 2
    assert "PyTorch finds no" in capsys.readouterr().err and not found.exists()


# ---------------------------------------------------------------- overlap_stress


def test_outputs_are_long_enough_to_end_in_different_places(stress, capsys):
    message = "argument --tokens: outputs of 3 are too short to end in different places; take 4 or more"
    assert refused(stress, capsys, "--tokens", "3") == message


@pytest.mark.parametrize("value", ["-0.1", "nan", "inf", "much"])
def test_how_close_a_tie_is_is_a_number(stress, capsys, value):
    message = f"argument --tie: must be a number of at least 0, got '{value}'"
    assert refused(stress, capsys, f"--tie={value}") == message
    assert stress.parse(["--device", "cpu", "--tie", "0"]).tie == 0


def test_memcheck_has_a_smaller_load_and_what_is_given_holds(stress):
    usual, memcheck = (stress.parse(["--device", "cpu", "--prompts", "7", *more]) for more in ([], ["--memcheck"]))
    assert (usual.steps, usual.prompts, usual.tokens, usual.no_sanitizer) == (2000, 7, 40, False)
    assert (memcheck.steps, memcheck.prompts, memcheck.tokens, memcheck.no_sanitizer) == (12, 7, 8, True)
    assert memcheck.cases == ["torch_paged"]


def test_cases_that_cannot_run_are_named_with_the_reason(stress, capsys):
    options = stress.parse(["--device", "cpu", "--cases", "triton", "torch_paged_fused", "torch_paged_fused"])
    assert options.cases == ["torch_paged_fused"]
    assert options.left_out == ["triton is left out: it needs a GPU"]
    message = refused(stress, capsys, "--device", "cpu", "--cases", "triton", "flashinfer_fused")
    assert message == (
        "there is no case to run; triton is left out: it needs a GPU; flashinfer_fused is left out: it needs a GPU"
    )


@no_gpu
def test_without_a_gpu_no_case_runs_on_one(stress, capsys):
    message = refused(stress, capsys, "--device", "cuda", "--cases", "torch")
    assert message == "there is no case to run; torch is left out: PyTorch finds no GPU here"


@pytest.mark.parametrize("case", ["torch_paged_fused", "flashinfer_fused"])
def test_fused_cases_fuse_behind_the_pass(stress, case):
    config = stress.config_of(case, "cpu", 3, 5)
    assert list(config.transforms)[-2:] == ["scope_host_mirrors", "fuse_metadata_mutations"]
    captured = config.transforms["compile_model"].get("capture")
    assert (config.compile_backend, captured) == (
        ("torch-cudagraph", "segments") if case == "flashinfer_fused" else ("torch-simple", None)
    )


def test_sizes_that_do_not_fit_are_told_in_one_line(stress, capsys, monkeypatch):
    monkeypatch.setattr(stress, "why_not", lambda *_: None)
    line = one_line(stress, capsys, "--device", "cpu", "--cases", "torch", "flashinfer", "--draft-len", "16")
    assert line.startswith("overlap_stress: override 'kv_cache_config.tokens_per_block': ")
    assert "a page must hold the 17 tokens of one step" in line


def test_what_cannot_be_built_is_told_in_one_line(stress, capsys, monkeypatch):
    def build(*_):
        raise ValueError("no room\nfor that")

    monkeypatch.setattr(stress, "build", build)
    line = one_line(stress, capsys, "--device", "cpu", "--cases", "torch")
    assert line == "overlap_stress: torch: no room for that"


@pytest.mark.parametrize("length", [1, 2, 4, 9])
def test_a_request_asks_for_no_more_than_its_prompt_has_been_continued_by(stress, length):
    prompt, rng = stress.Prompt((1,), tuple(range(length))), random.Random(0)
    requests = [stress.random_request(prompt, rng)[0] for _ in range(200)]
    assert {request.max_new_tokens for request in requests} == set(range(1, length + 1))


def test_a_case_that_answers_nothing_is_an_error(stress):
    report = stress.Report("torch")
    stress.compare(None, (), [], 1e-4, report)
    assert report.errors == ["no request was answered"]


# ---------------------------------------------------------------- decoding_equality


def entry(attention: str, dtype: str, capture: str, overlap: bool, **changes: Any) -> dict[str, Any]:
    numbers = {"noise": 1e-6, "num_tokens": 8, "num_close": 0, "parted": 0, "num_prompts": 2}
    way = {"attention": attention, "dtype": dtype, "capture": capture, "fused": False, "overlap": overlap}
    return {**way, "equal": True, "identical": True, **numbers, **changes}


def result_file(path: Path, *entries: dict[str, Any], **about: Any) -> str:
    path.write_text(json.dumps({"torch": "2.11.0", "device": "cpu", **about, "ways": entries}))
    return str(path)


@no_gpu
def test_ways_that_this_machine_cannot_run_are_left_out_with_the_reason(equality, capsys):
    fused = equality.parse(["--device", "cpu", "--attn", "torch:torch", "--dtype", "float32"])
    assert list(map(str, equality.ways(fused)[0])) == [
        *("torch:torch float32 simple", "torch:torch float32 simple fused", "torch:torch float32 consumers"),
        *("torch:torch float32 segments", "torch:torch float32 segments fused", "torch:torch float32 full"),
    ]
    options = equality.parse(["--device", "cpu", "--attn", "triton:torch_paged", "torch_paged:torch_paged"])
    chosen, left_out = equality.ways(options)
    assert list(map(str, chosen)) == [
        "torch_paged:torch_paged float32 simple",
        "torch_paged:torch_paged bfloat16 simple",
    ]
    assert left_out == [
        {"way": f"triton:torch_paged {dtype} simple", "why": "it needs a GPU"} for dtype in ("float32", "bfloat16")
    ]
    line = one_line(equality, capsys, "--device", "cuda", "--attn", "flashinfer:triton", "--dtype", "float32")
    assert line == (
        "decoding_equality: there is nothing to measure: FlashInfer has no float32: "
        "flashinfer:triton float32 simple, flashinfer:triton float32 segments"
    )
    line = one_line(equality, capsys, "--device", "cuda", "--attn", "torch_paged:torch_paged", "--dtype", "float32")
    assert line.endswith("nothing to measure: PyTorch finds no GPU here: torch_paged:torch_paged float32 simple")


def test_a_run_writes_what_it_found_and_what_it_left_out(equality, capsys, tmp_path, monkeypatch):
    prompts_of, load_config = equality.prompts_of, equality.load_config
    small = {"model_kwargs.num_hidden_layers": 3}
    monkeypatch.setattr(equality, "prompts_of", lambda pipeline: prompts_of(pipeline)[3:5])
    monkeypatch.setattr(equality, "load_config", lambda name, overrides: load_config(name, overrides=overrides | small))
    found = tmp_path / "new" / "found.json"
    options = ["--device", "cpu", "--attn", "torch_paged:torch_paged", "triton:torch_paged", "--dtype", "float32"]
    assert equality.main([*options, "--tokens", "4", "--json", str(found)]) == 0
    result = json.loads(found.read_text())
    assert (result["torch"], result["device"], "gpu" in result) == (torch.__version__, "cpu", False)
    assert result["tokens"] == 4
    assert [way["overlap"] for way in result["ways"]] == [False, True]
    for way in result["ways"]:
        assert (way["equal"], way["identical"], way["parted"], way["num_tokens"]) == (True, True, 0, 8)
    assert result["left_out"] == [{"way": "triton:torch_paged float32 simple", "why": "it needs a GPU"}]
    assert "left out, it needs a GPU: triton:torch_paged float32 simple" in capsys.readouterr().out


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_way_is_what_the_worst_of_its_runs_is(equality, monkeypatch, order):
    numbers = [{"equal": True, "identical": True, "parted": 0}, {"equal": True, "identical": False, "parted": 3}]

    class Report:
        def __init__(self, number: int) -> None:
            self.number = number

        def to_json(self) -> dict[str, Any]:
            return numbers[self.number]

    class Reference:
        runs = iter([Report(number) for number in (*order, *order)])

        def of(self, *_):
            return self

        def report(self, _):
            return next(self.runs)

    monkeypatch.setattr(equality, "build", lambda *_: None)
    monkeypatch.setattr(equality, "decode", lambda *_, **__: [])
    for dtype, equal in (("float32", False), ("bfloat16", True)):
        Reference.runs = iter([Report(number) for number in (*order, *order)])
        way = equality.Way("torch:torch", dtype, "simple")
        found = list(equality.judge(way, Reference(), equality.parse(["--device", "cpu"])))
        assert [(e["overlap"], e["equal"], e["identical"], e["parted"]) for e in found] == [
            (False, equal, False, 3),
            (True, equal, False, 3),
        ]


def test_merged_ways_stand_in_order_and_the_later_file_wins(equality, capsys, tmp_path):
    first = result_file(
        tmp_path / "first.json",
        entry("triton:triton", "float32", "simple", False),
        entry("torch:torch", "bfloat16", "simple", True),
        entry("torch:torch", "bfloat16", "simple", False, num_tokens=8),
        entry("torch:torch", "float32", "full", True),
        left_out=[{"way": "flashinfer:triton float32 segments", "why": "FlashInfer has no float32"}],
    )
    second = result_file(
        tmp_path / "second.json",
        entry("torch:torch", "float32", "simple", True),
        entry("torch:torch", "bfloat16", "simple", False, num_tokens=16),
    )
    merged = tmp_path / "merged.json"
    assert equality.main(["--merge", first, second, "--json", str(merged)]) == 0
    result = json.loads(merged.read_text())
    assert list(result) == ["torch", "device", "ways", "left_out"]
    keys = ("attention", "dtype", "capture", "overlap", "num_tokens")
    assert [tuple(way[key] for key in keys) for way in result["ways"]] == [
        ("torch:torch", "float32", "simple", True, 8),
        ("torch:torch", "float32", "full", True, 8),
        ("torch:torch", "bfloat16", "simple", False, 16),
        ("torch:torch", "bfloat16", "simple", True, 8),
        ("triton:triton", "float32", "simple", False, 8),
    ]
    reasons = {left["way"]: left["why"] for left in result["left_out"]}
    assert reasons["torch:torch float32 simple fused"] == "not measured"
    # Of all ways one is whole, and three are there with or without overlap alone.
    assert len(reasons) == len(result["left_out"]) == len(equality.MATRIX) - 1
    assert reasons["torch:torch float32 simple without overlap"] == "not measured"
    assert reasons["triton:triton float32 simple with overlap"] == "not measured"
    assert reasons["torch:torch float32 consumers"] == "not measured"
    assert reasons["flashinfer:triton float32 segments"] == "FlashInfer has no float32"
    assert "torch:torch bfloat16 simple" not in reasons
    assert "left out, not measured: torch:torch float32 simple without overlap" in capsys.readouterr().out


def test_a_merged_result_merges_with_itself(equality, tmp_path):
    path = tmp_path / "result.json"
    result_file(path, entry("torch:torch", "float32", "simple", True), device="cuda", gpu="NVIDIA H200")
    once = equality.merge([path])
    path.write_text(json.dumps(once))
    assert equality.merge([path, path]) == once
    assert once["gpu"] == "NVIDIA H200"


@pytest.mark.parametrize(
    ("about", "what"),
    [
        ({"torch": "2.9.1"}, "torch: {first} has 2.11.0, {second} has 2.9.1"),
        ({"device": "cuda"}, "device: {first} has cpu, {second} has cuda"),
        ({"gpu": "NVIDIA H200"}, "gpu: {first} has None, {second} has NVIDIA H200"),
        ({"tokens": 8}, "tokens: {first} has None, {second} has 8"),
    ],
)
def test_results_of_different_machines_are_not_merged(equality, capsys, tmp_path, about, what):
    first = result_file(tmp_path / "first.json")
    second = result_file(tmp_path / "second.json", **about)
    line = one_line(equality, capsys, "--merge", first, second, "--json", str(tmp_path / "merged.json"))
    differ = what.format(first=first, second=second)
    assert line == f"decoding_equality: the files differ in {differ}; measure all parts alike"
    assert not (tmp_path / "merged.json").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "is no JSON file: "),
        ("[]", "was not written by decoding_equality.py"),
        ('{"ways": [{}]}', "ways[0] has no attention, dtype, capture, fused, overlap, "),
        ('{"ways": [], "left_out": ["all"]}', "left_out[0] has no way and why"),
        ("[" * 100_000, "is no JSON file: "),
        *(
            (json.dumps({"ways": [entry("torch:torch", "float32", "simple", True, noise=noise)]}), "has no noise")
            for noise in (math.nan, -1.0, 10**400)
        ),
        (json.dumps({"ways": [entry("torch:torch", "float32", "some", True)]}), "ways[0] is torch:torch float32 some"),
    ],
)
def test_what_is_no_result_is_not_merged(equality, capsys, tmp_path, content, message):
    path = tmp_path / "result.json"
    if content is not None:
        path.write_text(content)
    line = one_line(equality, capsys, "--merge", str(path))
    assert line.startswith(f"decoding_equality: {path}") and message in line


def test_an_entry_that_is_not_equal_or_none_at_all_exits_with_one(equality, tmp_path):
    good, bad = entry("torch:torch", "float32", "simple", False), entry("torch:torch", "float32", "simple", True)
    assert equality.main(["--merge", result_file(tmp_path / "good.json", good, bad)]) == 0
    bad["equal"] = bad["identical"] = False
    assert equality.main(["--merge", result_file(tmp_path / "bad.json", good, bad)]) == 1
    assert equality.main(["--merge", result_file(tmp_path / "none.json")]) == 1


def test_a_way_that_fails_is_left_out_and_the_others_go_on(equality, tmp_path, monkeypatch):
    def judge(way, *_):
        if way.dtype == "float32":
            raise RuntimeError("out of memory\nand more")
        yield entry(*way[:3], False)

    monkeypatch.setattr(equality, "judge", judge)
    found = tmp_path / "found.json"
    options = ["--device", "cpu", "--attn", "torch_paged:torch_paged", "--json", str(found)]
    assert equality.main(options) == 1
    result = json.loads(found.read_text())
    assert [way["dtype"] for way in result["ways"]] == ["bfloat16"]
    why = "it failed: RuntimeError: out of memory"
    assert result["left_out"] == [{"way": "torch_paged:torch_paged float32 simple", "why": why}]
    # A file that says so exits with 1 when it is merged, until another one has measured that way.
    assert equality.main(["--merge", str(found)]) == 1
    both = [entry("torch_paged:torch_paged", "float32", "simple", overlap) for overlap in (False, True)]
    assert (
        equality.main(["--merge", str(found), result_file(tmp_path / "more.json", *both, **equality_about(result))])
        == 0
    )


def equality_about(result: dict[str, Any]) -> dict[str, Any]:
    return {field: result[field] for field in ("torch", "device", "tokens")}


def test_merging_takes_no_option_of_a_measurement(equality, capsys, tmp_path):
    path = result_file(tmp_path / "result.json", entry("torch:torch", "float32", "simple", True))
    line = one_line(equality, capsys, "--merge", path, "--tokens", "3", "--attn", "torch:torch")
    assert line == (
        "decoding_equality: --merge measures nothing, so it takes no --attn, --tokens; leave one or the other out"
    )


# ---------------------------------------------------------------- step_profile


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "bench_tny"], "bench_tny: no config of this name; did you mean 'bench_tiny'?"),
        (
            ["--config", "bench_tiny", "--attn", "torch_pagd"],
            "--attn: unknown attention backend 'torch_pagd'; did you mean 'torch_paged'?",
        ),
        pytest.param(
            [],
            "config 'bench_llama8b_eagle3' runs on cuda, and PyTorch finds no GPU here; --config bench_tiny runs "
            "on the CPU",
            marks=no_gpu,
        ),
    ],
)
def test_what_cannot_be_profiled_is_told_in_one_line(step_profile, capsys, arguments, message):
    assert one_line(step_profile, capsys, *arguments) == f"step_profile: {message}"


def test_drafts_longer_than_a_page_are_told_before_anything_is_built(step_profile, capsys):
    line = one_line(step_profile, capsys, "--config", "bench_tiny", "--attn", "torch_paged", "--k", "9")
    assert line.startswith("step_profile: torch_paged torch-simple K=9 cannot be built: ")
    assert "a page must hold the 10 tokens of one step" in line


def test_what_a_capture_refuses_is_told_in_one_line(step_profile, capsys):
    """Attention that plans on the host cannot be part of a consumer's graph on a CPU."""
    options = ["--config", "bench_tiny", "--attn", "torch_paged", "--k", "3", "--batch", "2", "--context", "30"]
    line = one_line(step_profile, capsys, *options, "--compile", "torch-cudagraph")
    assert line.startswith("step_profile: torch_paged torch-cudagraph K=3 cannot be built: ")


def test_names_hold_no_addresses(step_profile):
    assert step_profile.named(("~", 0, "<function Event.record at 0x7f3636f2e980>")) == "<function Event.record>"
    assert step_profile.named(("/a/b/c.py", 3, "f")) == "b/c.py:3 f"
    assert step_profile.named(("<eval_with_key>.7", 3, "forward")) == "generated code: forward"


def test_policies_are_profiled_side_by_side(step_profile, capsys, monkeypatch):
    monkeypatch.setattr(step_profile, "STEPS", 4)
    options = ["--config", "bench_tiny", "--attn", "torch_paged", "--k", "3", "--batch", "2", "--context", "30"]
    assert step_profile.main([*options, "--policies", "copy", "none", "--repetitions", "1", "--unfused"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("torch_paged torch-simple K=3 batch=2 context=30, torch ")
    assert lines[1].startswith("step: copy ") and ", none " in lines[1] and "ratio " in lines[1]
    assert any(line.endswith(" ensure_fresh") for line in lines)


def test_functions_that_both_call_equally_often_are_added_up(step_profile, capsys):
    mine = {"read": (2.0, 9.0), "both": (1.0, 5.0), "more": (3.0, 20.0)}
    its = {"write": (1.0, 4.0), "both": (1.0, 3.5), "more": (1.0, 10.0)}
    rows, alike = step_profile.difference(mine, its)
    assert [tuple(row) for row in rows] == [
        (10.0, 2.0, 3.0, "more"),
        (9.0, 2.0, 2.0, "read"),
        (-4.0, -1.0, 0.0, "write"),
    ]
    assert alike == 1.5
    step_profile.print_difference(rows, alike, ("auto", "none"))
    assert capsys.readouterr().out.splitlines() == [
        "",
        "per step, auto less none: 15 us under the profiler where calls differ; else 2 us",
        "      us   calls of calls  function",
        "    10.0    2.00     3.00  more",
        "     9.0    2.00     2.00  read",
        "    -4.0   -1.00     0.00  write",
    ]
