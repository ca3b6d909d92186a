"""jina-embeddings-v3: each text has the adapter of a task or none, and equals transformers with peft's adapter."""

import concurrent.futures
import copy
import json
import pathlib
import shutil
import threading
import warnings
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from encoders import (
    CONFIG,
    TEXTS,
    assert_results,
    change_json,
    make_encoder,
    open_encoder,
    open_session,
    rows_of,
    sentence_transformer,
    write_json,
)
from noria.config import EngineConfig
from noria.engine.encoder.request import prepare
from noria.engine.encoder.sessions import load_sessions
from noria.errors import InvalidField, ModelError
from noria.frontend.services.texts.text_request import (
    TextRequestSettings,
    adapter_of,
    make_payload,
    role_of,
    with_prompt,
)
from noria.models.catalog import count_parameters, have_same_architecture
from noria.models.encoder import checkpoint
from noria.models.encoder.architectures import TASK_FOLDERS
from noria.models.encoder.onnx_export import _sample_rows
from noria.models.encoder.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from noria.models.encoder.tokenizers.token_rows import TokenRow
from noria.protocol.text import EncoderModelSpec
from noria.testing.fake_encoder import make_text_request

TASKS = [None, *TASK_FOLDERS]
INSTRUCTIONS = {"retrieval.query": "Represent the query: ", "retrieval.passage": "", "separation": ""}

ORIGINAL_NAMES = {
    "self_attn.q_proj": "mixer.Wqkv",
    "self_attn.o_proj": "mixer.out_proj",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}


def make_jina(folder: pathlib.Path) -> None:
    """The layout of jina-embeddings-v3-hf, whose adapters also have LoRAs of the pooler."""
    import peft
    import torch
    import transformers

    make_encoder(folder, "JinaEmbeddingsV3Model", **sentence_transformer())
    modules = json.loads((folder / "modules.json").read_text())
    write_json(
        folder / "modules.json", [modules[0] | {"type": "custom_st.Transformer", "kwargs": ["task"]}, *modules[1:]]
    )
    targets = [
        "word_embeddings",
        "token_type_embeddings",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "fc1",
        "fc2",
        "dense",
    ]
    for seed, (task, path) in enumerate(TASK_FOLDERS.items()):
        torch.manual_seed(seed)
        rank = 4 if task != "separation" else 3
        config = peft.LoraConfig(r=rank, lora_alpha=1, target_modules=targets, init_lora_weights=False)
        with warnings.catch_warnings():  # peft calls what transformers will remove
            warnings.simplefilter("ignore", FutureWarning)
            model = peft.get_peft_model(transformers.AutoModel.from_pretrained(folder), config)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.5)
        model.save_pretrained(folder / path)
    change_json(folder / "config.json", lora_adaptations=[*TASK_FOLDERS], task_instructions=INSTRUCTIONS)


@pytest.fixture(scope="module")
def jina(tmp_path_factory: pytest.TempPathFactory) -> EncoderModelSpec:
    folder = tmp_path_factory.mktemp("jina")
    make_jina(folder)
    return open_encoder(folder)


def with_peft(folder: pathlib.Path, task: str | None) -> Any:
    import transformers

    model = transformers.AutoModel.from_pretrained(folder)
    if task:
        model.load_adapter(str(folder), "own", adapter_kwargs={"subfolder": TASK_FOLDERS[task]})
    return model


