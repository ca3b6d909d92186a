"""Types that differ by kind of model: a union each, with a member for each kind. A new kind adds one member to each.

The members are tagged, so that they are decoded as what they are.
"""

from noria.protocol.diffusion import DiffusionModelSpec, DiffusionPayload, ImageSettingsView
from noria.protocol.text import EncoderModelSpec, TextPayload, TextResult, TextSettingsView

AnyModelSpec = DiffusionModelSpec | EncoderModelSpec
"""The spec of a model."""

Payload = DiffusionPayload | TextPayload
"""The settings of a request to an engine. Each has `num_results` and `num_steps`."""

SettingsView = ImageSettingsView | TextSettingsView
"""The part of a payload that a live view shows."""

FinalResult = TextResult
"""Describes results that are sent with the end of a request. Diffusion models have none: each image is sent alone."""
