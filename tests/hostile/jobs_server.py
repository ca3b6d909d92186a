"""Front ends with keys, jobs and a fake engine, and what their attackers need."""

import contextlib

import httpx
import sqlalchemy as sa

from frontend.conftest import serving
from noria.config import Config, FrontendConfig, JobsConfig
from noria.frontend.access.api_keys import key_digest
from noria.jobs.webhooks.signing import format_secret
from waiting import wait_until

NAMES = ("mallory", "alice")  # the attacker and another caller; their keys are `NAME's key`


@contextlib.contextmanager
def serving_jobs(new_engine, tmp_path, **jobs):
    """A client for each of `NAMES`, and the engine, which answers nothing yet."""
    keys = tmp_path / "keys.toml"
    tables = (f'[[key]]\nname = "{name}"\nsha256 = "{key_digest(f"{name}s-key".encode())}"\n' for name in NAMES)
    keys.write_text("".join(tables))
    secret = tmp_path / "webhook-secret"
    secret.write_text(format_secret(bytes(32)))
    config = Config(
        data_dir=str(tmp_path / "data"),
        frontend=FrontendConfig(max_images=4, max_steps=100, drain_s=1, api_keys_file=str(keys)),
        jobs=JobsConfig(webhook_secret_file=str(secret), **jobs),
    )
    engine = new_engine()
    engine.never_answers = True
    with contextlib.ExitStack() as stack:
        address, _ = stack.enter_context(serving(config, engine))
        clients = [stack.enter_context(_client(address, name)) for name in NAMES]
        wait_until(lambda: clients[0].get("/readyz").status_code == 200)
        yield *clients, engine


def _client(address, name):
    limits = httpx.Limits(max_connections=None)
    headers = {"X-Api-Key": f"{name}s-key"}
    return httpx.Client(base_url=address, timeout=120, verify=False, headers=headers, limits=limits)


def post_job(client, **settings):
    return client.post("/v1/jobs", json={"input": {"prompt": "p", "seed": 7} | settings})


@contextlib.contextmanager
def counted_statements():
    """The statements that this process sends to databases within the context."""
    statements = []

    def count(_connection, _cursor, statement, *_):
        statements.append(statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", count)
    try:
        yield statements
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", count)
