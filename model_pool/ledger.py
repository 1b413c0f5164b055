"""Owns the account of device bytes: what was promised to each host, what was measured. No bytes without an entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from policies.errors import DoesNotFit


@dataclass(frozen=True, slots=True)
class Entry:
    """Bytes of one host."""

    host: str
    device: str
    promised_bytes: int
    measured_bytes: int | None = None  # None until measured after the promise
    residual_bytes: int = 0  # what its process was last seen to keep while asleep
    seen_bytes: int = (
        0  # what its process held when it was last looked at; 0: never. A ready host's may grow to ``held``
    )

    @property
    def held_bytes(self) -> int:
        return self.promised_bytes if self.measured_bytes is None else self.measured_bytes

    @property
    def drift_bytes(self) -> int:
        """Measured − promised; positive: it takes more than it was promised."""
        return self.held_bytes - self.promised_bytes


@dataclass(frozen=True, slots=True)
class DeviceBooks:
    """The account of one device."""

    device: str
    budget_bytes: int
    held_bytes: int
    free_bytes: int
    entries: tuple[Entry, ...]


class Ledger:
    """The only accountant of device memory. Invariant: no device holds more than its budget.

    A booking that would exceed a budget raises DoesNotFit with the numbers and changes nothing.
    """

    def __init__(self, budgets: Mapping[str, int]) -> None:
        self._budgets = dict(budgets)
        self._held = dict.fromkeys(budgets, 0)
        self._entries: dict[str, Entry] = {}

    def book(self, host: str, device: str, promised_bytes: int) -> None:
        """Promise bytes to a host; replaces what it held before. Raises DoesNotFit."""
        old = self._entries.get(host)
        if old is not None and old.device != device:
            raise DoesNotFit(f"{host} holds {old.held_bytes} bytes on {old.device}, cannot book on {device} too")
        self._set(Entry(host, device, promised_bytes, None, old.residual_bytes if old else 0))

    def settle(self, host: str, measured_bytes: int, *, residual: bool = False) -> None:
        """Replace a promise by what was measured. Raises DoesNotFit (the promise then stays).

        ``residual``: measured while asleep. The promise is then cut to it: what sleeping freed is free.
        """
        new = replace(self._entries[host], measured_bytes=measured_bytes)
        if residual:
            new = replace(new, promised_bytes=measured_bytes, residual_bytes=measured_bytes)
        self._set(new)

    def saw(self, host: str, seen_bytes: int) -> None:
        """For people: what the process really holds now."""
        self._entries[host] = replace(self._entries[host], seen_bytes=seen_bytes)

    def release(self, host: str) -> int:
        """Forget a host whose process is gone; the bytes it held (0 if it held none)."""
        entry = self._entries.pop(host, None)
        if entry is None:
            return 0
        self._held[entry.device] -= entry.held_bytes
        return entry.held_bytes

    def held_bytes(self, host: str) -> int:
        entry = self._entries.get(host)
        return 0 if entry is None else entry.held_bytes

    def has(self, host: str) -> bool:
        return host in self._entries

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self._budgets)

    def budget_bytes(self, device: str) -> int:
        return self._budgets[device]

    def free_bytes(self, device: str) -> int:
        return self._budgets[device] - self._held[device]

    def books(self) -> tuple[DeviceBooks, ...]:
        return tuple(
            DeviceBooks(
                device,
                budget,
                self._held[device],
                self.free_bytes(device),
                tuple(entry for entry in self._entries.values() if entry.device == device),
            )
            for device, budget in self._budgets.items()
        )

    def check(self) -> None:
        """The invariant, recounted from the entries. AssertionError with the numbers."""
        for books in self.books():
            counted = sum(entry.held_bytes for entry in books.entries)
            assert counted == books.held_bytes, f"{books.device}: counted {counted}, kept {books.held_bytes}"
            assert counted <= books.budget_bytes, f"{books.device}: {counted} > budget {books.budget_bytes}"
            assert all(e.held_bytes >= 0 for e in books.entries), f"{books.device}: negative bytes {books.entries}"

    def _set(self, entry: Entry) -> None:
        before = self.held_bytes(entry.host)
        after = self._held[entry.device] - before + entry.held_bytes
        budget = self._budgets[entry.device]
        # Shrinking is always allowed: it can only bring a device nearer to its budget.
        if entry.held_bytes < 0 or (after > budget and entry.held_bytes > before):
            raise DoesNotFit(
                f"{entry.host} asks for {entry.held_bytes} bytes on {entry.device}: budget {budget}, "
                f"free {self.free_bytes(entry.device)}, it holds {before}"
            )
        self._entries[entry.host] = entry
        self._held[entry.device] = after
