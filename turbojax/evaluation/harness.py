"""Tasks of lm-eval, the Language Model Evaluation Harness, answered through a cache.

lm-eval is imported when it is needed.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from turbojax import _checks, _extras
from turbojax.evaluation.decoding import AnyDecoder
from turbojax.evaluation.methods import Method, method
from turbojax.evaluation.records import Records, describe_machine, describe_model
from turbojax.evaluation.responses import DEFAULT_NEW_TOKENS, Answering
from turbojax.evaluation.texts import bootstrap
from turbojax.models import load_decoder
from turbojax.models.text.chat import render_chat
from turbojax.models.text.tokenizer import Tokenizer, load_tokenizer

NAME = "turbojax"
"""What lm-eval's registry calls it."""

_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_WITHOUT_EFFECT = ("do_sample", "temperature", "top_p", "top_k", "min_p", "seed")
"""Options without effect on greedy continuations; the first two must not ask for sampling."""


def language_model(answering: Answering) -> Any:
    """An ``lm_eval.api.model.TemplateLM``, for ``lm_eval.simple_evaluate(model=...)``.

    Texts become tokens, and long ones are cut, as in lm-eval's own backend for Hugging Face;
    continuations are greedy.

    Args:
      answering: the model, its tokenizer, and the method.

    Raises:
      ImportError: if lm-eval is not installed.
    """
    return _class()(answering=answering)


def register() -> None:
    """Makes ``lm_eval.simple_evaluate(model="turbojax", model_args="path=DIR,cache=4bit")`` work.

    Arguments are `path` (``"embedded"`` or a checkpoint's folder), `cache` (a method, see
    `turbojax.evaluation.method`), `dtype`, `max_length`, `batch_size` and `max_new_tokens`.

    Raises:
      ImportError: if lm-eval is not installed.
    """
    _class()


class TaskMeasure:
    """Tasks of lm-eval as a measure of `evaluate`.

    Args:
      tasks: names that lm-eval knows, of tasks, groups or tags, and YAML files. Data that such a
        file names relative to itself are found.
      tokenizer: of the model.
      batch_size: sequences that run at once.
      limit: documents of each task, at most; below 1 a share of them; None for all.
      num_fewshot: examples in a prompt; None for what each task says.
      chat: whether prompts are written by the tokenizer's chat template.
      max_new_tokens: of continuations of tasks that do not say.
      partial: a file that keeps answers batch by batch, so that an interrupted method goes on where
        it ended; None for none. Once all results are written elsewhere, it may be removed.

    Raises:
      ImportError: if lm-eval is not installed.
      OSError: if a file, or a data set, cannot be read.
      ValueError: if there is no such task, a number is out of range, or the model has no tokenizer
        for texts or no chat template.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        tokenizer: Tokenizer,
        *,
        batch_size: int = 8,
        limit: float | None = None,
        num_fewshot: int | None = None,
        chat: bool = False,
        max_new_tokens: int = DEFAULT_NEW_TOKENS,
        partial: Path | None = None,
    ) -> None:
        need_lm_eval()
        _checks.check_sizes(batch_size=batch_size, max_new_tokens=max_new_tokens)
        if not tasks or len(set(tasks)) != len(tasks):
            raise ValueError(f"tasks={tuple(tasks)} must name at least one, and each once")
        if limit is not None and not limit > 0:
            raise ValueError(f"{limit=} must be above 0")
        if num_fewshot is not None and num_fewshot < 0:
            raise ValueError(f"{num_fewshot=} must be at least 0")
        if chat and tokenizer.chat_template is None:
            raise ValueError("the tokenizer has no chat template")
        self._tasks, self._tokenizer, self._partial = tuple(tasks), tokenizer, partial
        self._batch_size, self._max_new_tokens = batch_size, max_new_tokens
        self._limit = int(limit) if limit is not None and limit >= 1 else limit
        self._options = {"num_fewshot": num_fewshot, "chat": chat}
        self._records: Records | None = None
        from lm_eval.tasks import TaskManager

        # The index of all tasks takes seconds, and files need none.
        self._manager = TaskManager(include_defaults=not all(map(_is_file, self._tasks)))
        with _named_errors():
            self._digest = _digest(
                self._manager.load(list(map(_spec, tasks)))["tasks"], self._limit
            )

    @property
    def identity(self) -> dict[str, Any]:
        """See `turbojax.evaluation.Further`."""
        from importlib.metadata import version

        return {
            "tasks": list(self._tasks),
            "checksum": self._digest,
            "limit": self._limit,
            "batch_size": self._batch_size,
            "max_new_tokens": self._max_new_tokens,
            "lm_eval": version("lm_eval"),
            **self._options,
        }

    def __call__(
        self, decoder: AnyDecoder, method: Method, progress: Callable[[int, int], None]
    ) -> dict[str, Any]:
        """A method's row, see `row_of`."""
        import lm_eval

        if self._records is None:
            machine, dates = describe_machine()
            told = {**machine, "model": describe_model(decoder), "tasks": self.identity}
            self._records = Records(self._partial, told, dates)
        records = self._records
        answering = Answering(
            decoder,
            self._tokenizer,
            method,
            batch_size=self._batch_size,
            max_new_tokens=self._max_new_tokens,
            progress=progress,
            keep=lambda key, make: records.row(("methods", method.name, key), make),
        )
        with _named_errors():
            found = lm_eval.simple_evaluate(
                model=language_model(answering),
                tasks=list(map(_spec, self._tasks)),  # anew for each method: tasks have state
                task_manager=self._manager,
                limit=self._limit,
                num_fewshot=self._options["num_fewshot"],
                apply_chat_template=bool(self._options["chat"]),
            )
        return {**row_of(found), "truncated": answering.truncated, "nan": answering.nan}


