"""The shipped Llama scenarios end to end: their graphs' arguments, and what their weights were made to do."""

import copy
import pickle
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.export import ExportedGraphModule
from auto_deploy_ext.embedded.generation import generate
from auto_deploy_ext.embedded.models.factory import ModelFactoryRegistry
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.embedded.tokenizer import ByteTokenizer

HORIZON = 64
"""Tokens generated where the laws below are measured; twice the config's."""

TORCH = ["batch_info_host", "cu_seqlen", "input_pos", "seq_len", "slot_idx"]
TORCH_PAGED = [
    "batch_info_host",
    "cache_loc",
    "cu_num_pages_host",
    "cu_seqlen_host",
    "last_page_len_host",
    "seq_len_with_cache_host",
]


@pytest.fixture(scope="module", params=["eagle3_llama", "eagle3_llama_paged"])
def pipeline(request: pytest.FixtureRequest) -> Pipeline:
    # Only the pipeline itself: the plugin's passes have tests of their own.
    off = {f"transforms.{key}.enabled": False for key in plugin_transforms(request.param)}
    return build_pipeline(load_config(request.param, overrides=off))


def plugin_transforms(name: str) -> list[str]:
    return [key for key in ("annotate_active_args", "scope_host_mirrors") if key in load_config(name).transforms]


def shipped_prompts() -> list[list[int]]:
    return [ByteTokenizer().encode(str(prompt)) for prompt in load_config("eagle3_llama").prompts]


def arguments(gm: ExportedGraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.find_nodes(op="placeholder")]


def test_placeholders_are_inputs_metadata_and_caches(pipeline: Pipeline) -> None:
    paged = pipeline.config.attn_backend == "torch_paged"
    metadata = TORCH_PAGED if paged else TORCH
    caches = [f"{name}_{i}" for i in range(4) for name in (["kv_cache"] if paged else ["k_cache", "v_cache"])]
    states = [f"hidden_states_cache_{i}" for i in range(3)]
    model: Any = pipeline.model
    assert arguments(model.target_model)[:2] == ["inputs_embeds", "position_ids"]
    assert sorted(arguments(model.target_model)[2:]) == sorted([*metadata, *caches, *states])
    draft_caches = ["draft_kv_cache_0"] if paged else ["draft_k_cache_0", "draft_v_cache_0"]
    assert arguments(model.draft_model)[:3] == ["inputs_embeds", "position_ids", "hidden_states"]
    assert sorted(arguments(model.draft_model)[3:]) == sorted([*metadata, *draft_caches])
    assert {*metadata, *caches, *states, *draft_caches} <= set(pipeline.cm.named_args)


@pytest.fixture(scope="module")
def drafted(pipeline: Pipeline) -> Any:
    return generate(pipeline.model, pipeline.cm, shipped_prompts(), HORIZON)


@pytest.fixture(scope="module")
def target() -> torch.nn.Module:
    """The eager target, which both scenarios share."""
    config = load_config("eagle3_llama")
    return ModelFactoryRegistry.get(config.model_factory).from_config(config).build_model().target_model


@pytest.fixture(scope="module")
def greedy(target: torch.nn.Module) -> list[list[int]]:
    """Continuations by the eager target without any cache."""
    continuations = []
    for prompt in shipped_prompts():
        tokens = list(prompt)
        for _ in range(HORIZON):
            tokens.append(int(logits(target, tokens)[-1].argmax()))
        continuations.append(tokens[len(prompt) :])
    return continuations


