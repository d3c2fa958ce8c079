"""Transform `detect_hidden_states_for_capture`: makes the target leave chosen layers' outputs for the drafter."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from pydantic import ConfigDict, Field
from torch.fx import Graph, GraphModule, Node

from ...custom_ops import capture_hidden_states  # noqa: F401  (registers the op)
from ...custom_ops.capture_hidden_states import HiddenStatesResourceHandler
from ..graph import add_graph_input
from ..interface import BaseTransform, SharedConfig, TransformConfig, TransformError, TransformInfo, TransformRegistry

if TYPE_CHECKING:
    from ...models.factory import ModelFactory
    from ...shim.interface import CachedSequenceInterface

HIDDEN_STATES_CACHE = "hidden_states_cache"
_LAYER_PATH = re.compile(r"(?:.*\.)?layers\.(\d+)")


class DetectHiddenStatesConfig(TransformConfig):
    """Config of `detect_hidden_states_for_capture`."""

    model_config = ConfigDict(extra="forbid")

    layers: list[int] | None = Field(
        default=None, description="Layers whose output is captured; null takes those that the drafter needs."
    )


def layer_outputs(graph: Graph) -> dict[int, Node]:
    """The last node that each decoder layer itself made (not a module in it): the residual stream after the layer.

    A layer is recognised by the path that torch.export notes in `meta["nn_module_stack"]`: it ends in `layers.<i>`.
    """
    outputs: dict[int, Node] = {}
    for node in graph.nodes:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        match = _LAYER_PATH.fullmatch(stack[-1][0]) if stack else None
        if match and isinstance(node.meta.get("val"), torch.Tensor):
            outputs[int(match[1])] = node
    return outputs


@TransformRegistry.register("detect_hidden_states_for_capture")
class DetectHiddenStatesForCapture(BaseTransform):
    """Capture layer outputs of the target.

    Rules:

    1. Only a graph exported as "target" is touched; without speculation there is none.
    2. The k-th captured layer, in ascending order, goes to the resource `hidden_states_cache_<k>`.
    3. The state is copied right where the layer ends, by an op that is no dead code although nothing uses a result.
    """

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        """See `DetectHiddenStatesConfig`."""
        return DetectHiddenStatesConfig

    def _apply(
        self, gm: GraphModule, cm: CachedSequenceInterface, factory: ModelFactory, shared_config: SharedConfig
    ) -> tuple[GraphModule, TransformInfo]:
        assert isinstance(self.config, DetectHiddenStatesConfig)
        if getattr(gm, "role", None) != "target":
            return gm, TransformInfo(skipped=True, is_clean=True, has_valid_shapes=True)
        layers = self.config.layers
        wanted = factory.layers_to_capture() if layers is None else tuple(sorted(set(layers)))
        outputs = layer_outputs(gm.graph)
        missing = [layer for layer in wanted if layer not in outputs]
        if missing:
            known = ", ".join(map(str, sorted(outputs))) or "none"
            raise TransformError(f"no output found for layers {missing}; layers recognised in the graph: {known}")
        for index, layer in enumerate(wanted):
            self._capture(gm, cm, outputs[layer], f"{HIDDEN_STATES_CACHE}_{index}")
        gm.recompile()
        return gm, TransformInfo(skipped=False, num_matches=len(wanted))

    def _capture(self, gm: GraphModule, cm: CachedSequenceInterface, output: Node, name: str) -> None:
        value = output.meta["val"]
        name = cm.add_resource(name, HiddenStatesResourceHandler(int(value.shape[-1]), value.dtype))
        cache = add_graph_input(gm, name)
        with gm.graph.inserting_after(output):
            gm.graph.call_function(torch.ops.auto_deploy_ext.capture_hidden_states.default, (output, cache))
