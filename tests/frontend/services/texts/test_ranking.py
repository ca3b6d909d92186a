"""Models that rank, and those that cannot."""

import msgspec
import pytest

from noria.errors import InvalidField
from noria.frontend.services.texts.scores import ranking_inputs
from noria.testing.fake_encoder import LATE


def test_states_of_tokens_that_are_not_made_for_maxsim_do_not_rank() -> None:
    with pytest.raises(InvalidField, match="model 'late' returns the states of tokens, which do not rank; name a"):
        ranking_inputs(msgspec.structs.replace(LATE, late_interaction=None), "a", ["b"])
