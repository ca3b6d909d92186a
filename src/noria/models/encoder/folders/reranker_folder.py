"""Describes decoders that rerank: the template of the texts that they judge, and the rows of their head that score.

The template is that of the folder, if it renders a query and a document as sentence-transformers' CrossEncoder asks for
them, or that of noria.json. Of Jinja only what such templates are made of is read, and nothing is executed.
"""

import ast
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from noria.errors import ModelError, short_list, short_repr
from noria.models.encoder.architectures import CAUSAL
from noria.models.encoder.folders.config_files import Config, Module, RerankerOverrides, SentenceTransformers
from noria.models.files.weights import Shapes, convert, read_object, read_text
from noria.protocol.text import EncoderModelSpec, PairField, PairTemplate, TokenHead

SCORE_MODULE = "LogitScore"
_HINT = "Write the template as `reranker` into noria.json (docs/encoders.md has Qwen3-Reranker's)."
_FIELDS: Mapping[str, PairField] = {"system": "instruction", "query": "query", "document": "document"}
"""By the roles of messages."""

_MAX_TEMPLATE_CHARS = 65_536  # Qwen3-Reranker's has some 700
_OPENING = re.compile(r"\{[#%{]")
_CLOSING = {"{#": "#}", "{%": "%}", "{{": "}}"}
_STRING = r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
_ROLE = r"""messages\s*\|\s*selectattr\(\s*["']role["']\s*,\s*["'](?:eq|equalto|==)["']\s*,\s*["'](\w+)["']\s*\)"""
_CONTENT = re.compile(
    rf"""{_ROLE}\s*\|\s*map\(\s*attribute\s*=\s*["']content["']\s*\)\s*\|\s*first(?:\s*\|\s*default\(\s*({_STRING})\s*\))?"""
)
_FIRST = re.compile(rf"""\(\s*{_ROLE}\s*\|\s*first\s*\)(?:\.content|\[["']content["']\])()""")
_SET = re.compile(r"set\s+(\w+)\s*=\s*(.*)", re.DOTALL)
_SPECIAL = re.compile(r"<\|[^|<>]+\|>")


class _LogitScore(msgspec.Struct, frozen=True):
    """config.json of a LogitScore."""

    true_token_id: int
    false_token_id: int | None = None


def is_decoder_reranker(
    folder: pathlib.Path, tree: Mapping[str, Any], modules: Sequence[Module], overrides: RerankerOverrides | None
) -> bool:
    """Whether a folder with this config.json is a decoder that reranks. Raises ModelError: noria.json alone says so."""
    is_decoder = tree.get("model_type") in CAUSAL
    if not is_decoder or len(modules) > 1:
        reranks = is_decoder and [each.name for each in modules[1:]] == [SCORE_MODULE]
        if overrides is not None and not reranks:
            raise ModelError(
                f"{folder / 'noria.json'}: `reranker` is for decoders that rerank, which this model of type "
                f"{short_repr(tree.get('model_type'))} is not. Remove it."
            )
        return reranks
    return overrides is not None or _has_classifier(tree)


def _has_classifier(tree: Mapping[str, Any]) -> bool:
    classes = tree.get("architectures")
    return isinstance(classes, list) and str(classes[:1]).endswith("ForSequenceClassification']")


def describe_reranker(
    folder: pathlib.Path,
    spec: EncoderModelSpec,
    config: Config,
    modules: Sequence[Module],
    library: SentenceTransformers,
    overrides: RerankerOverrides | None,
    shapes: Shapes,
) -> EncoderModelSpec:
    """Add what decoders that rerank have. Raises ModelError: there is no template or no head, or it does not fit."""
    tree = read_object(folder / "config.json")
    tokenizer = read_object(folder / "tokenizer.json")
    template = _template(folder, modules, overrides)
    _check_special_tokens(folder, template, tokenizer)
    if _has_classifier(tree):
        head = TokenHead("score.weight", 0)
    else:
        head = _rows(folder, modules, overrides, tokenizer, _head_name(tree, shapes))
    _check_head(folder, head, config, shapes)
    return msgspec.structs.replace(
        spec,
        dimensions=1,
        labels=("LABEL_0",),
        pooling=("lasttoken",),
        head=head,
        template=template,
        prompts=tuple(library.prompt_texts.items()),
        default_prompt=library.default_prompt_name,
    )


