"""Owns ``bench matrix`` but for its I/O: the grid, the texts, what the turns of a cell add up to, how two runs compare.

Everything here is pure: what is sent and timed is in ``drive``, the picture in ``heatmap``.
"""

from __future__ import annotations

import json
import math
import random
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from policies.errors import ConfigError

WORSE = 1.25  # a cell is marked when its first token is so many times later, or its tokens/s so many times fewer
MORE_FAILED = 0.1  # share of requests; less is chance
MEASURED, TOO_LONG = "measured", "too long"
TOO_LONG_CODES = ("context_length_exceeded", "request_too_large")  # the window, the whole KV pool
REFUSED_STATUS = (409, 429, 503)
FOLLOW_UP_WORDS = 8
NAME_LETTERS = 6
# of one length, and common, so that a tokenizer gives each about as many tokens as any other
_TEXT = (
    "able army away baby back ball band bank base bath bear beat bell bird blue boat body bone book born both call "
    "calm card care case city club coal coat code cold cook cool copy cost crew crop dark data date days deal deep "
    "door draw dust each earn east easy edge even face fact fair fall farm fast feel file fill film find fine fire "
    "firm fish five flat flow food foot form four free full game gift girl give goal gold good gray grow half hall hand"
)
WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid: so many sessions at once, each of so many turns, its first prompt of so many tokens."""

    concurrency: int
    length_tokens: int
    turns: int

    def __str__(self) -> str:
        return f"turns {self.turns}, tokens {self.length_tokens}, at once {self.concurrency}"


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured. A cell is repeated, with new sessions, until it has taken ``cell_seconds``."""

    concurrency: tuple[int, ...]
    lengths_tokens: tuple[int, ...]
    turns: tuple[int, ...]
    max_tokens: int
    cell_seconds: float

    def cells(self) -> Iterator[Cell]:
        for turns in self.turns:
            for length in self.lengths_tokens:
                for concurrency in self.concurrency:
                    yield Cell(concurrency, length, turns)


FULL = Grid((1, 4, 8), (128, 512, 2048), (1, 2, 4), max_tokens=32, cell_seconds=3.0)
QUICK = Grid((1, 2, 4), (32, 128, 512), (1, 2, 3), max_tokens=8, cell_seconds=2.5)


def numbers(text: str, option: str) -> tuple[int, ...]:
    """``"1,4,8"``, sorted, each once; ConfigError names what is no number of at least 1."""
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not (part.isascii() and part.isdecimal() and int(part) >= 1)]
    if wrong:
        raise ConfigError(
            f"{option} {text!r}: whole numbers of at least 1, separated by commas, are wanted; "
            f"not one: {', '.join(map(repr, wrong))}"
        )
    return tuple(sorted({int(part) for part in parts}))


# -- texts ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ruler:
    """How many tokens a model makes of our texts: those of the template, and those of each word."""

    template_tokens: float
    word_tokens: float
    window_tokens: int | None  # None: the service does not say
    system: bool  # whether the template takes a system message

    def words(self, tokens: int) -> int:
        """Words that make a prompt of about so many tokens; at least one."""
        return max(1, round((tokens - self.template_tokens) / self.word_tokens))

    def fits(self, cell: Cell, max_tokens: int) -> bool:
        """Whether the last turn's prompt and answer fit the window, as far as one can tell beforehand."""
        follow_up = self.template_tokens + FOLLOW_UP_WORDS * self.word_tokens
        wanted = cell.length_tokens + (cell.turns - 1) * follow_up + cell.turns * max_tokens
        return self.window_tokens is None or wanted <= self.window_tokens


def ruler(probes: Sequence[tuple[int, int]], window_tokens: int | None, system: bool) -> Ruler:
    """From two probes (words sent, prompt tokens counted)."""
    (few, few_tokens), (many, many_tokens) = probes
    per_word = max((many_tokens - few_tokens) / (many - few), 0.01)
    return Ruler(few_tokens - few * per_word, per_word, window_tokens, system)


