"""The longest chains of rules and references that a grammar may hold end no decoder.

In a process of its own: what is too deep for a thread's stack ends the process.
"""

import subprocess
import sys
from itertools import pairwise, product
from string import ascii_lowercase

import pytest
from kvferry_proto.grammar import MAX_GRAMMAR_CHARACTERS

NAMES = ["".join(letters) for letters in product(ascii_lowercase, repeat=3)]
PROGRAM = """
import asyncio, sys
from pathlib import Path
from kvferry_engine.grammar import GrammarCompiler, Masker
from kvferry_proto.grammar import Grammar

async def main(folder, kind):
    text = sys.stdin.read()
    compiler = GrammarCompiler(Path(folder), 49152)
    grammar = Grammar.lark(text) if kind == "lark" else Grammar.json_schema(text)
    matcher = await compiler.compile(grammar, frozenset({2}))
    [allowed] = (~Masker(49152).fill([(0, matcher)]).forbidden).tolist()
    token = allowed.index(True)
    assert matcher.copy().takes([token]) in (0, 1)
    print("done")

asyncio.run(main(*sys.argv[1:]))
"""


def chain(head, link, tail):
    """As many links as a grammar's characters suffice for; each names the next."""
    text = head.format(NAMES[0])
    for name, after in pairwise(NAMES):
        more = link.format(name, after)
        if len(text) + len(more) + len(tail) > MAX_GRAMMAR_CHARACTERS:
            return text + tail.format(name)
        text += more
    raise AssertionError


CHAINS = {
    "rules": ("lark", chain("start:{}", "\n{}:{}", '\n{}:"a"')),
    "choices": ("lark", chain("start:{}", '\n{}:{}|"x"', '\n{}:"a"')),
    "anyOf": (
        "json",
        chain(
            '{{"$ref":"#/$defs/{}","$defs":{{',
            '"{}":{{"anyOf":[{{"$ref":"#/$defs/{}"}},{{"type":"null"}}]}},',
            '"{}":{{"type":"null"}}}}}}',
        ),
    ),
    "properties": (
        "json",
        chain(
            '{{"$ref":"#/$defs/{}","$defs":{{',
            '"{}":{{"properties":{{"a":{{"$ref":"#/$defs/{}"}}}}}},',
            '"{}":{{"type":"null"}}}}}}',
        ),
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_as_long_as_a_grammar_may_be_is_compiled(default_model, name):
    kind, text = CHAINS[name]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(default_model), kind],
        input=text,
        text=True,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]
