"""`noria bench calls`: its measures of similarity, its prompts, and one real run."""

import msgspec
import numpy as np
import pytest
from PIL import Image

from noria.config import Config, EngineConfig
from noria.errors import ConfigError, InvalidField
from noria_bench.calls import bench
from noria_bench.calls.options import CallsOptions
from noria_bench.calls.prompts import choose_prompts
from noria_bench.calls.results import CallsResult
from noria_bench.calls.similarity import ssim


def flat(value):
    return np.full((16, 20, 3), value, np.uint8)


def test_ssim_of_flat_images_is_that_of_its_formula():
    # Without variance only the term of the means is left.
    assert ssim(flat(100), flat(105)) == pytest.approx((2 * 100 * 105 + 6.5025) / (100**2 + 105**2 + 6.5025))


def test_ssim_falls_with_noise_and_is_1_of_equal_images():
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (32, 24, 3), np.uint8)
    noisy = [(image + rng.normal(0, sigma, image.shape)).clip(0, 255).astype(np.uint8) for sigma in (5, 50)]
    assert ssim(image, image) == pytest.approx(1)
    assert 1 > ssim(noisy[0], image) > ssim(noisy[1], image) > 0


def test_prompts_are_those_of_a_file_again_and_again_or_captions_that_are_judged(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a fox\n\n an owl \n", encoding="utf-8")
    chosen = choose_prompts(file, "bundled", 3, 0)
    assert (chosen.texts, chosen.is_right) == (("a fox", "an owl", "a fox"), None)
    captions = choose_prompts(None, "bundled", 3, 0)
    assert len(set(captions.texts)) == 3
    assert not captions.is_right(0, np.full((128, 128, 3), 128, np.uint8))
    file.write_text("\n", encoding="utf-8")
    for wrong in (file, tmp_path / "none.txt"):
        with pytest.raises(ConfigError, match="--prompts"):
            choose_prompts(wrong, "bundled", 3, 0)


def test_a_run_writes_its_numbers_a_report_a_plot_and_a_grid(tiny_folder, tmp_path, capsys):
    config = Config(model=str(tiny_folder), engine=EngineConfig(dtype="float32", slots=4, threads=1))
    options = CallsOptions(shares=(0.75, 0.5), steps=(12,), schedulers=("ddim",), num_images=2)
    assert bench.main(config, options, tmp_path) == 0
    result = msgspec.json.decode((tmp_path / "calls.json").read_bytes(), type=CallsResult)
    made = [(run.setting.kind, run.setting.num_calls, len(run.similarities)) for run in result.runs]
    assert made == [("full", 12, 0), ("skipped", 9, 2), ("fewer", 9, 2), ("skipped", 6, 2), ("fewer", 6, 2)]
    assert all(10 < psnr < 80 for run in result.runs for psnr in run.psnrs_db)
    assert result.complete and not result.failures
    report = capsys.readouterr().out
    assert report.strip() == (tmp_path / "report.md").read_text(encoding="utf-8").strip()
    assert "| 9 of 12 |" in report and "| 6 of 12 |" in report and "captions" not in report
    assert b"<svg" in (tmp_path / "plots" / "calls.svg").read_bytes()
    with Image.open(tmp_path / "images" / "ddim-12.png") as grid:
        assert grid.width == 5 * (32 + 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"schedulers": ("euler-a",)}, "it draws noise at each call"), ({"steps": (8,)}, "of fewer than 12 none")],
)
def test_what_the_server_refuses_is_refused_before_the_model_is_loaded(tiny_folder, tmp_path, settings, message):
    with pytest.raises(InvalidField, match=message):
        bench.main(Config(model=str(tiny_folder)), CallsOptions(**settings), tmp_path)
