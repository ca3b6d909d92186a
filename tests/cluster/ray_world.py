"""A Ray cluster of three nodes on this machine, with Noria on it; run by Ray's own Python. Commands come on stdin.

remove_node      a node that has an engine replica ends, with all its processes
drain_node       a node that has an engine replica drains, as before a spot machine's end; another node replaces it
status           replies with the running replicas of each deployment, and with the cluster's address
deploy           another application with other settings: replies with why it does not serve, and which ones are left
stop             ends all

After each comes a JSON object of arguments.
"""

import json
import logging
import os
import pathlib
import subprocess
import sys

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client

from noria.cluster import app
from noria.cluster.serving import deployed, failures
from noria.errors import ConfigError

replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray prints the logs of all processes
settings, port = json.loads(sys.argv[1]), int(sys.argv[2])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
# Each node has a home of its own, and so may `~/…`.
workers = [cluster.add_node(num_cpus=2, env_vars={"HOME": f"{os.getcwd()}/home-{number}"}) for number in range(2)]
ray.init(address=cluster.address, logging_level=logging.WARNING)
serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")


def say(**reply):
    print(json.dumps(reply), file=replies, flush=True)


def drain(node):
    """Begin the drain of a node, which ends by itself in 100 s; returns when Ray has accepted it."""
    ray_command = pathlib.Path(sys.executable).parent / "ray"
    arguments = ["--node-id", node.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    arguments += ["--address", cluster.address, "--deadline-remaining-seconds", "100"]
    subprocess.run([ray_command, "drain-node", *arguments], check=True, stdout=subprocess.DEVNULL)


def engine_nodes():
    """The nodes with an engine of the image model, workers that can go."""
    deployments = _get_global_client().get_serve_details()["applications"]["noria"]["deployments"]
    nodes = {each["node_id"] for each in deployments["engine-bundled"]["replicas"]}
    return [each for each in workers if each.node_id in nodes]


def running():
    deployments = serve.status().applications["noria"].deployments
    return {name: each.replica_states.get("RUNNING", 0) for name, each in deployments.items()}


def deploy(changes, until_given_up):
    try:
        with deployed(app(settings | changes), "other", "/other"):
            reasons = failures("other")
            return " ".join(reasons) if until_given_up else next(reasons)
    except ConfigError as error:
        return error.message


serve.run(app(settings), name="noria")
say(ready=True)
for line in sys.stdin:
    command, _, arguments = line.strip().partition(" ")
    match command:
        case "remove_node":
            node = engine_nodes()[-1]
            workers.remove(node)
            cluster.remove_node(node, allow_graceful=False)
            say(removed=True)
        case "drain_node":
            node = engine_nodes()[0]
            workers.remove(node)
            workers.append(cluster.add_node(num_cpus=2))
            drain(node)
            say(drained=True)
        case "status":
            say(running=running(), address=cluster.address)
        case "deploy":
            say(error=deploy(**json.loads(arguments)), applications=sorted(serve.status().applications))
        case "stop":
            break
ray.shutdown()
cluster.shutdown()  # at once: behind HAProxy, Ray Serve lets a front end drain for 30 s
