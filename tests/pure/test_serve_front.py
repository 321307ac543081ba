"""The front alone: who is taken, refused, told, cancelled; an engine that is a list of messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
import pytest

from stepahead.llm.prompts import Prompt
from stepahead.serve.calls import Call
from stepahead.serve.front import Front
from stepahead.serve.keeper import Patience
from stepahead.serve.messages import Cancel, Failed, Ready, Refused, Step, Submit, Taken
from stepahead.serve.refusal import Refusal
from stepahead.serve.requests import read_chat_request, read_completion_request
from stepahead.serve.streams import DONE, ChatStory, TextStory
from stepahead.structured import Grammar, StructuredOutputs
from stepahead.text.texts import ToyTexts
from stepahead.types import Finish, LogprobRows, Outputs, PromptLogprobs, SamplingParams

TEXTS = ToyTexts(90)
A, B, AB = 2, 3, 7  # tokens of the toy whose texts are these


class Engine:
    """Takes every prompt when it is told to, and says what it is told to say."""

    def __init__(self, front: Front, ready: bool = True) -> None:
        self.front = front
        self.sent: list[Any] = []
        self._rids = 0
        front.connect(self)
        if ready:
            front.take(Ready(("loop=serial",), 128, 4))

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def take(self, asked: Submit) -> tuple[int, ...]:
        rids = tuple(range(self._rids, self._rids + asked.params.n))
        self._rids += asked.params.n
        self.front.take(Taken(asked.key, rids))
        return rids

    def step(
        self,
        tokens: dict[int, int],
        *finishes: Finish,
        logprobs: LogprobRows | None = None,
        prompt_logprobs: tuple[PromptLogprobs, ...] = (),
        number: int = 0,
    ) -> None:
        rids = np.array([*tokens], np.int64)
        values = np.array([*tokens.values()], np.int32)
        outputs = Outputs(number, rids, values, (), finishes, logprobs, prompt_logprobs)
        self.front.take(Step(outputs))


def finish(rid: int, tokens: list[int], reason: Any = "length", **more: Any) -> Finish:
    return Finish(rid, reason, np.array(tokens, np.int32), **more)


def played(play: Callable[[Front, Engine], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def run() -> None:
        front = Front(TEXTS, options.get("max_waiting", 2), options.get("timeout_s"))
        try:
            # a test that waits for what does not come fails by its name
            await asyncio.wait_for(play(front, Engine(front, options.get("ready", True))), 20)
        finally:
            front.close()

    asyncio.run(run())


def begin(front: Front, streaming: bool = False, prompts: int = 1, **params: Any) -> Call:
    asked = [Prompt([A, B], None) for _ in range(prompts)]
    return front.begin("call", asked, SamplingParams(**params), streaming)


def test_choices_are_counted_from_their_arrival_to_their_end() -> None:
    async def play(front: Front, engine: Engine) -> None:
        for _ in range(3):
            front.check_room(2)
            begin(front, n=2)
        assert front.open_choices == 6  # four rows and two that wait
        with pytest.raises(Refusal) as caught:
            front.check_room(1)
        assert caught.value.status == 429
        assert caught.value.headers["Retry-After"] == "1"
        rids = engine.take(engine.sent[0])
        engine.step({}, finish(rids[0], [A]))
        with pytest.raises(Refusal):
            front.check_room(2)
        front.check_room(1)
        engine.step({}, finish(rids[1], [A]))
        front.check_room(2)
        with pytest.raises(Refusal) as caught:
            front.check_room(7)
        assert caught.value.status == 400  # no patience would help

    played(play)


def test_nobody_is_taken_before_the_engine_is_ready_nor_while_it_drains() -> None:
    async def play(front: Front, engine: Engine) -> None:
        for code, change in (
            ("loading", lambda: front.take(Ready((), 128, 4))),
            (None, lambda: setattr(front, "draining", True)),
            ("draining", lambda: front.take(Failed("its device is gone"))),
            ("engine_failed", lambda: None),
        ):
            if code is None:
                front.check_room(1)
            else:
                with pytest.raises(Refusal) as caught:
                    front.check_room(1)
                assert (caught.value.status, caught.value.code) == (503, code)
            change()

    played(play, ready=False)


def test_a_refused_prompt_ends_its_call_and_takes_the_others_back() -> None:
    async def play(front: Front, engine: Engine) -> None:
        call = begin(front, prompts=3)
        first, second, third = engine.sent
        rids = engine.take(first)
        front.take(Refused(second.key, "PromptTooLong", "too long", "prompt"))
        with pytest.raises(Refusal) as caught:
            await call.settled()
        told = caught.value
        assert (told.status, told.code, told.param) == (400, "context_length_exceeded", "prompt")
        late = engine.take(third)  # the engine had not heard of it yet
        cancelled = [m.rids.tolist() for m in engine.sent if isinstance(m, Cancel)]
        assert cancelled == [[*rids], [*late]]
        engine.step({}, finish(rids[0], [], "abort"), finish(late[0], [], "abort"))
        assert front.open_choices == 0
        assert not front.calls

    played(play)


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("PoolFull", 429, "queue_full"),
        ("InvalidParameter", 400, "invalid_value"),
        ("EngineClosed", 503, "engine_failed"),
        ("NobodyKnows", 503, "engine_failed"),
    ],
)
def test_the_engines_refusals_have_their_status(kind: str, status: int, code: str) -> None:
    async def play(front: Front, engine: Engine) -> None:
        call = begin(front)
        front.take(Refused(engine.sent[0].key, kind, "no", "prompt"))
        with pytest.raises(Refusal) as caught:
            await call.settled()
        assert (caught.value.status, caught.value.code) == (status, code)

    played(play)


def test_a_call_that_is_cancelled_early_is_cancelled_when_it_is_taken() -> None:
    async def play(front: Front, engine: Engine) -> None:
        call = begin(front)
        front.cancel(call)
        assert len(engine.sent) == 1
        rids = engine.take(engine.sent[0])
        assert engine.sent[1].rids.tolist() == [*rids]
        front.cancel(call)  # once is enough
        assert len(engine.sent) == 2
        assert front.open_choices == 1  # it may still have a row
        engine.step({}, finish(rids[0], [], "abort"))
        assert front.open_choices == 0

    played(play)


def test_a_call_that_takes_too_long_ends_and_leaves_its_row() -> None:
    async def play(front: Front, engine: Engine) -> None:
        call = begin(front)
        rids = engine.take(engine.sent[0])
        with pytest.raises(Refusal) as caught:
            await call.answers()
        assert (caught.value.status, caught.value.code) == (504, "request_timeout")
        assert engine.sent[1].rids.tolist() == [*rids]
        engine.step({}, finish(rids[0], [], "abort"))
        assert not front.calls

    played(play, timeout_s=0.01)


def test_a_call_that_cannot_be_sent_counts_for_nothing() -> None:
    """Else it would be waited for without an end, and a few of them fill the server for good."""

    class Mute:
        def send(self, message: Any) -> None:
            raise OverflowError("can't serialize")

    async def play(front: Front, engine: Engine) -> None:
        front.connect(Mute())
        front.take(Ready((), 128, 4))
        with pytest.raises(OverflowError):
            begin(front, n=2)
        assert (front.open_choices, front.calls, front._parts) == (0, set(), {})

    played(play)


def test_too_many_choices_are_blamed_on_the_field_that_asks_for_them() -> None:
    async def play(front: Front, engine: Engine) -> None:
        for param in ("n", "prompt", "input"):
            with pytest.raises(Refusal, match="7 choices") as caught:
                front.check_room(7, param)
            assert (caught.value.status, caught.value.param) == (400, param)

    played(play)


def test_an_engine_that_fails_ends_every_call() -> None:
    async def play(front: Front, engine: Engine) -> None:
        taken, unheard = begin(front), begin(front, streaming=True)
        engine.take(engine.sent[0])
        asking = asyncio.ensure_future(front.flush_cache())
        await asyncio.sleep(0)
        front.take(Failed("its device is gone"))
        for waiting in (taken.answers(), unheard.settled(), asking):
            with pytest.raises(Refusal, match="its device is gone"):
                await waiting
        assert front.open_choices == 0
        assert not front.calls

    played(play)


def test_a_request_that_ends_by_a_failure_is_told_so() -> None:
    async def play(front: Front, engine: Engine) -> None:
        call = begin(front, streaming=True)
        rids = engine.take(engine.sent[0])
        engine.step({rids[0]: A})
        # as an engine tells it that has failed: of no step
        engine.step({}, finish(rids[0], [A], "error", error="the model raised"), number=-1)
        assert call.over
        items = await call.news()
        assert [delta.text for _, delta in items] == ["a"]  # what came before is told
        assert call.error is not None
        assert (call.error.status, call.error.code) == (503, "engine_failed")
        assert front.failure == "the model raised"  # before anybody can have read it
        with pytest.raises(Refusal):
            front.check_ready()
        front.take(Failed("its farewell"))
        assert front.failure == "the model raised"

    played(play)


def test_an_error_of_one_row_ends_its_request_and_no_other() -> None:
    async def play(front: Front, engine: Engine) -> None:
        call, other = begin(front, streaming=True, n=2), begin(front)
        first, second = engine.take(engine.sent[0])
        (third,) = engine.take(engine.sent[1])
        engine.step({first: A, second: A})
        engine.step({}, finish(first, [A], "error", error="no token may follow"))
        assert not call.over  # its other choice goes on
        engine.step({second: B}, finish(second, [A, B]))
        assert call.error is not None
        assert (call.error.status, call.error.code) == (500, "answer_failed")
        assert "no token may follow" in call.error.message
        assert front.failure is None
        engine.step({third: A}, finish(third, [A]))
        assert (await other.answers())[0].outputs[0].text == "a"
        assert front.open_choices == 0

    played(play)


def test_a_grammar_goes_with_its_prompt_and_is_said_once() -> None:
    async def play(front: Front, engine: Engine) -> None:
        params = SamplingParams(structured_outputs=StructuredOutputs(regex="a+"))
        front.begin("call", [Prompt([A], None, Grammar("start: /a+/"))], params, False)
        (sent,) = engine.sent
        assert sent.grammar == Grammar("start: /a+/")
        assert sent.params == SamplingParams()

    played(play)


def test_calls_of_an_engine_that_is_gone_leave_those_of_the_next_alone() -> None:
    async def play(front: Front, engine: Engine) -> None:
        old = begin(front, streaming=True)
        rids = engine.take(engine.sent[0])
        front.take(Failed("its device is gone"))
        again = Engine(front, ready=False)
        with pytest.raises(Refusal) as caught:
            front.check_room(1)
        assert caught.value.code == "loading"
        front.take(Ready((), 128, 4))
        call = begin(front)
        assert again.take(again.sent[0]) == rids  # it counts from the start
        front.cancel(old)  # whose client is still reading of its end
        assert len(again.sent) == 1
        again.step({}, finish(rids[0], [A]))
        (output,) = await call.answers()
        assert output.outputs[0].token_ids == [A]
        assert front.open_choices == 0

    played(play)


def test_three_engines_that_die_young_are_enough() -> None:
    now_s = [0.0]
    patience = Patience(lambda: now_s[0])
    for served_s, again in ((1.0, True), (59.0, True), (61.0, True), (0.0, True), (2.0, True)):
        now_s[0] += 1000.0  # to load
        patience.ready()
        now_s[0] += served_s
        assert patience.died() is again
    now_s[0] += 1000.0
    assert not patience.died()  # the third in a row, and it never was ready


def test_who_hears_nothing_for_long_is_pinged_and_others_are_not() -> None:
    async def play(front: Front, engine: Engine) -> None:
        silent, told = begin(front, streaming=True), begin(front, streaming=True)
        told.told_s = silent.told_s + 100.0
        silent.told_s -= 10.0
        whole = begin(front)
        whole.told_s -= 10.0
        front.ping(5.0)
        assert await silent.news() == []
        assert not told._ping
        assert not whole._ping

    played(play)


# --- streams ----------------------------------------------------------------------------------


def events(data: bytes) -> list[dict[str, Any]]:
    assert data.endswith(DONE)
    lines = data.decode().split("\n\n")[:-2]
    return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines]


async def told(front: Front, engine: Engine, body: dict[str, Any], chat: bool) -> list[Any]:
    """The events of a stream of `a`, `b`, then one more token, `ab`, which is its last."""
    read = read_chat_request if chat else read_completion_request
    asked = read(msgspec.json.encode(body | {"stream": True}))
    call = front.begin("call", [Prompt([A, B], "ab")], asked.params, True)
    story = (ChatStory if chat else TextStory)(asked, call, TEXTS, 5, "toy")
    data = story.begin()
    rids = engine.take(engine.sent[-1])
    for token in (A, B):
        engine.step(dict.fromkeys(rids, token), logprobs=rows(asked, rids, token))
        data += story.tell(await call.news())
    ends = [finish(rid, [A, B, AB], cached_tokens=1) for rid in rids]
    engine.step(dict.fromkeys(rids, AB), *ends, logprobs=rows(asked, rids, AB))
    data += story.tell(await call.news())
    return events(data + story.end())


def rows(asked: Any, rids: tuple[int, ...], token: int) -> LogprobRows | None:
    if asked.params.logprobs is None:
        return None
    count = len(rids)
    return LogprobRows(
        np.arange(count, dtype=np.int32),
        np.full(count, -2.0, np.float32),
        np.full(count, 3, np.int32),
        2,
        np.tile(np.array([B, 9], np.int32), count),
        np.tile(np.array([-0.5, -1.0], np.float32), count),
    )


CHAT = {"messages": [{"role": "user", "content": "x"}]}


def test_a_chat_stream_tells_the_role_first_and_the_reason_last() -> None:
    async def play(front: Front, engine: Engine) -> None:
        found = await told(front, engine, CHAT, True)
        choices = [one["choices"][0] for one in found]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["delta"].get("content") for choice in choices] == ["", "a", "b", "ab"]
        assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert {one["id"] for one in found} == {"call"}
        assert {one["object"] for one in found} == {"chat.completion.chunk"}
        assert all("usage" not in one for one in found)

    played(play)


@pytest.mark.parametrize("chat", [True, False])
def test_usage_comes_last_without_choices(chat: bool) -> None:
    async def play(front: Front, engine: Engine) -> None:
        options = {"include_usage": True}
        body = (CHAT if chat else {"prompt": "ab"}) | {"stream_options": options}
        *rest, last = await told(front, engine, body, chat)
        assert all(one["usage"] is None and one["choices"] for one in rest)
        assert last["choices"] == []
        assert last["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        }

    played(play)


def test_continuous_usage_counts_up() -> None:
    async def play(front: Front, engine: Engine) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        found = await told(front, engine, {"prompt": "ab", "stream_options": options}, False)
        assert [one["usage"]["completion_tokens"] for one in found] == [1, 2, 3, 3]

    played(play)


def test_a_stream_of_choices_tells_each_by_its_number() -> None:
    async def play(front: Front, engine: Engine) -> None:
        found = await told(front, engine, CHAT | {"n": 2}, True)
        numbers = [one["choices"][0]["index"] for one in found]
        assert numbers == [0, 1] * 4

    played(play)


def test_streamed_log_probabilities_name_the_best_and_the_chosen() -> None:
    async def play(front: Front, engine: Engine) -> None:
        body = CHAT | {"logprobs": True, "top_logprobs": 2}
        found = await told(front, engine, body, True)
        content = [one["choices"][0]["logprobs"]["content"] for one in found[1:]]
        assert [len(one) for one in content] == [1, 1, 1]
        first = content[0][0]
        assert (first["token"], first["logprob"], first["bytes"]) == ("a", -2.0, [97])
        # the chosen one is the third best: it is not among the two best
        assert [best["token"] for best in first["top_logprobs"]] == ["b", "ad"]
        assert [best["logprob"] for best in first["top_logprobs"]] == [-0.5, -1.0]
        found = await told(front, engine, {"prompt": "ab", "logprobs": 1}, False)
        logprobs = [one["choices"][0]["logprobs"] for one in found]
        assert [one["tokens"] for one in logprobs] == [["a"], ["b"], ["ab"]]
        assert [one["text_offset"] for one in logprobs] == [[0], [1], [2]]
        assert logprobs[0]["top_logprobs"] == [{"b": -0.5, "a": -2.0}]
        # the chosen one of the second token is the best as well: told once, as it was chosen
        assert logprobs[1]["top_logprobs"][0].keys() == {"b"}

    played(play)


def test_a_stream_echoes_and_tells_ids_where_asked() -> None:
    async def play(front: Front, engine: Engine) -> None:
        body = {"prompt": "ab", "echo": True, "return_token_ids": True}
        found = [one["choices"][0] for one in await told(front, engine, body, False)]
        assert [choice["text"] for choice in found] == ["ab", "a", "b", "ab"]
        assert found[0]["prompt_token_ids"] == [A, B]
        assert [choice.get("token_ids") for choice in found] == [None, [A], [B], [AB]]
        silent = {"prompt": "ab", "echo": True, "max_tokens": 0}
        found = [one["choices"][0] for one in await told(front, engine, silent, False)]
        assert "".join(choice["text"] for choice in found) == "ab"

    played(play)


def test_an_echo_waits_for_its_log_probabilities_and_an_abort_for_nothing() -> None:
    async def play(front: Front, engine: Engine) -> None:
        body = {"prompt": "abab", "echo": True, "logprobs": 0, "n": 2, "stream": True}
        asked = read_completion_request(msgspec.json.encode(body))
        for aborted in (False, True):
            prompt = Prompt([A, B, AB], "abab")
            call = front.begin("call", [prompt], asked.params, True)
            story = TextStory(asked, call, TEXTS, 5, "toy")
            assert story.begin() == b""
            first, second = engine.take(engine.sent[-1])
            engine.step({second: A}, logprobs=rows(asked, (second,), A))
            # the first, whose prompt is told, was preempted: there is nothing to tell it behind
            assert story.tell(await call.news()) == b""
            if aborted:
                engine.step({}, finish(first, [], "abort"), finish(second, [A], "abort"))
            else:
                values = rows(asked, (1, 2), B)
                assert values is not None
                scored = PromptLogprobs(first, 1, values)
                engine.step(
                    {first: B}, logprobs=rows(asked, (first,), B), prompt_logprobs=(scored,)
                )
            data = story.tell(await call.news())
            found = [one["choices"][0] for one in events(data + DONE)]
            assert [choice["text"] for choice in found[:2]] == ["abab"] * 2
            logprobs = [choice["logprobs"] for choice in found]
            if aborted:
                assert logprobs[:2] == [None, None]
                assert [choice["finish_reason"] for choice in found[2:]] == ["abort", None, "abort"]
            else:
                assert logprobs[0]["token_logprobs"] == [None, -2.0, -2.0]
                assert [one["text_offset"] for one in logprobs] == [[0, 1, 2]] * 2 + [[4]] * 2
                assert [choice["index"] for choice in found] == [0, 1, 0, 1]

    played(play)


def test_a_stop_string_that_may_be_beginning_is_held_back() -> None:
    async def play(front: Front, engine: Engine) -> None:
        call = begin(front, streaming=True, stop=["bab"])
        rids = engine.take(engine.sent[0])
        texts: list[str] = []
        for token in (A, B, A, A):
            engine.step({rids[0]: token})
            texts += [delta.text for _, delta in await call.news()]
        assert texts == ["a", "", "", "baa"]  # "b" and "ba" could have become "bab"

    played(play)
