"""Run by MLflow's Python: logs a run that made a model, and registers the model twice, as people do.

    python log_to_mlflow.py SERVER FOLDER

Version 1 is a folder of the run's artifacts, version 2 what `log_model` logs, in which the folder is deeper.
"""

import sys

import mlflow
from mlflow.data.dataset_source_registry import resolve_dataset_source
from mlflow.data.meta_dataset import MetaDataset


class Painter(mlflow.pyfunc.PythonModel):
    """A model of MLflow, which is pickled."""

    def predict(self, context, model_input: list[str]) -> list[str]:
        return model_input


server, folder = sys.argv[1:]
mlflow.set_tracking_uri(server)
mlflow.set_experiment("train shapes")
scenes = MetaDataset(resolve_dataset_source("s3://bucket/scenes"), name="scenes", digest="9c5e2f1a")
with mlflow.start_run() as run:
    mlflow.log_params({"rate": 0.001, "steps": 200})
    mlflow.log_metric("loss", 0.5, step=0)
    mlflow.log_metric("loss", 0.047, step=1)
    mlflow.log_input(scenes, context="training")
    mlflow.log_artifacts(folder, "pipeline")
    client = mlflow.MlflowClient()
    client.create_registered_model("shapes")
    version = client.create_model_version("shapes", f"runs:/{run.info.run_id}/pipeline", run.info.run_id)
    client.set_registered_model_alias("shapes", "prod", version.version)
    mlflow.pyfunc.log_model(
        name="painter",
        python_model=Painter(),
        artifacts={"pipeline": folder},
        pip_requirements=[],
        registered_model_name="shapes",
    )
print(run.info.run_id)
