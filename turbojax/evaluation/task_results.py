"""What lm-eval found of one method, as plain JSON values, and how two methods differ."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turbojax.evaluation.intervals import bootstrap


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
