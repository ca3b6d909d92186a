"""The routes of A1111's ControlNet extension: what clients ask before they send units of `alwayson_scripts`."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from noria.errors import OperationNotSupported
from noria.frontend.http.json_response import json_response
from noria.frontend.protocols.a1111.controlnet import IP_ADAPTER_MODULE, SCRIPT, title
from noria.frontend.services.images.request_images import MAX_CONTROLS
from noria.models.adapters.adapter_folders import AdapterFolders
from noria.protocol.diffusion import DiffusionModelSpec

_VERSION = 3  # version of the extension's API: units in `alwayson_scripts`
_NO_MODEL = "None"
_MODULES = ["none", IP_ADAPTER_MODULE]


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
        """List the preprocessors: the one that does nothing, and the one by which a unit is an IP-Adapter."""
        detail = {name: {"model_free": False, "sliders": []} for name in _MODULES}
        return json_response({"module_list": _MODULES, "module_detail": detail})

    async def control_types(self, http: Request) -> Response:
        """Return the models and preprocessors of all units, and those of IP-Adapters if the model has some."""
        models, ip_adapters = await self._models(http), await self._ip_adapters(http)
        types = {"All": _control_type(_MODULES, models)}
        if ip_adapters:
            types["IP-Adapter"] = _control_type([IP_ADAPTER_MODULE], ip_adapters)
        return json_response({"control_types": types})

    async def detect(self, _: Request) -> Response:
        """Raise OperationNotSupported."""
        raise OperationNotSupported(
            "this server has no preprocessors: send images as ControlNets take them, with the module none."
        )

    async def _models(self, http: Request) -> list[str]:
        spec = self._selected_model(http)
        controlnets = await asyncio.to_thread(self._folders.controlnets.for_model, spec)  # reads folders
        return [*_titles(controlnets), *await self._ip_adapters(http)]

    async def _ip_adapters(self, http: Request) -> list[str]:
        return _titles(await asyncio.to_thread(self._folders.ip_adapters.for_model, self._selected_model(http)))


def _titles(files: Mapping[str, Any]) -> list[str]:
    return [title(name, each.digest) for name, each in files.items()]


def _control_type(modules: Sequence[str], models: Sequence[str]) -> dict[str, Any]:
    return {
        "module_list": modules,
        "model_list": [_NO_MODEL, *models],
        "default_option": modules[0],
        "default_model": _NO_MODEL,
    }
