"""The IP-Adapters that the operator allows for image models, the setting `engine.ip_adapters`. No torch.

An adapter's name is that of its file. Each is for the models that it fits, as the shapes of its layers say; an engine
loads those of a model with the model, and their image encoders. A file is read once: to use a changed one, restart the
server.
"""

import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Self

from msgspec import Struct

from noria.config import EngineConfig
from noria.errors import ConfigError, IpAdapterNotFound, ModelError, short_list, short_repr
from noria.models.adapters.folder_entries import FolderEntries
from noria.models.diffusion.folders.pipeline_folder import Count, check_chooses_no_code
from noria.models.diffusion.folders.unet_models.controlnet_folder import STEM as UNET_STEM
from noria.models.files.weights import (
    Shapes,
    identifying_bytes,
    num_tensor_parameters,
    read_header,
    read_struct,
    read_text,
    read_weights,
    short_digest,
    weights_digest,
)
from noria.protocol.diffusion import DiffusionModelSpec, IpAdapter
from noria.protocol.kinds import AnyModelSpec

ENCODER_STEM = "model"
"""The name of an image encoder's weight files, without variant, shard and ".safetensors"."""

NO_IP_ADAPTERS = "it has none; the operator sets their files: engine.ip_adapters"
"""The words of messages about a model without IP-Adapters."""

_SUFFIX = ".safetensors"
_ENCODER_CLASS, _CLIP = "CLIPVisionModelWithProjection", "CLIPModel"  # which has an encoder of texts, too
_ENCODER_PARTS = ("vision_model.", "visual_projection.")
_MAX_IMAGE_PX = 1024  # a side of an image encoder's images; CLIP's have 224 and 336
_BLOCKS = ("down_blocks", "up_blocks", "mid_block")  # the order in which diffusers numbers cross attentions


class IpAdapterLayout(NamedTuple):
    """The names of an adapter's tensors."""

    is_flux: bool  # for FLUX.1, and with biases; else for a UNet
    projection: str  # the beginning of those of the projection of images
    layer: str  # those of an attention, with its number and "k" or "v"
    first: int  # the number of the first attention
    step: int  # from one to the next

    def layer_name(self, place: int | str, what: Literal["k", "v"]) -> str:
        """Return the name of the keys' or the values' layer at a place, from 0 on; of a text it is the number."""
        return self.layer.format(place if isinstance(place, str) else self.first + self.step * place, what)


_OF_UNET = IpAdapterLayout(False, "image_proj.", "ip_adapter.{}.to_{}_ip", 1, 2)  # h94/IP-Adapter
_OF_FLUX = IpAdapterLayout(  # XLabs-AI/flux-ip-adapter
    True, "ip_adapter_proj_model.", "double_blocks.{}.processor.ip_adapter_double_stream_{}_proj", 0, 1
)


class _Kind(NamedTuple):
    """A projection of images: two tensors that it has, and what of the encoder it takes."""

    first: str  # [.., width of the encoder]
    last: str  # [width of the tokens]
    width: Literal["projection_dim", "hidden_size"]  # that of the encoder's output, or of its last layer but one


_KINDS = (
    _Kind("proj.weight", "norm.weight", "projection_dim"),
    _Kind("proj.0.weight", "proj.3.weight", "hidden_size"),  # "full"
    _Kind("proj_in.weight", "norm_out.weight", "hidden_size"),  # "plus"
)


class _VisionConfig(Struct, frozen=True):
    """The settings of an image encoder; defaults are those of transformers."""

    hidden_size: Count = 768
    projection_dim: Count = 512
    image_size: Count = 224


class _EncoderConfig(_VisionConfig, frozen=True):
    """config.json of an image encoder, or of a whole CLIP."""

    architectures: tuple[str, ...] | None = None
    vision_config: _VisionConfig | None = None


