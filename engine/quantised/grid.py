"""Owns the few bits that a float32 weight can be kept in without loss, and how they lie in memory.

Weights that come from a 4- to 8-bit file lie on a grid: in each group of inputs, ``scale * code + offset``. The grid is
found again from the numbers alone, whatever format they came from. Weights that come from bfloat16 are 16 bits and
zeros. Either is unfolded on its way from memory by ``native.cpp``, which says how the tiles lie.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

TILE = 32  # outputs whose numbers lie side by side
GROUPS = (32, 16)  # inputs that share a scale
MOST_LEVELS = 255
MOST_STEPS = 24  # between the two closest numbers of a group; all between may be missing
TOLERANCE = 2.0**-22  # of a group's largest number: two of float32's last places
PIECE = 1 << 22  # numbers looked at together


class Layout(NamedTuple):
    """Of folded weights."""

    bits: int
    group: int


# by the bytes that four inputs of an output take: a group has a scale and an offset in float32
LAYOUTS = {
    4 * layout.bits // 8 + 4 * 8 // layout.group: layout for layout in (Layout(b, g) for b in (4, 8) for g in GROUPS)
}
SIXTEEN = Layout(16, 1)
LAYOUTS[8] = SIXTEEN


class Grid(NamedTuple):
    """``scale * codes + offset``."""

    codes: torch.Tensor  # [outputs, groups, group], uint8
    scale: torch.Tensor  # [outputs, groups], float32
    offset: torch.Tensor  # [outputs, groups], float32


def is_folded(shape: tuple[int, ...], outputs: int, inputs: int) -> bool:
    """Is this the shape of such a weight, folded?"""
    if len(shape) != 2 or shape[0] != outputs or shape[1] * 4 % inputs:
        return False
    found = LAYOUTS.get(shape[1] * 4 // inputs)
    return found is not None and inputs % found.group == 0


def layout(folded: torch.Tensor, inputs: int) -> Layout:
    """Of a weight folded to ``folded`` (``[outputs, bytes]``); LookupError for none of ours."""
    return LAYOUTS[folded.shape[1] * 4 // inputs]


def foldable(shape: torch.Size) -> bool:
    """Can a weight of this shape (``[outputs, inputs]``) lie in tiles?"""
    return len(shape) == 2 and shape.numel() > 0 and shape[0] % TILE == 0


def fold(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight (``[outputs, inputs]``, float32) in 4 or 8 bits, ``[outputs, bytes]``; None: it lies on no grid."""
    for group in GROUPS:
        if foldable(weight.shape) and weight.shape[1] % group == 0:
            grid = _find(weight, group)
            if grid is not None:
                return _folded(grid)
    return None


def fold_bfloat16(weight: torch.Tensor) -> torch.Tensor:
    """The weight (``[outputs, inputs]``, bfloat16) in its 16 bits, ``[outputs, bytes]``."""
    return _tiled(weight.detach().view(torch.int16)).view(torch.uint8).view(weight.shape[0], -1)


def unfold(folded: torch.Tensor, inputs: int) -> torch.Tensor:
    """The float32 weight again; the definition that ``native.cpp`` is compared with."""
    outputs, (bits, group) = folded.shape[0], layout(folded, inputs)
    tiles = folded.view(outputs // TILE, -1)
    if bits == 16:
        return _untiled(tiles.view(torch.bfloat16).view(-1, inputs, TILE)).float()
    codes, grid = tiles.tensor_split([inputs * TILE * bits // 8], dim=1)
    codes = codes.reshape(-1, inputs * bits // 8, TILE)
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], 2).view(-1, inputs, TILE)
    scale, offset = (
        _untiled(part).repeat_interleave(group, 1)
        for part in grid.clone().view(torch.float32).view(-1, inputs // group, 2, TILE).unbind(2)
    )
    return (scale.double() * _untiled(codes) + offset).float()


def _find(weight: torch.Tensor, group: int) -> Grid | None:
    outputs, inputs = weight.shape
    rows = max(1, PIECE // inputs)
    found = []
    for begin in range(0, outputs, rows):
        if begin == 0 and _grid(weight[:TILE].reshape(-1, group)) is None:  # most of those that lie on none end here
            return None
        grid = _grid(weight[begin : begin + rows].reshape(-1, group))
        if grid is None:
            return None
        found.append(grid)
    codes, scale, offset = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Grid(codes.view(outputs, -1, group), scale.view(outputs, -1), offset.view(outputs, -1))


def _grid(groups: torch.Tensor) -> Grid | None:
    """Of each row of ``groups`` (``[groups, group]``): the step divides the gap between its two closest numbers."""
    ordered = groups.sort(1).values
    least, span = ordered[:, :1].double(), ordered[:, -1:].double() - ordered[:, :1]
    gaps = ordered.diff()
    closest = torch.where(gaps > 0, gaps, torch.inf).amin(1, keepdim=True).double()
    allowed = TOLERANCE * groups.abs().amax(1, keepdim=True).double()
    scale = torch.zeros(len(groups))
    codes = torch.zeros(groups.shape, dtype=torch.uint8)
    rest = span[:, 0].nonzero()[:, 0]  # the others are one number
    for steps in range(1, MOST_STEPS + 1):
        levels = (span[rest] * steps / closest[rest]).round()
        width = (span[rest] / levels).float()
        above = groups[rest].double() - least[rest]
        code = (above / width).round()
        off = (code * width - above).abs().amax(1, keepdim=True)
        fits = ((code.amax(1, keepdim=True) <= MOST_LEVELS) & (off <= allowed[rest]))[:, 0]
        scale[rest[fits]] = width[fits, 0]
        codes[rest[fits]] = code[fits].to(torch.uint8)
        rest = rest[~fits]
        if not len(rest):
            return Grid(codes, scale, least[:, 0].float())
    return None


def _folded(grid: Grid) -> torch.Tensor:
    outputs = grid.codes.shape[0]
    codes = _tiled(grid.codes.view(outputs, -1))  # [tiles, inputs, TILE]
    if int(codes.max()) < 16:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    scales = torch.stack([_tiled(grid.scale), _tiled(grid.offset)], 2)  # [tiles, groups, 2, TILE]
    parts = [part.reshape(part.shape[0], -1).view(torch.uint8) for part in (codes, scales)]
    return torch.cat(parts, 1).view(outputs, -1)


def _tiled(matrix: torch.Tensor) -> torch.Tensor:
    """``[outputs, n]`` as ``[tiles, n, TILE]``."""
    return matrix.view(-1, TILE, matrix.shape[1]).transpose(1, 2).contiguous()


def _untiled(tiles: torch.Tensor) -> torch.Tensor:
    return tiles.transpose(1, 2).reshape(-1, tiles.shape[1])
