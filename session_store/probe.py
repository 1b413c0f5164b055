"""Owns looking at the Redis server itself, for benchmarks and checks: its memory, its slow commands, its durability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis

from session_store.client import describe


@dataclass(frozen=True, slots=True)
class SlowCommand:
    """One entry of the server's SLOWLOG."""

    name: str
    microseconds: int


class ServerProbe:
    """Blocking. StoreUnavailable when the server does not answer."""

    def __init__(self, url: str) -> None:
        self._redis = redis.Redis.from_url(url, socket_timeout=10)

    def used_bytes(self) -> int:
        """What the server's data and its own structures take."""
        return int(self._ask("INFO", "memory")["used_memory"])

    def slow_commands(self) -> list[SlowCommand]:
        """Those that took longer than the server's ``slowlog-log-slower-than``, since ``forget_slow_commands``."""
        entries: list[dict[str, Any]] = self._ask("SLOWLOG GET", 128)
        return [SlowCommand(entry["command"].split()[0].decode(), int(entry["duration"])) for entry in entries]

    def forget_slow_commands(self) -> None:
        self._ask("SLOWLOG RESET")

    def close(self) -> None:
        self._redis.close()

    def _ask(self, *command: Any) -> Any:
        try:
            return self._redis.execute_command(*command)  # type: ignore[no-untyped-call]
        except redis.RedisError as error:
            raise describe(error, "the server") from error
