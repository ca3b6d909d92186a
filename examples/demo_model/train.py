#!/usr/bin/env python3
"""Train the bundled model: tokenizer, VAE, then text encoder and UNet; saved as a StableDiffusionPipeline folder.

    torchrun --nproc-per-node 2 examples/demo_model/train.py OUT --minutes 120 [--start-from PIPELINE]

On CPUs run one process a core (each takes one thread): two processes beat one process of two threads by far. On a GPU
run one process with a larger --batch. Resumes from OUT/checkpoint.pt, and the learning rate follows the minutes spent,
so a run that is stopped and started again ends where an undisturbed one does. The finished pipeline is OUT/pipeline, in
fp16. OUT/lineage.jsonl says what made it, and so does the pipeline, for `noria models add NAME OUT/pipeline`.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import shutil
import time
import uuid

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.distributed as dist
from diffusers import AutoencoderTiny, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from noria.lineage import DatasetRef, Run, version_of
from noria.registry.manifest import LINEAGE_FILE
from scenes import COLOURS, RELATIONS, SHAPES, SIZES, Object, Scene, draw_scenes, render, vocabulary

SIDE_PX = 128
TOKENS = 24
TEXT_WIDTH = 128
CHANNELS = (48, 96, 144)
NOISE = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", num_train_timesteps=1000)
POOL_SCENES = 32768  # per process; as many scenes are kept encoded
POOL_START = 1024  # scenes in the pool before the first step
USES = 8  # how often a scene is shown, on average
ALWAYS_PADDING = 6  # last tokens that no caption of the grammar reaches
EMPTY_CAPTIONS = 0.1  # share of captions dropped, for classifier-free guidance
CHECKPOINT_EVERY_S = 300
MODEL = "noria-shapes"


def make_tokenizer(folder: pathlib.Path) -> None:
    """A byte-pair vocabulary in which every word of the grammar is one token and any other word is spelt."""
    folder.mkdir(parents=True, exist_ok=True)
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<|endoftext|>"))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    alphabet = list("abcdefghijklmnopqrstuvwxyz0123456789,.!?'-")
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        min_frequency=1,
        special_tokens=["<|startoftext|>", "<|endoftext|>"],
        initial_alphabet=alphabet,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    bpe.train_from_iterator([" ".join(vocabulary())] * 50 + [" ".join(alphabet)], trainer)
    model = json.loads(bpe.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")


def load_tokenizer(folder: pathlib.Path) -> CLIPTokenizer:
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=TOKENS)


def colour_path(conv: nn.Conv2d, scale: float = 1.0, bias: float = 0.0) -> None:
    """Start the first three channels as an identity (an average where it strides), so that colours survive from step 0.

    From a plain start the autoencoder stays for minutes at a grey mean (L1 0.28); from this one it reaches 34 dB.
    """
    weight = conv.weight.data
    weight.mul_(0.6 if weight.shape[0] > 4 else 0.3)
    for channel in range(min(3, *weight.shape[:2])):
        weight[channel] = 0
        if conv.stride[0] == 2:
            weight[channel, channel] = scale / 9
        else:
            weight[channel, channel, 1, 1] = scale
    if conv.bias is not None:
        conv.bias.data[:3] = bias


def new_vae() -> AutoencoderTiny:
    """8x down, 4 channels, no normalisation: a GroupNorm loses the absolute colour of flat areas."""
    width = (32, 32, 32, 32)
    vae = AutoencoderTiny(
        encoder_block_out_channels=width,
        decoder_block_out_channels=width,
        num_encoder_blocks=(1, 2, 2, 2),
        num_decoder_blocks=(2, 2, 2, 1),
    )
    for half in (vae.encoder, vae.decoder):
        for block in (module for module in half.layers if type(module).__name__ == "AutoencoderTinyBlock"):
            block.conv[-1].weight.data.mul_(0.1)
            block.conv[-1].weight.data[:3] *= 0.1
            block.conv[-1].bias.data.zero_()
        convs = [module for module in half.layers if isinstance(module, nn.Conv2d)]
        for conv in convs:
            colour_path(conv)
    encoder_convs = [module for module in vae.encoder.layers if isinstance(module, nn.Conv2d)]
    decoder_convs = [module for module in vae.decoder.layers if isinstance(module, nn.Conv2d)]
    colour_path(encoder_convs[-1], 4.0, -2.0)
    colour_path(decoder_convs[0], 0.25, 0.5)
    return vae


def train_vae(vae: AutoencoderTiny, seconds: float, device: torch.device) -> AutoencoderTiny:
    """Reconstruct crops; the weight of edges grows over the run. Sets `scaling_factor` to 1 / std of the latents."""
    vae = vae.to(device, memory_format=torch.channels_last)
    data = torch.cat([((render(draw_scenes(1000 + k, 128), SIDE_PX) + 1) * 127.5).round().byte() for k in range(24)])
    optimizer = torch.optim.AdamW(vae.parameters(), lr=1.5e-3, betas=(0.9, 0.99), weight_decay=0)
    started, step, crop = time.time(), 0, 48
    while (share := (time.time() - started) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 1.5e-3 * min(1, (step + 1) / 50) * cosine(share)
        top, left = torch.randint(0, SIDE_PX - crop + 1, (2,)).tolist()
        x = data[torch.randint(len(data), (16,)), :, top : top + crop, left : left + crop]
        x = (x.float() / 127.5 - 1).to(device, memory_format=torch.channels_last)
        z = vae.encode(x).latents
        error = vae.decode(z + 0.05 * torch.randn_like(z)).sample - x
        edges = error.diff(dim=3).abs().mean() + error.diff(dim=2).abs().mean()
        sharpness = min(1.0, max(0.0, share * 3 - 0.6))
        loss = 4 * error.square().mean() + sharpness * (error.abs().mean() + 0.3 * edges)
        loss = loss + 1e-2 * ((z.abs() - 2.5).clamp(min=0) ** 2).mean()
        loss = loss + 1e-3 * ((z.std() - 1) ** 2 + z.mean((0, 2, 3)).square().mean())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        step += 1
    with torch.no_grad():
        x = render(draw_scenes(5, 64), SIDE_PX).to(device)
        z = vae.encode(x).latents
        mse = ((vae.decode(z).sample.clamp(-1, 1) - x) / 2).square().mean((1, 2, 3))
    vae.register_to_config(scaling_factor=float(1 / z.std()))
    print(f"vae: {step} steps, PSNR {(-10 * mse.log10()).mean():.1f} dB", flush=True)
    return vae


def new_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=4 * TEXT_WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=TOKENS,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            projection_dim=TEXT_WIDTH,
        )
    )


def new_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=SIDE_PX // 8,
        in_channels=4,
        out_channels=4,
        block_out_channels=CHANNELS,
        layers_per_block=1,
        norm_num_groups=16,
        cross_attention_dim=TEXT_WIDTH,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=tuple(width // 24 for width in CHANNELS),  # despite its name, the number of heads
    )


def cosine(share: float, hold: float = 0.0) -> float:
    """1 until `hold`, then half a cosine down to 0.02 at share 1."""
    fall = max(0.0, share - hold) / (1 - hold)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, fall)))


# The facts of a caption: colour, shape and size of its first object (the upper, left or only one) and of its second;
# then how they are arranged (beside, above one another, alone), and the background. The heads of a `--relations` run
# predict them.
_OBJECT_SIZES = (len(COLOURS), len(SHAPES), len(SIZES))
_SCENE_SIZES = (3, len(COLOURS))
FACT_SIZES = (*_OBJECT_SIZES, *_OBJECT_SIZES, *_SCENE_SIZES)
_NOT_STATED = -100  # ignored by cross_entropy


def facts_of(scene: Scene) -> list[int]:
    """Each fact's number, in the order of FACT_SIZES."""

    def of(thing: Object) -> list[int]:
        return [list(COLOURS).index(thing.colour), SHAPES.index(thing.shape), list(SIZES).index(thing.size)]

    background = list(COLOURS).index(scene.background)
    if len(scene.objects) == 1:
        return [*of(scene.objects[0]), *of(scene.objects[0]), 2, background]
    first, second = scene.objects if sum(RELATIONS[scene.relation]) < 0 else reversed(scene.objects)
    return [*of(first), *of(second), abs(RELATIONS[scene.relation][1]), background]


