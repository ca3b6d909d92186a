"""The job service of a front end."""

import asyncio
import contextlib
import re
import shutil
import time

import pytest
import sqlalchemy as sa

import noria.jobs.results
import noria.jobs.service
from databases import on_both
from jobs.fake_executor import FakeExecutor
from noria.config import JobsConfig
from noria.errors import InvalidField, JobNotFound, JobsUnavailable, RateLimited
from noria.jobs.database.schema import deliveries
from noria.jobs.service import JobService, clean_up
from noria.jobs.stored_request import pack_start_image
from noria.jobs.webhooks.signing import open_secrets
from noria.jobs.worker import JobOutput
from noria.observe.metrics.declarations import REGISTRY


class TwoImagesExecutor(FakeExecutor):
    async def execute(self, record, report_progress, log_record):
        return JobOutput([b"first", b"second"], "webp", {})


def in_database(database, folder):
    """The settings for jobs in `database`, which other servers may share."""
    open_secrets(JobsConfig(), folder)
    return JobsConfig(database=database, webhook_secret_file=str(folder / "webhook-secret"))


@contextlib.asynccontextmanager
async def serving(config, folder, clock=time.time):
    service = JobService(config, folder, "server/frontend-0", clock)
    await service.start(TwoImagesExecutor())
    try:
        yield service
    finally:
        await service.stop()


async def wait_until_ended(service, job_id):
    async with asyncio.timeout(60):
        while (record := await service.get(job_id)).completed_at is None:  # noqa: ASYNC110 - polls a database
            await asyncio.sleep(0.02)
    return record


@on_both
async def test_a_job_is_accepted_executed_and_read(database, tmp_path, job):
    async with serving(in_database(database, tmp_path), tmp_path) as service:
        record, created = await service.accept(job())
        assert created
        assert (await wait_until_ended(service, record.id)).status == "succeeded"
        assert await service.image(record.id, 1) == (b"second", "webp")
        with pytest.raises(JobNotFound, match="0 to 1"):
            await service.image(record.id, 2)
        assert [listed.id for listed in (await service.page(5, None)).records] == [record.id]
        assert [event.seq for event in await service.events(record.id, 1)] == [2, 3]
        other, _ = await service.accept(job(model="other"))
        assert (await service.cancel(other.id)).status == "canceled"
        with pytest.raises(JobNotFound, match="canceled"):
            await service.image(other.id, 0)


@on_both
async def test_an_erased_job_is_gone_with_its_images_and_pending_webhooks(database, tmp_path, job):
    def num_pending():
        with service._store._engine.connect() as connection:
            return connection.scalar(sa.select(sa.func.count()).select_from(deliveries))

    async with serving(in_database(database, tmp_path), tmp_path) as service:
        new = job(webhook="https://127.0.0.1:1/")  # to which nothing is delivered
        record, _ = service._store.accept(new, 9, time.time())
        await wait_until_ended(service, record.id)
        assert list((tmp_path / "results").rglob("*.webp")) and num_pending()
        await service.erase(record.id)
        with pytest.raises(JobNotFound):
            await service.get(record.id)
        assert not list((tmp_path / "results").rglob("*.webp"))
        assert num_pending() == 0


async def test_a_jobs_start_image_is_kept_until_its_end_and_a_spool_is_in_a_private_folder(tmp_path, job):
    database, files = f"sqlite:///{tmp_path}/jobs.sqlite", str(tmp_path / "results")
    open_secrets(JobsConfig(), tmp_path)
    secret = str(tmp_path / "webhook-secret")
    data = tmp_path / "data"
    async with serving(JobsConfig(database=database, results=files, webhook_secret_file=secret), data) as service:
        waiting, _ = await service.accept(job(model="other", chunks=[pack_start_image(b"pixels")], image_bytes=6))
        assert await service.start_image(waiting.id) == b"pixels"
        await service.cancel(waiting.id)
        with pytest.raises(JobNotFound, match="has ended"):
            await service.start_image(waiting.id)
        async with service.spool() as (file, offload):
            await offload(file.write, b"text")
        assert data.stat().st_mode & 0o777 == 0o700


async def test_a_webhook_to_a_private_address_is_rejected_at_acceptance(tmp_path, job):
    async with serving(JobsConfig(), tmp_path) as service:
        with pytest.raises(InvalidField, match="not public"):
            await service.accept(job(webhook="http://127.0.0.1:9/"))
        assert (await service.page(5, None)).records == []


