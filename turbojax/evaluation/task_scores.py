"""What answers to tasks are worth: shares that are right, and how far they may be off."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turbojax.evaluation.intervals import bootstrap
from turbojax.evaluation.tasks import Task

KINDS = ("words", "choices")

Answer = Mapping[str, Any]
"""A sequence's answer, see `turbojax.evaluation.answering.answer`."""


def task_scores(
    tasks: Sequence[Task], answers: Sequence[Answer], *, seed: int = 0
) -> dict[str, Any]:
    """What a method's answers are worth.

    Args:
      tasks: the tasks.
      answers: of all of them, in any order.
      seed: of the intervals.

    Returns:
      Plain JSON values: ``"words"`` and ``"choices"``, where there are such tasks, and ``"items"``,
      what each task's answer was. The first two hold ``"items"``, their number; ``"right"``, the
      share that is right, with its ``"interval"``; and ``"by_group"`` where there are groups.
      Choices are right by the likelihood of the whole text; ``"right_per_byte"``, with
      ``"interval_per_byte"``, counts by that of a byte of it, which does not favour short ones.
    """
    found = _items(tasks, answers)
    scores: dict[str, Any] = {}
    for kind in KINDS:
        items = [item for item in found if item["kind"] == kind]
        if items:
            scores[kind] = _summary(items, seed)
    return {**scores, "items": found}


def compare_answers(
    scores: Mapping[str, Any], exact: Mapping[str, Any], *, seed: int = 0
) -> dict[str, Any]:
    """How a method's answers differ from those of another one, task by task.

    Args:
      scores: of `task_scores`.
      exact: the same of the method to compare with, and of the same tasks.
      seed: of the intervals.

    Returns:
      By kind ``{"difference", "interval", "same_answer"}``: of the shares that are right, and the
      share of equal answers, right or wrong.
    """
    pairs = list(zip(scores["items"], exact["items"], strict=True))
    found = {}
    for kind in KINDS:
        both = [(one, other) for one, other in pairs if one["kind"] == kind]
        if not both:
            continue
        differences = [float(one["right"]) - float(other["right"]) for one, other in both]
        mean, ends = _share(differences, seed)
        same = float(np.mean([one["answer"] == other["answer"] for one, other in both]))
        found[kind] = {"difference": mean, "interval": ends, "same_answer": same}
    return found


def _items(tasks: Sequence[Task], answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each task's answer was, in the order of the tasks."""
    by_name = dict[str | int, list[Mapping[str, Any]]]()
    for row in answers:
        by_name.setdefault(row["id"], []).append(row)
    items = list[dict[str, Any]]()
    for task in tasks:
        rows = by_name[task.name]
        item: dict[str, Any] = {"id": task.name, "group": task.group}
        if task.choices:
            item |= {"kind": "choices", **_chosen(task, sorted(rows, key=lambda x: x["choice"]))}
        else:
            item |= {"kind": "words", **rows[0]}
        items.append(item)
    return items


def _chosen(task: Task, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The most likely choice; none, and so a wrong one, where a choice's bits are NaN."""
    bits = [row["bits"] for row in rows]
    if any(x is None for x in bits):
        return {"bits": bits, "answer": None, "right": False, "right_per_byte": False}
    per_byte = [x / row["bytes"] for x, row in zip(bits, rows, strict=True)]
    best, best_per_byte = (values.index(min(values)) for values in (bits, per_byte))
    return {
        "bits": bits,
        "answer": best,
        "right": best == task.right,
        "right_per_byte": best_per_byte == task.right,
    }


def _summary(items: Sequence[Mapping[str, Any]], seed: int) -> dict[str, Any]:
    scores: dict[str, Any] = {"items": len(items)}
    for name in ("right", "right_per_byte"):
        if name in items[0]:
            suffix = name.removeprefix("right")
            share, interval = _share([item[name] for item in items], seed)
            scores |= {name: share, f"interval{suffix}": interval}
    if "ended" in items[0]:
        scores["ended"] = {
            end: sum(item["ended"] == end for item in items) for end in ("stop", "length", "nan")
        }
        scores["without_answer"] = sum(item["answer"] is None for item in items)
    else:
        scores["nan"] = sum(item["answer"] is None for item in items)
    groups = sorted({item["group"] for item in items if item["group"] is not None})
    if groups:
        scores["by_group"] = {
            group: float(np.mean([x["right"] for x in items if x["group"] == group]))
            for group in groups
        }
    return scores


def _share(values: Sequence[float], seed: int) -> tuple[float, list[float] | None]:
    found = bootstrap(np.asarray(values, np.float64), seed=seed)
    return found.mean, found.ends