def _template(folder: pathlib.Path, modules: Sequence[Module], overrides: RerankerOverrides | None) -> PairTemplate:
    if overrides is not None and overrides.template is not None:
        return _own_template(folder / "noria.json", overrides.template, overrides.instruction)
    file, source = _chat_template(folder)
    if source is None:
        raise ModelError(f"{folder}: the model is a decoder that reranks, and has no chat template. {_HINT}")
    if modules and not _renders_messages(folder):
        raise ModelError(
            f"{folder / 'sentence_bert_config.json'}: modality_config has no `message`, so that the chat template is "
            f"not used. {_HINT}"
        )
    template = parse_chat_template(file, source)
    instruction = overrides.instruction if overrides is not None else None
    return template if instruction is None else msgspec.structs.replace(template, instruction=instruction)


def _own_template(file: pathlib.Path, source: str, instruction: str | None) -> PairTemplate:
    _check_length(file, "reranker.template", source)
    parts = re.split(r"\{(instruction|query|document)\}", source)
    return _checked(file, "reranker.template", parts[::2], parts[1::2], instruction or "")


def _checked(
    file: pathlib.Path, what: str, pieces: Sequence[str], fields: Sequence[Any], instruction: str
) -> PairTemplate:
    if fields.count("query") != 1 or fields.count("document") != 1 or fields.count("instruction") > 1:
        raise ModelError(
            f"{file}: {what} has the fields {short_list(fields) or 'none'}; needed are one query and one document, and "
            "at most one instruction."
        )
    return PairTemplate(tuple(pieces), tuple(fields), instruction)


