"""The router as a process of its own: what it loads, how it starts, and how it ends."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys

import httpx
import pytest
from kvferry_node.registry import Registry
from kvferry_proto.nodes import Load, NodeRecord, NodeRef, Role, new_incarnation
from kvferry_proto.page_table import Source, unpack
from kvferry_router.model_folder import load_model_text
from router_rig import running_cluster
from scripted import ANSWER, LAYOUT, ScriptedDecoder
from text_folder import MODEL, make_model_folder

FORBIDDEN = ("torch", "transformers", "kvferry_engine", "kvferry_fabric", "kvferry_prefiller", "kvferry_decoder")


def test_the_router_loads_no_model_code():
    code = (
        "import sys, pkgutil, importlib, kvferry_router\n"
        "for module in pkgutil.iter_modules(kvferry_router.__path__):\n"
        "    if module.name != '__main__': importlib.import_module('kvferry_router.' + module.name)\n"
        f"print([name for name in {FORBIDDEN!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"


def test_a_wrong_folder_is_said_at_once(tmp_path):
    command = [sys.executable, "-m", "kvferry_router", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "config.json does not exist" in done.stderr


async def logged(process, event):
    while line := await process.stderr.readline():
        entry = json.loads(line)
        if entry.get("event") == event:
            return entry
    raise AssertionError(f"the router ended without {event!r}")


async def test_sigterm_lets_a_stream_end_and_exits_0(redis_server, tmp_path):
    folder = make_model_folder(tmp_path)
    text = load_model_text(folder)
    answer = [*text.tokenizer.encode_now(ANSWER), *text.stop_token_ids]
    options = ["--model", folder, "--redis-url", redis_server.url, "--http-port", "0", "--zmq-port", "0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvferry_router", *map(str, options), stderr=asyncio.subprocess.PIPE
    )
    decoder = await ScriptedDecoder(redis_server.url, "d1", answer).start()
    try:
        async with asyncio.timeout(300), httpx.AsyncClient(timeout=60) as http:
            http.base_url = (await logged(process, "serving"))["http"]
            while (await http.get("/ready")).status_code != 200:  # noqa: ASYNC110  # nothing here can set an event
                await asyncio.sleep(0.05)
            decoder.pause_at = 3
            ask = {"prompt": "one", "max_tokens": 100}
            running = asyncio.create_task(http.post("/v1/completions", json=ask))
            while not decoder.assigned:  # noqa: ASYNC110  # nothing here can set an event
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            await logged(process, "stopping")
            while (await http.get("/ready")).status_code != 503:  # noqa: ASYNC110  # nothing here can set an event
                await asyncio.sleep(0.05)
            refused = await http.post("/v1/completions", json=ask)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            decoder.go.set()
            assert (await running).json()["choices"][0]["text"] == ANSWER
            assert await process.wait() == 0
        assert redis_server.command("HKEYS", "kvferry:nodes") == ["d1"]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await decoder.kill()


@pytest.mark.parametrize("allowed", [False, True])
async def test_without_a_prefiller_the_setting_decides(redis_server, tmp_path, allowed):
    folder = make_model_folder(tmp_path)
    async with running_cluster(redis_server.url, folder, local_prefill=allowed) as cluster:
        decoder = ScriptedDecoder(redis_server.url, "d1", cluster.tokens())
        decoder.registry.record = decoder.record = _short_local_prefill(decoder.record)
        cluster.decoders.append(await decoder.start())
        await cluster.until(lambda state: state["decoders"] == 1)
        assert (await cluster.http.get("/ready")).status_code == (200 if allowed else 503)
        await cluster.complete(200 if allowed else 503, prompt=[50] * 20)
        await cluster.complete(prompt=[50])


async def test_mixed_decoders_need_no_prefiller_whatever_the_setting(redis_server, tmp_path):
    async with running_cluster(redis_server.url, make_model_folder(tmp_path), local_prefill=False) as cluster:
        await cluster.decoder()
        assert (await cluster.http.get("/ready")).status_code == 200
        await cluster.complete(prompt=[50] * 100)


async def test_a_prefiller_is_named_to_the_decoder(redis_server, tmp_path):
    folder = make_model_folder(tmp_path)
    async with (
        running_cluster(redis_server.url, folder) as cluster,
        joined_prefiller(redis_server.url) as prefiller,
    ):
        decoder = await decoder_beside_it(cluster, redis_server.url)
        await cluster.complete(prompt=[50] * 20)
        assign = decoder.assigned[0]
        assert assign.prefiller == prefiller
        entries = unpack(assign.page_table)
        assert [entry.source for entry in entries] == [Source.PREFILLER] * 5
        # 19 tokens are prefilled: four full pages of 4, and one that has no name.
        assert [entry.block_hash != 0 for entry in entries] == [True] * 4 + [False]


async def test_a_prefiller_that_left_while_the_answer_grew_is_not_remembered_to_hold_the_prompt(redis_server, tmp_path):
    """Its next life has the same name and an empty cache."""
    async with running_cluster(redis_server.url, make_model_folder(tmp_path)) as cluster:
        async with joined_prefiller(redis_server.url) as prefiller:
            decoder = await decoder_beside_it(cluster, redis_server.url)
            decoder.pause_at = 1
            asked = asyncio.create_task(cluster.complete(prompt=[50] * 20))
            await cluster.until(lambda _: decoder.assigned)
            assert decoder.assigned[0].prefiller == prefiller
        await cluster.until(lambda state: state["prefillers"] == 0)
        decoder.go.set()
        await asked
        held = cluster.router.dispatcher._placing._memory.held(LAYOUT, [50] * 20, "")
        assert held.keys() == {decoder.record.ref.id}


@contextlib.asynccontextmanager
async def joined_prefiller(redis_url):
    """A prefiller by name, in the cluster until the block ends."""
    record = NodeRecord(
        ref=NodeRef("p1", new_incarnation()),
        role=Role.PREFILLER,
        endpoint="tcp://127.0.0.1:9",
        model=MODEL,
        layout=LAYOUT,
        provider="tcp",
    )
    registry = Registry(redis_url, "kvferry", record)
    await registry.join()
    beat = asyncio.create_task(registry.run(Load, list))
    yield record.peer
    await registry.leave()
    await beat
    await registry.close()


async def decoder_beside_it(cluster, redis_url):
    """A decoder that leaves prompts to the prefiller; the router sees both."""
    decoder = ScriptedDecoder(redis_url, "d1", cluster.tokens())
    decoder.registry.record = decoder.record = _short_local_prefill(decoder.record)
    cluster.decoders.append(await decoder.start())
    await cluster.until(lambda state: (state["decoders"], state["prefillers"]) == (1, 1))
    return decoder


def _short_local_prefill(record):
    values = {name: getattr(record, name) for name in record.__struct_fields__}
    return NodeRecord(**(values | {"local_prefill_tokens": 2}))
