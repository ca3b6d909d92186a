"""Front ends with API keys."""

import contextlib

import httpx
import pytest

from noria.config import Config, FrontendConfig
from noria.frontend.access.api_keys import generate_key
from waiting import wait_until_ready


@pytest.fixture
def serve_keys(serve, new_engine, tmp_path):
    """Starts a front end with the keys named in `limits`, whose values are further lines of their tables.

    Gives its address, its engine, and the keys by name.
    """

    @contextlib.contextmanager
    def start(processes=1, **limits):
        generated = {name: generate_key(name) for name in limits}
        file = tmp_path / "keys.toml"
        file.write_text("\n".join(generated[name][1] + lines for name, lines in limits.items()))
        engine = new_engine()
        frontend = FrontendConfig(api_keys_file=str(file), processes=processes)
        with serve(Config(data_dir=str(tmp_path), frontend=frontend), engine) as (address, _):
            wait_until_ready(address)
            yield address, engine, {name: key for name, (key, _) in generated.items()}

    return start


@pytest.fixture
def client_of(serve_keys):
    """Makes clients of one front end; the keys are "alice" and "bob", and None is a client without a key."""
    with contextlib.ExitStack() as stack:
        address, engine, keys = stack.enter_context(serve_keys(alice="", bob=""))

        def make(name=None):
            headers = {"Authorization": f"Bearer {keys[name]}"} if name else {}
            return stack.enter_context(httpx.Client(base_url=address, headers=headers, verify=False, timeout=60))

        make.address, make.engine, make.keys = address, engine, keys
        yield make


@pytest.fixture
def client_with_key():
    """Makes a client of the front end at an address, with the key of a name."""

    def make(address, keys, name):
        headers = {"Authorization": f"Bearer {keys[name]}"}
        return httpx.Client(base_url=address, headers=headers, verify=False, timeout=60)

    return make
