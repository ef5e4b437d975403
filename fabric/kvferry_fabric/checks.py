"""What `kvferry doctor` asks of the fabric."""

from kvferry_fabric.errors import FabricError
from kvferry_fabric.providers import providers


def findings() -> list[dict[str, str]]:
    """Return whether the extension works and which providers it can open, each with what to do about it."""
    try:
        usable = providers()
    except FabricError as error:
        return [_finding("fail", str(error), "install libfabric-dev and gcc, then build the extension: make setup")]
    if not usable:
        return [
            _finding("fail", "libfabric offers no provider that kvferry can use", "install libfabric1 1.17 or newer")
        ]
    return [_finding("ok", f"the C extension opens {', '.join(usable)}", "")]


def _finding(level: str, text: str, advice: str) -> dict[str, str]:
    return {"name": "fabric extension", "level": level, "text": text, "advice": advice}
