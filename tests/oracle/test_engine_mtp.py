"""The layer that drafts (MTP) against the reference's, from the prompt's prefill to a second guess, in float32."""

import time

import pytest
import torch
from decode_rig import one_thread
from engine_runner import Runner, close, tokens_of
from kvferry_engine.batch import ForwardBatch, SequenceSlice
from kvferry_engine.errors import BatchError, ModelError
from kvferry_engine.weights import load_model
from rank_threads import RankThreads
from safetensors.torch import load_file, save_file
from tiny_deepseek import build, build_drafter, save
from transformers.cache_utils import MtpCache

pytestmark = pytest.mark.oracle
one_thread = pytest.fixture(autouse=True, scope="module")(one_thread)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mtp")


@pytest.fixture(scope="module")
def both(folder):
    reference = build(num_mtp_layers=1)
    drafter = build_drafter(reference)
    save(reference, folder, drafter)
    return load_model(folder, "float32"), reference, drafter


@torch.inference_mode()
def reference_drafts(reference, drafter, tokens, guesses):
    """Logits of the guess after `tokens`, and after each of `guesses` in turn, which are fed back."""
    hidden = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][:, :-1]
    cache = MtpCache(config=reference.config.get_mtp_config())
    ids, positions, logits = torch.tensor([tokens[1:]]), torch.arange(1, len(tokens))[None], []
    for guess in [*guesses, None]:
        out = drafter.forward_layer(0, hidden, positions, cache, input_ids=ids)
        logits.append(reference.lm_head(out[:, -1])[0])
        hidden, ids, positions = out[:, -1:], torch.tensor([[guess or 0]]), positions[:, -1:] + 1
    return logits


class Drafting(Runner):
    """A runner that goes the whole way: the prompt but its last token, the last token, and then drafts."""

    def prefill(self, sequence, chunks):
        """Run the prompt without its last token; returns the hidden state of the token before the last."""
        end = len(sequence.tokens) - 1
        start, hidden = 0, None
        for count in chunks:
            stop = min(start + count, end)
            following = sequence.tokens[stop] if stop < end else None
            piece = SequenceSlice(sequence.tokens[start:stop], start, sequence.pages, False, following)
            batch = ForwardBatch.build([piece], page_size=self.page_size)
            hidden = self.model.hidden_states(batch, self.pool, torch.tensor([stop - start - 1]))
            start = stop
        assert start == end
        return hidden

    def hidden(self, *slices):
        """Run `slices`; returns the hidden state of the last token of each."""
        batch = ForwardBatch.build(slices, page_size=self.page_size)
        return self.model.hidden_states(batch, self.pool, batch.logit_rows)

    def draft(self, hidden, *slices):
        return self.model.draft(ForwardBatch.build(slices, page_size=self.page_size), hidden, self.pool)


@pytest.mark.parametrize("page_size", [1, 8, 64])
@pytest.mark.parametrize("chunks", [[80], [7, 1, 8, 64]], ids=str)
@pytest.mark.parametrize("length", [2, 17, 18, 40])
def test_drafts_after_a_prefill(both, page_size, chunks, length):
    model, reference, drafter = both
    tokens = tokens_of(length + 1)
    runner = Drafting(model, page_size=page_size, pages=48)
    sequence = runner.sequence(tokens[:-1], room=2)
    before = runner.prefill(sequence, _cut(chunks, length - 1))
    drawn, guess = tokens[-1], 77
    last = runner.hidden(SequenceSlice(tokens[length - 1 : length], length - 1, sequence.pages))
    expected = reference_drafts(reference, drafter, tokens, [guess])
    pair = SequenceSlice([tokens[length - 1], drawn], length - 2, sequence.pages)
    out = runner.draft(torch.cat((before, last)), pair)
    close(model.score(out)[0], expected[0])
    again = runner.draft(out, SequenceSlice([guess], length, sequence.pages))
    close(model.score(again)[0], expected[1])


def _cut(chunks, total):
    cut = []
    for count in chunks:
        cut.append(min(count, total - sum(cut)))
    return [count for count in cut if count]


def test_a_batch_drafts_as_each_alone(both):
    """Sequences of different lengths, one of them prefilling, in one step and then in one draft."""
    model, reference, drafter = both
    prompts = [tokens_of(count, seed=count) for count in (9, 24, 33)]
    runner = Drafting(model, page_size=8, pages=30)
    sequences = [runner.sequence(prompt, room=2) for prompt in prompts]
    first = runner.hidden(*(sequence.next(len(sequence.tokens) - 1) for sequence in sequences))
    second = runner.hidden(*(sequence.next(1) for sequence in sequences))
    drawn = [5, 6, 7]
    hidden = torch.stack((first, second), dim=1).flatten(0, 1)
    slices = [
        SequenceSlice([sequence.tokens[-1], token], len(sequence.tokens) - 2, sequence.pages)
        for sequence, token in zip(sequences, drawn, strict=True)
    ]
    logits = model.score(runner.draft(hidden, *slices))
    for row, (prompt, token) in enumerate(zip(prompts, drawn, strict=True)):
        close(logits[row], reference_drafts(reference, drafter, [*prompt, token], [])[0])


