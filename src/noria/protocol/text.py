"""The types that only text encoders have: the properties of a model, and the texts of a request as token ids.

Texts are tokenized in front ends; an engine gets ids and never sees a text. It returns float32 numbers: one row for
each text, for each token if the model's results are of tokens, or for each number that is not 0 if they are sparse.
Cutting and normalizing embeddings is the engine's; activations, labels and the order of ranks are the front end's.
"""

from typing import ClassVar, Literal

from msgspec import Struct

from noria.protocol.model_spec import ModelSpec

EncoderTask = Literal[
    "embedding", "sparse_embedding", "token_embedding", "classification", "token_classification", "reranking"
]

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
"""How embeddings of tokens become one of the text, in sentence-transformers' names."""

DenseActivation = Literal["Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"]
"""The function after a `DenseLayer`, in torch's names."""

Activation = Literal["identity", "sigmoid", "softmax"]
"""The function that turns logits into scores."""

Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
"""How two embeddings are compared, in sentence-transformers' names; distances are negative."""

TruncationSide = Literal["left", "right"]
"""The end of a text at which it is cut, if it is too long."""

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
"""transformers' names."""


class DenseLayer(Struct, frozen=True):
    """A linear layer and a function of pooled embeddings, as sentence-transformers' module Dense."""

    path: str  # the subfolder that has its weights; empty: the model's folder
    in_features: int
    out_features: int
    has_bias: bool
    activation: DenseActivation
    normalizes_first: bool = False  # whether embeddings get length 1 before it
    stem: str = "model"  # its weights file, without ".safetensors"


SpladeStrategy = Literal["max", "sum"]
"""How the numbers of tokens become those of the text."""

SpladeActivation = Literal["relu", "log1p_relu"]
"""The function before log(1 + x)."""


class Splade(Struct, frozen=True):
    """How the logits of a masked language model become a sparse embedding, as sentence-transformers' SpladePooling."""

    strategy: SpladeStrategy = "max"
    activation: SpladeActivation = "relu"


class LateInteraction(Struct, frozen=True):
    """How a model that embeds tokens encodes queries and documents, as ColBERT's."""

    query_length: int  # tokens to which queries are cut
    document_length: int
    fill_id: int | None = None  # the token that fills queries up; None: they are not
    fill_length: int = 0  # tokens up to which it does
    is_fill_seen: bool = False  # whether a query's own tokens attend to those that fill it up
    skipped_ids: tuple[int, ...] = ()  # tokens of documents that get no vector
    markers: tuple[str, ...] = ()  # beginnings of prompts, each of them one token
    skips_first: bool = False  # whether the first token gets no vector, also of queries
    ends_texts: bool = True  # whether the last token is a special one, which cutting keeps


class TokenHead(Struct, frozen=True):
    """The rows of a matrix of the checkpoint that make one logit of the last token's state."""

    tensor: str  # its name in the weights
    true_row: int
    false_row: int | None = None  # the logit is the first row's less this one's; None: the first row's


MAX_PIXEL_BYTES = 2**26
"""The bytes that the images of a request may have as the model sees them: 445 of 224 × 224 pixels."""


class Patches(Struct, frozen=True):
    """The squares that an image of any shape is cut into, after it was resized to whole ones."""

    side_px: int
    max_number: int  # to as many an image is resized as its proportions allow

    @property
    def num_bytes(self) -> int:
        """The bytes of an image: `max_number` times [side, side, 3] uint8 RGB, and its rows and columns, 2 each."""
        return self.max_number * self.side_px**2 * 3 + 4


class ImageInput(Struct, frozen=True):
    """How an image becomes what the image tower of a model sees, as transformers' image processors compute it."""

    architecture: str  # the tower's transformers class
    side_px: int  # the tower sees a square; 0: `patches`
    resized_px: tuple[int, int] | int  # height and width, or the shorter side; of a larger one the middle is seen
    resample: int  # the filter of resizing, by Pillow's number
    scale: tuple[float, float, float]  # what the values of red, green and blue, 0 to 255, are multiplied by
    shift: tuple[float, float, float]  # what is added then
    num_tokens: int  # tokens of a text that take about as long as an image
    patches: Patches | None = None  # squares of images of any shape; None: all have one shape

    @property
    def num_bytes(self) -> int:
        """The bytes of an image: [side, side, 3] uint8 RGB, or those of `patches`."""
        return self.side_px**2 * 3 if self.patches is None else self.patches.num_bytes


class TaskAdapter(Struct, frozen=True):
    """A LoRA of a task."""

    task: str
    path: str  # the subfolder that has its weights, as PEFT writes them; empty: the model's own weights have it
    rank: int
    scale: float  # what its product is multiplied by


