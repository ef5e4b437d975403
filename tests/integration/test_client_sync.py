"""The sync client against a scripted router on a real socket."""

import gc
import threading
import time

import pytest
import zmq
from kvferry import Client, Grammar, errors
from kvferry.testing import ScriptedRouter, completed
from kvferry_proto.errors import HTTP_STATUS, ErrorCode, Phase, RequestError
from kvferry_proto.ints import Int32s
from kvferry_proto.message import Refused
from kvferry_proto.to_client import Delta, Failed
from kvferry_proto.to_router import CancelGenerate, ChatMessage, Generate, TokenLogprobs


def hold(_request, _reply):
    """Never answer."""


def first_piece(request, reply):
    reply.send(Delta(id=request.id, text="one", token_ids=Int32s([1])))


def failing(error):
    return lambda request, reply: reply.send(Failed(id=request.id, error=error))


def test_the_whole_answer_is_the_sum_of_its_pieces():
    entry = TokenLogprobs(7, -0.5, [(7, -0.5)])

    def script(request, reply):
        reply.send(Delta(id=request.id, text="", token_ids=Int32s([7]), logprobs=[entry]))
        reply.send(Delta(id=request.id, text="é!", token_ids=Int32s([8, 9]), logprobs=[entry, entry]))
        reply.send(completed(request.id, 3))

    with ScriptedRouter(script) as router, Client(router.endpoint) as client:
        answer = client.generate("hello", max_tokens=3, temperature=0, seed=5, stop="\n", logprobs=1)
        sent = router.expect(Generate)
    assert (answer.text, answer.token_ids, answer.logprobs) == ("é!", [7, 8, 9], [entry] * 3)
    assert (answer.model, answer.finish_reason, answer.usage.completion_tokens) == ("scripted", "stop", 3)
    assert (sent.prompt, sent.stop, sent.sampling.max_tokens, sent.sampling.seed) == ("hello", ["\n"], 3, 5)


def test_messages_and_token_ids_travel_as_given():
    with ScriptedRouter() as router, Client(router.endpoint) as client:
        client.generate(messages=[{"role": "user", "content": "hi"}, ChatMessage(role="assistant", content="ho")])
        chat = router.expect(Generate)
        client.generate(prompt_ids=range(5))
        ids = router.expect(Generate)
        client.generate("x", min_p=0.1, logit_bias={7: -1.5}, repetition_penalty=1.2)
        biased = router.expect(Generate).sampling
        client.generate("x", grammar=Grammar.choice(["a", "b"]))
        assert router.expect(Generate).grammar == Grammar.regex("(a)|(b)")
    assert (biased.min_p, biased.logit_bias, biased.repetition_penalty) == (0.1, ((7, -1.5),), 1.2)
    assert [(turn.role, turn.content) for turn in chat.messages] == [("user", "hi"), ("assistant", "ho")]
    assert list(ids.prompt_ids) == [0, 1, 2, 3, 4]
    assert ids.prompt is None


@pytest.mark.parametrize(
    ("prompt", "ask"),
    [
        (None, {}),
        ("a", {"prompt_ids": [1]}),
        ("a", {"temperature": -1}),
        ("a", {"max_tokens": 0}),
        ("a", {"logit_bias": {7: 101}}),
        ("a", {"logit_bias": {"x": 1}}),
        ("a", {"logit_bias": [7]}),
        ("a", {"min_p": 2}),
        ("a", {"grammar": Grammar.regex("")}),
        ("a", {"grammar": "a+"}),
        ("a", {"max_tokens": "many"}),
        ("a", {"stop": ["x"] * 17}),
        ("a", {"nonsense": 1}),
        (None, {"prompt_ids": [1 << 31]}),
        (None, {"prompt_ids": ["x"]}),
        (None, {"messages": [{"role": "user"}]}),
        (7, {}),
        ("x" * (2 << 20), {}),
    ],
)
def test_a_wrong_request_is_refused_before_it_is_sent(prompt, ask):
    with ScriptedRouter() as router, Client(router.endpoint) as client:
        with pytest.raises(errors.BadRequest):
            client.generate(prompt, **ask)
        client.generate("fine")
        assert router.expect(Generate).prompt == "fine"


