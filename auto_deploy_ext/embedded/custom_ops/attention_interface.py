"""What code written for AutoDeploy's attention interface imports, gathered from the modules that define it."""

from .attention_descriptor import (
    AttentionDescriptor,
    AttentionLayout,
    AttentionRegistry,
    Constant,
    PrepareMetadataHostCallable,
    PrepareMetadataInfo,
    ResourceHandlerDict,
)
from .batch_info import BatchInfo
from .input_buffer import HostCopyTicket, InputBuffer, TensorSpec
from .metadata_mutations import OFFSET_WRITES, PAGE_TABLE, POOLED_BUFFERS, SWITCH_WRITES
from .resource_handlers import (
    KVPagedResourceHandler,
    ResourceHandler,
    StateResourceHandler,
    UnpagedResourceHandler,
)
from .sequence_info import SequenceInfo

__all__ = [
    "OFFSET_WRITES",
    "PAGE_TABLE",
    "POOLED_BUFFERS",
    "SWITCH_WRITES",
    "AttentionDescriptor",
    "AttentionLayout",
    "AttentionRegistry",
    "BatchInfo",
    "Constant",
    "HostCopyTicket",
    "InputBuffer",
    "KVPagedResourceHandler",
    "PrepareMetadataHostCallable",
    "PrepareMetadataInfo",
    "ResourceHandler",
    "ResourceHandlerDict",
    "SequenceInfo",
    "StateResourceHandler",
    "TensorSpec",
    "UnpagedResourceHandler",
]
