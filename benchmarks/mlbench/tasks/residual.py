"""Residual networks for images of 32 x 32 pixels: version 1 (He et al., 2015) and version 2 (He et al., 2016).

Both have a first convolution, three stages of n blocks with 16, 32 and 64 channels, an average over all pixels and a
linear layer: 6 n + 2 layers with weights. Version 1 normalises after each convolution. Version 2 normalises before it,
and once more after the last block. A shortcut that changes the shape takes every second pixel and adds channels of
zeros, so it is without parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["DEPTHS", "VERSIONS", "ResNet"]

DEPTHS = (20, 32, 44, 56)
VERSIONS = (1, 2)
_CHANNELS = (16, 32, 64)
_NUM_CLASSES = 10


class ResNet(nn.Module):
    """A residual network of 20, 32, 44 or 56 layers.

    Args:
        version: 1 or 2.
        depth: Layers with weights, one of `DEPTHS`.

    Raises:
        ValueError: If the document does not have this network.
    """

    def __init__(self, *, version: int, depth: int) -> None:
        super().__init__()
        if version not in VERSIONS or depth not in DEPTHS:
            raise ValueError(
                f"version {version} with {depth} layers; expected version 1 or 2 and one of "
                f"{', '.join(map(str, DEPTHS))} layers"
            )
        block = BlockV1 if version == 1 else BlockV2
        self.version = version
        self.first = _convolution(3, _CHANNELS[0], stride=1)
        self.first_norm = nn.BatchNorm2d(_CHANNELS[0]) if version == 1 else nn.Identity()
        blocks: list[nn.Module] = []
        num_inputs = _CHANNELS[0]
        for stage, num_outputs in enumerate(_CHANNELS):
            for number in range((depth - 2) // 6):
                blocks.append(block(num_inputs, num_outputs, stride=2 if stage > 0 and number == 0 else 1))
                num_inputs = num_outputs
        self.blocks = nn.Sequential(*blocks)
        self.last_norm = nn.BatchNorm2d(_CHANNELS[-1]) if version == 2 else nn.Identity()
        self.last = nn.Linear(_CHANNELS[-1], _NUM_CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, shape ``(batch, 10)``, of float images of shape ``(batch, 3, 32, 32)``."""
        features = self.first(images)
        if self.version == 1:
            features = functional.relu(self.first_norm(features))
        features = self.blocks(features)
        if self.version == 2:
            features = functional.relu(self.last_norm(features))
        logits: Tensor = self.last(features.mean(dim=(2, 3)))
        return logits


class BlockV1(nn.Module):
    """Two convolutions, each followed by a normalisation. The sum with the shortcut is rectified."""

    def __init__(self, num_inputs: int, num_outputs: int, *, stride: int) -> None:
        super().__init__()
        self.first = _convolution(num_inputs, num_outputs, stride=stride)
        self.first_norm = nn.BatchNorm2d(num_outputs)
        self.second = _convolution(num_outputs, num_outputs, stride=1)
        self.second_norm = nn.BatchNorm2d(num_outputs)
        self.stride, self.num_more = stride, num_outputs - num_inputs

    def forward(self, features: Tensor) -> Tensor:
        """Keep height and width, or halve them if the stride is 2."""
        inner = functional.relu(self.first_norm(self.first(features)))
        inner = self.second_norm(self.second(inner))
        return functional.relu(inner + _shortcut(features, self.stride, self.num_more))


class BlockV2(nn.Module):
    """Two convolutions, each after a normalisation and a rectifier. The sum with the shortcut is passed on as it is."""

    def __init__(self, num_inputs: int, num_outputs: int, *, stride: int) -> None:
        super().__init__()
        self.first_norm = nn.BatchNorm2d(num_inputs)
        self.first = _convolution(num_inputs, num_outputs, stride=stride)
        self.second_norm = nn.BatchNorm2d(num_outputs)
        self.second = _convolution(num_outputs, num_outputs, stride=1)
        self.stride, self.num_more = stride, num_outputs - num_inputs

    def forward(self, features: Tensor) -> Tensor:
        """Keep height and width, or halve them if the stride is 2."""
        inner = self.first(functional.relu(self.first_norm(features)))
        inner = self.second(functional.relu(self.second_norm(inner)))
        return inner + _shortcut(features, self.stride, self.num_more)


def _convolution(num_inputs: int, num_outputs: int, *, stride: int) -> nn.Conv2d:
    return nn.Conv2d(num_inputs, num_outputs, 3, stride, padding=1, bias=False)


def _shortcut(features: Tensor, stride: int, num_more: int) -> Tensor:
    if stride == 1 and num_more == 0:
        return features
    before = num_more // 2
    taken: Tensor = features[:, :, ::stride, ::stride]
    return torch.nn.functional.pad(taken, (0, 0, 0, 0, before, num_more - before))
