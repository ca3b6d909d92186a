"""A registry as a server has it after a month: versions, a promoted canary, one that was rolled back, one in its ramp.

Its texts are hostile: names, reasons and parameters have HTML in them, which pages must show as text.
"""

import json
import random
import uuid
from typing import Any

from sqlalchemy import Engine

from noria.canary import judge, ramp
from noria.canary.arm import Arm
from noria.canary.judge import JudgeSettings, JudgeState
from noria.canary.ramp import parse_ramp
from noria.registry.changes import Change
from noria.registry.deployments import states as rules
from noria.registry.deployments.states import Deployment
from noria.registry.deployments.store import DeploymentStore
from noria.registry.lineage.openlineage import parse_event
from noria.registry.lineage.run_events import MODELS_NAMESPACE, RunId, model_ref, run_event
from noria.registry.lineage.store import LineageStore
from noria.registry.manifest import Manifest
from noria.registry.model_folder import ModelFolder
from noria.registry.model_store import ModelStore

HOSTILE = '<img src=x onerror="window.hacked=1">'
REGISTRAR = "registrar of gpu-7"
WINDOW_S = 2.0
DAY_S = 86400.0


def model_folder(number: int, name: str = "shapes", kind: str = "diffusion") -> ModelFolder:
    """A folder of a model, whose files nobody has."""
    url = f"file:///srv/models/{name}-{number}"
    lines = "".join(f"{random.Random(f'{name}{number}{k}').randbytes(32).hex()}  part-{k}\n" for k in range(9))
    fingerprint = f"{random.Random(f'{name}{number}').randrange(16**12):012x}"
    return ModelFolder(url.removeprefix("file://"), url, kind, fingerprint, Manifest(lines, 31_400_000 + number), [])


def fill(engine: Engine, now: float) -> None:
    """Fill an empty registry with what happened until `now`."""
    models, deployments = ModelStore(engine), DeploymentStore(engine)
    for number, (days, by, why) in enumerate(
        [
            (30, "ann", "first training"),
            (24, "bob", "wrong crop"),
            (20, "ann", "longer training"),
            (9, "ci", HOSTILE),
            (2, "ann", "more latents"),
        ],
        1,
    ):
        models.add("shapes", model_folder(number), Change(now - days * DAY_S, by, why))
    models.add("minilm", model_folder(1, "minilm", "encoder"), Change(now - 21 * DAY_S, "ann"), alias="prod")
    models.remove("shapes@2", Change(now - 23 * DAY_S, "bob", "its crop was wrong"))
    models.set_alias("shapes@3", "prod", Change(now - 18 * DAY_S, "ann"))
    models.set_alias("shapes@5", "next", Change(now - 2 * DAY_S, "ann"))
    models.tag("shapes@5", ["stage=test"], Change(now - 2 * DAY_S, "ann"))
    _record_lineage(engine, models, now)
    serve_at_once(deployments, "t2i", "shapes@1", Change(now - 29 * DAY_S, "ann", "first"))
    serve_at_once(deployments, "embed", "minilm@1", Change(now - 21 * DAY_S, "bob", "for search"))
    run_canary(deployments, "shapes@3", "5,25,50,100 every 10m", Change(now - 18 * DAY_S, "ann", "sharper"), 3600.0)
    run_canary(
        deployments, "shapes@4", "5,25,50,100 every 10m", Change(now - 9 * DAY_S, "ci", HOSTILE), 3600.0, errors=0.06
    )
    failed, _ = deployments.deploy(
        "embed", "minilm@1", parse_ramp("10"), JudgeSettings(), Change(now - 3 * DAY_S, "bob", "")
    )
    deployments.try_lease(failed.id, REGISTRAR, now - 3 * DAY_S, 10.0)
    why = "its files changed: /srv/models/minilm-1/part-3"
    deployments.fail(failed.id, REGISTRAR, Change(now - 3 * DAY_S + 4.0, REGISTRAR, why))
    begun = Change(now - 1110.0, "ann", "more latents, fewer steps")
    run_canary(deployments, "shapes@5", "5,25,50,100 every 10m", begun, 1100.0)


def serve_at_once(store: DeploymentStore, endpoint: str, version: str, change: Change) -> None:
    """Deploy a version that is loaded in six seconds."""
    deployment, _ = store.deploy(endpoint, version, None, JudgeSettings(), change)
    store.try_lease(deployment.id, REGISTRAR, change.at, 1e6)
    store.mounted(deployment.id, REGISTRAR, Change(change.at + 6.0, REGISTRAR))


