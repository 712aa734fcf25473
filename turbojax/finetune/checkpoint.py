"""Checkpoints of a tree of arrays with Orbax, which are checked as they are read."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from turbojax import _json
from turbojax._sums import checksums

# Orbax stores arrays without a checksum.
_SUMS = "sums"


def checkpoint_manager(folder: Path) -> ocp.CheckpointManager:
    """Keeps the last two checkpoints under `folder`."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    return ocp.CheckpointManager(folder.absolute(), options=options)


def last_step(folder: Path) -> int | None:
    """The step of the latest checkpoint; Orbax gives one this name when it is complete."""
    names = (path.name for path in folder.glob("*")) if folder.is_dir() else ()
    return max((int(name) for name in names if name.isdecimal()), default=None)


def save_tree(manager: ocp.CheckpointManager, step: int, tree: Any) -> None:
    """Writes the tree as the checkpoint of a step, in the background."""
    leaves = _leaves(tree)
    manager.save(step, args=ocp.args.StandardSave({**leaves, _SUMS: checksums(leaves)}), force=True)


def restore_tree(manager: ocp.CheckpointManager, like: Any) -> tuple[int, Any] | None:
    """Reads the latest checkpoint: its step and the tree, or None if there is no checkpoint.

    `like` has the same structure, shapes and dtypes. Raises ValueError, naming the checkpoint, if
    it is damaged, or one of another tree.
    """
    step = manager.latest_step()
    if step is None:
        return None
    leaves = _leaves(like)
    wanted = {**leaves, _SUMS: checksums(leaves)}
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
    try:
        found = manager.restore(step, args=ocp.args.StandardRestore(shapes))
        sums = found.pop(_SUMS)
    except Exception as error:  # whatever Orbax and what it stands on make of damaged files
        raise ValueError(_unreadable(manager, step, str(error))) from error
    if (sums != checksums(found)).any():
        raise ValueError(_unreadable(manager, step, "its numbers are not those that were written"))
    return step, jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in leaves])


def _leaves(tree: Any) -> dict[str, jax.Array]:
    """Path -> array, in the order of the tree: readable without its classes."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {f"{i:03d}{jax.tree_util.keystr(path)}": x for i, (path, x) in enumerate(leaves)}


def _unreadable(manager: ocp.CheckpointManager, step: int, reason: str) -> str:
    steps = [x for x in manager.all_steps() if x != step]
    without = f"goes on from step {max(steps)}" if steps else "begins anew"
    path, short = manager.directory / str(step), _json.line(reason)
    return f"checkpoint {path} cannot be read: {short}; if you remove it, training {without}"
