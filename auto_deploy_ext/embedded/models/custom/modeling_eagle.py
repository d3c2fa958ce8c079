"""The Eagle one-model wrapper: a target and a drafter that verify and draft within one forward.

One file serves Eagle3 and MTP drafters. What it asks of its two submodules:

* ``target_model(inputs_embeds, position_ids, <metadata>, <caches>) -> logits``; it leaves the hidden states that
  the drafter starts from in resources ``hidden_states_cache_<i>``, which are among its placeholders;
* ``draft_model(inputs_embeds, position_ids, hidden_states, <metadata>, <caches>) -> (norm_hidden_state,
  last_hidden_state)``;
* both have ``get_input_embeddings()`` and ``get_output_embeddings()``; the drafter's may give ``None``, and then
  the target's are used;
* the drafter may have ``fc`` (a module that fuses the concatenated captured states to the drafter's width) and
  ``d2t`` (an int tensor ``[draft vocabulary]``, to be added to a draft token to get the target's). They work between
  the two graphs, so export keeps them beside the drafter's.

Shapes below: ``n`` sequences (prefill rows first, then extend rows), ``K = max_draft_len``, ``T`` tokens in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from ....active_args import wrapped_graph
from ...shim.interface import CachedSequenceInterface, HybridCacheManager
from .rejection_sampling import draw, in_target_vocabulary, probabilities, verify

HIDDEN_STATES_PREFIX = "hidden_states_cache_"

DRAFT_DISTRIBUTIONS = "draft_distributions"
"""The resource ``[slots, K, draft vocab]``: what each draft was drawn from. It is there at a temperature above 0."""


@dataclass
class EagleWrapperConfig:
    """What the wrapper itself has to know.

    Attributes:
        max_draft_len: number of tokens drafted per step, at least 1.
        temperature: of sampling; 0 decodes greedily.
    """

    max_draft_len: int
    temperature: float = 0.0

    def __post_init__(self) -> None:
        """Reject a draft length that drafts nothing and a negative temperature."""
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative, got {self.temperature}")
        if self.max_draft_len < 1:
            raise ValueError(f"max_draft_len must be at least 1, got {self.max_draft_len}")


@dataclass
class EagleWrapperOutput(ModelOutput):
    """What one inference step yields; all int32 on the model's device.

    Attributes:
        new_tokens: ``[n, K+1]`` the target's token after each position; a prefill row has one, then zeros.
        new_tokens_lens: ``[n]`` how many of them count: accepted drafts + 1.
        next_draft_tokens: ``[n, K]`` drafts to be verified by the next step.
        next_new_tokens: ``[n, K+1]`` the next step's extend rows: last new token, then the drafts.
    """

    new_tokens: torch.Tensor | None = None
    new_tokens_lens: torch.Tensor | None = None
    next_draft_tokens: torch.Tensor | None = None
    next_new_tokens: torch.Tensor | None = None


@dataclass
class EaglePrefillOutput(ModelOutput):
    """What the path without an interface yields.

    Attributes:
        logits: ``[batch, sequence, vocab]`` of the target.
        draft_logits: ``[batch, sequence, draft vocab]`` of the drafter's first iteration.
    """

    logits: torch.Tensor | None = None
    draft_logits: torch.Tensor | None = None


def placeholder_names(module: nn.Module) -> tuple[str, ...]:
    """The argument names of a GraphModule, or of one that a captured module stands for, in their order.

    A placeholder's name is its target.
    """
    graph_module = wrapped_graph(module)
    assert graph_module is not None, "the inference path needs exported submodules: run export_to_gm"
    return tuple(str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder")


class EagleWrapper(nn.Module):
    """Target and drafter as one model.

    Args:
        config: the draft length.
        target_model: see the module docstring; eager at first, a GraphModule once it is exported.
        draft_model: likewise.
    """

    target_model: Any
    draft_model: Any

    def __init__(self, config: EagleWrapperConfig, target_model: nn.Module, draft_model: nn.Module) -> None:
        """Hold both models."""
        super().__init__()
        self.config = config
        self.max_draft_len = config.max_draft_len
        self.temperature = config.temperature
        self.target_model = target_model
        self.draft_model = draft_model

    def forward(
        self, cache_seq_interface: CachedSequenceInterface | None = None, **kwargs: Any
    ) -> EagleWrapperOutput | EaglePrefillOutput:
        """Run one step on the batch that the interface holds, or the prefill-only path without an interface.

        Args:
            cache_seq_interface: interface after ``nest_sequences``, with prefill and extend rows only.
            **kwargs: without an interface, the arguments of ``forward_prefill``.
        """
        if cache_seq_interface is None:
            return self.forward_prefill(**kwargs)
        return self.forward_inference(cache_seq_interface)

    # ---------------------------------------------------------------- pieces shared by all paths

    def embed_draft(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embed with the drafter's own table, or else the target's. ``[...]`` ints to ``[..., hidden]``."""
        embedding = self.draft_model.get_input_embeddings()
        if embedding is None:
            embedding = self.target_model.get_input_embeddings()
        return embedding(input_ids)

    def draft_logits(self, norm_hidden_state: torch.Tensor) -> torch.Tensor:
        """Apply the drafter's own head, or else the target's. ``[..., hidden]`` to ``[..., draft vocab]``."""
        head = self.draft_model.get_output_embeddings()
        if head is None:
            head = self.target_model.get_output_embeddings()
        return head(norm_hidden_state)

    def fuse_hidden_states(self, captured: list[torch.Tensor]) -> torch.Tensor:
        """Make the drafter's input from the captured states, each ``[..., hidden]``."""
        hidden_states = torch.cat(captured, dim=-1)
        fc = getattr(self.draft_model, "fc", None)
        return hidden_states if fc is None else fc(hidden_states)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Greedy: ``[m, vocab]`` to int32 ``[m]``."""
        return torch.argmax(logits, dim=-1).to(torch.int32)

    def sample_target(self, logits: torch.Tensor) -> torch.Tensor:
        """What the target says: ``[m, vocab]`` logits of `forward_target` to int32 ``[m]``."""
        if self.temperature > 0:
            return draw(probabilities(logits, self.temperature))
        return self.sample(logits)

    def verify_drafts(self, csi: CachedSequenceInterface, logits: torch.Tensor) -> torch.Tensor:
        """What the target says where drafts are verified by rejection sampling, shapes as of `sample_target`."""
        num_prefill, num_extend, _ = csi.info.batch_info.get_num_sequences()
        num_prefill_tokens, _, _ = csi.info.batch_info.get_num_tokens()
        if num_extend == 0:
            return self.sample_target(logits)
        target = probabilities(logits[num_prefill:], self.temperature)
        slots = csi.get_arg("slot_idx")[num_prefill : num_prefill + num_extend].to(torch.int64)
        d2t = getattr(self.draft_model, "d2t", None)
        draft = in_target_vocabulary(csi.get_arg(DRAFT_DISTRIBUTIONS)[slots], d2t, logits.shape[-1])
        row_len = 1 + self.max_draft_len
        input_ids = csi.info.flatten(csi.get_arg("input_ids"))
        drafted = input_ids[num_prefill_tokens:].view(num_extend, row_len)[:, 1:]
        verified = verify(target.view(num_extend, row_len, -1), draft, drafted).flatten()
        return torch.cat([self.sample_target(logits[:num_prefill]), verified]) if num_prefill > 0 else verified

    def sample_draft(self, norm_hidden_state: torch.Tensor) -> torch.Tensor:
        """Greedy draft in the target's vocabulary: ``[n, hidden]`` to integers ``[n]``."""
        return self.target_tokens(torch.argmax(self.draft_logits(norm_hidden_state), dim=-1))

    def draw_draft(self, csi: CachedSequenceInterface, norm_hidden_state: torch.Tensor, draft_idx: int) -> torch.Tensor:
        """Draw a draft, and leave what it was drawn from to `verify_drafts`: ``[n, hidden]`` to integers ``[n]``."""
        probs = probabilities(self.draft_logits(norm_hidden_state), self.temperature)
        slots = csi.get_arg("slot_idx")[: probs.shape[0]].to(torch.int64)
        csi.get_arg(DRAFT_DISTRIBUTIONS)[slots, draft_idx] = probs
        return self.target_tokens(draw(probs))

    def target_tokens(self, draft_tokens: torch.Tensor) -> torch.Tensor:
        """Draft tokens, integers ``[n]``, in the target's vocabulary."""
        d2t = getattr(self.draft_model, "d2t", None)
        return draft_tokens if d2t is None else draft_tokens + d2t.index_select(0, draft_tokens)

    # ---------------------------------------------------------------- without an interface

    def forward_prefill(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        hidden_states: torch.Tensor | None = None,
    ) -> EaglePrefillOutput:
        """Run both models over whole prompts, without caches: what export and numerical checks call.

        Args:
            input_ids: ints ``[batch, sequence]``.
            position_ids: ints ``[batch, sequence]``; counted from 0 when left out.
            hidden_states: ``[batch, sequence, hidden]`` for the drafter, already fused; zeros when left out, because
                nothing captures the target's states on this path.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand(*input_ids.shape)
        inputs_embeds = self.target_model.get_input_embeddings()(input_ids)
        logits = self.target_model(inputs_embeds=inputs_embeds, position_ids=position_ids)
        draft_ids = torch.cat([input_ids[:, 1:], self.sample(logits[:, -1:]).to(input_ids.dtype)], dim=1)
        draft_embeds = self.embed_draft(draft_ids)
        if hidden_states is None:
            hidden_states = torch.zeros_like(draft_embeds)
        norm_hidden_state, _ = self.draft_model(
            inputs_embeds=draft_embeds, position_ids=position_ids, hidden_states=hidden_states
        )
        return EaglePrefillOutput(logits=logits, draft_logits=self.draft_logits(norm_hidden_state))

    # ---------------------------------------------------------------- with an interface

    def submodule_args(self, csi: CachedSequenceInterface, submodule: nn.Module) -> Mapping[str, torch.Tensor]:
        """The interface's arguments, metadata and caches, that a submodule's graph takes."""
        names = placeholder_names(submodule)
        return {name: value for name, value in csi.named_args.items() if name in names}

    def embed_target(self, csi: CachedSequenceInterface) -> torch.Tensor:
        """The target's input: the embeddings of the batch's tokens, ``[batch, sequence, hidden]``."""
        return self.target_model.get_input_embeddings()(csi.get_arg("input_ids"))

    def forward_target(self, csi: CachedSequenceInterface) -> torch.Tensor:
        """Run the target alone on the interface's batch, of any kind.

        Returns:
            Logits ``[gathered tokens, vocab]``: one row for a prefill or decode row, one per token of an extend row.
        """
        logits = self.target_model(inputs_embeds=self.embed_target(csi), **self.submodule_args(csi, self.target_model))
        return csi.info.maybe_gather_and_squeeze(logits).flatten(0, -2)

    def captured_hidden_states(self, csi: CachedSequenceInterface, num_tokens: int) -> torch.Tensor:
        """The drafter's first hidden states ``[num_tokens, hidden]``, from what the target left in its resources."""
        names = [name for name in placeholder_names(self.target_model) if name.startswith(HIDDEN_STATES_PREFIX)]
        names.sort(key=lambda name: int(name.removeprefix(HIDDEN_STATES_PREFIX)))
        return self.fuse_hidden_states([csi.get_arg(name)[:num_tokens] for name in names])

    def forward_inference(self, csi: CachedSequenceInterface) -> EagleWrapperOutput:
        """Verify the drafts in the batch, accept, and draft the next ``K`` tokens of every sequence."""
        info = csi.info
        max_draft_len = self.max_draft_len
        num_prefill, num_extend, num_decode = info.batch_info.get_num_sequences()
        num_prefill_tokens, num_extend_tokens, _ = info.batch_info.get_num_tokens()
        num_sequences = num_prefill + num_extend
        num_tokens = num_prefill_tokens + num_extend_tokens
        assert num_decode == 0, "the Eagle wrapper takes prefill and extend rows, no decode rows"
        if num_extend > 0:
            assert num_extend_tokens // num_extend == 1 + max_draft_len, "an extend row is one token and its drafts"

        # Verify.
        logits = self.forward_target(csi)
        sampled = self.verify_drafts(csi, logits) if self.temperature > 0 else self.sample_target(logits)
        device = sampled.device
        input_ids = info.flatten(csi.get_arg("input_ids"))
        hidden_states = self.captured_hidden_states(csi, num_tokens)

        if num_prefill > 0:
            new_tokens = torch.zeros(num_sequences, 1 + max_draft_len, dtype=torch.int32, device=device)
            new_tokens[:num_prefill, 0] = sampled[:num_prefill]
            new_tokens[num_prefill:] = sampled[num_prefill:].view(num_extend, 1 + max_draft_len)
        else:
            new_tokens = sampled.view(num_sequences, 1 + max_draft_len)

        # Accept: a draft counts while it and all before it are what the target would have said.
        drafted = input_ids[num_prefill_tokens:].view(num_extend, 1 + max_draft_len)[:, 1:]
        matches = new_tokens[num_prefill:, :max_draft_len] == drafted
        accepted = matches.cumprod(dim=1, dtype=torch.int32).sum(dim=1, dtype=torch.int32)
        new_tokens_lens = 1 + accepted
        if num_prefill > 0:
            ones = torch.ones(num_prefill, dtype=torch.int32, device=device)
            new_tokens_lens = torch.cat([ones, new_tokens_lens])

        if isinstance(csi.kv_cache_manager, HybridCacheManager):
            csi.kv_cache_manager.update_mamba_states(csi.get_arg("slot_idx")[:num_sequences], new_tokens_lens)

        # Where a sequence goes on, seen from the last token of its row.
        c_offset = new_tokens_lens - max_draft_len
        if num_prefill > 0:
            c_offset[:num_prefill].fill_(1)

        # The drafter's input at a position is the token after it; its answer is read at the last accepted one.
        last_tokens = torch.arange(num_prefill_tokens, num_tokens, 1 + max_draft_len, device=device) + accepted
        draft_ids = sampled
        if num_prefill > 0:
            prefill_ends = csi.get_arg("token_gather_indices")[:num_prefill]
            prefill_ids = torch.empty_like(input_ids[:num_prefill_tokens])
            prefill_ids[:-1] = input_ids[1:num_prefill_tokens]
            prefill_ids[prefill_ends] = sampled[:num_prefill]
            draft_ids = torch.cat([prefill_ids, sampled[num_prefill:]])
            last_tokens = torch.cat([prefill_ends, last_tokens])
        info.copy_("input_ids", draft_ids)
        info.copy_("token_gather_indices", last_tokens, strict=False)
        info.batch_info.update_tokens_gather_info(num_sequences, True)

        # Draft.
        drafts = []
        for draft_idx in range(max_draft_len):
            norm_hidden_state, last_hidden_state = self.draft_model(
                inputs_embeds=self.embed_draft(csi.get_arg("input_ids")),
                hidden_states=info.unflatten(hidden_states),
                **self.submodule_args(csi, self.draft_model),
            )
            norm_hidden_state = info.maybe_gather_and_squeeze(norm_hidden_state).flatten(0, -2)
            hidden_states = info.maybe_gather_and_squeeze(last_hidden_state).flatten(0, -2)
            if self.temperature > 0:
                draft_tokens = self.draw_draft(csi, norm_hidden_state, draft_idx)
            else:
                draft_tokens = self.sample_draft(norm_hidden_state)
            drafts.append(draft_tokens)

            if draft_idx == 1:
                c_offset.fill_(1)
            if draft_idx < max_draft_len - 1:
                info.switch_to_generate_()
                info.copy_("input_ids", draft_tokens)
                info.offset_pos_and_cache_(c_offset)

        next_draft_tokens = torch.stack(drafts, dim=1).to(torch.int32)
        last_new = new_tokens.gather(1, (new_tokens_lens - 1).to(torch.int64).unsqueeze(1))
        next_new_tokens = torch.cat([last_new, next_draft_tokens], dim=1)
        return EagleWrapperOutput(
            new_tokens=new_tokens,
            new_tokens_lens=new_tokens_lens,
            next_draft_tokens=next_draft_tokens,
            next_new_tokens=next_new_tokens,
        )
