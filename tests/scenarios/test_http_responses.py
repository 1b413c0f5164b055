"""Conversations and Responses as OpenAI's own client speaks them, on a whole service with fake models."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.scenarios.calls import ACME, GLOBEX, ask, idle, said, usage
from tests.service import RunningService, wait_until

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]
BREAKS = {
    "test_one_history": ("session_store/lua/commit_turn.lua", "redis.call('RPUSH', items, ARGV[i + 2])", ""),
    "test_S25": ("policies/truncation.py", "    _check_answered(groups[-2:])\n", ""),
    "test_S26_a_response": ("orchestrator/turn.py", "or item.item_id not in known]", "or True]"),
    "test_S26_added": (
        "session_store/lua/append_items.lua",
        "redis.call('HSETNX', index, ARGV[i], place) == 1",
        "true",
    ),
    "test_S35_another": ("session_store/keys.py", "{encode_tenant(tenant)}/{check", "{check"),
    "test_a_response_is_read": ("orchestrator/api/responses.py", '"response" not in turn.reply', "False"),
    "test_going_on_from_an_older": ("session_store/lua/begin_turn.lua", "or about[3] ~= ARGV[11]", ""),
    "test_a_stream_has": ("orchestrator/api/response_bodies.py", "self._number += 1", "self._number += 2"),
    "test_instructions_are": ("orchestrator/prompting.py", "items.insert(0,", "(0,"),
    "test_a_conversation_that_does_not_fit": (
        "orchestrator/prompting.py",
        "if not ask.may_truncate and",
        "if False and",
    ),
    "test_a_cancelled": ("session_store/lua/cancel_turn.lua", "redis.call('DEL', KEYS[2])", ""),
    "test_a_retry": (
        "orchestrator/api/responses.py",
        "named = turn_id if key is None else",
        "named = turn_id if True else",
    ),
    "test_a_fork": ("session_store/changing.py", "min(end, start + CHUNK_ITEMS)", "(start + CHUNK_ITEMS)"),
    "test_an_item_is": ("session_store/lua/change_item.lua", "redis.call('LSET', items, at, ARGV[2])", ""),
    "test_a_list_goes": ("session_store/reading.py", "len(found) > count)", "False)"),
    "test_only_stored_responses": ("orchestrator/turn.py", 'goes_on = "response" in ask.reply', "goes_on = True"),
    "test_a_key_that_was": ("orchestrator/api/responses.py", "{body.previous_response_id}", ""),
    "test_an_edited_answer": ("session_store/changing.py", "body=body, ids=None", "body=body, ids=None, model=None"),
    "test_a_running_response": (
        "orchestrator/api/responses.py",
        'if turn.status == "running":\n            raise',
        "if False:\n            raise",
    ),
    "test_store_false_is_told": (
        "orchestrator/api/responses.py",
        "History(items, unread, known)",
        "History(items, unread, frozenset())",
    ),
    "test_store_false_goes_on": (
        "orchestrator/api/responses.py",
        "ask = await self._without_trace(ask)\n            progress",
        "pass\n            progress",
    ),
    "test_a_limit_that_is_none": ("orchestrator/api/conversations.py", "and len(limit) < 10", ""),
    "test_a_deleted_response": ("session_store/lua/delete_turn.lua", "redis.call('HDEL', turns, ARGV[1])", ""),
    "test_what_is_sent_back": ("policies/errors.py", "_short(self.message, MOST_SAID)", "self.message"),
    "test_bad_items": ("orchestrator/api/items.py", "if kind is None:", "if False:"),
}
TOOLS = [{"type": "function", "name": "look_up", "parameters": {"type": "object", "properties": {}}}]
CALL = 'say Let me look. <tool_call>{"name": "look_up", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture
def client(fake_service: RunningService) -> Iterator[openai.OpenAI]:
    key = ACME["Authorization"].removeprefix("Bearer ")
    with openai.OpenAI(base_url=f"{fake_service.url}/v1", api_key=key, max_retries=0) as made:
        yield made


def texts(client: openai.OpenAI, conversation: str) -> list[str]:
    """What each item of a conversation says, oldest first."""
    return [
        item.content[0].text if item.type == "message" else item.type  # type: ignore[union-attr]
        for item in client.conversations.items.list(conversation, order="asc", limit=2)
    ]


# -- one history ------------------------------------------------------------------------------


def test_one_history_is_behind_all_three_apis(client: openai.OpenAI, fake_service: RunningService) -> None:
    talk = client.conversations.create(metadata={"who": "ada"}, items=[{"role": "user", "content": "say first"}])
    assert talk.id.startswith("conv_") and talk.metadata == {"who": "ada"}
    one = client.responses.create(model="quick", input="say second", conversation=talk.id)
    assert one.output_text == "second" and one.conversation is not None and one.conversation.id == talk.id
    two = ask(fake_service, "quick", "say third", {"X-Session-ID": talk.id})
    assert said(two) == "third"
    client.conversations.items.create(talk.id, items=[{"role": "user", "content": "say fourth"}])
    three = client.responses.create(model="quick", conversation=talk.id)
    assert three.output_text == "fourth"
    history = ["say first", "say second", "second", "say third", "third", "say fourth", "fourth"]
    assert texts(client, talk.id) == history
    whole = "".join(f"Assistant:{text}\n" if n in (2, 4, 6) else f"User: {text}\n" for n, text in enumerate(history))
    assert three.usage is not None
    assert three.usage.input_tokens == len(whole) - len("Assistant:fourth\n") + len("Assistant:")


def test_a_chat_session_is_a_conversation(client: openai.OpenAI, fake_service: RunningService) -> None:
    name = f"chat-{uuid.uuid4().hex}"
    ask(fake_service, "quick", "say hello", {"X-Session-ID": name})
    assert client.conversations.retrieve(name).id == name
    assert texts(client, name) == ["say hello", "hello"]


def test_instructions_are_in_this_prompt_alone(client: openai.OpenAI) -> None:
    talk = client.conversations.create()
    plain = client.responses.create(model="quick", input="say a", conversation=talk.id)
    led = client.responses.create(model="quick", input="say b", conversation=talk.id, instructions="be brief")
    after = client.responses.create(model="quick", input="say c", conversation=talk.id)
    tokens = [found.usage.input_tokens for found in (plain, led, after) if found.usage is not None]
    turn = len("User: say a\nAssistant:a\n")
    assert tokens == [tokens[0], tokens[0] + turn + len("be brief\n\n"), tokens[0] + 2 * turn]
    assert led.instructions == "be brief" and "be brief" not in texts(client, talk.id)


# -- responses ----------------------------------------------------------------------------------


def test_going_on_from_the_last_response_stays_in_its_chain(client: openai.OpenAI) -> None:
    one = client.responses.create(model="quick", input="say a")
    two = client.responses.create(model="quick", input="say b", previous_response_id=one.id)
    assert two.id.startswith(one.id), "in the session that the first one began"
    assert one.usage is not None and two.usage is not None
    assert two.usage.input_tokens == one.usage.input_tokens + len("User: say a\nAssistant:a\n")
    assert two.previous_response_id == one.id


def test_going_on_from_an_older_response_makes_a_branch(client: openai.OpenAI) -> None:
    one = client.responses.create(model="quick", input="say a")
    left = client.responses.create(model="quick", input="say left", previous_response_id=one.id)
    right = client.responses.create(model="quick", input="say right", previous_response_id=one.id)
    assert (left.output_text, right.output_text) == ("left", "right")
    last = client.responses.create(model="quick", input="say b", previous_response_id=right.id)
    again = client.responses.create(model="quick", input="say b", previous_response_id=left.id)
    assert last.usage is not None and again.usage is not None
    assert last.usage.input_tokens == again.usage.input_tokens + 2 * (len("right") - len("left"))


def test_going_on_from_a_conversations_response_leaves_the_conversation_alone(client: openai.OpenAI) -> None:
    talk = client.conversations.create()
    one = client.responses.create(model="quick", input="say a", conversation=talk.id)
    two = client.responses.create(model="quick", input="say b", previous_response_id=one.id)
    assert two.conversation is None and two.usage is not None and one.usage is not None
    assert two.usage.input_tokens > one.usage.input_tokens
    assert texts(client, talk.id) == ["say a", "a"]


def test_a_response_is_read_as_it_was_said(client: openai.OpenAI) -> None:
    made = client.responses.create(
        model="quick", input="say a", metadata={"k": "v"}, temperature=0.5, max_output_tokens=30, instructions="x"
    )
    read = client.responses.retrieve(made.id)
    assert read.to_dict() == made.to_dict()
    items = client.responses.input_items.list(made.id).data
    assert [item.content[0].text for item in items if item.type == "message"] == ["say a"]  # type: ignore[union-attr]
    unstored = client.responses.create(model="quick", input="say a", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)
    talk = client.conversations.create()
    hidden = client.responses.create(model="quick", input="say a", conversation=talk.id, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(hidden.id)
    assert texts(client, talk.id) == ["say a", "a"]


def test_a_deleted_response_is_gone_and_a_conversation_keeps_what_it_added(client: openai.OpenAI) -> None:
    one = client.responses.create(model="quick", input="say a")
    client.responses.delete(one.id)
    talk = client.conversations.create()
    two = client.responses.create(model="quick", input="say a", conversation=talk.id)
    client.responses.delete(two.id)
    for response_id in (one.id, two.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="quick", input="x", previous_response_id=response_id)
    assert texts(client, talk.id) == ["say a", "a"]
    with pytest.raises(openai.BadRequestError, match="stream"):
        list(client.responses.retrieve(client.responses.create(model="quick", input="say a").id, stream=True))


def test_store_false_goes_on_from_a_response_and_leaves_no_trace(client: openai.OpenAI) -> None:
    one = client.responses.create(model="quick", input="say a")
    two = client.responses.create(model="quick", input="say b", previous_response_id=one.id, store=False)
    assert two.output_text == "b" and one.usage is not None and two.usage is not None
    assert two.usage.input_tokens == one.usage.input_tokens + len("User: say a\nAssistant:a\n")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(two.id)
    three = client.responses.create(model="quick", input="say c", previous_response_id=one.id)
    assert three.id.startswith(one.id) and three.usage is not None, "the chain is as it was"
    assert three.usage.input_tokens == two.usage.input_tokens


def test_a_stream_has_all_events_in_order(client: openai.OpenAI) -> None:
    with client.responses.stream(model="quick", input="say one two") as stream:
        found = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in found]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert kinds.index("response.output_item.added") < kinds.index("response.output_text.delta")
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert "".join(e.delta for e in found if e.type == "response.output_text.delta") == final.output_text == "one two"
    assert client.responses.retrieve(final.id).output_text == "one two"


def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    found = client.responses.create(model="quick", input="say one two three", max_output_tokens=5)
    assert found.status == "incomplete" and found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"


def test_S61_an_engine_error_ends_a_responses_stream_with_an_error(client: openai.OpenAI) -> None:
    kinds = []
    with pytest.raises(openai.APIError, match="finite"):
        for event in client.responses.create(model="nan", input="x", stream=True):
            kinds.append(event.type)
    assert "response.created" in kinds and "response.completed" not in kinds


def test_a_cancelled_response_is_not_in_the_history(client: openai.OpenAI, fake_service: RunningService) -> None:
    talk = client.conversations.create()
    heard: dict[str, Any] = {}

    def listen() -> None:
        try:
            for event in client.responses.create(model="slow", input="long", conversation=talk.id, stream=True):
                if event.type == "response.created":
                    heard["id"] = event.response.id
        except openai.APIError as error:
            heard["error"] = error

    listener = threading.Thread(target=listen)
    listener.start()
    wait_until(lambda: "id" in heard, 20, "the response has begun")
    assert client.responses.retrieve(heard["id"]).status == "in_progress"
    assert client.responses.cancel(heard["id"]).status == "cancelled"
    listener.join(10)
    assert "cancelled" in str(heard["error"])
    wait_until(lambda: idle(fake_service, "slow"), 5, "generation aborted, blocks free")
    assert client.responses.retrieve(heard["id"]).status == "cancelled"
    assert texts(client, talk.id) == []
    done = client.responses.create(model="quick", input="say a", conversation=talk.id)
    with pytest.raises(openai.BadRequestError, match="does not run"):
        client.responses.cancel(done.id)


def test_a_retry_under_the_same_key_gets_the_same_response(client: openai.OpenAI) -> None:
    key = {"Idempotency-Key": uuid.uuid4().hex}
    first = client.responses.create(model="quick", input="say a", extra_headers=key)
    again = client.responses.create(model="quick", input="say a", extra_headers=key)
    assert again.to_dict() == first.to_dict()
    with client.responses.stream(model="quick", input="say a", extra_headers=key) as stream:
        ids = {event.response.id for event in stream if event.type in ("response.created", "response.completed")}
        assert ids == {first.id}
        assert stream.get_final_response().output_text == "a"
    with pytest.raises(openai.ConflictError):
        client.responses.create(model="quick", input="say b", extra_headers=key)
    key = {"Idempotency-Key": uuid.uuid4().hex}
    branch = [
        client.responses.create(model="quick", input="say b", previous_response_id=first.id, extra_headers=key)
        for _ in range(2)
    ]
    assert branch[0].to_dict() == branch[1].to_dict()


def test_the_tokens_of_an_input_are_counted_as_they_will_be(client: openai.OpenAI) -> None:
    talk = client.conversations.create(items=[{"role": "user", "content": "say hello"}])
    said_: dict[str, Any] = {"model": "quick", "input": "say b", "conversation": talk.id, "instructions": "be brief"}
    counted = client.responses.input_tokens.count(**said_).input_tokens
    made = client.responses.create(**said_)
    assert made.usage is not None and counted == made.usage.input_tokens
    following = {"model": "quick", "input": "say c", "previous_response_id": made.id}
    counted = client.responses.input_tokens.count(**following).input_tokens
    made = client.responses.create(**following)  # type: ignore[call-overload]
    assert counted == made.usage.input_tokens


def test_a_conversation_that_does_not_fit_is_an_error_unless_it_may_be_cut(client: openai.OpenAI) -> None:
    talk = client.conversations.create()
    for turn in range(5):
        client.responses.create(
            model="small", input=f"turn {turn} " + "x" * 40, conversation=talk.id, truncation="auto"
        )
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="small", input="and now", conversation=talk.id)
    assert refused.value.code == "context_length_exceeded"
    cut = client.responses.with_raw_response.create(
        model="small", input="and now", conversation=talk.id, truncation="auto"
    )
    assert cut.headers["x-context-truncated"].startswith("turns=")


# -- function calls -------------------------------------------------------------------------------


def test_S25_a_message_and_a_call_and_then_the_output_is_required_and_accepted(client: openai.OpenAI) -> None:
    talk = client.conversations.create()
    first = client.responses.create(model="quick", input=CALL, conversation=talk.id, tools=TOOLS)  # type: ignore[call-overload]
    assert [item.type for item in first.output] == ["message", "function_call"]
    call = first.output[1]
    assert (call.name, call.arguments) == ("look_up", '{"city":"Oslo"}') and first.output_text == "Let me look. "
    with pytest.raises(openai.BadRequestError, match=f"No tool output found for function call {call.call_id}"):
        client.responses.create(model="quick", input="and?", conversation=talk.id)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(model="quick", input=[output], conversation=talk.id, tools=TOOLS)  # type: ignore
    assert second.status == "completed"
    assert texts(client, talk.id)[1:4] == ["Let me look. ", "function_call", "function_call_output"]
    with pytest.raises(openai.BadRequestError, match="answers no call"):
        client.responses.create(
            model="quick",
            conversation=talk.id,
            input=[{**output, "call_id": "call_other"}],  # type: ignore
        )


def test_a_streamed_call_comes_with_its_events(client: openai.OpenAI) -> None:
    found = list(client.responses.create(model="quick", input=CALL, tools=TOOLS, stream=True))  # type: ignore
    kinds = [event.type for event in found]
    assert kinds.index("response.function_call_arguments.delta") < kinds.index("response.function_call_arguments.done")
    deltas = "".join(event.delta for event in found if event.type == "response.output_text.delta")
    assert deltas == "Let me look. ", "nothing of the call is shown as text"


def test_chat_completions_call_functions_too(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "look_up"}}]
    messages: list[Any] = [{"role": "user", "content": CALL}]
    answer = client.chat.completions.create(model="quick", messages=messages, tools=tools).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.tool_calls is not None
    call = answer.message.tool_calls[0]
    assert call.type == "function" and call.function.name == "look_up"
    messages += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": "say rain"}]
    assert client.chat.completions.create(model="quick", messages=messages, tools=tools).choices[0].message.content
    streamed = list(client.chat.completions.create(model="quick", messages=messages[:1], tools=tools, stream=True))
    called = [chunk.choices[0].delta.tool_calls for chunk in streamed if chunk.choices[0].delta.tool_calls]
    assert len(called) == 1 and streamed[-1].choices[0].finish_reason == "tool_calls"


# -- items ------------------------------------------------------------------------------------------


def test_S26_a_response_that_resends_stored_items_adds_only_what_is_new(client: openai.OpenAI) -> None:
    talk = client.conversations.create(items=[{"role": "user", "content": "say a"}])
    client.responses.create(model="quick", conversation=talk.id)
    stored: list[Any] = [item.to_dict() for item in client.conversations.items.list(talk.id, order="asc")]
    made = client.responses.create(
        model="quick", input=[*stored, {"role": "user", "content": "say b"}], conversation=talk.id
    )
    assert texts(client, talk.id) == ["say a", "a", "say b", "b"]
    assert made.usage is not None
    assert made.usage.input_tokens == len("User: say a\nAssistant:a\nUser: say b\nAssistant:")
    reference = {"type": "item_reference", "id": stored[0]["id"]}
    client.responses.create(
        model="quick",
        input=[reference, {"role": "user", "content": "say c"}],
        conversation=talk.id,  # type: ignore
    )
    assert texts(client, talk.id)[4:] == ["say c", "c"]
    with pytest.raises(openai.NotFoundError, match="msg_nowhere"):
        client.responses.create(
            model="quick",
            input=[{"type": "item_reference", "id": "msg_nowhere"}],
            conversation=talk.id,  # type: ignore
        )


def test_S26_added_twice_under_one_id_is_there_once(client: openai.OpenAI) -> None:
    talk = client.conversations.create()
    item: Any = {"type": "message", "role": "user", "content": "hi", "id": "msg_mine"}
    for _ in range(2):
        added = client.conversations.items.create(talk.id, items=[item])
        assert [one.id for one in added.data] == ["msg_mine"]
    assert texts(client, talk.id) == ["hi"]


def test_a_list_goes_on_where_the_page_ended(client: openai.OpenAI) -> None:
    many: list[Any] = [{"role": "user", "content": str(n)} for n in range(7)]
    talk = client.conversations.create(items=many)
    assert texts(client, talk.id) == [str(n) for n in range(7)]
    newest = client.conversations.items.list(talk.id, limit=3)
    assert newest.has_more and [item.content[0].text for item in newest.data] == ["6", "5", "4"]  # type: ignore
    client.conversations.items.delete(newest.data[1].id or "", conversation_id=talk.id)
    assert texts(client, talk.id) == ["0", "1", "2", "3", "4", "6"]
    with pytest.raises(openai.BadRequestError, match="no item"):
        client.conversations.items.list(talk.id, after="msg_of_another")


def test_an_item_is_superseded_in_its_place_and_deleted(client: openai.OpenAI, fake_service: RunningService) -> None:
    talk = client.conversations.create(items=[{"role": "user", "content": "say a"}])
    client.responses.create(model="quick", conversation=talk.id)
    first, second = list(client.conversations.items.list(talk.id, order="asc"))
    url = f"{fake_service.url}/v1/conversations/{talk.id}/items/{first.id}"
    assert httpx.put(url, json={"role": "user", "content": "say other"}, headers=ACME).status_code == 200
    assert texts(client, talk.id) == ["say other", "a"]
    wrong = httpx.put(url, json={"role": "assistant", "content": "x"}, headers=ACME)
    assert wrong.status_code == 400
    client.conversations.items.delete(second.id or "", conversation_id=talk.id)
    assert texts(client, talk.id) == ["say other"]
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(second.id or "", conversation_id=talk.id)
    assert client.responses.create(model="quick", conversation=talk.id).output_text == "other"


def test_a_fork_has_the_history_up_to_an_item_and_goes_its_own_way(
    client: openai.OpenAI, fake_service: RunningService
) -> None:
    talk = client.conversations.create(metadata={"a": "b"})
    for word in ("one", "two"):
        client.responses.create(model="quick", input=f"say {word}", conversation=talk.id)
    items = list(client.conversations.items.list(talk.id, order="asc"))
    made = httpx.post(
        f"{fake_service.url}/v1/conversations/{talk.id}/fork", json={"after": items[1].id}, headers=ACME
    ).json()
    assert made["id"] != talk.id and made["metadata"] == {"a": "b"}
    client.responses.create(model="quick", input="say three", conversation=made["id"])
    assert texts(client, made["id"]) == ["say one", "one", "say three", "three"]
    assert texts(client, talk.id) == ["say one", "one", "say two", "two"]


def test_metadata_and_deletion(client: openai.OpenAI) -> None:
    talk = client.conversations.create()
    assert client.conversations.update(talk.id, metadata={"x": "y"}).metadata == {"x": "y"}
    assert client.conversations.retrieve(talk.id).metadata == {"x": "y"}
    assert client.conversations.delete(talk.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(talk.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="quick", input="x", conversation=talk.id)


def test_items_cannot_be_added_while_a_turn_runs(client: openai.OpenAI, fake_service: RunningService) -> None:
    talk = client.conversations.create()
    stream = client.responses.create(model="slow", input="long", conversation=talk.id, stream=True)
    next(iter(stream))
    with pytest.raises(openai.ConflictError) as refused:
        client.conversations.items.create(talk.id, items=[{"role": "user", "content": "hi"}])
    assert refused.value.code == "session_busy" and int(refused.value.response.headers["retry-after"]) >= 1
    stream.close()
    wait_until(lambda: idle(fake_service, "slow"), 5, "generation aborted, blocks free")


# -- whose it is, and what is wrong --------------------------------------------------------------------


def test_S35_another_tenants_response_and_conversation_do_not_exist(
    client: openai.OpenAI, fake_service: RunningService
) -> None:
    talk = client.conversations.create(items=[{"role": "user", "content": "a secret"}])
    (item,) = client.conversations.items.list(talk.id).data
    made = client.responses.create(model="quick", input="say a", conversation=talk.id)
    with openai.OpenAI(
        base_url=f"{fake_service.url}/v1", api_key=GLOBEX["Authorization"].removeprefix("Bearer "), max_retries=0
    ) as other:
        for attempt in (
            lambda: other.conversations.retrieve(talk.id),
            lambda: other.conversations.items.list(talk.id),
            lambda: other.conversations.items.retrieve(item.id or "", conversation_id=talk.id),
            lambda: other.conversations.items.create(talk.id, items=[{"role": "user", "content": "x"}]),
            lambda: other.conversations.items.delete(item.id or "", conversation_id=talk.id),
            lambda: other.conversations.update(talk.id, metadata={}),
            lambda: other.conversations.delete(talk.id),
            lambda: other.responses.retrieve(made.id),
            lambda: other.responses.cancel(made.id),
            lambda: other.responses.input_items.list(made.id),
            lambda: other.responses.create(model="quick", input="x", conversation=talk.id),
            lambda: other.responses.create(model="quick", input="x", previous_response_id=made.id),
            lambda: other.responses.input_tokens.count(model="quick", input="x", previous_response_id=made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()
    assert texts(client, talk.id) == ["a secret", "say a", "a"]


MESSAGE: dict[str, Any] = {"role": "user", "content": "x"}
DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": [{"role": "robot", "content": "x"}]}, 400, "input.0.role"),
        ({"input": [MESSAGE, {"type": "picture"}]}, 400, "input.1.type"),
        ({"input": [MESSAGE, "x"]}, 400, "input.1"),
        ({"input": 3}, 400, "input"),
        ({"input": [{"role": "user"}]}, 400, "input.0.content"),
        ({"input": [MESSAGE | {"content": [{"type": "input_image"}]}]}, 400, "input.0.content.0.type"),
        ({"input": [MESSAGE | {"content": [{"type": "input_text"}]}]}, 400, "input.0.content.0"),
        ({"input": [MESSAGE | {"id": "has a space"}]}, 400, "input.0.id"),
        ({"input": [MESSAGE | {"id": "a"}, MESSAGE | {"id": "a"}]}, 400, "input"),
        ({"input": [MESSAGE | {"colour": "red"}]}, 400, "input.0.colour"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, 400, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}], "store": False}, 400, "input"),
        ({"tools": [{"type": "function", "name": "f", "parameters": DEEP}]}, 400, None),
        ({"input": [MESSAGE] * 10_001}, 400, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, 400, "input.0.call_id"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, 404, "input"),
        ({"input": []}, 400, "input"),
        ({"input": "x" * (2**20 + 1)}, 400, "input.0"),
        ({"previous_response_id": "resp_" + "0" * 32, "conversation": "conv_x"}, 400, None),
        ({"previous_response_id": "nonsense"}, 404, "previous_response_id"),
        ({"previous_response_id": "resp_" + "0" * 32}, 404, "previous_response_id"),
        ({"previous_response_id": "resp_" + "0" * 32, "store": False}, 404, "previous_response_id"),
        ({"conversation": "conv_nowhere"}, 404, "conversation"),
        ({"conversation": "not an id"}, 400, "conversation"),
        ({"conversation": {"name": "x"}}, 400, "conversation.name"),
        ({"model": "nope"}, 404, "model"),
        ({"background": True}, 400, "background"),
        ({"background": 0}, 400, "background"),
        ({"text": {"format": {"type": "json_object"}}}, 400, "text"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools.0.type"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"metadata": {"k": "v" * 513}}, 400, "metadata.k"),
        ({"no_such_field": 1}, 400, "no_such_field"),
    ],
)  # fmt: skip
def test_bad_items_and_fields_are_named(
    fake_service: RunningService, fields: dict[str, Any], status: int, param: str | None
) -> None:
    body = {"model": "quick", "input": "x"} | fields
    response = httpx.post(f"{fake_service.url}/v1/responses", json=body, headers=ACME, timeout=30)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert error["message"] and error["type"] == "invalid_request_error"


def test_what_is_sent_back_is_not_sent_on_whole(fake_service: RunningService) -> None:
    body = {"model": "m" * 1_000_000, "input": "x"}
    response = httpx.post(f"{fake_service.url}/v1/responses", json=body, headers=ACME, timeout=30)
    assert response.status_code == 404 and len(response.content) < 3_000


def test_store_false_is_told_of_what_it_goes_on_from_like_a_stored_turn(client: openai.OpenAI) -> None:
    """System messages, known ids, references and what is too long."""
    first = client.responses.create(model="quick", input=[{"role": "system", "content": "rules"}, MESSAGE])  # type: ignore
    (system, question) = reversed(client.responses.input_items.list(first.id).data)
    again: Any = [{"type": "item_reference", "id": system.id}, question.to_dict(), {"role": "user", "content": "say b"}]
    asked: dict[str, Any] = {"model": "quick", "previous_response_id": first.id, "input": again}
    counted = client.responses.input_tokens.count(**asked).input_tokens
    alone = client.responses.create(**asked, store=False)
    stored = client.responses.create(**asked)
    assert alone.usage is not None and stored.usage is not None
    assert alone.usage.input_tokens == stored.usage.input_tokens == counted
    asked["input"] = [{"type": "item_reference", "id": "msg_nowhere"}]
    for attempt in (
        lambda: client.responses.create(**asked, store=False),
        lambda: client.responses.input_tokens.count(**asked),
    ):
        with pytest.raises(openai.NotFoundError, match="msg_nowhere"):
            attempt()


def test_only_stored_responses_are_gone_on_from(client: openai.OpenAI, fake_service: RunningService) -> None:
    talk = client.conversations.create()
    hidden = client.responses.create(model="quick", input="say a", conversation=talk.id, store=False)
    chat = ask(fake_service, "quick", "say b", {"X-Session-ID": talk.id}).json()["id"].removeprefix("chatcmpl-")
    for previous in (hidden.id, f"resp_{talk.id}_{chat}"):
        for stored in (True, False):
            with pytest.raises(openai.NotFoundError):
                client.responses.create(model="quick", input="x", previous_response_id=previous, store=stored)


def test_a_key_that_was_used_elsewhere_does_not_lead_there(client: openai.OpenAI) -> None:
    key = {"Idempotency-Key": uuid.uuid4().hex}
    tops = [client.responses.create(model="quick", input=f"say {text}") for text in ("secret", "open")]
    for top in tops:
        client.responses.create(model="quick", input="say on", previous_response_id=top.id)
    orphan: Any = [{"type": "function_call_output", "call_id": "c", "output": "x"}]
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="quick", input=orphan, previous_response_id=tops[0].id, extra_headers=key)
    made = client.responses.create(model="quick", input="say b", previous_response_id=tops[1].id, extra_headers=key)
    assert made.usage is not None
    assert made.usage.input_tokens == len("User: say open\nAssistant:open\nUser: say b\nAssistant:")


def test_an_edited_answer_is_still_the_models(client: openai.OpenAI, fake_service: RunningService) -> None:
    talk = client.conversations.create()
    made = client.responses.create(model="quick", input="say a", conversation=talk.id)
    answer = made.output[0]
    url = f"{fake_service.url}/v1/conversations/{talk.id}/items/{answer.id}"
    assert httpx.put(url, json={"role": "assistant", "content": "A"}, headers=ACME).status_code == 200
    read = client.responses.retrieve(made.id)
    assert read.output_text == "A" and len(client.responses.input_items.list(made.id).data) == 1
    assert httpx.put(url, json={"type": "item_reference", "id": "x"}, headers=ACME).status_code == 400


def test_a_running_response_is_not_deleted(client: openai.OpenAI, fake_service: RunningService) -> None:
    stream = client.responses.create(model="slow", input="long", stream=True)
    begun = next(iter(stream))
    assert begun.type == "response.created"
    with pytest.raises(openai.ConflictError, match="runs"):
        client.responses.delete(begun.response.id)
    stream.close()
    wait_until(lambda: idle(fake_service, "slow"), 5, "generation aborted, blocks free")


@pytest.mark.parametrize("limit", ["²", "9" * 5_000, "-1", "1.5", ""])
def test_a_limit_that_is_none_is_a_400(fake_service: RunningService, limit: str) -> None:
    name = httpx.post(f"{fake_service.url}/v1/conversations", json={}, headers=ACME).json()["id"]
    url = f"{fake_service.url}/v1/conversations/{name}/items"
    assert httpx.get(url, params={"limit": limit}, headers=ACME).status_code == 400


def test_concurrent_branches_do_not_wait_for_each_other(client: openai.OpenAI) -> None:
    one = client.responses.create(model="slow", input="say a")
    begin = time.monotonic()
    stream = client.responses.create(model="slow", input="long", previous_response_id=one.id, stream=True)
    next(iter(stream))
    other = client.responses.create(model="slow", input="say b", previous_response_id=one.id)
    assert other.output_text == "b" and time.monotonic() - begin < 20
    stream.close()


def test_a_chain_in_use_is_listed_and_usage_is_counted(client: openai.OpenAI, fake_service: RunningService) -> None:
    made = client.responses.create(model="quick", input="say a")
    tokens, _ = usage(ask(fake_service, "quick", "say a"))
    assert made.usage is not None and made.usage.input_tokens == tokens
