"""What rests on a single rank elsewhere, with two: prefix caching, grammars, speculation, mixed nodes, --verify-kv.

Every cluster is asked the same, and answers what one without ranks does.
"""

import json
import re
from typing import NamedTuple

import pytest
from cluster import Cluster
from streams import prompt
from tiny_deepseek import build_guessing, save
from tiny_model import copy_tokenizer

PAGE = 8
WORKER = ["--dtype", "float32", "--kv-memory", "4MiB", "--page-size", str(PAGE)]
DECODER = ["--local-prefill-tokens", "0"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": [1, 22, 333]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}},
    "regex": {"guided_regex": "[a-f]{6}( and so on){5}"},
}


class Setup(NamedTuple):
    prefill_tp: int
    """0: mixed nodes, which prefill for themselves."""
    decode_tp: int
    corrupted: int = 0
    """Which of the first request's writes is spoilt; 0: none."""


def cluster_of(folder, model, setup, *decoder):
    prefiller = ["--tp", str(setup.prefill_tp), "--chunk-size", "16"]
    if setup.corrupted:
        prefiller += ["--fault", f"corrupt-write={setup.corrupted}"]
    mixed = [] if setup.prefill_tp else ["--mixed"]
    return Cluster(
        folder,
        model,
        prefillers=int(setup.prefill_tp > 0),
        worker=WORKER,
        prefiller=prefiller,
        decoder=[*DECODER, "--tp", str(setup.decode_tp), *mixed, *decoder],
    )


def chat(cluster):
    """Three turns, each with the answers before it: tokens of every answer, and how many of its prompt were cached."""
    tokens, turns = prompt(41, 3), []
    for turn in range(3):
        reply = cluster.complete(tokens, max_tokens=20, ignore_eos=True, cache_salt="chat")
        answer = reply["choices"][0]["token_ids"]
        turns.append((answer, reply["usage"]["prompt_tokens_details"]["cached_tokens"]))
        tokens = [*tokens, *answer, *prompt(7, 100 + turn)]
    return turns


def structured(cluster):
    """An answer within every grammar, greedy and sampled."""
    ways = {"greedy": {}, "sampled": {"temperature": 1, "seed": 7}}
    return {
        (kind, way): cluster.complete(prompt(30, 4), max_tokens=120, **fields, **ways[way])["choices"][0]["text"]
        for kind, fields in GRAMMARS.items()
        for way in ways
    }


class Expected(NamedTuple):
    chat: list
    structured: dict
    spoilt: list
    """The answer to the prompt that is spoilt on its way elsewhere."""


SPOILT = prompt(5 * PAGE + 1, 9)


@pytest.fixture(scope="module")
def expected(tmp_path_factory, tiny_model):
    with cluster_of(tmp_path_factory.mktemp("one"), tiny_model, Setup(1, 1)) as cluster:
        found = Expected(chat(cluster), structured(cluster), cluster.tokens(SPOILT, max_tokens=12, ignore_eos=True))
    for (kind, _), text in found.structured.items():
        if kind == "json":
            assert json.loads(text)["size"] in (1, 22, 333)
        else:
            assert re.fullmatch(GRAMMARS["regex"]["guided_regex"], text)
    return found


SETUPS = [Setup(1, 2, corrupted=1), Setup(2, 2, corrupted=9), Setup(0, 2)]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_cluster_of_ranks_answers_as_one_without(tmp_path, tiny_model, expected, setup):
    with cluster_of(tmp_path, tiny_model, setup, "--speculate", "ngram") as cluster:
        if setup.corrupted:
            check_spoilt(cluster)
        # What is left of the spoilt one is cached nowhere where it could do harm.
        assert cluster.tokens(SPOILT, max_tokens=12, ignore_eos=True) == expected.spoilt
        answers, cached = zip(*chat(cluster), strict=True)
        assert answers == tuple(answer for answer, _ in expected.chat)
        # A prefiller has the pages of the prompt before; a mixed node those of its own answer too.
        assert cached == ((0, 40, 64) if setup.prefill_tp else (0, 56, 80))
        assert structured(cluster) == expected.structured
        assert accepted(cluster) > 0
        cluster.wait_idle()


def check_spoilt(cluster):
    """The first request fails, and says where its pages differ."""
    reply = cluster.complete(SPOILT, max_tokens=12, ignore_eos=True, expect=502)
    assert reply["error"]["code"] == "verify_failed", reply
    assert re.search(r"page \d of the prompt differs in layer \d", reply["error"]["message"]), reply
    assert 'result="different"' in cluster["decoder0"].metrics()


def accepted(cluster):
    """Guesses that were right."""
    found = re.search(r'kvferry_drafts_total\{.*result="accepted".*\} (.*)', cluster["decoder0"].metrics())
    return float(found[1]) if found else 0


# --- the drafting layer ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guessing(tmp_path_factory, default_model):
    folder = tmp_path_factory.mktemp("guessing")
    reference, drafter = build_guessing()
    save(reference, folder, drafter)
    return copy_tokenizer(folder, default_model)


def drafted(tmp_path, model, setup):
    """Answers, and how many tokens of each were guessed and accepted."""
    with cluster_of(tmp_path, model, setup, "--speculate", "mtp", "--draft-tokens", "2") as cluster:
        found = []
        for length in (9, 17, 30):
            reply = cluster.complete([each % 199 for each in prompt(length)], max_tokens=24, ignore_eos=True)
            details = reply["usage"]["completion_tokens_details"]
            counts = [details[f"{kind}_prediction_tokens"] for kind in ("accepted", "rejected")]
            found.append((reply["choices"][0]["token_ids"], counts))
        cluster.wait_idle()
        return found


@pytest.fixture(scope="module")
def by_one(tmp_path_factory, guessing):
    found = drafted(tmp_path_factory.mktemp("drafts"), guessing, Setup(1, 1))
    assert sum(accepted for _, (accepted, _) in found) > 5
    return found


@pytest.mark.parametrize("setup", [Setup(1, 2), Setup(2, 2), Setup(0, 2)], ids=str)
def test_ranks_guess_as_one_does(tmp_path, guessing, by_one, setup):
    assert drafted(tmp_path, guessing, setup) == by_one
