"""The target as training sees it: next tokens with a preallocated cache, and states of whole sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

ATTENTION_IMPLEMENTATION = "auto_deploy_ext_training"
"""The `attn_implementation` under which transformers' models call `training_attention`."""


class KeyValueCache:
    """Keys and values of rows that all have the same length, in memory that is allocated once.

    Args:
        rows: Sequences.
        capacity: Tokens per sequence.
        dtype: Of keys and values.
        device: Where they are.
    """

    def __init__(self, rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = rows
        self.capacity = capacity
        self.dtype = dtype
        self.device = device
        self.length = 0
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one token per row, [rows, kv_heads, 1, dim] each, and give all of the layer up to it."""
        if layer not in self._layers:
            self._layers[layer] = (self._allocate(key), self._allocate(value))
        keys, values = self._layers[layer]
        end = self.length + 1
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def repeated(self, rows: int, capacity: int) -> KeyValueCache:
        """A larger cache, all of whose rows begin with this one's single row."""
        cache = KeyValueCache(rows, capacity, self.dtype, self.device)
        cache.length = self.length
        for layer, parts in self._layers.items():
            first, second = (cache._allocate(part) for part in parts)
            for part, whole in zip(parts, (first, second), strict=True):
                whole[:, :, : self.length] = part[:, :, : self.length]
            cache._layers[layer] = (first, second)
        return cache

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.rows, like.shape[1], self.capacity, like.shape[3])
        return torch.empty(shape, dtype=self.dtype, device=self.device)


_ACTIVE_CACHES: list[KeyValueCache] = []
"""The cache that attention appends to is the last; whole sequences are computed where there is none."""


def training_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' attention layers call; see `transformers.AttentionInterface`.

    Args:
        module: The attention layer; its `layer_idx` names the cache's layer.
        query: [batch, heads, sequence, dim]; key and value likewise, with kv_heads.
        key: See query.
        value: See query.
        attention_mask: Must be None, which transformers passes for an implementation without a mask function.
        scaling: Factor on the scores.
        dropout: Must be 0.
        **kwargs: Passed by some models; a sliding window, soft cap or sinks are refused.

    Returns:
        The output as [batch, sequence, heads, dim], and no attention weights.

    Raises:
        NotImplementedError: The layer asks for something that this does not compute.
    """
    unsupported = [name for name in ("sliding_window", "softcap", "s_aux") if kwargs.get(name) is not None]
    if attention_mask is not None or dropout or not getattr(module, "is_causal", True) or unsupported:
        raise NotImplementedError(
            f"{type(module).__name__} is not plain causal attention ({', '.join(unsupported) or 'mask or dropout'}); "
            "train-draft supports targets with plain causal attention"
        )
    batch, heads, sequence, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    if not _ACTIVE_CACHES:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return out.transpose(1, 2), None
    # One query per head: the heads of a group are the "sequence" of one key/value head, so nothing is repeated.
    keys, values = _ACTIVE_CACHES[-1].append(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    grouped = query.reshape(batch, kv_heads, groups * sequence, dim)
    out = F.scaled_dot_product_attention(grouped, keys, values, scale=scaling)
    return out.reshape(batch, heads, sequence, values.shape[-1]).transpose(1, 2), None


@contextmanager
def _appending_to(cache: KeyValueCache) -> Iterator[None]:
    _ACTIVE_CACHES.append(cache)
    try:
        yield
    finally:
        _ACTIVE_CACHES.pop()


@contextmanager
def tf32_products(device: torch.device) -> Iterator[None]:
    """Let products of float32 on a GPU round their factors to TF32 inside; the process's setting comes back."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def stable_attention_kernels(device: torch.device) -> Any:
    """A context that keeps cuDNN's attention out: it plans anew for every length of the cache, which costs seconds."""
    if device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


@dataclass(frozen=True)
class States:
    """What the target computes on texts.

    Attributes:
        captured: [rows, length, layers * hidden], the captured layers' outputs.
        last: [rows, length, hidden] normed last states.
        labels: int32 [rows, length], the likeliest next token.
    """

    captured: torch.Tensor
    last: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def empty(cls, target: TrainingTarget, rows: int, length: int) -> States:
        """Memory for the states, to be filled index by index."""
        options: dict[str, Any] = {"device": target.device}
        width = target.hidden_size
        return cls(
            torch.empty(rows, length, len(target.capture) * width, dtype=target.dtype, **options),
            torch.empty(rows, length, width, dtype=target.dtype, **options),
            torch.empty(rows, length, dtype=torch.int32, **options),
        )

    def put(self, index: int, captured: torch.Tensor, last: torch.Tensor, labels: torch.Tensor) -> None:
        """The states of one index, of all rows or of one that stands for all."""
        self.captured[:, index] = captured
        self.last[:, index] = last
        self.labels[:, index] = labels


