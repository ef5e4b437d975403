"""A client that leaves between two legs of its request: from wherever it was everything comes back."""

import asyncio
import math
from contextlib import asynccontextmanager

import msgspec
import pytest
from cluster import Cluster, Node, wait_for
from kvferry_fabric import EventKind, TransferEngine
from kvferry_node.registry import Registry
from kvferry_proto.errors import ErrorCode, Phase, RequestError
from kvferry_proto.ints import Int32s
from kvferry_proto.memory import MemoryDescriptor
from kvferry_proto.nodes import Load
from kvferry_proto.timeline import PrefillTimeline
from kvferry_proto.to_decoder import CancelConfirmed, PrefillFailed, PrefillReport
from stranger import Impostor, record_of
from streams import Golden, Stream, prompt

pytestmark = pytest.mark.faults

PASSAGE = 300
DECODERS = ("decoder0", "decoder1")


@pytest.fixture(scope="module")
def shared(tmp_path_factory, tiny_model):
    worker = ["--dtype", "float32", "--kv-memory", "2MiB", "--page-size", "8"]
    prefiller = ["--chunk-size", "32", "--max-running", "1"]
    decoder = ["--local-prefill-tokens", "8", "--max-running", "1", "--cancel-retry-seconds", "0.3"]
    with Cluster(
        tmp_path_factory.mktemp("leaves"), tiny_model, decoders=2, worker=worker, prefiller=prefiller, decoder=decoder
    ) as cluster:
        cluster.golden = Golden(cluster)
        yield cluster


@pytest.fixture
def cluster(shared):
    yield shared
    shared.golden.check()


async def until(condition, what):
    await asyncio.to_thread(wait_for, condition, 60, what)


def requests(cluster, name):
    return cluster[name].state()["requests"]


def pages(cluster, state):
    return sum(cluster[name].state()["pages"][state] for name in DECODERS)


# --- with the real prefiller ---------------------------------------------------------------------------------------


async def test_while_queued_at_the_prefiller(cluster):
    with cluster.slow_motion("prefiller0", step=math.inf):
        first = Stream(cluster.url, prompt(PASSAGE, 1), 4)
        await until(lambda: requests(cluster, "prefiller0")["running"], "one runs")
        second = Stream(cluster.url, prompt(PASSAGE, 2), 4)
        await until(lambda: requests(cluster, "prefiller0")["waiting"], "the other waits")
        await second.leave()
        await until(lambda: not requests(cluster, "prefiller0")["waiting"], "the prefiller heard of it")
    assert len(await first.end()) == 4


async def test_in_the_midst_of_the_prefill(cluster):
    with cluster.slow_motion("prefiller0", step=1, free=2):
        stream = Stream(cluster.url, prompt(PASSAGE, 1), 4)
        await until(lambda: cluster["prefiller0"].held().get("active_transfers"), "writes under way")
        assert requests(cluster, "prefiller0")["running"]
        await stream.leave()
        await until(lambda: not cluster["prefiller0"].held(), "the prefiller heard of it")


@asynccontextmanager
async def late_writer(cluster):
    """A prefiller whose every write is so late that whoever asked for it has left."""
    real = cluster["prefiller0"]
    # Sorts before the real one: it is chosen while both are idle.
    flags = [*real.flags, "--fault", "delay-write-ms=60000"]
    node = Node("a-late-one", real.role, flags, real.log.with_name("a-late-one.log"), real.environ)
    cluster.nodes[node.name] = node
    node.start()
    try:
        await asyncio.to_thread(cluster.wait_seen)
        yield node
        assert await asyncio.to_thread(node.stop) == 0
    finally:
        del cluster.nodes[node.name]
        node.kill()
    await asyncio.to_thread(cluster.wait_seen)


async def test_while_the_last_writes_are_on_their_way(cluster):
    async with late_writer(cluster) as prefiller:
        stream = Stream(cluster.url, prompt(41), 4)
        await until(lambda: requests(cluster, prefiller.name)["leaving"], "all is computed, not all is written")
        await stream.leave()
        await until(lambda: not prefiller.held(), "the prefiller heard of it")


