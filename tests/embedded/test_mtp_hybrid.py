"""The shipped hybrid scenario, from its YAML to tokens, against transformers' own forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import BambaForCausalLM

from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.generation import Engine, generate
from auto_deploy_ext.embedded.models.custom.modeling_hybrid import initialise_hybrid
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.embedded.requests import GenerationResult, Request
from auto_deploy_ext.embedded.shim.interface import HybridCacheManager

CONFIG = load_config("mtp_hybrid")
PROMPTS = [list(prompt.encode()) if isinstance(prompt, str) else prompt for prompt in CONFIG.prompts]
DRAFT_LEN = CONFIG.max_draft_len


@pytest.fixture(scope="module")
def built() -> Pipeline:
    return build_pipeline(CONFIG)


@pytest.fixture
def pipeline(built: Pipeline) -> Iterator[Pipeline]:
    """The pipeline with empty caches, and with the config's draft length again afterwards."""
    built.cm.initialize_resources()
    yield built
    set_draft_len(built, DRAFT_LEN)


@pytest.fixture(scope="module")
def decoded(built: Pipeline) -> GenerationResult:
    built.cm.initialize_resources()
    return generate(built.model, built.cm, PROMPTS, CONFIG.max_new_tokens)


@pytest.fixture(scope="module")
def original(built: Pipeline) -> BambaForCausalLM:
    """transformers' model with the same weights and its own attention and mixers."""
    model = BambaForCausalLM(type(built.factory.target_config)(**CONFIG.model_kwargs, attn_implementation="sdpa"))
    initialise_hybrid(model, CONFIG.seed)
    return model.eval()


def set_draft_len(pipeline: Pipeline, draft_len: int) -> None:
    pipeline.model.max_draft_len = draft_len
    pipeline.cm.info.batch_info.update_max_draft_len(draft_len)
    pipeline.cm.initialize_resources()


def placeholders(pipeline: Pipeline, submodule: str) -> set[str]:
    graph = getattr(pipeline.model, submodule).graph
    return {str(node.target) for node in graph.find_nodes(op="placeholder")}


def tokens(result: GenerationResult) -> list[tuple[int, ...]]:
    return [output.tokens for output in result.outputs]


def decode_step_by_step(pipeline: Pipeline, speculative: bool, disturb: Callable[[int], None]) -> GenerationResult:
    """Decode with something done to the caches after each step."""
    engine = Engine(pipeline.model, pipeline.cm, speculative)
    for prompt in PROMPTS:
        engine.submit(Request(tuple(prompt), CONFIG.max_new_tokens))
    while engine.has_work:
        engine.step()
        disturb(engine.steps)
    return engine.result()


def zero(pipeline: Pipeline, prefix: str) -> None:
    names = [name for name in pipeline.cm.named_args if name.startswith(prefix)]
    assert names
    for name in names:
        pipeline.cm.get_arg(name).zero_()


def test_target_plans_on_the_host_and_draft_does_not(built: Pipeline) -> None:
    target, draft = placeholders(built, "target_model"), placeholders(built, "draft_model")
    assert {name for name in target if name.endswith("_host")} == {
        "batch_info_host",
        "cu_seqlen_host",
        "cu_num_pages_host",
        "last_page_len_host",
        "seq_len_with_cache_host",
        "any_prefill_use_initial_states_host",
    }
    assert {name for name in draft if name.endswith("_host")} == {"batch_info_host"}


