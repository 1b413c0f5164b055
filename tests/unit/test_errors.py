"""The exception tree: each error crosses a process boundary whole."""

from __future__ import annotations

import pickle

import pytest

from policies import errors
from policies.errors import OrchestratorError


def _tree(kind: type[OrchestratorError]) -> list[type[OrchestratorError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in _tree(child))]


KINDS = [kind for kind in _tree(OrchestratorError) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_survives_pickling(kind: type[OrchestratorError]) -> None:
    error = kind("a needs 80 bytes, 20 free", param="model", retry_after_seconds=2.5)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (back.message, back.param, back.retry_after_seconds) == (error.message, "model", 2.5)
    assert str(back) == error.message
    assert back.envelope() == error.envelope()
    assert back.envelope()["error"]["code"] == kind.code


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_is_drawn_in_the_tree_at_the_top(kind: type[OrchestratorError]) -> None:
    assert errors.__doc__ is not None
    assert kind.__name__ in errors.__doc__.split()


def test_the_tree_is_not_empty() -> None:
    assert len(KINDS) > 25
