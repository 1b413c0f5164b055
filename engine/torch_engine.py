"""Owns the engine of real models: torch weights, paged KV, transformers' model code."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from engine import canary, penalties, recipe, sampler
from engine.canary import warm_up
from engine.compiled.adopt import Adoption
from engine.core import EngineCore
from engine.cores import CoreShares
from engine.device import ThreadGovernor
from engine.loader import NO_MEMORY, Loaded, Order, load_known, load_model
from engine.logprobs import Choice
from engine.memory import trim
from engine.protocol import NOWHERE, EngineLimits, LoadReport, Places
from engine.recipe import Recipe
from engine.scheduler import Chunk
from engine.tiers import Move, Way
from policies.errors import EngineError, LoadFailed, NotKnownYet, OutOfMemory

WARM_SHAPES = 16


class TorchEngine(EngineCore):
    """Inference for one causal language model."""

    def __init__(
        self,
        path: Path,
        memory_bytes: int,
        limits: EngineLimits,
        dtype: str = "float32",
        places: Places = NOWHERE,
    ) -> None:
        """Nothing is read before ``load``.

        Args:
            path: directory with config.json, safetensors and tokenizer.json.
            memory_bytes: all this process may hold: residual + weights + activation peak + KV pool.
        """
        super().__init__(limits)
        self.path = path
        self.memory_bytes = memory_bytes
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._code = places.code if self.device == "cpu" else ""
        self._adoption = Adoption(self._code, path, self.dtype)
        self._cores = _shares(places.cores) if self.device == "cpu" else None
        self._recipe_file: Path | None = None
        if places.recipes:
            self._recipe_file = recipe.recipe_file(Path(places.recipes), path, limits, dtype, self.device)

    def load(self, *, asleep: bool = False) -> LoadReport:
        order = Order(self.path, self.memory_bytes, self.limits, self.dtype, self.device, self._code)
        known = recipe.read(self._recipe_file) if self._recipe_file else None
        loaded = self._load_known(order, known, asleep=asleep) if known is not None else None
        if loaded is None and asleep:
            raise NotKnownYet(f"{self.path.name} has not been loaded here before: its first load needs its memory")
        if loaded is None:
            loaded = self._load_first(order)
        self.limits = loaded.limits
        self._governor = ThreadGovernor(loaded.threads)
        self._rows: Counter[int] = Counter(dict.fromkeys(loaded.recipe.rows, 1))
        self._begin(loaded.report, loaded.tokenizer, loaded.eos_token_ids, loaded.vocabulary)
        return loaded.report

    def _load_first(self, order: Order) -> Loaded:
        try:
            loaded = load_model(order)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise OutOfMemory(f"not enough memory to load: {error}") from error
        except RuntimeError as error:
            if NO_MEMORY not in str(error):
                raise
            raise OutOfMemory(f"not enough memory to load: {error}") from error
        self._hold(loaded)
        return loaded

    def _load_known(self, order: Order, known: Recipe, *, asleep: bool) -> Loaded | None:
        """By the recipe; None when that is of no use, and then it is gone: as if it were of another model."""
        try:
            loaded = load_known(order, known)
            self._hold(loaded)
            self._adoption.resume(self._runner, tuple(known.packed), known.compiled)
            if not asleep:
                self._take_again()
                self._canary()
        except (EngineError, LoadFailed, KeyError, AttributeError, TypeError, ValueError, RuntimeError):
            self._distrust()
            self._adoption.drop()
            for name in ("_weights", "_kv", "_runner", "_host_kv"):  # before others are made
                self.__dict__.pop(name, None)
            return None
        return loaded

    def _hold(self, loaded: Loaded) -> None:
        self._weights, self._kv, self._runner = loaded.weights, loaded.kv, loaded.runner
        self._host_kv = loaded.host_kv
        self._recipe = loaded.recipe

    def _warm(self) -> None:
        """A first load also finds out the canary's answer."""
        self._adoption.begin(self._runner, tuple(self._recipe.packed))
        self._keep_layers()
        warm_up(self._runner, self._kv, self.limits, self._recipe.rows)
        if not self._recipe.canary:
            said = canary.answer(self._runner, self._kv, self.limits)
            self._keep_recipe(replace(self._recipe, canary=said))
        trim()  # what measuring and warming up have used once

    def _keep_layers(self) -> None:
        if self._adoption.proven != self._recipe.compiled:
            self._keep_recipe(replace(self._recipe, compiled=self._adoption.proven))

    def settle(self) -> str:
        """Wait for the layers that are being compiled; how they are now. For benchmarks and tests."""
        self._adoption.wait()
        self._look_at_layers()
        return self._adoption.said

    def _look_at_layers(self) -> None:
        if self._adoption.look(self._runner):
            self._keep_layers()

    def close(self) -> None:
        super().close()
        self._adoption.close()

    def _canary(self) -> None:
        canary.check(self._runner, self._kv, self.limits, self._recipe.canary)

    def _keep_recipe(self, found: Recipe) -> None:
        """Not for weights that the files do not hold as the model has them: those must be computed by a whole load."""
        if self._recipe_file is not None and found != self._recipe and not self._weights.private_bytes:
            recipe.write(self._recipe_file, found)
        self._recipe = found

    def _distrust(self) -> None:
        if self._recipe_file is not None:
            self._recipe_file.unlink(missing_ok=True)

    def _rest(self) -> None:
        if self._cores:
            self._cores.rest()

    def _said_of_layers(self) -> str:
        return self._adoption.said

    def _said_of_attention(self) -> str:
        return self._runner.attention

    def _said_of_weights(self) -> str:
        return self._weights.said

    def lend_core(self, lent: bool) -> None:
        self._governor.lent = lent

    def _compute(self, chunks: Sequence[Chunk]) -> list[Choice | None]:
        self._rows[sum(chunk.count for chunk in chunks)] += 1
        self._look_at_layers()
        with self._governor.step(self._cores.take() if self._cores else None):
            logits = self._runner.run(chunks, self._kv)
        sampled = [chunk.context for chunk in chunks if chunk.samples]
        if not sampled:
            return []
        finite = sampler.finite_rows(logits)
        if not all(finite):
            logits = logits.nan_to_num(0.0)
        params = [context.request.sampling for context in sampled]
        scores = penalties.adjust(logits, sampled, self._eos)
        tokens = sampler.sample(scores, params, [context.num_tokens for context in sampled])
        choices = sampler.with_logprobs(logits, params, tokens)
        return [choice if ok else None for choice, ok in zip(choices, finite, strict=True)]

    def _read_kv(self, blocks: Sequence[int], *, host: bool) -> np.ndarray:
        content: np.ndarray = (self._host_kv if host else self._kv).read_blocks(blocks, self.limits.block_size).numpy()
        return content

    def _write_kv(self, blocks: Sequence[int], content: np.ndarray) -> None:
        self._kv.write_blocks(blocks, torch.from_numpy(content), self.limits.block_size)

    def _move(self, moves: Sequence[Move]) -> None:
        size = self.limits.block_size
        for way, group in itertools.groupby(moves, key=lambda move: move.way):
            if way is Way.OUT:
                places = {move.slot: move.block for move in group}  # a slot written twice: the later counts
                self._kv.copy_blocks(self._host_kv, [(block, slot) for slot, block in places.items()], size)
            elif way is Way.IN:
                self._host_kv.copy_blocks(self._kv, [(move.slot, move.block) for move in group], size)
            else:
                self._kv.copy_blocks(self._kv, [(move.block, move.slot) for move in group], size)

    def _keep_memory(self, blocks: int) -> None:
        self._kv.keep(blocks, self.limits.block_size)

    def _give_back(self) -> None:
        self._keep_recipe(replace(self._recipe, rows=tuple(sorted(r for r, _ in self._rows.most_common(WARM_SHAPES)))))
        self._weights.sleep()
        self._kv.give_back()
        if self.device == "cuda":
            torch.cuda.empty_cache()  # torch would keep it for itself
        trim()  # malloc would keep what steps have used, and the residual would grow

    def _take_again(self) -> None:
        self._weights.wake()
        trim()  # what converting weights from another dtype has used
        self._kv.take_again()


def _shares(file: str) -> CoreShares | None:
    """None where engines cannot meet: then each computes as if alone."""
    try:
        return CoreShares(Path(file)) if file else None
    except OSError:
        return None
