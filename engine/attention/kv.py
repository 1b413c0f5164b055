"""Owns the memory of the KV pool: one storage, a view per layer, given back and taken again without moving a view."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


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
        ours = torch.tensor([mine for mine, _ in pairs], device=self._flat.device)
        theirs = torch.tensor([its for _, its in pairs], device=other._flat.device)
        for sources, targets in ((self.keys, other.keys), (self.values, other.values)):
            for layer, source in sources.items():
                width = block_size * source.shape[1] * source.shape[2]
                blocks = source.view(-1, width).index_select(0, ours)
                targets[layer].view(-1, width).index_copy_(0, theirs, blocks.to(theirs.device))

    def read_blocks(self, blocks: Sequence[int], block_size: int) -> torch.Tensor:
        """The bytes of whole blocks, ``[blocks, block_bytes]`` uint8 on the CPU: keys, then values, layer by layer."""
        index = torch.tensor(blocks, dtype=torch.long, device=self._flat.device)
        rows = [store.view(-1, block_size * store.shape[1] * store.shape[2]) for store in self._stores()]
        return torch.cat([row.index_select(0, index).view(torch.uint8) for row in rows], 1).cpu()

    def write_blocks(self, blocks: Sequence[int], content: torch.Tensor, block_size: int) -> None:
        """Undo ``read_blocks``."""
        index = torch.tensor(blocks, dtype=torch.long, device=self._flat.device)
        begin = 0
        for store in self._stores():
            row = store.view(-1, block_size * store.shape[1] * store.shape[2])
            end = begin + row.shape[1] * row.element_size()
            row.index_copy_(0, index, content[:, begin:end].contiguous().view(row.dtype).to(row.device))
            begin = end

    def _stores(self) -> Iterator[torch.Tensor]:
        yield from self.keys.values()
        yield from self.values.values()

    def give_back(self) -> None:
        """Free the memory; the views stay and must not be touched."""
        self._flat.untyped_storage().resize_(0)

    def take_again(self) -> None:
        """Allocate the memory anew; its content is undefined."""
        self._flat.untyped_storage().resize_(self.nbytes)
