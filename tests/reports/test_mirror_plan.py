"""MirrorPlan: what it says of each call and each consumer, and that it says the same everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from auto_deploy_ext import MirrorPlan, SharedConfig, TransformRegistry, plan
from auto_deploy_ext.reports.mirror_plan import HEADINGS
from tests.orchestrator_programs import build, consumer, make_interface

PAGES = ("cu_num_pages_host", "last_page_len_host", "seq_len_with_cache_host")
PAGED = (*PAGES[:1], "cu_seqlen_host", *PAGES[1:])
OFFSET_MIRRORS = ("cu_num_pages_host", "input_pos_host", "last_page_len_host", "seq_len_with_cache_host")
LOOP = [("consume", "target"), *["switch", ("copy", "input_ids"), "offset", ("consume", "draft")] * 2]
CONSUMERS = {"target": ("input_pos_host",), "draft": PAGED}


def example() -> tuple[Any, Any]:
    return build(LOOP, CONSUMERS), make_interface([*PAGED, "input_pos_host"])


def rows(mirror_plan: MirrorPlan) -> list[tuple[Any, ...]]:
    return [(s.call, s.index, s.consumer, s.mirrored_before, s.mirrored_after) for s in mirror_plan.call_sites]


EXPECTED = [
    ("switch_to_generate_", 0, "draft", ("cu_seqlen_host", "input_pos_host"), ("cu_seqlen_host",)),
    ("copy_", 1, "draft", (), ()),
    ("offset_pos_and_cache_", 2, "draft", OFFSET_MIRRORS, PAGES),
    ("switch_to_generate_", 3, "draft", (), ()),
    ("copy_", 4, "draft", (), ()),
    ("offset_pos_and_cache_", 5, "draft", OFFSET_MIRRORS, PAGES),
]


def test_call_sites_before_the_pass_and_after_it_say_the_same() -> None:
    gm, cm = example()
    code = gm.code
    before = plan(gm, cm, strategy="override")
    assert rows(before) == EXPECTED
    assert gm.code == code
    TransformRegistry.get("scope_host_mirrors").from_kwargs(strategy="override")(gm, cm, None, SharedConfig(), 0)
    assert gm.code != code
    assert rows(plan(gm, cm, strategy="override")) == EXPECTED


def test_a_call_site_says_what_it_writes_what_is_read_next_and_why() -> None:
    switch, _, offset, second, *_ = plan(*example(), strategy="override").call_sites
    assert switch.reads == offset.reads == PAGED
    assert switch.writes == ("cu_seqlen", "input_ids", "input_pos", "position_ids", "seq_len", "use_initial_states")
    assert "draft reads cu_seqlen_host" in switch.why
    assert "draft reads cu_num_pages_host, last_page_len_host" in offset.why
    assert "generate-only already" in second.why
    assert second.writes == ()


def test_consumers_say_what_they_read_and_which_write_made_it_stale() -> None:
    target, draft, _ = plan(*example(), strategy="override").consumers
    assert (target.consumer, target.reads, target.stale) == ("target", ("input_pos_host",), ())
    assert draft.reads == PAGED
    assert {a.last_write: a.mirrors for a in draft.stale} == {
        "switch_to_generate_": ("cu_seqlen_host",),
        "offset_pos_and_cache_": PAGES,
    }


def test_stale_reads_of_the_orchestrator_as_written_are_problems() -> None:
    gm = build([("copy", "input_ids"), ("consume", "draft")], {"draft": ("input_ids_host",)})
    (problem,) = plan(gm, make_interface(["input_ids_host"]), strategy="override").problems
    assert "draft reads input_ids_host, which is stale there" in problem
    assert "copy_ (%copy_) writes input_ids on the device" in problem


def test_unknown_calls_are_reasons() -> None:
    gm = build(["switch", "unknown"], {})
    (reason,) = plan(gm, make_interface(["cu_seqlen_host"]), strategy="override").reasons
    assert "frobnicate" in reason


def test_a_plan_travels_as_json() -> None:
    mirror_plan = plan(*example(), strategy="override")
    assert MirrorPlan.from_json(mirror_plan.to_json()) == mirror_plan
    site = json.loads(mirror_plan.to_json())["call_sites"][0]
    assert site["mirrored_after"] == ["cu_seqlen_host"]


def test_a_plan_reads_as_text_and_html() -> None:
    mirror_plan = plan(*example(), strategy="override")
    text = mirror_plan.to_text()
    assert text.count("offset_pos_and_cache_") == 2
    assert "seq_len_with_cache_host" in text and "\x1b" not in text
    page = mirror_plan._repr_html_()
    assert page.count("<tr>") == 1 + len(EXPECTED)
    assert "cu_num_pages_host<br>last_page_len_host<br>seq_len_with_cache_host" in page


def test_text_and_html_have_the_same_headings() -> None:
    mirror_plan = plan(*example(), strategy="override")
    (header,) = [line for line in mirror_plan.to_text().splitlines() if "next consumer" in line]
    assert tuple(cell.strip() for cell in header.strip("\u2503 ").split("\u2503")) == HEADINGS
    assert "".join(f"<th>{heading}</th>" for heading in HEADINGS) in mirror_plan._repr_html_()


def test_every_cell_of_the_html_is_escaped() -> None:
    mirror_plan = plan(*example(), strategy="override")
    names = ("a<b_host", "c&d_host")
    site = replace(
        mirror_plan.call_sites[0],
        call="<call>",
        consumer="<consumer>",
        mirrored_before=names,
        mirrored_after=names,
        replayed=names,
        why="<why>",
    )
    page = replace(mirror_plan, call_sites=(site,))._repr_html_()
    cells = ["0", "&lt;call&gt;", "&lt;consumer&gt;", *["a&lt;b_host<br>c&amp;d_host"] * 3, "&lt;why&gt;"]
    assert "".join(f"<td>{cell}</td>" for cell in cells) in page


def test_whether_the_operand_is_copied_travels_with_the_plan() -> None:
    loop = [("consume", "target"), "switch", "offset", ("consume", "draft")]
    mirror_plan = plan(build(loop, CONSUMERS), make_interface([*PAGED, "input_pos_host"]), strategy="replay")
    copied = [(site.call, site.copies_operand) for site in mirror_plan.call_sites]
    assert copied == [("switch_to_generate_", False), ("offset_pos_and_cache_", True)]
    assert MirrorPlan.from_json(mirror_plan.to_json()) == mirror_plan
    old = json.loads(mirror_plan.to_json())
    for site in old["call_sites"]:
        del site["copies_operand"]
    assert not any(site.copies_operand for site in MirrorPlan.from_json(json.dumps(old)).call_sites)


def test_a_module_without_an_orchestrator_has_an_empty_plan() -> None:
    mirror_plan = plan(consumer("seq_len_host"), make_interface(["seq_len_host"]), strategy="override")
    assert (mirror_plan.variants, mirror_plan.call_sites) == ((), ())


def test_an_orchestrator_inside_a_model_is_named() -> None:
    model = nn.Module()
    model.loop, cm = example()
    assert rows(plan(model, cm, orchestrator="loop", strategy="override")) == EXPECTED


SCRIPT = """
from tests.reports.test_mirror_plan import CONSUMERS, LOOP, PAGED
from tests.orchestrator_programs import build, make_interface
from auto_deploy_ext.rewriting.scoping import ScopeOptions, scope_graphs
gm = build([*LOOP, "unknown", ("get", "slot_idx_host")], CONSUMERS)
names = {*PAGED, "input_pos_host", "slot_idx_host"}
mirror_plan, _ = scope_graphs({"graph": gm}, make_interface(names), ScopeOptions(strategy="override"))
print(gm.code, mirror_plan.to_json(), mirror_plan.to_text())
"""


def test_code_and_plan_do_not_depend_on_the_hash_seed() -> None:
    def run(hash_seed: str) -> str:
        root = Path(__file__).resolve().parents[2]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
        command = [sys.executable, "-c", SCRIPT]
        return subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, text=True).stdout

    first = run("1")
    assert "active_args" in first and "slot_idx_host" in first
    assert run("2") == first
