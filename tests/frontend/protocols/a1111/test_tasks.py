"""Tasks of A1111's clients."""

from noria.frontend.engines.results import PreviewImage, ProgressUpdate
from noria.frontend.protocols.a1111.tasks import A1111Task


def test_task_keeps_the_latest_progress_and_preview():
    task = A1111Task(admitted=None)
    first, second = ProgressUpdate(3, 0, 20, 5.0), ProgressUpdate(None, 4, 20, 4.0)
    early, late = PreviewImage(0, 2, 1, 1, b"abc"), PreviewImage(0, 4, 1, 1, b"def")
    for update in (first, early, second, late):
        task.update(update)
    assert (task.progress, task.preview) == (second, late)
