"""The flash format: the same model as converting at load, mapped and shared, checked before use."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from deepseek_flash.errors import FlashError, FormatError, ModelError, UnsupportedModel
from deepseek_flash.kernels.registry import select
from deepseek_flash.loading import flash_write
from deepseek_flash.loading.flash import ALIGN, SPARE, FlashFolder, map_file
from deepseek_flash.loading.load import load_model_weights, storage_plan
from deepseek_flash.loading.source import open_source
from deepseek_flash.models.registry import resolve
from deepseek_flash.tools.convert import convert
from tests.support.checkpoints import LLAMA3, tiny_gguf, tiny_llama, tiny_qwen2, tiny_qwen3
from tests.support.engines import open_engine

TEXT = "the cat in the hat and the other one"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("flash")
    llama = tiny_llama(root / "llama", rope_parameters=LLAMA3)
    return {
        "llama": llama,
        "gguf": tiny_gguf(llama, root / "llama.gguf", "Q4_1"),
        "qwen2": tiny_qwen2(root / "qwen2", max_shard_size="100KB", generation={"temperature": 0.6, "do_sample": True}),
        "qwen3": tiny_qwen3(root / "qwen3", dtype=torch.bfloat16),
        # 60 rows are no whole panels: q, k and v stay parts of their own.
        "odd": tiny_llama(root / "odd", num_attention_heads=6, num_key_value_heads=1, head_dim=10, hidden_size=60),
    }


@pytest.fixture(scope="module")
def converted(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(models["llama"], tmp_path_factory.mktemp("out") / "llama", bar=False)


def answers(path: Path, **options: Any) -> tuple[list[int], list[float], str]:
    with open_engine(path, **options) as engine:
        done = engine.generate(TEXT, max_new_tokens=8, temperature=0.0, ignore_eos=True)
        scores = list(engine.score(TEXT).logprobs)[1:]
        return list(done.token_ids), scores, engine.describe()["cache"]["dtype"]


@pytest.mark.parametrize("quantize", [None, "int4", "int8"])
@pytest.mark.parametrize("name", ["llama", "gguf", "qwen2", "qwen3", "odd"])
def test_output_is_that_of_converting_at_load(
    name: str, quantize: str | None, models: dict[str, Path], tmp_path: Path
) -> None:
    """Bit for bit, the cache's type included."""
    out = convert(models[name], tmp_path / "out", quantize=quantize, bar=False)
    assert answers(out) == answers(models[name], quantize=quantize)


@pytest.mark.parametrize("name", ["llama", "gguf"])
def test_kernels_without_packed_weights_read_it_too(
    name: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = convert(models[name], tmp_path / "out", bar=False)
    monkeypatch.setenv("DEEPSEEK_FLASH_KERNELS", "torch")
    assert answers(out) == answers(models[name])


def test_a_flash_folder_can_be_quantised_at_load_and_converted_again(models: dict[str, Path], tmp_path: Path) -> None:
    first = convert(models["llama"], tmp_path / "first", bar=False)
    second = convert(first, tmp_path / "second", quantize="int4", bar=False)
    assert answers(second) == answers(first, quantize="int4") == answers(models["llama"], quantize="int4")


def test_tokenizer_template_and_generation_config_come_along(models: dict[str, Path], tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "the thing"}]
    for name in ("gguf", "qwen2"):
        out = convert(models[name], tmp_path / name, bar=False)
        with open_engine(out) as a, open_engine(models[name]) as b:
            for engine_says in (lambda e: e.tokenize("the hat 12"), lambda e: e.apply_chat_template(messages)):
                assert engine_says(a) == engine_says(b)
        with open_source(out) as a, open_source(models[name]) as b:
            assert a.generation_config == b.generation_config
            assert a.config == b.config


