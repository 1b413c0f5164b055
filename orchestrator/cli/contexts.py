"""Owns ``contexts``: which generation holds how much of an engine's memory, and what the others wait for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from engine.snapshot import ContextSnapshot, EngineSnapshot
from orchestrator.cli.app import app
from orchestrator.cli.block_map import OTHERS, PLACES, WORDS, BlockMap, draw
from orchestrator.cli.common import JsonOption, KeyOption, UrlOption, admin, out, size
from orchestrator.contexts import HostContexts, parse

WATCH_SECONDS = 1.0
TABLE_WIDTH = 190  # characters; a narrower terminal wraps lines, which is better than words cut off
COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan", "bright_red", "bright_green", "bright_yellow",
           "bright_blue", "bright_magenta", "bright_cyan")  # fmt: skip
COLUMNS = ("ID", "REQUEST", "SESSION", "TENANT", "STATE", "TOKENS", "CACHED", "RECOMPUTED", "BLOCKS", "MIB", "IN-STATE",
           "WAITS-FOR")  # fmt: skip


@app.command(epilog="Example: orchestrator contexts gemma-3-270m --watch")
def contexts(
    model: Annotated[str | None, typer.Argument(help="Only its hosts; none: all hosts that live.")] = None,
    block_map: Annotated[bool, typer.Option("--map/--no-map", help="Draw the KV pool, block by block.")] = True,
    watch: Annotated[bool, typer.Option("--watch", help="Again every second, until Ctrl-C.")] = False,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Who holds KV memory, who waits for it and for what, and how the last ones ended.

    TOKENS: computed/known of at most. MIB: held/expected at most; a block held by several counts for each.
    """
    if as_json and watch:
        raise typer.BadParameter("--json and --watch do not go together")

    def ask() -> Any:
        return admin("GET", "/admin/contexts" + (f"?model={quote(model)}" if model else ""), url, key)

    if as_json:
        out.print_json(data=ask())
    elif watch:
        _watch(lambda: _picture(parse(ask()), block_map))
    else:
        _console().print(_picture(parse(ask()), block_map))


def _watch(picture: Any) -> None:
    console = _console()
    try:
        if not console.is_terminal:
            while True:
                console.print(picture())
                time.sleep(WATCH_SECONDS)
        with Live(picture(), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(WATCH_SECONDS)
                live.update(picture(), refresh=True)
    except KeyboardInterrupt:
        return


def _console() -> Console:
    return Console(width=max(out.width, TABLE_WIDTH), highlight=False)


# -- one host ----------------------------------------------------------------------


def _picture(hosts: Sequence[HostContexts], with_map: bool) -> RenderableType:
    if not hosts:
        return Text("no engine host lives; 'orchestrator load MODEL' starts one")
    return Group(*(part for host in hosts for part in _host(host, with_map)))


def _host(host: HostContexts, with_map: bool) -> Iterator[RenderableType]:
    snapshot = host.snapshot
    if snapshot is None:
        yield Text(f"{host.host} ({host.state}): {host.error}\n", style="yellow")
        return
    yield Text(f"{host.host} ({host.state}): {_summary(snapshot)}", style="bold")
    drawn = draw(snapshot.blocks, max(20, out.width))
    if snapshot.contexts:
        yield _table(snapshot.contexts, drawn.letters if with_map else {})
    if snapshot.ended:
        ended = Counter(one.how for one in snapshot.ended)
        said = ", ".join(f"{count} {how}" for how, count in ended.most_common())
        yield Text(f"the last {len(snapshot.ended)} ended: {said}")
    if with_map:
        yield from _map(snapshot, drawn)
    yield Text("")


def _summary(snapshot: EngineSnapshot) -> str:
    pool, host = snapshot.pool, snapshot.host
    states = ", ".join(f"{count} {state}" for state, count in snapshot.states.items()) or "no context"
    said = f"{states}; {pool.total} blocks of {_mib(snapshot.block_bytes)} MiB: {pool.held} held, "
    said += f"{pool.cached} cached" + (f" ({pool.pinned} of them pinned)" if pool.pinned else "")
    said += f", {pool.free - pool.cached} free, {pool.fenced} fenced"
    if pool.retired:
        said += f", {pool.retired} retired"
    if host.total:
        said += f"; host memory: {host.used} of {host.total} blocks, {host.moved_out} moved out, {host.moved_in} in"
    disk = snapshot.disk
    if disk.capacity_bytes or disk.problem:
        said += f"; disk: {size(disk.used_bytes)} of {size(disk.capacity_bytes)}, {disk.written} blocks written, "
        said += f"{disk.fetched} fetched" + (f", OUT OF USE: {disk.problem}" if disk.problem else "")
    if snapshot.unfreed_blocks:
        said += f"; {snapshot.unfreed_blocks} UNFREED"
    return said


def _table(found: Sequence[ContextSnapshot], letters: dict[int, str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, no_wrap=name not in ("SESSION", "WAITS-FOR"), overflow="fold")
    for context in found:
        letter = letters.get(context.context_id, "")
        table.add_row(
            Text(f"{context.context_id} {letter}", style=_style(letter)),
            context.request_id + (f"/{context.generation}" if context.generation else ""),
            context.session or "",
            context.tenant,
            context.state + (f" ({context.preemptions}× preempted)" if context.preemptions else ""),
            f"{context.computed_tokens}/{context.tokens} of {context.max_token_limit}",
            str(context.cached_tokens),
            str(context.recomputed_tokens),
            f"{context.blocks_held}" + (f" ({context.blocks_shared} shared)" if context.blocks_shared else ""),
            f"{_mib(context.memory_bytes)}/{_mib(context.estimated_memory_bytes)}",
            f"{context.state_seconds:.1f} s",
            f"{context.wait.position}. {context.wait.said}" if context.wait else "",
        )
    return table


def _map(snapshot: EngineSnapshot, drawn: BlockMap) -> Iterator[RenderableType]:
    if set(drawn.counts) <= {PLACES["free"]}:
        yield Text("the pool is empty")
        return
    for line in drawn.lines:
        text = Text(no_wrap=True)
        for mark in line:
            text.append(mark, style=_style(mark))
        yield text
    if drawn.blocks_per_character > 1:
        yield Text(f"one character: {drawn.blocks_per_character} blocks, what most of them are")
    parts = [f"{mark} {WORDS[mark]} {drawn.counts[mark]}" for mark in WORDS if mark in drawn.counts]
    requests = {context.context_id: context.request_id for context in snapshot.contexts}
    lettered = {owner: mark for owner, mark in drawn.letters.items() if mark != OTHERS}
    parts += [f"{mark} {owner} {requests[owner]}" for owner, mark in lettered.items()]
    if len(lettered) < len(drawn.letters):
        parts.append(f"{OTHERS} {len(drawn.letters) - len(lettered)} others")
    yield Text("   ".join(parts))


def _style(mark: str) -> str:
    if mark in WORDS:
        return {"!": "bold red", "*": "bold"}.get(mark, "dim")
    return COLOURS[ord(mark) % len(COLOURS)] if mark else ""


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f}" if count < 10 * 2**20 else size(count).removesuffix(" MiB")
