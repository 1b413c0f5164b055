"""Owns the configuration: one YAML file, parsed once, frozen, handed down in slices. Environment is read here only.

Precedence: flag > environment (``ORCHESTRATOR_HTTP__PORT=8001``) > file > default.
"""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from policies.errors import ConfigError
from policies.registry import ORDERING, RESIDENCY
from policies.types import Tier

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class Section(BaseModel):
    """A part of the config: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _tier(value: object) -> object:
    if isinstance(value, str):
        try:
            return Tier.parse(value)
        except KeyError:
            raise ValueError(f"unknown tier {value!r}; one of {', '.join(t.name.lower() for t in Tier)}") from None
    return value


UserPath = Annotated[Path, AfterValidator(Path.expanduser)]
TierField = Annotated[Tier, BeforeValidator(_tier)]


class HttpConfig(Section):
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=1, le=65535, description="port to listen on")
    stream_hold_seconds: float = Field(5.0, ge=0, description="no header is sent before this or the first token")
    deadline_seconds: float = Field(120.0, gt=0, description="longest wait for the first token")
    busy_session_seconds: float = Field(2.0, ge=0, description="how long a turn waits for another of its session")
    max_body: ByteSize = Field(ByteSize(8 * 2**20), description="bytes of one request's body; more is a 413")
    gateways: int = Field(1, ge=1, description="gateway replicas")


class RedisConfig(Section):
    """See docs/sessions.md for what an acknowledged turn survives."""

    url: str | None = Field(None, description="none: a private redis-server is started in state_dir")
    appendfsync: Literal["always", "everysec", "no"] = Field(
        "always", description="of the private server; docs/sessions.md says what less costs"
    )
    replicas: int = Field(0, ge=0, description="so many replicas must have a turn before it is acknowledged")


class RayConfig(Section):
    address: str | None = Field(None, description="a running cluster; none: one is started on its own ports")
    num_cpus: int | None = Field(None, ge=1, description="that the private cluster claims to have; none: all")


class DeviceConfig(Section):
    """One memory that contexts compete for."""

    name: str = Field(pattern=NAME, description="as it appears in ps and metrics")
    kind: Literal["cpu", "cuda"] = Field("cpu", description="cuda is not built yet")
    index: int = Field(0, ge=0, description="of a CUDA device")
    memory: ByteSize = Field(description="bytes that all hosts on it may hold together")


class FakeConfig(Section):
    """The fake engine's behaviour; see engine.fake.FakeSettings."""

    load_seconds: float = 0.0
    wake_seconds: float = 0.0
    step_seconds: float = 0.0
    prefill_seconds_per_token: float = 0.0
    kv_capacity_tokens: int = 65_536
    weight_bytes: ByteSize = ByteSize(64 * 2**20)
    kv_bytes: ByteSize = ByteSize(64 * 2**20)
    residual_bytes: ByteSize = ByteSize(32 * 2**20)
    reply_words: int = 8
    load_error: str = ""
    wake_error: str = ""
    nan_at_token: int = 0
    die_at_token: int = 0


class ModelConfig(Section):
    name: str = Field(pattern=NAME, description="what requests call it")
    source: str = Field(description="demo:NAME, a directory, a .gguf file, a hub id (owner/name[@revision]), or 'fake'")
    memory: ByteSize = Field(description="bytes its host may hold when resident: process, weights, peak and KV pool")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="of weights and KV")
    max_model_len: int = Field(4096, ge=16, description="tokens of prompt and answer together")
    default_max_tokens: int = Field(512, ge=1, description="answer tokens when the request names no limit")
    block_size: int = Field(16, ge=1, le=256, description="tokens in one KV block")
    step_tokens: int = Field(256, ge=16, description="most tokens computed in one step")
    prompt_step_tokens: int = Field(512, ge=0, description="most when nobody decodes; never fewer than step_tokens")
    max_running: int = Field(16, ge=1, description="most generations in one step")
    max_waiting: int = Field(256, ge=1, description="most generations waiting in the engine, and for the model")
    ordering: str = Field("priority", description="who runs first: priority (tier, then arrival), fcfs or sjf")
    compile_layers: bool = Field(
        True, description="on the CPU: attention and products at the first load, layers by another process"
    )
    kv_host: ByteSize = Field(ByteSize(0), description="of memory: for KV that left the device")
    replicas: int = Field(1, ge=1, le=64, description="hosts; those after the first only when bytes are to spare")
    aliases: tuple[Annotated[str, Field(pattern=NAME)], ...] = Field((), description="other names for it in requests")
    pinned: bool = Field(False, description="never evicted for another model")
    preload: bool = Field(False, description="loaded at start; displaced, it returns when the others are idle")
    keep_alive_seconds: float | None = Field(
        None, ge=0, description="idle for so long, it is put to sleep; none: never"
    )
    min_resident_seconds: float | None = Field(None, ge=0, description="instead of pool.min_resident_seconds")
    chat_template: str | None = Field(None, description="jinja2 text; none: the model's own, else a plain fallback")
    load_timeout_seconds: float = Field(600.0, gt=0, description="for a load or a wake")
    fake: FakeConfig | None = None

    @model_validator(mode="after")
    def _fake_needs_source(self) -> ModelConfig:
        if self.kv_host >= self.memory:
            raise ValueError(f"kv_host: {int(self.kv_host)} bytes are part of memory, and it has {int(self.memory)}")
        if self.ordering not in ORDERING.names:
            raise ValueError(f"ordering: {self.ordering!r} is not one of {', '.join(ORDERING.names)}")
        if self.fake is not None and self.source != "fake":
            raise ValueError("'fake' settings need source: fake")
        return self


