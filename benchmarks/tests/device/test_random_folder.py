"""The folder with random weights is one that Noria serves."""

from noria.config import EngineConfig
from noria.models.catalog import open_model_of
from noria.protocol.diffusion import DiffusionModelSpec
from noria_bench.device.random_folder import write_random_folder


def test_the_folder_is_one_of_stable_diffusion_in_the_size_of_its_pipeline(tmp_path):
    write_random_folder(tmp_path / "random", tiny=True)
    spec = open_model_of(DiffusionModelSpec, str(tmp_path / "random"), EngineConfig())
    assert (spec.family, spec.default_width_px, spec.default_height_px) == ("stable-diffusion", 512, 512)
