"""Llama over the paged cache against transformers on the same folder, in float32."""

import pytest
import torch
from engine_runner import VOCABULARY, Runner, close, reference_logits, tokens_of
from kvferry_engine.attention import decode_groups
from kvferry_engine.batch import ForwardBatch, SequenceSlice
from kvferry_engine.config import ARCHITECTURES, ModelConfig
from kvferry_engine.default_model import prepare_default_model
from kvferry_engine.errors import BatchError, ModelError, UnknownArchitecture
from kvferry_engine.models import CLASSES
from kvferry_engine.models.rope import Rope
from kvferry_engine.weights import load_model
from oracle_checks import check_last, check_mixed, check_prefill
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.oracle

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}


@pytest.fixture(autouse=True, scope="module")
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def save_tiny(folder, *, heads=4, kv_heads=2, rope=DEFAULT, tied=False, **fields):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16 * heads,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=256,
        rope_parameters=rope,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        **fields,
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        # What starts at 0 or 1 would hide a norm or a bias that is left out.
        if name.endswith(("norm.weight", "bias")):
            parameter.data.normal_(mean=float(name.endswith("weight")), std=0.3)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    reference = save_tiny(folder)
    return load_model(folder, "float32"), reference


@pytest.fixture(scope="module")
def smollm2():
    folder = prepare_default_model()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return load_model(folder, "float32"), reference


