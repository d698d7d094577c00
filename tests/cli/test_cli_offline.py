"""`validate` and `convert`: the verdict of a server without one; what comes out is what PEFT reads."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_runs import PROGRAM, Result, environment

# Adapters and their model are made as in the adapter tests.
sys.path.append(str(Path(__file__).parents[1] / "adapter"))

from adapter_samples import base_model, edit_config, edit_tensors, train

from lora_plugin.cli import main


def run(*arguments: str) -> Result:
    """The command in this process: torch is imported once."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as error:
            code = int(str(error.code))
    return Result(arguments, code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    base_model().save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    train(rank_pattern={"v_proj": 3}).save_pretrained(str(tmp_path / "sql"))
    return tmp_path / "sql"


def test_a_good_folder(adapter: Path, model: Path) -> None:
    result = run("validate", str(adapter), "--model", str(model), "--dtype", "float32", "--format", "json")
    assert (result.returncode, result.stderr) == (0, "")
    facts = json.loads(result.stdout)
    assert facts["servable"] is True
    assert facts["checked"] == "values"
    assert facts["ranks"] == {"3": 2, "8": 2}
    assert (facts["rank"], facts["pool_rows"], facts["targets"]) == (8, 8, ["q_proj", "v_proj"])
    # A of q, k and v, and B of each, in every layer: 8 x (3 x 32 + 32 + 16 + 16) float32 twice.
    assert facts["packed_bytes"] == 2 * 4 * 8 * (3 * 32 + 32 + 16 + 16)
    shown = run("validate", str(adapter), "--model", str(model), "--format", "human").stdout
    assert "servable (values checked)" in shown
    assert "3 (2 modules), 8 (2 modules)" in shown


def test_a_refused_one(adapter: Path, model: Path) -> None:
    arguments = ("validate", str(adapter), "--model", str(model), "--max-lora-rank", "4")
    result = run(*arguments, "--format", "json")
    assert result.returncode == 1
    assert json.loads(result.stdout)["reason"]["code"] == "rank-too-large"
    assert "hint: start the server with --max-lora-rank 8" in result.stderr
    shown = run(*arguments, "--format", "human")
    assert "[rank-too-large]" in shown.stdout
    assert "start the server with --max-lora-rank 8" in shown.stdout
    assert (shown.returncode, shown.stderr) == (1, "")


def test_values_are_read_unless_told_not_to(adapter: Path, model: Path) -> None:
    edit_tensors(adapter, lambda tensors: {key: t * float("nan") for key, t in tensors.items()})
    arguments = ("validate", str(adapter), "--model", str(model))
    refused = run(*arguments)
    assert (refused.returncode, json.loads(refused.stdout)["reason"]["code"]) == (1, "not-finite")
    headers = run(*arguments, "--headers-only")
    assert (headers.returncode, json.loads(headers.stdout)["checked"]) == (0, "headers")


def test_headers_need_neither_torch_nor_the_host(adapter: Path, model: Path) -> None:
    code = (
        "import sys; from lora_plugin.cli import main; main(sys.argv[1:]);"
        "sys.exit(bool({'torch', 'vllm'} & set(sys.modules)))"
    )
    arguments = ["validate", str(adapter), "--model", str(model), "--headers-only"]
    assert subprocess.run([PROGRAM[0], "-c", code, *arguments], env=environment()).returncode == 0


def test_a_name_that_no_server_takes_is_a_warning(adapter: Path, model: Path) -> None:
    odd = adapter.rename(adapter.with_name("my sql~"))
    result = run("validate", str(odd), "--model", str(model), "--headers-only")
    assert result.returncode == 0
    assert "not an adapter name" in json.loads(result.stdout)["warnings"][0]


@pytest.mark.parametrize(
    "arguments",
    [
        ("validate", "ADAPTER"),
        ("validate", "nowhere", "--model", "MODEL"),
        ("validate", "ADAPTER", "--model", "acme/not-in-the-cache"),
        ("validate", "ADAPTER", "--model", "ADAPTER"),
        ("validate", "~nobody-of-that-name/sql", "--model", "MODEL"),
        ("validate", "LONG", "--model", "MODEL"),
        ("validate", "ADAPTER", "--model", "~nobody-of-that-name/model"),
        ("validate", "ADAPTER", "--model", "LONG"),
        ("convert", "LONG", "new"),
        ("validate", "ADAPTER", "--model", "MODEL", "--max-lora-rank", "0"),
        ("convert", "nowhere", "new"),
        ("convert", "ADAPTER", "MODEL"),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_wrong_usage(arguments: tuple[str, ...], adapter: Path, model: Path) -> None:
    words = {"ADAPTER": str(adapter), "MODEL": str(model), "LONG": 300 * "a"}
    result = run(*(words.get(word, word) for word in arguments))
    assert (result.returncode, result.stdout) == (2, "")
    assert "error: " in result.stderr


def test_a_repository_in_the_local_cache(
    adapter: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--acme--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(model, repository / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert run("validate", str(adapter), "--model", "acme/tiny", "--headers-only").returncode == 0


def test_a_pickle_becomes_servable(adapter: Path, model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    torch.save(tensors, adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    refused = run("validate", str(adapter), "--model", str(model))
    assert json.loads(refused.stdout)["reason"]["code"] == "weights-format"
    done = run("convert", str(adapter), str(tmp_path / "new"), "--format", "json")
    assert (done.returncode, json.loads(done.stdout)["tensors"]) == (0, len(tensors))
    assert run("validate", str(tmp_path / "new"), "--model", str(model)).returncode == 0


def test_what_cannot_be_converted_says_what_to_do(adapter: Path, tmp_path: Path) -> None:
    edit_config(adapter, init_lora_weights="pissa")
    result = run("convert", str(adapter), str(tmp_path / "new"))
    assert (result.returncode, result.stdout) == (1, "")
    assert "--initial" in result.stderr
    assert not list(tmp_path.glob("*new*"))
