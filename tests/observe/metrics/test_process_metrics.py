"""The processes of a server are found by their titles; with real processes."""

import subprocess
import sys

import psutil

from noria.observe.metrics.process_metrics import process_metrics, process_name

SUPERVISOR = """
import setproctitle, subprocess, sys
setproctitle.setproctitle("noria supervisor")
engine = (
    "import setproctitle, time; setproctitle.setproctitle('noria engine engine-0'); "
    "print('up', flush=True); time.sleep(60)"
)
child = subprocess.Popen([sys.executable, "-c", engine], stdout=subprocess.PIPE)
child.stdout.readline()
stranger = subprocess.Popen(["sleep", "60"])
frontend = (
    "import setproctitle; setproctitle.setproctitle('noria frontend frontend-1'); "
    "from noria.observe.metrics.exposition import exposition; print(exposition()[0].decode())"
)
print(subprocess.run([sys.executable, "-c", frontend], capture_output=True, text=True, check=True).stdout)
child.kill()
stranger.kill()
"""


def test_a_front_end_reports_all_processes_of_its_server_and_no_others():
    run = subprocess.run([sys.executable, "-c", SUPERVISOR], capture_output=True, text=True, check=True, timeout=120)
    lines = [line for line in run.stdout.splitlines() if line.startswith("noria_process_resident_memory_bytes{")]
    assert {line.partition('"')[2].partition('"')[0] for line in lines} == {"supervisor", "engine-0", "frontend-1"}
    assert all(float(line.split()[-1]) > 1e6 for line in lines)


def test_a_process_that_has_ended_has_no_name():
    with subprocess.Popen(["sleep", "60"]) as child:
        process = psutil.Process(child.pid)
        child.kill()
    assert process_name(process) is None


def test_an_unsupervised_process_reports_itself():
    families = {family.name: family for family in process_metrics()}
    (sample,) = families["noria_process_start_time_seconds"].samples
    assert sample.value == psutil.Process().create_time()
    assert families["noria_machine_cores"].samples[0].value >= 1
    assert families["noria_machine_memory_bytes"].samples[0].value > 1e8