class TenantConfig(Section):
    name: str = Field(pattern=NAME, description="owns its sessions and its KV namespace")
    tier: TierField = Field(Tier.STANDARD, description="interactive, standard or batch")
    key_sha256: tuple[str, ...] = Field((), description="hex sha256 of each API key; keys are never stored")
    demo_key: str | None = Field(None, description="a key in plain text; only while http.host is loopback")
    max_concurrent: int = Field(64, ge=1, description="requests in flight")
    max_reserved_tokens: int = Field(1_000_000, ge=1, description="prompt + max_tokens over requests in flight")
    kv_pin: ByteSize = Field(ByteSize(0), description="KV that prompt_cache_retention may pin, in each host")
    session_ttl_seconds: int | None = Field(None, ge=60, description="instead of sessions.ttl_seconds")
    admin: bool = Field(False, description="may use /admin")

    @property
    def key_hashes(self) -> tuple[str, ...]:
        return self.key_sha256 + ((hash_key(self.demo_key),) if self.demo_key else ())


class KVDiskConfig(Section):
    """KV below host memory, shared by all models of a node."""

    size: ByteSize = Field(ByteSize(0), description="bytes of disk for KV; 0: none")
    directory: UserPath | None = Field(None, description="on a local disk, for this service alone; none: in state_dir")


class SessionConfig(Section):
    ttl_seconds: int = Field(7 * 86_400, ge=60, description="sliding; of every key of a session")
    lease_seconds: float = Field(9.0, ge=1, description="of one turn; renewed at a third of it")
    window_items: int = Field(4096, ge=2, description="newest items read for a turn, at most")
    max_item: ByteSize = Field(ByteSize(2**20), description="of text in one item")


class PoolConfig(Section):
    policy: str = Field("lru", description="who holds memory; lru is the one there is")
    min_resident_seconds: float = Field(1.0, ge=0, description="a ready model is not evicted earlier")
    reclaim_after_seconds: float = Field(60.0, ge=0, description="others idle for so long: a displaced preload returns")
    ticket_seconds: float = Field(10.0, gt=0, description="a placed request must arrive at its host within")
    background_load: bool = Field(True, description="a cold model loads asleep beside those whose place it will take")
    prepared_hosts: int = Field(1, ge=0, description="on each device: empty processes that make cold loads shorter")
    cooldown_seconds: float = Field(10.0, ge=0, description="after a failed load; doubles up to 16 times this")


class TierConfig(Section):
    deadline_seconds: float | None = Field(
        None, gt=0, description="longest wait for the first token; none: http.deadline_seconds"
    )


class TiersConfig(Section):
    interactive: TierConfig = TierConfig()
    standard: TierConfig = TierConfig()
    batch: TierConfig = TierConfig()


