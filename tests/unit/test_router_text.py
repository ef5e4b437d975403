import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvferry_router.chat_template import ChatTemplate, ChatTemplateError
from kvferry_router.detokenizer import Detokenizer, StopStrings
from kvferry_router.model_folder import ModelFolderError, load_model_text
from kvferry_router.tokenizer import Tokenizer
from text_folder import END, make_model_folder
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, pre_tokenizers

TEXT = "Hello wörld — 你好, the answer 🦊🦊 is 42\n\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(folder):
    return load_model_text(folder)


async def encode(text, what):
    return (await text.tokenizer.encode(what)).tolist()


def stream(tokenizer, ids, sizes, context=()):
    detokenizer = Detokenizer(tokenizer, context)
    parts, start = [], 0
    for size in sizes:
        parts.append(detokenizer.push(ids[start : start + size]))
        start += size
    assert start >= len(ids)
    return [*parts, detokenizer.finish()]


async def test_streamed_text_is_the_text(text):
    ids = await encode(text, TEXT)
    parts = stream(text.tokenizer, ids, [1] * len(ids))
    assert "".join(parts) == TEXT
    assert all("\ufffd" not in part for part in parts)
    # Characters of several tokens are there, and held back until they are whole.
    assert parts.count("") > 5


@settings(deadline=None, max_examples=60)
@given(content=st.text(max_size=40), seed=st.integers(0, 1 << 30))
def test_any_text_in_any_steps(text, content, seed):
    ids = text.tokenizer.encode_now(content)
    draw = random.Random(seed)
    sizes = []
    while sum(sizes) < len(ids):
        sizes.append(draw.randint(1, 5))
    assert "".join(stream(text.tokenizer, ids.tolist(), sizes)) == content


@settings(deadline=None, max_examples=60)
@given(ids=st.lists(st.integers(0, 255), max_size=60))
def test_any_tokens_end_and_give_what_decoding_at_once_gives(text, ids):
    # Bytes in any order: mostly no text at all.
    ids = [token + 2 for token in ids]
    parts = stream(text.tokenizer, ids, [1] * len(ids))
    whole = text.tokenizer.decode(ids)
    strip = str.maketrans("", "", "\ufffd")
    assert "".join(parts).translate(strip) == whole.translate(strip)


async def test_an_incomplete_last_character_is_shown_not_lost(text):
    ids = (await encode(text, "🦊"))[:2]
    assert "".join(stream(text.tokenizer, ids, [1, 1])) == text.tokenizer.decode(ids) != ""


def test_leading_space_of_word_piece_tokenizers_is_kept():
    vocabulary = {"<unk>": 0, "▁Hello": 1, "▁world": 2, "!": 3}
    encoder = Encoder(models.WordLevel(vocabulary, unk_token="<unk>"))
    encoder.pre_tokenizer = pre_tokenizers.Metaspace()
    encoder.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(encoder, 4)
    assert stream(tokenizer, [2, 3], [1, 1], context=[1]) == [" world", "!", ""]
    assert stream(tokenizer, [2, 3], [1, 1]) == ["world", "!", ""]


async def test_special_tokens_have_no_text(text):
    end = text.stop_token_ids[0]
    ids = [*(await encode(text, "one")), end]
    assert "".join(stream(text.tokenizer, ids, [1] * len(ids))) == "one"
    assert text.tokenizer.token_text(end) == END


async def test_bytes_of_tokens_add_up_to_the_text(text):
    ids = await encode(text, TEXT)
    assert b"".join(text.tokenizer.token_bytes(token) for token in ids).decode() == TEXT
    fox = await encode(text, "🦊")
    assert text.tokenizer.token_text(fox[0]).startswith("bytes:\\xf0")
    assert text.tokenizer.token_bytes(10_000) == b""


async def test_long_texts_are_encoded_in_a_thread_alike(text):
    long = "the quick brown fox " * 1000
    assert (await encode(text, long)) == text.tokenizer.encode_now(long).tolist()


# --- stop strings ---------------------------------------------------------------------------------------------------


def test_nothing_of_a_stop_string_is_emitted():
    stops = StopStrings(["STOP", "END."])
    assert [stops.push(part) for part in ("ab", "cS", "T", "Ox", "EN", "D", ".xyz", "more")] == [
        "ab", "c", "", "STOx", "", "", "", "",
    ]  # fmt: skip
    assert stops.hit
    assert stops.finish() == ""


def test_what_was_held_back_comes_at_the_end():
    stops = StopStrings(["STOP"])
    assert (stops.push("abSTO"), stops.finish(), stops.hit) == ("ab", "STO", False)


def test_the_earliest_stop_wins():
    stops = StopStrings(["late", "ear"])
    assert stops.push("an early and late") == "an "


@given(
    text=st.text("ab.", max_size=30),
    stops=st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 30),
)
def test_any_split_gives_the_text_up_to_the_first_stop(text, stops, seed):
    draw, watcher, out, rest = random.Random(seed), StopStrings(stops), "", text
    while rest:
        size = draw.randint(1, 4)
        out += watcher.push(rest[:size])
        rest = rest[size:]
        # Nothing emitted may have to be taken back.
        assert not any(stop in out for stop in stops)
    out += watcher.finish()
    assert watcher.hit == any(stop in text for stop in stops)
    if not watcher.hit:
        assert out == text
    else:
        # As soon as some stop string is complete, the answer ends where it begins.
        ends = min(text.find(stop) + len(stop) for stop in stops if stop in text)
        assert text.startswith(out)
        assert len(out) < ends


# --- templates and folders ------------------------------------------------------------------------------------------


def test_a_chat_is_rendered(text):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>"}]
    assert text.template.render(turns) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
    )


def test_templates_have_what_templates_expect():
    source = (
        "{{ bos_token }}{% for m in messages %}\n    {% if loop.first %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    rendered = template.render([{"role": "a", "content": "b"}, {"role": "user", "content": "<ü>"}])
    assert rendered == '<s>{"role": "user", "content": "<ü>"}4'


def test_templates_cannot_reach_out_or_change_their_input():
    turns = [{"role": "user", "content": "x"}]
    for source in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ 1 / 0 }}",
    ):
        with pytest.raises(ChatTemplateError):
            ChatTemplate(source, {}).render(turns)
    with pytest.raises(ChatTemplateError, match="no such turn"):
        ChatTemplate("{{ raise_exception('no such turn') }}", {}).render(turns)
    with pytest.raises(ChatTemplateError, match="line 1"):
        ChatTemplate("{% if %}", {})


def test_end_tokens_and_limits_come_from_the_folder(text):
    assert len(text.stop_token_ids) == 1
    assert text.max_context == 256


def test_a_template_in_a_file_of_its_own(folder, tmp_path):
    other = make_model_folder(tmp_path)
    (other / "chat_template.jinja").write_text("from the file")
    assert load_model_text(other).template.render([]) == "from the file"


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "config.json does not exist"),
        ("tokenizer.json", None, "tokenizer.json does not exist"),
        ("tokenizer.json", "{}", "is not a tokenizer"),
        ("config.json", "{", "is not JSON"),
        ("config.json", "[]", "expected an object"),
    ],
)
def test_a_broken_folder_is_named(tmp_path, file, content, words):
    folder = make_model_folder(tmp_path)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(ModelFolderError, match=words):
        load_model_text(folder)
