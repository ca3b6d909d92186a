"""Engine processes with real models mount a second version while they serve."""

import os
import shutil
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from encoders import make_encoder, open_exported, sentence_transformer
from engine_client import Client
from noria.config import EngineConfig
from noria.models.catalog import open_model
from noria.protocol.messages import (
    EngineLoad,
    EngineState,
    Finished,
    Hello,
    ImageDone,
    Mount,
    MountResult,
    Progress,
    Unmount,
    deserialize_from_engine,
)
from noria.protocol.process_signals import STOP_SIGNAL
from noria.protocol.tasks import EngineTask
from noria.protocol.transport import unpack
from noria.testing.fake_encoder import make_text_request
from noria.testing.requests import make_image_request
from waiting import TIMEOUT_S

pytestmark = pytest.mark.slow  # each starts an engine: 20 s


def change_weights(file, name):
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    tensors[name] += 0.5
    save_file(tensors, file, metadata={"format": "pt"})


class Served:
    """An engine process and a client that has one request in flight, all the time."""

    def __init__(self, folder, spec, make_request):
        self.make_request, self.num_sent, self.results, self.models = make_request, 0, [], ()
        # Beside other tests, which use all cores, a load at niceness 19 takes minutes.
        address, config = f"ipc://{folder}/engine", EngineConfig(devices=("cpu",), slots=2, threads=1, mount_niceness=5)
        journal = str(folder / "in-flight")
        task = EngineTask(config, (spec,), "cpu", address, "engine-0", journal, parent_pid=os.getpid())
        command = [sys.executable, "-m", "noria.engine.process", msgspec.json.encode(task).decode()]
        self.process = subprocess.Popen(command)
        self.client = Client(address)
        self.client.send(Hello("client"))
        while not self.models:
            self.next_message()

    def next_message(self):
        """Read a message; keep what it says of models and results."""
        for content, data in unpack(self.client.socket.recv_multipart()):
            match message := deserialize_from_engine(content):
                case EngineState():
                    self.models = message.models
                case ImageDone():
                    self.results.append(data)
                case Finished():
                    if data:
                        self.results.append(data)
                    self.is_served = True
                case MountResult():
                    self.changes.append(message)
                case Progress() | EngineLoad():
                    pass
                case _:
                    pytest.fail(str(message))

    def serve(self, **version):
        """Serve one request; return its result."""
        self.is_served, self.num_sent = False, self.num_sent + 1
        self.client.send(self.make_request(f"r{self.num_sent}", **version))
        while not self.is_served:
            self.next_message()
        return self.results[-1]

    def change(self, message):
        """Serve requests until a change of the models has been made."""
        self.changes, first = [], len(self.results)
        self.client.send(message)
        while not self.changes:
            self.serve()
        return self.changes[0].error, self.results[first:]

    def change_alone(self, message):
        """Make a change of the models while no request can be served; return why it failed."""
        self.changes = []
        self.client.send(message)
        while not self.changes:
            self.next_message()
        return self.changes[0].error

    def close(self):
        self.client.close()
        self.process.terminate()  # is for the supervisor
        self.process.send_signal(STOP_SIGNAL)
        assert self.process.wait(TIMEOUT_S) == 0


@pytest.fixture
def serve(tmp_path):
    made = []

    def start(*arguments):
        made.append(Served(tmp_path, *arguments))
        return made[-1]

    yield start
    for each in made:
        each.close()


def difference(first, second, dtype=np.uint8):
    return np.abs(np.frombuffer(first, dtype).astype(float) - np.frombuffer(second, dtype)).max()


def test_images_stay_the_same_while_a_second_version_comes_and_goes(serve, bundled_folder, tmp_path):
    spec = open_model(str(bundled_folder))
    folder = tmp_path / "newer"
    shutil.copytree(bundled_folder, folder)
    change_weights(folder / "unet/diffusion_pytorch_model.safetensors", "conv_in.bias")
    newer = open_model(str(folder))
    assert newer.name == spec.name

    def make_request(name, version=spec.fingerprint):
        request = make_image_request(name, spec.name, inference_steps=4, seed=11)
        return msgspec.structs.replace(request, model_version=version)

    engine = serve(spec, make_request)
    before = engine.serve()
    error, images = engine.change(Mount("mount", newer))
    assert (error, [each.key for each in engine.models]) == ("", [spec.key, newer.key])
    assert images
    other = engine.serve(version=newer.fingerprint)
    assert difference(before, other) > 1
    assert difference(before, engine.serve(version="")) <= 1
    error, more = engine.change(Unmount("unmount", newer.name, newer.fingerprint))
    assert (error, [each.key for each in engine.models]) == ("", [spec.key])
    assert max(difference(before, image) for image in [*images, *more, engine.serve()]) <= 1

    assert engine.change_alone(Mount("swap", newer, (spec.key,))) == ""
    assert [each.key for each in engine.models] == [newer.key]
    assert difference(other, engine.serve(version=newer.fingerprint)) <= 1
    assert engine.change_alone(Mount("swap back", spec, (newer.key,))) == ""
    assert difference(before, engine.serve()) <= 1

    weights = folder / "vae/diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    error, images = engine.change(Mount("damaged", newer))
    assert "truncated" in error
    assert [each.key for each in engine.models] == [spec.key]
    assert max(difference(before, image) for image in [*images, engine.serve()]) <= 1
    assert "truncated" in engine.change_alone(Mount("damaged swap", newer, (spec.key,)))
    assert [each.key for each in engine.models] == [spec.key]
    assert difference(before, engine.serve()) <= 1


def test_embeddings_stay_the_same_while_a_second_version_is_exported_and_mounted(serve, tmp_path):
    spec = open_exported(str(make_encoder(tmp_path / "older", **sentence_transformer())))
    folder = make_encoder(tmp_path / "newer", **sentence_transformer())
    change_weights(folder / "model.safetensors", "embeddings.LayerNorm.bias")
    newer = msgspec.structs.replace(open_model(str(folder)), name=spec.name)  # not exported yet

    def make_request(name, version=spec.fingerprint):
        return make_text_request(name, [1, 7, 2], model=spec, model_version=version)

    engine = serve(spec, make_request)
    before = engine.serve()
    error, vectors = engine.change(Mount("mount", newer))
    assert (error, [each.key for each in engine.models]) == ("", [spec.key, newer.key])
    assert len(vectors) > 10
    assert difference(before, engine.serve(version=newer.fingerprint), "<f4") > 1e-3
    error, more = engine.change(Unmount("unmount", newer.name, newer.fingerprint))
    assert (error, [each.key for each in engine.models]) == ("", [spec.key])
    assert max(difference(before, vector, "<f4") for vector in [*vectors, *more, engine.serve()]) < 1e-6
    assert engine.change_alone(Mount("swap", newer, (spec.key,))) == ""
    assert difference(before, engine.serve(version=newer.fingerprint), "<f4") > 1e-3
    assert engine.change_alone(Mount("swap back", spec, (newer.key,))) == ""
    assert difference(before, engine.serve(), "<f4") < 1e-6
