"""The URL by which every node finds Redis, as it may be shown."""

import re


def without_password(url: str) -> str:
    """Return a URL whose password, which may hold any character, is stars; another text as it is."""
    shown = re.sub(r"(?<=//)([^:@/]*):.*@", r"\1:***@", url)
    return re.sub(r"(?<=password=)[^&]*", "***", shown)