def test_every_source_op_became_a_cached_op_with_its_own_states(built: Pipeline) -> None:
    called = [str(node.target) for node in built.model.target_model.graph.nodes if node.op == "call_function"]
    counts = {
        name: sum(f"auto_deploy_ext.{name}." in target for target in called)
        for name in (
            "torch_ssm",
            "torch_causal_conv1d",
            "torch_attention",
            "torch_cached_ssm",
            "torch_cached_causal_conv1d",
        )
    }
    assert counts == {
        "torch_ssm": 0,
        "torch_causal_conv1d": 0,
        "torch_attention": 0,
        "torch_cached_ssm": 2,
        "torch_cached_causal_conv1d": 2,
    }
    slots = built.cm.info.max_num_state_slots
    for index in range(2):
        assert built.cm.get_arg(f"ssm_state_cache_{index}").shape == (slots, 8, 16, 16)
        assert built.cm.get_arg(f"intermediate_ssm_state_cache_{index}").shape == (slots, 1 + DRAFT_LEN, 8, 16, 16)
        assert built.cm.get_arg(f"conv_state_cache_{index}").shape == (slots, 192, 3)
        assert built.cm.get_arg(f"intermediate_conv_state_cache_{index}").shape == (slots, 1 + DRAFT_LEN, 192, 3)
    assert isinstance(built.cm.kv_cache_manager, HybridCacheManager)
    assert len(built.cm.kv_cache_manager.state_pairs()) == 4


@torch.no_grad()
def test_speculative_tokens_are_those_of_transformers(decoded: GenerationResult, original: BambaForCausalLM) -> None:
    for prompt, output in zip(PROMPTS, tokens(decoded), strict=True):
        logits = original(input_ids=torch.tensor([[*prompt, *output]]), use_cache=False).logits[0]
        assert tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist()) == output


@torch.no_grad()
def test_the_two_best_logits_are_far_apart(decoded: GenerationResult, original: BambaForCausalLM) -> None:
    margins = []
    for prompt, output in zip(PROMPTS, tokens(decoded), strict=True):
        logits = original(input_ids=torch.tensor([[*prompt, *output]]), use_cache=False).logits[0]
        best = logits[len(prompt) - 1 : -1].topk(2).values
        margins.append((best[:, 0] - best[:, 1]).min().item())
    assert min(margins) >= 1e-3


@torch.no_grad()
def test_prefill_logits_equal_those_of_transformers(pipeline: Pipeline, original: BambaForCausalLM) -> None:
    info = pipeline.cm.info
    lengths = [len(prompt) for prompt in PROMPTS]
    nest_prefill(pipeline, PROMPTS, [0] * len(PROMPTS))
    logits = pipeline.model.forward_target(pipeline.cm)
    expected = torch.stack(
        [original(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1] for prompt in PROMPTS]
    )
    assert info.total_num_tokens == sum(lengths)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_full_partial_and_no_acceptance_occur(decoded: GenerationResult) -> None:
    none, *partial, full = decoded.accepted
    assert none > 0
    assert all(count > 0 for count in partial)
    assert full > 0
    assert decoded.acceptance_length > 2.0


@pytest.mark.parametrize("draft_len", [1, 2, 5, 6])
def test_tokens_do_not_depend_on_the_draft_length(
    pipeline: Pipeline, decoded: GenerationResult, draft_len: int
) -> None:
    set_draft_len(pipeline, draft_len)
    result = generate(pipeline.model, pipeline.cm, PROMPTS, CONFIG.max_new_tokens)
    assert tokens(result) == tokens(decoded)
    assert len(result.accepted) == draft_len + 1


def test_tokens_do_not_depend_on_who_shares_the_batch(pipeline: Pipeline, decoded: GenerationResult) -> None:
    limits = [9, 40, 3, 25]
    prompts = [*PROMPTS, *reversed(PROMPTS)]
    result = generate(pipeline.model, pipeline.cm, prompts, [*limits, *reversed(limits)])
    assert result.batches["mixed"] > 0
    expected = [output[:limit] for output, limit in zip(tokens(decoded), limits, strict=True)]
    assert tokens(result) == [*expected, *reversed(expected)]


@pytest.mark.parametrize("resource", ["kv_cache_", "ssm_state_cache_", "conv_state_cache_"])
def test_tokens_depend_on_every_kind_of_cache(pipeline: Pipeline, decoded: GenerationResult, resource: str) -> None:
    def disturb(step: int) -> None:
        if step == 2:
            zero(pipeline, resource)

    assert tokens(decode_step_by_step(pipeline, False, disturb)) != tokens(decoded)


