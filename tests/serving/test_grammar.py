"""Results that follow a schema, an expression or a grammar.

What a mask allows is compared with all texts of languages that are small enough to list, and
random walks through masks with `json` and `jsonschema`, which share no code with it.
"""

import gc
import json
import math
import random
import re
import sys
import threading
import weakref

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.models.tokenizer_helpers import KINDS, folder, save
from turbojax.models import Request
from turbojax.models.text import grammar
from turbojax.models.text.tokenizer import ByteTokenizer, JsonTokenizer, NumberTokenizer

WORDS = ("dog", "dogé", "the dog", "</s>", "a<|im_end|>b", "<tool>", "😀x", "a b", "\\n", "d\x00")


def with_tool(kind, path):
    """One of the two kinds, with an added token that is text."""
    made = KINDS[kind]()
    made.add_tokens([AddedToken("<tool>", special=False)])
    return JsonTokenizer(save(made, path, {"tokenizer_config.json": {"eos_token": "</s>"}}))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {
        "bytes": ByteTokenizer([0]),
        "bytes without end": ByteTokenizer(),
        **{kind: with_tool(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS},
    }


KIND = pytest.mark.parametrize("kind", ["bytes", "bytes without end", *KINDS])


def tokens_of(mask):
    assert mask.dtype == np.uint32
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def texts_of(tokenizer):
    """Of each token its bytes, found by decoding it in the middle of a text; None of special ones.

    What decodes to half a character says nothing: bytes of byte-level tokens follow from the
    characters that they are halves of, so these are left out of the oracle where they are needed.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return [None if i in tokenizer.eos_token_ids else bytes([i]) for i in range(256)]
    frame = tokenizer.encode("x", add_special_tokens=False)
    before, found = tokenizer.decode(frame), []
    names = {i: name for name, i in tokenizer._tokenizer.get_vocab().items()}
    for token in range(tokenizer.vocab_size):
        text = tokenizer.decode([*frame, token]).removeprefix(before)
        if "\N{REPLACEMENT CHARACTER}" in text:
            found.append(half(names[token]))
        else:
            found.append(text.encode() or None)
    return found


def half(name):
    """Bytes of a token that is no whole character, from its name."""
    if re.fullmatch("<0x[0-9A-F]{2}>", name):
        return bytes.fromhex(name[3:5])
    from tokenizers.pre_tokenizers import ByteLevel

    # The characters stand for bytes in the order of Unicode's first ones that print, then others.
    alphabet = sorted(ByteLevel.alphabet())
    plain = [x for x in alphabet if ord(x) < 256]
    others = [byte for byte in range(256) if chr(byte) not in plain]
    byte_of = {x: ord(x) for x in plain} | dict(
        zip((x for x in alphabet if ord(x) >= 256), others, strict=True)
    )
    return bytes(byte_of[x] for x in name)


def walk(tokenizer, text, rng, texts, *, most=400):
    """Random allowed tokens up to the end, those that end something more often; their bytes."""
    result, all_ends = b"", set(tokenizer.eos_token_ids)
    for step in range(most):
        allowed = tokens_of(text.allowed())
        # Somebody who follows the masks never stands before nothing.
        assert allowed or text.is_complete, (result, text.error)
        assert bool(allowed & all_ends) == (text.is_complete and bool(all_ends))
        others = sorted(allowed - all_ends)
        if text.is_complete and (not others or rng.random() < 0.5 or step > most // 2):
            return result
        closing = [x for x in others if texts[x] and set(texts[x]) <= set(b'"}],e0')]
        often = closing and rng.random() < min(0.3 + step / 100, 0.9)
        token = rng.choice(closing if often else others)
        text.accept(token)
        result += texts[token]
    return None


@pytest.mark.quick(1, slow=0)
@KIND
def test_masks_of_small_languages(kind, tokenizers):
    tokenizer = tokenizers[kind]
    texts, ends = texts_of(tokenizer), set(tokenizer.eos_token_ids)
    words = [word for word in WORDS if not (kind == "bytes" and "\x00" in word)]
    quoted = [json.dumps(word, ensure_ascii=False) for word in words]
    cases = {
        "enum": (grammar.json_schema(tokenizer, {"enum": words}), quoted),
        "regex": (grammar.regex(tokenizer, "|".join(map(re.escape, words))), words),
        "lark": (grammar.lark(tokenizer, "start: " + "|".join(map(json.dumps, words))), words),
    }
    for name, (made, language) in cases.items():
        language = {word.encode() for word in language}
        rng = random.Random(f"{kind} {name}")
        seen = set()
        for _ in range(40):
            text, written = made.begin(), b""
            while True:
                expected = {
                    token
                    for token, piece in enumerate(texts)
                    if piece and any(word.startswith(written + piece) for word in language)
                }
                complete = written in language
                assert text.is_complete == complete, (name, written)
                expected |= ends if complete else set()
                assert tokens_of(text.allowed()) == expected, (name, written)
                token = rng.choice(sorted(expected)) if expected else None
                if token is None or token in ends:
                    break
                text.accept(token)
                written += texts[token]
            seen.add(written)
        assert len(seen) > len(language) / 2


SCHEMAS = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "ß", None]}, "maxItems": 4},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
                "required": ["children"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "union": {"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^[a-zé]{2,4}$"}]},
    "date": {"type": "string", "format": "date"},
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    "anything": True,
}


@pytest.mark.quick(3, slow=0)
@KIND
def test_random_walks_are_json_of_the_schema(kind, tokenizers):
    tokenizer = tokenizers[kind]
    texts = texts_of(tokenizer)
    for name, schema in SCHEMAS.items():
        made = grammar.json_schema(tokenizer, schema)
        ended = 0
        for seed in range(15):
            written = walk(tokenizer, made.begin(), random.Random(seed), texts)
            if written is not None:
                # Within strings, too, all is UTF-8.
                jsonschema.validate(json.loads(written.decode("utf-8")), schema)
                ended += 1
        assert ended > 4, name


def test_objects_and_their_spaces(tokenizers):
    tokenizer = tokenizers["bytes"]

    def accepts(made, text):
        begun = made.begin()
        for byte in text.encode():
            if byte not in tokens_of(begun.allowed()):
                return False
            begun.accept(byte)
        return begun.is_complete

    made = grammar.json_object(tokenizer)
    assert accepts(made, '{"a": [1, {"é\\n": null}], "b": {}}')
    assert accepts(made, '{\n    "a": 1\n}')
    assert not accepts(made, "[1]")
    assert not accepts(made, ' {"a": 1}')
    assert not accepts(made, '{"a": 1}\n')
    assert not accepts(made, '{"a": 1')
    assert not accepts(made, '{"a": NaN}')
    spaces = grammar.SPACES
    assert accepts(made, '{"a":' + " " * spaces + "1}")
    assert not accepts(made, '{"a":' + " " * (spaces + 1) + "1}")
    few = grammar.json_object(tokenizer, whitespace=2)
    assert accepts(few, '{"a":  1}')
    assert not accepts(few, '{"a":   1}')
    none = grammar.json_object(tokenizer, whitespace=0)
    assert accepts(none, '{"a":[1,2]}')
    assert not accepts(none, '{"a": 1}')


def test_properties_stay_in_order(tokenizers):
    made = grammar.json_schema(tokenizers["bytes"], SCHEMAS["person"]).begin()
    for byte in b'{"':
        made.accept(byte)
    assert tokens_of(made.allowed()) == {ord("n")}


def test_half_a_character_goes_on_with_its_other_half(tokenizers):
    text = grammar.json_schema(tokenizers["bytes"], {"type": "string"}).begin()
    for byte in b'"\xf0':
        text.accept(byte)
    assert tokens_of(text.allowed()) == set(range(0x90, 0xC0))
    for byte in b"\x9f\x98":
        text.accept(byte)
    assert tokens_of(text.allowed()) == set(range(0x80, 0xC0))
    assert not text.is_complete


def test_ends_of_texts(tokenizers):
    tokenizer, bare = tokenizers["bytes"], tokenizers["bytes without end"]
    text = grammar.regex(tokenizer, "ab?").begin()
    assert tokens_of(text.allowed()) == {ord("a")}
    text.accept(ord("a"))
    assert tokens_of(text.allowed()) == {0, ord("b")}
    text.accept(0)
    assert text.is_complete
    assert tokens_of(text.allowed()) == {0}
    text = grammar.regex(bare, "a").begin()
    text.accept(ord("a"))
    assert (tokens_of(text.allowed()), text.is_complete, text.error) == (set(), True, "")
    # Byte 0 ends a text there, and is a character here.
    assert 0 not in tokens_of(grammar.regex(tokenizer, "[^x]").begin().allowed())
    assert 0 in tokens_of(grammar.regex(bare, "[^x]").begin().allowed())
    several = ByteTokenizer([0, 3])
    assert tokens_of(grammar.regex(several, "a?").begin().allowed()) == {0, 3, ord("a")}


def test_a_token_that_is_not_allowed(tokenizers):
    for token in (ord("b"), 0, 256, 10**6):
        text = grammar.regex(tokenizers["bytes"], "a").begin()
        text.accept(token)
        assert text.error
        assert "\n" not in text.error
        assert not text.is_complete
        assert not tokens_of(text.allowed())


def test_limits_within_a_text_are_an_error(tokenizers):
    text = grammar.regex(tokenizers["bytes"], "a{1000000}").begin()
    while not text.error:
        text.accept(ord("a"))
    assert "too many" in text.error
    assert not tokens_of(text.allowed())


def test_texts_share_the_grammar_and_nothing_else(tokenizers):
    made = grammar.regex(tokenizers["bytes"], "ab")
    first, second = made.begin(), made.begin()
    first.accept(ord("a"))
    assert tokens_of(second.allowed()) == {ord("a")}
    assert tokens_of(first.allowed()) == {ord("b")}
    assert grammar.regex(tokenizers["bytes"], "ab") is made
    assert grammar.regex(tokenizers["bytes without end"], "ab") is not made
    assert Request([1], constraint=made).constraint is made


def test_grammars_of_several_threads(tokenizers):
    tokenizer, wrong = tokenizers["byte_level"], []
    texts = texts_of(tokenizer)

    def run(seed):
        try:
            made = grammar.json_schema(tokenizer, SCHEMAS["person"])
            for i in range(5):
                written = walk(tokenizer, made.begin(), random.Random(seed * 100 + i), texts)
                assert written is None or json.loads(written)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_tokenizer_is_not_kept():
    tokenizer = ByteTokenizer([0])
    grammar.regex(tokenizer, "a")
    gone = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is None


def test_special_tokens_in_a_grammar(tokenizers):
    tokenizer = tokenizers["byte_level"]
    text = grammar.lark(tokenizer, 'start: <|im_start|> "a"').begin()
    assert tokens_of(text.allowed()) == {tokenizer.special_token("<|im_start|>")}
    with pytest.raises(ValueError, match=r"the grammar cannot be used: at 1\(8\): unknown special"):
        grammar.lark(tokenizer, "start: <|nothing|>")


def test_numbers_that_no_token_has(tmp_path):
    # Nor does a padded table's end, or an end token beyond the vocabulary, matter.
    made = json.loads(KINDS["byte_level"]().to_str())
    vocab = made["model"]["vocab"]
    last = max(vocab, key=vocab.get)
    vocab[last] += 50
    config = {"generation_config.json": {"eos_token_id": [1, 1000]}}
    tokenizer = JsonTokenizer(save(Tokenizer.from_str(json.dumps(made)), tmp_path, config))
    assert tokenizer.vocab_size == vocab[last] + 1
    text = grammar.regex(tokenizer, "(?s:.)*").begin()
    mask = text.allowed()
    assert mask.shape == (math.ceil(tokenizer.vocab_size / 32),)
    allowed = tokens_of(mask)
    assert {1, vocab[last]} < allowed
    assert not allowed & set(range(vocab[last] - 49, vocab[last]))
    text.accept(vocab[last])
    assert text.is_complete


SCHEMA_ERRORS = {
    "type": ({"type": "strng"}, "Invalid type: strng"),
    "kind": ({"properties": 3}, "properties must be an object"),
    "not": ({"not": {}}, r'Unimplemented keys: \["not"\]'),
    "format": ({"type": "string", "format": "iban"}, "Unknown format: iban"),
    "pattern": ({"type": "string", "pattern": "("}, "unclosed group"),
    "reference": ({"$ref": "#/$defs/x"}, r"Pointer '/\$defs/x' does not exist"),
    "elsewhere": ({"$ref": "http://x.test/y"}, "is not present in a registry"),
    "empty": ({"enum": []}, "Unsatisfiable schema: anyOf is empty"),
    "contradiction": ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems .3. is greater"),
    "loop": ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "cannot be used"),
    "large": (
        {"properties": {str(i): True for i in range(20000)}},
        r"JSON schema of .* bytes must have at most 65,536",
    ),
    "nan": ({"const": math.nan}, "is no JSON: Out of range float"),
    "objects": ({"const": object()}, "is no JSON: Object of type object"),
    "false": (False, "schema=False fits no JSON"),
    "options": ({"x-guidance": {"lenient": True}}, "'x-guidance' in a schema must not be"),
}


@pytest.mark.parametrize("case", SCHEMA_ERRORS)
def test_errors_of_a_schema_say_what_is_wrong(case, tokenizers):
    schema, message = SCHEMA_ERRORS[case]
    with pytest.raises(ValueError, match=message) as caught:
        grammar.json_schema(tokenizers["bytes"], schema)
    assert "\n" not in str(caught.value)


def test_schemas_that_are_too_deep(tokenizers):
    schema = {}
    for depth in range(100_000):
        schema = {"items": schema}
        if depth in (499, 99_999):
            with pytest.raises(ValueError, match="recursion|nested"):
                grammar.json_schema(tokenizers["bytes"], schema)
    while schema:  # python's own clean-up of nested objects is not what is tested
        schema = schema.pop("items")


def test_rules_that_lead_to_rules(tokenizers):
    """Thousands of them, which need more than a thread's usual stack."""
    rules = [f"a{i}: a{i + 1}" for i in range(4500)]
    made = grammar.lark(tokenizers["bytes"], "\n".join(["start: a0", *rules, 'a4500: "x"']))
    text = made.begin()
    assert tokens_of(text.allowed()) == {ord("x")}
    text.accept(ord("x"))
    assert text.is_complete
    # Other threads have the stack that they had.
    assert threading.stack_size() == 0


def test_errors_of_expressions_and_grammars(tokenizers):
    tokenizer = tokenizers["bytes"]
    for pattern, message in {
        "(": "unclosed group",
        "(?=a)b": "look-around",
        "a\\": "must not end with a single",
        "\ud800": "pattern is not Unicode",
    }.items():
        with pytest.raises(ValueError, match=message):
            grammar.regex(tokenizer, pattern)
    for text, message in {
        "": "no start rule|Empty grammar",
        "start: x": r'at 1\(8\): unknown name: "x"',
        'start: "a"\nother: }': r"3?\(?8?",
        "start: start": "grammar cannot be used",
        "\udc80": "text is not Unicode",
    }.items():
        with pytest.raises(ValueError, match=message):
            grammar.lark(tokenizer, text)
    for call in (grammar.regex, grammar.lark):
        with pytest.raises(TypeError, match="must be text"):
            call(tokenizer, 3)
    with pytest.raises(TypeError, match="schema='x' must be a mapping"):
        grammar.json_schema(tokenizer, "x")
    for whitespace in (-1, 65):
        with pytest.raises(ValueError, match=f"whitespace={whitespace} must be within"):
            grammar.json_object(tokenizer, whitespace=whitespace)
    with pytest.raises(TypeError, match="whitespace"):
        grammar.json_object(tokenizer, whitespace=1.5)


def test_patterns_that_could_end_the_expression(tokenizers):
    cases = {"a/b": "a/b", "[/]": "/", "x y # z": "x y # z", 'a"b': 'a"b', "a\nb": "a\nb"}
    cases |= {"(?i:a)": "A", "": "", "\\\\": "\\", "^a$": "a", "//": "//", "é{2}": "éé"}
    for pattern, matching in cases.items():
        text = grammar.regex(tokenizers["bytes"], pattern).begin()
        for byte in matching.encode():
            assert not text.is_complete
            assert byte in tokens_of(text.allowed()), pattern
            text.accept(byte)
        assert text.is_complete, pattern
        assert tokens_of(text.allowed()) == {0}


def test_tokenizers_whose_tokens_have_no_bytes(tmp_path):
    with pytest.raises(NotImplementedError, match="results of a NumberTokenizer cannot follow"):
        grammar.json_object(NumberTokenizer(300))
    wordpiece = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    bare = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    for name, made in {"WordPiece": wordpiece, "none": bare}.items():
        tokenizer = JsonTokenizer(save(made, tmp_path / name))
        with pytest.raises(NotImplementedError, match=rf"decoder \({name}\) must be byte-level"):
            grammar.json_object(tokenizer)


def test_decoders_of_sentencepiece(tmp_path):
    made = KINDS["byte_fallback"]()
    expected = JsonTokenizer(folder("byte_fallback", tmp_path / "plain")).token_bytes.texts
    replace, fallback = decoders.Replace("\u2581", " "), decoders.ByteFallback()
    good = {
        "gemma": [replace, fallback, decoders.Fuse()],
        "metaspace": [decoders.Metaspace(), fallback, decoders.Fuse(), decoders.Strip(" ", 1, 0)],
    }
    bad = {
        "strip each": [replace, fallback, decoders.Strip(" ", 1, 0)],
        "strip the end": [replace, fallback, decoders.Fuse(), decoders.Strip(" ", 1, 1)],
        "no spaces": [fallback, decoders.Fuse()],
        "other": [decoders.Replace("\u2581", "_"), fallback],
        "more": [replace, decoders.BPEDecoder()],
    }
    for name, steps in (good | bad).items():
        made.decoder = decoders.Sequence(steps)
        tokenizer = JsonTokenizer(save(made, tmp_path / name))
        if name in good:
            assert tokenizer.token_bytes.texts == expected
        else:
            with pytest.raises(NotImplementedError, match="must be byte-level or that of Sent"):
                _ = tokenizer.token_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_tokens(kind, tmp_path):
    tokenizer = JsonTokenizer(folder(kind, tmp_path))
    found = tokenizer.token_bytes
    assert [text or None for text in found.texts] == texts_of(tokenizer)
    assert {tokenizer.special_token(text) for text in found.special.values()} == set(found.special)
    # A byte-level token may hold another character, which then is itself.
    rare = KINDS["byte_level"]()
    rare.add_tokens([AddedToken("你 好", special=False), AddedToken("<0xZZ>", special=False)])
    rare = JsonTokenizer(save(rare, tmp_path / "rare")).token_bytes.texts
    assert rare[-2:] == ["你 好".encode(), b"<0xZZ>"]


def test_without_the_package(tokenizers, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match="a grammar needs the package llguidance: pip install"):
        grammar.json_object(ByteTokenizer())


# Random schemas -----------------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 150), pytest.param(1, 10_000, marks=pytest.mark.fuzz)]
)
def test_random_schemas(seed, count, tokenizers):
    rng, tokenizer = random.Random(seed), tokenizers["bytes"]
    texts = texts_of(tokenizer)
    refused = ended = 0
    for _ in range(count):
        schema = a_schema(rng)
        try:
            made = grammar.json_schema(tokenizer, schema, whitespace=rng.randint(0, 1))
        except ValueError:  # such as a contradiction
            refused += 1
            continue
        for _ in range(3):
            written = walk(tokenizer, made.begin(), rng, texts)
            if written is not None:
                jsonschema.validate(json.loads(written.decode()), schema)
                ended += 1
    assert refused < count / 4
    assert ended > 1.5 * count
