"""A Llama with cached attention against transformers' own forward, for every kind of batch and both backends."""

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from auto_deploy_ext.embedded.config import EmbeddedConfig
from auto_deploy_ext.embedded.export import ExportedGraphModule
from auto_deploy_ext.embedded.models.factory import ModelFactoryRegistry
from auto_deploy_ext.embedded.shim.interface import CachedSequenceInterface
from auto_deploy_ext.embedded.transform.library import insert_cached_attention as _registers  # noqa: F401
from auto_deploy_ext.embedded.transform.optimizer import InferenceOptimizer

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MAX_SEQ_LEN, TOKENS_PER_BLOCK = 40, 4
FULL_MODEL, PER_GRAPH = {"run_per_gm": False}, {}


def pipeline(backend: str) -> dict[str, dict[str, object]]:
    return {
        "build_model": {"stage": "factory", **FULL_MODEL},
        "export_to_gm": {"stage": "export", **FULL_MODEL},
        "load_weights": {"stage": "weight_load", **FULL_MODEL},
        "insert_cached_attention": {"stage": "cache_init", "backend": backend, **PER_GRAPH},
        "initialize_cache": {"stage": "cache_init", **FULL_MODEL},
        "resize_kv_cache": {"stage": "cache_init", **FULL_MODEL},
    }


class Replay:
    """Feeds pieces of known sequences through a cached model and gives the logits of their tokens."""

    def __init__(self, model: ExportedGraphModule, cm: CachedSequenceInterface, tokens: torch.Tensor) -> None:
        self.model, self.cm, self.tokens = model, cm, tokens
        self.pages_per_row = MAX_SEQ_LEN // TOKENS_PER_BLOCK
        # Neither slots nor pages are in the order of the sequences.
        order = torch.randperm(len(tokens) * self.pages_per_row, generator=torch.Generator().manual_seed(5))
        self.pages = order.view(len(tokens), -1).tolist()
        self.slots = [(3 * row + 1) % 4 for row in range(len(tokens))]
        self.cached = [0] * len(tokens)

    def run(self, kinds: dict[str, list[tuple[int, int]]]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Run a batch of (sequence, number of tokens) rows by kind; give (sequence, first position, logits) per row."""
        rows = [row for kind in ("prefill", "extend", "decode") for row in kinds.get(kind, [])]
        counts = [
            number
            for kind in ("prefill", "extend", "decode")
            for number in (len(kinds.get(kind, [])), sum(length for _, length in kinds.get(kind, [])))
        ]
        ids, cu_seqlen, cache_loc, cu_num_pages = [], [0], [], [0]
        for sequence, length in rows:
            start = self.cached[sequence]
            ids += self.tokens[sequence, start : start + length].tolist()
            cu_seqlen.append(len(ids))
            cache_loc += self.pages[sequence][: -(-(start + length) // TOKENS_PER_BLOCK)]
            cu_num_pages.append(len(cache_loc))
        self.cm.info.nest_sequences(
            ids,
            cu_seqlen=cu_seqlen,
            input_pos=[self.cached[sequence] for sequence, _ in rows],
            batch_info=counts,
            slot_idx=[self.slots[sequence] for sequence, _ in rows],
            cache_loc_per_pool=[cache_loc],
            cu_num_pages_per_pool=[cu_num_pages],
        )
        names = {node.target for node in self.model.graph.find_nodes(op="placeholder")}
        arguments = {name: value for name, value in self.cm.named_args.items() if name in names}
        embeds = self.model.get_input_embeddings()(self.cm.get_arg("input_ids"))
        with torch.no_grad():
            logits = self.model(inputs_embeds=embeds, **arguments).flatten(0, 1)
        for (sequence, length), end in zip(rows, cu_seqlen[1:], strict=True):
            yield sequence, self.cached[sequence], logits[end - length : end]
            self.cached[sequence] += length


@pytest.fixture(scope="module", params=["torch", "torch_paged"])
def cached_model(request: pytest.FixtureRequest) -> tuple[ExportedGraphModule, CachedSequenceInterface]:
    config = EmbeddedConfig(model_kwargs={"model_type": "llama", **SIZES}, seed=2)
    factory = ModelFactoryRegistry.get(config.model_factory).from_config(config)
    cm = CachedSequenceInterface(
        max_seq_len=MAX_SEQ_LEN,
        max_batch_size=4,
        max_num_tokens=64,
        device="cpu",
        kv_cache_config=config.kv_cache_config.model_copy(update={"tokens_per_block": TOKENS_PER_BLOCK}),
    )
    model = InferenceOptimizer(factory, pipeline(request.param))(cm)
    assert isinstance(model, ExportedGraphModule)
    return model, cm


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (4, 30), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def expected(cached_model: tuple[ExportedGraphModule, CachedSequenceInterface], tokens: torch.Tensor) -> torch.Tensor:
    """transformers' logits of the whole sequences with its own attention."""
    reference = LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation="sdpa").eval()
    reference.load_state_dict(cached_model[0].state_dict())
    with torch.no_grad():
        return reference(tokens, use_cache=False).logits


