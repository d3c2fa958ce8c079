"""Transform `insert_cached_attention`: replaces source ops by a backend's cached ops; also its generic machinery."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ConfigDict, Field
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

from ...custom_ops import (  # noqa: F401  (registers the backends)
    flashinfer_attention,
    torch_attention,
    torch_paged_attention,
    triton_attention,
)
from ...custom_ops.attention_interface import AttentionDescriptor, AttentionRegistry
from ..graph import add_graph_input
from ..interface import BaseTransform, SharedConfig, TransformConfig, TransformError, TransformInfo, TransformRegistry

if TYPE_CHECKING:
    from ...models.factory import ModelFactory
    from ...shim.interface import CachedSequenceInterface

DRAFT_PREFIX = "draft_"
"""In front of the names of the drafter's resources."""

_TOKENS_PER_BLOCK = "tokens_per_block"


class InsertCachedOpConfig(TransformConfig):
    """Config of a transform that inserts cached ops."""

    model_config = ConfigDict(extra="forbid")

    backend: str | None = Field(default=None, description="Key of AttentionRegistry; null takes the default.")
    draft_backend: str | None = Field(
        default=None, description="The drafter's, where it differs; null takes the same as the target."
    )


def find_source_nodes(gm: GraphModule, op: OpOverloadPacket) -> list[Node]:
    """The calls of any overload of an op, in graph order."""
    overloads = {getattr(op, name) for name in op.overloads()}
    return [node for node in gm.graph.nodes if node.op == "call_function" and node.target in {op, *overloads}]


class InsertCachedOp(BaseTransform):
    """Replace every source op of a kind by the cached op of a backend.

    Rules, for each graph that has the backend's source op:

    1. The backend is `draft_backend` in a graph exported as "draft", where that is given, else `backend`.
    2. Each standard metadata argument is a placeholder, added at most once, and activated in the interface.
    3. Extra metadata is computed by one node before the first source op, from arguments named like its parameters; a
       parameter `tokens_per_block` gets the interface's as a literal.
    4. Each source op gets caches of its own: resources `<name>_<i>`, `draft_<name>_<i>` in the draft, i counting the
       source ops of the graph.
    5. The cached op takes the source's tensors, the standard metadata, the extra metadata, the caches, the constants.
    6. The backend's host-prepare function is registered once, whatever number of graphs uses it.
    """

    default_backend: str | None = None
    """Used where the config names none; a subclass for one kind of op sets it."""

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        """See `InsertCachedOpConfig`."""
        return InsertCachedOpConfig

    def _backend(self, gm: GraphModule) -> str:
        assert isinstance(self.config, InsertCachedOpConfig)
        is_draft = getattr(gm, "role", None) == "draft"
        named = self.config.draft_backend if is_draft and self.config.draft_backend is not None else self.config.backend
        backend = self.default_backend if named is None else named
        if backend is None:
            key = self.get_transform_key()
            raise TransformError(f"{key} has no backend: set transforms.{key}.backend")
        return backend

    def _apply(
        self, gm: GraphModule, cm: CachedSequenceInterface, factory: ModelFactory, shared_config: SharedConfig
    ) -> tuple[GraphModule, TransformInfo]:
        backend = self._backend(gm)
        descriptor = AttentionRegistry.get(backend)
        descriptor.check_device(cm.info.device)
        sources = find_source_nodes(gm, descriptor.get_source_attention_op())
        if not sources:
            self._check_kind(gm, backend, descriptor)
            return gm, TransformInfo(skipped=True, is_clean=True, has_valid_shapes=True)
        metadata = [self._add_or_retrieve_input(gm, cm, name) for name in descriptor.get_standard_metadata_args()]
        metadata += self._extra_metadata(gm, cm, descriptor, sources[0])
        for index, source in enumerate(sources):
            self._replace(gm, cm, descriptor, source, index, metadata)
        self._register_host_prepare(cm, descriptor)
        gm.recompile()
        return gm, TransformInfo(skipped=False, num_matches=len(sources))

    def _check_kind(self, gm: GraphModule, backend: str, descriptor: type[AttentionDescriptor]) -> None:
        """Raise TransformError where ops are left without a cache because the backend is one for other ops."""
        if self.default_backend is None:
            return
        usual = AttentionRegistry.get(self.default_backend).get_source_attention_op()
        if usual is not descriptor.get_source_attention_op() and find_source_nodes(gm, usual):
            key = self.get_transform_key()
            raise TransformError(
                f"{key}: backend {backend!r} caches {descriptor.get_source_attention_op()}, but the model has {usual}; "
                f"name a backend for that, such as {self.default_backend!r}"
            )

    def _extra_metadata(
        self, gm: GraphModule, cm: CachedSequenceInterface, descriptor: type[AttentionDescriptor], first: Node
    ) -> list[Node]:
        prepare, num_outputs, constants = descriptor.get_prepare_extra_metadata_info(first)
        if prepare is None:
            return []
        names = _parameter_names(prepare)
        inputs = [
            cm.info.tokens_per_block if name == _TOKENS_PER_BLOCK else self._add_or_retrieve_input(gm, cm, name)
            for name in names[: len(names) - len(constants)]
        ]
        with gm.graph.inserting_before(first):
            prepared = gm.graph.call_function(prepare, (*inputs, *constants))
            if num_outputs == 1 and not _returns_tuple(prepare):
                return [prepared]
            return [gm.graph.call_function(operator.getitem, (prepared, i)) for i in range(num_outputs)]

    def _replace(
        self,
        gm: GraphModule,
        cm: CachedSequenceInterface,
        descriptor: type[AttentionDescriptor],
        source: Node,
        index: int,
        metadata: list[Node],
    ) -> None:
        prefix = DRAFT_PREFIX if getattr(gm, "role", None) == "draft" else ""
        caches = []
        for name, handler in descriptor.get_cache_initializers(source, cm.kv_cache_config).items():
            caches.append(add_graph_input(gm, cm.add_resource(f"{prefix}{name}_{index}", handler)))
        tensors = source.args[: descriptor.get_num_qkv_args()]
        with gm.graph.inserting_before(source):
            cached = gm.graph.call_function(
                descriptor.get_cached_attention_op(),
                (*tensors, *metadata, *caches, *descriptor.get_constants(source)),
            )
        cached.meta.update(source.meta)
        source.replace_all_uses_with(cached)
        gm.graph.erase_node(source)

    def _register_host_prepare(self, cm: CachedSequenceInterface, descriptor: type[AttentionDescriptor]) -> None:
        function = descriptor.get_host_prepare_metadata_function()
        if function is None:
            return
        if all(registered is not function for registered, _ in cm.info._host_prepare_functions):
            cm.info.register_host_prepare_for_attention_forward(function, _parameter_names(function))


def _schema(function: Callable[..., Any]) -> torch._C.FunctionSchema | None:
    if isinstance(function, OpOverloadPacket):
        function = function.default
    return function._schema if isinstance(function, OpOverload) else None


def _parameter_names(function: Callable[..., Any]) -> list[str]:
    schema = _schema(function)
    if schema is not None:
        return [argument.name for argument in schema.arguments]
    return list(inspect.signature(function).parameters)


def _returns_tuple(function: Callable[..., Any]) -> bool:
    schema = _schema(function)
    return schema is None or len(schema.returns) != 1 or schema.returns[0].type.kind() == "ListType"


@TransformRegistry.register("insert_cached_attention")
class InsertCachedAttention(InsertCachedOp):
    """`InsertCachedOp` for attention; backends: `torch`, `torch_paged`, `triton`, `flashinfer`, and any registered."""

    default_backend = "torch"
