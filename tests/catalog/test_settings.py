"""The settings: what is read, what is refused, and how that is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lora_plugin.errors import Code, SettingsError
from lora_plugin.settings import Settings, load_settings
from lora_plugin.switch import forgotten, wanted

DIRECTORY = {"LORA_PLUGIN_ADAPTER_DIR": "/srv/adapters"}


def loaded(**values: str) -> Settings:
    settings = load_settings(DIRECTORY | {f"LORA_PLUGIN_{name}": value for name, value in values.items()})
    assert settings is not None
    return settings


def refused(environ: dict[str, str]) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        load_settings(environ)
    assert caught.value.code is Code.SETTINGS_INVALID
    assert caught.value.reason.hint
    return caught.value


@pytest.mark.parametrize("off", ["0", "false", "No", " off "])
def test_off(off: str) -> None:
    assert load_settings({}) is None
    assert load_settings({"LORA_PLUGIN_ADAPTER_DIR": " "}) is None
    assert load_settings(DIRECTORY | {"LORA_PLUGIN_ENABLED": off}) is None
    assert not wanted(DIRECTORY | {"LORA_PLUGIN_ENABLED": off, "LORA_PLUGIN_NONSENSE": "1"})
    assert wanted(DIRECTORY)


def test_settings_without_a_directory_are_told_of() -> None:
    others = {"LORA_PLUGIN_ENABLED": "1", "LORA_PLUGIN_ADMIN_TOKEN": "t", "LORA_PLUGIN_WATCH": " "}
    assert forgotten(others) == "LORA_PLUGIN_ADMIN_TOKEN"
    assert forgotten(others | DIRECTORY) is None
    assert forgotten(others | {"LORA_PLUGIN_ENABLED": "0"}) is None
    assert forgotten({"LORA_PLUGIN_ENABLED": "1", "PATH": "/bin"}) is None


def test_the_plugin_says_so_and_loads_nothing() -> None:
    code = "from lora_plugin.plugin import register; register(); import sys; print(*sys.modules)"
    environ = {"LORA_PLUGIN_ADMIN_TOKEN": "s3cret"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ
    )
    assert "LORA_PLUGIN_ADMIN_TOKEN is set, LORA_PLUGIN_ADAPTER_DIR is not" in done.stderr
    assert "s3cret" not in done.stderr
    assert not set(done.stdout.split()) & {"pydantic", "torch", "vllm"}


@pytest.mark.parametrize(
    ("directory", "why"),
    [("/tmp/" + 300 * "a", "File name too long"), ("~nobody-of-that-name/adapters", "home directory")],
)
def test_a_directory_that_cannot_be_looked_at_is_refused(directory: str, why: str) -> None:
    error = refused({"LORA_PLUGIN_ADAPTER_DIR": directory})
    assert why in str(error.reason.expected)


def test_defaults_are_the_designs() -> None:
    settings = loaded()
    assert settings.adapter_dir == Path("/srv/adapters")
    assert (settings.watch, settings.rescan_seconds, settings.settle_seconds) == ("auto", 5, 0.2)
    assert (settings.host_memory, settings.max_adapter_bytes) == (4 * 2**30, 2 * 2**30)
    assert (settings.admin_host, settings.admin_port, settings.admin_token) == ("127.0.0.1", 8765, None)
    assert settings.kernels == "auto"
    assert settings.load_timeout_seconds == 60


def test_names_of_other_products() -> None:
    settings = load_settings({"NIM_PEFT_SOURCE": "/srv/nim", "NIM_PEFT_REFRESH_INTERVAL": "30"})
    assert settings is not None
    assert (settings.adapter_dir, settings.rescan_seconds) == (Path("/srv/nim"), 30)


def test_values_are_parsed() -> None:
    settings = loaded(HOST_MEMORY="512 MiB", MAX_ADAPTER_BYTES="100MB", WATCH="poll")
    assert (settings.host_memory, settings.max_adapter_bytes) == (512 * 2**20, 100 * 10**6)
    assert settings.watch == "poll"


def test_empty_counts_as_unset() -> None:
    assert loaded(ADMIN_PORT="", ADMIN_TOKEN=" ").admin_port == 8765


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WATCH", "always"),
        ("ENABLED", "perhaps"),
        ("RESCAN_SECONDS", "0"),
        ("RESCAN_SECONDS", "nan"),
        ("RESCAN_SECONDS", "soon"),
        ("SETTLE_SECONDS", "-1"),
        ("SETTLE_SECONDS", "inf"),
        ("HOST_MEMORY", "much"),
        ("HOST_MEMORY", "4GiB or so"),
        ("HOST_MEMORY", "-1"),
        ("MAX_ADAPTER_BYTES", "0"),
        ("LOAD_TIMEOUT_SECONDS", "0"),
        ("KERNELS", "cuda"),
        ("ADMIN_PORT", "65536"),
        ("ADMIN_PORT", "http"),
        ("ADAPTER_DIR", "/dev/null"),
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: str) -> None:
    reason = refused(DIRECTORY | {f"LORA_PLUGIN_{name}": value}).reason
    assert f"LORA_PLUGIN_{name}" in reason.message
    assert reason.expected
    assert reason.found == repr(value)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("LORA_PLUGIN_HOST_MEM", "LORA_PLUGIN_HOST_MEMORY"),
        ("lora_plugin_watch", "LORA_PLUGIN_WATCH"),
        ("LORA_PLUGIN_ADAPTERS_DIR", "LORA_PLUGIN_ADAPTER_DIR"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, near: str) -> None:
    assert near in str(refused(DIRECTORY | {name: "1"}).reason.hint)


def test_a_misspelt_directory_does_not_switch_off_silently() -> None:
    assert "LORA_PLUGIN_ADAPTER_DIR" in str(refused({"LORA_PLUGIN_ADAPTERDIR": "/srv"}))


def test_two_names_of_one_setting_must_agree() -> None:
    assert load_settings(DIRECTORY | {"NIM_PEFT_SOURCE": DIRECTORY["LORA_PLUGIN_ADAPTER_DIR"]})
    assert "NIM_PEFT_SOURCE" in str(refused(DIRECTORY | {"NIM_PEFT_SOURCE": "/elsewhere"}))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu-1.example"])
def test_others_need_a_token(host: str) -> None:
    error = refused(DIRECTORY | {"LORA_PLUGIN_ADMIN_HOST": host})
    assert "LORA_PLUGIN_ADMIN_TOKEN" in str(error.reason.hint)
    assert loaded(ADMIN_HOST=host, ADMIN_TOKEN="t0ken").admin_host == host
    assert loaded(ADMIN_HOST=host, ADMIN_PORT="0").admin_port == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert loaded(ADMIN_HOST=host).admin_token is None


def test_the_token_is_never_shown() -> None:
    error = refused(DIRECTORY | {"LORA_PLUGIN_ADMIN_TOKEN": "hunter2 hunter2"})
    settings = loaded(ADMIN_TOKEN="hunter2")
    assert "hunter2" not in f"{error}{error.reason!r}{settings!r}{settings.shown()}"
    assert settings.shown()["LORA_PLUGIN_ADMIN_TOKEN"] == "****"


def test_an_adapter_must_fit_the_host_memory() -> None:
    sizes = {"LORA_PLUGIN_HOST_MEMORY": "1GiB", "LORA_PLUGIN_MAX_ADAPTER_BYTES": "3GiB"}
    assert "3GiB" in str(refused(DIRECTORY | sizes))
    assert loaded(HOST_MEMORY="1GiB").max_adapter_bytes == 2 * 2**30


def test_the_table_reads_back() -> None:
    table = Settings.describe()
    assert len(table) == len(Settings.model_fields)
    assert all(description.strip() for _, _, description in table)
    defaults = {variable: default for variable, default, _ in table if default}
    assert load_settings(defaults | DIRECTORY) == loaded()
    assert loaded().shown() == {variable: "" for variable, _, _ in table} | defaults | DIRECTORY


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        loaded().watch = "poll"


def modules_after(code: str) -> set[str]:
    code = f"{code}; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_switch_costs_nothing() -> None:
    modules = modules_after("import lora_plugin.switch as switch; switch.wanted()")
    assert "lora_plugin.switch" in modules
    assert not modules & {"pydantic", "pydantic_settings", "torch", "vllm", "asyncio"}


def test_the_settings_come_without_torch() -> None:
    assert not modules_after("import lora_plugin.settings") & {"torch", "vllm"}
