"""Owns the memory of the KV pool: one storage, a view per layer, given back and taken again without moving a view."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.memory import drop_pages

SERIAL_ELEMENTS = 32_767  # copies of more are shared among OpenMP threads, which wait for each other
RUN_BLOCKS = 4  # adjoining blocks from which on a copy of their own pays, on average


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV geometry of one layer, as seen when the model was probed."""

    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None  # tokens; None: attends to everything


def bytes_per_token(layers: dict[int, LayerShape], dtype: torch.dtype) -> int:
    """KV bytes that one token takes over all layers."""
    width = sum(shape.kv_heads * (shape.head_dim + shape.value_dim) for shape in layers.values())
    return width * dtype.itemsize


def _runs(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Pairs of blocks that adjoin on both sides, together: (first here, first there, count)."""
    runs: list[tuple[int, int, int]] = []
    for mine, its in sorted(pairs):
        if runs and (mine, its) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((mine, its, 1))
    return runs


class KVMemory:
    """Keys and values of every slot; slot = block * block_size + offset.

    ``keys[layer]`` has shape ``[slots, kv_heads, head_dim]`` and ``values[layer]`` ``[slots, kv_heads, value_dim]``.
    """

    def __init__(self, layers: dict[int, LayerShape], num_slots: int, dtype: torch.dtype, device: str) -> None:
        self.num_slots = num_slots
        self.nbytes = bytes_per_token(layers, dtype) * num_slots
        self._flat = torch.empty(self.nbytes // dtype.itemsize, dtype=dtype, device=device)
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        offset = 0
        for index, shape in layers.items():
            for store, dim in ((self.keys, shape.head_dim), (self.values, shape.value_dim)):
                size = num_slots * shape.kv_heads * dim
                store[index] = self._flat[offset : offset + size].view(num_slots, shape.kv_heads, dim)
                offset += size

    def copy_blocks(self, other: KVMemory, pairs: Sequence[tuple[int, int]], block_size: int) -> None:
        """Copy whole blocks into ``other``, which may be on another device: pairs of (our block, its block).

        Its blocks must differ from each other: the copies have no order.
        """
        runs = _runs(pairs)
        if len(runs) * RUN_BLOCKS > len(pairs):  # scattered: two passes over the bytes, but few calls
            ours = torch.tensor([mine for mine, _ in pairs], device=self._flat.device)
            theirs = torch.tensor([its for _, its in pairs], device=other._flat.device)
            for source, target in zip(self._rows(block_size), other._rows(block_size), strict=True):
                target.index_copy_(0, theirs, source.index_select(0, ours).to(theirs.device))
            return
        for source, target in zip(self._rows(block_size), other._rows(block_size), strict=True):
            for mine, its, count in runs:
                target[its : its + count].copy_(source[mine : mine + count])

    def read_blocks(self, blocks: Sequence[int], block_size: int) -> torch.Tensor:
        """The bytes of whole blocks, ``[blocks, block_bytes]`` uint8 on the CPU: keys, then values, layer by layer."""
        index = torch.tensor(blocks, dtype=torch.long, device=self._flat.device)
        rows = self._rows(block_size)
        return torch.cat([row.index_select(0, index).view(torch.uint8) for row in rows], 1).cpu()

    def write_blocks(self, blocks: Sequence[int], content: torch.Tensor, block_size: int) -> None:
        """Undo ``read_blocks``. In one thread, even where the engine computes in another."""
        runs = _runs(list(enumerate(blocks)))
        scattered = len(runs) * RUN_BLOCKS > len(blocks)
        index = torch.tensor(blocks, dtype=torch.long, device=self._flat.device)
        begin = 0
        for row in self._rows(block_size):
            end = begin + row.shape[1] * row.element_size()
            piece = content[:, begin:end].view(row.dtype).to(row.device)
            most = max(1, SERIAL_ELEMENTS // row.shape[1])
            for first, block, count in [(0, 0, len(blocks))] if scattered else runs:
                for start in range(first, first + count, most):
                    stop = min(start + most, first + count)
                    if scattered:
                        row.index_copy_(0, index[start:stop], piece[start:stop])
                    else:
                        row[block + start - first : block + stop - first].copy_(piece[start:stop])
            begin = end

    def _rows(self, block_size: int) -> Iterator[torch.Tensor]:
        """Every layer's keys, then its values, as ``[blocks, elements]``."""
        for store in (*self.keys.values(), *self.values.values()):
            yield store.view(-1, block_size * store.shape[1] * store.shape[2])

    def keep(self, blocks: int, block_size: int) -> None:
        """Hand the pages of all blocks after the first ``blocks`` back to the system; on the CPU only.

        The addresses stay: written again, they take pages again.
        """
        if self._flat.device.type == "cpu":
            for row in self._rows(block_size):
                begin = row.data_ptr() + blocks * row.stride(0) * row.element_size()
                drop_pages(begin, row.data_ptr() + row.numel() * row.element_size())

    def give_back(self) -> None:
        """Free the memory; the views stay and must not be touched."""
        self._flat.untyped_storage().resize_(0)

    def take_again(self) -> None:
        """Allocate the memory anew; its content is undefined."""
        self._flat.untyped_storage().resize_(self.nbytes)
