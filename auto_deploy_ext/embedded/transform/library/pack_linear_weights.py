"""Transform `pack_linear_weights`: linear layers that verify a few tokens for little more than one costs, on a CPU."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ConfigDict, Field
from torch.fx import GraphModule, Node

from ...custom_ops import packed_linear
from ..interface import BaseTransform, SharedConfig, TransformConfig, TransformInfo, TransformRegistry

if TYPE_CHECKING:
    from ...models.factory import ModelFactory
    from ...shim.interface import CachedSequenceInterface


class PackLinearWeightsConfig(TransformConfig):
    """Config of `pack_linear_weights`."""

    model_config = ConfigDict(extra="forbid")

    tokens: int | None = Field(
        default=None, ge=1, description="The number of rows to pack for; null takes that of a verified sequence."
    )


@TransformRegistry.register("pack_linear_weights")
class PackLinearWeights(BaseTransform):
    """Replace linear layers over float32 parameters by `packed_linear`.

    Rules:

    1. Only on a CPU whose PyTorch has oneDNN; elsewhere nothing is touched.
    2. Weights stay where they are and as they are; the packed form is made at the first call.
    """

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        """See `PackLinearWeightsConfig`."""
        return PackLinearWeightsConfig

    def _apply(
        self, gm: GraphModule, cm: CachedSequenceInterface, factory: ModelFactory, shared_config: SharedConfig
    ) -> tuple[GraphModule, TransformInfo]:
        assert isinstance(self.config, PackLinearWeightsConfig)
        if cm.device.type != "cpu" or not packed_linear.is_available():
            return gm, TransformInfo(skipped=True, is_clean=True, has_valid_shapes=True)
        tokens = self.config.tokens or 1 + int(factory.speculative_config.get("max_draft_len") or 0)
        count = 0
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
            if not _has_float32_weight(gm, node):
                continue
            x, weight, bias = (*node.args, None)[:3]
            node.target = torch.ops.auto_deploy_ext.packed_linear.default
            node.args, node.kwargs = (x, weight, node.kwargs.get("bias", bias), tokens), {}
            count += 1
        gm.recompile()
        return gm, TransformInfo(skipped=False, num_matches=count, is_clean=True, has_valid_shapes=True)


def _has_float32_weight(gm: GraphModule, node: Node) -> bool:
    weight: Any = node.args[1]
    if weight.op != "get_attr":
        return False
    value = reduce(getattr, weight.target.split("."), gm)
    return isinstance(value, torch.nn.Parameter) and value.dtype == torch.float32
