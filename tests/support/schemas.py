"""A seeded collection of JSON schemas across the keyword list: by hand, and composed at random of those by hand."""

import random

LEAVES = [
    {"type": "string"},
    {"type": "string", "minLength": 3, "maxLength": 9},
    {"type": "string", "maxLength": 0},
    {"type": "string", "minLength": 20, "maxLength": 24},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    {"type": "string", "pattern": "^(foo|bar)+$", "maxLength": 12},
    {"type": "string", "pattern": "ab{2,4}c", "maxLength": 8},
    {"type": "string", "pattern": "^\\S+\\s\\w*$", "maxLength": 16},
    {"type": "string", "pattern": "^[α-ω]{1,6}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "ipv6"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "hostname"},
    {"type": "string", "format": "duration"},
    {"type": "string", "enum": ["rot", "grün", "blau", "\u2028", 'a"b\\c', ""]},
    {"type": "integer"},
    {"type": "integer", "minimum": -3, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 99, "exclusiveMaximum": 1001},
    {"type": "integer", "minimum": 0},
    {"type": "integer", "maximum": -1000},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    {"type": "number"},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -2.5, "exclusiveMaximum": 2.5},
    {"type": "number", "minimum": 1000000},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["string", "null"], "maxLength": 5},
    {"type": ["integer", "boolean"]},
    {"const": "immer"},
    {"const": {"a": [1, None, True, "x"]}},
    {"const": 12.5},
    {"const": '🦊 <tag> \\ " /'},
    {"enum": [1, "1", None, [1], {"one": 1}]},
    {"enum": ["a", "ab", "abc", "abcd"]},
    {"anyOf": [{"type": "integer", "minimum": 10}, {"type": "string", "maxLength": 4}]},
    {"anyOf": [{"const": "x"}, {"type": "null"}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}]},
    {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    {"oneOf": [{"type": "string", "enum": ["p", "q"]}, {"type": "null"}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 6}]},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 5},
    {"type": "array", "maxItems": 0},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "b"}], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": {"enum": ["t", "u"]}, "minItems": 1, "maxItems": 4},
    {"type": "object", "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False},
    {"type": "object", "properties": {"größe": {"enum": [1, 2]}, "a b": {"type": "null"}}, "required": ["a b"]},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "null"}}, "additionalProperties": False},
    {"type": "object", "required": ["only"], "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 5}},
    {"type": "object", "properties": {"n": {"type": "integer"}}, "minProperties": 1, "additionalProperties": False},
    {"description": "annotations alone", "title": "t", "default": 1, "examples": [2], "type": "boolean"},
]

DOCUMENTS = [
    {},
    {"type": "object"},
    {"type": "array"},
    {
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}}},
        "type": "array",
        "items": {"$ref": "#/$defs/point"},
        "minItems": 1,
        "maxItems": 3,
    },
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    {
        "definitions": {"old": {"enum": ["draft", "seven"]}},
        "type": "object",
        "properties": {"a": {"$ref": "#/definitions/old"}, "b": {"$ref": "#/properties/a"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "kind": {"enum": ["circle", "square"]},
            "shape": {
                "anyOf": [
                    {"type": "object", "properties": {"r": {"type": "number"}}, "required": ["r"]},
                    {"type": "object", "properties": {"side": {"type": "number"}}, "required": ["side"]},
                ]
            },
        },
        "required": ["kind", "shape"],
        "additionalProperties": False,
    },
    {"allOf": [{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, {"required": ["b"]}]},
]

UNSUPPORTED = [
    (True, "object"),
    ({"not": {"type": "string"}}, "not"),
    ({"type": "integer", "multipleOf": 1000003}, "multipleOf: 1000003 is too large"),
    ({"type": "number", "multipleOf": 7e6}, "multipleOf: 7000000.0 is too large"),
    (
        {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]},
        "multipleOf: 991 is too large, or too much",
    ),
    ({"prefixItems": [{"multipleOf": 60000}, {"multipleOf": 60000}]}, "multipleOf: 60000 is too large, or too much"),
    ({"type": "array", "contains": {"const": 1}}, "contains"),
    ({"if": {"type": "string"}, "then": {"maxLength": 2}}, "then"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
    ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, "unevaluatedItems"),
    ({"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}}, "uniqueItems"),
    ({"$dynamicRef": "#node"}, "dynamicRef"),
    ({"$ref": "#/$defs/missing"}, "missing"),
    ({"$ref": "https://example.org/elsewhere"}, "example.org"),
    ({"type": "nothing"}, "nothing"),
    ({"type": "string", "pattern": "("}, "unclosed group"),
    ({"type": "string", "pattern": "(?=ahead)"}, "look-around"),
    ({"type": "string", "format": "no-such-format"}, "no-such-format"),
    ({"type": "integer", "minimum": 2, "maximum": 1}, "minimum (2)"),
    ({"minLength": "three", "type": "string"}, "minLength"),
    ({"enum": "abc"}, "enum"),
]
"""Schemas that no grammar is made of, and what the error names."""


def collection(seed=0, composed=320):
    """All documents, each leaf, and `composed` schemas that nest them."""
    rng = random.Random(seed)
    return [*DOCUMENTS, *LEAVES, *(_document(rng) for _ in range(composed))]


def _document(rng):
    parts = {}
    schema = _compose(rng, rng.randint(1, 3), parts)
    return schema | ({"$defs": parts} if parts else {})


def _compose(rng, depth, parts):
    """`parts` takes what is referred to: references count from the document's root."""
    if depth == 0:
        return rng.choice(LEAVES)
    match rng.randrange(6):
        case 0:
            low = rng.randint(0, 2)
            return {"type": "array", "items": _compose(rng, depth - 1, parts), "minItems": low, "maxItems": low + 2}
        case 1:
            items = [_compose(rng, depth - 1, parts) for _ in range(rng.randint(1, 3))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": rng.randint(0, len(items))}
        case 2:
            return {"anyOf": [_compose(rng, depth - 1, parts) for _ in range(rng.randint(2, 3))]}
        case 3:
            part = _compose(rng, depth - 1, parts)
            name = f"{rng.choice(['part', 'Teil', 'a~b/c'])}{len(parts)}"
            parts[name] = part
            path = name.replace("~", "~0").replace("/", "~1")
            fields = {"first": {"$ref": f"#/$defs/{path}"}, "second": {"$ref": f"#/$defs/{path}"}}
            return {"type": "object", "properties": fields, "required": ["first"], "additionalProperties": False}
        case _:
            return _object(rng, depth, parts)


def _object(rng, depth, parts):
    names = rng.sample(["id", "name", "ünï", "a b", 'q"uote', "x/y", "list", "Z" * 12], rng.randint(1, 4))
    properties = {name: _compose(rng, depth - 1, parts) for name in names}
    schema = {"type": "object", "properties": properties, "required": rng.sample(names, rng.randint(0, len(names)))}
    return schema | rng.choice([{"additionalProperties": False}, {"additionalProperties": False}, {}])
