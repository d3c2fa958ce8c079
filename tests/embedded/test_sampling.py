"""Rejection sampling: whatever the drafter draws from, tokens follow the target's distribution."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

from auto_deploy_ext import orchestrator_graphs, plan, record_mirrors
from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.generation import generate
from auto_deploy_ext.embedded.models.custom.rejection_sampling import (
    draw,
    in_target_vocabulary,
    probabilities,
    verify,
)
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.orchestrator.dispatch import original_forward

VOCAB = 5
PROMPT = [1, 4, 2]


def assert_distributed(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Chi-square at one in a million (Wilson-Hilferty); cells that expect fewer than 5 are joined."""
    counts, expected = counts.double().flatten(), expected.double().flatten() * counts.sum()
    small = expected < 5
    joined = torch.stack([counts[small].sum(), expected[small].sum()])[:, None]
    observed, hoped = torch.cat([torch.stack([counts[~small], expected[~small]]), joined], dim=1)
    observed, hoped = observed[hoped > 0], hoped[hoped > 0]
    assert counts[expected == 0].sum() == 0
    chi2, freedom = float(((observed - hoped) ** 2 / hoped).sum()), len(hoped) - 1
    z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 4.75, f"chi-square {chi2:.1f} with {freedom} degrees of freedom"


def tally(tokens: torch.Tensor, size: int) -> torch.Tensor:
    return torch.bincount(tokens.long().flatten(), minlength=size)


def test_a_draw_follows_its_weights_and_never_takes_what_has_none():
    torch.manual_seed(0)
    weights = torch.tensor([0.0, 3.0, 1.0, 0.5, 0.0])
    assert_distributed(tally(draw(weights.expand(60_000, 5)), 5), weights / weights.sum())


@pytest.mark.parametrize("d2t", [None, torch.tensor([1, 1, 3])], ids=["whole vocabulary", "d2t"])
def test_every_position_follows_the_target_whatever_the_drafter_says(d2t):
    torch.manual_seed(1)
    rows, vocab, drafts = 40_000, 7, 3
    known = vocab if d2t is None else len(d2t)
    target = probabilities(torch.randn(drafts + 1, vocab), 1.0).expand(rows, -1, -1)
    narrow = probabilities(torch.randn(drafts, known), 0.7).expand(rows, -1, -1)
    drafted = draw(narrow)
    drafted = drafted if d2t is None else drafted + d2t[drafted.long()].int()
    draft = in_target_vocabulary(narrow, d2t, vocab)
    assert torch.allclose(draft.sum(-1), torch.ones(rows, drafts))
    tokens = verify(target, draft, drafted)
    for position in range(drafts + 1):
        assert_distributed(tally(tokens[:, position], vocab), target[0, position])
    accepted = (tokens[:, :drafts] == drafted).float().mean(dim=0)
    hoped = torch.minimum(target[0, :drafts], draft[0]).sum(dim=-1)
    assert torch.allclose(accepted, hoped, atol=0.02), "accepted as often as the distributions overlap"
    assert hoped.min() > 0.1 and hoped.max() < 0.95


def test_equal_distributions_accept_every_draft():
    torch.manual_seed(2)
    probs = probabilities(torch.randn(500, 2, 9), 1.0)
    drafted = draw(probs)
    assert torch.equal(verify(torch.cat([probs, probs[:, :1]], dim=1), probs, drafted)[:, :2], drafted)


def test_a_draft_is_kept_where_rounding_leaves_nothing_to_replace_it_with():
    """Rounding may leave q above p at the draft and equal to it elsewhere; here far more than rounding would."""
    torch.manual_seed(6)
    target, draft = torch.tensor([0.0, 0.25, 0.5]).expand(200, 1, -1), torch.tensor([0.0, 0.25, 1.0]).expand(200, 1, -1)
    drafted = torch.full((200, 1), 2)
    tokens = verify(torch.cat([target, target], dim=1), draft, drafted)
    assert torch.equal(tokens[:, 0], drafted[:, 0].int())


# ---------------------------------------------------------------- the wrapper

SIZES = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def sampling(**overrides) -> Pipeline:
    values = {
        "model_kwargs": SIZES,
        "speculative_config.max_draft_len": 2,
        "speculative_config.eagle3_layers_to_capture": [0],
        "speculative_model_kwargs": {"num_captured_layers": 1, "draft_vocab_size": 3},
        "temperature": 1.5,
        "max_batch_size": 128,
        "max_num_tokens": 512,
        "max_seq_len": 16,
        "kv_cache_config.tokens_per_block": 4,
    }
    return build_pipeline(load_config("eagle3_llama_paged", overrides=values | overrides))


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return sampling()


@pytest.fixture(scope="module")
def greedy() -> Pipeline:
    return sampling(temperature=0.0)


def exact(pipeline: Pipeline, length: int) -> torch.Tensor:
    """Probability of every continuation of `PROMPT`, from the target without caches: `[VOCAB] * length`."""
    model = pipeline.factory.build_target()
    result = torch.ones([VOCAB] * length, dtype=torch.float64)
    for tokens in itertools.product(range(VOCAB), repeat=length):
        ids = torch.tensor([[*PROMPT, *tokens]])
        embeds = model.get_input_embeddings()(ids)
        with torch.no_grad():
            logits = model(inputs_embeds=embeds, position_ids=torch.arange(ids.shape[1])[None])
        probs = probabilities(logits[0, len(PROMPT) - 1 : -1], pipeline.config.temperature)
        result[tokens] = probs.gather(1, torch.tensor(tokens)[:, None]).double().prod()
    return result


@pytest.mark.parametrize(
    ("speculative", "length", "samples"), [(True, 4, 896), (False, 2, 384)], ids=["speculative", "target alone"]
)
def test_continuations_are_distributed_as_the_target_says(pipeline, speculative, length, samples):
    torch.manual_seed(3)
    result = generate(pipeline.model, pipeline.cm, [PROMPT] * samples, length, speculative=speculative)
    expected = exact(pipeline, length)
    counts = torch.zeros_like(expected)
    for tokens, count in Counter(output.tokens for output in result.outputs).items():
        counts[tokens] += count
    assert_distributed(counts, expected)
    for position in range(length):
        others = [dim for dim in range(length) if dim != position]
        assert_distributed(counts.sum(others), expected.sum(others))
    if speculative:
        assert min(result.accepted) > samples / 20, "each number of accepted drafts occurs often"


def test_passes_rewrite_a_sampling_wrapper_as_a_greedy_one_and_a_seed_means_the_same_tokens(pipeline, greedy):
    assert orchestrator_graphs(pipeline.model)
    outputs = []
    for run in range(3):
        torch.manual_seed(4)
        with record_mirrors(pipeline.cm.info) as transfers:
            if run == 2:
                with original_forward(pipeline.model):
                    result = generate(pipeline.model, pipeline.cm, [PROMPT] * 4, 6)
            else:
                result = generate(pipeline.model, pipeline.cm, [PROMPT] * 4, 6)
        outputs.append(([output.tokens for output in result.outputs], sum(t.nbytes for t in transfers)))
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == outputs[2][0]
    assert outputs[0][1] < outputs[2][1]
    sites = [
        [(site.call, site.mirrored_before, site.mirrored_after) for site in plan(made.model, made.cm).call_sites]
        for made in (pipeline, greedy)
    ]
    assert sites[0] == sites[1]


def test_greedy_decoding_keeps_no_distributions(pipeline, greedy):
    assert "draft_distributions" in pipeline.cm.named_args
    assert "draft_distributions" not in greedy.cm.named_args
