"""The comparison of orders of a video's tokens: its scene, that it runs, and its table and plot."""

import json

import numpy as np
import pytest

from benchmarks import readme, video
from benchmarks.stored import newest
from turbojax.finetune.optimizer import default_promotion

GRID = (2, 4, 8)


def test_the_camera_moves_by_so_many_pixels_a_frame():
    """The next frame is the one before, moved: to the right by 8 pixels, down by 4."""
    scene = video.scene(GRID, 8.0)
    assert scene.shape == (2, 32, 64, 3)
    assert 0 <= scene.min() < 0.2 < 0.8 < scene.max() <= 1
    np.testing.assert_allclose(scene[1][:-4, :-8], scene[0][4:, 8:], atol=1e-6)


def test_patches_are_those_of_the_pixels():
    scene = video.scene(GRID, 1.0)
    patch = video.patches(scene).reshape(*GRID, 8, 8, 3)
    assert np.array_equal(patch[1, 2, 5], scene[1, 16:24, 40:48])


def test_all_orders_hold_every_token():
    for order in video.orders((8, 8, 16)).values():
        assert np.array_equal(np.sort(order), np.arange(8 * 8 * 16))


@pytest.mark.fuzz
def test_a_quick_run(tmp_path):
    path = tmp_path / "video.json"
    with default_promotion():  # optax relies on it
        video.main(["--quick", "--out", str(path)])
    result = json.loads(path.read_text())
    for rows in result["errors"].values():
        assert {row["order"] for row in rows} == {"rows", "bricks", "grid_order"}
        assert all(0 < row["error"] < 0.6 and 0 < row["density"] < 0.5 for row in rows)
    assert "| exact attention |" in video.video_table("video.json", result)


def test_prose_agrees_with_the_record():
    """docs/video.md: what it says of the orders."""
    _, result = newest(readme.RESULTS, ("video",))
    error = {
        (scene, row["order"], row["budget"]): row["error"]
        for scene, rows in result["errors"].items()
        for row in rows
    }
    for (scene, order, budget), x in error.items():
        ratio = x / error[scene, "grid_order", budget]
        low, high = {
            ("slow", "rows"): (1.0, 1.05),
            ("fast", "rows"): (1.25, 1.34),
            ("slow", "bricks"): (1.55, 1.9),
            ("fast", "bricks"): (1.25, 1.36),
        }.get((scene, order), (1.0, 1.0))
        assert low <= ratio <= high, (scene, order, budget, ratio)
    densities = {row["density"] for row in result["errors"]["slow"]}
    assert min(densities) < 0.1 < max(densities) < 0.33
    last = {name: losses[-1] for name, losses in result["training"]["losses"].items()}
    exact = last.pop("exact")
    assert max(last.values()) < 1.01 * min(last.values())
    assert min(last.values()) > 1.05 * exact


def test_prose_agrees_with_the_times():
    """docs/video.md: what choosing the levels took."""
    _, result = newest(readme.RESULTS, ("pooled_video",))
    chosen = [row["us"] for row in result["rows"] if row["operation"] == "pooled-select"]
    text = f"took {min(chosen):.0f} to {max(chosen):.0f} us"
    assert text in " ".join((readme.ROOT / "docs" / "video.md").read_text().split())
