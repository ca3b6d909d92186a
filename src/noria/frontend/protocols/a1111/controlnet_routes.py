"""The routes of A1111's ControlNet extension: what clients ask before they send units of `alwayson_scripts`."""

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from noria.errors import OperationNotSupported
from noria.frontend.http.json_response import json_response
from noria.frontend.protocols.a1111.controlnet import SCRIPT, title
from noria.frontend.services.images.request_images import MAX_CONTROLS
from noria.models.adapter_folders import AdapterFolders
from noria.protocol.diffusion import DiffusionModelSpec

_VERSION = 3  # version of the extension's API: units in `alwayson_scripts`
_NO_MODULE, _NO_MODEL = "none", "None"


class ControlNetRoutes:
    """The routes under /controlnet, and the list of scripts."""

    def __init__(self, folders: AdapterFolders, selected_model: Callable[[Request], DiffusionModelSpec]) -> None:
        """`selected_model` returns the model that a client has selected."""
        self._folders, self._selected_model = folders, selected_model

    async def scripts(self, _: Request) -> Response:
        """List the scripts, by which clients see whether there is the extension."""
        return json_response({"txt2img": [SCRIPT], "img2img": [SCRIPT]})

    async def version(self, _: Request) -> Response:
        """Return the version of the extension's API."""
        return json_response({"version": _VERSION})

    async def settings(self, _: Request) -> Response:
        """Return the number of units that a request may have."""
        return json_response({"control_net_unit_count": MAX_CONTROLS})

    async def model_list(self, http: Request) -> Response:
        """List the ControlNets and the IP-Adapters of the selected model."""
        return json_response({"model_list": await self._models(http)})

    async def module_list(self, _: Request) -> Response:
        """List the preprocessors: the one that does nothing."""
        detail = {_NO_MODULE: {"model_free": False, "sliders": []}}
        return json_response({"module_list": [_NO_MODULE], "module_detail": detail})

    async def control_types(self, http: Request) -> Response:
        """Return the ControlNets and preprocessors of the only type."""
        models = [_NO_MODEL, *await self._models(http)]
        every = {
            "module_list": [_NO_MODULE],
            "model_list": models,
            "default_option": _NO_MODULE,
            "default_model": _NO_MODEL,
        }
        return json_response({"control_types": {"All": every}})

    async def detect(self, _: Request) -> Response:
        """Raise OperationNotSupported."""
        raise OperationNotSupported(
            "this server has no preprocessors: send images as ControlNets take them, with the module none."
        )

    async def _models(self, http: Request) -> list[str]:
        spec = self._selected_model(http)
        controlnets = await asyncio.to_thread(self._folders.controlnets.for_model, spec)  # reads folders
        ip_adapters = await asyncio.to_thread(self._folders.ip_adapters.for_model, spec)
        digests = [(name, each.digest) for name, each in controlnets.items()]
        digests += [(name, each.digest) for name, each in ip_adapters.items()]
        return [title(*each) for each in digests]
