"""Parts of `make gpu`: limits, what is skipped, and what a killed session leaves. Parts are real processes."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import msgspec
import psutil
import pytest

from noria.cli.main import build_parser
from noria.protocol.process_signals import die_with_parent
from noria_bench.gpu import checks, session
from noria_bench.gpu.parts import MAX_PART_S, Models, Part, make_parts
from noria_bench.gpu.session import PartResult, Session, digest_of_code, done_parts, read_session, run_parts
from noria_bench.targets import environments
from waiting import wait_until


def part(name, code="pass", **fields):
    return Part(name, "a title", ["-c", code], **{"estimate_s": 1.0, **fields})


def run(parts, folder, seconds=60.0, problems=None):
    document = Session({}, {})

    def make_result(part):
        return PartResult(part.name, "python …", "c0de", True, "CPU", "today")

    run_parts(
        parts, document, folder, make_result, problems or {}, time.monotonic() + seconds, lambda _: None, lambda: None
    )
    return {each.name: each for each in read_session(folder).parts}


def has_ended(pid):
    """Whether the process has ended; it may still be a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_part_that_fails_or_lacks_something_does_not_stop_the_next(tmp_path):
    parts = [
        part("fails", "print('why'); raise SystemExit(3)"),
        part("needs", needs=("triton",)),
        part("long", estimate_s=600.0),
        part("fine", "import noria_bench, sys; print(sys.flags.dont_write_bytecode)"),
    ]
    found = run(parts, tmp_path, problems={"triton": "it is not there"})
    assert {name: each.exit_status for name, each in found.items()} == {
        "fails": 3, "needs": None, "long": None, "fine": 0,
    }  # fmt: skip
    assert (found["needs"].reason, found["fails"].reason) == ("it is not there", "why")
    assert found["long"].reason.startswith("takes about 600 s, and ")
    assert (tmp_path / "fails.log").read_text() == "why\n"
    assert set(done_parts([read_session(tmp_path)], "c0de", "CPU", small=True)) == {"fine"}


def test_a_part_beyond_its_limit_is_interrupted_and_keeps_what_it_wrote(tmp_path):
    code = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    child.kill()
    print("wrote what it had", flush=True)
    sys.exit(130)
"""
    started_s = time.monotonic()
    found = run([part("slow", code, limit_s=3.0)], tmp_path)
    assert found["slow"].exit_status == 130 and time.monotonic() - started_s < 30
    pid, words = (tmp_path / "slow.log").read_text().split(maxsplit=1)
    assert words == "wrote what it had\n"
    wait_until(lambda: has_ended(int(pid)))


def test_a_part_that_ignores_the_interruption_is_killed_with_its_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "_KILL_GRACE_S", 0.5)
    code = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""
    found = run([part("stubborn", code, limit_s=3.0)], tmp_path)
    assert found["stubborn"].exit_status == -signal.SIGKILL
    pid = int((tmp_path / "stubborn.log").read_text())
    wait_until(lambda: has_ended(pid))


def test_results_of_other_code_on_another_device_or_of_another_size_are_not_done():
    done = PartResult("a", "…", "c0de", False, "H100", "today", 1.0, 0)
    sessions = [Session({}, {}, [done, msgspec.structs.replace(done, name="b", exit_status=1)])]
    assert set(done_parts(sessions, "c0de", "H100", small=False)) == {"a"}
    assert not done_parts(sessions, "other", "H100", small=False)
    assert not done_parts(sessions, "c0de", "H200", small=False)
    assert not done_parts(sessions, "c0de", "H100", small=True)


def test_the_digest_follows_the_code_alone(tmp_path):
    for folder in ("src/noria", "benchmarks/noria_bench", "docs"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").write_text("1")
    first = digest_of_code(tmp_path)
    (tmp_path / "docs/file").write_text("2")
    (tmp_path / "src/noria/__pycache__").mkdir()
    (tmp_path / "src/noria/__pycache__/a.pyc").write_text("2")
    assert digest_of_code(tmp_path) == first
    (tmp_path / "benchmarks/noria_bench/file").write_text("2")
    assert digest_of_code(tmp_path) != first


def test_no_part_takes_longer_than_three_minutes_and_a_rental_holds_the_first_ones():
    parts = make_parts(pathlib.Path("out"), Models("sd15", "encoder"), small=False)
    assert len({each.name for each in parts}) == len(parts)
    assert all(each.estimate_s <= each.limit_s <= MAX_PART_S == 180 for each in parts)
    assert [each.name for each in parts[:2]] == ["scenario2-noria", "scenario2-reference"]
    assert sum(each.estimate_s for each in make_parts(pathlib.Path("out"), Models("a", "b"), small=True)) <= 620
    page = (session.ROOT / "docs/benchmarks/gpu.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| `")]
    assert [(row[0].strip(" `"), float(row[-1])) for row in rows] == [(each.name, each.estimate_s) for each in parts]


@pytest.mark.parametrize("small", [True, False])
def test_the_benches_take_the_arguments_of_every_part(small, tmp_path):
    parser, _ = build_parser()
    benches = [each for each in make_parts(tmp_path, Models("bundled", "minilm"), small=small)
               if list(each.arguments[:2]) == ["-m", "noria_bench"]]  # fmt: skip
    assert len(benches) > 8
    for part in benches:
        parser.parse_args(["bench", *part.arguments[2:]])


def test_only_what_the_chosen_parts_need_is_checked(tmp_path, monkeypatch):
    imports = {"images": ("json", "no_such_module"), "texts": ("no_such_module",), "tests": ("json",)}
    monkeypatch.setattr(checks, "IMPORTS", imports)
    monkeypatch.setenv("TRITON_FOLDER", str(tmp_path))
    machine = checks.check_machine(tmp_path, {"images", "tests", "triton"}, small=True)
    assert set(machine.problems) == {"images", "triton"}
    assert machine.problems["images"].startswith("no_such_module cannot be imported: ModuleNotFoundError")
    assert machine.problems["triton"].startswith(f"TRITON_FOLDER is {tmp_path}, which has no pytriton")


SCRIPT = """
import pathlib, sys, time
from noria_bench.gpu import command
from noria_bench.gpu.checks import Machine
from noria_bench.gpu.parts import Part

