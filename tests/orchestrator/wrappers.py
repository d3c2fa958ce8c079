"""Small orchestrators over real interfaces, with consumers whose result depends on every argument they take."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn
from transformers.utils import ModelOutput

from auto_deploy_ext import CachedSequenceInterface
from auto_deploy_ext.embedded.shim.interface import HybridCacheManager, KvCacheConfig
from auto_deploy_ext.orchestrator.example_batches import set_batch

TARGET_ARGS = ("input_ids", "position_ids", "cu_seqlen_host", "seq_len_with_cache_host", "cu_num_pages_host")
DRAFT_ARGS = ("input_ids", "input_pos", "cu_seqlen_host", "last_page_len_host")


def consumer(*names: str) -> fx.GraphModule:
    """A GraphModule of these arguments: two tensors [tokens, 1], each a sum over everything it was given."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in names]
    tokens = graph.call_method("to", (graph.call_method("reshape", (inputs[0], -1, 1)), torch.float64))
    for weight, node in enumerate(inputs[1:], 2):
        total = graph.call_method("sum", (graph.call_method("to", (node, torch.float64)),))
        tokens = graph.call_function(torch.add, (tokens, total), {"alpha": weight})
    graph.output((tokens, graph.call_function(torch.mul, (tokens, 2))))
    return fx.GraphModule(nn.Module(), graph)


def interface(max_draft_len: int = 3, tokens_per_block: int = 4, max_batch_size: int = 4) -> CachedSequenceInterface:
    """A real interface in which the arguments of all consumers are active."""
    cm = CachedSequenceInterface(
        max_seq_len=64,
        max_batch_size=max_batch_size,
        max_num_tokens=64,
        device="cpu",
        kv_cache_config=KvCacheConfig(tokens_per_block=tokens_per_block),
        spec_config=SimpleNamespace(max_draft_len=max_draft_len),
    )
    cm.info.update_cache_information(64)
    for name in (*TARGET_ARGS, *DRAFT_ARGS, "cache_loc", "cu_num_pages", "last_page_len"):
        cm.info.activate_arg(name)
    return cm


def nest(cm: CachedSequenceInterface, prefill: list[int], extend: int, draft_len: int, cached: int = 9) -> None:
    """Put a batch of these prompt lengths and that many extend rows into the interface, with random tokens."""
    lengths = [*prefill, *[1 + draft_len] * extend]
    cu_seqlen = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    past = [*[0] * len(prefill), *[cached + i for i in range(extend)]]
    block = cm.info.tokens_per_block
    pages = [-(-(n + p) // block) for n, p in zip(lengths, past, strict=True)]
    cu_pages = [0, *torch.tensor(pages).cumsum(0).tolist()]
    cm.info.nest_sequences(
        torch.randint(0, 50, (cu_seqlen[-1],)).tolist(),
        cu_seqlen,
        past,
        batch_info=[len(prefill), sum(prefill), extend, extend * (1 + draft_len), 0, 0],
        slot_idx=list(range(len(lengths))),
        cache_loc_per_pool=[list(range(cu_pages[-1]))],
        cu_num_pages_per_pool=[cu_pages],
        extra_page_per_seq_per_pool=[[40 + i for i in range(len(lengths))]],
    )


@dataclass
class Output(ModelOutput):
    """A result that is a dataclass and a dict at once, as transformers' are."""

    tokens: Any = None
    lengths: Any = None


class DraftLoop(nn.Module):
    """Target, verification by in-place writes, and a draft loop, as one writes them without a tracer in mind."""

    def __init__(self, max_draft_len: int = 3) -> None:
        super().__init__()
        self.max_draft_len = max_draft_len
        self.target_model = consumer(*TARGET_ARGS)
        self.draft_model = consumer(*DRAFT_ARGS)
        self.register_buffer("d2t", torch.arange(1000, dtype=torch.int32) % 7)

    def args_of(self, csi: Any, module: fx.GraphModule) -> dict[str, torch.Tensor]:
        names = {node.target for node in module.graph.nodes if node.op == "placeholder"}
        return {name: value for name, value in csi.named_args.items() if name in names}

    def sample(self, scores: torch.Tensor, count: Any) -> torch.Tensor:
        return (scores.flatten()[:count] % 1000).to(torch.int32)

    def forward(self, csi: CachedSequenceInterface | None = None, **kwargs: Any) -> Output:
        assert csi is not None
        info = csi.info
        k = self.max_draft_len
        num_prefill, num_extend, num_decode = info.batch_info.get_num_sequences()
        _, num_extend_tokens, _ = info.batch_info.get_num_tokens()
        assert num_decode == 0
        if num_extend > 0:
            assert num_extend_tokens // num_extend == 1 + k
        n = num_prefill + num_extend
        scores, _ = self.target_model(**self.args_of(csi, self.target_model))
        if isinstance(csi.kv_cache_manager, HybridCacheManager):
            raise NotImplementedError
        lengths = torch.ones(n, dtype=torch.int32, device=scores.device)
        if num_prefill > 0:
            lengths[:num_prefill] += 0
        lengths[num_prefill:] += self.sample(scores, num_extend) % k
        c_offset = lengths - k
        c_offset[:num_prefill].fill_(1)
        drafts = torch.zeros(n, k, dtype=torch.int32)
        for i in range(k):
            scores, _ = self.draft_model(**self.args_of(csi, self.draft_model))
            tokens = self.sample(scores, n)
            tokens = tokens + self.d2t[tokens.long()]
            drafts[:, i] = tokens
            if i == 1:
                c_offset.fill_(1)
            if i < k - 1:
                info.switch_to_generate_()
                info.copy_("input_ids", tokens)
                info.offset_pos_and_cache_(c_offset)
        return Output(tokens=drafts, lengths=lengths)


def example(kind: str, draft_len: int = 3, **kwargs: Any) -> CachedSequenceInterface:
    """An interface that holds an example batch of that kind."""
    cm = interface(draft_len, **kwargs)
    set_batch(cm, kind, draft_len)
    return cm
