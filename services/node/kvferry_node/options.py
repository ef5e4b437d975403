"""From a settings struct to a command: a flag per field, KVFERRY_* variables, and a TOML file.

A value comes from the flag, else from the environment, else from the file, else it is the default. Every value is
checked against the struct's annotations, and a refusal names the flag, the place the value came from and what is
allowed.
"""

import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_origin

import click
import msgspec
from kvferry_proto.redis_url import without_password

from kvferry_node.errors import SettingsError
from kvferry_node.redis_link import refusal
from kvferry_node.settings import Field, NodeSettings, fields, parse_bytes

S = TypeVar("S", bound=NodeSettings)

ROLES = ("router", "prefiller", "decoder")


class SettingsCommand(click.Command, Generic[S]):
    """A command that runs a service by its settings, and can say beforehand whether it would start."""

    def __init__(self, role: str, struct: type[S], check: Callable[[S], object], **more: Any) -> None:  # noqa: ANN401
        super().__init__(role, **more)
        self._struct = struct
        self._check = check

    def settings(self, flags: dict[str, Any]) -> S:
        """Merge and check settings. Raises UsageError, which names the flag."""
        config = flags.pop("config")
        try:
            settings = load_settings(self._struct, str(self.name), flags, os.environ, config)
            self._check(settings)
        except SettingsError as error:
            raise click.UsageError(str(error)) from None
        return settings

    def check(self, args: list[str]) -> S:
        """Return the settings that this command line gives, and start nothing. Raises UsageError."""
        return self.settings(self.make_context(str(self.name), list(args)).params)

    def redis_refusal(self, url: str) -> str | None:
        """Return what is wrong with the Redis at `url` that no waiting mends, a predicate, or None."""
        return refusal(url)


def settings_command(
    struct: type[S], role: str, check: Callable[[S], object] = lambda _settings: None
) -> Callable[[Callable[[S], None]], SettingsCommand[S]]:
    """Make a command out of a function that takes the settings; its docstring is the help.

    `check` raises SettingsError where what it runs on can't do what they ask for.
    """

    def decorate(function: Callable[[S], None]) -> SettingsCommand[S]:
        def callback(**flags: Any) -> None:  # noqa: ANN401  # texts, as click has them
            settings = command.settings(flags)
            if why := refusal(settings.redis_url):
                msg = f"--redis-url (or KVFERRY_REDIS_URL, REDIS_URL): the Redis there {why}"
                raise click.UsageError(msg)
            function(settings)

        config = click.Option(
            ["--config"],
            metavar="FILE",
            help="TOML file with the names below as keys; a table named after the role holds for that role alone.",
            envvar="KVFERRY_CONFIG",
        )
        params: list[click.Parameter] = [config, *(_option(field) for field in fields(struct))]
        command = SettingsCommand(role, struct, check, params=params, callback=callback, help=function.__doc__)
        return command

    return decorate


def load_settings(
    struct: type[S], role: str, flags: Mapping[str, object], environ: Mapping[str, str], config: str | None = None
) -> S:
    """Merge flags over environment over file over defaults. Raises SettingsError; flags that are None are absent."""
    known = fields(struct)
    file = _read_file(config, role, known) if config else {}
    values: dict[str, Any] = {}
    for field in known:
        found = _find(field, flags, environ, file, config)
        if found is not None:
            values[field.name] = _checked(field, *found)
    try:
        return struct(**values)
    except TypeError:
        missing = [field.flag for field in known if field.default is msgspec.NODEFAULT and field.name not in values]
        msg = f"{', '.join(missing)} must be given"
        raise SettingsError(msg) from None


def _find(
    field: Field, flags: Mapping[str, object], environ: Mapping[str, str], file: Mapping[str, Any], config: str | None
) -> tuple[object, str] | None:
    """Return the value that holds and where it came from; None: the default."""
    if flags.get(field.name) not in (None, ()):
        return flags[field.name], ""
    for name in field.env:
        if name in environ:
            return _from_text(field, environ[name]), f" (from the environment variable {name})"
    if field.name in file:
        return file[field.name], f" (from {config})"
    return None


def _from_text(field: Field, text: str) -> object:
    """An environment variable holds a list as words between commas."""
    return [word for word in text.split(",") if word] if get_origin(field.base) is list else text


def _checked(field: Field, value: object, source: str) -> object:
    try:
        if field.in_bytes and isinstance(value, str):
            value = parse_bytes(value)
        elif field.base is float and isinstance(value, str):
            value = float(value)
        return msgspec.convert(value, field.type, strict=False)
    except ValueError:
        shown = without_password(value) if isinstance(value, str) else value
        msg = f"{field.flag}{source}: {shown!r} is not allowed; expected {field.allowed}"
        raise SettingsError(msg) from None


def _read_file(config: str, role: str, known: list[Field]) -> dict[str, Any]:
    try:
        with Path(config).open("rb") as file:
            content = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        msg = f"--config {config}: {error}"
        raise SettingsError(msg) from None
    tables = {name: content.pop(name) for name in ROLES if isinstance(content.get(name), dict)}
    values = {name.replace("-", "_"): value for name, value in (content | tables.get(role, {})).items()}
    names = {field.name for field in known}
    for name in values.keys() - names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(sorted(names))}"
        msg = f"--config {config}: there is no setting {name}{hint}"
        raise SettingsError(msg)
    return values


def _option(field: Field) -> click.Option:
    text = field.help
    if field.default not in (msgspec.NODEFAULT, "", None, [], ()):
        text = f"{text} [default: {field.default}]".strip()
    if field.base is bool:
        flag = f"{field.flag}/--no-{field.flag[2:]}"
        return click.Option([flag], default=None, help=text)
    many = get_origin(field.base) is list
    return click.Option([field.flag], default=None, multiple=many, type=str, metavar=_metavar(field), help=text)


def _metavar(field: Field) -> str:
    choices = get_args(field.base)
    if choices and all(isinstance(choice, str) for choice in choices):
        return "|".join(choices)
    return "SIZE" if field.in_bytes else getattr(field.base, "__name__", "value").upper()
