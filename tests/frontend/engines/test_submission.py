"""The record of a request's outcome."""

import pytest

from noria.errors import GenerationFailed
from noria.frontend.engines.submission import RequestOutcome
from noria.observe.logs.request_log import RequestLogRecord


def test_a_failed_request_has_its_reason_and_its_seconds_in_the_log():
    log_record = RequestLogRecord()
    with pytest.raises(GenerationFailed), RequestOutcome("tiny", log_record):
        raise GenerationFailed("no")
    assert (log_record["outcome"], log_record["error"]) == ("generation_failed", "no")
    assert 0 <= log_record["total_s"] < 60
