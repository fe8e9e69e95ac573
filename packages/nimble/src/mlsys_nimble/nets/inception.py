"""Inception-v3 (Szegedy et al. 2015), without the auxiliary head that only training uses."""

from __future__ import annotations

from functools import partial

from torch import nn

from mlsys_nimble.nets.blocks import Classifier, Concat, Net, conv_bn, image

_conv = partial(conv_bn, eps=1e-3)


def _pooled(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, padding=1), _conv(in_channels, out_channels))


def _figure5(channels: int, pooled: int) -> Concat:
    """Build figure 5 of the paper: 5 x 5, and two 3 x 3 in its place."""
    return Concat(
        [
            _conv(channels, 64),
            nn.Sequential(_conv(channels, 48), _conv(48, 64, 5)),
            nn.Sequential(_conv(channels, 64), _conv(64, 96, 3), _conv(96, 96, 3)),
            _pooled(channels, pooled),
        ]
    )


def _figure6(channels: int, width: int) -> Concat:
    """Build figure 6: 7 x 7 as rows and columns."""
    row, column = (1, 7), (7, 1)
    return Concat(
        [
            _conv(channels, 192),
            nn.Sequential(_conv(channels, width), _conv(width, width, row), _conv(width, 192, column)),
            nn.Sequential(
                _conv(channels, width),
                _conv(width, width, column),
                _conv(width, width, row),
                _conv(width, width, column),
                _conv(width, 192, row),
            ),
            _pooled(channels, 192),
        ]
    )


def _figure7(channels: int) -> Concat:
    """Build figure 7: rows and columns side by side; six branches at its widest."""

    def fork() -> Concat:
        return Concat([_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1))])

    return Concat(
        [
            _conv(channels, 320),
            nn.Sequential(_conv(channels, 384), fork()),
            nn.Sequential(_conv(channels, 448), _conv(448, 384, 3), fork()),
            _pooled(channels, 192),
        ]
    )


def _to_17_pixels(channels: int) -> Concat:
    return Concat(
        [
            _conv(channels, 384, 3, 2, padding=0),
            nn.Sequential(_conv(channels, 64), _conv(64, 96, 3), _conv(96, 96, 3, 2, padding=0)),
            nn.MaxPool2d(3, 2),
        ]
    )


def _to_8_pixels(channels: int) -> Concat:
    return Concat(
        [
            nn.Sequential(_conv(channels, 192), _conv(192, 320, 3, 2, padding=0)),
            nn.Sequential(
                _conv(channels, 192),
                _conv(192, 192, (1, 7)),
                _conv(192, 192, (7, 1)),
                _conv(192, 192, 3, 2, padding=0),
            ),
            nn.MaxPool2d(3, 2),
        ]
    )


def inception_v3(batch: int = 1) -> Net:
    """Build Inception-v3, 299 x 299."""
    module = nn.Sequential(
        _conv(3, 32, 3, 2, padding=0),
        _conv(32, 32, 3, padding=0),
        _conv(32, 64, 3),
        nn.MaxPool2d(3, 2),
        _conv(64, 80),
        _conv(80, 192, 3, padding=0),
        nn.MaxPool2d(3, 2),
        _figure5(192, 32),
        _figure5(256, 64),
        _figure5(288, 64),
        _to_17_pixels(288),
        _figure6(768, 128),
        _figure6(768, 160),
        _figure6(768, 160),
        _figure6(768, 192),
        _to_8_pixels(768),
        _figure7(1280),
        _figure7(2048),
        Classifier(2048),
    )
    return Net(module, (image(batch, 299),))
