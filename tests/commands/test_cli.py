"""The command line: what `run` and `explain` print, write and return."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import auto_deploy_ext
from auto_deploy_ext import BaseTransform, TransformInfo, TransformRegistry
from auto_deploy_ext.commands.cli import EXIT_DIFFERENT, EXIT_OK, EXIT_USAGE, main, make_parser
from auto_deploy_ext.commands.report import MirrorTotals, call_site_table, distinct_call_sites, write_text
from auto_deploy_ext.embedded.tokenizer import ByteTokenizer, load_tokenizer
from auto_deploy_ext.reports.mirror_plan import CallSite, MirrorPlan
from auto_deploy_ext.runtime.mirrors import Transfer
from tests.small_config import SMALL

PAGED_READS = ["cu_num_pages_host", "cu_seqlen_host", "last_page_len_host", "seq_len_with_cache_host"]

CONFIG = f"""{SMALL}prompts: [ab, [1, 2, 3]]
max_new_tokens: 5
"""


@pytest.fixture
def small_config(tmp_path):
    """A function that writes the small config, with more lines behind it, and gives its path."""

    def write(more: str = "", without: str = "") -> str:
        path = tmp_path / "small.yaml"
        path.write_text("".join(line for line in CONFIG.splitlines(True) if not without or without not in line) + more)
        return str(path)

    return write


def run_json(tmp_path: Path, *arguments: str) -> dict:
    path = tmp_path / "made" / "out.json"
    assert main(["run", "--json", str(path), *arguments]) == EXIT_OK
    return json.loads(path.read_text())


def mirrored(report: dict, key: str) -> set[str]:
    return {name for site in report["call_sites"] for name in site[key]}


def test_run_on_the_default_config_has_no_transfer_at_all(tmp_path, capsys):
    report = run_json(tmp_path, "--max-new-tokens", "12")
    assert set(report) == {
        "config",
        "host",
        "device",
        "generated_tokens",
        "tokens_match_greedy",
        "acceptance_length",
        "acceptance_by_position",
        "tokens_per_second",
        "temperature",
        "mirrors",
        "call_sites",
    }
    assert report["config"] == "eagle3_llama"
    assert set(report["host"]) == {"name", "version"}
    assert report["host"]["name"] == "embedded"
    assert report["device"] == "cpu"
    assert report["generated_tokens"] == 6 * 12
    assert report["tokens_match_greedy"] is True
    assert 1.0 < report["acceptance_length"] < 4.0
    assert report["mirrors"]["scoped"] == {"transfers": 0, "bytes": 0, "waits": 0}
    assert mirrored(report, "mirrored_after") == set()
    calls = [site["call"] for site in report["call_sites"]]
    assert calls.count("offset_pos_and_cache_") == 2
    assert [set(site) for site in report["call_sites"]] == [
        {"call", "index", "consumer", "mirrored_before", "mirrored_after", "replayed", "operand"}
    ] * len(calls)
    out = capsys.readouterr().out
    assert "Once upon a time" in out
    assert "same tokens as greedy  yes" in out


def test_run_on_the_paged_config_copies_no_mirror_and_waits_for_nothing(tmp_path):
    report = run_json(tmp_path, "--config", "eagle3_llama_paged", "--max-new-tokens", "8")
    assert sorted(mirrored(report, "mirrored_before")) == PAGED_READS
    assert mirrored(report, "mirrored_after") == set()
    full, scoped = report["mirrors"]["full"], report["mirrors"]["scoped"]
    assert full["transfers"] == 3 * scoped["transfers"], "one operand instead of a switch and two offsets"
    assert scoped["waits"] == 0
    assert 0 < scoped["bytes"] < full["bytes"] / 1000
    assert sorted(mirrored(report, "replayed")) == PAGED_READS
    assert any(", copied after " in site["operand"] for site in report["call_sites"])


@pytest.mark.parametrize("strategy", ["copy", "override"])
def test_run_with_a_strategy_that_copies_copies_what_the_draft_reads_and_less_of_it(tmp_path, strategy):
    config = yaml.safe_load(files("auto_deploy_ext.configs").joinpath("embedded/eagle3_llama_paged.yaml").read_text())
    config["transforms"]["scope_host_mirrors"]["strategy"] = strategy
    path = tmp_path / "paged.yaml"
    path.write_text(yaml.safe_dump(config))
    report = run_json(tmp_path, "--config", str(path), "--max-new-tokens", "8")
    assert sorted(mirrored(report, "mirrored_after")) == PAGED_READS
    assert {site["consumer"] for site in report["call_sites"]} == {"draft_model"}
    full, scoped = report["mirrors"]["full"], report["mirrors"]["scoped"]
    assert 0 < scoped["bytes"] < full["bytes"] / 100
    assert full["transfers"] == full["waits"] > 0


def test_run_on_the_hybrid_config_copies_nothing_where_full_mirroring_copied_for_the_target(tmp_path):
    report = run_json(tmp_path, "--config", "mtp_hybrid", "--max-new-tokens", "6")
    assert report["mirrors"]["full"]["transfers"] > 0
    assert report["mirrors"]["scoped"] == {"transfers": 0, "bytes": 0, "waits": 0}
    assert mirrored(report, "mirrored_before") == set(PAGED_READS)
    assert mirrored(report, "mirrored_after") == set()


def test_prompts_and_length_of_the_command_line_replace_those_of_the_config(tmp_path, small_config):
    report = run_json(tmp_path, "--config", small_config(), "--prompt", "x", "--prompt", "yz", "--prompt", "ü")
    assert report["generated_tokens"] == 3 * 5
    report = run_json(tmp_path, "--config", small_config(), "--max-new-tokens", "3")
    assert report["generated_tokens"] == 2 * 3


def test_run_says_so_when_tokens_differ(tmp_path, small_config, capsys):
    @TransformRegistry.register("shift_verified_tokens")
    class ShiftVerifiedTokens(BaseTransform):
        """Breaks verification: the wrapper answers with the tokens after the right ones, greedy decoding does not."""

        def _apply_to_full_model(self, mod: nn.Module, cm, factory, shared_config):
            forward_inference = mod.forward_inference

            def shifted(csi):
                output = forward_inference(csi)
                output.new_tokens = (output.new_tokens + 1) % 256
                return output

            mod.forward_inference = shifted
            return mod, TransformInfo(skipped=False, num_matches=1)

    config = small_config("transforms: {shift_verified_tokens: {stage: compile, run_per_gm: false}}\n")
    path = tmp_path / "out.json"
    assert main(["run", "--config", config, "--json", str(path)]) == EXIT_DIFFERENT
    assert json.loads(path.read_text())["tokens_match_greedy"] is False
    captured = capsys.readouterr()
    assert "same tokens as greedy  NO" in captured.out
    assert "differ from greedy" in captured.err


def test_run_without_the_pass_says_that_nothing_is_scoped(tmp_path, small_config, capsys):
    config = small_config("attn_backend: torch_paged\ntransforms: {scope_host_mirrors: {enabled: false}}\n")
    report = run_json(tmp_path, "--config", config)
    assert report["mirrors"]["scoped"] == report["mirrors"]["full"]
    assert mirrored(report, "mirrored_after") == mirrored(report, "mirrored_before") == set(PAGED_READS)
    assert mirrored(report, "replayed") == set()
    assert "nothing is scoped, because scope_host_mirrors" in capsys.readouterr().err


def test_explain_prints_the_plan_and_writes_it(tmp_path, small_config, capsys):
    config = small_config("attn_backend: torch_paged\n")
    files = ["--json", str(tmp_path / "plan.json"), "--dot", str(tmp_path / "deep" / "plan.dot")]
    assert main(["explain", "--config", config, *files]) == EXIT_OK
    plan = MirrorPlan.from_json((tmp_path / "plan.json").read_text())
    assert capsys.readouterr().out.strip() == plan.to_text().strip()
    assert plan.variants == ("extend", "mixed", "prefill")
    dot = (tmp_path / "deep" / "plan.dot").read_text()
    assert dot.count("subgraph") == 3
    assert "switch_to_generate_" in dot
    assert r"cu_num_pages_host\nlast_page_len_host\nseq_len_with_cache_host" in dot


@pytest.mark.parametrize(
    ("more", "without", "arguments", "message"),
    [
        ("max_sequence_len: 3\n", "", [], "max_sequence_len"),
        ("", "speculative_config", [], "has no draft loop: set speculative_config.decoding_type"),
        ("", "prompts", [], "there is nothing to decode: give --prompt"),
        ("", "", ["--prompt", ""], "prompt '' has no tokens"),
        ("prompts: [[1, 256]]\n", "prompts", [], "has token 256, the model knows 0 to 255"),
        ("", "", ["--max-new-tokens", "40"], "max_seq_len is 32"),
        ("model_factory: AutoModelForCausalLN\n", "", [], "did you mean 'AutoModelForCausalLM'"),
        ("attn_backend: torch_page\n", "", [], "torch_paged"),
        ("model: /nowhere\n", "", [], "/nowhere does not exist"),
    ],
)
def test_what_the_user_has_to_change_is_said_in_a_line_with_exit_code_2(
    small_config, capsys, more, without, arguments, message
):
    assert main(["run", "--config", small_config(more, without), *arguments]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_an_unknown_config_is_named_with_the_nearest_one(capsys):
    assert main(["explain", "--config", "eagle_llama"]) == EXIT_USAGE
    assert "did you mean 'eagle3_llama'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["walk"], ["run", "--max-new-tokens", "0"], ["run", "--max-new-tokens", "x"]]
)
def test_wrong_usage_exits_with_2_and_says_how_it_is_used(capsys, arguments):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == EXIT_USAGE
    assert "usage: auto-deploy-ext" in capsys.readouterr().err


def test_version_names_the_package_torch_and_the_host(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    known = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert exit_.value.code == EXIT_OK
    assert known["auto_deploy_ext"] == importlib.metadata.version("auto_deploy_ext")
    assert known["torch"] == torch.__version__
    assert known["host"] == f"embedded {auto_deploy_ext.host.version}"


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "auto_deploy_ext", "--help"], capture_output=True, text=True, timeout=120, check=True
    )
    for word in ("run", "explain", "--config", "Exit codes"):
        assert word in done.stdout


def test_the_epilog_says_of_every_command_how_it_is_called_and_how_it_ends():
    parser = make_parser()
    examples, _, codes = parser.epilog.partition("Exit codes: ")
    for command in ("run", "explain", "check", "bench", "train-draft"):
        assert f"auto-deploy-ext {command} " in examples
        assert command in codes


def site(**fields) -> CallSite:
    empty = dict.fromkeys(("reads", "writes", "mirrored_before", "mirrored_after"), ())
    place = {"variant": "extend", "call": "offset_pos_and_cache_", "index": 0, "node": "", "source": ""}
    return CallSite(**{**place, "consumer": "draft", "why": "", **empty, **fields})


def test_calls_that_only_replay_differently_are_told_apart():
    sites = (
        site(replayed=("seq_len_host",), operand="1 throughout"),
        site(variant="mixed", replayed=("seq_len_host",), operand="1 throughout"),
        site(variant="prefill"),
        site(variant="other", replayed=("seq_len_host",), operand="offset, copied after add_"),
    )
    plan = MirrorPlan("auto", "graph", (), tuple(s.variant for s in sites), sites, ())
    distinct = distinct_call_sites(plan)
    assert [s.variant for s in distinct] == ["extend", "prefill", "other"]
    assert call_site_table(distinct).row_count == 2, "the table shows no operand, so the last is its first row again"


def test_only_a_copied_operand_is_mentioned_below_the_table():
    def caption(**fields) -> str | None:
        return call_site_table([site(replayed=("seq_len_host",), **fields)]).caption

    assert caption(operand="copied_lens throughout") is None
    assert "may have to be copied" in caption(operand="offset, brought after add_", copies_operand=True)


def test_a_file_that_cannot_be_written_to_its_end_stays_as_it_was(tmp_path):
    path = tmp_path / "out.json"
    write_text(path, "before")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half of it \ud800")
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]


def test_a_link_is_kept_and_a_pipe_is_written_to(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "text"
    write_text(Path(os.devnull), "text")
    assert not Path(os.devnull).is_file()


def test_totals_add_up_transfers():
    transfers = [Transfer(("a_host",), 12, True, "x"), Transfer(("b_host",), 4, False, "y")]
    assert MirrorTotals.of(transfers) == MirrorTotals(transfers=2, bytes=16, waits=1)


def test_bytes_are_tokens():
    tokenizer = load_tokenizer(None)
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("aü") == [97, 195, 188]
    assert tokenizer.decode([97, 10, 195, 300]) == "a<10><195><300>"


def test_a_checkpoints_own_tokenizer_is_used(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"good": 0, "day": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("good day sir") == [0, 1, 2]
    assert tokenizer.decode([1, 0]) == "day good"
