"""Owns the client's side of ``bench matrix``: what is sent over HTTP, when the answers came, and in which order."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.bench import matrix
from orchestrator.bench.matrix import Cell, CellResult, Failure, Grid, Ruler, Turn
from policies.errors import ConfigError, NotReachable, OrchestratorError

REQUEST_SECONDS = 600.0
LOAD_SECONDS = 600.0  # how long a model may take to become ready, before anything is timed
WAIT_SECONDS = 1.0
WORTH_WAITING = (
    "model_loading", "swap_budget_exceeded", "queue_full", "tenant_limit", "host_unavailable", "capacity_pinned",
)  # fmt: skip
PROBE_WORDS = (8, 40)
SCRAPE_SECONDS = 0.4
REMOVED_AT_ONCE = 8
STALE_SECONDS = 1.2  # hosts report once a second: what is read earlier may be of the cell before

Messages = list[dict[str, str]]
OnCell = Callable[[str, Cell, CellResult | None], None]  # None: it begins


@dataclass(frozen=True, slots=True)
class Access:
    """The service to drive. Sessions can be removed only with an admin key and the tenant's name."""

    url: str
    key: str
    tenant: str | None
    admin_key: str | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run brought: results, models that could not be measured and why, sessions that could not be removed."""

    results: list[CellResult]
    failed: dict[str, str]
    left_sessions: int


class Client:
    """HTTP as a client of the service speaks it."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._http = httpx.AsyncClient(
            base_url=access.url,
            headers={"Authorization": f"Bearer {access.key}"},
            timeout=REQUEST_SECONDS,
            limits=httpx.Limits(max_connections=None),  # a cell's sessions never wait for each other here
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def windows(self) -> dict[str, int | None]:
        """The service's models in its order, each with its window in tokens; None when it does not say."""
        try:
            response = await self._http.get("/v1/models")
            body = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise NotReachable(f"the service at {self._access.url} does not answer: {error}") from error
        if response.is_error:
            raise OrchestratorError(_failure(response.status_code, response.content).message)
        return {model["id"]: model.get("context_length") for model in body["data"]}

    async def turn(self, model: str, session: str | None, messages: Messages, tokens: int) -> Turn:
        """One streamed, greedy turn whose answer has exactly so many tokens. NotReachable when nobody listens."""
        body = {
            "model": model, "messages": messages, "temperature": 0, "max_tokens": tokens, "min_tokens": tokens,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        headers = {} if session is None else {"X-Session-ID": session}
        begin = time.perf_counter()
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                if response.is_error:
                    return Turn(failure=_failure(response.status_code, await response.aread()))
                return await _read(response, begin)
        except httpx.ConnectError as error:
            raise NotReachable(f"the service at {self._access.url} does not answer: {error}") from error
        except httpx.TransportError as error:
            return Turn(failure=Failure(0, type(error).__name__, str(error)))

    async def kv_use(self, model: str) -> float | None:
        """KV blocks in use ÷ blocks there are, of the model's fullest host; None when /metrics does not say."""
        try:
            text = (await self._http.get("/metrics")).text
        except httpx.TransportError:
            return None
        blocks: dict[str, dict[str, float]] = {"orchestrator_kv_blocks_used": {}, "orchestrator_kv_blocks": {}}
        for family in text_string_to_metric_families(text):
            for sample in family.samples if family.name in blocks else ():
                if sample.labels["model"] == model:
                    blocks[family.name][sample.labels["host"]] = sample.value
        used, there = blocks.values()
        return max((used[host] / count for host, count in there.items() if count and host in used), default=None)

    async def remove(self, session: str) -> bool:
        """Delete a session; whether it is gone."""
        if self._access.tenant is None or self._access.admin_key is None:
            return False
        path = f"/admin/sessions/{self._access.tenant}/{session}"
        try:
            answer = await self._http.delete(path, headers={"Authorization": f"Bearer {self._access.admin_key}"})
        except httpx.TransportError:
            return False
        return answer.is_success or _failure(answer.status_code, answer.content).code == "session_not_found"


async def _read(response: httpx.Response, begin: float) -> Turn:
    """A streamed answer, as it comes."""
    stamps: list[float] = []
    usage: dict[str, Any] = {}
    finished = False
    async for event in _events(response):
        if "error" in event:
            return Turn(failure=Failure(0, event["error"]["code"], event["error"]["message"]))
        for choice in event["choices"]:
            if choice["delta"].get("content"):
                stamps.append(time.perf_counter())
            finished = finished or choice["finish_reason"] is not None
        usage = event.get("usage") or usage
    if not finished:
        return Turn(failure=Failure(0, "stream_ended", "the stream ended without a finish_reason"))
    return Turn(
        ttft_seconds=stamps[0] - begin if stamps else None,
        gaps_seconds=tuple(later - earlier for earlier, later in itertools.pairwise(stamps)),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        completion_tokens=usage["completion_tokens"],
        cut="x-context-truncated" in response.headers,
    )


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield orjson.loads(line.removeprefix("data: "))


def _failure(status: int, content: bytes) -> Failure:
    try:
        error = orjson.loads(content)["error"]
        return Failure(status, str(error["code"]), str(error["message"]))
    except (ValueError, KeyError, TypeError):  # a proxy's own answer
        return Failure(status, f"http_{status}", content[:200].decode(errors="replace"))


# -- in which order ---------------------------------------------------------------------------


class Run:
    """One measuring of a service.

    Args:
        seed: of all texts and session names; a new one for each run, else it would reuse the KV of an earlier one.
    """

    def __init__(self, client: Client, grid: Grid, seed: str, on_cell: OnCell) -> None:
        self._client = client
        self._grid = grid
        self._seed = seed
        self._on_cell = on_cell
        self._names = (f"bench-{seed}-{number}" for number in itertools.count())  # of sessions
        self.left_sessions = 0

    async def model(self, name: str, window_tokens: int | None) -> list[CellResult]:
        """The whole grid of one model; OrchestratorError when it cannot be made ready."""
        ruler = await self._ruler(name, window_tokens)
        results = []
        for cell in self._grid.cells():
            self._on_cell(name, cell, None)
            results.append(await self._cell(name, cell, ruler))
            self._on_cell(name, cell, results[-1])
        return results

    async def _ruler(self, model: str, window_tokens: int | None) -> Ruler:
        """Makes the model ready, and learns how many tokens its words are."""
        system = True
        seed = f"{self._seed}/{model}/probe"
        first = await self._ready(model, matrix.opening(seed, PROBE_WORDS[0], system))
        if first.failure is not None and first.failure.status == 400:  # some templates take no system message
            system = False
            first = await self._ready(model, matrix.opening(seed, PROBE_WORDS[0], system))
        second = await self._ready(model, matrix.opening(f"{seed}/2", PROBE_WORDS[1], system))
        for turn in (first, second):
            if turn.failure is not None:
                raise OrchestratorError(f"{model}: {turn.failure.message}")
        probes = list(zip(PROBE_WORDS, (first.prompt_tokens, second.prompt_tokens), strict=True))
        return matrix.ruler(probes, window_tokens, system)

    async def _ready(self, model: str, messages: Messages) -> Turn:
        deadline = time.monotonic() + LOAD_SECONDS
        while True:
            turn = await self._client.turn(model, None, messages, 1)
            if turn.failure is None or turn.failure.code not in WORTH_WAITING or time.monotonic() > deadline:
                return turn
            await asyncio.sleep(WAIT_SECONDS)

    async def _cell(self, model: str, cell: Cell, ruler: Ruler) -> CellResult:
        """Rounds of ``cell.concurrency`` sessions at once; the sessions are removed afterwards, whatever happened."""
        if not ruler.fits(cell, self._grid.max_tokens):
            return matrix.too_long(model, cell)
        turns: list[Turn] = []
        sessions: list[str] = []
        seen: list[float] = []
        begin = time.monotonic()
        scraping = asyncio.create_task(self._scrape(model, seen))
        try:
            while True:
                fresh = [next(self._names) for _ in range(cell.concurrency)]
                sessions += fresh
                rounds = await asyncio.gather(*(self._session(model, cell, ruler, name) for name in fresh))
                turns += [turn for each in rounds for turn in each]
                seconds = time.monotonic() - begin
                if seconds >= self._grid.cell_seconds or not any(each[0].failure is None for each in rounds):
                    return matrix.summed(model, cell, turns, seconds, max(seen, default=None))
        finally:
            scraping.cancel()
            await self._remove(sessions)

    async def _session(self, model: str, cell: Cell, ruler: Ruler, name: str) -> list[Turn]:
        """Its turns, one after the other; a turn without an answer is the last: what would follow is other work."""
        turns: list[Turn] = []
        for number in range(cell.turns):
            seed = f"{name}/{number}"
            messages = matrix.follow_up(seed)
            if number == 0:
                messages = matrix.opening(seed, ruler.words(cell.length_tokens), ruler.system)
            turns.append(await self._client.turn(model, name, messages, self._grid.max_tokens))
            if turns[-1].failure is not None:
                break
        return turns

    async def _scrape(self, model: str, seen: list[float]) -> None:
        await asyncio.sleep(STALE_SECONDS)
        while True:
            use = await self._client.kv_use(model)
            if use is not None:
                seen.append(use)
            await asyncio.sleep(SCRAPE_SECONDS)

    async def _remove(self, sessions: Sequence[str]) -> None:
        for begin in range(0, len(sessions), REMOVED_AT_ONCE):
            some = sessions[begin : begin + REMOVED_AT_ONCE]
            gone = await asyncio.gather(*(self._client.remove(session) for session in some))
            self.left_sessions += gone.count(False)


async def run(access: Access, grid: Grid, wanted: str | None, first_only: bool, seed: str, on_cell: OnCell) -> Outcome:
    """One grid for each model that is wanted; a model that cannot be made ready does not keep the others from it."""
    async with Client(access) as client:
        windows = await client.windows()
        if wanted is not None and wanted not in windows:
            raise ConfigError(f"model {wanted!r} is not one of {', '.join(windows)}")
        names = [wanted] if wanted is not None else list(windows)[: 1 if first_only else None]
        measuring = Run(client, grid, seed, on_cell)
        results, failed = [], {}
        for name in names:
            try:
                results += await measuring.model(name, windows[name])
            except NotReachable:
                raise
            except OrchestratorError as error:
                failed[name] = error.message
        return Outcome(results, failed, measuring.left_sessions)
