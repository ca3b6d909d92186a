"""A front end's link: it follows the routes in the file, and the registrar gets its reports, also after a restart."""

import asyncio

import msgspec
import zmq
import zmq.asyncio

from noria.canary.windows import FrontendReport
from noria.frontend.engines.pool import EnginePool
from noria.frontend.engines.registrar_link import RegistrarLink
from noria.frontend.engines.submission import Submission
from noria.protocol.routes import Route, Routes, Target
from noria.registry.deployments.routes_file import write_routes
from waiting import wait_until_async

TARGET = Target(2, "shapes@2", "sha256:2", "bbbbbbbbbbbb", ())


def test_routes_are_followed_and_reported(tmp_path, folder):
    file, address = tmp_path / "routes.json", f"ipc://{folder}/registrar"
    write_routes(file, Routes(1))
    submission = Submission(EnginePool([]))

    async def scenario():
        link = RegistrarLink(submission, "frontend-0", file, address)
        assert submission.versions.generation == 1  # before it serves
        running = asyncio.create_task(link.run())
        try:
            await receive_until(address, lambda report: report.generation == 1)
            file.write_text("damaged")
            write_routes(file, Routes(2, (Route("tiny", None, TARGET, 0.5),)))
            report = await receive_until(address, lambda report: report.generation == 2)
            assert (report.frontend, report.in_flight, report.ended) == ("frontend-0", (), ())
            assert submission.versions.versions_beside("tiny") == {TARGET.fingerprint}
            write_routes(file, Routes(2))  # the canary has failed while the registry is away
            await wait_until_async(lambda: not submission.versions.versions_beside("tiny"))
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


async def receive_until(address, condition) -> FrontendReport:
    """Be the registrar until a report is as wanted."""
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        async with asyncio.timeout(60):
            while not condition(report := msgspec.msgpack.decode(await socket.recv(), type=FrontendReport)):
                pass
        return report


def test_a_damaged_file_changes_nothing(tmp_path):
    file = tmp_path / "routes.json"
    write_routes(file, Routes(4, (Route("tiny", None, TARGET, 0.5),)))
    submission = Submission(EnginePool([]))
    link = RegistrarLink(submission, "frontend-0", file, "ipc://unused")
    file.write_text("damaged")
    link.read_routes()
    assert submission.versions.generation == 4
    file.unlink()
    link.read_routes()
    assert submission.versions.versions_beside("tiny") == {TARGET.fingerprint}
