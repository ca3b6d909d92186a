"""The settings of jobs, asynchronous requests: their database, results, limits and webhooks."""

from typing import Annotated

from msgspec import Meta, Struct

from noria.config.auto import Auto


class JobsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How jobs (asynchronous requests) are stored and executed."""

    database: Annotated[
        str,
        Meta(
            description="`auto` is SQLite in `data_dir`, else `sqlite:///FILE` or `postgresql://USER@HOST/NAME` "
            "(a password goes into PGPASSWORD or PGPASSFILE: process listings show settings)"
        ),
    ] = "auto"
    database_timeout_s: Annotated[
        float,
        Meta(
            ge=1,
            le=600,
            description="how long PostgreSQL may take for a statement, or a request wait for a thread; then 503",
        ),
    ] = 10.0
    results: Annotated[
        str,
        Meta(
            description="folder for results, a path or an fsspec URL without a password; `auto` is `results` in "
            "`data_dir`"
        ),
    ] = "auto"
    ttl_s: Annotated[
        float,
        Meta(
            ge=60,
            le=31_536_000,
            description="finished jobs and results are deleted after this; jobs not started within this fail",
        ),
    ] = 86_400.0
    concurrency: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Auto,
        Meta(
            description="maximum jobs of a front end at once, of images and of texts; `auto` fills the engines twice "
            "with images, and is 4 of texts"
        ),
    ] = "auto"
    weight: Annotated[
        float,
        Meta(
            ge=0.01,
            le=100,
            description="weight of a key's jobs in the shares of an engine, beside 1 of a client that waits",
        ),
    ] = 0.25
    max_queued: Annotated[int, Meta(ge=0, description="maximum queued jobs; more are 429")] = 10_000
    max_queued_per_key: Annotated[
        Annotated[int, Meta(ge=1)] | Auto,
        Meta(description="maximum queued jobs of one API key; `auto` is a quarter of `jobs.max_queued`"),
    ] = "auto"
    max_job_texts: Annotated[int, Meta(ge=1, description="maximum texts of one job")] = 100_000
    max_job_bytes: Annotated[int, Meta(ge=1024, description="maximum size of the texts of one job")] = 67_108_864
    max_queued_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="maximum size of texts and start images of all jobs that have not ended, of one API key a "
            "quarter; more are 429",
        ),
    ] = 1_073_741_824
    max_pending_webhooks: Annotated[
        int,
        Meta(
            ge=1,
            description="maximum webhooks that wait for their receivers, of one client a quarter; more jobs with "
            "a webhook are 429",
        ),
    ] = 40_000
    webhook_secret_file: Annotated[
        str,
        Meta(
            description="file with the server's secret, `whsec_` and base64, from which those of API keys are "
            "derived (`noria key webhook-secret`); during a rotation its second line is the one before. `auto` is "
            "`webhook-secret` beside the SQLite file, created at the first start; not with PostgreSQL"
        ),
    ] = "auto"  # noqa: S105 - where it is, not what
    webhook_allow_private: Annotated[
        bool, Meta(description="allow webhooks to loopback, private and other non-public addresses")
    ] = False