def test_ranks_draft_together(folder, both, monkeypatch):
    """Before the lead says that the drafting layer is done, the slowest rank has written what it keeps."""
    _, reference, drafter = both
    tokens = tokens_of(31)
    together = RankThreads(folder, 2, page_size=8, pages=14)
    try:
        lead, late = together.runners
        keep, seen = late.model.drafter.keep, []
        monkeypatch.setattr(late.model.drafter, "keep", lambda *inputs: (time.sleep(0.3), keep(*inputs)))
        sequence = together.sequence(tokens[:30], room=1)

        def on_layer(layer):
            seen.append(late.pool.tensor[layer, sequence.pages].flatten(0, 3)[:18].clone())

        def run(runner, start, stop, following=None, on_layer=None):
            piece = SequenceSlice(tokens[start:stop], start, sequence.pages, True, following)
            batch = ForwardBatch.build([piece], page_size=8)
            return runner.model.hidden_states(batch, runner.pool, torch.arange(stop - start), on_layer)

        together.each(lambda runner: run(runner, 0, 18, tokens[18], on_layer if runner is lead else None))
        close(seen[3], lead.pool.tensor[3, sequence.pages].flatten(0, 3)[:18])
        hidden = together.each(lambda runner: run(runner, 18, 30))
        pairs = ForwardBatch.build([SequenceSlice(tokens[19:31], 18, sequence.pages)], page_size=8)
        drafts = together.each(lambda runner: runner.model.draft(pairs, hidden[0], runner.pool))
        close(drafts[0], drafts[1])
        logits = together.each(lambda runner: runner.model.score(drafts[0]))
        assert logits[1] is None
        close(logits[0][0], reference_drafts(reference, drafter, tokens, [])[0])
    finally:
        together.close()


def test_hidden_states_of_any_rows_are_the_references(both):
    model, reference, _ = both
    tokens = tokens_of(30)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens]), output_hidden_states=True)
    runner = Runner(model)
    batch = ForwardBatch.build([runner.sequence(tokens).next(30)], page_size=16)
    rows = torch.tensor([0, 7, 29])
    hidden = model.hidden_states(batch, runner.pool, rows)
    close(hidden, expected.hidden_states[-1][0, rows])
    close(model.score(hidden), expected.logits[0, rows])


def test_the_drafting_layer_is_a_layer_of_the_cache(both):
    model, _, _ = both
    layout = model.kv_layout(8)
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.latent) == (4, 1, 24, True)
    runner, done = Runner(model), []
    sequence = runner.sequence(tokens_of(20))
    runner.step(sequence.next(19), on_layer=done.append)
    runner.step(sequence.next(1), on_layer=done.append)
    assert done == [0, 1, 2, 3] * 2
    kept = runner.pool.tensor[3, sequence.pages].flatten(0, 3)
    assert kept[:18].abs().sum(dim=-1).all()
    assert not kept[18:].any()  # The next of these is not known.


@pytest.mark.parametrize("change", ["told so", "no weights", "not counted"])
def test_without_a_drafting_layer(tmp_path, folder, both, change):
    _, reference, drafter = both
    if change == "not counted":
        save(build(num_mtp_layers=0), tmp_path)
    else:
        save(reference, tmp_path, drafter if change == "told so" else None)
    model = load_model(tmp_path, "float32", drafts=change != "told so")
    assert model.kv_layout(8).layers == 3
    runner = Drafting(model)
    tokens = tokens_of(20)
    sequence = runner.sequence(tokens)
    hidden = runner.hidden(sequence.next(20))
    with torch.inference_mode():
        close(model.score(hidden)[0], reference(torch.tensor([tokens])).logits[0, -1])
    with pytest.raises(ValueError, match="no drafting layer"):
        runner.draft(hidden, SequenceSlice([3], 19, sequence.pages))
    with pytest.raises(BatchError, match="layers"):
        model.forward(
            ForwardBatch.build([SequenceSlice([3], 0, [0])], page_size=16), Runner(load_model(folder, "float32")).pool
        )


def test_hidden_states_of_another_number_are_refused(both):
    runner = Drafting(both[0])
    with pytest.raises(BatchError, match=r"2 tokens .* \[3, 64\]"):
        runner.draft(torch.zeros(3, 64), SequenceSlice([1, 2], 0, [0]))


DRAFT = "model.layers.3"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda w: w.pop(f"{DRAFT}.eh_proj.weight"), r"lacks model\.layers\.3\.eh_proj\.weight$"),
        (lambda w: w.pop(f"{DRAFT}.mlp.experts.2.up_proj.weight"), r"lacks .*experts\.2\.up_proj\.weight$"),
        (lambda w: w.update({f"{DRAFT}.other.weight": torch.ones(2)}), r"unexpected .*3\.other"),
        (lambda w: w.update({"model.layers.4.eh_proj.weight": torch.ones(2)}), r"unexpected .*4\.eh_proj"),
    ],
    ids=["absent", "an expert absent", "unknown", "a second one"],
)
@pytest.mark.usefixtures("both")
def test_drafting_weights_that_do_not_fit_are_named(folder, tmp_path, change, what):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match=what):
        load_model(tmp_path, "float32")