def make_original(folder: pathlib.Path) -> dict[str | None, Any]:
    """Write the layout of the model's own code; return transformers' model of each task, with merged weights."""
    import torch
    import transformers

    make_encoder(folder, "JinaEmbeddingsV3Model", **sentence_transformer())
    torch.manual_seed(0)
    plain = transformers.AutoModel.from_pretrained(folder)
    models = {task: copy.deepcopy(plain) for task in TASKS}
    tensors = {}
    for name, value in plain.state_dict().items():
        layer, _, kind = name.rpartition(".")
        if "self_attn.k_" in layer or "self_attn.v_" in layer:
            continue
        sources, weight = [layer], value
        if "self_attn.q_" in layer:
            sources = [layer.replace("q_proj", f"{each}_proj") for each in "qkv"]
            weight = torch.cat([plain.state_dict()[f"{each}.{kind}"] for each in sources])
        own = layer.replace("layers.", "encoder.layers.").replace("embeddings.LayerNorm", "emb_ln")
        for theirs, renamed in ORIGINAL_NAMES.items():
            own = own.replace(theirs, renamed)
        if kind == "bias" or "norm" in own or "emb_ln" in own:
            tensors[f"roberta.{own}.{kind}"] = weight
            continue
        num_out, num_in = weight.shape
        down, up = torch.randn(5, 4, num_in) / 2, torch.randn(5, num_out, 4) / 2
        for place, task in enumerate(TASK_FOLDERS):
            for source, delta in zip(sources, (up[place] @ down[place] / 4).chunk(len(sources)), strict=True):
                models[task].get_submodule(source).weight.data += delta
        if "embeddings" in own:
            down, up = up, down
        stem = f"roberta.{own}.parametrizations.weight"
        tensors |= {f"{stem}.original": weight, f"{stem}.0.lora_A": down, f"{stem}.0.lora_B": up}
    save_file({name: values.contiguous() for name, values in tensors.items()}, folder / "model.safetensors")
    change_json(
        folder / "config.json", model_type="xlm-roberta", architectures=["XLMRobertaLoRA"],
        lora_adaptations=[*TASK_FOLDERS], lora_rank=4, lora_alpha=1, task_instructions=INSTRUCTIONS,
        position_embedding_type="rotary", rotary_emb_base=20000.0, rope_parameters=None,
    )  # fmt: skip
    return models


Made = tuple[EncoderModelSpec, dict[str | None, Any]]


