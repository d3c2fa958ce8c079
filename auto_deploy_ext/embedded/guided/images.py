"""Images of requests: what is encoded already, which are to be encoded together, and where their features go."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class ImageItem:
    """One image of a request.

    Attributes:
        key: equal for equal images.
        pixels: ``[3, height, width]`` on the host, in pinned memory where the encoder is on a GPU.
        num_tokens: how many placeholders it fills.
    """

    key: str
    pixels: torch.Tensor
    num_tokens: int

    @classmethod
    def of(cls, pixels: torch.Tensor, num_tokens: int, pinned: bool = False) -> ImageItem:
        """An item of an image."""
        host = pixels.detach().cpu().contiguous()
        digest = hashlib.sha256(host.view(torch.uint8).numpy().tobytes())
        digest.update(repr((tuple(host.shape), host.dtype)).encode())
        return cls(digest.hexdigest(), host.pin_memory() if pinned else host, num_tokens)


class EncoderCache:
    """Features by image; the least recently used go first. Whoever needs some for sure holds them himself.

    Args:
        max_tokens: features that are kept at most, in tokens.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._features: OrderedDict[str, torch.Tensor] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept."""
        return sum(features.shape[0] for features in self._features.values())

    def get(self, key: str) -> torch.Tensor | None:
        """The features ``[tokens, hidden]`` of an image, None when it has to be encoded."""
        features = self._features.get(key)
        if features is not None:
            self._features.move_to_end(key)
        return features

    def put(self, key: str, features: torch.Tensor) -> None:
        """Keep features; makes room."""
        self._features[key] = features
        self._features.move_to_end(key)
        while len(self._features) > 1 and self.num_tokens > self.max_tokens:
            self._features.popitem(last=False)


def by_shape(items: Iterable[ImageItem]) -> list[list[ImageItem]]:
    """Different images, those of equal shape together: what one call of a vision tower can take."""
    groups: dict[tuple[int, ...], dict[str, ImageItem]] = {}
    for item in items:
        groups.setdefault(tuple(item.pixels.shape), {})[item.key] = item
    return [list(group.values()) for group in groups.values()]


def split(features: torch.Tensor, items: Sequence[ImageItem]) -> list[torch.Tensor]:
    """The features of each item from those of all, ``[tokens, hidden]``."""
    return list(features.split([item.num_tokens for item in items]))
