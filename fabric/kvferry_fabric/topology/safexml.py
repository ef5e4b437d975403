"""XML from files that anybody may have sent: no entities, nothing fetched, bounded in size and depth.

hwloc's files have a document type, so that can't be refused; entity declarations can, and with them go the
attacks that expand or fetch. The parser is the standard library's expat, driven here because the tree parser
above it hides the hook for declarations. External document types are never read by expat unless asked to.
"""

from typing import NoReturn
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from kvferry_fabric.topology.errors import TopologyError

MOST_BYTES = 64 << 20
"""The largest machine in hwloc's own tests takes less than 2 MiB."""
MOST_DEPTH = 200
"""hwloc nests some twenty levels; readers of the tree recurse."""


def parse(data: bytes, what: str) -> Element:
    """Return the root element. `what` names the file in messages.

    Raises TopologyError if the data is too large or too deep, declares entities, or is not well-formed XML.
    """
    if len(data) > MOST_BYTES:
        msg = f"{what}: {len(data)} bytes are too many for a topology (at most {MOST_BYTES})"
        raise TopologyError(msg)
    try:
        return _build(data)
    # Unknown encodings are a LookupError of Python's codecs, some multi-byte ones a ValueError.
    except (expat.ExpatError, LookupError, ValueError) as error:
        msg = f"{what}: not well-formed XML: {error}"
        raise TopologyError(msg) from error
    except _RefusedError as error:
        msg = f"{what}: {error}"
        raise TopologyError(msg) from error


class _RefusedError(Exception):
    """Well-formed, but not taken."""


def _build(data: bytes) -> Element:
    builder, parser = TreeBuilder(), expat.ParserCreate()
    depth = 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > MOST_DEPTH:
            msg = f"elements are nested deeper than {MOST_DEPTH}"
            raise _RefusedError(msg)
        builder.start(tag, attributes)

    def end(tag: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(tag)

    def entity(name: str, *_: object) -> NoReturn:
        msg = f"it declares the entity {name!r}, which no topology needs"
        raise _RefusedError(msg)

    parser.StartElementHandler, parser.EndElementHandler, parser.EntityDeclHandler = start, end, entity
    parser.Parse(data, True)
    return builder.close()
