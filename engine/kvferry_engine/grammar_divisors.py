"""Divisors in grammars: the work that `multipleOf` makes grows with the number, and no limit of llguidance counts it.

It keeps a state for each remainder, so that fifty characters of schema may ask for all the memory that there is.
"""

import math
import re

MAX_DIVISOR = 100_000
"""Compiled in some 0.2 s; ten times as much takes 6 s and 260 MB, and a hundred times minutes and gigabytes."""
_ESCAPED = re.compile(r"\\u00([2-7][0-9a-fA-F])")
_DIVISOR = re.compile(r'"multipleOf"\s*:\s*-?([0-9.]+)([eE][+-]?[0-9]+)?')


def too_many_remainders(text: str) -> str:
    """Return what is wrong with the divisors of a schema, or of the schemas in a Lark grammar; "" for nothing.

    Where two hold for one number, it is their least common multiple that counts: so all of them are taken together.
    """
    plain = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)
    common = total = 1
    for digits, exponent in _DIVISOR.findall(plain):
        number = _remainders(digits, exponent)
        common, total = math.lcm(common, number), total + number
        if max(common, total) > MAX_DIVISOR:
            return (
                f"multipleOf: {digits[:20]}{exponent[:9]} is too large, or too much with those before it; their least "
                f"common multiple and their sum, without decimal points, may be {MAX_DIVISOR} at most"
            )
    return ""


def _remainders(digits: str, exponent: str) -> int:
    """Remainders that a divisor has, its decimal point aside; powers of ten are seen by the digits of a number."""
    if "." in digits:
        digits = digits.rstrip("0")
    plain = digits.replace(".", "").lstrip("0")
    if not plain.rstrip("0") or plain.rstrip("0") == "1":
        return 1
    size = len(plain) + max(0, int(exponent[1:][:5] or 0) if exponent else 0)
    return int(plain) * 10 ** (size - len(plain)) if size < 8 else MAX_DIVISOR + 1