class Scenes:
    """The endless stream of (latents, token ids), from a pool of encoded scenes.

    Encoding a scene costs about two training images, so each is shown some USES times, always with other noise: every
    batch brings batch / USES new scenes, which first fill the pool and then replace its oldest.
    """

    def __init__(
        self, vae: AutoencoderTiny, tokenizer: CLIPTokenizer, device: torch.device, seed: int, one_object: float
    ) -> None:
        self.vae, self.tokenizer, self.device, self.seed, self.one_object = vae, tokenizer, device, seed, one_object
        self.drawn = 0
        side = SIDE_PX // 8
        self.latents = torch.empty(POOL_SCENES, 4, side, side, dtype=torch.float16, device=device)
        self.ids = torch.empty(POOL_SCENES, TOKENS, dtype=torch.int64, device=device)
        self.facts = torch.empty(POOL_SCENES, len(FACT_SIZES), dtype=torch.int64, device=device)
        for _ in range(POOL_START // 64):
            self.draw(64)

    def draw(self, count: int) -> None:
        self.seed += 1
        scenes = draw_scenes(self.seed, count, one_object=self.one_object)
        images = render(scenes, SIDE_PX).to(self.device, memory_format=torch.channels_last)
        rows = torch.arange(self.drawn, self.drawn + count, device=self.device) % POOL_SCENES
        with torch.no_grad():
            self.latents[rows] = (self.vae.encode(images).latents * self.vae.config.scaling_factor).half()
        self.ids[rows] = token_ids(self.tokenizer, [scene.caption for scene in scenes]).to(self.device)
        self.facts[rows] = torch.tensor([facts_of(scene) for scene in scenes], device=self.device)
        self.drawn += count

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.draw(max(1, size // USES))
        rows = torch.randint(min(self.drawn, POOL_SCENES), (size,), device=self.device)
        return self.latents[rows].float(), self.ids[rows].clone(), self.facts[rows]


def token_ids(tokenizer: CLIPTokenizer, captions: list[str]) -> torch.Tensor:
    """[captions, TOKENS] int64, padded."""
    return torch.tensor(tokenizer(captions, padding="max_length", max_length=TOKENS, truncation=True)["input_ids"])


def average_gradients(parameters: list[nn.Parameter], world: int) -> None:
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(flat)
    pieces = torch.split(flat / world, [parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad.copy_(piece.view_as(parameter))


def save_pipeline(folder: pathlib.Path, vae, text_encoder, tokenizer, unet, tokenizer_files: pathlib.Path) -> None:
    """The four parts in fp16, readable by everyone (safetensors writes 0600)."""
    scheduler = DDIMScheduler(
        **NOISE,
        prediction_type="v_prediction",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        timestep_spacing="trailing",
    )
    pipeline = StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    half = folder.with_name(folder.name + ".new")
    pipeline.save_pretrained(half)
    for name in ("vae", "text_encoder", "unet"):
        part = type(getattr(pipeline, name)).from_pretrained(half / name, torch_dtype=torch.float16)
        if name != "text_encoder":  # diffusers would write down the folder that it was read from
            part.register_to_config(_name_or_path="")
        part.save_pretrained(half / name)
    for name in ("vocab.json", "merges.txt"):  # which transformers 5 leaves out; older ones and a next run need them
        shutil.copy(tokenizer_files / name, half / "tokenizer" / name)
    for file in half.rglob("*"):
        if file.is_file():
            file.chmod(0o644)
    shutil.rmtree(folder, ignore_errors=True)
    half.rename(folder)


class Trainer:
    """Text encoder and UNet with v-prediction (Salimans and Ho, 2022, app. D), AdamW and an average of the weights."""

    def __init__(
        self, out: pathlib.Path, options: argparse.Namespace, device: torch.device, rank: int, world: int
    ) -> None:
        self.out, self.options, self.device, self.rank, self.world = out, options, device, rank, world
        self.tokenizer = load_tokenizer(out / "tokenizer")
        self.vae = AutoencoderTiny.from_pretrained(out / "vae").eval().to(device, memory_format=torch.channels_last)
        torch.manual_seed(0)
        if options.start_from:
            self.text_encoder = CLIPTextModel.from_pretrained(options.start_from / "text_encoder", dtype=torch.float32)
            self.unet = UNet2DConditionModel.from_pretrained(options.start_from / "unet", torch_dtype=torch.float32)
        else:
            self.text_encoder, self.unet = new_text_encoder(self.tokenizer), new_unet()
        self.text_encoder.to(device).train()
        self.unet.to(device, memory_format=torch.channels_last).train()
        self.parameters = [*self.unet.parameters(), *self.text_encoder.parameters()]
        self.averages = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
        self.head = nn.ModuleList(nn.Linear(TEXT_WIDTH, sum(_OBJECT_SIZES + _SCENE_SIZES)) for _ in range(2)).to(device)
        self.head_optimizer = torch.optim.AdamW(self.head.parameters(), lr=3e-3)
        self.step, self.spent_s, self.running_mse, self.running_facts = 0, 0.0, None, 0.0
        self.resume()
        torch.manual_seed(options.seed + 1000 * rank + self.step)
        first_seed = 10_000_000 * (options.seed + 1) + 1_000_000 * rank + self.step
        self.scenes = Scenes(self.vae, self.tokenizer, device, first_seed, options.one_object)
        self.empty = token_ids(self.tokenizer, [""])[0].to(device)
        betas = torch.linspace(NOISE["beta_start"] ** 0.5, NOISE["beta_end"] ** 0.5, 1000, device=device) ** 2
        self.alphas = torch.cumprod(1 - betas, 0)

    def resume(self) -> None:
        if not (self.out / "checkpoint.pt").exists():
            return
        saved = torch.load(self.out / "checkpoint.pt", weights_only=True, map_location=self.device)
        for held, value in zip(self.parameters + self.averages, saved["parameters"] + saved["averages"], strict=True):
            held.data.copy_(value)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step, self.spent_s = saved["step"], saved["spent_s"]

    def save(self) -> None:
        if self.rank:
            return
        state = dict(
            parameters=[p.detach() for p in self.parameters],
            averages=self.averages,
            optimizer=self.optimizer.state_dict(),
        )
        torch.save({**state, "step": self.step, "spent_s": self.spent_s}, self.out / "checkpoint.new")
        (self.out / "checkpoint.new").rename(self.out / "checkpoint.pt")
        held = [parameter.detach().clone() for parameter in self.parameters]
        for parameter, average in zip(self.parameters, self.averages, strict=True):
            parameter.data.copy_(average)
        save_pipeline(
            self.out / "pipeline", self.vae, self.text_encoder, self.tokenizer, self.unet, self.out / "tokenizer"
        )
        for parameter, value in zip(self.parameters, held, strict=True):
            parameter.data.copy_(value)

    def loss(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean v-MSE of one batch, every timestep weighted alike (high noise decides the layout), and the facts."""
        size = self.options.batch
        x0, ids, facts = self.scenes.batch(size)
        dropped = torch.rand(size, device=self.device) < EMPTY_CAPTIONS
        ids[dropped], facts = self.empty, facts.masked_fill(dropped[:, None], _NOT_STATED)
        strata = (torch.arange(size, device=self.device) + torch.rand(1, device=self.device)) / size
        strata = torch.where(torch.rand(size, device=self.device) < self.options.high_noise, 0.6 + 0.4 * strata, strata)
        t = (strata[torch.randperm(size, device=self.device)] * 1000).long().clamp(0, 999)
        alpha = self.alphas[t].view(-1, 1, 1, 1)
        noise = torch.randn_like(x0)
        noisy = (alpha.sqrt() * x0 + (1 - alpha).sqrt() * noise).contiguous(memory_format=torch.channels_last)
        target = alpha.sqrt() * noise - (1 - alpha).sqrt() * x0
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            text = self.text_encoder(ids)[0]
            v = self.unet(noisy, t, encoder_hidden_states=text).sample
        return (v.float() - target).square().mean(), self.facts_loss(text, facts)

    def facts_loss(self, text: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        """The loss of predicting the facts from the last tokens, which alone attend to the whole caption.

        Half of them predict the first place, half the second, so that a place in the image need only attend to its own
        half.
        """
        halves = text[:, -ALWAYS_PADDING:].float().chunk(2, dim=1)
        loss = torch.zeros((), device=self.device)
        for place, (half, head) in enumerate(zip(halves, self.head, strict=True)):
            predicted = [3 * place, 3 * place + 1, 3 * place + 2, 6, 7]
            for fact, logits in zip(
                predicted, torch.split(head(half.mean(1)), _OBJECT_SIZES + _SCENE_SIZES, dim=1), strict=True
            ):
                loss = loss + cross_entropy(logits, facts[:, fact], ignore_index=_NOT_STATED, reduction="sum")
        return loss / (2 * 5 * len(facts))

    def train_step(self, share: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.rate * min(1, (self.step + 1) / 200) * cosine(share, self.options.hold)
        loss, facts_loss = self.loss()
        self.optimizer.zero_grad()
        self.head_optimizer.zero_grad()
        (loss + self.options.relations * facts_loss).backward()
        if self.world > 1:
            average_gradients([*self.parameters, *self.head.parameters()], self.world)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.head_optimizer.step()
        decay = min(self.options.average, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.averages, [p.detach() for p in self.parameters], 1 - decay)
        self.step += 1
        value = loss.item()
        self.running_mse = value if self.running_mse is None else 0.99 * self.running_mse + 0.01 * value
        self.running_facts = 0.95 * self.running_facts + 0.05 * facts_loss.item()

    def run(self) -> None:
        total_s, started, last_save = self.options.minutes * 60, time.time() - self.spent_s, time.time()
        while True:
            self.spent_s = time.time() - started
            share = torch.tensor(self.spent_s / total_s)
            if self.world > 1:
                dist.broadcast(share, 0)  # every process must agree on the last step
            if share >= 1:
                break
            self.train_step(float(share))
            if self.rank == 0 and self.step % 100 == 0:
                images = self.step * self.options.batch * self.world
                print(
                    f"step {self.step}  v-MSE {self.running_mse:.4f}  facts {self.running_facts:.3f}  images {images}  "
                    f"{self.spent_s:.0f} s",
                    flush=True,
                )
            if time.time() - last_save > CHECKPOINT_EVERY_S:
                self.save()
                last_save = time.time()
        self.save()


def begin_run(options: argparse.Namespace) -> Run:
    """The run of this training, the same one when it is resumed. Its data is what draws the scenes."""
    options.out.mkdir(parents=True, exist_ok=True)
    file, id_file = options.out / "lineage.jsonl", options.out / "run_id"
    if not id_file.exists():
        id_file.write_text(str(uuid.uuid4()))
    before = options.start_from and options.start_from / LINEAGE_FILE
    if before and before.exists() and not file.exists():
        shutil.copy(before, file)
    scenes = version_of(pathlib.Path(__file__).with_name("scenes.py")).rpartition("@")[2]
    run = Run(
        "train",
        namespace="demo_model",
        to=file,
        inputs=[DatasetRef("demo_model", "scenes", scenes)],
        params={name: value for name, value in vars(options).items() if name != "out"},
        run_id=id_file.read_text(),
    )
    if options.start_from:
        run.input_model(MODEL, options.start_from)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, required=True, help="of the diffusion training, over all its runs")
    parser.add_argument("--vae-minutes", type=float, default=4)
    parser.add_argument("--start-from", type=pathlib.Path, help="a pipeline folder whose parts to go on from")
    parser.add_argument("--batch", type=int, default=16, help="images a step and process")
    parser.add_argument("--rate", type=float, default=8e-4, help="highest learning rate")
    parser.add_argument("--one-object", type=float, default=0.4, help="share of scenes with one object")
    parser.add_argument("--high-noise", type=float, default=0.0, help="share of images with a timestep of 600 or more")
    parser.add_argument(
        "--relations", type=float, default=0.0, help="weight of the relations head's loss on the text encoder"
    )
    parser.add_argument("--average", type=float, default=0.9995, help="decay of the average of the weights")
    parser.add_argument("--hold", type=float, default=0.5, help="share of the minutes before the learning rate falls")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1 if world > 1 else os.cpu_count() or 1)
    torch.set_flush_denormal(True)
    if world > 1:
        dist.init_process_group("gloo")
    with begin_run(options) if rank == 0 else contextlib.nullcontext() as run:
        if run is not None and not (options.out / "vae" / "config.json").exists():
            with run.step("autoencoder"):
                prepare(options, device)
        if world > 1:
            dist.barrier()
        trainer = Trainer(options.out, options, device, rank, world)
        with contextlib.nullcontext() if run is None else run.step("diffusion") as step:
            trainer.run()
            if step is not None:
                step.metric("steps", trainer.step)
                step.metric("images", trainer.step * options.batch * world)
                if trainer.running_mse is not None:
                    step.metric("v_mse", trainer.running_mse)
        if run is not None:
            run.output_model(MODEL, options.out / "pipeline")
    if run is not None:
        shutil.copy(options.out / "lineage.jsonl", options.out / "pipeline" / LINEAGE_FILE)


def prepare(options: argparse.Namespace, device: torch.device) -> None:
    """Make the tokenizer and train the autoencoder, or take those of an earlier model."""
    if options.start_from:
        shutil.copytree(options.start_from / "tokenizer", options.out / "tokenizer")
        AutoencoderTiny.from_pretrained(options.start_from / "vae", torch_dtype=torch.float32).save_pretrained(
            options.out / "vae"
        )
    else:
        make_tokenizer(options.out / "tokenizer")
        torch.manual_seed(options.seed)
        train_vae(new_vae(), options.vae_minutes * 60, device).save_pretrained(options.out / "vae")


if __name__ == "__main__":
    main()
