"""The static check: what the plan, `check_module` and `auto-deploy-ext check` report, and with which exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.fx import GraphModule

from auto_deploy_ext import BaseTransform, TransformInfo, TransformRegistry, plan
from auto_deploy_ext.analysis.events import Setting
from auto_deploy_ext.analysis.program import collect
from auto_deploy_ext.commands.cli import EXIT_OK, EXIT_STALE, EXIT_USAGE, main
from auto_deploy_ext.embedded.models.custom.modeling_eagle import EagleWrapper
from auto_deploy_ext.orchestrator import ops, orchestrator_graphs
from auto_deploy_ext.reports.stale_check import check_module
from auto_deploy_ext.rewriting.scoping import ScopeOptions, scope_graphs
from auto_deploy_ext.rewriting.strategies import Analysis, HostTraits, describe_problems
from tests.orchestrator_programs import OFFSET, SWITCH, build, make_interface
from tests.small_config import SMALL

CONFIG = f"""{SMALL}attn_backend: torch_paged
"""


def findings(gm: GraphModule, cm: Any) -> list[tuple[str, str, tuple[str, ...]]]:
    """Consumer, mirror and path of each stale read of a graph; the plan tells the same."""
    stale = check_module(gm, cm, ScopeOptions()).stale
    problems = plan(gm, cm).problems
    assert len(problems) == len(stale)
    for finding, problem in zip(stale, problems, strict=True):
        assert f"{finding.consumer} reads {finding.mirror}, which is stale there" in problem
        assert all(step in problem for step in finding.path)
    return [(f.consumer, f.mirror, f.path) for f in stale]


# -- what is reported ----------------------------------------------------------------------------------------------


def test_a_too_narrow_hand_written_override_is_reported_with_its_path() -> None:
    steps = ["offset", ("switch", {"cu_seqlen_host"}), ("consume", "draft")]
    gm = build(steps, {"draft": ("cu_seqlen_host", "input_pos_host")})
    assert findings(gm, make_interface(["cu_seqlen_host", "input_pos_host"])) == [
        (
            "draft",
            "input_pos_host",
            (
                f"{OFFSET} (%{OFFSET}) writes input_pos on the device",
                f"{SWITCH} (%{SWITCH}) writes input_pos on the device",
                "then draft (%draft) reads input_pos_host",
            ),
        )
    ]


def test_a_device_only_copy_is_reported_where_its_mirror_is_read_later_and_only_there() -> None:
    steps = ["switch", ("copy", "input_ids"), "offset", ("consume", "draft"), ("copy", "seq_len"), ("consume", "check")]
    gm = build(steps, {"draft": ("input_pos_host",), "check": ("input_ids_host",)})
    reported = findings(gm, make_interface(["input_ids_host"]))
    assert [(consumer, mirror, path[0]) for consumer, mirror, path in reported] == [
        ("draft", "input_pos_host", f"{OFFSET} (%{OFFSET}) writes input_pos on the device"),
        ("check", "input_ids_host", "copy_ (%copy_) writes input_ids on the device"),
    ], "the offset mirrors nothing, because nothing that it writes is active"


def test_a_twin_of_another_pool_that_an_override_forgets_is_reported() -> None:
    names = ("cu_num_pages_host", "cu_num_pages_g1_host")
    gm = build([("offset", {"cu_num_pages_host"}), ("consume", "draft")], {"draft": names})
    assert [(c, m) for c, m, _ in findings(gm, make_interface(names, pools=2))] == [("draft", "cu_num_pages_g1_host")]


def test_a_twin_that_the_host_itself_forgets_is_reported() -> None:
    """AutoDeploy mutates the twins of other pools, and does not copy anything for the sake of their mirrors."""
    cm = make_interface(["cu_num_pages_g1_host"], pools=2)
    program = collect(build(["offset", ("consume", "draft")], {"draft": ("cu_num_pages_g1_host",)}), Setting.of(cm))
    assert describe_problems(Analysis.of(program)) == []
    (problem,) = describe_problems(Analysis.of(program, traits=HostTraits(twins_trigger=False)))
    assert problem.startswith("draft reads cu_num_pages_g1_host, which is stale there:")


def test_either_side_of_a_branch_can_make_a_mirror_stale() -> None:
    steps = [("branch", [("offset", set())], []), ("consume", "draft")]
    gm = build(steps, {"draft": ("input_pos_host",)})
    ((consumer, mirror, path),) = findings(gm, make_interface(["input_pos_host"]))
    assert (consumer, mirror) == ("draft", "input_pos_host")
    assert path[0].startswith("cond.") or OFFSET in path[0]


@pytest.mark.parametrize("strategy", ["override", "copy", "replay", "auto"])
def test_un_narrowed_mutations_and_rewritten_graphs_have_nothing_to_report(strategy: str) -> None:
    cm = make_interface(["cu_seqlen_host", "input_pos_host"])
    consumers = {"draft": ("cu_seqlen_host", "input_pos_host", "input_ids_host")}
    gm = build(["switch", "offset", ("consume", "draft")], consumers)
    assert findings(gm, cm) == []
    gm = build([("switch", set()), ("copy", "input_ids"), ("offset", set()), ("consume", "draft")], consumers)
    assert {mirror for _, mirror, _ in findings(gm, cm)} == set(consumers["draft"])
    scope_graphs({"graph": gm}, cm, ScopeOptions(strategy=strategy))
    result = check_module(gm, cm, ScopeOptions())
    assert {f.form for f in result.stale} == {"as written"}, "the pass has repaired it"
    assert set(result.checked) == {"as written", "rewritten"}


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """A function that writes the small config with more lines behind it, and gives its path."""

    def write(more: str = "") -> str:
        path = tmp_path / "small.yaml"
        path.write_text(CONFIG + more)
        return str(path)

    return write


class NarrowWrapper(EagleWrapper):
    """A wrapper whose author named too little."""

    def forward(self, cache_seq_interface: Any = None, **kwargs: Any) -> Any:
        csi = cache_seq_interface
        if csi is None:
            return super().forward(None, **kwargs)
        logits = self.forward_target(csi)
        csi.info.switch_to_generate_(active_args_override={"cu_num_pages_host"})
        hidden_states = csi.info.unflatten(self.embed_draft(csi.get_arg("input_ids")))
        drafted = self.draft_model(
            inputs_embeds=hidden_states, hidden_states=hidden_states, **self.submodule_args(csi, self.draft_model)
        )
        return logits, drafted


@TransformRegistry.register("narrow_wrapper_for_test")
class NarrowWrapperTransform(BaseTransform):
    """Makes the model's wrapper one that names too little."""

    def _apply_to_full_model(self, mod: Any, cm: Any, factory: Any, shared_config: Any) -> Any:
        mod.__class__ = NarrowWrapper
        return mod, TransformInfo(skipped=False, num_matches=1, is_clean=True)


