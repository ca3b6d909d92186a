"""The IP-Adapters of a loaded model: what images add to its denoiser, on the rows that have one.

An image becomes a few tokens, and these the keys and values of each attention, once for a request: what a row's queries
read of them is added, in a UNet to what they read of the prompt (Ye et al., 2023, eq. 5), in FLUX.1 to the outputs of
the block. Values are scaled, so that the attention is. Hooks do this within a call with such rows; others see nothing
of it, in every bit.

Shapes: B images, S side of the encoder's images, T tokens of an image, D their width, R rows of a call, A rows of them
with images of one number of tokens, I width of an attention, N its queries.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from noria.config import EngineConfig
from noria.errors import ModelError
from noria.models.adapters.ip_adapter_files import ENCODER_STEM, IpAdapterFile, IpAdapterFiles
from noria.models.diffusion.block_compilation import check_not_compiled, without_compiled_blocks
from noria.models.diffusion.part_loading import DTYPES, SharedParts, load_weights
from noria.models.diffusion.unet_models.graphed_calls import without_graphs
from noria.protocol.diffusion import DiffusionModelSpec

# CLIP's, as diffusers prepares images for these encoders, whose folders mostly do not say them.
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

KeysValues = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""The keys and the scaled values of each attention, [T, I] each."""


class ImageTokens(NamedTuple):
    """The keys and values of an image for the rows of its request, and for those that guide away from it."""

    positive: KeysValues
    negative: KeysValues  # none of a model that is not guided by two rows