class IpAdapterFile(NamedTuple):
    """A checked file with its image encoder."""

    path: pathlib.Path
    encoder: pathlib.Path  # folder
    encoder_digest: str
    num_encoder_parameters: int
    image_px: int  # both sides of the images that the encoder takes
    digest: str  # 12 digits of a SHA-256: of the file, as a model's fingerprint, and of the encoder
    takes_hidden: bool  # whether it takes the encoder's last layer but one, not its output
    layout: IpAdapterLayout
    layer_shapes: tuple[tuple[int, ...], ...]  # those of the keys of each attention
    num_parameters: int


class IpAdapterFiles(FolderEntries):
    """The settings `engine.ip_adapters` and `engine.ip_adapter_encoders`."""

    setting = "ip_adapters"
    forms = "FILE.safetensors, a folder of such files, MODEL=FILE.safetensors or hf://ORG/NAME/FILE.safetensors"

    def __init__(self, entries: Sequence[str], encoders: Sequence[str] = ()) -> None:
        super().__init__(entries)
        self._encoders = tuple(map(pathlib.Path, encoders))

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Return the files of an engine."""
        return cls(config.ip_adapters, config.ip_adapter_encoders)

    def check_folders(self) -> None:
        """Raise ConfigError if a file or a folder does not exist."""
        for folder in self._encoders:
            if not folder.is_dir():
                raise ConfigError(f"engine.ip_adapter_encoders: {str(folder)!r} is not a folder.")
        for _, entry in self._folders:
            if not _files_in(entry):
                raise ConfigError(
                    f"engine.ip_adapters: {str(entry)!r} is no file {_SUFFIX}, and no folder with one. Entries are "
                    f"{self.forms}."
                )

    def check(self, models: Sequence[AnyModelSpec]) -> None:
        """Check all files, and that each is for a model that is served.

        Raises:
            ConfigError: a file or a folder does not exist, or fits no model.
            ModelError: it is damaged or not supported, or has no image encoder.
        """
        self.check_folders()
        for only_for, entry in self._folders:
            wanted = self._served(only_for, entry, models)
            for file in _files_in(entry):
                misfits = [misfit(inspect(file, self._encoders), spec) for spec in wanted]
                self._check_fits(file, misfits, "a model of its base")

    def for_model(self, spec: DiffusionModelSpec) -> Mapping[str, IpAdapterFile]:
        """Return the IP-Adapters for a model by name, in the order of names; of equal names, the first entry's.

        Raises ModelError: a file is damaged or not supported, or has no image encoder.
        """
        found: dict[str, IpAdapterFile] = {}
        for only_for, entry in self._folders:
            for file in _files_in(entry) if only_for in (None, spec.name) else ():
                adapter = inspect(file, self._encoders)
                if file.stem not in found and misfit(adapter, spec) is None:
                    found[file.stem] = adapter
        return dict(sorted(found.items()))

    def complete(self, got: IpAdapter, spec: DiffusionModelSpec) -> IpAdapter:
        """Return `got` with the digest of the adapter and the size of its image.

        Raises IpAdapterNotFound: the model has none of this name; with the names that it has.
        """
        known = self.for_model(spec)
        if (file := known.get(got.name)) is None:
            raise unknown_ip_adapter(got.name, spec.name, known)
        return IpAdapter(got.name, got.scale, file.digest, got.image_digest, file.image_px)


def unknown_ip_adapter(name: str, model: str, known: Mapping[str, object]) -> IpAdapterNotFound:
    """Return the error of a request that names an IP-Adapter which is not one of a model's `known` ones."""
    allowed = f"allowed are {short_list(map(short_repr, known), 50)}" if known else NO_IP_ADAPTERS
    return IpAdapterNotFound(
        f"ip_adapter: {model} has no IP-Adapter {short_repr(name)}; {allowed}.", field="ip_adapter"
    )