def test_drafts_depend_on_the_drafters_cache_and_tokens_do_not(pipeline: Pipeline, decoded: GenerationResult) -> None:
    result = decode_step_by_step(pipeline, True, lambda step: zero(pipeline, "draft_"))
    assert tokens(result) == tokens(decoded)
    assert result.accepted != decoded.accepted


def test_without_promotion_tokens_go_wrong(pipeline: Pipeline, decoded: GenerationResult) -> None:
    """The state that an extend row starts from is the promoted one, so it matters which token's it is."""
    manager = pipeline.cm.kv_cache_manager
    assert isinstance(manager, HybridCacheManager)
    saved: dict[str, torch.Tensor] = {}

    def disturb(step: int) -> None:
        if step == 3:
            for name in [name for name in pipeline.cm.named_args if name.startswith("ssm_state_cache_")]:
                pipeline.cm.get_arg(name).copy_(saved[name])
        saved.update({n: t.clone() for n, t in pipeline.cm.named_args.items() if n.startswith("ssm_state_cache_")})

    assert tokens(decode_step_by_step(pipeline, True, disturb)) != tokens(decoded)


def nest_prefill(pipeline: Pipeline, pieces: list[list[int]], input_pos: list[int]) -> None:
    """Put prefill rows into the interface, the i-th one in slot i on pages of its own."""
    info = pipeline.cm.info
    per_sequence = info.num_blocks // len(pieces)
    cu_seqlen, cu_num_pages, cache_loc = [0], [0], []
    for i, (piece, pos) in enumerate(zip(pieces, input_pos, strict=True)):
        num_pages = -(-(pos + len(piece)) // info.tokens_per_block)
        cache_loc += range(i * per_sequence, i * per_sequence + num_pages)
        cu_num_pages.append(len(cache_loc))
        cu_seqlen.append(cu_seqlen[-1] + len(piece))
    info.nest_sequences(
        [token for piece in pieces for token in piece],
        cu_seqlen=cu_seqlen,
        input_pos=input_pos,
        batch_info=[len(pieces), cu_seqlen[-1], 0, 0, 0, 0],
        slot_idx=list(range(len(pieces))),
        cache_loc_per_pool=[cache_loc],
        cu_num_pages_per_pool=[cu_num_pages],
        extra_page_per_seq_per_pool=[[-1] * len(pieces)],
    )


@torch.no_grad()
def prefill_in_two_pieces(pipeline: Pipeline, flag: bool | None) -> torch.Tensor:
    """Logits after the second piece; `flag` replaces the mirror that says whether it has a history."""
    cuts = [len(prompt) // 2 for prompt in PROMPTS]
    nest_prefill(pipeline, [prompt[:cut] for prompt, cut in zip(PROMPTS, cuts, strict=True)], [0] * len(PROMPTS))
    pipeline.model.forward_target(pipeline.cm)
    nest_prefill(pipeline, [prompt[cut:] for prompt, cut in zip(PROMPTS, cuts, strict=True)], cuts)
    mirror = pipeline.cm.get_arg("any_prefill_use_initial_states_host")
    assert mirror.tolist() == [True]
    if flag is not None:
        mirror.fill_(flag)
    return pipeline.model.forward_target(pipeline.cm)


@torch.no_grad()
def test_chunked_prefill_equals_prefill_at_once(pipeline: Pipeline) -> None:
    chunked = prefill_in_two_pieces(pipeline, flag=None)
    nest_prefill(pipeline, PROMPTS, [0] * len(PROMPTS))
    at_once = pipeline.model.forward_target(pipeline.cm)
    torch.testing.assert_close(chunked, at_once, rtol=1e-4, atol=1e-4)


def test_a_stale_mirror_of_the_history_flag_gives_other_logits(pipeline: Pipeline) -> None:
    fresh = prefill_in_two_pieces(pipeline, flag=None)
    stale = prefill_in_two_pieces(pipeline, flag=False)
    assert (fresh - stale).abs().amax(-1).min() > 0.1
