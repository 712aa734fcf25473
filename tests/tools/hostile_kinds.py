"""What `hostile_worker` opens: good folders, hostile cases of them, and how they are used."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

import turbojax as tj
from tests.tools import hostile_cases
from tests.tools.hostile_cases import Case
from turbojax import models
from turbojax.app.serve import requests as serve_requests
from turbojax.app.serve import results as serve_results
from turbojax.finetune import checkpoint, comparison
from turbojax.finetune.log import Log

Use = Callable[[Path], object]
Kind = tuple[Path, list[Case], Use]
_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def some(cases: Iterable[Case], count: int, rng: np.random.Generator) -> list[Case]:
    """So many of the cases; all for 0."""
    every = list(cases)
    if not 0 < count < len(every):
        return every
    return [every[i] for i in sorted(rng.choice(len(every), count, replace=False))]


def configs(folder: Path, count: int, seed: int) -> Kind:
    """`config.json` of every family, by turns."""
    from tests.models import hf_helpers

    rng = np.random.default_rng(seed)
    names = ("llama3.1", "qwen3-window", "phi3-longrope", "gemma2", "mistral", "qwen2.5-yarn")
    names += ("gemma3",)
    cases: list[Case] = []
    for name in names:
        hf_helpers.write(name, folder / name)
        text = (folder / name / "config.json").read_text()
        cases += [
            _within(name, case)
            for case in (
                *hostile_cases.values("config.json", text),
                *hostile_cases.texts("config.json", text),
            )
        ]

    def use(path: Path) -> None:
        if path == folder:
            for name in names:
                models.load_decoder(path / name)
        else:
            models.load_decoder(path / (path / "which").read_text())

    return folder, some(cases, count, rng), use


def _within(name: str, case: Case) -> Case:
    def apply(path: Path) -> None:
        (path / "which").write_text(name)
        case.apply(path / name)

    return Case(f"{name}/{case.name}", case.file, (*case.words, f"folder/{name}"), apply)


def quantized(folder: Path, count: int, seed: int) -> Kind:
    """`config.json` of a quantized checkpoint."""
    config = models.TransformerConfig(64, 32, 48, 2, 2, 1, 16, 64)
    models.save_quantized(models.random_quantized_decoder(config), folder)
    text = (folder / "config.json").read_text()
    block = json.dumps({"quantization_config": json.loads(text)["quantization_config"]})
    others = {k: v for k, v in json.loads(text).items() if k != "quantization_config"}
    cases = []
    for case in hostile_cases.values("config.json", block):
        cases.append(_joined(case, others))
    cases += hostile_cases.values("config.json", text)
    # Where sizes and tensors disagree, an error may name the tensors' file instead.
    either = [dataclasses.replace(case, words=(*case.words, "/folder/")) for case in cases]
    return folder, some(either, count, np.random.default_rng(seed)), models.load


def _joined(case: Case, others: dict[str, Any]) -> Case:
    def apply(folder: Path) -> None:
        case.apply(folder)
        path = folder / "config.json"
        path.write_text(json.dumps(others)[:-1] + ", " + path.read_text().lstrip("{ "))

    return Case(f"block {case.name}", case.file, case.words, apply)


def tokenizers(folder: Path, count: int, seed: int) -> Kind:
    """Every file that a tokenizer reads."""
    from tests.models import tokenizer_helpers

    files = {
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "special": True},
            "extra_special_tokens": {"image_token": "<i>"},
            "chat_template": [{"name": "default", "template": _TEMPLATE}],
        },
        "special_tokens_map.json": {"pad_token": "</s>"},
        "generation_config.json": {"eos_token_id": [1, 2]},
        "config.json": {"vocab_size": 320},
    }
    with_added = {"added_tokens_decoder": {"2": {"content": "<|im_start|>", "special": True}}}
    tokenizer_helpers.save(tokenizer_helpers.byte_level(), folder, files)
    texts = {path.name: path.read_text() for path in folder.glob("*.json")}
    texts["tokenizer_config.json"] = json.dumps({**files["tokenizer_config.json"], **with_added})
    cases: list[Case] = []
    for name, text in texts.items():
        cases += hostile_cases.values(name, text)
        cases += hostile_cases.texts(name, text)

    def use(path: Path) -> None:
        tokenizer = models.load_tokenizer(path)
        tokens = tokenizer.encode("The quick brown fox <s> 😀")
        tokenizer.decode(tokens)
        stream = tokenizer.stream(tokens[:2])
        for token in (*tokens[2:8], None):
            stream(token)
        tokenizer.special_token("<s>")
        if tokenizer.chat_template is not None:
            models.render_chat(tokenizer, [{"role": "user", "content": "a"}])

    return folder, some(cases, count, np.random.default_rng(seed)), use


def checkpoints(folder: Path, count: int, seed: int) -> Kind:
    """Damaged files of checkpoints, in one file and in several, floating point and quantized."""
    rng = np.random.default_rng(seed)
    config = models.TransformerConfig(64, 32, 48, 2, 2, 1, 16, 64)
    model = models.Transformer(config, rngs=nnx.Rngs(0))
    quantized = models.random_quantized_decoder(config)
    models.save(model, folder / "float-one")
    models.save(model, folder / "float-many", max_shard_bytes=20_000)
    models.save_quantized(quantized, folder / "int4-one")
    models.save_quantized(quantized, folder / "int4-many", max_shard_bytes=20_000)
    shapes = {path.name: _shapes(models.load_decoder(path)) for path in folder.iterdir()}

    def use(path: Path) -> None:
        which = (path / "which").read_text() if path != folder else "float-one"
        # There is no checksum: other numbers are loaded as what they are.
        if _shapes(models.load_decoder(path / which)) != shapes[which]:
            raise AssertionError("another model came out")

    return folder, _damaged(folder, count, rng), use


def _damaged(folder: Path, count: int, rng: np.random.Generator) -> list[Case]:
    """So many damages, shared out over the files of a folder's folders; half of them in headers."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    cases: list[Case] = []
    for path in files:
        data, each = path.read_bytes(), -(-count // len(files))
        header = int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else len(data)
        within = path.parent.relative_to(folder).as_posix()
        for most in (min(8 + header, len(data)), len(data)):
            damages = hostile_cases.damaged(path.name, data, -(-each // 2), rng, most)
            cases += [_within(within, case) for case in damages]
    return cases


def _shapes(tree: Any) -> list[Any]:
    return [(jax.tree_util.keystr(path), x.shape) for path, x in jax.tree.leaves_with_path(tree)]


def caches(folder: Path, count: int, seed: int) -> Kind:
    """Damaged files of caches of every kind."""
    from tests.contracts import storage_helpers

    for name, kind in storage_helpers.KINDS.items():
        (folder / name).mkdir(parents=True)
        cache = storage_helpers.filled(kind)
        models.save_cache(folder / name / "cache.safetensors", cache, metadata={"name": name})

    def use(path: Path) -> None:
        names = list(storage_helpers.KINDS) if path == folder else [(path / "which").read_text()]
        for name in names:
            models.load_cache(path / name / "cache.safetensors")

    return folder, _damaged(folder, count, np.random.default_rng(seed)), use


def sessions(folder: Path, count: int, seed: int) -> Kind:
    """Damaged files of sessions, over caches of several kinds."""
    from tests.contracts import storage_helpers

    config = models.TransformerConfig(64, 32, 48, 2, 4, 2, 16, 256)
    decoder = models.random_decoder(config, dtype=jnp.float32, seed=0)
    for name, kind in storage_helpers.SOME.items():
        (folder / name).mkdir(parents=True)
        prompt = jnp.asarray(np.random.default_rng(3).integers(0, 64, (2, 40)))
        session = models.start(decoder, prompt, max_length=80, cache=kind)
        models.save_session(folder / name / "session.safetensors", session)

    def use(path: Path) -> None:
        names = list(storage_helpers.SOME) if path == folder else [(path / "which").read_text()]
        for name in names:
            models.load_session(path / name / "session.safetensors", decoder)

    return folder, _damaged(folder, count, np.random.default_rng(seed)), use


def descriptions(folder: Path, count: int, seed: int) -> Kind:
    """What cache and session files say of themselves, with the right fingerprint, is hostile."""
    from tests.contracts import storage_helpers

    config = models.TransformerConfig(64, 32, 48, 1, 4, 2, 16, 256)
    decoder = models.random_decoder(config, dtype=jnp.float32, seed=0)
    folder.mkdir(parents=True)
    prompt = jnp.asarray(np.random.default_rng(3).integers(0, 64, (2, 20)))
    session = models.start(decoder, prompt, max_length=40, cache="turbo4")
    models.save_session(folder / "session.safetensors", session)
    for name, kind in storage_helpers.SOME.items():
        models.save_cache(folder / f"{name}.safetensors", storage_helpers.filled(kind))
    cases: list[Case] = []
    for path in sorted(folder.iterdir()):
        with safe_open(path, framework="np") as file:
            text = file.metadata()["content"]
        changed = (*hostile_cases.values(path.name, text), *hostile_cases.texts(path.name, text))
        cases += [_inside(path.name, case) for case in changed]

    def use(path: Path) -> None:
        names = (
            [x.name for x in folder.iterdir()] if path == folder else [(path / "which").read_text()]
        )
        for name in names:
            if name.startswith("session"):
                models.load_session(path / name, decoder)
            else:
                models.load_cache(path / name)

    return folder, some(cases, count, np.random.default_rng(seed)), use


def _inside(name: str, case: Case) -> Case:
    """The case's text becomes that of a stored file's metadata."""

    def apply(path: Path) -> None:
        (path / "which").write_text(name)
        with safe_open(path / name, framework="np") as file:
            metadata = file.metadata()
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        case.apply(path)
        if not (path / name).is_file() or (path / name).stat().st_size > 2**30:
            return
        metadata["content"] = (path / name).read_bytes().decode("utf-8", "replace")
        digest = hashlib.sha256(metadata["content"].encode())
        save_file(arrays, path / name, metadata={**metadata, "fingerprint": digest.hexdigest()})

    return Case(f"description of {case.name}", case.file, (name,), apply)


def weights(folder: Path, count: int, seed: int) -> Kind:
    """Damaged files of INT4 weights."""
    (folder / "weights").mkdir(parents=True)
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(64, 128)), jnp.float32)
    made = {kind: tj.fireq.quantize_weight(weight, scale_dtype=kind) for kind in ("e4m3", "bf16")}
    tj.fireq.save_weights(made, folder / "weights" / "weights.safetensors")

    def use(path: Path) -> None:
        tj.fireq.load_weights(path / "weights" / "weights.safetensors")

    return folder, _damaged(folder, count, np.random.default_rng(seed)), use


def logs(folder: Path, count: int, seed: int) -> Kind:
    """Damaged and hostile logs of training."""
    (folder / "run").mkdir(parents=True)
    losses = [3.0 - 0.01 * i for i in range(20)]
    record = {"step": 10, "seconds": 1.5, "loss": 2.9, "seconds_per_step": 0.1}
    evaluation = {"step": 20, "loss": 2.5}
    log = {"losses": losses, "records": [record], "evaluations": [evaluation]}
    text = json.dumps({"identity": {"settings": {"steps": 20}}, "attention": "dense", **log})
    (folder / "run" / "log.json").write_text(text)
    cases = [
        _within("run", case)
        for case in (
            *hostile_cases.values("log.json", text),
            *hostile_cases.texts("log.json", text),
        )
    ]
    rng = np.random.default_rng(seed)

    def use(path: Path) -> None:
        comparison.read_log(path / "run")
        opened = Log(path / "run" / "log.json", {"identity": {"settings": {"steps": 20}}})
        _ = opened.seconds
        opened.rewind(10)

    return folder, some(cases, count // 2, rng) + _damaged(folder, count // 2, rng), use


def training(folder: Path, count: int, seed: int) -> Kind:
    """Damaged checkpoints of training: what comes out of one is what went in."""
    logging.disable(logging.WARNING)  # from Orbax's threads
    rng = np.random.default_rng(seed)
    tree = {
        "weight": jnp.asarray(rng.normal(size=(32, 48)), jnp.float32),
        "scale": jnp.asarray(rng.normal(size=48), jnp.bfloat16),
        "count": jnp.int32(7),
    }
    wanted = [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]
    with _orbax(folder / "checkpoints") as manager:
        checkpoint.save_tree(manager, 20, tree)

    def use(path: Path) -> None:
        with _orbax(path / "checkpoints") as manager:
            found = checkpoint.restore_tree(manager, tree)
        if found is not None:
            assert [np.asarray(x).tobytes() for x in jax.tree.leaves(found[1])] == wanted

    cases = [
        dataclasses.replace(case, words=("checkpoints/20",))
        for case in _damaged(folder, count, rng)
    ]
    return folder, cases, use


@contextlib.contextmanager
def _orbax(folder: Path) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Orbax's own
        with checkpoint.checkpoint_manager(folder) as manager:
            yield manager


def results(folder: Path, count: int, seed: int) -> Kind:
    """Damaged and hostile results of `turbojax serve`, with which a run goes on."""
    folder.mkdir(parents=True)
    one = {"id": 1, "request": "0123456789abcdef", "text": "a", "tokens": 1}
    text = json.dumps({**one, "finish_reason": "length", "first_token_seconds": 0.5})
    file = "results.jsonl"
    (folder / file).write_text(text + "\n")

    def use(path: Path) -> None:
        out = path / file
        with serve_results.open_results(out, resume=True, overwrite=False) as opened:
            assert all(isinstance(x, str | int) for x in opened.held)

    every = (*hostile_cases.values(file, text), *hostile_cases.texts(file, text))
    return folder, _lines(every, folder, count, seed), use


def requests(folder: Path, count: int, seed: int) -> Kind:
    """Damaged and hostile requests of `turbojax serve`: bad lines, each with its reason."""
    folder.mkdir(parents=True)
    sampling = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 2}
    one = {"id": "a", "prompt": "def f():", "max_new_tokens": 5, "stop": ["end", 3]}
    text = json.dumps({**one, **sampling})
    file = "requests.jsonl"
    (folder / file).write_text(text + "\n")
    tokenizer, config = (
        models.ByteTokenizer(),
        models.TransformerConfig(256, 32, 48, 1, 4, 2, 16, 64),
    )

    def use(path: Path) -> None:
        content = (path / file).read_bytes()
        read = serve_requests.read_requests(content, tokenizer, 8)
        fit = serve_requests.fitting(read, config, num_pages=None, page_size=16, step_tokens=64)
        assert len(fit.requests) + len(fit.bad) == len(read.requests) + len(read.bad)
        for found in fit.requests:
            serve_requests.digest(found, "model")
        if fit.bad:
            raise ValueError(str(fit.bad[0]))

    every = (*hostile_cases.values(file, text), *hostile_cases.contents(file, text))
    return folder, _lines(every, folder, count, seed), use


def _lines(made: Iterable[Case], folder: Path, count: int, seed: int) -> list[Case]:
    """Some of these cases of a file in JSON lines, and as many damages; errors name a line."""
    rng = np.random.default_rng(seed)
    cases = some(made, count // 2, rng) + _damaged(folder, count // 2, rng)
    return [dataclasses.replace(case, words=(case.file, "line ")) for case in cases]


KINDS: dict[str, Callable[[Path, int, int], Kind]] = {
    "configs": configs,
    "quantized": quantized,
    "tokenizers": tokenizers,
    "checkpoints": checkpoints,
    "caches": caches,
    "sessions": sessions,
    "descriptions": descriptions,
    "weights": weights,
    "logs": logs,
    "training": training,
    "results": results,
    "requests": requests,
}
