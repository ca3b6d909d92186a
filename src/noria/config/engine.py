"""The settings of engines: devices, batches, models and what is loaded beside them."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from noria.config.auto import Auto

MAX_SLOTS, MAX_AUTO_SLOTS = 512, 32
"""The largest number of slots, a bound for views, which grow with them; and the largest that `auto` finds."""

Attention = Literal[
    "auto", "sdpa", "plain", "sliced", "xformers", "flash", "flash_varlen", "sage", "sage_varlen", "_flash_3",
    "_flash_varlen_3", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math",
]  # fmt: skip
Count = Annotated[int, Meta(ge=1, le=1024)]


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a device runs the model."""

    devices: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$")], ...],
        Meta(
            min_length=1,
            description="devices, each with an engine process for each kind of model: `auto` (the GPU if there is one, "
            "else the CPU), `cpu`, `cuda` or `cuda:N`",
        ),
    ] = ("auto",)
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="precision of the model; `auto` is float16 on a GPU and float32 on a CPU"),
    ] = "auto"
    slots: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_SLOTS)] | Auto,
        Meta(
            description="images in the running batch, paused ones included; `auto` is what a quarter of the free "
            "memory holds, at most 32: docs/scheduling.md"
        ),
    ] = "auto"
    buckets: Annotated[
        tuple[Count, ...],
        Meta(
            description="rows (a guided image has two) that a step is padded to; empty: no padding; one number makes "
            "images bitwise independent of the load"
        ),
    ] = ()
    decode_batch: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="maximum images decoded, and start images encoded, in one iteration",
        ),
    ] = 4
    policy: Annotated[
        Literal["fair", "least-slack", "fcfs", "shortest-first"],
        Meta(
            description="order of images and texts; `fair` is `least-slack` with fair shares for all clients: "
            "docs/scheduling.md"
        ),
    ] = "fair"
    fair_width_slack: Annotated[
        float,
        Meta(
            ge=0,
            description="with `fair`, by how much images beyond their client's share may lengthen a step; `inf`: no "
            "limit",
        ),
    ] = 0.2
    queue_limit_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86400,
            description="maximum seconds of work ahead of a new image; more is 429. With `fair`, clients share it",
        ),
    ] = 120.0
    cache_dir: Annotated[
        str,
        Meta(
            description="folder of costs, compiled code, exports and converted checkpoints; empty is `noria` in "
            "$XDG_CACHE_HOME or ~/.cache"
        ),
    ] = ""
    queue_limit: Annotated[
        int,
        Meta(
            ge=0,
            description="maximum images waiting for a slot; more are 429. With `fair`, clients share it",
        ),
    ] = 256
    threads: Annotated[
        Count | Auto,
        Meta(description="CPU threads of one operation; `auto` is the usable cores divided by the engines"),
    ] = "auto"
    attention: Annotated[
        Attention,
        Meta(
            description="`auto` is `sdpa`, torch's own; `plain`, `sliced` and `xformers` are for UNets, the "
            "others for transformers: docs/speed-and-memory.md"
        ),
    ] = "auto"
    channels_last: Annotated[
        bool | Auto,
        Meta(description="the UNet's and VAE's tensors in NHWC memory order; `auto`: on a CPU"),
    ] = "auto"
    text_encoder_device: Annotated[
        str,
        Meta(
            pattern=r"^(same|cpu|cuda:\d{1,3})$",
            description="where an image model's text encoders are: `same` as the model, `cpu` (in float32), or "
            "`cuda:N`",
        ),
    ] = "same"
    offload: Annotated[
        Literal["none", "encoders", "blocks"],
        Meta(
            description="what is copied from the host's memory when it is called: `encoders`: text encoders and VAE, "
            "`blocks`: also the denoiser's beyond `offload_resident_bytes`; slower: docs/speed-and-memory.md"
        ),
    ] = "none"
    offload_resident_bytes: Annotated[
        Annotated[int, Meta(ge=0)] | Auto,
        Meta(
            description="with `offload` `blocks`, bytes that stay on the device; `auto` is what four images at once "
            "leave free"
        ),
    ] = "auto"
    vae_tiling: Annotated[
        bool | Auto,
        Meta(
            description="decode and encode images in tiles: less memory, slower, slightly other pixels near the seams; "
            "`auto`: beyond 2048 × 2048 pixels"
        ),
    ] = "auto"
    cudnn_benchmark: Annotated[bool, Meta(description="let cuDNN benchmark its algorithms, on a GPU")] = True
    cuda_graphs: Annotated[
        bool,
        Meta(
            description="capture small calls of Stable Diffusion's and XL's UNets as CUDA graphs, on a GPU: "
            "faster with few images, more memory"
        ),
    ] = True
    inference_mode: Annotated[bool, Meta(description="run under torch.inference_mode; false is torch.no_grad")] = True
    compile: Annotated[
        bool,
        Meta(
            description="torch.compile the UNet of a Stable Diffusion or XL, which needs buckets, or a text "
            "encoder: about a minute at start-up"
        ),
    ] = False
    compile_blocks: Annotated[
        bool | Auto,
        Meta(
            description="torch.compile the repeated blocks of any denoiser: minutes at start-up. `auto` measures at "
            "the first start whether that is faster: docs/speed-and-memory.md"
        ),
    ] = False
    quantize: Annotated[
        Literal["none", "fp8", "int8", "nf4"],
        Meta(
            description="quantize the denoiser when it is loaded: `fp8` and `int8` halve its memory and are faster "
            "with `compile_blocks`, which they need on a GPU; `nf4` takes a quarter, no faster; "
            "needs `noria-serve[quantized]`: docs/speed-and-memory.md"
        ),
    ] = "none"
    quantize_min_fidelity: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="minimum fidelity of a quantized denoiser, as a cosine; else the model is rejected",
        ),
    ] = 0.95
    encoder_precision: Annotated[
        Literal["auto", "float32", "bfloat16", "int8"],
        Meta(
            description="precision of text encoders; `auto` is bfloat16 on a GPU and float32 on a CPU, where bfloat16 "
            "needs `noria-serve[openvino]`"
        ),
    ] = "auto"
    encoder_backend: Annotated[
        Literal["auto", "torch"],
        Meta(
            description="`auto` is torch on a GPU, and on a CPU ONNX Runtime or, in bfloat16, OpenVINO; `torch` "
            "needs no export, and is mostly slower"
        ),
    ] = "auto"
    encoder_packing: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="batches of texts without padding, by torch: `auto` measures it on a GPU, and pads on a CPU; "
            "`on` rejects a model that cannot: docs/encoders.md"
        ),
    ] = "auto"
    encoder_min_fidelity: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="minimum fidelity to float32, as a cosine or 1 less the difference of a score; else rejected",
        ),
    ] = 0.999
    encoder_sessions: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | Auto,
        Meta(description="batches at once on a CPU, each with `threads`; `auto` is one a core, 2 for a large model"),
    ] = "auto"
    encoder_cores: Annotated[
        Count | Literal["auto", "shared"],
        Meta(
            description="beside image models on a CPU: `auto`: both use all cores, texts first; `shared`: as equals; a "
            "number is the encoders'"
        ),
    ] = "auto"
    embedding_cache_bytes: Annotated[
        int, Meta(ge=0, description="prompt embeddings kept for reuse; a prompt of SD 1.5 has 118,272 in float16")
    ] = 134_217_728
    loras: Annotated[
        tuple[str, ...],
        Meta(
            description="folders of LoRA files; `FOLDER` is for all image models, `MODEL=FOLDER` for one, "
            "`hf://ORG/NAME` is downloaded: docs/adapters.md. None with `compile`, or with `quantize` int8 or fp8 "
            "on a GPU"
        ),
    ] = ("bundled",)
    lora_cache_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="LoRAs of a model kept on the device; a request that does not fit beside those of "
            "accepted ones is 429",
        ),
    ] = 2_147_483_648
    controlnets: Annotated[
        tuple[str, ...],
        Meta(description="folders of ControlNets, given as `loras`. None with `compile`"),
    ] = ()
    ip_adapters: Annotated[
        tuple[str, ...],
        Meta(
            description="files of IP-Adapters, or folders of them; `FILE`, `MODEL=FILE` or `hf://ORG/NAME/FILE`. "
            "None with `compile`, or with `quantize` int8 or fp8 on a GPU"
        ),
    ] = ()
    ip_adapter_encoders: Annotated[
        tuple[str, ...],
        Meta(
            description="folders of image encoders (CLIPVisionModelWithProjection or CLIPModel) for IP-Adapters "
            "without a fitting one beside them; `hf://ORG/NAME[/FOLDER]` is downloaded"
        ),
    ] = ()
    refiners: Annotated[
        tuple[str, ...],
        Meta(description="folders of SDXL's refiners, given as `loras`, or `FILE.safetensors`"),
    ] = ()
    vae: Annotated[
        str,
        Meta(
            description="file of a VAE (.safetensors, here or `hf://ORG/NAME/FILE`) for models of single files, "
            "in place of their own"
        ),
    ] = ""
    parts: Annotated[
        tuple[str, ...],
        Meta(
            description="folders in diffusers format, or hub ids, for files that have a transformer alone: "
            "docs/models.md"
        ),
    ] = ()
    checkpoints: Annotated[
        str,
        Meta(
            description="folder of single files and folders in diffusers format, each loaded when a request "
            "names it: docs/models.md"
        ),
    ] = ""
    max_checkpoints_loaded: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="maximum models of `checkpoints` on a device; the least recently used is unloaded",
        ),
    ] = 1
    safety_classifiers: Annotated[
        tuple[str, ...],
        Meta(
            description="folders of classifiers that check each generated image, given as `loras`; checked "
            "models make no previews: docs/adapters.md"
        ),
    ] = ()
    safety_labels: Annotated[
        tuple[str, ...],
        Meta(description="labels that are refused; each classifier has at least one of them"),
    ] = ("nsfw",)
    safety_threshold: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="an image is refused if the probability of `safety_labels` is so high; a model's "
            "noria.json can only be stricter",
        ),
    ] = 0.5
    embeddings: Annotated[
        tuple[str, ...],
        Meta(
            description="folders of embeddings (textual inversion) for prompts in A1111's syntax; `FOLDER` or "
            "`MODEL=FOLDER`"
        ),
    ] = ()
    upscalers: Annotated[
        tuple[str, ...],
        Meta(
            description="folders of upscalers (.safetensors, .pth) for A1111's hires fix and extras; needs "
            "`noria-serve[upscalers]`"
        ),
    ] = ()
    encoder_batch_texts: Annotated[
        Count | Auto,
        Meta(
            description="maximum texts of one batch; `auto` is 8 on a CPU and 64 on a GPU, or 256 if all "
            "encoders of the start pack them"
        ),
    ] = "auto"
    encoder_batch_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1_048_576)] | Auto,
        Meta(
            description="maximum tokens of a batch, padding included; a longer text goes alone; `auto` is 512 on a "
            "CPU, 16384 on a GPU"
        ),
    ] = "auto"
    encoder_max_wait_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=10_000,
            description="how long a batch of texts waits for more of them while another batch runs",
        ),
    ] = 0.0
    mount_niceness: Annotated[
        int,
        Meta(
            ge=0,
            le=19,
            description="CPU niceness of loading a version beside others: 19 delays requests least",
        ),
    ] = 19
    hang_timeout_s: Annotated[
        float,
        Meta(
            ge=1,
            le=86400,
            description="an engine is restarted when an iteration takes longer than this and than ten times its "
            "longest, or it answers no pings for this long",
        ),
    ] = 60.0
    start_timeout_s: Annotated[
        float,
        Meta(
            ge=1,
            le=86400,
            description="an engine that is not ready after this is restarted",
        ),
    ] = 900.0
