"""What only text encoders have: the properties of a model, and the texts of a request as token ids.

Texts are tokenized in front ends; an engine gets ids and never sees a text. It returns float32 numbers: one row for
each text, or for each token if tokens are classified. Cutting and normalizing embeddings is the engine's; activations,
labels and the order of ranks are the front end's.
"""

from typing import ClassVar, Literal

from msgspec import Struct

from noria.protocol.model_spec import ModelSpec

EncoderTask = Literal["embedding", "classification", "token_classification", "reranking"]

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
"""How embeddings of tokens become one of the text, in sentence-transformers' names."""

Activation = Literal["identity", "sigmoid", "softmax"]
"""What turns logits into scores."""

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
"""transformers' names."""


class EncoderModelSpec(ModelSpec, frozen=True, kw_only=True, tag_field="kind", tag="encoder"):
    """A text encoder: what its requests may be, and what its results are."""

    kind: ClassVar[Literal["encoder"]] = "encoder"

    task: EncoderTask
    architecture: str  # its transformers class, such as "BertModel"
    dimensions: int  # numbers in a row of a result: those of an embedding, or the number of labels
    max_length: int  # tokens of a text, special tokens included
    vocab_size: int  # token ids are less than that
    inputs: tuple[str, ...]  # its tensors: "input_ids", "attention_mask", and "token_type_ids" if it tells pairs apart
    # Embeddings only:
    pooling: tuple[Pooling, ...] = ()  # several: their results, concatenated
    normalize: bool = False  # whether its own configuration makes embeddings of length 1
    prompts: tuple[tuple[str, str], ...] = ()  # name, and the text that is put before a text
    default_prompt: str | None = None  # a name of `prompts`
    matryoshka_dimensions: tuple[int, ...] | None = None  # to which embeddings may be cut; None: nothing says
    # All other tasks only:
    labels: tuple[str, ...] = ()  # one for each of `dimensions`
    problem_type: ProblemType | None = None
    activation: Activation = "identity"


class TextSettingsView(Struct, frozen=True, tag="encoder"):
    """A request without its texts, as live views and logs show it."""

    task: EncoderTask
    num_texts: int  # a pair counts as one
    num_tokens: int  # of all texts, special tokens included
    num_truncated: int = 0  # texts that were cut to the model's maximum length


class TextPayload(TextSettingsView, frozen=True, tag="encoder", kw_only=True):
    """The texts of a request, as token ids; each is one row of a batch.

    The ids of all texts follow each other without padding, each in `id_bytes` bytes, little-endian. They are bytes in
    the message: a list of MessagePack integers takes longer to read, and a frame beside it longer to send.
    """

    lengths: tuple[int, ...]  # tokens of each text, special tokens included
    token_ids: bytes
    type_ids: bytes = b""  # a byte for each token: 1 in the second text of a pair; empty: all 0
    id_bytes: Literal[2, 4] = 2
    dimensions: int | None = None  # to which embeddings are cut; None: all
    normalize: bool = True  # whether embeddings have length 1, after they were cut

    @property
    def num_results(self) -> int:
        """The number of texts."""
        return self.num_texts

    @property
    def num_steps(self) -> int:
        """1: each text takes one call."""
        return 1

    @property
    def settings_view(self) -> TextSettingsView:
        """What live views show of it."""
        return TextSettingsView(self.task, self.num_texts, self.num_tokens, self.num_truncated)


class TextTimings(Struct, frozen=True, tag="encoder"):
    """Seconds that a request spent in each stage of the engine, by the text that finished last.

    For a failed request: until its end. A stage not reached has 0.
    """

    queue_s: float
    infer_s: float = 0.0  # the whole batch


class TextResult(Struct, frozen=True, tag="encoder"):
    """The shape of the results of a finished request.

    The frame beside the message has `num_rows` × `num_columns` little-endian float32. There is one row for each text,
    in the request's order; for token classification one for each token, special tokens included.
    """

    num_rows: int
    num_columns: int