def run_canary(
    store: DeploymentStore, version: str, plan: str, change: Change, seconds: float, errors: float = 0.003
) -> Deployment:
    """Run a canary of t2i on made-up traffic of 12 requests a second, until it ends or for so many seconds."""
    rng, settings = random.Random(version), JudgeSettings()
    deployment, _ = store.deploy("t2i", version, parse_ramp(plan), settings, change)
    now = change.at + 8.0
    store.try_lease(deployment.id, REGISTRAR, now, 1e6)
    deployment = store.mounted(deployment.id, REGISTRAR, Change(now, REGISTRAR))
    state, evidence = deployment.ramp, JudgeState()
    assert deployment.plan is not None and state is not None
    while deployment.state == "canary" and now < change.at + seconds:
        now += WINDOW_S
        arms = _arms(rng, deployment.traffic, errors)
        evidence = judge.step(evidence, *arms, settings)
        verdict = judge.verdict(evidence, settings)
        state = ramp.advance(deployment.plan, state, verdict.outcome, now)
        if rules.is_progress(deployment, rules.step(deployment, state, evidence)):
            why = verdict.reason if state.is_final else ""
            deployment = store.step(deployment.id, REGISTRAR, state, evidence, Change(now, REGISTRAR, why))
    return deployment


def _arms(rng: random.Random, share: float, errors: float) -> tuple[Arm, Arm]:
    """Return the outcomes of a window's requests to control and canary."""
    numbers = [0, 0]
    for _ in range(24):
        numbers[rng.random() < share] += 1
    control, canary = (
        Arm(n, sum(rng.random() < rate for _ in range(n)), {"64": [rng.lognormvariate(0, 0.2) for _ in range(n)]})
        for n, rate in zip(numbers, (0.003, errors), strict=True)
    )
    return control, canary


def run_id(name: str) -> str:
    """The id of a run of the sample's lineage."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"sample/{name}"))


def data(name: str, version: str = "sha256", namespace: str = "file") -> dict[str, Any]:
    """A version of a dataset, as an event names it; by default that of its content."""
    if version == "sha256":
        version = f"sha256:{random.Random(name).randbytes(32).hex()}"
    uri = f"{namespace.removesuffix('/')}/{name.lstrip('/')}" if "://" in namespace else f"file://{name}"
    facets = {"version": {"datasetVersion": version}, "dataSource": {"name": namespace, "uri": uri}}
    return {"namespace": namespace, "name": name, "facets": facets}


def _record_lineage(engine: Engine, models: ModelStore, now: float) -> None:
    """The pipelines that made shapes@3 and, from its latents and its weights, shapes@5."""
    scenes, latents, more = data("/data/scenes"), data("/data/latents"), data("/data/latents-512")
    words, test = data("/data/words"), data("/data/held-out")
    raw = data("raw/2026-10", "2026-10-31", "s3://studio")
    begun, day = now - 21 * DAY_S, now - 3 * DAY_S
    events = [
        run_events("pipeline", begun, 50_000, params={"note": HOSTILE}),
        run_events("draw scenes", begun, 3600, [raw], [scenes], parent="pipeline"),
        run_events("encode latents", begun + 4000, 900, [scenes], [latents], parent="pipeline"),
        run_events(
            "train unet",
            begun + 5000,
            40_000,
            [latents, words],
            [_model(models, "shapes@3")],
            parent="pipeline",
            params={"rate": "0.001", "batch": "256", "schedule": "cosine"},
            metrics={"loss": 0.0471, "fid": 12.4},
        ),
        run_events("evaluate", begun + 46_000, 600, [_model(models, "shapes@3"), test], parent="pipeline"),
        run_events("encode more", day, 1200, [scenes], [more]),
        run_events(
            "fine-tune",
            day + 2000,
            30_000,
            [_model(models, "shapes@3"), more, words],
            [_model(models, "shapes@5")],
            params={"rate": "0.0002"},
            metrics={"loss": 0.0433},
        ),
    ]
    parsed = [parse_event(json.dumps(event).encode()) for of_run in events for event in of_run]
    LineageStore(engine).record(parsed, "airflow", now)


def _model(models: ModelStore, name: str) -> dict[str, Any]:
    version = models.get(name)
    ref = model_ref(version.model, version.digest)
    return {
        "namespace": MODELS_NAMESPACE,
        "name": ref.name,
        "facets": {"version": {"datasetVersion": version.digest}},
    }


def run_events(name, at, seconds, inputs=(), outputs=(), parent=None, **options) -> list[dict[str, Any]]:
    """The events of a run of `seconds`."""
    run = RunId(run_id(name), "studio", name)
    if parent is not None:
        options["parent"] = RunId(run_id(parent), "studio", parent)
    end = run_event("COMPLETE", at + seconds, run, **options)
    return [run_event("START", at, run), end | {"inputs": list(inputs), "outputs": list(outputs)}]
