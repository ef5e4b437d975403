"""Token ids through the whole cluster equal the reference implementation's, for every length that can go wrong."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from cluster import Cluster
from reference import Reference, passage
from tokenizers import Tokenizer

pytestmark = pytest.mark.oracle

ANSWER = 8


def prompt_of(tokenizer, tokens, seed):
    """A prompt of exactly so many token ids."""
    ids = tokenizer.encode(passage(tokens, seed), add_special_tokens=False).ids
    assert len(ids) >= tokens
    return ids[:tokens]


def lengths(page, chunk):
    """Lengths around every boundary. The prompt's last token isn't prefilled, so both n and n + 1 matter."""
    edges = [1, 2, page - 1, page, page + 1, page + 2, 2 * page, 2 * page + 1, chunk - 1, chunk, chunk + 1, chunk + 2]
    return sorted({edge for edge in edges if edge >= 1})


@pytest.fixture(scope="module")
def smol(default_model):
    return Reference(default_model), Tokenizer.from_file(str(default_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def tiny(tiny_model):
    return Reference(tiny_model), Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


def run(cluster, reference, prompts):
    for prompt in prompts:
        reference.check(prompt, cluster.tokens(prompt, max_tokens=ANSWER), ANSWER)
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: cluster.tokens(prompt, max_tokens=ANSWER), prompts[-8:]))
    for prompt, tokens in zip(prompts[-8:], together, strict=True):
        reference.check(prompt, tokens, ANSWER)
    cluster.wait_idle()


@pytest.fixture(scope="module")
def smol_cluster(tmp_path_factory, default_model):
    worker = ["--dtype", "float32", "--kv-memory", "512MiB", "--provider", "tcp"]
    folder = tmp_path_factory.mktemp("smol")
    with Cluster(folder, default_model, decoders=2, worker=worker, prefiller=["--chunk-size", "128"]) as cluster:
        yield cluster


def test_the_default_model_over_tcp(smol_cluster, smol):
    """A long prompt, and the lengths that matter most; small models are asked for all of them."""
    reference, tokenizer = smol
    prompts = [prompt_of(tokenizer, n, seed) for seed, n in enumerate([1500, 1, 16, 17, 128, 129, 130, 40, 300])]
    run(smol_cluster, reference, prompts)


def test_a_seed_gives_the_same_answer_alone_and_in_a_crowd(smol_cluster, smol):
    _, tokenizer = smol
    prompt = prompt_of(tokenizer, 90, 3)
    fields = {"temperature": 1.0, "top_p": 0.9, "max_tokens": 16}
    alone = smol_cluster.tokens(prompt, seed=7, **fields)
    with ThreadPoolExecutor(8) as pool:
        seeds = [7, 1, 2, 7, 3, 4, 5, 7]
        crowd = list(pool.map(lambda seed: smol_cluster.tokens(prompt, seed=seed, **fields), seeds))
    assert crowd[0] == crowd[3] == crowd[7] == alone
    assert len({tuple(tokens) for tokens in crowd}) == 6


@dataclass(frozen=True)
class Setup:
    provider: str
    page: int
    chunk: int
    local: int = 0


SETUPS = {
    "net": Setup("net", 8, 100),
    "shm": Setup("shm", 64, 256),
    "chunk smaller than a page": Setup("auto", 4, 3),
    "all prefilled by the decoder": Setup("tcp", 16, 64, local=4096),
}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_a_small_model_over(tmp_path, tiny_model, tiny, setup):
    reference, tokenizer = tiny
    edges = lengths(setup.page, setup.chunk)
    prompts = [prompt_of(tokenizer, n, seed) for seed, n in enumerate([*edges, 77, 400, 401, 402])]
    worker = ["--dtype", "float32", "--kv-memory", "16MiB"]
    worker += ["--provider", setup.provider, "--page-size", str(setup.page)]
    flags = {"prefiller": ["--chunk-size", str(setup.chunk)], "decoder": ["--local-prefill-tokens", str(setup.local)]}
    with Cluster(tmp_path, tiny_model, worker=worker, **flags) as cluster:
        run(cluster, reference, prompts)
        moved = re.search(r'^kvferry_fabric{what="local_bytes"} (.*)$', cluster["prefiller0"].metrics(), re.MULTILINE)
        assert (float(moved[1]) > 0) == (setup.provider == "auto"), "one host, and its pages took the wrong way"
