"""Pooled attention without a causal mask on the tokens of a video, in several orders.

`python -m benchmarks.video --out benchmarks/results/video.json`

A camera moves over a photograph; patches of 8 x 8 pixels in 8 frames are embedded by fixed
projections. Each order of the tokens gets levels by the same policies, and the output is compared
with exact attention. Then a tiny model learns to fill in patches that it does not see, with exact
and with pooled attention. In plain JAX, in float32. `--quick` is a small sample: does all of it
run?
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import turbojax as tj
from benchmarks import stored, tables
from benchmarks.suite import Shown
from benchmarks.tables import Result
from turbojax._environment import environment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Grid = tuple[int, int, int]
PATCH = 8
BRICK = (4, 4, 8)
BLOCK = math.prod(BRICK)
HEADS, CHANNELS = 2, 64
# Pixels that the camera moves in a frame: an eighth of a patch, and a patch.
SPEEDS = {"slow": 1.0, "fast": 8.0}
POLICY = tj.levels.TopK()
SHARES = (POLICY.level1, POLICY.level2, POLICY.level4, POLICY.level8)
BUDGETS = (0.5, 1.0, 2.0)
# Of the photograph, from one pixel of the video to the next.
_STRIDE, _ORIGIN = 1.25, (20.0, 30.0)
_WAVELENGTHS = (16, 32, 64, 128)
_HIDDEN = 64
BLOCKS = {"block_q": BLOCK, "block_kv": BLOCK}


def scene(grid: Grid, pixels: float) -> np.ndarray:
    """A camera moves to the right and half as fast down over matplotlib's sample photograph.

    float32 ``[frames, rows * 8, columns * 8, 3]`` from 0 to 1, between pixels bilinear.
    """
    from matplotlib import cbook
    from PIL import Image

    with cbook.get_sample_data("grace_hopper.jpg") as file:
        photo = np.asarray(Image.open(file), np.float32) / 255

    def frame(t: int) -> np.ndarray:
        y = _ORIGIN[0] + _STRIDE * (np.arange(grid[1] * PATCH) + 0.5 * pixels * t)
        x = _ORIGIN[1] + _STRIDE * (np.arange(grid[2] * PATCH) + pixels * t)
        top, left = np.floor(y).astype(int), np.floor(x).astype(int)
        down, right = (y - top)[:, None, None], (x - left)[None, :, None]
        upper, lower = (
            photo[row][:, left] * (1 - right) + photo[row][:, left + 1] * right
            for row in (top, top + 1)
        )
        return upper * (1 - down) + lower * down

    return np.stack([frame(t) for t in range(grid[0])]).astype(np.float32)


def patches(video: np.ndarray) -> np.ndarray:
    """``[frames * rows * columns, 192]``, by frames and rows."""
    frames, height, width, colors = video.shape
    rows, columns = height // PATCH, width // PATCH
    parts = video.reshape(frames, rows, PATCH, columns, PATCH, colors)
    return parts.transpose(0, 1, 3, 2, 4, 5).reshape(frames * rows * columns, -1)


def positions(grid: Grid) -> np.ndarray:
    """Sines and cosines of frame, row and column: ``[tokens, 24]``."""
    place = np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), -1).reshape(-1, 3)
    angles = 2 * np.pi * place[:, :, None] / np.array(_WAVELENGTHS)
    return np.concatenate([np.sin(angles), np.cos(angles)], -1).reshape(len(place), -1)


def embedded(grid: Grid, pixels: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value, float32 ``[1, tokens, 2, 64]``, by fixed random projections.

    A token is its patch and its position, each normed. Queries and keys have one projection, so
    that tokens look for patches that are like theirs, and near.
    """
    rng = np.random.default_rng(0)

    def projected(x: np.ndarray, *sizes: int) -> np.ndarray:
        width = x.shape[-1]
        return np.tensordot(x, rng.normal(size=(width, *sizes)) / np.sqrt(width), 1)

    def normed(x: np.ndarray) -> np.ndarray:
        return (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)

    x = patches(scene(grid, pixels))
    content = projected((x - x.mean(0)) / x.std(), 256)
    token = normed(content) + normed(projected(positions(grid), 256))
    query, value = (projected(token, HEADS, CHANNELS) for _ in range(2))
    q, v = (jnp.asarray(y[None], jnp.float32) for y in (query, value))
    return q, q, v


