"""Random JSON schemas: texts that follow them fit them, and there is always a way on."""

import json
import random

import jsonschema
import numpy as np
import pytest

from turbojax.models.text import grammar
from turbojax.models.text.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer([0])
NUMBERS = (0, 1, -1, 5, 2.5, -3.25, 100, 1e3)
VALUES = (1, "a", None, True, [1], {"a": 2}, "é", 1.5)
LEAVES = ("number", "text", "pattern", "null", "enum", "const")


def a_number(rng):
    schema = {"type": rng.choice(["integer", "number"])}
    if rng.random() < 0.5:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = rng.choice(NUMBERS)
    if rng.random() < 0.5:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = rng.choice(NUMBERS) + 10
    if rng.random() < 0.2:
        schema["multipleOf"] = rng.choice([2, 3, 0.5, 0.25])
    return schema


def an_array(rng, depth):
    schema = {"type": "array", "items": a_schema(rng, depth + 1), "maxItems": rng.randint(0, 4)}
    if rng.random() < 0.4:
        schema["minItems"] = rng.randint(0, 3)
    if rng.random() < 0.3:
        schema["prefixItems"] = [a_schema(rng, depth + 1) for _ in range(rng.randint(1, 2))]
    return schema


def an_object(rng, depth):
    properties = {name: a_schema(rng, depth + 1) for name in "abc"[: rng.randint(0, 3)]}
    schema = {"type": "object", "properties": properties}
    schema["additionalProperties"] = rng.choice([False, {"type": "boolean"}])
    schema["required"] = [name for name in properties if rng.random() < 0.5]
    if rng.random() < 0.2:
        schema["maxProperties"] = rng.randint(0, 3)
    return schema


def a_schema(rng, depth=0):
    inner = () if depth == 3 else ("array", "object", "anyOf", "oneOf", "allOf")
    match rng.choice((*LEAVES, *inner)):
        case "number":
            return a_number(rng)
        case "text":
            return {
                "type": "string",
                "minLength": rng.randint(0, 3),
                "maxLength": rng.randint(2, 6),
            }
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-c]+$", r"^\d{2}$", "^(x|yz)$"])}
        case "null":
            return {"type": ["null", "boolean"]}
        case "enum":
            return {"enum": [rng.choice(VALUES) for _ in range(rng.randint(1, 3))]}
        case "const":
            return {"const": rng.choice(VALUES)}
        case "array":
            return an_array(rng, depth)
        case "object":
            return an_object(rng, depth)
        case joined:
            return {joined: [a_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def walk(rng, text):
    """Random allowed bytes up to the end, those that close something more often."""
    written = b""
    for step in range(300):
        bits = np.unpackbits(text.allowed().view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        # Somebody who follows the masks never stands before nothing.
        assert allowed, (written, text.error)
        assert (0 in allowed) == text.is_complete
        others = [byte for byte in allowed if byte]
        if text.is_complete and (not others or rng.random() < 0.5):
            return written
        closing = [byte for byte in others if byte in b'"}]']
        often = closing and rng.random() < 0.4 + step / 200
        byte = rng.choice(closing if often else others)
        text.accept(byte)
        written += bytes([byte])
    return None


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 150), pytest.param(1, 10_000, marks=pytest.mark.fuzz)]
)
def test_random_schemas(seed, count):
    rng = random.Random(seed)
    refused = ended = 0
    for _ in range(count):
        schema = a_schema(rng)
        try:
            made = grammar.json_schema(TOKENIZER, schema, whitespace=rng.randint(0, 1))
        except ValueError:  # such as a contradiction
            refused += 1
            continue
        for _ in range(3):
            written = walk(rng, made.begin())
            if written is not None:
                jsonschema.validate(json.loads(written.decode()), schema)
                ended += 1
    assert refused < count / 4
    assert ended > 1.5 * count