class _Linear(NamedTuple):
    weight_ID: torch.Tensor
    bias_I: torch.Tensor | None

    def __call__(self, tokens_TD: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(tokens_TD, *self)


class IpAdapter:
    """A loaded IP-Adapter."""

    def __init__(
        self, file: IpAdapterFile, encoder: Any, projection: Any, layers: Sequence[tuple[_Linear, _Linear]]
    ) -> None:
        """`layers` make the keys and the values of each attention."""
        self._is_guided = not file.layout.is_flux
        self.digest, self._image_px, self._takes_hidden = file.digest, file.image_px, file.takes_hidden
        self._encoder, self._projection, self._layers = encoder, projection, layers

    def encode(self, pixels_BSS3: torch.Tensor) -> torch.Tensor:
        """Return the tokens [B, T, D] of images, uint8."""
        device = self._encoder.device
        mean, std = (torch.tensor(each, device=device)[:, None, None] for each in (_MEAN, _STD))
        return self._project((pixels_BSS3.to(device).movedim(-1, 1).float() / 255 - mean) / std)

    def _project(self, images_B3SS: torch.Tensor) -> torch.Tensor:
        outputs = self._encoder(images_B3SS.to(self._encoder.dtype), output_hidden_states=self._takes_hidden)
        tokens_BTD: torch.Tensor = self._projection(
            outputs.hidden_states[-2] if self._takes_hidden else outputs.image_embeds
        )
        return tokens_BTD

    @functools.cached_property
    def _negative(self) -> torch.Tensor:
        """The tokens that guide away from images, as diffusers' `encode_image` makes them: of zeros."""
        if self._takes_hidden:
            return self._project(torch.zeros(1, 3, self._image_px, self._image_px, device=self._encoder.device))[0]
        width = self._encoder.config.projection_dim
        tokens_1TD: torch.Tensor = self._projection(
            torch.zeros(1, width, dtype=self._encoder.dtype, device=self._encoder.device)
        )
        return tokens_1TD[0]

    def tokens(self, tokens_TD: torch.Tensor, scale: float) -> ImageTokens:
        """Return what an image with these tokens adds, times `scale`."""
        negative = tuple((keys_TI, values_TI * scale) for keys_TI, values_TI in self._negative_keys_values)
        return ImageTokens(self._keys_values(tokens_TD, scale), negative)

    @functools.cached_property
    def _negative_keys_values(self) -> KeysValues:
        return self._keys_values(self._negative, 1.0) if self._is_guided else ()

    def _keys_values(self, tokens_TD: torch.Tensor, scale: float) -> KeysValues:
        return tuple((to_keys(tokens_TD), to_values(tokens_TD) * scale) for to_keys, to_values in self._layers)


class _Place(NamedTuple):
    """The attention of a denoiser to which an image adds something."""

    heads: int
    queries: torch.nn.Module  # its outputs are the queries, [R, N, I] or with I divided among heads
    mixer: torch.nn.Module  # what is read is added to its input or, of a block of FLUX.1, to its second output
    is_block: bool


def _places(denoiser: Any) -> list[_Place]:
    """Return them in the order of an adapter's layers: cross attentions of a UNet, or blocks of FLUX.1."""
    if hasattr(denoiser, "transformer_blocks"):
        return [_Place(block.attn.heads, block.attn.norm_q, block, True) for block in denoiser.transformer_blocks]
    names = [name.removesuffix(".processor") for name in denoiser.attn_processors]
    attentions = [denoiser.get_submodule(name) for name in names if name.endswith("attn2")]
    return [_Place(attention.heads, attention.to_q, attention.to_out[0], False) for attention in attentions]


class IpAdapters:
    """The loaded IP-Adapters of one model, by name."""

    def __init__(
        self,
        adapters: Mapping[str, IpAdapter],
        denoiser: Any,
        *,
        has_compiled_blocks: bool,
        for_all_rows: bool = False,
    ) -> None:
        """With `for_all_rows`, a row's bits do not depend on which other rows have an image."""
        self.by_name, self._denoiser, self._has_compiled_blocks = adapters, denoiser, has_compiled_blocks
        self._for_all_rows = for_all_rows
        self._places = _places(denoiser) if adapters else []
        self._rows: Sequence[KeysValues | None] = ()  # those of the last call
        self._stacks: list[list[_Stack]] = []  # stacks of these, by place

    @contextlib.contextmanager
    def applied(self, rows: Sequence[KeysValues | None]) -> Iterator[None]:
        """Add `rows[r]` to row r of a call of the denoiser inside of this context."""
        if all(row is None for row in rows):
            self._rows, self._stacks = (), []
            yield
            return
        self._set_rows(rows)
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_graphs())
            if self._has_compiled_blocks:
                stack.enter_context(without_compiled_blocks(self._denoiser))
            for place, stacks in zip(self._places, self._stacks, strict=True):
                for handle in _Hooks(place, stacks).register():
                    stack.callback(handle.remove)
            yield

    def _set_rows(self, rows: Sequence[KeysValues | None]) -> None:
        """Stack the keys and values of rows by their number of tokens; the stacks stay while a batch has these rows."""
        if len(rows) == len(self._rows) and all(a is b for a, b in zip(rows, self._rows, strict=True)):
            return
        self._rows, self._stacks = (), []  # freed before the next ones need memory
        by_length: dict[int, list[int]] = {}
        for r, row in enumerate(rows):
            if row is not None:
                by_length.setdefault(len(row[0][0]), []).append(r)
        stacks: list[list[_Stack]] = [[] for _ in self._places]
        for positions in by_length.values():
            of_rows = [row for r in positions if (row := rows[r]) is not None]
            num_padding = len(rows) - len(positions) if self._for_all_rows else 0
            of_rows += of_rows[:1] * num_padding
            positions_A = torch.tensor(positions + positions[:1] * num_padding, device=of_rows[0][0][0].device)
            for of_layer, pairs in zip(stacks, zip(*of_rows, strict=True), strict=True):
                keys, values = (torch.stack(each) for each in zip(*pairs, strict=True))
                of_layer.append(_Stack(positions_A, keys, values, len(positions)))
        self._rows, self._stacks = rows, stacks


class _Stack(NamedTuple):
    """Keys and values of one attention for the rows at these positions."""

    positions_A: torch.Tensor
    keys_ATI: torch.Tensor
    values_ATI: torch.Tensor
    num_rows: int  # those after these are padding


