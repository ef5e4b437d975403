"""Prefix caching through the whole cluster: a chat's turns land where its pages are, and usage says what was cached."""

import pytest
from cluster import Cluster
from streams import prompt

pytestmark = pytest.mark.timeout(200)

PAGE = 8
DECODERS = ("decoder0", "decoder1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, tiny_model):
    # Slow beats: what ran a moment ago must not count against the decoder that has its pages.
    worker = ["--dtype", "float32", "--kv-memory", "4MiB", "--page-size", str(PAGE)]
    worker += ["--heartbeat-seconds", "2.5", "--lease-seconds", "10"]
    decoder = ["--local-prefill-tokens", "0"]
    folder = tmp_path_factory.mktemp("prefix")
    with Cluster(folder, tiny_model, decoders=2, worker=worker, decoder=decoder) as cluster:
        yield cluster


def ask(cluster, tokens, **fields):
    """Answer, cached tokens, and the page arrivals that a prefiller caused, over all three layers."""
    reply = cluster.complete(tokens, max_tokens=20, ignore_eos=True, **fields)
    prefiller = reply["kvferry"]["timeline"]["prefiller"]
    usage = reply["usage"]
    assert usage["prompt_tokens"] == len(tokens)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return reply["choices"][0]["token_ids"], cached, prefiller["pages"] if prefiller else 0


def hits(cluster):
    return {name: cluster[name].state()["prefix_cache"]["hits"] for name in DECODERS}


def test_the_turns_of_chats_stay_where_their_pages_are(cluster):
    """Several chats in turns, so that spreading alone would send every other turn elsewhere."""
    chats = [prompt(41, seed) for seed in range(3)]
    before = hits(cluster)
    for turn in range(3):
        for number, tokens in enumerate(chats):
            answer, cached, moved = ask(cluster, tokens)
            # The turn before was run but for the last token that was drawn; since then 7 tokens have been said.
            held = (len(tokens) - 8) // PAGE if turn else 0
            pages = -(-(len(tokens) - 1) // PAGE)
            assert moved == 3 * (pages - held), (turn, number)
            assert cached < len(tokens)
            alone, cold, _ = ask(cluster, tokens, cache_salt=f"alone {turn} {number}")
            assert (alone, cold) == (answer, 0)
            chats[number] = [*tokens, *answer, *prompt(7, 100 + number)]
    after = hits(cluster)
    assert sum(after.values()) - sum(before.values()) >= 3 * 2 * 5
    cluster.wait_idle()


def test_a_prompt_that_is_asked_again_moves_nothing_and_a_tenant_finds_only_its_own(cluster):
    tokens = prompt(5 * PAGE + 1, 50)
    first, cached, moved = ask(cluster, tokens, cache_salt="alice")
    assert (cached, moved) == (0, 3 * 5)
    again, cached, moved = ask(cluster, tokens, cache_salt="alice")
    assert (again, cached, moved) == (first, 5 * PAGE, 0)
    assert ask(cluster, tokens, cache_salt="bob")[1:] == (0, 3 * 5)
    cluster.wait_idle()
    for name in ("prefiller0", *DECODERS):
        pages = cluster[name].state()["pages"]
        assert (pages["held"], pages["quarantined"]) == (0, 0)
        assert f'kvferry_pages{{state="cached"}} {pages["cached"]:.1f}' in cluster[name].metrics()