def opening(seed: str, words: int, system: bool) -> list[dict[str, str]]:
    """The first turn's messages. Texts of two seeds share no prefix, so that no KV is reused between their sessions.

    The random system message stands in the place of a template's own, which all sessions would share.
    """
    source = random.Random(seed)
    name = "".join(source.choices(string.ascii_lowercase, k=NAME_LETTERS))
    user = {"role": "user", "content": " ".join(source.choices(WORDS, k=words))}
    return [{"role": "system", "content": name}, user] if system else [user]


def follow_up(seed: str) -> list[dict[str, str]]:
    """A later turn's message."""
    return [{"role": "user", "content": " ".join(random.Random(seed).choices(WORDS, k=FOLLOW_UP_WORDS))}]


# -- what the turns add up to -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a turn has no answer. ``status`` is 0 when it came after the headers."""

    status: int
    code: str
    message: str

    @property
    def refused(self) -> bool:
        return self.status in REFUSED_STATUS


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as the client saw it. A gap is the time between two pieces of text, which are a token each but for
    characters that several tokens make.
    """

    ttft_seconds: float | None = None
    gaps_seconds: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cut: bool = False  # the service left out older turns, for the window's sake
    failure: Failure | None = None

    @property
    def too_long(self) -> bool:
        return self.cut or (self.failure is not None and self.failure.code in TOO_LONG_CODES)


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell's figures; None where there is none. ``prompt_tokens`` and the like are sums over all turns."""

    model: str
    concurrency: int
    length_tokens: int
    turns: int
    status: str
    requests: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_p50_seconds: float | None = None
    ttft_p95_seconds: float | None = None
    gap_p50_seconds: float | None = None
    gap_p95_seconds: float | None = None
    tokens_per_second: float | None = None
    reuse_ratio: float | None = None
    kv_use_ratio: float | None = None
    refusals: Mapping[str, int] | None = None  # by code
    errors: Mapping[str, int] | None = None  # by code

    @property
    def cell(self) -> Cell:
        return Cell(self.concurrency, self.length_tokens, self.turns)

    @property
    def refused(self) -> int:
        return sum((self.refusals or {}).values())

    @property
    def failed_ratio(self) -> float:
        """Requests without an answer ÷ requests."""
        return (self.refused + sum((self.errors or {}).values())) / max(1, self.requests)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Interpolated linearly between the two nearest values; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = ordered[math.floor(place)]
    return low + (ordered[math.ceil(place)] - low) * (place - math.floor(place))


def summed(model: str, cell: Cell, turns: Sequence[Turn], seconds: float, kv_use_ratio: float | None) -> CellResult:
    """One cell's result; ``seconds`` is how long its turns took together, sessions side by side."""
    if any(turn.too_long for turn in turns):
        return too_long(model, cell)
    done = [turn for turn in turns if turn.failure is None]
    failures = [turn.failure for turn in turns if turn.failure is not None]
    firsts = [turn.ttft_seconds for turn in done if turn.ttft_seconds is not None]
    gaps = [gap for turn in done for gap in turn.gaps_seconds]
    prompt = sum(turn.prompt_tokens for turn in done)
    cached = sum(turn.cached_tokens for turn in done)
    completion = sum(turn.completion_tokens for turn in done)
    return CellResult(
        model=model,
        **asdict(cell),
        status=MEASURED,
        requests=len(turns),
        seconds=seconds,
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        ttft_p50_seconds=percentile(firsts, 50),
        ttft_p95_seconds=percentile(firsts, 95),
        gap_p50_seconds=percentile(gaps, 50),
        gap_p95_seconds=percentile(gaps, 95),
        tokens_per_second=completion / seconds if completion and seconds else None,
        reuse_ratio=cached / prompt if prompt else None,
        kv_use_ratio=kv_use_ratio,
        refusals=dict(Counter(failure.code for failure in failures if failure.refused)),
        errors=dict(Counter(failure.code for failure in failures if not failure.refused)),
    )


def too_long(model: str, cell: Cell) -> CellResult:
    return CellResult(model=model, **asdict(cell), status=TOO_LONG)