def _files_in(entry: pathlib.Path) -> list[pathlib.Path]:
    """Return the files of an entry, which may be missing."""
    if entry.is_dir():
        return sorted(file for file in entry.glob(f"*{_SUFFIX}") if file.is_file())
    return [entry] if entry.suffix == _SUFFIX and entry.is_file() else []


@functools.lru_cache(maxsize=256)
def inspect(file: pathlib.Path, encoders: tuple[pathlib.Path, ...]) -> IpAdapterFile:
    """Check a file and return what is in it; `encoders` are those besides the one beside it.

    Raises ModelError: it is no IP-Adapter, is damaged or of a kind that is not supported, or no encoder fits.
    """
    shapes = read_header(file)
    layout = _OF_FLUX if any(name.startswith(_OF_FLUX.projection) for name in shapes) else _OF_UNET
    projection = _starting(shapes, layout.projection)
    kinds = _KINDS[:1] if layout.is_flux else _KINDS
    kind = next((each for each in kinds if {each.first, each.last} <= projection.keys()), None)
    if kind is None:
        if "proj.0.weight" in projection:
            raise ModelError(
                f"{file}: a face-id IP-Adapter, which takes the embeddings of a face recognizer (InsightFace) that is "
                "not served; supported are the plain, the full and the plus kinds."
            )
        raise ModelError(
            f"{file}: no IP-Adapter: it lacks {layout.projection}{_KINDS[0].first} and others of h94/IP-Adapter or, "
            "for FLUX.1, of XLabs-AI/flux-ip-adapter."
        )
    layers = _layer_shapes(file, shapes, layout)
    (*_, width), (token_width, *_) = projection[kind.first], projection[kind.last]
    if any(shape[1] != token_width for shape in layers):
        raise ModelError(
            f"{file}: its projection makes tokens of width {token_width}, but its first layer takes {layers[0][1]}."
        )
    folder, config = _find_encoder(file, kind, width, encoders)
    if config.image_size > _MAX_IMAGE_PX:
        raise ModelError(f"{folder}: its images have {config.image_size} pixels a side; at most {_MAX_IMAGE_PX}.")
    weights = {
        name: shape for name, shape in read_weights(folder, "", ENCODER_STEM).items() if name.startswith(_ENCODER_PARTS)
    }
    encoder_digest = weights_digest(folder, ENCODER_STEM, read_text(folder / "config.json"))
    return IpAdapterFile(
        file,
        folder,
        encoder_digest,
        num_tensor_parameters(weights),
        config.image_size,
        short_digest(identifying_bytes(file), encoder_digest.encode()),
        kind.width == "hidden_size",
        layout,
        layers,
        num_tensor_parameters(shapes),
    )


def _starting(shapes: Shapes, prefix: str) -> Shapes:
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