async def test_jobs_and_their_files_are_deleted_after_their_time_to_live(tmp_path, job):
    ahead = 0.0
    async with serving(JobsConfig(ttl_s=60), tmp_path) as service:
        record, _ = await service.accept(job())
        await wait_until_ended(service, record.id)
    ahead = 61.0
    async with serving(JobsConfig(ttl_s=60), tmp_path, lambda: time.time() + ahead) as service:
        async with asyncio.timeout(60):
            while (await service.page(1, None)).records:  # noqa: ASYNC110 - polls a thread
                await asyncio.sleep(0.02)
        with pytest.raises(JobNotFound):
            await service.get(record.id)
    assert list((tmp_path / "results").iterdir()) == []


def test_a_folder_that_cannot_be_deleted_blocks_no_other_deletion(store, tmp_path, job, caplog):
    class Results(noria.jobs.results.ResultStore):
        def delete(self, job_id):
            if job_id in undeletable:
                raise PermissionError(13, "Permission denied", job_id)
            super().delete(job_id)

    names = [store.accept(job(), 1000, 0.0)[0].id for _ in range(6)]
    for number, name in enumerate(names):
        store.cancel(name, float(number))
    undeletable = {names[0], names[1], names[3]}
    results = Results("auto", tmp_path)
    clean_up(store, results, 60.0, 1000.0, batch_size=2)
    assert {record.id for record in store.page(10).records} == undeletable
    assert "the results of 3 ended jobs" in caplog.text
    assert "Permission denied" in caplog.text
    undeletable = set()
    clean_up(store, results, 60.0, 1000.0, batch_size=2)
    assert store.page(10).records == []


async def test_a_deleted_image_is_not_found(tmp_path, job):
    async with serving(JobsConfig(), tmp_path) as service:
        record, _ = await service.accept(job())
        await wait_until_ended(service, record.id)
        (tmp_path / "results" / record.id / "1-0.webp").unlink()
        with pytest.raises(JobNotFound, match="no longer exists"):
            await service.image(record.id, 0)


def overwrite(folder):
    for file in folder.glob("jobs.sqlite*"):
        with file.open("r+b") as opened:  # not shortened: SQLite has mapped one into memory
            opened.write(bytes(file.stat().st_size))


def delete(folder):
    for file in folder.glob("jobs.sqlite*"):
        file.unlink()


def delete_the_log_of_writes(folder):
    (folder / "jobs.sqlite-wal").unlink()


def restore(folder):
    shutil.copy(folder / "jobs.sqlite", folder / "backup")
    (folder / "backup").rename(folder / "jobs.sqlite")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (overwrite, "malformed|not a database|disk I/O error"),
        (delete, "deleted or replaced|disk I/O error"),
        (delete_the_log_of_writes, "deleted or replaced|disk I/O error"),
        (restore, "deleted or replaced|disk I/O error"),
    ],
)
async def test_a_damaged_database_accepts_no_job_and_its_reason_is_logged_once_a_minute_and_told(
    damage, reason, tmp_path, job, caplog
):
    async with serving(JobsConfig(), tmp_path) as service:
        await service.accept(job())
        assert service.outage is None
        damage(tmp_path)
        for _ in range(2):
            with pytest.raises(JobsUnavailable, match="database does not answer"):
                await service.accept(job())
        assert re.search(f"the jobs' database: .*({reason})", service.outage)
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert re.search(f"the jobs' database cannot be used: .*({reason})", warning.getMessage())


@pytest.mark.parametrize(("per_key", "most"), [("auto", 2), (3, 3)])
async def test_a_key_queues_a_quarter_or_as_many_jobs_as_are_set(tmp_path, job, per_key, most):
    async with serving(JobsConfig(max_queued=5, max_queued_per_key=per_key), tmp_path) as service:
        for _ in range(most):
            await service.accept(job(model="other", made_by="alice"))
        with pytest.raises(RateLimited):
            await service.accept(job(model="other", made_by="alice"))


async def test_jobs_are_counted_once_at_acceptance_and_once_at_their_end(database, tmp_path, job, caplog):
    def sample(name, **labels):
        return REGISTRY.get_sample_value(name, labels) or 0.0

    statuses = ("succeeded", "canceled")
    before = [sample("noria_jobs_accepted_total"), *(sample("noria_jobs_total", status=s) for s in statuses)]
    async with serving(in_database(database, tmp_path), tmp_path) as service:
        record, _ = await service.accept(job(idempotency_key="once"))
        await service.accept(job(idempotency_key="once"))
        await wait_until_ended(service, record.id)
        await service.cancel(record.id)  # has ended
        other, _ = await service.accept(job(model="other"))
        with caplog.at_level("INFO", "noria.jobs"):
            await service.cancel(other.id, by="alice")
            await service.cancel(other.id)
    (line,) = [each for each in caplog.records if each.noria_fields["event"] == "job_cancelled"]
    assert (line.getMessage(), line.noria_fields["key"]) == (f"{other.id} is cancelled", "alice")
    after = [sample("noria_jobs_accepted_total"), *(sample("noria_jobs_total", status=s) for s in statuses)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 1, 1]
