"""The folders of LoRAs, ControlNets, IP-Adapters, upscalers and others that a server has beside its models."""

from typing import NamedTuple

from noria.config import EngineConfig
from noria.models.adapters.controlnet_folders import ControlNetFolders
from noria.models.adapters.embedding_folders import EmbeddingFolders
from noria.models.adapters.folder_entries import FolderEntries
from noria.models.adapters.ip_adapter_files import IpAdapterFiles
from noria.models.adapters.lora_folders import LoraFolders
from noria.models.adapters.refiner_folders import RefinerFolders
from noria.models.adapters.safety_folders import SafetyFolders
from noria.models.adapters.upscaler_folders import UpscalerFolders

BESIDE_MODELS: tuple[type[FolderEntries], ...] = (
    LoraFolders,
    EmbeddingFolders,
    ControlNetFolders,
    IpAdapterFiles,
    RefinerFolders,
    SafetyFolders,
)
"""The settings of which an entry can be for one model."""


class AdapterFolders(NamedTuple):
    """By default there are none."""

    loras: LoraFolders = LoraFolders(())
    controlnets: ControlNetFolders = ControlNetFolders(())
    refiners: RefinerFolders = RefinerFolders(())
    embeddings: EmbeddingFolders = EmbeddingFolders(())
    ip_adapters: IpAdapterFiles = IpAdapterFiles(())
    upscalers: UpscalerFolders = UpscalerFolders(())

    @classmethod
    def of(cls, config: EngineConfig) -> "AdapterFolders":
        """Return the folders of an engine."""
        return cls(
            LoraFolders.of(config),
            ControlNetFolders.of(config),
            RefinerFolders.of(config),
            EmbeddingFolders.of(config),
            IpAdapterFiles.of(config),
            UpscalerFolders.of(config),
        )