class Config(Section):
    """The whole configuration."""

    state_dir: UserPath = Field(
        default_factory=lambda: _xdg("XDG_STATE_HOME", ".local/state"), description="sessions, logs, secrets"
    )
    cache_dir: UserPath = Field(default_factory=lambda: _xdg("XDG_CACHE_HOME", ".cache"), description="prepared models")
    http: HttpConfig = HttpConfig()
    redis: RedisConfig = RedisConfig()
    ray: RayConfig = RayConfig()
    sessions: SessionConfig = SessionConfig()
    kv_disk: KVDiskConfig = KVDiskConfig()
    pool: PoolConfig = PoolConfig()
    tiers: TiersConfig = TiersConfig()
    devices: tuple[DeviceConfig, ...] = Field(min_length=1)
    models: tuple[ModelConfig, ...] = Field(min_length=1)
    tenants: tuple[TenantConfig, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        for kind, names in (
            ("device", [d.name for d in self.devices]),
            ("model", [name for m in self.models for name in (m.name, *m.aliases)]),
            ("tenant", [t.name for t in self.tenants]),
        ):
            twice = sorted({n for n in names if names.count(n) > 1})
            if twice:
                raise ValueError(f"{kind} names must be unique; twice: {', '.join(twice)}")
        hashes = [h for t in self.tenants for h in t.key_hashes]
        if len(set(hashes)) != len(hashes):
            raise ValueError("two tenants share an API key")
        cuda = [d.name for d in self.devices if d.kind == "cuda"]
        if cuda:
            raise ValueError(f"device {', '.join(cuda)}: kind cuda is not built yet; use kind: cpu")
        if self.pool.policy not in RESIDENCY.names:
            raise ValueError(f"pool.policy: {self.pool.policy!r} is not one of {', '.join(RESIDENCY.names)}")
        demo = [t.name for t in self.tenants if t.demo_key]
        if demo and not is_loopback(self.http.host):
            raise ValueError(
                f"demo_key of {', '.join(demo)}: only allowed while http.host is loopback, not {self.http.host}"
            )
        return self

    def deadline_seconds(self, tier: Tier) -> float:
        """How long a request of this tier waits for its first token."""
        own: TierConfig = getattr(self.tiers, tier.name.lower())
        return self.http.deadline_seconds if own.deadline_seconds is None else own.deadline_seconds

    @property
    def kv_directory(self) -> Path:
        return self.kv_disk.directory or self.state_dir / "kv"

    def canonical(self, name: str) -> str:
        """A model's own name, of an alias; anything else as it is."""
        return next((model.name for model in self.models if name in model.aliases), name)

    def model(self, name: str) -> ModelConfig:
        return next(m for m in self.models if m.name == name)

    def tenant(self, name: str) -> TenantConfig:
        return next(t for t in self.tenants if t.name == name)


class _Environment(Config, BaseSettings):
    """Only tells pydantic-settings which variables there are."""

    model_config = SettingsConfigDict(env_prefix="ORCHESTRATOR_", env_nested_delimiter="__")


def load_config(path: Path, flags: dict[str, Any] | None = None) -> Config:
    """Read, merge and check; ConfigError (exit code 2) with every problem in one line each.

    Args:
        flags: nested values that win over environment and file, e.g. ``{"http": {"port": 8001}}``.
    """
    try:
        raw = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: the top level must be a mapping")
    environment = EnvSettingsSource(_Environment)()
    try:
        return Config.model_validate(_merge(_merge(raw, environment), flags or {}))
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(map(_explain, _causes(error)))) from error


def named_by_environment() -> Path:
    """The file that ORCHESTRATOR_CONFIG names; for starts without a command line."""
    path = os.environ.get("ORCHESTRATOR_CONFIG")
    if path is None:
        raise ConfigError("ORCHESTRATOR_CONFIG names no config file")
    return Path(path)


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _xdg(variable: str, fallback: str) -> Path:
    base = os.environ.get(variable)
    return (Path(base) if base else Path.home() / fallback) / "context-orchestrator"


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return merged


def _causes(error: ValidationError) -> list[Any]:
    """The problems, without those that only follow from others: a list has no item left when its one item is wrong."""
    problems = error.errors()
    inside = {problem["loc"][0] for problem in problems if len(problem["loc"]) > 1}
    return [p for p in problems if not (p["type"] == "too_short" and p["loc"][0] in inside)]


def _explain(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or "config"
    if problem["type"] != "extra_forbidden":
        return f"{where}: {problem['msg']}"
    known = sorted(_fields_at(problem["loc"][:-1]))
    near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"{where}: unknown key; {hint}"


def _fields_at(location: tuple[Any, ...]) -> list[str]:
    model: Any = Config
    for part in location:
        if isinstance(part, str):
            model = section_of(model.model_fields[part].annotation)
    return list(model.model_fields)


def section_of(annotation: Any) -> Any:
    """The Section inside ``Section``, ``Section | None`` or ``tuple[Section, ...]``; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for found in map(section_of, getattr(annotation, "__args__", ())) if found is not None), None)