@pytest.fixture(scope="module", params=["peft", "original"])
def made(request: pytest.FixtureRequest, jina: EncoderModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A model, and those of transformers for each task."""
    if request.param == "peft":
        return jina, {task: with_peft(jina.path, task) for task in TASKS}
    folder = tmp_path_factory.mktemp("original")
    models = make_original(folder)
    return open_encoder(folder), models


@pytest.mark.parametrize("path", ["torch", pytest.param("graph", marks=pytest.mark.slow)])
def test_texts_of_several_tasks_share_a_batch(made: Made, path: str, tmp_path: pathlib.Path) -> None:
    """A lone text, too, has the numbers of transformers with peft's adapter."""
    import torch

    spec, models = made
    rows = [
        row._replace(adapter=index % len(TASKS))
        for index, row in enumerate(rows_of(spec, [text for text in TEXTS if text] * 2))
    ]
    with torch.no_grad():
        states = [models[TASKS[row.adapter]].eval()(torch.tensor([row.ids.tolist()]))[0] for row in rows]
    expected = [each[0].mean(0).numpy() for each in states]
    assert np.abs(expected[0] - expected[5]).max() > 0.1  # a text with two adapters
    assert_results(open_session(spec, path, tmp_path), rows, expected)


def test_sessions_in_two_threads_keep_their_adapters_apart(jina: EncoderModelSpec) -> None:
    config = msgspec.structs.replace(CONFIG, encoder_sessions=2, encoder_backend="torch")
    sessions = load_sessions(jina, config, "cpu")
    rows = _sample_rows(jina, sessions[0]._module)  # type: ignore[attr-defined]
    assert {row.adapter for row in rows if isinstance(row, TokenRow)} == {*range(len(TASKS))}  # the export is checked
    texts = [[TokenRow(np.arange(3, 9), adapter=adapter)] for adapter in (1, 2)]
    alone = [session.run(rows)[0] for session, rows in zip(sessions, texts, strict=True)]
    meeting = threading.Barrier(2)

    def wait(*_: object) -> None:
        meeting.wait(30)

    for session in set(sessions):
        session._module.model.register_forward_pre_hook(wait)  # type: ignore[attr-defined]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        got = pool.map(lambda session, rows: session.run(rows)[0], sessions, texts)
        np.testing.assert_array_equal([*got], alone)


def test_a_request_chooses_the_adapter_and_its_prompt(jina: EncoderModelSpec) -> None:
    texts = HuggingFaceTokenizer(jina).encode(["a"])
    asked = {
        "retrieval.query": TextRequestSettings(inputs=["a"], role=role_of("search_query", None)),
        "retrieval.passage": TextRequestSettings(inputs=["a"], role=role_of(None, "retrieval.passage")),
        "separation": TextRequestSettings(inputs=["a"], task="separation"),
        "text-matching": TextRequestSettings(inputs=["a"], task="text-matching", prompt_name="retrieval.query"),
        None: TextRequestSettings(inputs=["a"]),
        "classification": TextRequestSettings(inputs=["a"], prompt_name="classification"),
    }
    assert [*dict(jina.prompts)] == [*TASK_FOLDERS]
    for task, settings in asked.items():
        adapter = make_payload(texts, jina, settings).adapter
        assert TASKS[adapter] == task
        (row,) = prepare(make_text_request("a", [3, 4], model=jina, adapter=adapter), jina).rows
        assert isinstance(row, TokenRow) and row.adapter == adapter
    prompts = [with_prompt(settings, jina)[0] for settings in asked.values()]
    assert prompts == ["Represent the query: a", "a", "a", "Represent the query: a", "a", "a"]
    with pytest.raises(InvalidField, match=r"the adapter is 6; .* has 5"):
        prepare(make_text_request("a", [3, 4], model=jina, adapter=6), jina)


def test_a_task_that_a_model_has_not_is_rejected(jina: EncoderModelSpec) -> None:
    settings = TextRequestSettings(inputs=["a"], task="separation")
    with pytest.raises(InvalidField, match=r"task is 'separation'; allowed for .* are query and document alone"):
        adapter_of(settings, msgspec.structs.replace(jina, adapters=(), prompts=()))
    only = msgspec.structs.replace(jina, adapters=jina.adapters[:1])
    assert adapter_of(TextRequestSettings(role="query"), only) == 1
    with pytest.raises(InvalidField, match=r"input_type is 'document'; allowed for .* are retrieval.query"):
        adapter_of(TextRequestSettings(role="document"), only)
    with pytest.raises(InvalidField, match="input_type is 'query' and task is 'separation', which differ"):
        role_of("query", "separation")


@pytest.mark.parametrize(
    ("file", "changes", "says"),
    [
        ("config", {"lora_adaptations": ["retrieval.query", "code"]}, "lora_adaptations has 'code'; supported are"),
        ("separation/adapter_config", {"r": 4}, r"lora_\w+ is \[3, .*by adapter_config.json the rank is 4"),
        ("separation/adapter_config", {"peft_type": "IA3"}, "peft_type"),
        ("separation/adapter_config", {"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ("modules", None, "has a module of the type 'custom_st.Transformer'"),
    ],
)
def test_what_computes_something_else_is_rejected(
    jina: EncoderModelSpec, tmp_path: pathlib.Path, file: str, changes: dict[str, Any] | None, says: str
) -> None:
    folder = shutil.copytree(jina.folder, tmp_path / "model")
    if changes is None:
        make_encoder(folder, "BertModel")
    else:
        change_json(folder / f"{file}.json", **changes)
    with pytest.raises(ModelError, match=says):
        open_encoder(folder)


def test_a_missing_adapter_and_one_of_another_model_are_rejected(
    jina: EncoderModelSpec, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(jina.folder, tmp_path / "model")
    change_json(folder / "separation/adapter_config.json", base_model_name_or_path="elsewhere", peft_version="9")
    assert have_same_architecture(open_encoder(folder), jina)
    assert jina.num_parameters == count_parameters(jina)
    with monkeypatch.context() as context:
        context.setattr("noria.models.encoder.folders.task_folder._MAX_RANKS", 18)
        with pytest.raises(ModelError, match="the ranks of all adapters sum up to 19; allowed are 18"):
            open_encoder(folder)
    file = folder / "separation/adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "q_proj.lora_A" in name)
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, file)
    with pytest.raises(
        ModelError, match=r"q_proj.lora_A.weight does not belong to the model: \[3, 31\], and the layer is"
    ):
        load_sessions(open_encoder(folder), msgspec.structs.replace(CONFIG, encoder_backend="torch"), "cpu")
    shutil.rmtree(folder / "separation")
    with pytest.raises(ModelError, match=r"separation/adapter_config.json: missing, and config.json names its task"):
        open_encoder(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda name, value: {name: value[:, :4]} if "Wqkv" in name else {name: value}, "does not belong to the model"),
        (lambda name, value: {} if "fc1" in name else {name: value}, "fc1 has not one factor A and one B"),
        (lambda name, value: {name: value * 0 + 3e38}, "weights are not finite: .* as torch.float16"),
    ],
)
def test_damaged_factors_of_the_original_layout_are_rejected(tmp_path: pathlib.Path, change: Any, says: str) -> None:
    make_original(tmp_path)
    file = tmp_path / "model.safetensors"
    changed: dict[str, Any] = {}
    for name, value in load_file(file).items():
        changed |= change(name, value) if name.endswith(".lora_B") else {name: value}
    save_file({name: value.contiguous() for name, value in changed.items()}, file)
    with pytest.raises(ModelError, match=says):
        checkpoint.load(open_encoder(tmp_path), EngineConfig(dtype="float16"), "cpu")
