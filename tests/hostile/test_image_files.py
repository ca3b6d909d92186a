"""Image files made to cost time and memory: the reader reads little of them, in few pieces."""

import io
import tracemalloc

import pytest

from noria.errors import ImageFileError
from noria.frontend.protocols.t2i.metadata import MAX_BYTES as MAX_UPLOAD_BYTES
from noria.images.metadata_chunks import MAX_BYTES, MAX_CHUNKS
from noria.images.metadata_io import read_metadata
from noria_bench.soak.image_files import HOSTILE_FILES


class CountingFile(io.BytesIO):
    """Counts reads and the bytes read."""

    num_reads = num_bytes = 0

    def read(self, size=-1):
        content = super().read(size)
        self.num_reads, self.num_bytes = self.num_reads + 1, self.num_bytes + len(content)
        return content


@pytest.mark.parametrize("case", HOSTILE_FILES)
def test_a_hostile_file_is_rejected_after_few_reads_and_little_memory(case):
    content = HOSTILE_FILES[case]()
    assert len(content) <= MAX_UPLOAD_BYTES
    file = CountingFile(content)
    tracemalloc.start()
    try:
        with pytest.raises(ImageFileError):
            read_metadata(file, "the file")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert file.num_reads <= 5 * MAX_CHUNKS
    assert file.num_bytes <= 2 * MAX_BYTES
    assert peak_bytes <= 10 * MAX_BYTES