def _layer_shapes(file: pathlib.Path, shapes: Shapes, layout: IpAdapterLayout) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the keys of each layer; values have the same."""
    pattern = re.compile(layout.layer_name(r"(\d{1,4})", "k") + r"\.weight")
    numbers = sorted(int(match[1]) for name in shapes if (match := pattern.fullmatch(name)) is not None)

    def shapes_of(what: Literal["k", "v"], tensor: str) -> list[tuple[int, ...] | None]:
        return [shapes.get(f"{layout.layer_name(place, what)}.{tensor}") for place in range(len(numbers))]

    of_keys = shapes_of("k", "weight")
    expected = [(of_keys, shapes_of("v", "weight"))]
    if layout.is_flux:
        of_biases = [shape and shape[:1] for shape in of_keys]
        expected += [(of_biases, shapes_of("k", "bias")), (of_biases, shapes_of("v", "bias"))]
    if not numbers or None in of_keys or any(wanted != got for wanted, got in expected):
        wanted = ", ".join(str(layout.first + layout.step * k) for k in range(3))
        raise ModelError(
            f"{file}: its layers {layout.layer_name('N', 'k')}, and those of values, with N of {wanted} … are not "
            f"complete: it has keys of {short_list(map(str, numbers)) or 'none'}. Download it again."
        )
    found = tuple(shape for shape in of_keys if shape is not None and len(shape) == 2)
    if len(found) < len(numbers):
        raise ModelError(f"{file}: a layer has another number of dimensions than 2. Download it again.")
    return found


def _find_encoder(
    file: pathlib.Path, kind: _Kind, width: int, encoders: Sequence[pathlib.Path]
) -> tuple[pathlib.Path, _VisionConfig]:
    """Return the first image encoder of this width, and its configuration."""
    beside = file.parent / "image_encoder"
    rejected = []
    for folder in [beside] * beside.is_dir() + [*encoders]:
        config_file = folder / "config.json"
        check_chooses_no_code(config_file)
        read = read_struct(config_file, _EncoderConfig)
        if read.architectures not in ((_ENCODER_CLASS,), (_CLIP,)):
            raise ModelError(
                f"{config_file}: architectures is {short_repr(read.architectures)}; an image encoder of IP-Adapters "
                f"is a {_ENCODER_CLASS}, or that of a {_CLIP}."
            )
        config = read if read.architectures == (_ENCODER_CLASS,) else read.vision_config or _VisionConfig()
        if getattr(config, kind.width) == width:
            return folder, config
        rejected.append(f"{folder} has {getattr(config, kind.width)}")
    raise ModelError(
        f"{file}: it needs an image encoder whose {kind.width} is {width}; {short_list(rejected) or 'there is none'}. "
        "Copy it beside the file as image_encoder, or name its folder in engine.ip_adapter_encoders."
    )


def misfit(adapter: IpAdapterFile, spec: DiffusionModelSpec) -> str | None:
    """Return why an IP-Adapter does not fit a model, with the shapes of both; None if it does.

    Raises ModelError: the model's folder is damaged.
    """
    if adapter.layout.is_flux:
        if spec.family != "flux" or spec.needs_mask:  # diffusers' pipeline of Fill takes none
            return f"it is for FLUX.1, and {spec.name} is {'for inpainting' if spec.needs_mask else 'not'}"
        own = _flux_attentions(spec.path)
    elif (spec.path / "unet" / "config.json").exists():
        own = _cross_attentions(spec.path)
    else:
        return f"it is for a UNet, and {spec.name} has none"
    if adapter.layer_shapes == own:
        return None
    return f"it is for {_describe(adapter.layer_shapes)}, and {spec.name} has {_describe(own)}"


class _FluxConfig(Struct, frozen=True):
    """The settings of a transformer of FLUX.1 that an adapter must fit; defaults are those of diffusers."""

    num_layers: Count = 19
    num_attention_heads: Count = 24
    attention_head_dim: Count = 128
    joint_attention_dim: Count = 4096


def _flux_attentions(folder: pathlib.Path) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the keys for images of a transformer's blocks."""
    config = read_struct(folder / "transformer" / "config.json", _FluxConfig)
    shape = config.num_attention_heads * config.attention_head_dim, config.joint_attention_dim
    return (shape,) * config.num_layers


@functools.lru_cache(maxsize=64)
def _cross_attentions(folder: pathlib.Path) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the keys of a UNet's cross attentions, in diffusers' order."""
    shapes = read_weights(folder, "unet", UNET_STEM)
    names = [name for name in shapes if name.endswith(".attn2.to_k.weight") and name.startswith(_BLOCKS)]

    def place(name: str) -> tuple[int, ...]:
        return _BLOCKS.index(name.partition(".")[0]), *map(int, re.findall(r"\.(\d+)(?=\.)", name))

    return tuple(shapes[name] for name in sorted(names, key=place))


def _describe(shapes: Sequence[tuple[int, ...]]) -> str:
    distinct = [f"{height} × {width}" for height, width in sorted({*shapes})]
    return f"{len(shapes)} attentions ({short_list(distinct)})"
