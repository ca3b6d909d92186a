"""The Dockerfile's steps, run without a container engine: on an overlay of this machine's root, which is thrown away.

The base image is this machine, with its Python, and the packages of this environment are linked into the image's, so
that pip finds them installed. pip installs what builds Noria, builds it from the files that the builder is sent, and
removes the tools again; the server then runs as the image's user, with the root file system read-only.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from container import DOCKERFILE, ROOT, image, stages

from linked_packages import link_packages
from noria.testing.server import reserve_port

# pip builds Noria, and the server starts: 30 s of CPU time
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENTER = """set -eu
mount -t tmpfs tmpfs {folder}
mkdir {folder}/upper {folder}/work {folder}/root
mount -t overlay overlay -o lowerdir=/,upperdir={folder}/upper,workdir={folder}/work {folder}/root
for each in dev {tmp}; do mount --rbind /$each {folder}/root/$each; done
mount -t proc proc {folder}/root/proc
exec chroot {folder}/root bash -eu {tmp}/steps
"""


def enter(script, tmp_path):
    """Run a shell script as root on an overlay of this machine's root; returns the finished process.

    Its mounts are in a namespace of its own, which ends with its processes: at the latest with this one.
    """
    (tmp_path / "steps").write_text(script)
    (tmp_path / "overlay").mkdir(exist_ok=True)
    command = [
        *("setpriv", "--pdeathsig", "KILL"),
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "bash",
        "-c",
        ENTER.format(folder=tmp_path / "overlay", tmp=tmp_path),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def overlays(tmp_path):
    if os.geteuid() or enter("true", tmp_path).returncode:
        pytest.skip("needs root, and overlays of the root file system")


def sent_files(folder):
    """Copy what .dockerignore lets through into `folder`."""
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        for file in ROOT.glob(line[1:]) if line.startswith("!") else ():
            target = folder / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(file, target, ignore=ignore) if file.is_dir() else shutil.copy(file, target)


def copied(arguments, context):
    *sources, target = arguments.split()
    paths = [f"{context}/{source}" + "/." * (ROOT / source).is_dir() for source in sources]
    return f"mkdir -p {target}; cp -r {' '.join(paths)} {target}"


def steps(context, packages):
    """Shell lines of the instructions before the image's user; a new environment also sees `packages`."""
    yield f"export PATH={sys.base_prefix}/bin:$PATH"
    for argument in re.findall(r"^ARG (\w+=.*)$", DOCKERFILE.read_text(), re.MULTILINE):
        yield f"export {argument}"
    for stage in stages(DOCKERFILE.read_text()):
        for instruction, arguments in stage.instructions:
            match instruction:
                case "WORKDIR":
                    yield f"mkdir -p {arguments}; cd {arguments}"
                case "ENV":
                    yield f"export {arguments}"
                case "COPY" if "--from=" not in arguments:  # here the stages share their files
                    yield copied(arguments, context)
                case "RUN":
                    yield arguments
                    if "-m venv" in arguments:
                        yield "/opt/noria/bin/pip uninstall --yes setuptools"  # Python 3.12 brings none
                        yield f"echo {packages} > $(echo /opt/noria/lib/python3*/site-packages)/linked.pth"


RUN = """
pip list --format freeze --path /opt/noria/lib/python3*/site-packages
for folder in {readable}; do
  while [ $folder != / ]; do chmod o+rx $folder; folder=$(dirname $folder); done
done
mount --bind /data /data
mount --rbind /tmp /tmp
mount -o remount,bind,ro /
as_user() {{
  setpriv --reuid {uid} --regid {gid} --clear-groups env -i {variables} "$@"
}}
as_user {command} &
until as_user {health} --ready; do kill -0 $!; sleep 1; done
as_user python {client}
"""
CLIENT = """import json, os, urllib.request
address = f"http://127.0.0.1:{os.environ['NORIA_FRONTEND_PORT']}/t2i"
body = json.dumps({"prompt": "a red ring"}).encode()
request = urllib.request.Request(address, body, {"content-type": "application/json"})
print(urllib.request.urlopen(request).headers["content-type"])
"""


@pytest.mark.usefixtures("overlays")
def test_the_built_image_draws_with_a_read_only_root(tmp_path):
    sent_files(tmp_path / "context")
    packages = tmp_path / "packages"
    extras = re.search(r"^ARG EXTRAS=(\S+)", DOCKERFILE.read_text(), re.MULTILINE)[1]
    link_packages(packages, [f"noria-serve[{extras}]"])
    (tmp_path / "client.py").write_text(CLIENT)
    uid, _, gid = image().one("USER").partition(":")
    with reserve_port() as port:
        variables = image().environment | {"NORIA_FRONTEND_PORT": port}
        run = RUN.format(
            readable=f"{sys.base_prefix} {sys.prefix} {tmp_path}",
            uid=uid,
            gid=gid,
            variables=" ".join(f"{name}={value}" for name, value in variables.items()),
            command=shlex.join(image().command),
            health=shlex.join(json.loads(image().one("HEALTHCHECK").partition("CMD ")[2])),
            client=tmp_path / "client.py",
        )
        done = enter("\n".join([*steps(tmp_path / "context", packages), run]), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    installed = set(re.findall(r"^([\w-]+)==", done.stdout, re.MULTILINE))
    assert installed == {"pip", "noria-serve"}  # what builds it is removed again
    assert done.stdout.endswith("image/png\n")
