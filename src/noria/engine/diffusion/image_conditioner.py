"""The inputs of the calls for images, besides latents and the time: by call, of the model and of its refiner.

Images that requests bring are encoded here, too.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from noria.config import EngineConfig
from noria.engine.diffusion.guided_calls import GuidedImage
from noria.engine.diffusion.input_images.image_prompts import ImagePrompt
from noria.engine.diffusion.input_images.start_latents import StartLatents
from noria.engine.diffusion.loras.lora_cache import NO_ADAPTERS, Adapters
from noria.engine.diffusion.loras.model_loras import ModelLoras, Prompt
from noria.engine.diffusion.preparation import PreparedImageRequest, refiner_of
from noria.engine.diffusion.request import ScheduledPrompt, schedule_prompt
from noria.models.diffusion.conditioning import Conditioning, ReferenceTokens
from noria.models.diffusion.diffusion_model import DiffusionModel, ImagePromptedModel, ReferencedModel
from noria.models.diffusion.ip_adapter import ImageTokens
from noria.models.diffusion.prompts.clip_prompt import PromptText
from noria.models.diffusion.prompts.multimodal_prompt import MultimodalPrompt

PromptT = TypeVar("PromptT", bound=Prompt)


class PromptEmbeddingCache(Generic[PromptT]):
    """An LRU cache of conditioning by prompt, of at most `max_bytes`; missing prompts are encoded together.

    With `padded_batch`, prompts are encoded in batches of exactly that size, because a kernel's result may differ in
    the last bit with its batch size.
    """

    def __init__(
        self,
        text_encode: Callable[[Sequence[PromptT]], list[Conditioning]],
        max_bytes: int,
        padded_batch: int | None,
    ) -> None:
        self._text_encode, self._max_bytes, self._padded_batch = text_encode, max_bytes, padded_batch
        self._entries: OrderedDict[PromptT, Conditioning] = OrderedDict()
        self._num_bytes = self.max_entry_bytes = 0  # bytes of all entries; those of the largest one so far

    def get(self, prompts: Iterable[PromptT]) -> dict[PromptT, Conditioning]:
        """Return the conditioning of each distinct prompt."""
        wanted = dict.fromkeys(prompts)
        missing = [prompt for prompt in wanted if prompt not in self._entries]
        found = {prompt: self._entries[prompt] for prompt in wanted if prompt in self._entries}
        size = self._padded_batch or max(1, len(missing))
        for start in range(0, len(missing), size):
            chunk = missing[start : start + size]
            padding = chunk[:1] * (size - len(chunk)) if self._padded_batch else []
            encoded = self._text_encode(chunk + padding)
            # A view would keep the whole batch in memory as long as one of its prompts is cached.
            found |= {prompt: row.clone() for prompt, row in zip(chunk, encoded, strict=False)}
        self._num_bytes += sum(found[prompt].nbytes for prompt in missing)
        self.max_entry_bytes = max([self.max_entry_bytes, *[found[prompt].nbytes for prompt in missing]])
        for prompt in wanted:
            self._entries[prompt] = found[prompt]
            self._entries.move_to_end(prompt)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._entries.popitem(last=False)[1].nbytes
        return found


class ImageConditioner:
    """Conditions the images of requests on their prompts, of which the latest are cached for each stage."""

    def __init__(self, model: DiffusionModel, config: EngineConfig, loras: ModelLoras) -> None:
        self._loras, self._refiner = loras, refiner_of(model)
        limits = config.embedding_cache_bytes, 8 if config.buckets else None
        self._embeddings = PromptEmbeddingCache(loras.text_encode, *limits)
        if self._refiner is not None:
            self._refiner_embeddings = PromptEmbeddingCache(self._refiner.text_encode, *limits)

    @property
    def prompt_bytes(self) -> int:
        """The bytes of the largest embeddings of a prompt so far, at all stages."""
        of_refiner = 0 if self._refiner is None else self._refiner_embeddings.max_entry_bytes
        return self._embeddings.max_entry_bytes + of_refiner

    def condition(self, requests: Sequence[PreparedImageRequest]) -> dict[str, tuple[GuidedImage, ...]]:
        """Return, by attempt, what each image of a request has at each call; new prompts are encoded together."""
        embeddings = self._embeddings.get(
            self._key(p, text) for p in requests for text in _texts(p, p.prompts, p.negative_prompt)
        )
        refined = self._condition_refiner([p for p in requests if p.request.payload.refiner is not None])
        found: dict[str, tuple[GuidedImage, ...]] = {}
        for p in requests:
            by_text = {text: embeddings[self._key(p, text)] for text in _texts(p, p.prompts, p.negative_prompt)}
            references = None if p.references is None else p.references.tokens
            image_tokens = None if p.image_prompt is None else p.image_prompt.tokens
            images = _by_call(p, p.prompts, p.negative_prompt, by_text, by_text, p.adapters, references, image_tokens)
            if (of_refiner := refined.get(p.request.attempt_id)) is not None:
                images = images[: p.second_stage_from] + of_refiner[p.second_stage_from :]
            found[p.request.attempt_id] = images
        return found

    def _key(self, p: PreparedImageRequest, text: PromptText) -> Prompt:
        """Return the key of the embedding of a text of a request, which the text encoder may read with its images."""
        if p.references is None or p.references.of_prompt is None:
            return self._loras.prompt_key(text, p.adapters)
        assert text is None or isinstance(text, str), "only models of CLIP have others"
        return self._loras.prompt_key(MultimodalPrompt.of(text, p.references.of_prompt), p.adapters)

    def _condition_refiner(self, requests: Sequence[PreparedImageRequest]) -> dict[str, tuple[GuidedImage, ...]]:
        """Return the same of requests that have calls of the refiner."""
        if not requests or self._refiner is None:
            return {}
        refiner = self._refiner
        prompts: dict[str, tuple[tuple[ScheduledPrompt, ...], ScheduledPrompt]] = {}
        for p in requests:
            payload, num_calls = p.request.payload, p.calls_of_passes()
            read = functools.partial(schedule_prompt, payload=payload, num_calls=num_calls, embeddings=p.embeddings)
            (negative,) = read(refiner.guidance.negative(payload.negative_prompt), is_joined=False)
            prompts[p.request.attempt_id] = read(payload.prompt), negative
        embeddings = self._refiner_embeddings.get(
            text for p in requests for text in _texts(p, *prompts[p.request.attempt_id])
        )
        found = {}
        for p in requests:
            positive, negative = prompts[p.request.attempt_id]
            of_negatives = {text: refiner.as_negative(embeddings[text]) for text in negative.by_call if p.guided}
            found[p.request.attempt_id] = _by_call(p, positive, negative, embeddings, of_negatives, NO_ADAPTERS)
        return found


def encode_images(requests: Sequence[PreparedImageRequest], model: DiffusionModel, batch_size: int | None) -> None:
    """Encode what requests bring, if it is not yet: start images, of one size, references and images of IP-Adapters.

    `batch_size` is that of `StartLatents.encode`.
    """
    StartLatents.encode([p.start for p in requests if p.start is not None], model, batch_size)
    for p in requests:
        if p.references is not None:
            assert isinstance(model, ReferencedModel)
            p.references.encode(model)
    if image_prompts := [p.image_prompt for p in requests if p.image_prompt is not None]:
        assert isinstance(model, ImagePromptedModel)
        ImagePrompt.encode(image_prompts, model, batch_size)


def _texts(p: PreparedImageRequest, prompts: Sequence[ScheduledPrompt], negative: ScheduledPrompt) -> list[PromptText]:
    """Return the distinct texts of a request, in the order in which they are encoded."""
    return list(dict.fromkeys(text for each in [negative] * p.guided + [*prompts] for text in each.by_call))


def _by_call(
    p: PreparedImageRequest,
    prompts: Sequence[ScheduledPrompt],
    negative: ScheduledPrompt,
    embeddings: Mapping[PromptText, Conditioning],
    negatives: Mapping[PromptText, Conditioning],
    adapters: Adapters,
    references: ReferenceTokens | None = None,
    image_tokens: ImageTokens | None = None,
) -> tuple[GuidedImage, ...]:
    """Return what an image of a request has at each call; equal ones are one object."""
    made: dict[tuple[PromptText, ...], GuidedImage] = {}

    def make(call: int) -> GuidedImage:
        texts = tuple(each.at(call) for each in (*prompts, negative))
        if texts not in made:
            made[texts] = GuidedImage(
                tuple(embeddings[text] for text in texts[:-1]),
                tuple(each.weight for each in prompts),
                negatives[texts[-1]] if p.guided else None,
                p.request.payload.guidance_scale,
                adapters,
                references,
                image_tokens,
            )
        return made[texts]

    if all(len(each.by_call) == 1 for each in (*prompts, negative)):
        return (make(0),) * p.num_calls
    return tuple(make(call) for call in range(p.num_calls))