@TransformRegistry.register("break_rewritten_for_test")
class BreakRewrittenTransform(BaseTransform):
    """Takes a needed mirror out of rewritten graphs."""

    def _apply_to_full_model(self, mod: nn.Module, cm: Any, factory: Any, shared_config: Any) -> Any:
        for gm in orchestrator_graphs(mod).values():
            for node in gm.graph.nodes:
                if node.target is ops.mutate and "active_args" in node.kwargs:
                    names = node.kwargs["active_args"]
                    node.update_kwarg("active_args", tuple(n for n in names if n != "last_page_len_host"))
        return mod, TransformInfo(skipped=False, num_matches=1, is_clean=True)


NARROW = "  narrow_wrapper_for_test: {stage: cache_init, run_per_gm: false}\n"
SCOPE = "  scope_host_mirrors: {stage: cache_init, strategy: override%s}\n"
BREAK = "  break_rewritten_for_test: {stage: compile, run_per_gm: false}\n"


def check(tmp_path: Path, config: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "made" / "check.json"
    code = main(["check", "--config", config, "--json", str(path)])
    return code, json.loads(path.read_text())


@pytest.mark.parametrize("name", ["eagle3_llama_paged", "mtp_hybrid"])
def test_a_shipped_config_has_nothing_stale_as_written_and_as_rewritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, result = check(tmp_path, name)
    assert (code, result["stale"], result["config"]) == (EXIT_OK, [], name)
    assert result["checked"]["as written"] == result["checked"]["rewritten"] != []
    assert min(result["reads"].values()) > 0
    assert capsys.readouterr().out.startswith("nothing stale (as written: ")


def test_a_stale_read_as_written_exits_with_1_although_the_pass_repairs_it(
    tmp_path: Path, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = check(tmp_path, config("transforms:\n" + NARROW + SCOPE % ""))
    assert code == EXIT_STALE
    assert {f["form"] for f in result["stale"]} == {"as written"}
    assert {(f["consumer"], f["mirror"]) for f in result["stale"]} == {("draft_model", "cu_seqlen_host")}
    assert "rewritten" in result["checked"]
    out = capsys.readouterr().out
    assert "as written, extend: draft_model reads cu_seqlen_host, which is stale there:" in out
    assert "writes cu_seqlen on the device" in out


def test_what_the_pass_itself_refuses_is_reported_all_the_same(tmp_path: Path, config: Any) -> None:
    code, result = check(tmp_path, config("transforms:\n" + NARROW + SCOPE % ", insert_missing: false"))
    assert code == EXIT_STALE
    assert list(result["checked"]) == ["as written"]
    assert {(f["consumer"], f["mirror"]) for f in result["stale"]} == {("draft_model", "cu_seqlen_host")}


def test_a_stale_read_in_the_rewritten_graphs_exits_with_1(tmp_path: Path, config: Any) -> None:
    code, result = check(tmp_path, config("transforms:\n" + SCOPE % "" + BREAK))
    assert code == EXIT_STALE
    assert {(f["form"], f["consumer"], f["mirror"]) for f in result["stale"]} == {
        ("rewritten", "draft_model", "last_page_len_host")
    }
    assert all(OFFSET in f["path"][0] for f in result["stale"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("attn_backend: torch_page\n", "torch_paged"),
        ("transforms: {scope_host_mirrors: {stage: cache_init, strategi: override}}\n", "did you mean 'strategy'"),
    ],
)
def test_a_wrong_config_exits_with_2(config: Any, capsys: pytest.CaptureFixture[str], more: str, message: str) -> None:
    path = config()
    Path(path).write_text("".join(line for line in CONFIG.splitlines(True) if "attn_backend" not in line) + more)
    assert main(["check", "--config", path]) == EXIT_USAGE
    assert message in capsys.readouterr().err
