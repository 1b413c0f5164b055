"""Owns when a model's layers become compiled ones: at the load when they are on disk, else once they have been made.

They are made by another process at the lowest priority, while the model answers with plain layers. Taken over, they are
asked once for the same scores; layers that say otherwise stay plain.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from engine import code_files, guards
from engine.compiled import words
from engine.compiled.layers import CompiledLayers
from engine.runner import Runner

DAMAGED = (RuntimeError, AttributeError, LookupError, AssertionError, TypeError, ValueError)  # or of another model
ASKED = (range(1, 9), range(5, 6))  # token ids: a prompt, and one row alone


class Adoption:
    """The layers of one model: plain, being compiled, or compiled."""

    def __init__(self, root: str, model: Path, dtype: torch.dtype) -> None:
        """``root``: the directory for compiled layers; "": they stay plain."""
        self._root, self._model, self._dtype = root, model, dtype
        self._layers: CompiledLayers | None = None
        self._place: Path | None = None
        self._seal = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._problem = "" if root else "compile_layers is off"

    @property
    def proven(self) -> str:
        """Seal of the layers that run; "": none."""
        return self._seal if self._layers is not None else ""

    @property
    def said(self) -> str:
        """For people."""
        if self._layers is not None:
            return "compiled"
        if self._process is not None:
            return "plain, being compiled"
        return f"plain: {self._problem}" if self._problem else "plain"

    def resume(self, runner: Runner, packed: Sequence[str], proven: str) -> None:
        """Take over what an earlier load has proven; the canary is asked afterwards."""
        place = self._at(packed)
        if place is not None and self._layers is None and _seal(place) == proven != "":
            self._install(runner, place)

    def begin(self, runner: Runner, packed: Sequence[str]) -> None:
        """Take over what is on disk, or have it made. The model is awake."""
        place = self._at(packed)
        if place is None or self._layers is not None or self._process is not None:
            return
        if words.read(place) is not None:
            self._take_over(runner, place)
        elif code_files.compiler() is None:
            self._problem = code_files.NO_COMPILER
        else:
            self._place = place
            try:
                self._process = _start(self._model, self._dtype, packed, place)
            except OSError as error:
                self._problem = f"{type(error).__name__}: {error}"

    def look(self, runner: Runner) -> bool:
        """Between steps: take over what has been made meanwhile. Has anything changed?"""
        if self._process is None or self._process.poll() is None:
            return False
        assert self._place is not None
        assert self._process.stdout is not None
        code, said = (
            self._process.returncode,
            self._process.stdout.read(words.LONGEST_WORD).decode(errors="replace").strip(),
        )
        self.close()
        if code:
            self._problem = f"the process that compiled them ended with code {code} {said}".strip()
        else:
            self._take_over(runner, self._place)
        return self._layers is not None

    def wait(self) -> None:
        """Until what is being made has been made; ``look`` takes it over."""
        if self._process is not None:
            self._process.wait()

    def drop(self) -> None:
        """The model they were installed in is no more, or answers wrong."""
        if self._layers is not None:
            self._layers.remove()
            self._layers = None

    def close(self) -> None:
        """End the compiling process, should it still run."""
        if self._process is not None and self._process.stdin is not None:
            self._process.terminate()
            self._process.wait()
            self._process.stdin.close()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None

    def _at(self, packed: Sequence[str]) -> Path | None:
        if not self._root:
            return None
        return words.directory(Path(self._root), self._model, str(self._dtype), packed)

    def _install(self, runner: Runner, place: Path) -> None:
        found = words.read(place)
        self._problem = "what was compiled is damaged" if found is None else found.problem
        if found is not None and not found.problem:
            try:
                self._layers = CompiledLayers(runner.model, place, found)
                self._seal = _seal(place)
            except DAMAGED as error:
                self._problem = f"{type(error).__name__}: {error}"

    def _take_over(self, runner: Runner, place: Path) -> None:
        """With proof: the same scores before and after."""
        plain = [runner.probe(ids) for ids in ASKED]
        self._install(runner, place)
        if self._layers is None:
            return
        try:
            compiled = [runner.probe(ids) for ids in ASKED]
            same = all(
                ours.scores == its.scores and guards.same_scores(a, b, self._dtype)
                for (ours, a), (its, b) in zip(compiled, plain, strict=True)
            )
            self._problem = "" if same else "compiled layers gave other scores"
        except DAMAGED as error:
            self._problem = f"compiled layers failed: {type(error).__name__}: {error}"
        if self._problem:
            self.drop()


def _seal(place: Path) -> str:
    try:
        return words.seal(place)
    except OSError:
        return ""


def _start(model: Path, dtype: torch.dtype, packed: Sequence[str], place: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.compiled.build"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,  # what went wrong, in a line
        stderr=subprocess.DEVNULL,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    )
    assert process.stdin is not None
    order = {"path": str(model), "dtype": str(dtype).removeprefix("torch."), "packed": list(packed)}
    process.stdin.write(json.dumps({**order, "place": str(place)}).encode() + b"\n")
    process.stdin.flush()
    return process
