"""Owns the names of policies: name → factory. An unknown name lists the known ones."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from policies.errors import ConfigError
from policies.ordering import FirstCome, Ordering, ShortestFirst, TierFirst
from policies.residency import Lru, ResidencyPolicy

P = TypeVar("P")


class Registry(Generic[P]):
    """Named factories of one kind of policy."""

    def __init__(self, kind: str, factories: Mapping[str, Callable[..., P]]) -> None:
        self._kind = kind
        self._factories = dict(factories)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._factories))

    def make(self, name: str, **options: float) -> P:
        """The policy called ``name``; ConfigError names the known ones and the nearest."""
        if name not in self._factories:
            raise ConfigError(self._unknown(name))
        return self._factories[name](**options)

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.names, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"unknown {self._kind} {name!r}: the {len(self.names)} known are {', '.join(self.names)}{hint}"


ORDERING: Registry[Ordering] = Registry("order", {"fcfs": FirstCome, "sjf": ShortestFirst, "priority": TierFirst})
RESIDENCY: Registry[ResidencyPolicy] = Registry("residency policy", {"lru": Lru})
