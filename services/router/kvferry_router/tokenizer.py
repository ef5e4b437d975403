"""Token ids and text: encoding off the event loop, and what a single token is called in logprobs."""

import asyncio
import functools
import re
from collections.abc import Sequence

import orjson
from kvferry_proto.ints import Int32s
from tokenizers import Tokenizer as Encoder

# Encoding runs at a few megabytes a second: longer texts would hold up every stream, so they go to a thread.
INLINE_CHARACTERS = 4096

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A model's tokenizer. `vocabulary`: ids below this number exist."""

    def __init__(self, encoder: Encoder, vocabulary: int) -> None:
        self._encoder = encoder
        self.vocabulary = vocabulary
        self._byte_level = '"ByteLevel"' in orjson.dumps(orjson.loads(encoder.to_str())["decoder"]).decode()
        # Bounded: an entry is about 200 bytes and logprobs touch few of the tokens.
        self.token_text = functools.lru_cache(maxsize=1 << 16)(self._token_text)
        self.token_bytes = functools.lru_cache(maxsize=1 << 16)(self._token_bytes)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Int32s:
        """Return the ids of `text`. `add_special_tokens`: False where the text already holds them, as chats do."""
        if len(text) <= INLINE_CHARACTERS:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode_now, text, add_special_tokens=add_special_tokens)

    def encode_now(self, text: str, *, add_special_tokens: bool = True) -> Int32s:
        """Encode in this thread."""
        return Int32s(self._encoder.encode(text, add_special_tokens=add_special_tokens).ids)

    def special(self, texts: Sequence[str]) -> dict[str, int]:
        """Return those of `texts` that are special tokens, and their ids: `decode` leaves them out."""
        added = self._encoder.get_added_tokens_decoder().items()
        return {entry.content: token for token, entry in added if entry.special and entry.content in texts}

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens; bytes that are no character become U+FFFD."""
        return self._encoder.decode(ids, skip_special_tokens=True)

    def _token_text(self, token: int) -> str:
        """One token as text; a part of a character as `bytes:\\xe2\\x82`, as OpenAI writes it."""
        text = self._encoder.decode([token], skip_special_tokens=False)
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._token_bytes(token))

    def _token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for; empty for an id without a token."""
        name = self._encoder.id_to_token(token)
        if name is None:
            return b""
        if match := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(match[1], 16)])
        if self._byte_level and all(character in _BYTES for character in name):
            return bytes(_BYTES[character] for character in name)
        return self._encoder.decode([token], skip_special_tokens=False).encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes a visible Latin-1 byte as itself and the others as the characters from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()
