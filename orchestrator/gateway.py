"""Owns the gateway: the Ray Serve deployment that speaks HTTP. Any number of replicas may run; none knows another."""

# no postponed annotations here: FastAPI reads the routes' types when Serve unpickles the app in a replica

import asyncio
import dataclasses
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import ray
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from ray import serve
from ray.exceptions import RayError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from model_pool.host import NAMESPACE
from orchestrator import logs
from orchestrator.aggregator import exchange, push
from orchestrator.api import admin
from orchestrator.api.chat import ChatRoute
from orchestrator.api.conversations import ConversationsRoute
from orchestrator.api.errors import error_response, from_http_exception
from orchestrator.api.intake import read_body, request_id_of
from orchestrator.api.items import check_stored
from orchestrator.api.models import model_list
from orchestrator.api.responses import ResponsesRoute
from orchestrator.config import Config, TenantConfig
from orchestrator.controller import NAME as CONTROLLER
from orchestrator.detached import start_detached
from orchestrator.forgetting import Forgetting
from orchestrator.generation import Generator, Routes
from orchestrator.links import Links, snapshot_of
from orchestrator.logs import event_logger
from orchestrator.metrics import GatewayMetrics, expose
from orchestrator.pool_words import PoolPicture
from orchestrator.ray_errors import client_left
from orchestrator.tenants import Tenants
from orchestrator.tokens import ChatTokenizer, load_tokenizer
from orchestrator.turn import TurnRunner
from policies.errors import OrchestratorError, Unavailable
from session_store.store import SessionStore

app = FastAPI(title="context-orchestrator", docs_url=None, redoc_url=None, openapi_url=None)
PICTURE_SECONDS = 3.0
FORGET_SECONDS = 10.0
PUSH_SECONDS = 2.0


def _json(body: Any) -> Response:
    return Response(orjson.dumps(body, default=str), media_type="application/json")


