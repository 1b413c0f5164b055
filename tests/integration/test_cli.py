"""The verbs against a running service with fake models, as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import httpx
import pytest

from tests.service import ADMIN, RunningService, wait_until

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]


def orchestrator(service: RunningService, *words: str, typed: str = "", code: int = 0) -> str:
    environment = os.environ | {
        "ORCHESTRATOR_URL": service.url,
        "ORCHESTRATOR_ADMIN_KEY": ADMIN,
        "ORCHESTRATOR_API_KEY": "sk-demo-acme",
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "orchestrator.cli", *words]
    ended = subprocess.run(command, input=typed, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == code, ended.stderr
    return ended.stdout if code == 0 else ended.stderr


def test_ps_and_events(fake_service: RunningService) -> None:
    shown = orchestrator(fake_service, "ps")
    for word in ("MODEL", "RESIDUAL", "SESSIONS", "LAST-USED", "quick", "cpu0"):
        assert word in shown
    models = json.loads(orchestrator(fake_service, "ps", "--json"))["models"]
    assert {"quick", "slow", "broken"} <= {model["model"] for model in models}
    assert "loading" in orchestrator(fake_service, "events", "--model", "quick")


def test_events_can_be_followed(fake_service: RunningService) -> None:
    environment = os.environ | {"ORCHESTRATOR_URL": fake_service.url, "ORCHESTRATOR_ADMIN_KEY": ADMIN}
    command = [sys.executable, "-m", "orchestrator.cli", "events", "-f", "--json", "--model", "small", "--limit", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as following:
        assert following.stdout is not None
        orchestrator(fake_service, "load", "small")
        orchestrator(fake_service, "sleep", "small")
        seen: list[str] = []
        while "sleeping" not in seen:
            seen.append(json.loads(following.stdout.readline())["new"])
        following.send_signal(signal.SIGINT)
        assert following.wait(20) == 0


def test_a_model_s_state_is_explained(fake_service: RunningService) -> None:
    if fake_service.model("left")["state"] in ("ready", "sleeping"):  # other tests use it too
        orchestrator(fake_service, "unload", "left")
    wait_until(lambda: fake_service.model("left")["state"] == "cold", 30, "left is cold")
    said = orchestrator(fake_service, "explain", "left")
    assert "host:left:0 is cold" in said and "cpu0:" in said and "keep_alive: none" in said
    assert "if it was asked for now:" in said and "1468006400" in said
    assert "is not one of" in orchestrator(fake_service, "explain", "nothing", code=1)
    assert "host:quick:0 is ready" in orchestrator(fake_service, "explain", "gpt-quick")  # an alias
    assert "quick: ready" in orchestrator(fake_service, "load", "gpt-quick")
    assert json.loads(orchestrator(fake_service, "explain", "quick", "--json"))["plan"] == []


def test_sleep_and_load(fake_service: RunningService) -> None:
    orchestrator(fake_service, "load", "small")
    wait_until(lambda: fake_service.model("small")["state"] == "ready", 30, "small is ready")
    orchestrator(fake_service, "sleep", "small")
    wait_until(lambda: fake_service.model("small")["state"] == "sleeping", 30, "small sleeps")
    orchestrator(fake_service, "wake", "small")
    wait_until(lambda: fake_service.model("small")["state"] == "ready", 30, "small is ready again")
    orchestrator(fake_service, "pin", "small")
    assert "ready (pinned)" in orchestrator(fake_service, "ps")
    orchestrator(fake_service, "unpin", "small")
    assert "not one of" in orchestrator(fake_service, "load", "nothing", code=1)


def test_chat_goes_on_across_models_and_sessions_show_it(fake_service: RunningService) -> None:
    session = f"chat-{uuid.uuid4().hex[:8]}"
    said = orchestrator(
        fake_service, "chat", "quick", "--session", session,
        typed="hello\n/model small\nand now?\n/session\n/history\n/nonsense\n/quit\n",
    )  # fmt: skip
    assert "now small" in said and session in said and "first token" in said and "reused" in said
    assert "you: and now?" in said
    assert session in orchestrator(fake_service, "sessions", "ls", "acme")
    shown = orchestrator(fake_service, "sessions", "show", "acme", session)
    assert "2 changes" in shown and "user: and now?" in shown and "assistant (small)" in shown
    orchestrator(fake_service, "sessions", "rm", "acme", session)
    assert "there is no session" in orchestrator(fake_service, "sessions", "show", "acme", session, code=1)


def test_S34_removing_one_session_leaves_the_others(fake_service: RunningService) -> None:
    for name in ("keep-me", "drop-me"):
        httpx.post(
            f"{fake_service.url}/v1/chat/completions",
            json={"model": "quick", "messages": [{"role": "user", "content": name}]},
            headers={"Authorization": "Bearer sk-demo-globex", "X-Session-ID": name},
            timeout=30,
        ).raise_for_status()
    orchestrator(fake_service, "sessions", "rm", "globex", "drop-me")
    listed = json.loads(orchestrator(fake_service, "sessions", "ls", "globex", "--json"))["sessions"]
    ids = {session["session_id"] for session in listed}
    assert "keep-me" in ids and "drop-me" not in ids


def test_an_exported_session_is_made_again(fake_service: RunningService, tmp_path: Path) -> None:
    orchestrator(fake_service, "chat", "quick", "--session", "to-move", typed="say hello\n")
    exported = orchestrator(fake_service, "sessions", "export", "acme", "to-move")
    file = tmp_path / "talk.jsonl"
    file.write_text(exported)
    assert "made globex/moved with 2 items" in orchestrator(
        fake_service, "sessions", "import", "globex", str(file), "--name", "moved"
    )
    assert (
        orchestrator(fake_service, "sessions", "export", "globex", "moved").splitlines()[1:]
        == exported.splitlines()[1:]
    )
    again = orchestrator(fake_service, "sessions", "import", "globex", str(file), "--name", "moved", code=1)
    assert "there is a session moved already" in again
    file.write_text(exported.splitlines()[0] + "\nbroken\n")
    assert "line 2" in orchestrator(fake_service, "sessions", "import", "acme", str(file), "--name", "x", code=1)
    assert "there is no session" in orchestrator(fake_service, "sessions", "export", "acme", "nowhere", code=1)
    for body in (
        {"type": "message", "role": "user", "content": 5},
        {"type": "message", "role": "user", "content": [{"text": "x"}]},
        {"type": "function_call", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c"},
    ):  # what no API would take would break every later turn
        line = json.dumps({"v": 2, "id": "a", "at": 1.0, "item": body})
        file.write_text(exported.splitlines()[0] + f"\n{line}\n")
        assert "line 2" in orchestrator(fake_service, "sessions", "import", "acme", str(file), "--name", "x", code=1)


def test_a_sessions_name_is_not_cut_at_a_question_mark(fake_service: RunningService) -> None:
    orchestrator(fake_service, "chat", "quick", "--session", "keep-me", typed="hello\n")
    orchestrator(fake_service, "sessions", "rm", "acme", "keep-me?oops", code=1)
    assert "user: hello" in orchestrator(fake_service, "sessions", "show", "acme", "keep-me")


def test_what_was_refused_is_in_the_log_without_what_was_said(fake_service: RunningService) -> None:
    body = {"model": "quick", "messages": [{"role": "robot", "content": "my secret"}]}
    headers = {"Authorization": "Bearer sk-demo-acme", "X-Request-ID": "look-for-me"}
    httpx.post(f"{fake_service.url}/v1/chat/completions", json=body, headers=headers, timeout=30)
    lines = (fake_service.state_dir / "orchestrator.log").read_text().splitlines()
    (noted,) = [json.loads(line) for line in lines if "look-for-me" in line]
    assert (noted["event"], noted["status"], noted["cause"]) == ("request_failed", 400, "messages.0.role")
    assert not any("my secret" in line for line in lines)


def test_a_chat_with_an_unknown_model_says_so(fake_service: RunningService) -> None:
    environment = os.environ | {"ORCHESTRATOR_URL": fake_service.url, "ORCHESTRATOR_API_KEY": "sk-demo-acme"}
    ended = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", "chat", "nope"],
        input="hi\n", capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    assert "'nope' does not exist" in ended.stderr


def test_the_console_of_serve_is_clean(fake_service: RunningService) -> None:
    said = fake_service.output.read_text().splitlines()
    assert not [line for line in said if "INFO" in line or "WARNING" in line or "Traceback" in line]
    block = "\n".join(said)
    for word in (f"{fake_service.url}/v1", "sk-demo-acme", "quick", "orchestrator.log", "ready in"):
        assert word in block
