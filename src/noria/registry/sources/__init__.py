"""Where models come from besides local folders: the hub, MLflow, and the filesystems of fsspec.

`source.py` says what a text names, `filesystem.py` and `mlflow.py` list and read it, `copies.py` copies the model in it
into the data folder, and `read.py` does all of this.
"""
