"""Owns the transition table of one engine host (design section 6)."""

from __future__ import annotations

from collections.abc import Mapping

from policies.types import ModelState

_S = ModelState

MODEL_EDGES: Mapping[ModelState, frozenset[ModelState]] = {
    _S.COLD: frozenset({_S.LOADING}),
    # asleep: loaded in the background. A process that dies while loading is a failed load.
    _S.LOADING: frozenset({_S.WARMING, _S.SLEEPING, _S.DEEP_SLEEP, _S.FAILED}),
    _S.WARMING: frozenset({_S.READY, _S.FAILED, _S.LOST}),
    _S.READY: frozenset({_S.DRAINING, _S.LOST}),
    _S.DRAINING: frozenset({_S.SLEEPING, _S.UNLOADING, _S.LOST}),
    _S.SLEEPING: frozenset({_S.WAKING, _S.DEEP_SLEEP, _S.UNLOADING, _S.LOST}),
    _S.DEEP_SLEEP: frozenset({_S.LOADING, _S.UNLOADING, _S.LOST}),
    _S.WAKING: frozenset({_S.READY, _S.SLEEPING, _S.QUARANTINED, _S.LOST}),  # → SLEEPING: rolled back
    _S.QUARANTINED: frozenset({_S.UNLOADING, _S.LOST}),
    _S.UNLOADING: frozenset({_S.COLD}),
    _S.FAILED: frozenset({_S.COLD}),  # cooldown over and process gone
    _S.LOST: frozenset({_S.LOADING, _S.FAILED, _S.COLD}),  # → COLD: nobody needs it now
}

HAS_PROCESS = frozenset(ModelState) - {_S.COLD, _S.FAILED, _S.LOST}
ON_THE_WAY = frozenset({_S.LOADING, _S.WARMING, _S.WAKING})  # something is being done for it already
ASLEEP = frozenset({_S.SLEEPING, _S.DEEP_SLEEP})
STARTABLE = ASLEEP | {_S.COLD}
# A model's state is that of its host which is nearest to serving.
NEAREST_FIRST = (
    _S.READY, _S.WARMING, _S.WAKING, _S.LOADING, _S.DRAINING, _S.SLEEPING, _S.DEEP_SLEEP, _S.QUARANTINED, _S.UNLOADING,
    _S.LOST, _S.COLD, _S.FAILED,
)  # fmt: skip