def test_the_safetensors_library_reads_it(converted: Path) -> None:
    with safe_open(converted / "model.safetensors", "pt") as file, open_source(converted) as source:
        for name in source.names():
            tensor = file.get_tensor(name)
            assert tensor.dtype == (torch.uint8 if len(source.shape(name)) == 2 else torch.float32)
        assert torch.equal(file.get_tensor("norm.weight"), source.tensor("norm.weight"))
        assert set(file.keys()) == {*source.names(), "padding"}


def test_weights_lie_in_the_mapped_file(converted: Path) -> None:
    """Aligned, readable a little beyond their end, read-only, and there after the source is closed."""
    with open_source(converted) as source:
        assert isinstance(source, FlashFolder)
        model = resolve(source.config).build(select("cpu", "auto"))
        load_model_weights(model, model.rules, source, torch.float32)
    with pytest.raises(ModelError, match="closed"):
        source.mapped("embed.weight.0")
    pages = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(converted) in line]
    assert [line.split()[1] for line in pages] == ["r--s"]
    first, last = (int(x, 16) for x in pages[0].split()[0].split("-"))
    weights = [
        p for m in model.modules() if getattr(m, "packed", None) and not callable(m.packed) for p in m.packed.parts
    ]
    assert len(weights) == 2 + 4 * 3
    for w in weights:
        assert w.data.data_ptr() % ALIGN == 0
        assert first <= w.data.data_ptr()
        assert w.data.data_ptr() + w.nbytes + SPARE <= last
    model.release()
    del weights, w, model
    assert str(converted) not in Path("/proc/self/maps").read_text()


def test_writing_to_mapped_pages_ends_the_process(converted: Path) -> None:
    """So nothing of ours can change a model file by accident."""
    code = (
        "import sys; from pathlib import Path; from deepseek_flash.loading.flash import map_file\n"
        "p = Path(sys.argv[1]); map_file(p, p.stat().st_size)[100] = 1"
    )
    file = converted / "model.safetensors"
    before = file.read_bytes()
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, check=False, timeout=60)
    assert done.returncode < 0
    assert file.read_bytes() == before
    assert bytes(map_file(file, len(before)).numpy()) == before


def plan_for(source: Any, shard_bytes: int = 1 << 40) -> flash_write.FlashPlan:
    model = resolve(source.config).build(select("cpu", "auto"))
    parts, floats = storage_plan(model, model.rules, source, lambda target: None, 32)
    texts = {"config.json": flash_write.json_text(source.config)}
    return flash_write.plan_flash(parts, floats, source, {}, texts, shard_bytes=shard_bytes)


def test_large_models_are_cut_into_numbered_files(models: dict[str, Path], tmp_path: Path) -> None:
    with open_source(models["llama"]) as source:
        plan = plan_for(source, 60_000)
        out = flash_write.write_flash(plan, source, tmp_path / "out")
        files = sorted(p.name for p in out.glob("*.safetensors"))
        assert len(files) > 3
        assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
        largest = max(p.nbytes for s in plan.shards for p in s.pieces)
        assert all((out / f).stat().st_size < max(60_000, largest) + 8192 for f in files)
    with open_source(models["llama"]) as a, open_source(out) as b:
        assert torch.equal(a.tensor("model.embed_tokens.weight"), b.tensor("embed.weight.0"))