class TrainingTarget:
    """A causal language model of transformers, frozen.

    Args:
        model: Any attention-only model with `layers`; it is moved, and its attention implementation is replaced.
        capture: Layers whose output the head reads, ascending.
        device: Where to run.
        dtype: Of weights and activations.

    Raises:
        ValueError: The model is not of that kind.
    """

    def __init__(
        self, model: PreTrainedModel, capture: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> None:
        AttentionInterface.register(ATTENTION_IMPLEMENTATION, training_attention)
        model.set_attn_implementation(ATTENTION_IMPLEMENTATION)
        module: nn.Module = model
        module.to(device).eval().requires_grad_(False)
        for parameter in module.parameters():  # not the buffers: rotary frequencies stay in float32
            parameter.data = parameter.data.to(dtype)
        self.model = model
        self.body: Any = model.base_model
        self.capture = capture
        self.device = device
        self.dtype = dtype
        self.config: Any = model.config
        layers = getattr(self.body, "layers", None)
        kinds = set(getattr(self.config, "layer_types", None) or ()) | set(
            getattr(self.config, "layers_block_type", None) or ()
        )
        if layers is None or kinds - {"full_attention", "attention"}:
            raise ValueError(
                f"{type(model).__name__} ({self.config.model_type}) is not supported by train-draft: it needs a target "
                "whose layers are all plain causal attention"
            )
        self.layers = layers
        embedding: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        self.embedding: torch.Tensor = embedding.weight
        self.head: torch.Tensor = head.weight
        self._check_head()

    @property
    def hidden_size(self) -> int:
        """Width of one state."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return int(self.head.shape[0])

    @torch.no_grad()
    def _check_head(self) -> None:
        """Logits must be the head on the body's last state, with nothing between or behind."""
        tokens = torch.arange(4, device=self.device)[None] % self.vocab_size
        positions = torch.arange(4, device=self.device)[None]
        embeds = self.embedding[tokens]
        try:
            output: Any = self.model(inputs_embeds=embeds, position_ids=positions)
        except NotImplementedError as error:  # of `training_attention`
            raise ValueError(f"{type(self.model).__name__} ({self.config.model_type}): {error}") from error
        logits = output if isinstance(output, torch.Tensor) else output.logits
        expected = F.linear(self._states(tokens), self.head)
        if not torch.allclose(logits.float(), expected.float(), rtol=0.05, atol=0.05 * float(expected.abs().max())):
            raise ValueError(
                f"{type(self.model).__name__} changes its logits behind the head, which train-draft does not support"
            )

    def _states(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None].expand(tokens.shape[0], -1)
        return self.body(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state

    @torch.no_grad()
    def features(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run whole sequences.

        Args:
            tokens: ints [batch, sequence].

        Returns:
            The captured layers' outputs side by side, [batch, sequence, layers * hidden], and the normed last state
            [batch, sequence, hidden], which the head is applied to.
        """
        with self._capturing() as captured:
            last = self._states(tokens)
        return torch.cat([captured[index] for index in self.capture], dim=-1), last

    @contextmanager
    def _capturing(self) -> Iterator[dict[int, torch.Tensor]]:
        captured: dict[int, torch.Tensor] = {}

        def keep(index: int) -> Any:
            def hook(module: nn.Module, arguments: Any, output: Any) -> None:
                captured[index] = output if isinstance(output, torch.Tensor) else output[0]

            return hook

        handles = [self.layers[index].register_forward_hook(keep(index)) for index in self.capture]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def next_states(self, tokens: torch.Tensor, cache: KeyValueCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one more token of every row.

        Args:
            tokens: ints [rows].
            cache: What came before; it grows by the token.

        Returns:
            The captured layers' outputs [rows, layers * hidden] and the normed last state [rows, hidden].
        """
        positions = torch.full((tokens.shape[0], 1), cache.length, dtype=torch.int64, device=tokens.device)
        with _appending_to(cache), self._capturing() as captured:
            output = self.body(input_ids=tokens[:, None], position_ids=positions, use_cache=False)
        cache.length += 1
        return torch.cat([captured[index] for index in self.capture], dim=-1)[:, 0], output.last_hidden_state[:, 0]
