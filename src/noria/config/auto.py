"""The value of a setting that a machine or a model decides."""

from typing import Literal

Auto = Literal["auto"]