def table(results: Sequence[CellResult]) -> Table:
    """One model's results."""
    shown = Table(
        title=f"{results[0].model}: TTFT in s and gaps in ms (p50 / p95), tokens of the first prompt",
        box=None,
        pad_edge=False,
    )
    for name in ("TURNS", "TOKENS", "AT ONCE", "TTFT", "GAP", "TOKENS/S", "REUSE", "KV USE", "REFUSED, ERRORS"):
        shown.add_column(name, justify="right", no_wrap=True)
    for each in results:
        place = (str(each.turns), str(each.length_tokens), str(each.concurrency))
        if each.status == TOO_LONG:
            shown.add_row(*place, TOO_LONG)
            continue
        shown.add_row(
            *place,
            f"{_said(each.ttft_p50_seconds, '.3f')} / {_said(each.ttft_p95_seconds, '.3f')}",
            f"{_said(each.gap_p50_seconds, '.0f', 1000)} / {_said(each.gap_p95_seconds, '.0f', 1000)}",
            _said(each.tokens_per_second, ".1f"),
            _said(each.reuse_ratio, ".0%"),
            _said(each.kv_use_ratio, ".1%"),
            _counts({**(each.refusals or {}), **(each.errors or {})}),
        )
    return shown


def _said(value: float | None, form: str, factor: float = 1) -> str:
    return "–" if value is None else format(value * factor, form)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {code}" for code, count in sorted(counts.items()))


# -- against a saved run ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """One cell, new ÷ saved. ``worse`` is how many times worse: the first token later, or tokens/s fewer."""

    model: str
    concurrency: int
    length_tokens: int
    turns: int
    ttft_ratio: float | None
    tokens_per_second_ratio: float | None
    note: str = ""

    @property
    def worse(self) -> float:
        if self.note:
            return math.inf
        slower = 1 / self.tokens_per_second_ratio if self.tokens_per_second_ratio else 0.0
        return max(self.ttft_ratio or 0.0, slower)


def read_saved(path: Path, max_tokens: int) -> list[CellResult]:
    """The cells of a ``--save`` file; ConfigError when it is none, or was measured with another ``max_tokens``."""
    try:
        saved = json.loads(path.read_text())
        if saved["bench"] != "matrix":
            raise ConfigError(f"{path} is of bench {saved['bench']}, not matrix")
        cells, saved_tokens = [CellResult(**cell) for cell in saved["cells"]], saved["grid"]["max_tokens"]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no result of bench matrix: {error!r}") from error
    if saved_tokens != max_tokens:
        raise ConfigError(f"{path} was measured with max_tokens {saved_tokens}, not {max_tokens}: not comparable")
    return cells


def compare(new: Sequence[CellResult], saved: Sequence[CellResult]) -> list[Change]:
    """The cells that both runs measured."""
    before = {(each.model, each.cell): each for each in saved if each.status == MEASURED}
    pairs = [(each, before[each.model, each.cell]) for each in new if (each.model, each.cell) in before]
    return [
        Change(
            each.model,
            **asdict(each.cell),
            ttft_ratio=_ratio(each.ttft_p50_seconds, old.ttft_p50_seconds),
            tokens_per_second_ratio=_ratio(each.tokens_per_second, old.tokens_per_second),
            note=_broken(each, old),
        )
        for each, old in pairs
    ]


def change_table(changes: Sequence[Change]) -> Table:
    shown = Table("MODEL", title=f"new ÷ saved; marked: more than {WORSE} times worse", box=None, pad_edge=False)
    for name in ("TURNS", "TOKENS", "AT ONCE", "TTFT", "TOKENS/S", ""):
        shown.add_column(name, justify="right" if name else "left", no_wrap=True)
    for each in changes:
        shown.add_row(
            each.model,
            str(each.turns),
            str(each.length_tokens),
            str(each.concurrency),
            _said(each.ttft_ratio, ".2f"),
            _said(each.tokens_per_second_ratio, ".2f"),
            each.note or ("worse" if each.worse > WORSE else ""),
            style="red" if each.worse > WORSE else "",
        )
    return shown


def _ratio(new: float | None, old: float | None) -> float | None:
    return new / old if new is not None and old else None


def _broken(new: CellResult, old: CellResult) -> str:
    """What no ratio can say: fewer requests were answered, so that the figures are of other work."""
    if new.status == TOO_LONG:
        return "too long now"
    if new.failed_ratio > old.failed_ratio + MORE_FAILED:
        return f"{new.failed_ratio:.0%} of the requests failed, {old.failed_ratio:.0%} before"
    return ""
