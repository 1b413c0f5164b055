"""Owns what is known of a request while it is being answered."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.links import Stream
from policies.errors import OrchestratorError
from policies.types import TruncationRecord


@dataclass(slots=True)
class Progress:
    """What a waiting client may be told, and what the answer's timing says. Seconds of wall clock."""

    arrival: float
    state: str = "queued"
    load_seconds: float = 0.0  # spent waiting for the model to be ready
    attempts: int = 0
    hosts: list[str] = field(default_factory=list)
    stream: Stream | None = None
    ticket: str | None = None  # the stream was placed by
    truncation: TruncationRecord | None = None  # known long before the first token
    aborted: OrchestratorError | None = None

    def abort(self, error: OrchestratorError) -> None:
        """End the generation with this error, wherever it is."""
        self.aborted = error
        if self.stream is not None:
            self.stream.fail(error)