work = pathlib.Path(sys.argv[1])

def make_parts(out, models, *, small):
    count = "import pathlib; pathlib.Path(%r).open('a').write('x')"
    wait = count + "; import time; time.sleep(0 if pathlib.Path(%r).exists() else 600)"
    return [
        Part("first", "", ["-c", count % str(work / "first")], 1.0),
        Part("second", "", ["-c", wait % (str(work / "second"), str(work / "go"))], 1.0),
        Part("third", "", ["-c", count % str(work / "third")], 1.0),
    ]

command.make_parts = make_parts
command.check_machine = lambda folder, needs, small: Machine(None, {})
sys.exit(command.main(["--small", "--out", str(work / "out"), *sys.argv[2:]]))
"""


def test_a_session_that_is_killed_goes_on_where_it_was(tmp_path):
    def start(*options):
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    with start() as killed:
        wait_until((tmp_path / "second").exists)
        (running,) = psutil.Process(killed.pid).children()
        killed.kill()
    wait_until(lambda: has_ended(running.pid))
    (tmp_path / "go").touch()
    with start() as again:
        _, stderr = again.communicate(timeout=120)
    assert again.returncode == 0, stderr.decode()
    counts = {name: len((tmp_path / name).read_text()) for name in ("first", "second", "third")}
    assert counts == {"first": 1, "second": 2, "third": 1}
    assert b"first: done on" in stderr
    options = ("--after", str(tmp_path / "out"), "--archive", str(tmp_path / "later.tar.gz"))
    with start("--out", str(tmp_path / "later"), *options) as later:
        printed, _ = later.communicate(timeout=120)
    assert later.returncode == 0
    with tarfile.open(tmp_path / "later.tar.gz") as archive:
        assert "later/report.md" in archive.getnames()
    assert {name: len((tmp_path / name).read_text()) for name in counts} == counts
    assert b"| first | ended with status 0 after" in printed and b"not measured" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--part scenario3", "'scenario3'; parts are scenario2-noria, scenario2-reference"),
        ("--budget nan", "--budget is nan; allowed are 1 to 86400 seconds"),
        ("--after {folder}", "has no session.json; name a folder of results of make gpu"),
        ("--after {folder}/bad", "session.json is no session of make gpu"),
        ("--out {folder}/bad/session.json", "cannot be written"),
        (
            "--archive {folder}/bad/session.json/a.tar.gz",
            "the folder of --archive, {folder}/bad/session.json cannot be written",
        ),
    ],
)
def test_a_wrong_argument_is_rejected_before_anything_runs(words, message, tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "session.json").write_text("{}")
    command = [sys.executable, "-m", "noria_bench.gpu", "--small", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, *words.format(folder=tmp_path).split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and message.format(folder=tmp_path) in done.stderr and "Traceback" not in done.stderr


# A namespace's loopback is down at first.
WITHOUT_NETWORK = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def has_network_namespaces():
    """Whether this user may start a process without a network, and give it a loopback device."""
    if os.getuid() != 0 or None in (shutil.which("unshare"), shutil.which("ip")):
        return False
    return subprocess.run([*WITHOUT_NETWORK, "true"], capture_output=True, check=False).returncode == 0


def link_packages(folder):
    """Links to this environment's packages, but for Noria itself and what a machine with a GPU may lack."""
    folder.mkdir()
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    for entry in pathlib.Path(packages).iterdir():
        if not entry.name.startswith(("noria", "openvino", "locust", "__pycache__")):
            (folder / entry.name).symlink_to(entry)
    return folder


# Serves models by five servers, without a network and without an installation of Noria: minutes.
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_parts_run_without_a_network_from_packages_in_a_folder_of_the_path(tmp_path):
    if not has_network_namespaces():
        pytest.skip("a network namespace needs root, unshare and ip")
    wheel = [environments.REQUIREMENTS["triton"], "--no-deps", "--no-compile", "--target", str(tmp_path / "triton")]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wheel], check=True)
    command = [sys._base_executable, "-m", "noria_bench.gpu", "--small", "--budget", "1700"]
    parts = ["--part", "scenario2-noria,scenario2-triton-0ms,encoders-triton"]
    folders = ["--out", str(tmp_path / "out"), "--models", str(tmp_path / "models")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(["src", "benchmarks", str(link_packages(tmp_path / "site"))]),
        "TRITON_FOLDER": str(tmp_path / "triton"),
    }
    done = subprocess.run(
        [*WITHOUT_NETWORK, *command, *parts, *folders], cwd=session.ROOT, env=environment, capture_output=True,
        text=True, check=False, preexec_fn=die_with_parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert {each.exit_status for each in read_session(tmp_path / "out").parts} == {0}
    for target in ("noria", "triton-0ms"):  # none failed, and of the images that were checked none is wrong
        assert re.search(rf"^\| {target} \|.*\| 0 \| 0 of [1-9]\d* \|$", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^\| triton-best \| [1-9].*\| 0 \|", done.stdout, re.MULTILINE), done.stdout
