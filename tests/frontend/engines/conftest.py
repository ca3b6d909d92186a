"""A request that the fake engine's model can serve."""

import pytest

from noria.config import FrontendConfig
from noria.frontend.services.images.request_validation import validate
from noria.protocol.request import ImageRequestBody


@pytest.fixture
def request_of(spec):
    def make(seed=1, timeout_s=60.0):
        config = FrontendConfig(request_timeout_s=timeout_s)
        return validate(ImageRequestBody("p"), spec, config, "name", lambda: seed, "alice")

    return make
