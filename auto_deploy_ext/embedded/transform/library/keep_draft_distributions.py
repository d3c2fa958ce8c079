"""Transform `keep_draft_distributions`: room for what drafts are drawn from, where a temperature asks for drawing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import ConfigDict
from torch import nn

from ...custom_ops.resource_handlers import ResourceHandler
from ...models.custom.modeling_eagle import DRAFT_DISTRIBUTIONS, EagleWrapper
from ..interface import BaseTransform, SharedConfig, TransformConfig, TransformInfo, TransformRegistry

if TYPE_CHECKING:
    from ...custom_ops.sequence_info import SequenceInfo
    from ...models.factory import ModelFactory
    from ...shim.interface import CachedSequenceInterface


class DraftDistributionsHandler(ResourceHandler):
    """A float32 distribution per slot and draft: `[num_slots, max_draft_len, vocab]`.

    Args:
        max_draft_len: Drafts per step.
        vocab_size: The drafter's.
    """

    def __init__(self, max_draft_len: int, vocab_size: int) -> None:
        self.max_draft_len = max_draft_len
        self.vocab_size = vocab_size

    def allocate(self, sequence_info: SequenceInfo) -> torch.Tensor:
        """Return the distributions, zeroed."""
        shape = (sequence_info.max_num_state_slots, self.max_draft_len, self.vocab_size)
        return torch.zeros(shape, dtype=torch.float32, device=sequence_info.device)


class KeepDraftDistributionsConfig(TransformConfig):
    """Config of `keep_draft_distributions`."""

    model_config = ConfigDict(extra="forbid")


@TransformRegistry.register("keep_draft_distributions")
class KeepDraftDistributions(BaseTransform):
    """Add the resource that rejection sampling needs from one step to the next; nothing for a greedy wrapper."""

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        """See `KeepDraftDistributionsConfig`."""
        return KeepDraftDistributionsConfig

    def _apply_to_full_model(
        self, mod: nn.Module, cm: CachedSequenceInterface, factory: ModelFactory, shared_config: SharedConfig
    ) -> tuple[nn.Module, TransformInfo]:
        if not isinstance(mod, EagleWrapper) or mod.temperature == 0:
            return mod, TransformInfo(skipped=True, is_clean=True, has_valid_shapes=True)
        head = mod.draft_model.get_output_embeddings() or mod.target_model.get_output_embeddings()
        cm.add_resource(DRAFT_DISTRIBUTIONS, DraftDistributionsHandler(mod.max_draft_len, head.weight.shape[0]))
        return mod, TransformInfo(skipped=False, num_matches=1, is_clean=True, has_valid_shapes=True)