async def test_while_waiting_for_a_place_in_the_batch(cluster):
    await asyncio.to_thread(cluster.settle)  # so that the decoders get a stream each
    with cluster.slow_motion(*DECODERS):
        running = [Stream(cluster.url, prompt(8, seed), 300) for seed in range(2)]
        for stream in running:
            await stream.until(1)
        third = [Stream(cluster.url, prompt(8), 4), Stream(cluster.url, prompt(41), 4)]

        def waiting():
            return sum(requests(cluster, name)["waiting"] for name in DECODERS)

        await until(lambda: waiting() == 2, "both wait for a place")
        for stream in third:
            await stream.leave()
        await until(lambda: waiting() == 0, "the decoders heard of it")
    for stream in running:
        assert len(await stream.end()) == 300


async def test_in_the_midst_of_the_answer(cluster):
    await asyncio.to_thread(cluster.settle)
    with cluster.slow_motion(*DECODERS):
        streams = [Stream(cluster.url, prompt(8, seed), 1000) for seed in range(2)]
        for stream in streams:
            await stream.until(3)
        await streams[0].leave()
        await until(lambda: sum(requests(cluster, name)["running"] for name in DECODERS) == 1, "one runs")
        assert not streams[1].task.done()
        await streams[1].leave()
        await until(lambda: not any(requests(cluster, name)["running"] for name in DECODERS), "none runs")


async def test_before_the_answer_of_a_request_that_is_not_streamed(cluster):
    with cluster.slow_motion(*DECODERS):
        stream = Stream(cluster.url, prompt(8), 1000, stream=False, stream_options=None)
        await until(lambda: any(requests(cluster, name)["running"] for name in DECODERS), "it runs")
        await stream.leave()
        await until(lambda: not any(requests(cluster, name)["running"] for name in DECODERS), "none runs")


# --- with a prefiller that does what the test says ------------------------------------------------------------------


class Puppet(Impostor):
    """A prefiller that is in the cluster, and whose writes and words are the test's."""

    def __init__(self, cluster):
        # Sorts before the real one: it is chosen while both are idle.
        super().__init__("a-puppet")
        real = record_of(cluster, "prefiller0")
        self.record = msgspec.structs.replace(real, ref=self.ref, endpoint=self.endpoint)
        self.layout = real.layout
        self.engine = TransferEngine("tcp", incarnation=self.ref.incarnation)
        self.region = self.engine.register(memoryview(bytearray(self.layout.page_bytes)))

    def __exit__(self, *_):
        self.engine.close()
        super().__exit__()

    async def asked(self):
        """Wait for a Prefill, and remember it."""
        header, (_, destination) = await asyncio.to_thread(self.hear)
        self.order = header["body"]
        assert self.order["type"] == "Prefill"
        self.pages = list(Int32s.from_frame(destination))
        self.names = {name: self.order[name] for name in ("request_id", "slot", "generation")}

    async def write(self, layers):
        """Write every page of these layers, and wait until all have arrived."""
        remote = msgspec.convert(self.order["memory"][0], MemoryDescriptor)
        stride = remote.length // self.layout.layers
        with self.engine.connect(remote.addresses) as peer:
            for layer in layers:
                for page in self.pages:
                    self._write(peer, remote, layer * stride + page * self.layout.page_bytes)
            done = []

            def ended():
                done.extend(event.kind for event in self.engine.poll())
                return len(done) == len(layers) * len(self.pages)

            await until(ended, lambda: done)
            assert set(done) <= {EventKind.DONE}

    def _write(self, peer, remote, offset):
        self.engine.write(
            peer=peer,
            region=self.region,
            source_offset=0,
            remote=remote,
            destination_offset=offset,
            length=self.layout.page_bytes,
            slot=self.order["slot"],
            generation=self.order["generation"],
        )

    async def cancelled(self):
        """Wait for the CancelPrefill of what was asked."""
        header, _ = await asyncio.to_thread(self.hear)
        assert header["body"] == {"type": "CancelPrefill", **self.names}


