"""When the images of requests are encoded, and which features go where in a batch.

An encoder is reached in four ways, and each meets the drain that transform `drain_hostfuncs` put before it:

* embedding path: inside the wrapper's forward, for the images of its prefill rows (`place`);
* item scheduling: a few images at a time, for requests that are to join the next step, while a forward runs (the
  engine's `encode_ahead`) or between two (`schedule`);
* prefetch: beside a forward that has been launched, on a side stream, for requests that have no room yet; it is skipped
  while host functions are pending, which is host state, so that all ranks skip alike (`prefetch`);
* partial hits: whichever way, images in the encoder cache are left out; when all are there, no encoder runs and nothing
  is drained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...hostfuncs import HostFuncOwner
from ..models.custom.modeling_guided import VisionEncoder, set_images
from ..requests import RunningSequence
from .images import EncoderCache, ImageItem, by_shape, split


@dataclass
class EncodingStats:
    """How images were encoded.

    Attributes:
        images: images encoded, by the way that led to the encoder.
        calls: calls of the encoder.
        calls_ahead: of these, item scheduling's between the launch of a step and the reading of its tokens.
        prefetch_skipped: prefetches that pending host functions kept from running.
        full_hits: requests whose images the encoder cache all had when they were looked for first.
        partial_hits: requests of which it had some, so that only the rest was encoded.
    """

    images: dict[str, int] = field(default_factory=lambda: {"forward": 0, "schedule": 0, "prefetch": 0})
    calls: int = 0
    calls_ahead: int = 0
    prefetch_skipped: int = 0
    full_hits: int = 0
    partial_hits: int = 0


class ImageEncoding:
    """The images of an engine's requests.

    Args:
        encoder: encodes them.
        owner: whose host functions must not be pending when it does.
        image_token_id: the placeholder in prompts.
        images_per_step: images encoded at most at a time.
        cache_tokens: features that are kept.
    """

    def __init__(
        self, encoder: VisionEncoder, owner: HostFuncOwner, image_token_id: int, images_per_step: int, cache_tokens: int
    ) -> None:
        self.encoder = encoder
        self.owner = owner
        self.image_token_id = image_token_id
        self.images_per_step = images_per_step
        self.cache = EncoderCache(cache_tokens)
        self.stats = EncodingStats()
        self._items: dict[int, tuple[ImageItem, ...]] = {}
        self._held: dict[int, dict[str, torch.Tensor]] = {}
        self._looked_for: set[int] = set()
        self._new_items: list[ImageItem] = []
        self._watch: _Watch | None = None
        self._new_features: torch.Tensor | None = None

    # ---------------------------------------------------------------- requests

    def items_of(self, prompt: Sequence[int], images: Sequence[torch.Tensor]) -> tuple[ImageItem, ...]:
        """The items of a request's images, ``[3, height, width]`` each.

        Raises:
            ValueError: an image does not fit the encoder (which one is said), or the prompt has not one placeholder
                per patch.
        """
        pinned = self.encoder.projection.weight.is_cuda
        sizes = [self._num_tokens(number, image) for number, image in enumerate(images)]
        items = tuple(ImageItem.of(image, size, pinned) for image, size in zip(images, sizes, strict=True))
        placeholders, needed = prompt.count(self.image_token_id), sum(item.num_tokens for item in items)
        if placeholders != needed:
            raise ValueError(f"the prompt has {placeholders} placeholders, its images need {needed}")
        return items

    def _num_tokens(self, number: int, image: torch.Tensor) -> int:
        try:
            return self.encoder.num_tokens(image)
        except ValueError as error:
            raise ValueError(f"image {number} of the request does not fit the encoder: {error}") from error

    def add(self, request_id: int, items: tuple[ImageItem, ...]) -> None:
        """Note a request's images."""
        self._items[request_id] = items

    def forget(self, request_id: int) -> None:
        """Let go of a request's images; the cache may keep their features."""
        self._items.pop(request_id, None)
        self._held.pop(request_id, None)
        self._looked_for.discard(request_id)

    def is_encoded(self, request_id: int) -> bool:
        """Whether the features of all its images are held for a request."""
        held = self._held.get(request_id, {})
        return all(item.key in held for item in self._items.get(request_id, ()))

    def _hold_cached(self, request_id: int) -> list[ImageItem]:
        """Hold what the cache has of a request's images; gives those that it has not."""
        if request_id not in self._items:
            return []
        is_first = request_id not in self._looked_for
        self._looked_for.add(request_id)
        held = self._held.setdefault(request_id, {})
        missing = []
        for item in self._items[request_id]:
            if item.key not in held:
                features = self.cache.get(item.key)
                if features is None:
                    missing.append(item)
                else:
                    held[item.key] = features
        if is_first and held:
            self.stats.partial_hits += bool(missing)
            self.stats.full_hits += not missing
        return missing

    # ---------------------------------------------------------------- encoding outside of the forward

    def schedule(self, waiting: Iterable[int], ahead: bool = False) -> None:
        """Item scheduling: encode what waiting requests, in order, need next.

        Args:
            waiting: their numbers.
            ahead: a step has been launched whose tokens are not read yet.
        """
        waiting = list(waiting)
        items = self._next_items(waiting)
        self.stats.calls_ahead += ahead and bool(items)
        self._encode(items, "schedule")
        for request_id in waiting:
            self._hold_cached(request_id)

    def prefetch(self, waiting: Iterable[int]) -> None:
        """Prefetch: the same on a side stream, beside a forward; skipped while host functions are pending."""
        items = self._next_items(waiting)
        if not items:
            return
        if not self.may_prefetch():
            self.stats.prefetch_skipped += 1
            return
        with self.owner.layer.side_stream():
            self._encode(items, "prefetch")

    def may_prefetch(self) -> bool:
        """The gate: whether no host function is pending. Host state alone, so that all ranks decide alike."""
        return not self.owner.pending

    def _next_items(self, waiting: Iterable[int]) -> list[ImageItem]:
        items: dict[str, ImageItem] = {}
        for request_id in waiting:
            for item in self._hold_cached(request_id):
                if len(items) == self.images_per_step:
                    return list(items.values())
                items.setdefault(item.key, item)
        return list(items.values())

    def _encode(self, items: Sequence[ImageItem], way: str) -> None:
        if not items:
            return
        groups = by_shape(items)
        with torch.no_grad():
            features = self.encoder([self._pixels(group) for group in groups])
        self._keep([item for group in groups for item in group], features, way)

    def _keep(self, items: Sequence[ImageItem], features: torch.Tensor, way: str) -> None:
        """Give features to all requests that need them, before one of them makes the cache drop another."""
        parts = {item.key: part for item, part in zip(items, split(features, items), strict=True)}
        for request_id, needed in self._items.items():
            new = {item.key: parts[item.key] for item in needed if item.key in parts}
            if new:
                self._held[request_id] = {**new, **self._held.get(request_id, {})}
        for key, part in parts.items():
            self.cache.put(key, part)
        self.stats.images[way] += len(items)
        self.stats.calls += 1

    def _pixels(self, group: Sequence[ImageItem]) -> torch.Tensor:
        """Pixels on the device. From pinned memory the copy only queues; any other would wait for the whole stream."""
        weight = self.encoder.projection.weight
        return torch.stack([item.pixels.to(weight.device, non_blocking=True) for item in group]).to(weight.dtype)

    # ---------------------------------------------------------------- inside the forward

    def place(self, cm: Any, rows: Sequence[RunningSequence]) -> None:
        """Tell the wrapper which features go where, and which images it has to encode itself."""
        self._stop_watching()
        self._new_features = None
        set_images(cm)
        for seq in rows:
            if not seq.is_prefill:
                self.forget(seq.request_id)  # its images are in its caches now
        prefills = [seq.request_id for seq in rows if seq.is_prefill and seq.request_id in self._items]
        if not prefills:
            return
        missing = {item.key: item for request_id in prefills for item in self._hold_cached(request_id)}
        held = {key: features for request_id in prefills for key, features in self._held[request_id].items()}
        groups = by_shape(item for key, item in missing.items() if key not in held)
        self._new_items = [item for group in groups for item in group]
        self.owner.layer.join_side_stream(held.values())
        sizes = [(item.key, item.num_tokens) for item in self._new_items]
        sizes += [(key, features.shape[0]) for key, features in held.items()]
        order, positions = self._order(rows, dict(sizes))
        weight = self.encoder.projection.weight
        set_images(
            cm,
            [self._pixels(group) for group in groups],
            torch.cat([weight.new_zeros(0, weight.shape[0]), *held.values()]),
            torch.tensor(order, device=weight.device),
            torch.tensor(positions, device=weight.device),
        )
        if groups:
            self._watch = _Watch(self.encoder)

    def _order(self, rows: Sequence[RunningSequence], sizes: dict[str, int]) -> tuple[list[int], list[int]]:
        """For every placeholder of the batch: which feature it gets, features in the order of `sizes`; where it is."""
        starts, offset = {}, 0
        for key, num_tokens in sizes.items():
            starts[key] = offset
            offset += num_tokens
        order: list[int] = []
        positions: list[int] = []
        row_start = 0
        for seq in rows:
            if seq.is_prefill and seq.request_id in self._items:
                prompt = seq.request.prompt
                positions += [row_start + i for i, token in enumerate(prompt) if token == self.image_token_id]
                for item in self._items[seq.request_id]:
                    order += range(starts[item.key], starts[item.key] + item.num_tokens)
            row_start += len(seq.next_input)
        return order, positions

    def end_forward(self) -> None:
        """Once the forward is launched, and before anything else is encoded: take what it encodes."""
        self._new_features = self._watch.results[-1] if self._watch is not None else None
        self._stop_watching()

    def keep_new_features(self, cm: Any) -> None:
        """After the forward: keep what it has encoded."""
        if self._new_features is not None:
            self._keep(self._new_items, self._new_features, "forward")
            self._new_features = None
            set_images(cm)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.handle.remove()
            self._watch = None


class _Watch:
    """What an encoder gives while this watches."""

    def __init__(self, encoder: VisionEncoder) -> None:
        self.results: list[torch.Tensor] = []
        self.handle = encoder.register_forward_hook(self._keep)

    def _keep(self, module: Any, args: Any, result: torch.Tensor) -> None:
        self.results.append(result)
