"""Speculative decoding gives the tokens of greedy decoding for every draft length, page size, batch and model."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from auto_deploy_ext import InferenceOptimizer, Stages, orchestrator_graphs
from auto_deploy_ext.embedded.config import EmbeddedConfig, load_config
from auto_deploy_ext.embedded.generation import Engine, generate
from auto_deploy_ext.embedded.models.factory import ModelFactory, ModelFactoryRegistry
from auto_deploy_ext.embedded.pipeline import Pipeline, make_interface
from auto_deploy_ext.embedded.requests import Request
from auto_deploy_ext.embedded.tokenizer import ByteTokenizer
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.orchestrator.dispatch import original_forward
from auto_deploy_ext.rewriting.scoping import ScopeOptions, scope_module
from auto_deploy_ext.runtime.mirrors import Transfer

CONFIGS = ("eagle3_llama", "eagle3_llama_paged", "mtp_hybrid")
DRAFT_LENGTHS = range(1, 7)
STRATEGIES = ("auto", "copy", "override", "replay")
#: the mirrors that a rewritten wrapper brings up to date in all its steps.
READ_BY_DRAFT = {
    "eagle3_llama": set(),
    "eagle3_llama_paged": {"cu_num_pages_host", "cu_seqlen_host", "last_page_len_host", "seq_len_with_cache_host"},
    "mtp_hybrid": set(),
}
OFFSET = "offset_pos_and_cache_"


@dataclass(frozen=True)
class Exported:
    """A model just after export; every pipeline of a config starts from a copy of it."""

    factory: ModelFactory
    model: torch.nn.Module


@cache
def exported(name: str) -> Exported:
    config = load_config(name)
    factory = ModelFactoryRegistry.get(config.model_factory).from_config(config)
    transforms = {key: fields for key, fields in config.transforms.items() if Stages(fields["stage"]) <= Stages.EXPORT}
    return Exported(factory, InferenceOptimizer(factory, transforms)(make_interface(config)))


def make_pipeline(name: str, max_draft_len: int, tokens_per_block: int, max_batch_size: int = 3, **limits) -> Pipeline:
    """The pipeline of a config with other limits, from the export that all pipelines of that config share."""
    config: EmbeddedConfig = load_config(
        name,
        overrides={
            "speculative_config.max_draft_len": max_draft_len,
            "kv_cache_config.tokens_per_block": tokens_per_block,
            "max_batch_size": max_batch_size,
            **limits,
        },
    )
    start = exported(name)
    model = copy.deepcopy(start.model)
    model.max_draft_len = max_draft_len
    cm = make_interface(config)
    transforms = {key: fields for key, fields in config.transforms.items() if Stages(fields["stage"]) > Stages.EXPORT}
    return Pipeline(config, start.factory, InferenceOptimizer(start.factory, transforms)(cm, model), cm)


def shipped_prompts(name: str) -> list[list[int]]:
    return [ByteTokenizer().encode(text) for text in load_config(name).prompts]


def tokens_of(result) -> list[tuple[int, ...]]:
    return [output.tokens for output in result.outputs]


#: prompts of different lengths; as many tokens as make requests leave and join at different steps.
PROMPTS = [[7], [72, 101, 121, 33, 10], list(b"a longer prompt, over pages"), [200, 3, 3, 3], [0, 255]]
LIMITS = [9, 1, 16, 12, 14]


@pytest.mark.parametrize("max_draft_len", DRAFT_LENGTHS)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_smallest_pages_and_any_draft_length_give_greedy_tokens(name, max_draft_len):
    pipeline = make_pipeline(name, max_draft_len, tokens_per_block=max_draft_len + 1)
    greedy = generate(pipeline.model, pipeline.cm, PROMPTS, LIMITS, speculative=False)
    drafted = generate(pipeline.model, pipeline.cm, PROMPTS, LIMITS)
    assert set(orchestrator_graphs(pipeline.model)) >= {"extend", "mixed", "prefill"}
    assert tokens_of(drafted) == tokens_of(greedy)
    assert [len(output.tokens) for output in drafted.outputs] == LIMITS
    assert set(drafted.batches) == {"prefill", "extend", "mixed"}
    assert set(greedy.batches) == {"prefill", "decode", "mixed"}
    assert drafted.steps < greedy.steps
    assert len(drafted.accepted) == max_draft_len + 1


@pytest.mark.parametrize("tokens_per_block", [5, 6, 7, 16, 32])
@pytest.mark.parametrize("name", ["eagle3_llama_paged", "mtp_hybrid"])
def test_any_page_size_gives_greedy_tokens(name, tokens_per_block):
    pipeline = make_pipeline(name, max_draft_len=4, tokens_per_block=tokens_per_block)
    greedy = generate(pipeline.model, pipeline.cm, PROMPTS, LIMITS, speculative=False)
    drafted = generate(pipeline.model, pipeline.cm, PROMPTS, LIMITS)
    assert tokens_of(drafted) == tokens_of(greedy)


@pytest.mark.parametrize("max_batch_size", [1, 2, 5])
@pytest.mark.parametrize("name", ["eagle3_llama_paged", "mtp_hybrid"])
def test_any_batch_size_gives_greedy_tokens(name, max_batch_size):
    pipeline = make_pipeline(name, max_draft_len=3, tokens_per_block=4, max_batch_size=max_batch_size)
    greedy = generate(pipeline.model, pipeline.cm, PROMPTS, LIMITS, speculative=False)
    drafted = generate(pipeline.model, pipeline.cm, PROMPTS, LIMITS)
    with original_forward(pipeline.model):
        untouched = generate(pipeline.model, pipeline.cm, PROMPTS, LIMITS)
    assert tokens_of(drafted) == tokens_of(greedy) == tokens_of(untouched)


@cache
def shared_pipeline(name: str) -> tuple[Pipeline, list[tuple[int, ...]]]:
    """A pipeline whose model every test scopes anew, and its greedy tokens."""
    pipeline = make_pipeline(name, max_draft_len=3, tokens_per_block=4)
    return pipeline, tokens_of(generate(pipeline.model, pipeline.cm, PROMPTS, LIMITS, speculative=False))


@dataclass
class Traffic:
    """Transfers of a generation, and the batch that each was started for."""

    steps: int
    transfers: list[Transfer]
    rows: list[int]
    in_use: list[int]


def decode_by(name: str, strategy: str) -> Traffic:
    """Decode with the wrapper rewritten by a strategy; the tokens must be the greedy ones."""
    pipeline, greedy = shared_pipeline(name)
    scope_module(pipeline.model, pipeline.cm, ScopeOptions(strategy=strategy))
    info = pipeline.cm.info
    buffer = info._input_buffer
    traffic = Traffic(0, [], [], [])

    def observe(transfer: Transfer) -> None:
        views = [buffer.get_view(n.removesuffix("_host"), truncate=True) for n in transfer.names if n != OFFSET]
        traffic.transfers.append(transfer)
        traffic.rows.append(info.num_sequences)
        traffic.in_use.append(sum(view.numel() * view.element_size() for view in views))

    buffer.transfer_observers.append(observe)
    try:
        drafted = generate(pipeline.model, pipeline.cm, PROMPTS, LIMITS)
    finally:
        buffer.transfer_observers.remove(observe)
    assert tokens_of(drafted) == greedy
    traffic.steps = drafted.steps
    return traffic


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_strategy_gives_greedy_tokens_and_copies_no_other_mirror(name, strategy):
    copied = {n for t in decode_by(name, strategy).transfers for n in t.names} - {OFFSET}
    assert copied == (READ_BY_DRAFT[name] if strategy in ("copy", "override") else set())


def test_copy_makes_one_transfer_of_the_bytes_in_use_per_draft_step():
    traffic = decode_by("eagle3_llama_paged", "copy")
    assert len(traffic.transfers) == 2 * traffic.steps
    for transfer, in_use in zip(traffic.transfers, traffic.in_use, strict=True):
        assert in_use <= transfer.nbytes <= in_use + 8 * len(transfer.names)


@pytest.mark.parametrize("strategy", ["auto", "replay"])
def test_replay_copies_one_operand_per_decode_step_and_never_waits_for_the_drafter(strategy):
    traffic = decode_by("eagle3_llama_paged", strategy)
    assert [t.names for t in traffic.transfers] == [(OFFSET,)] * traffic.steps
    assert [t.nbytes for t in traffic.transfers] == [4 * rows for rows in traffic.rows]
    assert not any(t.waited for t in traffic.transfers)
    for graph in orchestrator_graphs(shared_pipeline("eagle3_llama_paged")[0].model).values():
        order = [n.target for n in graph.graph.nodes if n.target in (ops.snapshot_operand, "draft_model")]
        assert order == [ops.snapshot_operand, *["draft_model"] * 3]


def test_the_tokens_are_those_of_transformers_own_generate():
    pipeline = make_pipeline("eagle3_llama_paged", max_draft_len=3, tokens_per_block=4)
    drafted = generate(pipeline.model, pipeline.cm, PROMPTS, LIMITS)
    target = pipeline.factory.build_target()
    reference = AutoModelForCausalLM.from_config(target.config, attn_implementation="eager").eval()
    reference.load_state_dict(target.state_dict())
    for prompt, limit, output in zip(PROMPTS, LIMITS, drafted.outputs, strict=True):
        ids = torch.tensor([prompt])
        answer = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert tuple(answer[0, len(prompt) :].tolist()) == output.tokens


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_prompts_are_accepted_in_full_in_part_and_not_at_all(name):
    config = load_config(name)
    pipeline = make_pipeline(name, config.max_draft_len, config.kv_cache_config.tokens_per_block)
    drafted = generate(pipeline.model, pipeline.cm, shipped_prompts(name), max_new_tokens=24)
    assert min(drafted.accepted) > 0
    assert 1.0 < drafted.acceptance_length < 1.0 + config.max_draft_len


def watch_page_tables(pipeline: Pipeline, max_draft_len: int) -> dict[str, int]:
    """Generate; count rows that crossed a page, got their extra page in the draft loop, or lost a page there."""
    info = pipeline.cm.info
    counts = {"crossed": 0, "extra": 0, "dropped": 0}
    before: list[torch.Tensor] = []

    def note(_module, _args):
        before[:] = [info.get_arg("cu_num_pages").clone(), info.get_arg("extra_page_per_seq").clone()]

    def compare(_module, _args, _output):
        after, pages = info.get_arg("cu_num_pages"), info.get_arg("cache_loc")
        for row in range(info.num_sequences):
            had = int(before[0][row + 1] - before[0][row])
            table = pages[after[row] : after[row + 1]].tolist()
            counts["crossed"] += had > 1
            counts["extra"] += int(before[1][row]) in table
            counts["dropped"] += len(table) < had

    handles = [pipeline.model.register_forward_pre_hook(note), pipeline.model.register_forward_hook(compare)]
    engine = Engine(pipeline.model, pipeline.cm)
    for prompt, limit in zip(PROMPTS, LIMITS, strict=True):
        engine.submit(Request(tuple(prompt), limit))
    while engine.has_work:
        engine.step()
    for handle in handles:
        handle.remove()
    return counts


def test_draft_loops_insert_the_extra_page_and_drop_pages():
    pipeline = make_pipeline("eagle3_llama_paged", max_draft_len=4, tokens_per_block=5)
    counts = watch_page_tables(pipeline, 4)
    assert all(count > 0 for count in counts.values()), counts


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_the_two_best_logits_are_much_further_apart_than_reduction_order_moves_them(name):
    pipeline = make_pipeline(name, max_draft_len=3, tokens_per_block=8)
    model, cm = pipeline.model, pipeline.cm
    steps: list[torch.Tensor] = []
    forward_target = model.forward_target

    def recorded(csi):
        steps.append(forward_target(csi))
        return steps[-1]

    margin, moved = math.inf, 0.0
    for prompt in shipped_prompts(name):
        steps.clear()
        model.forward_target = recorded
        output = generate(model, cm, [prompt], max_new_tokens=24, speculative=False).outputs[0]
        del model.forward_target
        one_by_one = torch.cat(steps)
        cm.info.set_example_sequence([[*prompt, *output.tokens[:-1]]], gather_context_logits=True)
        at_once = model.forward_target(cm)[len(prompt) - 1 :]
        best = one_by_one.topk(2, dim=-1).values
        margin = min(margin, float((best[:, 0] - best[:, 1]).min()))
        moved = max(moved, float((one_by_one - at_once).abs().max()))
    assert margin > 100 * moved
    assert margin > 1e-3