def test_an_interrupted_run_goes_on_where_it_ended(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing at the target before the end; what is in place is checked, what is damaged is written again."""
    whole = convert(models["llama"], tmp_path / "whole", quantize="int4", bar=False)
    out, calls = tmp_path / "out", [0]
    real = flash_write.read_part

    def breaking(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 8:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(flash_write, "read_part", breaking)
    with pytest.raises(KeyboardInterrupt):
        convert(models["llama"], out, quantize="int4", bar=False)
    work = tmp_path / ".out.partial"
    assert not out.exists()
    assert work.is_dir()
    with (work / "journal.jsonl").open("a") as journal:
        journal.write('["layers.2.ml')  # the line that a crash cut short
    data = bytearray((work / "model.safetensors").read_bytes())
    at = data.index(whole.joinpath("model.safetensors").read_bytes()[4096:4200])
    data[at + 50] ^= 1
    (work / "model.safetensors").write_bytes(data)
    calls[0] = 10
    convert(models["llama"], out, quantize="int4", bar=False)
    assert calls[0] == 10 + (2 + 4 * 3) - 7 + 1  # seven were in place, one of them damaged
    assert not work.exists()
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {p.name: p.read_bytes() for p in whole.iterdir()}
    convert(models["llama"], out, quantize="int4", bar=False)  # again is a check
    assert calls[0] == 18


def test_another_wish_begins_anew(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / ".out.partial"
    work.mkdir()
    (work / "plan.json").write_text("another")
    (work / "journal.jsonl").write_text('["embed.weight.0", "00"]\n')
    (work / "model-00009-of-00009.safetensors").write_bytes(b"old")
    out = convert(models["llama"], tmp_path / "out", bar=False)
    assert sorted(p.name for p in out.iterdir()) == [
        *("config.json", "flash.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]


def test_what_is_there_already_is_never_overwritten(models: dict[str, Path], tmp_path: Path) -> None:
    out = convert(models["llama"], tmp_path / "out", bar=False)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(ModelError, match="exists already"):
        convert(models["llama"], out, quantize="int4", bar=False)
    with pytest.raises(ModelError, match="exists already"):
        convert(models["llama"], models["llama"], bar=False)
    assert (out / "model.safetensors").read_bytes() == before
    (tmp_path / "empty").mkdir()
    convert(models["llama"], tmp_path / "empty", bar=False)


def test_two_at_once_and_full_disks_are_told(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    work = tmp_path / ".out.partial"
    work.mkdir()
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="another process"):
            convert(models["llama"], tmp_path / "out", bar=False)
    free = flash_write.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(flash_write.shutil, "disk_usage", lambda path: free)
    with pytest.raises(ModelError, match="MiB are free"):
        convert(models["llama"], tmp_path / "out", bar=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot write"):
        convert(models["llama"], tmp_path / "file" / "out", bar=False)


def copy_of(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def weight(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["weights"]["layers.1.mlp.down.weight.0"]
    return found


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another format": (lambda m: m.update(format="x"), "format is 'x'"),
    "no weights": (lambda m: m.update(weights=[]), "weights must be an object"),
    "size": (lambda m: weight(m).update(n=65), "U8"),
    "huge": (lambda m: weight(m).update(n=2**40), "n is 1099511627776"),
    "bool": (lambda m: weight(m).update(n=True), "n is True"),
    "zero": (lambda m: weight(m).update(k=0), "k is 0"),
    "format": (lambda m: weight(m).update(format={"kind": "group", "bits": 3, "group": 32}), "none of this version's"),
    "format field": (lambda m: weight(m).update(format={"kind": "float32", "x": 1}), "none of this version's"),
    "format type": (lambda m: weight(m).update(format=7), "none of this version's"),
    "wider format": (lambda m: weight(m).update(format={"kind": "float16"}), "U8"),
    "no format": (lambda m: weight(m).pop("format"), "none of this version's"),
    "file outside": (lambda m: weight(m).update(file="../model.safetensors"), "no model.safetensors"),
    "file missing": (lambda m: weight(m).update(file="model-00001-of-00002.safetensors"), "missing"),
    "no file": (lambda m: weight(m).pop("file"), "no model.safetensors"),
    "not an object": (lambda m: m["weights"].update({"layers.1.mlp.down.weight.0": 1}), "no model.safetensors"),
    "stored": (lambda m: weight(m).update(stored=1), "stored"),
    "left out": (lambda m: m["weights"].pop("layers.1.mlp.down.weight.0"), "do not name the same"),
    "one too many": (lambda m: m["vectors"].update(x={"file": "model.safetensors"}), "do not name the same"),
    "weight as vector": (
        lambda m: m["vectors"].update({"head.weight.0": m["weights"].pop("head.weight.0")}),
        "no fp32",
    ),
    "both": (lambda m: m["vectors"].update({"head.weight.0": {"file": "model.safetensors"}}), "a weight and a vector"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_manifest_that_does_not_fit_is_a_format_error(case: str, converted: Path, tmp_path: Path) -> None:
    folder = copy_of(converted, tmp_path / "bad")
    change, said = BAD[case]
    manifest = json.loads((folder / "flash.json").read_text())
    change(manifest)
    (folder / "flash.json").write_text(json.dumps(manifest))
    with pytest.raises(FormatError, match=said):
        open_source(folder)


def test_other_versions_are_refused_by_name(converted: Path, tmp_path: Path) -> None:
    folder = copy_of(converted, tmp_path / "new")
    manifest = json.loads((folder / "flash.json").read_text())
    for version in (2, 0, "1", None, True):
        (folder / "flash.json").write_text(json.dumps({**manifest, "version": version, "tool": "deepseek-flash 9"}))
        with pytest.raises(
            UnsupportedModel, match=rf"version {version} of the flash format .*deepseek-flash 9.*reads 1"
        ):
            open_source(folder)


@pytest.mark.parametrize("count", [0, 7, 8, 100, 5000, -65, -64, -1])
def test_truncated_files_are_told_before_they_are_mapped(count: int, converted: Path, tmp_path: Path) -> None:
    folder = copy_of(converted, tmp_path / "short")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:count])
    with pytest.raises(FormatError):
        open_source(folder)


def test_a_folder_for_another_config_does_not_load(converted: Path, tmp_path: Path) -> None:
    from deepseek_flash.errors import CheckpointError

    folder = copy_of(converted, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    for change in ({"num_hidden_layers": 2}, {"num_hidden_layers": 4}, {"intermediate_size": 64}):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError):
            open_engine(folder)


def test_fingerprints_tell_models_apart(models: dict[str, Path], tmp_path: Path) -> None:
    prints = set()
    for i, options in enumerate(({}, {"quantize": "int4"}, {"quantize": "int4", "group": 64}, {"quantize": "int8"})):
        with open_source(convert(models["llama"], tmp_path / str(i), bar=False, **options)) as source:
            prints.add(source.fingerprint())
            assert len(source.fingerprint()) == 32
    with open_source(models["llama"]) as source:
        prints.add(source.fingerprint())
    assert len(prints) == 5


def test_rows_of_any_run_are_the_weights_rows(models: dict[str, Path], tmp_path: Path) -> None:
    with open_source(convert(models["odd"], tmp_path / "out", quantize="int4", bar=False)) as source:
        name = "layers.0.attention.qkv.weight.0"
        whole = source.tensor(name)
        for first, count in ((0, 60), (3, 20), (17, 1), (59, 1), (16, 44)):
            assert torch.equal(source.float_rows(name, first, count), whole[first : first + count])


def test_damage_anywhere_in_manifest_or_header_is_told(converted: Path, tmp_path: Path) -> None:
    """Bytes flipped at random: the model still opens, or a typed error says why not."""
    import random

    folder, rng = copy_of(converted, tmp_path / "damaged"), random.Random(5)
    for name in ("flash.json", "model.safetensors"):
        good = (folder / name).read_bytes()
        reach = min(len(good), 8 + int.from_bytes(good[:8], "little")) if name != "flash.json" else len(good)
        for _ in range(150):
            data = bytearray(good)
            for _ in range(rng.choice((1, 1, 4))):
                data[rng.randrange(reach)] = rng.choice((0, 48, 57, 34, 123, rng.randrange(256)))
            (folder / name).write_bytes(data)
            try:
                with open_source(folder) as source:
                    model = resolve(source.config).build(select("cpu", "auto"))
                    load_model_weights(model, model.rules, source, torch.float32)
            except FlashError:
                pass
        (folder / name).write_bytes(good)