@pytest.mark.parametrize("rope", [DEFAULT, LLAMA3], ids=["default", "llama3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (4, 2), (3, 3), (6, 3)])
def test_random_models(tmp_path, rope, tied, heads, kv_heads):
    reference = save_tiny(tmp_path, heads=heads, kv_heads=kv_heads, rope=rope, tied=tied)
    runner = Runner(load_model(tmp_path, torch.float32))
    tokens = tokens_of(200)
    expected = reference_logits(reference, tokens)
    sequence = runner.sequence(tokens)
    close(runner.step(sequence.next(150))[0], expected[149])
    for index in range(150, 200):
        close(runner.step(sequence.next(1))[0], expected[index])


@pytest.mark.parametrize("fields", [{"attention_bias": True}, {"mlp_bias": True}, {"head_dim": 24}], ids=str)
def test_variants(tmp_path, fields):
    reference = save_tiny(tmp_path, **fields)
    check_last(load_model(tmp_path, "float32"), reference, 60)


@pytest.mark.parametrize("page_size", [1, 8, 16, 64])
@pytest.mark.parametrize("chunks", [[100], [1, 99], [64, 36], [7, 9, 16, 33, 35], [16, 16, 32, 36]], ids=str)
def test_prefill_in_chunks(tiny, page_size, chunks):
    check_prefill(tiny, chunks, page_size)


@pytest.mark.parametrize("page_size", [8, 16, 64])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("padding", [8, 10_000])
def test_a_mixed_batch_is_as_each_alone(tiny, page_size, seed, padding, monkeypatch):
    monkeypatch.setattr(decode_groups, "CALL_TOKENS", padding)
    check_mixed(tiny, page_size, seed=seed, lengths=(20, 90), sequences=5, singles=0.5, idle=0.2)


def test_only_those_who_ask_get_logits(tiny):
    model, reference = tiny
    runner = Runner(model)
    batches = [tokens_of(20, seed) for seed in range(3)]
    slices = [
        SequenceSlice(tokens, 0, runner.sequence(tokens).pages, want_logits=index != 1)
        for index, tokens in enumerate(batches)
    ]
    logits = runner.step(*slices)
    assert logits.dtype == torch.float32
    assert logits.shape == (2, VOCABULARY)
    close(logits[0], reference_logits(reference, batches[0])[-1])
    close(logits[1], reference_logits(reference, batches[2])[-1])


def test_without_logits_the_cache_is_the_same(tiny):
    model, reference = tiny
    tokens = tokens_of(50)
    expected = reference_logits(reference, tokens)
    for options in ({"logits": False}, {}):
        runner = Runner(model)
        sequence = runner.sequence(tokens)
        piece = sequence.next(49)
        if not options:
            piece = SequenceSlice(piece.tokens, piece.start, piece.pages, want_logits=False)
        assert runner.step(piece, **options) is None
        close(runner.step(sequence.next(1))[0], expected[-1])


@pytest.mark.parametrize("logits", [True, False])
def test_a_layer_is_announced_once_its_keys_and_values_are_there(tiny, logits):
    model, _ = tiny
    runner = Runner(model)
    sequence = runner.sequence(tokens_of(40))
    pages = sequence.pages[:3]
    written = []

    def on_layer(layer):
        written.append([not runner.pool.tensor[index, pages].isnan().any() for index in range(3)])
        assert written[-1] == [index <= layer for index in range(3)]

    runner.step(sequence.next(40), on_layer=on_layer, logits=logits)
    assert len(written) == 3


def test_what_a_former_owner_left_does_not_reach_the_page(tiny):
    """A page is all zeros beyond the tokens it holds, though it began full of NaN; other pages are left alone."""
    model, _ = tiny
    runner = Runner(model, page_size=16, pages=8)
    sequence = runner.sequence(tokens_of(21))
    runner.step(sequence.next(20))
    runner.step(sequence.next(1))
    first, second = sequence.pages
    assert not runner.pool.tensor[:, first].isnan().any()
    assert not runner.pool.tensor[:, second, :, :, 5:].any()
    others = [page for page in range(8) if page not in sequence.pages]
    assert runner.pool.tensor[:, others].isnan().all()


def test_a_batch_that_does_not_fit_is_refused_before_anything_is_written(tiny):
    model, _ = tiny
    runner = Runner(model, pages=4)
    with pytest.raises(BatchError, match="page 4 is outside"):
        runner.step(SequenceSlice([1], 0, [4]))
    with pytest.raises(BatchError, match="token id 199"):
        runner.step(SequenceSlice([VOCABULARY], 0, [0]))
    with pytest.raises(BatchError, match="page size"):
        model.forward(ForwardBatch.build([SequenceSlice([1], 0, [0])], page_size=8), runner.pool)
    assert runner.pool.tensor.isnan().all()


def test_greedy_tokens_of_the_default_model(smollm2):
    model, reference = smollm2
    prompts = [tokens_of(count, seed=count, vocabulary=49_152) for count in (1, 16, 17, 100)]
    runner = Runner(model)
    sequences = [runner.sequence(prompt, room=24) for prompt in prompts]
    logits = runner.step(*(sequence.next(len(sequence.tokens)) for sequence in sequences))
    for _ in range(20):
        for sequence, token in zip(sequences, logits.argmax(-1).tolist(), strict=True):
            sequence.tokens.append(token)
        logits = runner.step(*(sequence.next(1) for sequence in sequences))
    for prompt, sequence in zip(prompts, sequences, strict=True):
        expected = reference_logits(reference, sequence.tokens)
        for index in range(len(prompt), len(sequence.tokens)):
            best = expected[index - 1].topk(2)
            near = (best.values[0] - best.values[1]).item() < 1e-3
            assert sequence.tokens[index] in best.indices.tolist()[: 2 if near else 1]


def test_logits_of_the_default_model(smollm2):
    model, reference = smollm2
    tokens = tokens_of(600, vocabulary=49_152)
    expected = reference_logits(reference, tokens)
    runner = Runner(model)
    sequence = runner.sequence(tokens)
    for count in (512, 1, 80, 7):
        logits = runner.step(sequence.next(count))[0]
        assert (logits - expected[sequence.done - 1]).abs().max() < 2e-4


def test_bfloat16_is_close(smollm2):
    """The narrow dtype takes other paths for few and for many rows: both must stay near float32."""
    _, reference = smollm2
    tokens = tokens_of(40, vocabulary=49_152)
    expected = reference_logits(reference, tokens)
    runner = Runner(load_model(prepare_default_model(), "bfloat16"))
    sequence = runner.sequence(tokens)
    for count in (30, 1, 2, 6, 1):
        logits = runner.step(sequence.next(count))[0]
        distance = (logits - expected[sequence.done - 1]).norm() / expected[sequence.done - 1].norm()
        assert distance < 0.05


def test_rope_tables_are_the_references(tmp_path):
    reference = save_tiny(tmp_path, rope=LLAMA3)
    config = ModelConfig.from_folder(tmp_path)
    positions = torch.arange(config.max_positions)
    cos, sin = reference.model.rotary_emb(torch.zeros(1, 1), positions[None])
    rope = Rope(config.rope, config.head_dim, config.max_positions, torch.float32)
    torch.testing.assert_close(rope.cos, cos[0], atol=1e-6, rtol=0)
    signs = torch.tensor([-1.0, 1.0]).repeat_interleave(config.head_dim // 2)
    torch.testing.assert_close(rope.sin, sin[0] * signs, atol=1e-6, rtol=0)


def test_shards_load_as_one_file(tmp_path):
    reference = save_tiny(tmp_path / "one")
    reference.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    seen = []
    many = load_model(tmp_path / "many", "float32", progress=lambda done, total: seen.append((done, total)))
    one = load_model(tmp_path / "one", "float32")
    for name, target in one.parameters.targets.items():
        assert torch.equal(target, many.parameters.targets[name])
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def rename(weights):
    weights["model.layers.1.extra"] = weights.pop("model.norm.weight")


def reshape(weights):
    weights["model.norm.weight"] = torch.ones(3)


@pytest.mark.parametrize(
    ("change", "what"),
    [(rename, r"lacks model\.norm\.weight; it has unexpected model\.layers\.1\.extra"), (reshape, r"shape \[3\]")],
)
def test_weights_that_do_not_fit_are_named(tmp_path, change, what):
    save_tiny(tmp_path)
    change_weights(tmp_path, change)
    with pytest.raises(ModelError, match=what):
        load_model(tmp_path, "float32")


def test_an_unknown_architecture_is_named(tmp_path):
    save_tiny(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("LlamaForCausalLM", "MambaForCausalLM"))
    with pytest.raises(UnknownArchitecture, match=r"'MambaForCausalLM' is not known; known are .*LlamaForCausalLM"):
        load_model(tmp_path, "float32")
    assert set(ARCHITECTURES) == set(CLASSES)
