"""Chat templates: the Jinja text that a model folder brings along, rendered in a sandbox.

The environment gives templates what Hugging Face's renderer gives them: trimmed blocks, loop controls, `tojson` that
does not escape for HTML, `raise_exception`, `strftime_now`, and `{% generation %}` marks, which only training reads.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# What a template's own expressions can raise on messages that it was not written for.
_RENDERING = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)


class ChatTemplateError(ValueError):
    """The template refused the messages, or could not be rendered with them."""


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` renders what stands inside."""

    tags = {"generation"}  # noqa: RUF012  # the name and kind that Jinja asks for

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the body in place of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. Raises ChatTemplateError for a source that is no template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            names = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            msg = f"the chat template does not parse: line {error.lineno}: {error.message}"
            raise ChatTemplateError(msg) from error
        self._special_tokens = dict(special_tokens)
        self.takes_tools = "tools" in names
        """Whether it knows what tools are."""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the prompt that asks for the assistant's next turn. Raises ChatTemplateError."""
        known: dict[str, Any] = {**self._special_tokens, **({"tools": list(tools)} if tools else {})}
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **known)
        except _RENDERING as error:
            msg = f"the chat template of this model does not take these messages: {error}"
            raise ChatTemplateError(msg) from error


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:  # noqa: ANN401  # whatever the template holds
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)
