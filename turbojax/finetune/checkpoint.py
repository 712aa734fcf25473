"""Checkpoints of a tree of arrays with Orbax."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


def checkpoint_manager(folder: Path) -> ocp.CheckpointManager:
    """Keeps the last two checkpoints under `folder`."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    return ocp.CheckpointManager(folder.absolute(), options=options)


def last_step(folder: Path) -> int | None:
    """The step of the latest checkpoint under `folder`, by the names of what is finished alone.

    Orbax writes a checkpoint under another name and renames it at the end.
    """
    names = (path.name for path in folder.glob("*")) if folder.is_dir() else ()
    return max((int(name) for name in names if name.isdecimal()), default=None)


def save_tree(manager: ocp.CheckpointManager, step: int, tree: Any) -> None:
    """Writes the tree as the checkpoint of a step, in the background."""
    manager.save(step, args=ocp.args.StandardSave(_leaves(tree)), force=True)


def restore_tree(manager: ocp.CheckpointManager, like: Any) -> tuple[int, Any] | None:
    """Reads the latest checkpoint.

    Args:
      manager: where.
      like: a tree of the same structure, shapes and dtypes.

    Returns:
      Its step and the tree, or None if there is no checkpoint.
    """
    step = manager.latest_step()
    if step is None:
        return None
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, _leaves(like))
    leaves = manager.restore(step, args=ocp.args.StandardRestore(shapes))
    return step, jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in shapes])


def _leaves(tree: Any) -> dict[str, jax.Array]:
    """Path -> array, in the order of the tree: readable without its classes."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {f"{i:03d}{jax.tree_util.keystr(path)}": x for i, (path, x) in enumerate(leaves)}