def orders(grid: Grid) -> dict[str, np.ndarray]:
    """Orders of a grid's tokens by name: by rows, bricks inside by rows, and `grid_order`."""
    tokens = np.arange(math.prod(grid))
    parts = [x for pair in zip(grid, BRICK, strict=True) for x in (pair[0] // pair[1], pair[1])]
    bricks = tokens.reshape(parts).transpose(0, 2, 4, 1, 3, 5).reshape(-1)
    return {"rows": tokens, "bricks": bricks, "grid_order": tj.levels.grid_order(grid, BRICK)}


@functools.partial(jax.jit, static_argnames="policy")
def pooled(
    query: jax.Array, key: jax.Array, value: jax.Array, *, policy: tj.levels.Policy
) -> tuple[jax.Array, jax.Array]:
    levels = tj.select_levels(query, key, policy, is_causal=False, **BLOCKS)
    out = tj.pooled_attention(query, key, value, levels, is_causal=False, **BLOCKS)
    return out, levels


def errors(grid: Grid, pixels: float, budgets: Sequence[float]) -> list[dict[str, Any]]:
    """For each order and budget the density, and the error relative to exact attention's norm."""
    arrays = embedded(grid, pixels)
    exact = np.asarray(jax.jit(jax.nn.dot_product_attention)(*arrays), np.float64)
    found = []
    for name, order in orders(grid).items():
        for budget in budgets:
            policy = tj.levels.TopK(*(budget * share for share in SHARES))
            out, levels = pooled(*(x[:, order] for x in arrays), policy=policy)
            density = float(tj.level_density(levels, is_causal=False, **BLOCKS))
            back = np.asarray(out, np.float64)[:, np.argsort(order)]
            error = float(np.linalg.norm(back - exact) / np.linalg.norm(exact))
            found.append({"order": name, "budget": budget, "density": density, "error": error})
    return found


def training(grid: Grid, pixels: float, steps: int) -> dict[str, list[float]]:
    """Losses of a model of one layer that fills in half of the patches, by how it attends.

    The loss is the mean square of the error at the hidden patches over their variance.
    """
    x = patches(scene(grid, pixels))
    x = ((x - x.mean(0)) / x.std()).astype(np.float32)
    place = positions(grid).astype(np.float32)
    sizes = {"patch": (x.shape[1], _HIDDEN), "place": (place.shape[1], _HIDDEN)}
    sizes |= dict.fromkeys(("query", "key", "value"), (_HIDDEN, _HIDDEN))
    sizes |= {"out": (_HIDDEN, x.shape[1])}
    rng = np.random.default_rng(1)
    start = {
        n: jnp.asarray(rng.normal(size=s) / s[0] ** 0.5, jnp.float32) for n, s in sizes.items()
    }

    def losses(order: np.ndarray, attend: Callable[..., jax.Array]) -> list[float]:
        targets, positioned = jnp.asarray(x[order]), jnp.asarray(place[order])

        def loss(params: dict[str, jax.Array], hidden: jax.Array) -> jax.Array:
            seen = jnp.where(hidden[:, None], 0.0, targets)
            token = seen @ params["patch"] + positioned @ params["place"]
            token = token / jnp.sqrt(jnp.mean(token**2, -1, keepdims=True) + 1e-6)
            q, k, v = (
                (token @ params[name]).reshape(1, len(token), HEADS, -1)
                for name in ("query", "key", "value")
            )
            guess = attend(q, k, v).reshape(len(token), -1) @ params["out"]
            square = jnp.mean((guess - targets) ** 2, -1)
            return jnp.sum(jnp.where(hidden, square, 0.0)) / jnp.sum(hidden)

        optimizer = optax.adam(1e-2)

        @jax.jit
        def step(params: Any, state: Any, hidden: jax.Array) -> tuple[Any, Any, jax.Array]:
            value, grads = jax.value_and_grad(loss)(params, hidden)
            updates, state = optimizer.update(grads, state)
            return optax.apply_updates(params, updates), state, value

        params, state, found = start, optimizer.init(start), []
        for number in range(steps):
            # The same patches in every order.
            hidden = np.random.default_rng(number).random(len(x)) < 0.5
            params, state, value = step(params, state, jnp.asarray(hidden[order]))
            found.append(float(value) / float(np.mean(x**2)))
        return found

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return pooled(query, key, value, policy=POLICY)[0]

    named = orders(grid)
    runs = {"exact": (named["rows"], jax.nn.dot_product_attention)}
    runs |= {name: (order, attend) for name, order in named.items()}
    return {name: losses(*run) for name, run in runs.items()}


def measure(grid: Grid, small: Grid, steps: int, budgets: Sequence[float]) -> Result:
    """Errors on both scenes, and losses on the slow one in a smaller grid."""
    found: Result = {**environment(), "grid": list(grid), "brick": list(BRICK)}
    found["errors"] = {name: errors(grid, speed, budgets) for name, speed in SPEEDS.items()}
    found["training"] = {"grid": list(small), "losses": training(small, SPEEDS["slow"], steps)}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = stored.parser(__doc__.splitlines()[0], quick=True)
    given = parser.parse_args(arguments)
    full = ((8, 32, 32), (8, 16, 16), 60, BUDGETS)
    stored.write(given.out, measure(*(((4, 8, 16), (4, 8, 8), 2, (1.0,)) if given.quick else full)))


_NAMES = {
    "rows": "by frames and rows",
    "bricks": "bricks, by rows inside",
    "grid_order": "`grid_order`",
}


def video_table(name: str, result: Result) -> str:
    first = next(iter(result["errors"].values()))
    budgets = list(dict.fromkeys(row["budget"] for row in first))
    density = {row["budget"]: row["density"] for row in first}
    header = ["order of the tokens"]
    header += [f"{scene}, density {density[b]:.3f}" for scene in result["errors"] for b in budgets]
    losses = result["training"]["losses"]
    lines = []
    for order, words in _NAMES.items():
        cells = [
            f"{100 * row['error']:.1f} %"
            for rows in result["errors"].values()
            for row in rows
            if row["order"] == order
        ]
        lines.append([words, *cells, f"{losses[order][-1]:.3f}"])
    lines.append(["exact attention", *["0"] * (len(header) - 1), f"{losses['exact'][-1]:.3f}"])
    grid, small = ("x".join(map(str, x)) for x in (result["grid"], result["training"]["grid"]))
    note = (
        f"Errors relative to the norm of exact attention, of {grid} tokens; bricks of "
        f"{'x'.join(map(str, result['brick']))}, `TopK` with its shares halved, as they are and "
        f"doubled. The loss after {len(losses['exact'])} steps is of {small} tokens of the slow "
        "scene, over the variance of what is filled in."
    )
    return f"{tables.table([*header, 'loss'], lines)}\n\n{note} {tables.source(name, result)}"


def video_plot(result: Result) -> "Figure":
    """Two frames with a brick's levels, error against density, and losses."""
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure

    grid: Grid = tuple(result["grid"])
    figure = Figure(figsize=(12, 3.9), layout="constrained")
    frame_axes, slow, fast, loss = figure.subplots(1, 4, width_ratios=(1.1, 1, 1, 1))
    # The levels that one brick of queries chooses, where its keys stand in their frame.
    arrays, order = embedded(grid, SPEEDS["slow"]), orders(grid)["grid_order"]
    query_block = len(order) // BLOCK * 5 // 16
    levels = np.asarray(pooled(*(x[:, order] for x in arrays), policy=POLICY)[1])
    chosen = np.empty(len(order), int)
    chosen[order] = np.repeat(levels[0, 0, query_block], BLOCK)
    own = np.zeros(len(order), bool)
    own[order[query_block * BLOCK : (query_block + 1) * BLOCK]] = True
    shown = np.argmax(own.reshape(grid).any((1, 2)))
    names = ("1", "2", "4", "8", "0")
    place = np.vectorize([1, 2, 4, 8, 0].index)(chosen.reshape(grid)[shown])
    frame_axes.imshow(scene(grid, SPEEDS["slow"])[shown], extent=(0, grid[2], grid[1], 0))
    colors = ListedColormap(["#fde725", "#5ec962", "#21918c", "#3b528b", "#000000"])
    image = frame_axes.imshow(
        place,
        cmap=colors,
        norm=BoundaryNorm(np.arange(6) - 0.5, 5),
        alpha=0.45,
        extent=(0, grid[2], grid[1], 0),
    )
    frame_axes.contour(
        np.arange(grid[2]) + 0.5,
        np.arange(grid[1]) + 0.5,
        own.reshape(grid)[shown].astype(float),
        [0.5],
        colors="red",
    )
    bar = figure.colorbar(image, ax=frame_axes, ticks=range(5), shrink=0.8)
    bar.ax.set_yticklabels(names)
    frame_axes.set_title(f"Levels for the brick in red, frame {shown}", fontsize=10)
    frame_axes.set_xlabel("column of patches")
    frame_axes.set_ylabel("row of patches")
    for axes, (name, rows) in zip((slow, fast), result["errors"].items(), strict=True):
        for order_name in _NAMES:
            points = [(row["density"], row["error"]) for row in rows if row["order"] == order_name]
            style = {"marker": "o", "markersize": 4, "label": order_name}
            # Where lines lie on each other, the one below shows.
            style["linestyle"] = "--" if order_name == "bricks" else "-"
            axes.plot(*np.transpose(points), **style)
        axes.set_title(f"{name}: moves by {SPEEDS[name]:g} px a frame", fontsize=10)
        axes.set_xlabel("density: work left")
        axes.set_xscale("log", base=2)
        axes.set_xticks([x for x, _ in points], [f"{x:.2f}" for x, _ in points])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    top = max(row["error"] for rows in result["errors"].values() for row in rows)
    for axes in (slow, fast):
        axes.set_ylim(0, 1.1 * top)
    slow.set_ylabel("relative error of the output")
    slow.legend(fontsize=8)
    for name, values in result["training"]["losses"].items():
        loss.plot(np.arange(1, len(values) + 1), values, label=name, linewidth=1)
    loss.set_title("Filling in hidden patches", fontsize=10)
    loss.set_xlabel("step")
    loss.set_ylabel("loss, over the variance")
    loss.grid(alpha=0.3)
    loss.legend(fontsize=8)
    return figure


SHOWN = Shown(("video",), {"video": video_table}, {"video.png": video_plot})

if __name__ == "__main__":
    main()