def test_many_streams_share_one_socket_and_do_not_mix():
    held = []

    def script(request, reply):
        held.append((request, reply))
        if len(held) == 20:
            for step in range(3):
                for each, back in held:
                    back.send(Delta(id=each.id, text=f"{each.prompt}{step} ", token_ids=Int32s([step])))
            for each, back in reversed(held):
                back.send(completed(each.id, 3))

    with ScriptedRouter(script) as router, Client(router.endpoint) as client:
        streams = [client.stream(f"p{i}-") for i in range(20)]
        answers = [stream.wait() for stream in reversed(streams)][::-1]
    assert [answer.text for answer in answers] == [f"p{i}-0 p{i}-1 p{i}-2 " for i in range(20)]


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_its_exception_with_phase_and_node(code):
    error = RequestError(code=code, message="no luck", phase=Phase.PREFILL, node="prefiller-1", retry_after=2.5)
    with (
        ScriptedRouter(failing(error)) as router,
        Client(router.endpoint) as client,
        pytest.raises(errors.EXCEPTIONS[code]) as caught,
    ):
        client.generate("x")
    assert (caught.value.code, caught.value.phase, caught.value.node) == (code, Phase.PREFILL, "prefiller-1")
    assert caught.value.retry_after == 2.5
    assert "no luck" in str(caught.value)
    assert "prefiller-1" in str(caught.value)
    assert set(errors.EXCEPTIONS) == set(HTTP_STATUS)


@pytest.mark.parametrize("leave", ["break", "close", "with", "error"])
def test_leaving_a_stream_early_cancels_it(leave):
    with ScriptedRouter(first_piece) as router, Client(router.endpoint) as client:
        if leave == "break":
            for _ in client.stream("x"):
                break
            gc.collect()
        elif leave == "close":
            stream = client.stream("x")
            next(stream)
            stream.close()
        elif leave == "with":
            with client.stream("x") as stream:
                next(stream)
        else:
            with pytest.raises(ZeroDivisionError), client.stream("x") as stream:
                assert 1 / len(next(stream).text.removeprefix("one"))
        asked = router.expect(Generate)
        assert router.expect(CancelGenerate).id == asked.id


def test_a_finished_stream_is_not_cancelled():
    with ScriptedRouter() as router, Client(router.endpoint) as client:
        with client.stream("a b c") as stream:
            assert [piece.text for piece in stream] == ["a", "b", "c"]
            assert stream.completion.text == "abc"
        client.generate("next")
        assert router.expect(Generate).prompt == "a b c"
        assert router.expect(Generate).prompt == "next"


def test_closing_the_client_cancels_what_is_open():
    with ScriptedRouter(hold) as router:
        client = Client(router.endpoint)
        stream = client.stream("x")
        asked = router.expect(Generate)
        client.close()
        assert router.expect(CancelGenerate).id == asked.id
        with pytest.raises(errors.ConnectionLost):
            next(stream)
        with pytest.raises(RuntimeError, match="closed"):
            client.generate("y")


def test_cancel_ends_the_stream_with_cancelled_once_the_router_says_so():
    replies = []

    def script(request, reply):
        replies.append(reply)
        first_piece(request, reply)

    error = RequestError(code=ErrorCode.CANCELLED, message="stopped", phase=Phase.DECODE, node="decoder-1")
    with ScriptedRouter(script) as router, Client(router.endpoint) as client:
        stream = client.stream("x")
        assert next(stream).text == "one"
        stream.cancel()
        router.expect(Generate)
        asked = router.expect(CancelGenerate)
        replies[0].send(Failed(id=asked.id, error=error))
        with pytest.raises(errors.Cancelled):
            next(stream)


def test_a_request_that_takes_too_long_is_given_up_and_cancelled():
    with ScriptedRouter(first_piece) as router, Client(router.endpoint, timeout=0.2) as client:
        with pytest.raises(errors.RequestTimeout) as caught:
            client.generate("x")
        asked = router.expect(Generate)
        assert router.expect(CancelGenerate).id == asked.id
    assert caught.value.phase is Phase.DECODE
    assert isinstance(caught.value, TimeoutError)


def test_an_answer_that_comes_after_its_timeout_disturbs_nobody():
    late = []

    def script(request, reply):
        if request.prompt == "slow":
            late.append((request, reply))
            return
        late[0][1].complete(late[0][0].id, ["late"])
        reply.complete(request.id, ["good"])

    with ScriptedRouter(script) as router, Client(router.endpoint) as client:
        with pytest.raises(errors.RequestTimeout):
            client.generate("slow", timeout=0.1)
        assert client.generate("quick").text == "good"


def test_nobody_there_is_told_within_the_connect_timeout():
    with (
        Client("tcp://127.0.0.1:1", connect_timeout=0.2) as client,
        pytest.raises(errors.ConnectionLost, match="no router answered"),
    ):
        client.generate("x")