def logits(target: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor([tokens])
    with torch.no_grad():
        return target(target.get_input_embeddings()(ids), torch.arange(len(tokens))[None])[0]


def test_speculative_decoding_gives_the_tokens_of_the_uncached_model(drafted: Any, greedy: list[list[int]]) -> None:
    assert [list(output.tokens) for output in drafted.outputs] == greedy


def test_drafts_are_accepted_fully_partly_and_not_at_all(pipeline: Pipeline) -> None:
    result = generate(pipeline.model, pipeline.cm, shipped_prompts(), pipeline.config.max_new_tokens)
    assert len(result.accepted) == 4 and min(result.accepted) >= 5


def test_without_mirrors_the_paged_drafter_guesses_worse_and_tokens_stay_right(
    pipeline: Pipeline, drafted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("copy_to_host", "copy_names_to_host"):
        monkeypatch.setattr(pipeline.cm.info._input_buffer, name, lambda *args, **kwargs: None)
    blind = generate(pipeline.model, pipeline.cm, shipped_prompts(), HORIZON)
    assert [output.tokens for output in blind.outputs] == [output.tokens for output in drafted.outputs]
    if pipeline.config.draft_attn_backend == "torch_paged":
        assert blind.acceptance_length < drafted.acceptance_length - 0.1
    else:
        assert blind.accepted == drafted.accepted


def test_best_token_leads_by_far_more_than_rounding(target: torch.nn.Module, greedy: list[list[int]]) -> None:
    exact = copy.deepcopy(target).double()
    margin, rounding = float("inf"), 0.0
    for prompt, continuation in zip(shipped_prompts(), greedy, strict=True):
        tokens = prompt + continuation
        predicted = logits(target, tokens)[len(prompt) - 1 : -1]
        best = predicted.topk(2).values
        margin = min(margin, float((best[:, 0] - best[:, 1]).min()))
        rounding = max(rounding, float((predicted - logits(exact, tokens)[len(prompt) - 1 : -1]).abs().max()))
    assert margin >= 1e-3
    assert margin >= 100 * rounding


def test_text_does_not_run_in_circles(greedy: list[list[int]]) -> None:
    for tokens in greedy:
        tail = tokens[HORIZON // 2 :]
        periods = [p for p in range(1, 9) if all(a == b for a, b in zip(tail, tail[p:], strict=False))]
        assert not periods
        assert len(set(tokens)) >= HORIZON // 2


def test_what_follows_a_token_depends_on_the_context(greedy: list[list[int]]) -> None:
    successors: dict[int, set[int]] = {}
    for tokens in greedy:
        for token, following in pairwise(tokens):
            successors.setdefault(token, set()).add(following)
    ambiguous = Counter(len(found) > 1 for found in successors.values())
    assert ambiguous[True] >= 20


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copied_pipeline_generates_the_same(pipeline: Pipeline, drafted: Any, how: str) -> None:
    clone = copy.deepcopy(pipeline.model) if how == "deepcopy" else pickle.loads(pickle.dumps(pipeline.model))
    result = generate(clone, pipeline.cm, shipped_prompts()[:2], 12)
    assert [output.tokens for output in result.outputs] == [output.tokens[:12] for output in drafted.outputs[:2]]


@pytest.mark.parametrize(
    "drafter", [{"draft_vocab_size": 120, "own_embedding": True}, {"own_lm_head": False}], ids=["own parts", "shared"]
)
def test_drafters_of_other_make_change_acceptance_only(greedy: list[list[int]], drafter: dict[str, Any]) -> None:
    overrides = {f"speculative_model_kwargs.{key}": value for key, value in drafter.items()}
    other = build_pipeline(load_config("eagle3_llama", overrides=overrides))
    result = generate(other.model, other.cm, shipped_prompts()[:3], 24)
    assert [list(output.tokens) for output in result.outputs] == [tokens[:24] for tokens in greedy[:3]]
    assert sum(result.accepted[1:]) > 0


def test_a_saved_target_gives_the_same_tokens(target: Any, greedy: list[list[int]], tmp_path: Path) -> None:
    target.save_pretrained(tmp_path)
    loaded = build_pipeline(load_config("eagle3_llama_paged", overrides={"model": str(tmp_path), "seed": 1}))
    result = generate(loaded.model, loaded.cm, shipped_prompts()[:2], 12)
    assert [list(output.tokens) for output in result.outputs] == [tokens[:12] for tokens in greedy[:2]]