class _Hooks:
    """Hooks of one attention in one call, for any implementation of it, that add what its queries read of images."""

    def __init__(self, place: _Place, stacks: Sequence[_Stack]) -> None:
        self._place, self._heads, self._stacks = place, place.heads, stacks
        self._queries_RNI: torch.Tensor | None = None

    def register(self) -> list[torch.utils.hooks.RemovableHandle]:
        """Add the hooks; that of a mixer's input comes before those of LoRAs, which see what it has added."""
        mixer = self._place.mixer
        return [
            self._place.queries.register_forward_hook(self._keep),
            mixer.register_forward_hook(self._add_to_output)
            if self._place.is_block
            else mixer.register_forward_pre_hook(self._add_to_input, prepend=True),
        ]

    def _keep(self, _module: torch.nn.Module, _args: tuple[torch.Tensor, ...], queries: torch.Tensor) -> None:
        self._queries_RNI = queries.flatten(2)

    def _add_to_input(self, _module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        (inputs_RNI,) = args
        return (self._add(inputs_RNI),)

    def _add_to_output(self, _module: torch.nn.Module, _args: Any, outputs: tuple[torch.Tensor, ...]) -> Any:
        of_text, of_image_RNI = outputs
        return of_text, self._add(of_image_RNI)

    def _add(self, outputs_RNI: torch.Tensor) -> torch.Tensor:
        """Return [R, N, I] with what the queries read of the images, in their rows."""
        assert self._queries_RNI is not None
        queries_RNI, self._queries_RNI = self._queries_RNI, None
        for at, keys_ATI, values_ATI, num_rows in self._stacks:
            queries, keys, values = (
                each.view(*each.shape[:2], self._heads, -1).transpose(1, 2)
                for each in (queries_RNI[at], keys_ATI, values_ATI)
            )
            read = torch.nn.functional.scaled_dot_product_attention(queries, keys, values)
            read_ANI = read[:num_rows].transpose(1, 2).flatten(2)
            outputs_RNI = outputs_RNI.index_add(0, at[:num_rows], read_ANI.to(outputs_RNI.dtype))
        return outputs_RNI


_encoders: SharedParts[Any] = SharedParts()  # by digest, dtype and device; adapters share them, too


def load_ip_adapters(spec: DiffusionModelSpec, denoiser: Any, config: EngineConfig, device: str) -> IpAdapters:
    """Load the IP-Adapters of `engine.ip_adapters` that fit a model with this denoiser; onto "meta" none.

    Raises:
        ConfigError: the model is compiled, whose calls no hook can change.
        ModelError: a file is damaged, or its tensors do not match its kind.
    """
    files = IpAdapterFiles.of(config).for_model(spec)
    if files:
        check_not_compiled(config, "ip_adapters")
    adapters = {} if device == "meta" else {name: _load(file, denoiser, config, device) for name, file in files.items()}
    is_padded = len(config.buckets) == 1
    return IpAdapters(adapters, denoiser, has_compiled_blocks=bool(config.compile_blocks), for_all_rows=is_padded)


def _load(file: IpAdapterFile, denoiser: Any, config: EngineConfig, device: str) -> IpAdapter:
    import safetensors.torch
    from transformers import CLIPVisionModelWithProjection

    dtype = DTYPES[config.dtype]
    encoder = _encoders.get(
        (file.encoder_digest, config.dtype, device),
        lambda: load_weights(CLIPVisionModelWithProjection, file.encoder, ENCODER_STEM, dtype, device),
    )
    tensors, prefix = safetensors.torch.load_file(file.path), file.layout.projection
    read = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
    try:
        projection = denoiser._convert_ip_adapter_image_proj_to_diffusers(read, low_cpu_mem_usage=False)
    except (KeyError, IndexError, RuntimeError, ValueError) as error:
        raise ModelError(f"{file.path}: its projection of images cannot be read: {error}") from error

    def linear(number: int, what: Literal["k", "v"]) -> _Linear:
        name = file.layout.layer_name(number, what)
        bias_I = tensors[f"{name}.bias"].to(device, dtype) if file.layout.is_flux else None
        return _Linear(tensors[f"{name}.weight"].to(device, dtype), bias_I)

    layers = [(linear(k, "k"), linear(k, "v")) for k in range(len(file.layer_shapes))]
    projection = projection.to(device, dtype).eval().requires_grad_(requires_grad=False)
    return IpAdapter(file, encoder, projection, layers)


def loaded_encoders(spec: DiffusionModelSpec, config: EngineConfig, device: str) -> set[str]:
    """Return the digests of a model's image encoders that other models of this process hold."""
    files = IpAdapterFiles.of(config).for_model(spec).values()
    return {file.encoder_digest for file in files if (file.encoder_digest, config.dtype, device) in _encoders}