def _chat_template(folder: pathlib.Path) -> tuple[pathlib.Path, str | None]:
    """Return the file that has the chat template, and the template, as transformers finds it."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file, read_text(file).decode(errors="replace")
    file = folder / "tokenizer_config.json"
    found = read_object(file).get("chat_template") if file.exists() else None
    return file, found if isinstance(found, str) else None


def _renders_messages(folder: pathlib.Path) -> bool:
    file = folder / "sentence_bert_config.json"
    modality = read_object(file).get("modality_config") if file.exists() else None
    return modality is None or (isinstance(modality, dict) and "message" in modality)


def parse_chat_template(file: pathlib.Path, source: str) -> PairTemplate:
    """Return a template that shows the first message of the roles query and document, and perhaps of system.

    Whitespace around tags goes as in transformers' environment of Jinja (trim_blocks, lstrip_blocks).

    Raises ModelError: it has anything else, as templates of conversations do.
    """
    pieces, fields, instruction = [""], list[PairField](), ""
    variables: dict[str, tuple[PairField, str]] = {}
    parts = _split(file, source.removesuffix("\n"))
    for index, part in enumerate(parts):
        if index % 2 == 0:
            pieces[-1] += _trim(
                part, *(parts[each] if 0 <= each < len(parts) else "" for each in (index - 1, index + 1))
            )
            continue
        code = part[2:-2].strip("-+").strip()
        if part.startswith("{#"):
            continue
        name, value = "", code
        if part.startswith("{%"):
            statement = _SET.fullmatch(code)
            if statement is None:
                raise _unreadable(file, part)
            name, value = statement[1], statement[2].strip()
        try:
            found = variables.get(value) or _message(value)
        except (SyntaxError, ValueError) as error:  # in the string of a default
            raise _unreadable(file, part) from error
        if found is None:
            raise _unreadable(file, part)
        if name:
            variables[name] = found
            continue
        fields.append(found[0])
        pieces.append("")
        if found[0] == "instruction":
            instruction = found[1]
    return _checked(file, "the chat template", pieces, fields, instruction)


def _split(file: pathlib.Path, source: str) -> list[str]:
    """Return the texts of a template, and between them its tags."""
    _check_length(file, "the chat template", source)
    parts, end = list[str](), 0
    while (opening := _OPENING.search(source, end)) is not None:
        closing = source.find(_CLOSING[opening[0]], opening.end())
        if closing < 0:
            raise _unreadable(file, source[opening.start() :][:100])
        parts += source[end : opening.start()], source[opening.start() : closing + 2]
        end = closing + 2
    return [*parts, source[end:]]


def _check_length(file: pathlib.Path, what: str, source: str) -> None:
    if len(source) > _MAX_TEMPLATE_CHARS:
        raise ModelError(
            f"{file}: {what} has {len(source)} characters; allowed are at most {_MAX_TEMPLATE_CHARS}. Shorten it."
        )


def _unreadable(file: pathlib.Path, tag: str) -> ModelError:
    return ModelError(
        f"{file}: the chat template has {short_repr(' '.join(tag.split()))}, which is not the content of a query, a "
        f"document or an instruction: it is of a conversation, or of another form. {_HINT}"
    )


def _trim(text: str, before: str, after: str) -> str:
    """Return the text between two tags, without what these remove of it."""
    line_start = text.rfind("\n") + 1
    if after.startswith(("{%", "{#")) and (line_start or not before) and not text[line_start:].strip():
        text = text[:line_start]
    if re.match(r"\{[{%#]-", after):
        text = text.rstrip()
    if before.endswith(("-}}", "-%}", "-#}")):
        return text.lstrip()
    return text.removeprefix("\n") if before.endswith(("%}", "#}")) else text


def _message(code: str) -> tuple[PairField, str] | None:
    """Return the field that an expression shows, and its default."""
    match = _CONTENT.fullmatch(code) or _FIRST.fullmatch(code)
    if match is None or match[1] not in _FIELDS:
        return None
    return _FIELDS[match[1]], ast.literal_eval(match[2]) if match[2] else ""


def _check_special_tokens(folder: pathlib.Path, template: PairTemplate, tokenizer: Mapping[str, Any]) -> None:
    known = {each.get("content") for each in tokenizer.get("added_tokens") or () if isinstance(each, dict)}
    for token in _SPECIAL.findall("".join(template.pieces)):
        if token not in known:
            raise ModelError(
                f"{folder}: the template has {short_repr(token)}, which is no token of tokenizer.json: it is the "
                "template of another model."
            )


def _head_name(tree: Mapping[str, Any], shapes: Shapes) -> str:
    names = ("model.embed_tokens.weight", "embed_tokens.weight")
    if tree.get("tie_word_embeddings"):
        return next((name for name in names if name in shapes), names[0])
    return "lm_head.weight"


def _rows(
    folder: pathlib.Path,
    modules: Sequence[Module],
    overrides: RerankerOverrides | None,
    tokenizer: Mapping[str, Any],
    tensor: str,
) -> TokenHead:
    file = folder / modules[1].path / "config.json" if len(modules) > 1 else None
    if file is not None and (overrides is None or overrides.true_token is None):
        score = convert(file, read_object(file), _LogitScore)
        return TokenHead(tensor, score.true_token_id, score.false_token_id)
    named = overrides or RerankerOverrides()
    if named.true_token is None:
        return TokenHead(tensor, _token_id(folder, tokenizer, "yes"), _token_id(folder, tokenizer, "no"))
    false_row = None if named.false_token is None else _token_id(folder, tokenizer, named.false_token)
    return TokenHead(tensor, _token_id(folder, tokenizer, named.true_token), false_row)


def _token_id(folder: pathlib.Path, tokenizer: Mapping[str, Any], token: str) -> int:
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # that of a Unigram model: tokens with their scores
        vocabulary = {each[0]: index for index, each in enumerate(vocabulary)}
    if token not in vocabulary:
        raise ModelError(
            f"{folder / 'tokenizer.json'}: has no token {short_repr(token)}, whose logit would be the score. Name the "
            "answers of the model as `true_token` and `false_token` of `reranker` in noria.json."
        )
    return int(vocabulary[token])


def _check_head(folder: pathlib.Path, head: TokenHead, config: Config, shapes: Shapes) -> None:
    shape = shapes.get(head.tensor)
    if shape is None:
        raise ModelError(
            f"{folder}: the weights have no {head.tensor}, of which the head of a decoder that reranks is made. Save "
            "the model again, with its head."
        )
    if len(shape) != 2 or shape[1] != config.hidden_size or (head.tensor == "score.weight" and shape[0] != 1):
        wanted = 1 if head.tensor == "score.weight" else config.vocab_size
        raise ModelError(f"{folder}: {head.tensor} has the shape {list(shape)}, not {[wanted, config.hidden_size]}.")
    for row in (head.true_row, head.false_row):
        if row is not None and not 0 <= row < shape[0]:
            raise ModelError(f"{folder}: the token that scores has the id {row}; {head.tensor} has {shape[0]} rows.")