PairField = Literal["instruction", "query", "document"]


class PairTemplate(Struct, frozen=True):
    """The text that a decoder judges, made of a query and a document. Nothing is put around it."""

    pieces: tuple[str, ...]  # what stands before, between and after the fields: one more than these
    fields: tuple[PairField, ...]
    instruction: str = ""  # unless a request has another one

    def fill(self, query: str, document: str, instruction: str | None = None) -> str:
        """Return the text; `instruction` is in place of the template's own."""
        values = {"query": query, "document": document, "instruction": instruction or self.instruction}
        between = (values[name] + piece for name, piece in zip(self.fields, self.pieces[1:], strict=True))
        return self.pieces[0] + "".join(between)


class EncoderModelSpec(ModelSpec, frozen=True, kw_only=True, tag_field="kind", tag="encoder"):
    """A text encoder: what its requests may be, and what its results are."""

    kind: ClassVar[Literal["encoder"]] = "encoder"

    task: EncoderTask
    architecture: str  # its transformers class, such as "BertModel"
    dimensions: int  # numbers of a text's or token's result: those of an embedding, or the number of labels
    max_length: int  # tokens of a text, special tokens included
    vocab_size: int  # token ids are less than that
    # Its tensors: "input_ids", "attention_mask", "token_type_ids" if it tells pairs apart, "adapter_ids".
    inputs: tuple[str, ...]
    truncation_side: TruncationSide = "right"  # unless a request says otherwise
    unread_keys: tuple[str, ...] = ()  # keys of its configuration, with their values: nothing here knows what they mean
    pooling: tuple[Pooling, ...] = ()  # for embeddings and decoders; several: their results, concatenated
    fill_id: int | None = None  # the token that fills texts up to `max_length`, which the model sees; None: none does
    lowercases: bool = False  # whether texts are made lower case before `tokenizer.json` sees them
    head: TokenHead | None = None  # for decoders that rerank
    template: PairTemplate | None = None  # likewise
    prompts: tuple[tuple[str, str], ...] = ()  # name, and the text before a text; with a template its instruction
    default_prompt: str | None = None  # a name of `prompts`
    splade: Splade | None = None  # for sparse encoders
    unweighted_ids: tuple[int, ...] = ()  # tokens that have no weight, if sparse embeddings are weights of tokens
    late_interaction: LateInteraction | None = None  # for encoders that embed tokens
    image_input: ImageInput | None = None  # for models that embed images, too; None: texts alone
    # Embeddings, of texts or tokens, only:
    adapters: tuple[TaskAdapter, ...] = ()  # each text has one of them, or none
    dense: tuple[DenseLayer, ...] = ()  # layers between the pooling and the normalization, in order
    normalize: bool = False  # whether its own configuration makes embeddings of length 1
    matryoshka_dimensions: tuple[int, ...] | None = None  # to which embeddings may be cut; None: nothing says
    similarity: Similarity = "cosine"
    # All other tasks only:
    labels: tuple[str, ...] = ()  # one for each of `dimensions`
    problem_type: ProblemType | None = None
    activation: Activation = "identity"


class TextSettingsView(Struct, frozen=True, tag="encoder"):
    """A request without its texts, as live views and logs show it."""

    task: EncoderTask
    num_texts: int  # a pair counts as one
    num_tokens: int  # tokens of all texts, special tokens included
    num_truncated: int = 0  # texts that were cut to the model's maximum length


class TextPayload(TextSettingsView, frozen=True, tag="encoder", kw_only=True):
    """The texts of a request, as token ids, and its images; each is one row of a batch.

    The ids of all texts follow each other without padding, each in `id_bytes` bytes, little-endian. They are bytes in
    the message: a list of MessagePack integers takes longer to read, and a frame beside it longer to send. The images
    are that frame, one after the other, each of `ImageInput.num_bytes`.
    """

    lengths: tuple[int, ...]  # tokens of each text, special tokens included; of images `ImageInput.num_tokens`
    token_ids: bytes
    type_ids: bytes = b""  # a byte for each token: 1 in the second text of a pair; empty: all 0
    num_seen: tuple[int, ...] = ()  # the first tokens of each text, to which all attend; empty: all
    id_bytes: Literal[2, 4] = 2
    image_places: tuple[int, ...] = ()  # the rows, ascending, that are images
    adapter: int = 0  # the place, from 1, in `EncoderModelSpec.adapters`; 0: none
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
        """The settings that live views show."""
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
    in the request's order; of tokens one for each, special tokens included. A sparse embedding has one for each number
    that is not 0: the token's id, and the number.
    """

    num_rows: int
    num_columns: int
    row_counts: tuple[int, ...] = ()  # the rows of each text, if they are sparse
