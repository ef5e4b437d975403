"""The FlashInfer backend over a stand-in for its kernels: that what it is given means what plain torch computes."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_deepseek
import torch
from engine_runner import Runner, close, tokens_of
from kvferry_engine import decode_graphs
from kvferry_engine.attention import flashinfer_cuda, flashinfer_latent
from kvferry_engine.attention.choice import attention_for
from kvferry_engine.attention.flashinfer_cuda import FlashInferAttention, supports
from kvferry_engine.attention.flashinfer_pages import paged_rows
from kvferry_engine.attention.torch_cpu import TorchAttention
from kvferry_engine.batch import ForwardBatch, SequenceSlice
from kvferry_engine.config import ModelConfig
from kvferry_engine.decode_graphs import DecodeGraphs, can_capture
from kvferry_engine.errors import ModelError
from kvferry_engine.shard import ALONE
from kvferry_engine.weights import load_model
from random_models import build_random


def attend(q, k, v, scale):
    """Last tokens [n, H, D] over all [m, K, D], each up to itself."""
    repeat = q.shape[1] // k.shape[1]
    scores = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(repeat, 1)) * scale
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu_(len(k) - len(q) + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v.repeat_interleave(repeat, 1))


def tokens(pages, lengths):
    """[pages][kv head][token][dim] of one sequence to [tokens][kv head][dim]."""
    return pages.transpose(1, 2).flatten(0, 1)[:lengths]


class Paged:
    def __init__(self, workspace, layout, **options) -> None:
        assert (workspace.dtype, layout) == (torch.uint8, "HND")
        self.calls = 0

    def keep(self, starts, kv_starts, pages, last, heads, kv_heads, head_dim, page_size) -> None:  # noqa: PLR0917 - as FlashInfer has them
        assert {each.dtype for each in (starts, kv_starts, pages, last)} == {torch.int32}
        assert len(last) + 1 == len(kv_starts) == len(starts)
        assert len(pages) == kv_starts[-1]
        assert (last >= 1).all()
        assert (last <= page_size).all()
        self.starts, self.kv_starts, self.pages = starts.tolist(), kv_starts.tolist(), pages.long()
        self.last, self.shape, self.page_size = last.tolist(), (heads, kv_heads, head_dim), page_size

    def run(self, q, cache):
        k, v = cache
        assert k.stride() == v.stride()
        assert k.stride(-1) == 1
        assert (q.shape[1], k.shape[1], k.shape[3]) == self.shape
        self.calls += 1
        return torch.cat(
            [
                attend(
                    q[self.starts[row] : self.starts[row + 1]],
                    *(tokens(each[pages], (len(pages) - 1) * self.page_size + last) for each in (k, v)),
                    q.shape[-1] ** -0.5,
                )
                for row, last in enumerate(self.last)
                for pages in [self.pages[self.kv_starts[row] : self.kv_starts[row + 1]]]
            ]
        )


class Decode(Paged):
    def plan(self, kv_starts, pages, last, *shape, q_data_type, kv_data_type) -> None:
        self.keep(torch.arange(len(last) + 1, dtype=torch.int32), kv_starts, pages, last, *shape)


class Prefill(Paged):
    def plan(self, starts, kv_starts, pages, last, *shape, causal, q_data_type, kv_data_type) -> None:
        assert causal
        self.keep(starts, kv_starts, pages, last, *shape)


class Latent:
    def __init__(self, _workspace) -> None:
        self.calls = 0

    def plan(self, starts, kv_starts, pages, lengths, heads, *_dims, sm_scale, **_options) -> None:
        assert starts.tolist() == list(range(len(lengths) + 1))
        self.kv_starts, self.pages, self.lengths = kv_starts.tolist(), pages.long(), lengths.tolist()
        self.heads, self.scale = heads, sm_scale

    def run(self, q, turned, latents, keys):
        self.calls += 1
        mixed = []
        for row, length in enumerate(self.lengths):
            pages = self.pages[self.kv_starts[row] : self.kv_starts[row + 1]]
            kept, key = (each[pages].flatten(0, 1)[:length].unsqueeze(1) for each in (latents, keys))
            whole = torch.cat((q[row : row + 1], turned[row : row + 1]), -1)
            mixed.append(attend(whole, torch.cat((kept, key), -1), kept, self.scale))
        return torch.cat(mixed)


@pytest.fixture
def stand_in(monkeypatch) -> None:
    library = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        BatchPrefillWithPagedKVCacheWrapper=Prefill,
        mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=Latent),
    )
    monkeypatch.setattr(importlib, "import_module", lambda name: {"flashinfer": library}[name])
    monkeypatch.setattr(flashinfer_cuda, "WORKSPACE_BYTES", 1024)


def run_both(folder, backend) -> None:
    """Steps of prefills alone, decodes alone and both, each sequence's logits held to plain torch's."""
    runners = [
        Runner(load_model(folder, "float32", attention=each), page_size=8) for each in (TorchAttention(), backend)
    ]
    texts = [tokens_of(length, seed) for seed, length in enumerate((30, 17, 9))]
    pairs = [[runner.sequence(text) for text in texts] for runner in runners]
    for counts in ((7, 16, 0), (8, 1, 5), (1, 0, 1), (2, 0, 0), (0, 0, 1), (1, 0, 1)):
        logits = [
            runner.step(*(each.next(count) for each, count in zip(sequences, counts, strict=True) if count))
            for runner, sequences in zip(runners, pairs, strict=True)
        ]
        close(logits[1], logits[0])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_pages_and_rows_mean_what_plain_torch_computes(tmp_path, stand_in, kv_heads) -> None:
    build_random(tmp_path, "llama", kv_heads=kv_heads)
    backend = FlashInferAttention(ModelConfig.from_folder(tmp_path), ALONE, "cpu")
    run_both(tmp_path, backend)
    assert backend._decode.calls > 0
    assert backend._prefill.calls > 0


def test_latents_mean_what_plain_torch_computes(tmp_path, stand_in, monkeypatch) -> None:
    tiny_deepseek.save(tiny_deepseek.build(), tmp_path)
    monkeypatch.setattr(flashinfer_latent, "LATENT_DIMS", (16, 8))
    backend = FlashInferAttention(ModelConfig.from_folder(tmp_path), ALONE, "cpu")
    run_both(tmp_path, backend)
    assert backend._latent_wrapper.calls > 0


def test_pages_of_sequences_end_to_end() -> None:
    slices = [SequenceSlice([1], 8, [7, 2, 9]), SequenceSlice([2], 3, [4]), SequenceSlice([3], 0, [5, 6])]
    rows = paged_rows(ForwardBatch.build(slices, page_size=4), np.array([0, 1, 2]))
    assert [each.tolist() for each in rows] == [[0, 3, 4, 5], [7, 2, 9, 4, 5], [1, 4, 1]]


def test_plain_torch_is_taken_where_it_has_no_kernels(tmp_path) -> None:
    build_random(tmp_path, "llama")
    config = ModelConfig.from_folder(tmp_path)
    assert isinstance(attention_for(config, ALONE, torch.bfloat16, "cpu"), TorchAttention)
    assert not supports(config, torch.bfloat16)  # heads of 24
    with pytest.raises(ModelError, match="--attention flashinfer: it runs on GPUs alone"):
        attention_for(config, ALONE, torch.bfloat16, "cpu", "flashinfer")
    with pytest.raises(ModelError, match=r"not installed|no kernels"):
        attention_for(config, ALONE, torch.bfloat16, "cuda:0", "flashinfer")


def test_replayed_steps_mean_what_others_do(tmp_path, stand_in, monkeypatch) -> None:
    """What a graph would replay runs anew here, reading what it reads from the same places."""
    captured = []
    monkeypatch.setattr(decode_graphs, "capture", lambda compute: captured.append(compute) or compute)
    build_random(tmp_path, "qwen3")
    config = ModelConfig.from_folder(tmp_path)
    models = [load_model(tmp_path, "float32", attention=FlashInferAttention(config, ALONE, "cpu")) for _ in range(2)]
    runners = [Runner(model, page_size=8) for model in models]
    texts = [tokens_of(40, seed) for seed in range(5)]
    plain, replayed = ([runner.sequence(text) for text in texts] for runner in runners)
    for runner, sequences in zip(runners, (plain, replayed), strict=True):
        runner.step(*(each.next(10 + 3 * index) for index, each in enumerate(sequences)))
    assert can_capture(models[1])
    graphs = DecodeGraphs(models[1], runners[1].pool)
    for members in ((0, 1, 2, 3, 4), (1, 3, 4), (4, 1, 0, 2), (2,), (0, 1, 2, 3, 4), *[(3, 0, 1)] * 8):
        wanted = runners[0].step(*(plain[each].next(1) for each in members))
        batch = ForwardBatch.build([replayed[each].next(1) for each in members], page_size=8)
        assert graphs.fits(batch)
        close(graphs.run(batch), wanted)
    assert len(captured) == 3  # for 1, 4 and 8 sequences


def test_other_steps_are_not_replayed(tmp_path, stand_in) -> None:
    build_random(tmp_path, "llama")
    model = load_model(
        tmp_path, "float32", attention=FlashInferAttention(ModelConfig.from_folder(tmp_path), ALONE, "cpu")
    )
    graphs = DecodeGraphs(model, Runner(model, page_size=8).pool)
    one = SequenceSlice([1], 3, [0])
    for slices in (
        [SequenceSlice([1, 2], 0, [0])],
        [one, SequenceSlice([1, 2], 0, [1])],
        [SequenceSlice([1], 3, [0], want_logits=False)],
        [SequenceSlice([1], 3, [page]) for page in range(65)],
    ):
        assert not graphs.fits(ForwardBatch.build(slices, page_size=8))
    assert graphs.fits(ForwardBatch.build([one], page_size=8))
    assert not can_capture(load_model(tmp_path, "float32"))
