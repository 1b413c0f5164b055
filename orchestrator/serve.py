"""Owns the composition: the only file that names concrete classes. Starts everything, stops everything.

``orchestrator serve`` runs ``Service``. On a cluster that is run by others (``serve deploy``, KubeRay) ``app`` builds
the same application from the config named by ORCHESTRATOR_CONFIG.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray
from filelock import FileLock, Timeout
from ray import serve

from engine.fake import FakeSettings
from engine.protocol import EngineLimits, Places
from model_pool import catalog
from model_pool.effects import HostRef, ModelSpec
from model_pool.host import NAMESPACE
from model_pool.host_words import HostSpec
from model_pool.slot import PoolSettings
from orchestrator.aggregator import start_aggregator
from orchestrator.cluster import PrivateCluster, check_port
from orchestrator.config import Config, ModelConfig, load_config, named_by_environment
from orchestrator.controller import close_hosts, get_controller
from orchestrator.gateway import Gateway, GatewayPlan
from orchestrator.pool_words import PoolPlan
from policies.errors import LoadFailed, NotReachable, OrchestratorError
from session_store.client import check_reachable
from session_store.embedded import EmbeddedRedis

APP = "orchestrator"
RESIDUAL_ESTIMATE_BYTES = 400 * 2**20  # of a sleeping host's process, until it is measured
Say = Callable[[str], None]
Prepared = dict[str, Path | OrchestratorError | None]


def prepare_models(config: Config, progress: Callable[[str, str, float], None]) -> Prepared:
    """The directory of each model, or why there is none: a broken model must not keep the others from serving."""
    prepared: Prepared = {}
    for model in config.models:
        try:
            prepared[model.name] = catalog.resolve(model.source, config.cache_dir, partial(progress, model.name))
        except LoadFailed as error:
            prepared[model.name] = error
        progress(model.name, "ready", 1.0)
    return prepared


def pool_plan(config: Config, prepared: Prepared, log_path: Path) -> PoolPlan:
    cooldown = config.pool.cooldown_seconds
    return PoolPlan(
        models=tuple(
            ModelSpec(
                model.name,
                int(model.memory),
                _residual_estimate(model),
                model.pinned,
                model.load_timeout_seconds,
                model.max_waiting,
                _problem(prepared[model.name]),
                model.replicas,
                model.preload,
                math.inf if model.keep_alive_seconds is None else model.keep_alive_seconds,
                model.min_resident_seconds,
                background=config.pool.background_load,
                preparable=model.source != "fake",
            )
            for model in config.models
        ),
        hosts=tuple((model.name, _host_spec(model, prepared[model.name], config)) for model in config.models),
        devices=tuple((d.name, int(d.memory), d.index if d.kind == "cuda" else None) for d in config.devices),
        policy=config.pool.policy,
        settings=PoolSettings(
            min_resident_seconds=config.pool.min_resident_seconds,
            reclaim_after_seconds=config.pool.reclaim_after_seconds,
            ticket_ttl_seconds=config.pool.ticket_seconds,
            cooldown_seconds=cooldown,
            cooldown_cap_seconds=16 * cooldown,
            prepared_hosts=config.pool.prepared_hosts,
        ),
        preload=tuple(model.name for model in config.models if model.preload),
        log_path=str(log_path),
        kv_disk=(str(config.kv_directory), int(config.kv_disk.size)) if config.kv_disk.size else None,
    )


def _problem(path: Path | OrchestratorError | None) -> str:
    return path.message if isinstance(path, OrchestratorError) else ""


def _residual_estimate(model: ModelConfig) -> int:
    return int(model.fake.residual_bytes) if model.fake is not None else RESIDUAL_ESTIMATE_BYTES


def _host_spec(model: ModelConfig, path: Path | OrchestratorError | None, config: Config) -> HostSpec:
    fake = None
    if model.source == "fake":
        fake = FakeSettings(**(model.fake.model_dump() if model.fake is not None else {}))
    return HostSpec(
        ref=HostRef(model.name, 0, 0),
        path=str(path) if isinstance(path, Path) else model.source,
        problem=_problem(path),  # should an admin ask for a load all the same
        memory_bytes=int(model.memory),
        limits=EngineLimits(
            max_model_len=model.max_model_len,
            block_size=model.block_size,
            step_tokens=model.step_tokens,
            prompt_step_tokens=model.prompt_step_tokens,
            max_running=model.max_running,
            max_waiting=model.max_waiting,
            ordering=model.ordering,
            kv_host_bytes=int(model.kv_host),
            kv_disk_bytes=int(config.kv_disk.size),
            kv_disk=str(config.kv_directory),
        ),
        dtype=model.dtype,
        places=Places(
            recipes=str(config.cache_dir / "recipes"),
            code=str(config.cache_dir / "layers") if model.compile_layers else "",
            cores=str(config.state_dir / "cores"),
        ),
        fake=fake,
        ticket_seconds=config.pool.ticket_seconds,
    )


def deploy(config: Config, prepared: Prepared, redis_url: str, log_path: Path) -> Any:
    """Start (or adopt) the controller and return the Serve application."""
    start_aggregator()
    plan = pool_plan(config, prepared, log_path)
    controller = get_controller(plan)
    ray.get(controller.start.remote())
    paths = tuple((name, str(path) if isinstance(path, Path) else None) for name, path in prepared.items())
    gateway_plan = GatewayPlan(config.model_dump_json(), redis_url, paths, str(log_path))
    return Gateway.options(  # type: ignore[attr-defined]
        num_replicas=config.http.gateways
    ).bind(gateway_plan)


class Service:
    """The whole service on this machine."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.log_path = config.state_dir / "orchestrator.log"
        self._run_file = config.state_dir / "run.json"
        self._lock = FileLock(config.state_dir / "serve.lock")
        self._kv_lock = FileLock(config.kv_directory / "service.lock")
        self._redis: EmbeddedRedis | None = None
        self._cluster: PrivateCluster | None = None

    @property
    def url(self) -> str:
        return f"http://{self.config.http.host}:{self.config.http.port}"

    def start(self, prepared: Prepared, say: Say) -> None:
        """Bring everything up; what was started is stopped again when a later part fails."""
        self.config.state_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise NotReachable(
                f"another service runs from {self.config.state_dir}; stop it, or choose another --state-dir"
            ) from None
        try:
            self._take_kv_directory()
            self._start(prepared, say)
        except BaseException:
            self.stop()
            raise

    def _take_kv_directory(self) -> None:
        """A second service on it would drop the KV of the first one's sessions, which it does not know."""
        if not self.config.kv_disk.size:
            return
        self.config.kv_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._kv_lock.acquire(timeout=0)
        except Timeout:
            raise NotReachable(
                f"another service keeps its KV in {self.config.kv_directory}; choose another kv_disk.directory"
            ) from None

    def watch(self, say: Say) -> None:
        """Look after what was started: Redis is started again on its port and file; without Ray there is no service."""
        if self._redis is not None and self._redis.pid is None:
            say("the private Redis had died; starting it again")
            before = self._redis.url
            self._redis.start()
            if self._redis.url != before:
                raise NotReachable("the private Redis could not be started again on its port")
        if self._cluster is not None and not self._cluster.alive:
            raise NotReachable(f"the Ray cluster has died; see {self.config.state_dir / 'ray.log'}")

    def stop(self) -> None:
        """End everything this service started."""
        try:
            if self._redis is not None and self._cluster is not None and not self._cluster.alive:
                self._redis.stop()  # first: Ray ends a driver whose cluster is gone
            if ray.is_initialized():
                if self._cluster is not None and self._cluster.alive:
                    close_hosts()
                ray.shutdown()
            if self._cluster is not None:
                self._cluster.stop()
        finally:
            if self._redis is not None:
                self._redis.stop()
        self._run_file.unlink(missing_ok=True)
        self._kv_lock.release()
        self._lock.release()

    def _start(self, prepared: Prepared, say: Say) -> None:
        config = self.config
        cluster = PrivateCluster(config.state_dir, config.ray.num_cpus)
        if config.ray.address is None:
            cluster.clean()  # an earlier life may still hold the port
        check_port(config.http.host, config.http.port)
        say("starting Redis" if config.redis.url is None else "connecting to Redis")
        redis_url = self._start_redis()
        say("starting Ray")
        address = config.ray.address
        if address is None:
            self._cluster = cluster
            cluster.start()
            address = cluster.address
        _connect(address)
        say("starting the controller and the gateway")
        application = deploy(config, prepared, redis_url, self.log_path)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # a clean console; Serve's own files have it all
        serve.start(http_options={"host": config.http.host, "port": config.http.port}, proxy_location="HeadOnly")
        try:
            serve.run(application, name=APP, route_prefix="/")
        except RuntimeError as error:
            raise OrchestratorError(f"the gateway did not start: {_last_words()}") from error
        self._write_run_file()

    def _start_redis(self) -> str:
        if self.config.redis.url is not None:
            check_reachable(self.config.redis.url)
            return self.config.redis.url
        self._redis = EmbeddedRedis(self.config.state_dir, appendfsync=self.config.redis.appendfsync)
        self._redis.start()
        return self._redis.url

    def _write_run_file(self) -> None:
        """Where the CLI finds this service; readable by us alone, since it may name an admin key."""
        admin = next((t.demo_key for t in self.config.tenants if t.admin and t.demo_key), None)
        content = {"url": self.url, "pid": os.getpid(), "admin_key": admin, "started": time.time()}
        partial = self._run_file.with_suffix(".partial")
        partial.touch(mode=0o600)
        partial.write_text(json.dumps(content))
        partial.rename(self._run_file)


def _last_words() -> str:
    """What the gateway's replicas said last, for one line of error."""
    deployments = (d for a in serve.status().applications.values() for d in a.deployments.values())
    lines = [line.strip() for d in deployments for line in d.message.splitlines() if line.strip()]
    return " | ".join(lines[-3:])


def _connect(address: str) -> None:
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        raise NotReachable(f"cannot join the Ray cluster at {address}: {error}") from error


def app(args: Mapping[str, str] | None = None) -> Any:
    """Application builder for ``serve deploy`` and KubeRay: ``import_path: orchestrator.serve:app``."""
    named = (args or {}).get("config")
    config = load_config(Path(named) if named else named_by_environment())
    if config.redis.url is None:
        raise NotReachable("on a cluster run by others, redis.url must name a Redis that all nodes reach")
    prepared = prepare_models(config, lambda *_: None)
    return deploy(config, prepared, config.redis.url, config.state_dir / "orchestrator.log")