PROGRAMS = {
    "one prefill": [{"prefill": [(0, 30)]}],
    "several prefills": [{"prefill": [(2, 7), (0, 1), (1, 12)]}],
    "chunked prefill": [{"prefill": [(0, 5), (1, 3)]}, {"prefill": [(1, 8), (0, 4)]}, {"prefill": [(0, 2)]}],
    "decode across a page": [{"prefill": [(0, 6), (3, 3)]}] + [{"decode": [(0, 1), (3, 1)]}] * 4,
    "extend by one and three drafts": [{"prefill": [(1, 5), (2, 9)]}] + [{"extend": [(2, 4), (1, 4)]}] * 3,
    "all kinds at once": [
        {"prefill": [(0, 5), (1, 4), (2, 7)]},
        {"prefill": [(3, 6)], "extend": [(1, 4), (0, 4)], "decode": [(2, 1)]},
        {"prefill": [(0, 3), (3, 2)], "decode": [(1, 1), (2, 1)]},
        {"extend": [(2, 2), (3, 2), (0, 2), (1, 2)]},
    ],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_cached_logits_are_those_of_transformers(
    cached_model: tuple[ExportedGraphModule, CachedSequenceInterface],
    tokens: torch.Tensor,
    expected: torch.Tensor,
    program: str,
) -> None:
    replay = Replay(*cached_model, tokens)
    for batch in PROGRAMS[program]:
        for sequence, start, logits in replay.run(batch):
            torch.testing.assert_close(logits, expected[sequence, start : start + len(logits)], atol=2e-5, rtol=1e-5)


def test_rejected_tokens_are_overwritten(
    cached_model: tuple[ExportedGraphModule, CachedSequenceInterface], tokens: torch.Tensor, expected: torch.Tensor
) -> None:
    wrong = tokens.clone()
    wrong[0, 7:10] = (wrong[0, 7:10] + 1) % SIZES["vocab_size"]
    replay = Replay(*cached_model, wrong)
    list(replay.run({"prefill": [(0, 6)]}))
    list(replay.run({"extend": [(0, 4)]}))
    replay.tokens, replay.cached[0] = tokens, 7
    for _, start, logits in replay.run({"extend": [(0, 4)]}):
        torch.testing.assert_close(logits, expected[0, start : start + 4], atol=2e-5, rtol=1e-5)


def test_logits_depend_on_what_is_cached(
    cached_model: tuple[ExportedGraphModule, CachedSequenceInterface], tokens: torch.Tensor, expected: torch.Tensor
) -> None:
    replay = Replay(*cached_model, tokens)
    list(replay.run({"prefill": [(0, 6)]}))
    for name, value in cached_model[1].named_args.items():
        if "cache_" in name and value.is_floating_point():
            value.mul_(-1.0)
    ((_, _, logits),) = replay.run({"decode": [(0, 1)]})
    assert (logits - expected[0, 6]).abs().max() > 0.1


def test_eager_model_of_the_factory_is_transformers_own(tokens: torch.Tensor, expected: torch.Tensor) -> None:
    config = EmbeddedConfig(model_kwargs={"model_type": "llama", **SIZES}, seed=2)
    target = ModelFactoryRegistry.get(config.model_factory).from_config(config).build_model()
    positions = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
    with torch.no_grad():
        logits = target(inputs_embeds=target.get_input_embeddings()(tokens), position_ids=positions)
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)
