"""What is fetched from a Hub that is right, slow, down, lying or closed."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from local_hub import COMMIT, LocalHub, Repository

import lora_plugin.hub.progress
from lora_plugin.errors import AdapterRejected, Code, LoraPluginError, Unavailable
from lora_plugin.hub.client import download, look_up
from lora_plugin.hub.origin import Origin
from lora_plugin.hub.reference import HubReference
from lora_plugin.hub.source import HubSource

REFERENCE = HubReference(repo="org/name")
ROOM = 1 << 20


def code_of(reference: HubReference, max_bytes: int = ROOM) -> Code:
    with pytest.raises(LoraPluginError) as error:
        download(look_up(reference, max_bytes))
    return error.value.code


def test_config_and_weights_are_fetched_and_nothing_else(
    hub: LocalHub, repository: Repository, tmp_path: Path
) -> None:
    HubSource(REFERENCE, ROOM).fetch(tmp_path)
    origin = Origin.of(tmp_path)
    assert origin == Origin(reference=REFERENCE, commit=COMMIT)
    assert str(origin) == f"hub:org/name@{COMMIT}"
    wanted = {"adapter_config.json", "adapter_model.safetensors"}
    assert {p.name for p in tmp_path.iterdir()} == {*wanted, ".lora_plugin_origin.json", "cache"}
    for name in wanted:
        assert (tmp_path / name).read_bytes() == repository.files[name]
    got = {key.rsplit("/", 1)[1] for key in hub.seen if key.startswith("GET /org")}
    assert got == wanted


def test_a_subfolder_and_a_tag(hub: LocalHub, repository: Repository) -> None:
    repository.revisions.add("v1.0")
    reference = HubReference(repo="org/name", revision="v1.0", subfolder="deep/er/")
    paths = download(look_up(reference, ROOM))
    assert paths["adapter_model.safetensors"].read_bytes() == b"v" * 3000


@pytest.mark.parametrize("name", ["org/Name", "other/name"])
def test_a_repository_is_fetched_by_its_own_name_only(repository: Repository, name: str) -> None:
    """The Hub follows renames and takes any case; what is allowed, and asked of plugins, is a name."""
    repository.name = name
    with pytest.raises(AdapterRejected, match="under another name") as error:
        look_up(REFERENCE, ROOM)
    assert error.value.code is Code.HUB_NOT_FOUND
    assert name in str(error.value)


def test_shards_come_with_their_index(hub: LocalHub, repository: Repository) -> None:
    del repository.files["adapter_model.safetensors"]
    shards = {f"adapter_model-0000{i}-of-00002.safetensors": b"s" * i for i in (1, 2)}
    repository.files |= {
        **shards,
        "adapter_model.safetensors.index.json": b"{}",
        "optimizer.safetensors": b"o",
    }
    assert set(look_up(REFERENCE, ROOM).files) == {
        *shards,
        "adapter_model.safetensors.index.json",
        "adapter_config.json",
    }


@pytest.mark.parametrize(
    ("gone", "code"),
    [
        (["adapter_config.json"], Code.CONFIG_MISSING),
        (["adapter_model.safetensors"], Code.WEIGHTS_FORMAT),
        (["adapter_model.safetensors", "adapter_model.bin"], Code.WEIGHTS_MISSING),
    ],
)
def test_a_repository_without_an_adapter(repository: Repository, gone: list[str], code: Code) -> None:
    for name in gone:
        del repository.files[name]
    assert code_of(REFERENCE) is code


def test_too_large_is_refused_before_any_download(hub: LocalHub, repository: Repository) -> None:
    assert code_of(REFERENCE, 4000) is Code.TOO_LARGE
    assert not any("resolve" in key for key in hub.seen)


def test_files_on_another_host(hub: LocalHub, repository: Repository) -> None:
    repository.redirect = True
    paths = download(look_up(REFERENCE, ROOM))
    assert paths["adapter_model.safetensors"].read_bytes() == b"w" * 5000
    assert any(key.startswith("GET /cdn/") for key in hub.seen)


def test_errors_that_pass_are_tried_again(hub: LocalHub, repository: Repository) -> None:
    hub.fail = 2
    assert look_up(REFERENCE, ROOM).commit == COMMIT


def test_a_stalled_download_is_taken_up_again(hub: LocalHub, repository: Repository) -> None:
    hub.stall = 1
    paths = download(look_up(REFERENCE, ROOM))
    assert paths["adapter_model.safetensors"].read_bytes() == b"w" * 5000


def test_a_hub_that_is_down(hub: LocalHub, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.fail = 1000
    assert code_of(REFERENCE) is Code.HUB_UNREACHABLE
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unavailable) as error:
        look_up(REFERENCE, ROOM)
    assert error.value.code is Code.HUB_UNREACHABLE


@pytest.mark.parametrize("listed", [1, 4999, 5001])
def test_a_hub_that_lies_about_sizes(repository: Repository, listed: int) -> None:
    repository.listed["adapter_model.safetensors"] = listed
    assert code_of(REFERENCE) is Code.TOO_LARGE


def test_a_download_larger_than_announced_is_ended(
    hub: LocalHub, repository: Repository, tmp_path: Path
) -> None:
    """At once: not after it has filled the disk."""
    repository.files["adapter_model.safetensors"] = b"w" * (40 << 20)
    repository.listed["adapter_model.safetensors"] = 1
    assert code_of(REFERENCE) is Code.TOO_LARGE
    assert sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*")) < 1 << 20


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"private": True}, Code.HUB_NOT_FOUND),
        ({"gated": True}, Code.HUB_FORBIDDEN),
        ({"revisions": set()}, Code.HUB_NOT_FOUND),
    ],
)
def test_closed_repositories(repository: Repository, change: dict[str, object], code: Code) -> None:
    for name, value in change.items():
        setattr(repository, name, value)
    assert code_of(REFERENCE) is code


def test_a_repository_that_is_not_there(hub: LocalHub) -> None:
    with pytest.raises(AdapterRejected) as error:
        look_up(HubReference(repo="org/nothing"), ROOM)
    assert error.value.code is Code.HUB_NOT_FOUND


def test_the_token_is_sent_and_never_told(
    hub: LocalHub, repository: Repository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    repository.gated = True
    with caplog.at_level(logging.DEBUG), pytest.raises(AdapterRejected) as error:
        look_up(REFERENCE, ROOM)
    assert "Bearer hf_secretsecret" in hub.tokens
    assert "hf_secretsecret" not in caplog.text + str(error.value)


def test_offline_serves_what_the_cache_has(
    hub: LocalHub, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    download(look_up(REFERENCE, ROOM))
    hub.seen.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = look_up(HubReference(repo="org/name", revision=COMMIT), ROOM)
    assert snapshot.commit == COMMIT
    assert download(snapshot)["adapter_model.safetensors"].read_bytes() == b"w" * 5000
    assert code_of(HubReference(repo="org/other")) is Code.HUB_UNREACHABLE
    assert not hub.seen


def test_progress_is_told_at_a_bounded_rate(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    repository.files["adapter_model.safetensors"] = b"w" * (30 << 20)
    monkeypatch.setattr(lora_plugin.hub.progress, "_LINE_SECONDS", 0.0)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10 << 20)
    with caplog.at_level(logging.INFO, "lora_plugin"):
        download(look_up(REFERENCE, 1 << 30))
    lines = [record.message for record in caplog.records if "fetching org/name@main" in record.message]
    assert "30 of 30 MB" in lines[-1]
    progress = lora_plugin.hub.progress.Progress("x", 1)
    monkeypatch.setattr(lora_plugin.hub.progress, "_LINE_SECONDS", 10.0)
    caplog.clear()
    bar = progress.bar(100)()
    started = time.monotonic()
    for _ in range(50):
        bar.update(1)
    assert time.monotonic() - started > 5 or not caplog.records