def need_lm_eval() -> None:
    """Raises ImportError if lm-eval is not installed; the message says how to install it."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ImportError(
            f"tasks need the package lm-eval, the extra 'tasks': {_extras.install('tasks')}"
        )


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Turns lm-eval's errors about arguments into `ValueError`, and hides its lines on defaults."""
    hush = logging.Filter()
    hush.filter = _is_news  # type: ignore[method-assign]
    logger = logging.getLogger("lm_eval.api.task")
    logger.addFilter(hush)
    try:
        yield
    except KeyError as error:
        if "is not a registered task" not in str(error):
            raise
        raise ValueError(f"lm-eval: {error.args[0]}") from error
    finally:
        logger.removeFilter(hush)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log record says more than that a metric has its default."""
    return "using default" not in record.getMessage()


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def _spec(task: str) -> Any:
    """What lm-eval's `TaskManager` loads; a file's data are found beside it."""
    if not _is_file(task):
        return task
    path = Path(task)
    if not path.is_file():
        raise FileNotFoundError(f"No such file or directory: {task!r}")
    from lm_eval.tasks._yaml_loader import load_yaml

    found = load_yaml(path)
    given = found.get("dataset_kwargs") or {}
    if "data_files" not in given:
        return task
    files = _beside(path.resolve().parent, given["data_files"])
    return {**found, "dataset_kwargs": {**given, "data_files": files}}


def _beside(folder: Path, files: Any) -> Any:
    if isinstance(files, Mapping):
        return {key: _beside(folder, value) for key, value in files.items()}
    if isinstance(files, list):
        return [_beside(folder, value) for value in files]
    return str(folder / files) if (folder / files).exists() else files


def _digest(tasks: Mapping[str, Any], limit: float | None) -> str:
    """A checksum of what tasks ask, wherever their data lie."""
    from lm_eval.evaluator_utils import get_sample_size

    digest = hashlib.sha256()
    for name, task in sorted(tasks.items()):
        config = task.dump_config()
        for key in ("dataset_path", "dataset_kwargs"):
            config.pop(key, None)
        docs = task.eval_docs
        count = get_sample_size(task, limit)
        docs = list(docs)[: None if count is None else int(count)]
        told = json.dumps([name, config, docs], sort_keys=True, default=_named)
        digest.update(told.encode())
    return digest.hexdigest()[:16]


def _named(value: Any) -> str:
    """The name of a value that JSON cannot hold, without its address."""
    return str(getattr(value, "__qualname__", type(value).__name__))


@functools.cache
def _class() -> Any:
    """The class, which needs lm-eval to be there; it is registered."""
    need_lm_eval()
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class CacheLM(TemplateLM):
        """See `language_model` and `register`."""

        def __init__(
            self,
            path: str = "embedded",
            cache: str = "exact",
            dtype: str | None = None,
            max_length: int | None = None,
            batch_size: int = 8,
            max_new_tokens: int = DEFAULT_NEW_TOKENS,
            answering: Answering | None = None,
        ) -> None:
            super().__init__()
            if answering is None:
                options: dict[str, Any] = {} if dtype is None else {"dtype": jnp.dtype(dtype)}
                decoder = load_decoder(path, max_length=max_length, **options)
                answering = Answering(
                    decoder,
                    load_tokenizer(path),
                    method(cache, decoder.config),
                    batch_size=int(batch_size),
                    max_new_tokens=int(max_new_tokens),
                )
            self.answering, self.tokenizer = answering, answering.tokenizer

        @property
        def max_length(self) -> int:
            return self.answering.max_length

        @property
        def max_gen_toks(self) -> int:
            return self.answering.max_new_tokens

        @property
        def tokenizer_name(self) -> str:
            return f"{NAME}-{self.answering.tokenizer_digest}"

        @property
        def eot_token_id(self) -> int:
            return self.answering.end

        @property
        def prefix_token_id(self) -> int:
            return self.answering.begin

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
        ) -> list[int]:
            return self.answering.encode(string, add_special_tokens)

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            text = render_chat(
                self.tokenizer, chat_history, add_generation_prompt=add_generation_prompt
            )
            if add_generation_prompt:
                return text
            # The last message is to be continued: what the template writes after it is cut off.
            last = chat_history[-1]["content"].strip()
            return text[: text.rindex(last) + len(last)]

        def loglikelihood(
            self, requests: list[Any], disable_tqdm: bool = True
        ) -> list[tuple[float, bool]]:
            del disable_tqdm  # progress is told in another way
            found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
            return found

        def _loglikelihood_tokens(
            self, requests: list[Any], **kwargs: Any
        ) -> list[tuple[float, bool]]:
            found = self.answering.score([(context, more) for _, context, more in requests])
            for (texts, _, _), answer in zip(requests, found, strict=True):
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answer)
            return found

        def loglikelihood_rolling(
            self, requests: list[Any], disable_tqdm: bool = True
        ) -> list[float]:
            pairs, owners = list[Any](), list[int]()
            for i, request in enumerate(requests):
                windows = get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
                for window in windows:
                    pairs.append(make_disjoint_window(window))
                    owners.append(i)
            totals = [0.0] * len(requests)
            for i, (log_p, _) in zip(owners, self.answering.score(pairs), strict=True):
                totals[i] += log_p
            for request, total in zip(requests, totals, strict=True):
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            return totals

        def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
            asked = []
            for request in requests:
                context, given = request.args
                stops, limit = _generation(given, self.max_gen_toks)
                tokens = self.tok_encode(context) or [self.prefix_token_id]
                asked.append((tokens, stops, limit))
            found = self.answering.go_on(asked)
            for request, text in zip(requests, found, strict=True):
                self.cache_hook.add_partial("generate_until", request.args, text)
            return found

    register_model(NAME)(CacheLM)
    return CacheLM


def _generation(given: Mapping[str, Any], max_new_tokens: int) -> tuple[tuple[str, ...], int]:
    """Stop texts and most tokens of a continuation.

    Raises NotImplementedError if it is not to be greedy, or has an option that is not known here.
    """
    sampled, temperature = given.get("do_sample"), given.get("temperature") or 0
    if sampled or (sampled is None and temperature > 0):
        raise NotImplementedError(
            f"do_sample={sampled}, {temperature=}: continuations are greedy here"
        )
    known = ("until", *_LIMITS, *_WITHOUT_EFFECT)
    if unknown := [key for key in given if key not in known]:
        raise NotImplementedError(f"{unknown[0]}={given[unknown[0]]!r} of a task is not supported")
    until = given.get("until") or []
    stops = tuple(dict.fromkeys(x for x in ([until] if isinstance(until, str) else until) if x))
    limit = next((given[key] for key in _LIMITS if given.get(key) is not None), max_new_tokens)
    return stops, int(limit)


def row_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """A method's row, from what ``lm_eval.simple_evaluate`` returns.

    It has ``"tasks"`` and ``"groups"``, by name: ``"metrics"``, each with its ``"value"``, standard
    error ``"stderr"`` (None where there is none) and ``"higher_is_better"``; for tasks also the
    number of documents ``"items"``, ``"fewshot"``, and the ``"version"``. A metric of a filter is
    called ``"exact_match (strict-match)"``. ``"subtasks"`` names those of every group, and
    ``"items"`` has every document of a task: its ``"id"``, ``"answers"`` (the continuation, or each
    choice's log-likelihood and whether it is what greedy decoding writes), and its metrics.
    """
    tasks, groups = found["samples"], found.get("groups") or {}
    better = found.get("higher_is_better") or {}
    subtasks = {
        name: list(below)
        for name, below in (found.get("group_subtasks") or {}).items()
        if name in groups and below
    }
    return {
        "tasks": {
            name: {
                "items": found["n-samples"][name]["effective"],
                "fewshot": found["n-shot"].get(name),
                "version": found["versions"].get(name),
                "metrics": _metrics(found["results"][name], better.get(name) or {}),
            }
            for name in tasks
        },
        "groups": {
            name: {"metrics": _metrics(values, better.get(name) or {})}
            for name, values in groups.items()
        },
        "subtasks": subtasks,
        "items": {name: _items(samples) for name, samples in tasks.items()},
    }


def compare_tasks(
    row: Mapping[str, Any], exact: Mapping[str, Any], *, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """How a method's answers differ from those of another one, document by document.

    Args:
      row: of `row_of`.
      exact: the same of the method to compare with, and of the same tasks.
      seed: of the intervals.

    Returns:
      By task ``{"same_answers": SHARE, "metrics": {NAME: {"difference", "interval"}}}``: the share
      of equal continuations, or of equal choices, None where whole texts were scored; and the
      metrics' differences, with 95 % intervals where they are means over documents.
    """
    found = dict[str, dict[str, Any]]()
    for task, items in row["items"].items():
        pairs = list(zip(items, exact["items"][task], strict=True))
        metrics = {}
        for name in row["tasks"][task]["metrics"]:
            both = [
                (one["metrics"][name], other["metrics"][name])
                for one, other in pairs
                if _is_number(one["metrics"].get(name)) and _is_number(other["metrics"].get(name))
            ]
            whole = [x["tasks"][task]["metrics"][name]["value"] for x in (row, exact)]
            if both:
                mean = bootstrap([float(a) - float(b) for a, b in both], seed=seed)
                metrics[name] = {"difference": mean.mean, "interval": mean.ends}
            elif all(map(_is_number, whole)):
                metrics[name] = {"difference": float(whole[0] - whole[1]), "interval": None}
        same = [a == b for a, b in ([_choice(x["answers"]) for x in y] for y in pairs) if a]
        found[task] = {"same_answers": float(np.mean(same)) if same else None, "metrics": metrics}
    return found


def _metrics(values: Mapping[str, Any], better: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a task: lm-eval writes ``"acc,none"`` and ``"acc_stderr,none"``."""
    metrics = dict[str, Any]()
    for key, value in values.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        error = values.get(f"{metric}_stderr,{filtered}")
        metrics[_name(metric, filtered)] = {
            "value": _plain(value),
            "stderr": _plain(error) if _is_number(error) else None,
            "higher_is_better": better.get(metric),
        }
    return metrics


def _items(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each document once, with the metrics of all filters."""
    items = dict[int, dict[str, Any]]()
    for sample in samples:
        number = int(sample["doc_id"])
        item = items.setdefault(
            number,
            {"id": number, "answers": _plain([x[0] for x in sample["resps"]]), "metrics": {}},
        )
        for metric in sample["metrics"]:
            item["metrics"][_name(metric, sample["filter"])] = _plain(sample[metric])
    return [items[number] for number in sorted(items)]


def _name(metric: str, filtered: str) -> str:
    return metric if filtered == "none" else f"{metric} ({filtered})"


def _choice(answers: Sequence[Any]) -> tuple[Any, ...]:
    """What was answered: texts; the most likely choice; of one text whether it is greedy.

    Empty where a whole text was scored.
    """
    if all(isinstance(x, str) for x in answers):
        return tuple(answers)
    if not all(isinstance(x, list) and len(x) == 2 for x in answers):
        return ()
    if len(answers) == 1:
        return (answers[0][1],)
    return (int(np.argmax([-np.inf if x[0] is None else x[0] for x in answers])),)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real)


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's, and what JSON cannot hold as text."""
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(x) for x in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