@asynccontextmanager
async def puppet(cluster):
    with Puppet(cluster) as puppet:
        registry = Registry(cluster.redis_url, "kvferry", puppet.record, lease_seconds=3, heartbeat_seconds=0.3)
        await registry.join()
        beats = asyncio.create_task(registry.run(Load, list))
        try:
            # Nobody is placed on who has not told a load.
            await until(lambda: "running" in cluster.told().get(puppet.ref.id, {}), "it has told its load")
            await until(lambda: cluster["router"].state()["prefillers"] == 2, "the router sees it")
            yield puppet
        finally:
            await registry.leave()
            await beats
            await registry.close()
        await until(lambda: cluster["router"].state()["prefillers"] == 1, "the router sees that it has left")


@pytest.mark.parametrize("layers", [0, 1, 2])
async def test_pages_stay_out_of_use_until_the_prefiller_says_that_nothing_is_in_flight(cluster, layers):
    async with puppet(cluster) as prefiller:
        stream = Stream(cluster.url, prompt(41), 4)
        await prefiller.asked()
        await prefiller.write(range(layers))
        await stream.leave()
        await prefiller.cancelled()
        # Those that the prefiller knows, and the one that the prompt's last token begins.
        assert (pages(cluster, "held"), pages(cluster, "quarantined")) == (0, len(prefiller.pages) + 1)
        # Asked again, as long as it takes.
        await prefiller.cancelled()
        # Late, and yet in nobody's page.
        await prefiller.write(range(layers, 3))
        assert pages(cluster, "quarantined") == len(prefiller.pages) + 1
        prefiller.say(CancelConfirmed(**prefiller.names))
        await until(lambda: pages(cluster, "quarantined") == 0, "the pages are free")


async def test_arrived_and_not_yet_verified(cluster):
    async with puppet(cluster) as prefiller:
        stream = Stream(cluster.url, prompt(41), 4)
        await prefiller.asked()
        await prefiller.write(range(3))

        def arrived():
            return any(held.get("incoming") and not held.get("slots") for held in map(held_by, DECODERS))

        def held_by(name):
            return cluster[name].held()

        await until(arrived, "all pages are there, and the slot is free")
        await stream.leave()
        # Nothing can be in flight: the count says so, and nobody need be asked.
        await until(lambda: not any(map(held_by, DECODERS)), "nothing is held")
        prefiller.say(PrefillReport(**prefiller.names, timeline=PrefillTimeline(), checksums=Int32s([1, 2, 3])))


async def test_a_prefiller_that_gives_up_after_all_pages_came_does_not_keep_the_client_waiting(cluster):
    """Not a client's leaving, but the same state: arrived, not verified, and the word that is waited for won't come."""
    async with puppet(cluster) as prefiller:
        stream = Stream(cluster.url, prompt(41), 4)
        await prefiller.asked()
        await prefiller.write(range(3))
        prefiller.say(CancelConfirmed(**prefiller.names))
        # It lives, and is asked again; it fails, and the real one is asked.
        await prefiller.asked()
        error = RequestError(code=ErrorCode.TRANSFER_FAILED, message="no", phase=Phase.TRANSFER, node=prefiller.ref.id)
        prefiller.say(PrefillFailed(**prefiller.names, error=error))
        assert await stream.end() == cluster.golden.answers[41][:4]


async def test_pages_that_are_not_what_was_sent_never_become_an_answer(cluster):
    async with puppet(cluster) as prefiller:
        stream = Stream(cluster.url, prompt(41), 4)
        await prefiller.asked()
        await prefiller.write(range(3))
        wrong = Int32s(range(3 * len(prefiller.pages)))
        prefiller.say(PrefillReport(**prefiller.names, timeline=PrefillTimeline(), checksums=wrong))
        await asyncio.wait_for(stream.task, 60)
        assert (stream.status, stream.error["code"], stream.tokens) == (502, "verify_failed", [])
        assert "a-puppet" in stream.error["message"]