def test_an_endpoint_that_is_none_is_refused_at_once():
    with pytest.raises(ValueError, match="nonsense"):
        Client("nonsense")


def test_a_router_that_restarts_fails_what_is_open_and_serves_what_comes_next():
    router = ScriptedRouter(first_piece)
    with Client(router.endpoint) as client:
        streams = [client.stream("x") for _ in range(3)]
        assert [next(stream).text for stream in streams] == ["one"] * 3
        router.close()
        for stream in streams:
            with pytest.raises(errors.ConnectionLost) as caught:
                next(stream)
            assert caught.value.node == router.endpoint
        with ScriptedRouter(endpoint=router.endpoint) as successor:
            assert client.generate("a b").text == "ab"
            # What was open is not asked again behind the caller's back.
            assert successor.expect(Generate).prompt == "a b"


def test_a_router_that_restarts_while_nobody_looks_is_no_error():
    router = ScriptedRouter()
    with Client(router.endpoint) as client:
        client.generate("a")
        router.close()
        with ScriptedRouter(endpoint=router.endpoint) as successor:
            assert client.generate("b").text == "b"
            assert successor.expect(Generate).prompt == "b"


def test_an_answer_that_arrived_before_the_break_is_whole():
    router = ScriptedRouter()
    with Client(router.endpoint) as client:
        stream = client.stream("a b c")
        router.expect(Generate)
        time.sleep(0.1)
        router.close()
        assert stream.wait().text == "abc"


@pytest.mark.parametrize(("reason", "kind"), [("type", errors.ProtocolError), ("overloaded", errors.Overloaded)])
def test_a_refusal_ends_the_requests_that_were_not_heard_of(reason, kind):
    def script(request, reply):
        if request.prompt == "heard":
            first_piece(request, reply)
        else:
            reply.send(Refused(reason=reason, detail="not today"))

    with ScriptedRouter(script) as router, Client(router.endpoint) as client:
        heard = client.stream("heard")
        next(heard)
        with pytest.raises(kind, match="not today"):
            client.generate("unheard")
        heard._deadline = time.monotonic() + 0.05
        with pytest.raises(errors.RequestTimeout):
            next(heard)


def test_a_refusal_that_names_its_request_ends_that_one_alone():
    held = []

    def script(request, reply):
        held.append(request.id)
        if request.prompt == "bad":
            reply.send(Refused(reason="type", detail="what is this", about=request.id))
        elif request.prompt == "release":
            for each in held:
                reply.complete(each, [each])

    with ScriptedRouter(script) as router, Client(router.endpoint) as client:
        waiting = client.stream("hold")
        with pytest.raises(errors.ProtocolError, match="what is this"):
            client.generate("bad")
        client.generate("release")
        assert waiting.wait().text == waiting.id


@pytest.mark.parametrize(
    "parts",
    [[b""], [b"not json"], [b'{"sender":["r",1],"to":0,"body":{"type":"Delta","id":3}}'], [b"{}"] * 9, [b"{}", b"abc"]],
)
def test_an_unreadable_message_ends_what_is_open_and_the_client_goes_on(parts):
    def script(request, reply):
        reply.send_raw(parts) if request.prompt == "bad" else reply.complete(request.id, ["fine"])

    with ScriptedRouter(script) as router, Client(router.endpoint) as client:
        with pytest.raises(errors.ProtocolError):
            client.generate("bad")
        assert client.generate("good").text == "fine"


def read(stream):
    with pytest.raises(errors.ConnectionLost):
        next(stream)


def test_two_threads_at_once_are_told_to_use_a_client_each():
    with ScriptedRouter(hold) as router, Client(router.endpoint, timeout=5) as client:
        stream = client.stream("x")
        reader = threading.Thread(target=read, args=[stream])
        reader.start()
        router.expect(Generate)
        while not client._pump._busy.locked():
            time.sleep(0.005)
        with pytest.raises(RuntimeError, match="another thread"):
            client.generate("y")
        router.close()
        reader.join()


def test_who_answers_but_is_no_router_is_said():
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.bind("tcp://127.0.0.1:*")
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    try:
        with Client(endpoint, connect_timeout=0.3) as client, pytest.raises(errors.ConnectionLost):
            client.generate("x")
    finally:
        socket.close(0)
        context.term()


def test_nothing_is_left_when_a_client_is_closed():
    with ScriptedRouter() as router:
        with Client(router.endpoint) as client:
            client.generate("warm up")
        threads = threading.active_count()
        for _ in range(5):
            with Client(router.endpoint) as client:
                client.generate("x")
                assert len(client._pump.exchange) == 0
        assert threading.active_count() == threads
