"""Sharded transfers through whole clusters: token ids equal the reference's, whatever the sharding on the two sides.

The whole matrix takes an hour: `make oracle`, or KVFERRY_ORACLE=all. By default as few clusters run as it takes for
every two values of different dimensions to meet once.
"""

import itertools
import os
import shutil
from typing import NamedTuple

import pytest
from cluster import Cluster
from engine_runner import VOCABULARY, tokens_of
from kvferry_proto.layout import KVLayout
from kvferry_proto.shards import plan
from random_models import build_random
from reference import Reference
from tiny_model import make_tiny_deepseek

pytestmark = pytest.mark.oracle

LAYERS = 2
ANSWER = 6


class Setup(NamedTuple):
    prefill_tp: int
    decode_tp: int
    kv_heads: int
    page: int
    chunk: int
    provider: str
    kind: str

    @property
    def possible(self):
        ranks = (self.prefill_tp, self.decode_tp)
        return all(self.kv_heads % each == 0 or each % self.kv_heads == 0 for each in ranks)

    def layout(self, ranks):
        return KVLayout(
            model="",
            dtype="float32",
            layers=LAYERS,
            kv_heads=self.kv_heads,
            head_dim=24,
            page_size=self.page,
            ranks=ranks,
        )

    def __str__(self):
        return "-".join(map(str, self))


# Chunks: one that every page size divides, one that none does and that is smaller than a large page.
VALUES = ((1, 2, 4), (1, 2, 4), (1, 2, 3, 4), (8, 16, 64), (64, 27), ("tcp", "shm"), ("llama", "qwen3", "qwen3_moe"))


def matrix():
    return [setup for values in itertools.product(*VALUES) if (setup := Setup(*values)).possible]


def met(setup):
    """Every two values of different dimensions that come together in a setup."""
    return set(itertools.combinations(enumerate(setup), 2))


def selection(setups):
    """Few setups in which everything meets that meets in any: those first in which most meets for the first time."""
    missing, chosen = set().union(*map(met, setups)), []
    while missing:
        best = max(setups, key=lambda setup: len(met(setup) & missing))
        chosen.append(best)
        missing -= met(best)
    return chosen


SETUPS = matrix() if os.environ.get("KVFERRY_ORACLE") == "all" else selection(matrix())


@pytest.fixture(scope="module")
def models(tmp_path_factory, default_model):
    """Folder and reference of an architecture with so many KV heads, each made once."""
    made = {}

    def get(kind, kv_heads):
        if (kind, kv_heads) not in made:
            folder = tmp_path_factory.mktemp(f"{kind}-{kv_heads}")
            heads = {"num_attention_heads": 6, "hidden_size": 96} if kv_heads == 3 else {}
            build_random(folder, kind, kv_heads=kv_heads, num_hidden_layers=LAYERS, eos_token_id=None, **heads)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(default_model / name, folder)
            made[kind, kv_heads] = folder, Reference(folder)
        return made[kind, kv_heads]

    return get


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_answers_are_the_references(tmp_path, models, setup):
    folder, reference = models(setup.kind, setup.kv_heads)
    worker = ["--dtype", "float32", "--kv-memory", "1MiB", "--provider", setup.provider, "--page-size", str(setup.page)]
    with Cluster(
        tmp_path,
        folder,
        worker=worker,
        prefiller=["--tp", str(setup.prefill_tp), "--chunk-size", str(setup.chunk)],
        decoder=["--tp", str(setup.decode_tp), "--local-prefill-tokens", "2"],
    ) as cluster:
        # A page and a chunk, one token less and more; many pages, the last of them begun.
        for seed, count in enumerate([setup.page + 1, setup.chunk + 2, 130, 4]):
            check(cluster, setup, reference, tokens_of(count, seed))
        cluster.wait_idle()
        assert 'result="different"' not in cluster["decoder0"].metrics()


def test_latents_and_the_drafting_layer_come_from_replicas_in_turn(tmp_path, default_model):
    folder = make_tiny_deepseek(tmp_path / "model", default_model, vocab_size=VOCABULARY, eos_token_id=None)
    reference = Reference(folder)
    with Cluster(
        tmp_path,
        folder,
        worker=["--dtype", "float32", "--kv-memory", "1MiB", "--page-size", "8"],
        prefiller=["--tp", "2", "--chunk-size", "27"],
        # Both ranks guess alike, from hidden states that the lead alone has received.
        decoder=["--tp", "2", "--local-prefill-tokens", "2", "--speculate", "mtp", "--draft-tokens", "2"],
    ) as cluster:
        layout = KVLayout(
            model="", dtype="float32", layers=4, kv_heads=1, head_dim=24, page_size=8, ranks=2, latent=True
        )
        for seed, count in enumerate([9, 29, 66]):
            ask(cluster, [layout, layout], reference, tokens_of(count, seed), states=1)
        cluster.wait_idle()
        metrics = cluster["decoder0"].metrics()
        assert 'result="different"' not in metrics
        assert "kvferry_accepted_length_count 0.0" not in metrics


def check(cluster, setup, reference, prompt):
    ask(cluster, [setup.layout(setup.prefill_tp), setup.layout(setup.decode_tp)], reference, prompt)


def ask(cluster, layouts, reference, prompt, states=0):
    answer = cluster.complete(prompt, max_tokens=ANSWER, ignore_eos=True)
    reference.check(prompt, answer["choices"][0]["token_ids"], ANSWER)
    source, destination = layouts
    arrivals = source.layers * source.pages_for(len(prompt) - 1) * len(plan(source, destination))
    assert answer["kvferry"]["timeline"]["prefiller"]["pages"] == arrivals + states


def test_the_selection_lets_everything_meet_and_is_small():
    everything, few = matrix(), selection(matrix())
    assert set().union(*map(met, few)) == set().union(*map(met, everything))
    assert len(few) <= 18 < len(everything)
    assert {(setup.prefill_tp, setup.decode_tp) for setup in few} == set(itertools.product((1, 2, 4), repeat=2))
    assert VOCABULARY % 2, "a vocabulary that no rank count divides"