class _Naming:
    """Gives a request its id and its arrival. Not a middleware function: those take every chunk through a queue."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            request.state.request_id = request_id_of(request, f"req_{uuid.uuid4().hex}")
            request.state.arrival = time.time()
        await self._app(scope, receive, send)  # Serve puts X-Request-ID on the answer


# registered before the class: Serve copies the app when it sees `ingress`
app.add_middleware(_Naming)


@app.exception_handler(OrchestratorError)
async def _ours(request: Request, error: OrchestratorError) -> Response:
    said = error.envelope()["error"]  # of a client's mistake its field alone: what was sent may be in the message
    cause = said["message" if error.http_status >= 500 else "param"]
    for log in logs.of_process:
        log.info("request_failed", request=request.state.request_id, method=request.method, path=request.url.path,
                 status=error.http_status, code=error.code, cause=cause)  # fmt: skip
    return error_response(error)


@app.exception_handler(HTTPException)
async def _theirs(request: Request, error: HTTPException) -> Response:
    return error_response(from_http_exception(request, error))


@app.exception_handler(Exception)
async def _bug(request: Request, error: Exception) -> Response:
    """A bug of ours: said plainly, with the id to look for in the log."""
    if not client_left(error):
        logs.note_bug(error, request=request.state.request_id, method=request.method, path=request.url.path)
    return error_response(
        OrchestratorError(f"internal error in request {request.state.request_id}: {type(error).__name__}")
    )


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """All a gateway must know. The config as JSON: pydantic objects are not pickled between processes."""

    config_json: str
    redis_url: str
    model_paths: tuple[tuple[str, str | None], ...]  # model → directory with its tokenizer; None: fake
    log_path: str


@serve.deployment(
    name="gateway",
    max_ongoing_requests=2_000,
    health_check_period_s=5,
    ray_actor_options={"num_cpus": 0},
)
@serve.ingress(app)
class Gateway:
    """See the module's text."""

    def __init__(self, plan: GatewayPlan) -> None:
        config = Config.model_validate_json(plan.config_json)
        self._config = config
        self._log = event_logger(plan.log_path)
        logs.of_process[:] = [self._log]
        self._name = f"gw-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._tenants = Tenants(config)
        self.metrics = GatewayMetrics()
        self._controller = ray.get_actor(CONTROLLER, namespace=NAMESPACE)
        self._routes = Routes(self._controller)
        self._store = SessionStore(
            plan.redis_url,
            session_ttl_seconds=config.sessions.ttl_seconds,
            tenant_ttl_seconds={t.name: t.session_ttl_seconds for t in config.tenants if t.session_ttl_seconds},
            lease_ttl_seconds=config.sessions.lease_seconds,
            window_items=config.sessions.window_items,
            replicas=config.redis.replicas,
            observe=self.metrics.store_seconds.observe,
        )
        generator = Generator(
            self._controller,
            Links(self._name),
            self._routes,
            config.deadline_seconds,
            lambda model: self.metrics.spills.labels(model).inc(),
        )
        self._tokenizers = self._load_tokenizers(plan)
        runner = TurnRunner(
            self._store, generator, self._tokenizers, self._name, config.http.busy_session_seconds, self._log
        )
        self._chat = ChatRoute(config, runner, self.metrics)
        self._responses = ResponsesRoute(config, runner, self._store, self.metrics)
        self._conversations = ConversationsRoute(config, self._store)
        self._background: tuple[asyncio.Task[None], ...] = ()
        self._log.info("gateway_started", gateway=self._name)

    def _load_tokenizers(self, plan: GatewayPlan) -> dict[str, ChatTokenizer]:
        """A broken model directory must not keep the other models from being served."""
        tokenizers = {}
        for name, path in plan.model_paths:
            try:
                tokenizers[name] = load_tokenizer(Path(path) if path else None, self._config.model(name).chat_template)
            except Exception as error:  # noqa: BLE001 — boundary: whatever a broken directory raises is that model's alone
                self._log.error("tokenizer_failed", model=name, cause=f"{type(error).__name__}: {error}")
        return tokenizers

    def _start_background(self) -> None:
        if not self._background:
            forgetting = Forgetting(self._controller, self._store, [t.name for t in self._config.tenants], self._log)
            self._background = tuple(
                start_detached(work) for work in (self._routes.follow(), self._push_metrics(), forgetting.run())
            )

    async def _push_metrics(self) -> None:
        while True:
            await push(self._name, self.metrics.registry)
            await asyncio.sleep(PUSH_SECONDS)

    # -- OpenAI -----------------------------------------------------------------------

    @app.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Response:
        tenant = self._tenants.authenticate(request.headers.get("authorization"))
        self._start_background()
        return await self._chat.answer(request, tenant)

    @app.post("/v1/responses")
    async def create_response(self, request: Request) -> Response:
        self._start_background()
        return await self._responses.create(request, self._tenant(request))

    @app.post("/v1/responses/input_tokens")
    async def response_input_tokens(self, request: Request) -> Response:
        return _json(await self._responses.input_tokens(request, self._tenant(request)))

    @app.get("/v1/responses/{response_id}")
    async def response(self, request: Request, response_id: str) -> Response:
        return _json(await self._responses.read(request, self._tenant(request).name, response_id))

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(self, request: Request, response_id: str) -> Response:
        return _json(await self._responses.delete(self._tenant(request).name, response_id))

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(self, request: Request, response_id: str) -> Response:
        return _json(await self._responses.cancel(self._tenant(request).name, response_id))

    @app.get("/v1/responses/{response_id}/input_items")
    async def response_input_items(self, request: Request, response_id: str) -> Response:
        return _json(await self._responses.input_items(request, self._tenant(request).name, response_id))

    @app.post("/v1/conversations")
    async def create_conversation(self, request: Request) -> Response:
        return _json(await self._conversations.create(request, self._tenant(request).name))

    @app.get("/v1/conversations/{name}")
    async def conversation(self, request: Request, name: str) -> Response:
        return _json(await self._conversations.read(self._tenant(request).name, name))

    @app.post("/v1/conversations/{name}")
    async def update_conversation(self, request: Request, name: str) -> Response:
        return _json(await self._conversations.update(request, self._tenant(request).name, name))

    @app.delete("/v1/conversations/{name}")
    async def delete_conversation(self, request: Request, name: str) -> Response:
        tenant = self._tenant(request).name
        deleted = await self._conversations.delete(tenant, name)
        await self._forget(f"{tenant}/{name}")
        return _json(deleted)

    @app.post("/v1/conversations/{name}/fork")
    async def fork_conversation(self, request: Request, name: str) -> Response:
        return _json(await self._conversations.fork(request, self._tenant(request).name, name))

    @app.post("/v1/conversations/{name}/items")
    async def add_items(self, request: Request, name: str) -> Response:
        return _json(await self._conversations.add(request, self._tenant(request).name, name))

    @app.get("/v1/conversations/{name}/items")
    async def list_items(self, request: Request, name: str) -> Response:
        return _json(await self._conversations.items(request, self._tenant(request).name, name))

    @app.get("/v1/conversations/{name}/items/{item_id}")
    async def item(self, request: Request, name: str, item_id: str) -> Response:
        return _json(await self._conversations.item(self._tenant(request).name, name, item_id))

    @app.put("/v1/conversations/{name}/items/{item_id}")
    async def replace_item(self, request: Request, name: str, item_id: str) -> Response:
        return _json(await self._conversations.replace(request, self._tenant(request).name, name, item_id))

    @app.delete("/v1/conversations/{name}/items/{item_id}")
    async def remove_item(self, request: Request, name: str, item_id: str) -> Response:
        return _json(await self._conversations.remove(self._tenant(request).name, name, item_id))

    @app.get("/v1/models")
    async def models(self, request: Request) -> Response:
        self._tenants.authenticate(request.headers.get("authorization"))
        return _json(model_list(self._config, self._tokenizers, await self._picture()))

    @app.get("/v1/models/{name}")
    async def model(self, request: Request, name: str) -> Response:
        self._tenants.authenticate(request.headers.get("authorization"))
        return _json(admin.one_model(model_list(self._config, self._tokenizers, await self._picture()), name))

    # -- operations ---------------------------------------------------------------------

    @app.get("/health")
    async def health(self) -> Response:
        return _json({"status": "ok", "gateway": self._name, "pid": os.getpid()})

    @app.get("/ready")
    async def ready(self) -> Response:
        """Redis answers, the controller answers: a turn could begin."""
        await self._store.ping()
        if await self._picture() is None:
            raise Unavailable("the controller does not answer", retry_after_seconds=1.0)
        return _json({"status": "ready"})

    @app.get("/metrics")
    async def prometheus(self) -> Response:
        families = await exchange(self._name, self.metrics.registry)
        return Response(expose(families, await self._picture()), media_type=CONTENT_TYPE_LATEST)

    @app.get("/admin/models")
    async def admin_models(self, request: Request) -> Response:
        self._tenants.authenticate_admin(request.headers.get("authorization"))
        return _json(admin.models(await self._need_picture()))

    @app.get("/admin/contexts")
    async def admin_contexts(self, request: Request) -> Response:
        self._tenants.authenticate_admin(request.headers.get("authorization"))
        model = request.query_params.get("model")
        return _json(await admin.contexts(await self._need_picture(), model, snapshot_of))

    @app.get("/admin/events")
    async def admin_events(self, request: Request) -> Response:
        self._tenants.authenticate_admin(request.headers.get("authorization"))
        asked = request.query_params
        most = admin.count_param(asked.get("limit"), default=100, most=1000)
        after = admin.time_param(asked.get("after"))
        return _json(admin.events(await self._controller.events.remote(asked.get("model"), most, after)))

    @app.get("/admin/models/{name}/plan")
    async def admin_plan(self, request: Request, name: str) -> Response:
        """What a request for this model would cause now."""
        self._tenants.authenticate_admin(request.headers.get("authorization"))
        name = self._config.canonical(name)
        answer = await self._controller.dry_run.remote(name)
        if isinstance(answer, OrchestratorError):
            raise answer
        return _json({"model": name, "actions": [dataclasses.asdict(action) for action in answer.actions]})

    @app.post("/admin/models/{name}/{verb}")
    async def admin_ask(self, request: Request, name: str, verb: str) -> Response:
        self._tenants.authenticate_admin(request.headers.get("authorization"))
        admin.check_verb(verb)
        name = self._config.canonical(name)
        answer = await self._controller.ask.remote(verb, name)
        if isinstance(answer, OrchestratorError):
            raise answer
        return _json({"model": name, "state": str(answer)})

    @app.get("/admin/sessions")
    async def admin_sessions(self, request: Request) -> Response:
        self._tenants.authenticate_admin(request.headers.get("authorization"))
        tenant = admin.tenant_param(self._config, request.query_params.get("tenant"))
        limit = admin.count_param(request.query_params.get("limit"), default=100, most=1000)
        page = await self._store.list_sessions(tenant, request.query_params.get("cursor"), limit)
        return _json(dataclasses.asdict(page))

    @app.get("/admin/sessions/{tenant}/{session_id}")
    async def admin_session(self, request: Request, tenant: str, session_id: str) -> Response:
        self._tenants.authenticate_admin(request.headers.get("authorization"))
        limit = admin.count_param(request.query_params.get("limit"), default=100, most=1000)
        info = await self._store.session_info(tenant, session_id)
        items = await self._store.read_items(tenant, session_id, max(0, info.items - limit), limit)
        return _json({**dataclasses.asdict(info), "last_items": [admin.item(item) for item in items]})

    @app.get("/admin/sessions/{tenant}/{session_id}/export")
    async def admin_export_session(self, request: Request, tenant: str, session_id: str) -> Response:
        self._tenants.authenticate_admin(request.headers.get("authorization"))
        await self._store.session_info(tenant, session_id)  # a 404 before the headers
        lines = self._store.export_session(tenant, session_id)
        return StreamingResponse(lines, media_type="application/jsonl")

    @app.post("/admin/sessions/{tenant}/import")
    async def admin_import_session(self, request: Request, tenant: str) -> Response:
        self._tenants.authenticate_admin(request.headers.get("authorization"))
        tenant = admin.tenant_param(self._config, tenant)
        raw = await read_body(request, admin.MOST_IMPORTED_BYTES)
        most = int(self._config.sessions.max_item)
        name = await self._store.import_session(
            tenant, raw.splitlines(), request.query_params.get("session_id"), lambda item: check_stored(item, most)
        )
        return _json(dataclasses.asdict(await self._store.session_info(tenant, name)))

    @app.delete("/admin/sessions/{tenant}/{session_id}")
    async def admin_delete_session(self, request: Request, tenant: str, session_id: str) -> Response:
        self._tenants.authenticate_admin(request.headers.get("authorization"))
        await self._store.delete_session(tenant, session_id)
        dropped = await self._forget(f"{tenant}/{session_id}")
        return _json({"tenant": tenant, "session_id": session_id, "deleted": True, **dropped})

    # -- inside -------------------------------------------------------------------------

    def _tenant(self, request: Request) -> TenantConfig:
        return self._tenants.authenticate(request.headers.get("authorization"))

    async def _picture(self) -> PoolPicture | None:
        try:
            return await asyncio.wait_for(self._controller.picture.remote(), PICTURE_SECONDS)
        except (RayError, TimeoutError):
            return None

    async def _forget(self, session: str) -> dict[str, Any]:
        """Have a deleted session's KV dropped; where that fails, ``forgetting`` sees to it within a minute."""
        try:
            async with asyncio.timeout(FORGET_SECONDS):
                forgotten = await self._controller.forget_sessions.remote([session])
        except (RayError, TimeoutError):
            return {"kv_blocks_dropped": 0, "hosts_not_reached": ["the controller does not answer"]}
        return {"kv_blocks_dropped": forgotten.blocks, "hosts_not_reached": forgotten.not_reached}

    async def _need_picture(self) -> PoolPicture:
        picture = await self._picture()
        if picture is None:
            raise Unavailable("the controller does not answer", retry_after_seconds=1.0)
        return picture

    async def check_health(self) -> None:
        """Asked by Serve, in our event loop, from the start on."""
        self._start_background()
