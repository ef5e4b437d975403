"""The settings that all services share. A struct is the one declaration: flags, environment and file derive from it."""

import re
import secrets
import socket
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from kvferry_proto.nodes import NodeRef, new_incarnation

from kvferry_node.errors import SettingsError

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Bytes = Annotated[int, msgspec.Meta(ge=0, extra={"unit": "bytes"})]
"""A size in bytes; options take it as 512MiB, 1GiB, 2G or a plain number."""

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def help_text(text: str, **extra: object) -> msgspec.Meta:
    """Describe a field; `env` names a further environment variable that sets it, `form` says what it looks like."""
    return msgspec.Meta(description=text, extra=extra or None)


class NodeSettings(msgspec.Struct, kw_only=True, frozen=True):
    """Settings of every service; each service subclasses it with its own."""

    node_id: Annotated[
        str,
        msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{0,100}$"),
        help_text(
            "Name of this node, unique in the cluster. Empty: role, host name and four random digits.",
            form="at most 100 letters, digits, dots, dashes and underscores",
        ),
    ] = ""
    redis_url: Annotated[
        str,
        msgspec.Meta(pattern=r"^(redis|rediss|unix)://"),
        help_text(
            "Where membership and load are kept: redis://HOST:PORT/DB or unix:///SOCKET.",
            env="REDIS_URL",
            form="redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///SOCKET",
        ),
    ] = "redis://127.0.0.1:6379/0"
    host: Annotated[
        str,
        msgspec.Meta(min_length=1),
        help_text("Address that this node binds to and publishes to its peers. Keep it private."),
    ] = "127.0.0.1"
    zmq_port: Annotated[Port, help_text("Port of this node's ZeroMQ socket; 0 takes any.")] = 0
    http_port: Annotated[Port, help_text("Port of /health, /ready, /metrics and /state; 0 takes any.")] = 0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], help_text("Least severity logged.")] = "info"
    log_format: Annotated[Literal["json", "console"], help_text("json for machines, console for people.")] = "json"
    lease_seconds: Annotated[Seconds, help_text("A node that is silent for so long is held to be lost.")] = 3.0
    heartbeat_seconds: Annotated[Seconds, help_text("How often this node renews its lease and tells its load.")] = 0.5
    drain_seconds: Annotated[
        float, msgspec.Meta(ge=0, le=86400), help_text("How long running requests may take to end after SIGTERM.")
    ] = 30.0
    namespace: Annotated[
        str,
        msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$"),
        help_text(
            "Prefix of all Redis keys, so that several clusters can share one Redis.",
            form="1 to 64 letters, digits, dots, dashes and underscores",
        ),
    ] = "kvferry"
    curve_key_file: Annotated[
        str,
        help_text("Cluster key pair in ZeroMQ's certificate format; given, all ZeroMQ sockets speak CURVE with it."),
    ] = ""
    fault: Annotated[
        str,
        msgspec.Meta(pattern=r"^$|^[a-z-]+=\d+(\.\d+)?(,[a-z-]+=\d+(\.\d+)?)*$"),
        help_text(
            "For tests alone: faults to inject, as NAME=NUMBER[,NAME=NUMBER...].", form="NAME=NUMBER[,NAME=NUMBER...]"
        ),
    ] = ""

    def __post_init__(self) -> None:
        if self.lease_seconds < 2 * self.heartbeat_seconds:
            msg = (
                f"--lease-seconds must be at least twice --heartbeat-seconds, so that one lost beat costs nothing: "
                f"got {self.lease_seconds:g} and {self.heartbeat_seconds:g}"
            )
            raise SettingsError(msg)

    @property
    def standstill_seconds(self) -> float:
        """After standing still for longer this node's lease may have ended: it runs from the last beat before."""
        return self.lease_seconds - self.heartbeat_seconds

    @property
    def faults(self) -> dict[str, float]:
        """The faults to inject, by name."""
        pairs = (item.split("=") for item in self.fault.split(",") if item)
        return {name: float(number) for name, number in pairs}


def node_ref(settings: NodeSettings, role: str) -> NodeRef:
    """Begin a life of this node: its configured or drawn name, and a new incarnation."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64]
    return NodeRef(settings.node_id or f"{role}-{host}-{secrets.token_hex(2)}", new_incarnation())


def parse_bytes(text: str) -> int:
    """Read a size such as 1GiB, 512MiB, 64k or 4096; all units are powers of 1024. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE)
    if match is None:
        msg = "a size is a number with B, KiB, MiB, GiB or TiB, such as 1GiB"
        raise ValueError(msg)
    return int(float(match[1]) * 1024 ** _UNITS[match[2].lower()])


class Field(msgspec.Struct, frozen=True):
    """One setting as the option layer sees it."""

    name: str
    type: Any
    default: Any
    help: str
    metas: tuple[msgspec.Meta, ...]

    @property
    def flag(self) -> str:
        """Its command line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> list[str]:
        """Environment variables that set it, the most specific first."""
        return [f"KVFERRY_{self.name.upper()}", *(str(extra["env"]) for extra in self.extras if "env" in extra)]

    @property
    def extras(self) -> list[dict[str, Any]]:
        """What the annotations say beyond types and bounds."""
        return [meta.extra for meta in self.metas if meta.extra]

    @property
    def in_bytes(self) -> bool:
        """Whether the value is a size, written with a unit."""
        return any(extra.get("unit") == "bytes" for extra in self.extras)

    @property
    def base(self) -> Any:  # noqa: ANN401  # a type
        """The type without its annotations."""
        return get_args(self.type)[0] if self.metas else self.type

    @property
    def allowed(self) -> str:
        """What values it takes, in words."""
        choices = get_args(self.base)
        if choices and all(isinstance(choice, str) for choice in choices):
            return "one of " + ", ".join(choices)
        if self.in_bytes:
            return "a size such as 1GiB"
        bounds = [
            f"{word} {_number(getattr(meta, name))}"
            for meta in self.metas
            for name, word in (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than"))
            if getattr(meta, name) is not None
        ]
        forms = [str(extra["form"]) for extra in self.extras if "form" in extra]
        kind = getattr(self.base, "__name__", str(self.base))
        name = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}.get(kind, kind)
        return " ".join(forms) or ", ".join([name, *bounds])


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def fields(struct: type[msgspec.Struct]) -> list[Field]:
    """Return the settings that `struct` declares, those that it inherits among them."""
    hints = get_type_hints(struct, include_extras=True)
    return [_field(info, hints[info.name]) for info in msgspec.structs.fields(struct)]


def _field(info: msgspec.structs.FieldInfo, hint: Any) -> Field:  # noqa: ANN401  # a type
    metas = tuple(meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, msgspec.Meta))
    text = next((meta.description for meta in reversed(metas) if meta.description), "")
    default = info.default_factory() if info.default_factory is not msgspec.NODEFAULT else info.default
    return Field(name=info.name, type=hint, default=default, help=text, metas=metas)
