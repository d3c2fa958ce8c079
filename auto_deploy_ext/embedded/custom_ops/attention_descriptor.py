"""AttentionDescriptor and AttentionRegistry: what a cached-attention backend tells the transforms that insert it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch._ops import OpOverloadPacket
from torch.fx import Node

from ...spelling import unknown_name_message
from .resource_handlers import ResourceHandler

if TYPE_CHECKING:
    from ..shim.interface import KvCacheConfig

#: What may stand in a graph as a literal argument.
Constant = int | float | str | None
AttentionLayout = Literal["bsnd", "bnsd"]
ResourceHandlerDict = dict[str, ResourceHandler]
#: ``(op, number of outputs, constants)``: an op that prepares more metadata on the device, once per forward.
PrepareMetadataInfo = tuple[Callable | None, int, list[Constant]]
PrepareMetadataHostCallable = Callable[..., None]


class AttentionDescriptor(ABC):
    """One backend of cached attention (or of another op that keeps a state).

    The cached op takes the source op's tensors (the first ``get_num_qkv_args()`` arguments), the standard metadata, the
    extra metadata, the caches in the order of ``get_cache_initializers`` and the constants, in that order.
    """

    @classmethod
    @abstractmethod
    def get_attention_layout(cls) -> AttentionLayout:
        """Return the layout of the source op's tensors: ``bsnd`` or ``bnsd``."""

    @classmethod
    @abstractmethod
    def get_num_qkv_args(cls) -> int:
        """Return how many tensors of the source op the cached op takes."""

    @classmethod
    @abstractmethod
    def get_source_attention_op(cls) -> OpOverloadPacket:
        """Return the op that is replaced."""

    @classmethod
    @abstractmethod
    def get_cached_attention_op(cls) -> Callable:
        """Return the op that replaces it."""

    @classmethod
    @abstractmethod
    def get_standard_metadata_args(cls) -> list[str]:
        """Return the SequenceInfo arguments that the cached op takes, ``_host`` names included."""

    @classmethod
    @abstractmethod
    def get_cache_initializers(cls, source_attn_node: Node, cache_config: KvCacheConfig) -> ResourceHandlerDict:
        """Return the caches that one source node needs, by name without the node's index."""

    @classmethod
    def get_prepare_extra_metadata_info(cls, any_source_attn_node: Node) -> PrepareMetadataInfo:
        """Return the op that prepares more metadata, its number of outputs and its constants; none by default."""
        return None, 0, []

    @classmethod
    def check_device(cls, device: torch.device) -> None:
        """Raise ValueError where the cached op does not run on a device; it runs on all by default."""
        return

    @classmethod
    def get_constants(cls, source_attn_node: Node) -> list[Constant]:
        """Return the literal arguments that the cached op takes for this node; none by default."""
        return []

    @classmethod
    def get_host_prepare_metadata_function(cls) -> PrepareMetadataHostCallable | None:
        """Return a host function to run before each forward, whose parameters name its arguments; none by default."""
        return None

    @classmethod
    def plans_before_capture(cls) -> bool:
        """Return whether the cached op may be captured although its backend reads host mirrors.

        A backend says so whose op needs the mirrors only for a plan that is made outside of the captured graph, before
        each replay, and that does not look at them when it runs inside one. By default that is so if it has a
        host-prepare function, because that plans, and runs before the graphs do.
        """
        return cls.get_host_prepare_metadata_function() is not None


Descriptor = TypeVar("Descriptor", bound=type[AttentionDescriptor])


class AttentionRegistry:
    """The backends by name.

    Example:
        >>> sorted(AttentionRegistry._registry)  # doctest: +SKIP
        ['flashinfer', 'torch', 'torch_paged', 'triton']
    """

    _registry: dict[str, type[AttentionDescriptor]] = {}  # noqa: RUF012 (shared on purpose)

    @classmethod
    def register(cls, name: str) -> Callable[[Descriptor], Descriptor]:
        """Return a decorator that registers a descriptor.

        Raises:
            ValueError: another descriptor has the name.
        """

        def decorator(descriptor: Descriptor) -> Descriptor:
            if cls._registry.get(name, descriptor) is not descriptor:
                raise ValueError(f"attention backend {name!r} is registered already, as {cls._registry[name].__name__}")
            cls._registry[name] = descriptor
            return descriptor

        return decorator

    @classmethod
    def get(cls, name: str) -> type[AttentionDescriptor]:
        """Return the backend of that name.

        Raises:
            ValueError: there is none; the message suggests the closest name.
        """
        if not cls.has(name):
            raise ValueError(unknown_name_message("attention backend", name, cls._registry))
        return cls._registry[name]

    @classmethod
    def has(cls, name: str) -> bool:
        """Return whether a backend of that name is registered."""
        return name in cls._registry
