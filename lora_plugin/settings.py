"""The settings: environment variables, each explained, checked together before anything starts."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, SettingsConfigDict
from pydantic_settings import PydanticBaseSettingsSource as Source

from lora_plugin.setting_errors import (
    MASK,
    SIZE,
    refuse_contradiction,
    refuse_invalid,
    refuse_unknown,
)
from lora_plugin.switch import PREFIX, wanted

_TOKEN = re.compile(r"[!-~]+")


def _directory(path: Path) -> Path:
    try:
        path = path.expanduser().absolute()
        if path.exists() and not path.is_dir():
            raise ValueError("a directory")
    except (OSError, RuntimeError) as error:
        # A parent that is closed to this user, a name that is too long, another's home that is not there.
        why = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"a directory that can be reached ({why})") from None
    return path


def _token(secret: SecretStr) -> SecretStr:
    if not _TOKEN.fullmatch(secret.get_secret_value()):
        raise ValueError("visible ASCII characters without spaces")
    return secret


def _one_size(value: object) -> object:
    # ByteSize takes "4GiB and more" for 4GiB.
    if isinstance(value, str) and not re.fullmatch(r"[\d.]+\s*[A-Za-z]*", value):
        raise ValueError(SIZE)
    return value


def _positive(value: ByteSize) -> ByteSize:
    if value <= 0:
        raise ValueError("more than 0 bytes")
    return value


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _module(name: str) -> str:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError("names of Python modules, comma between them")
    return name


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Modules = Annotated[tuple[Annotated[str, AfterValidator(_module)], ...], NoDecode, BeforeValidator(_split)]
Bytes = Annotated[ByteSize, BeforeValidator(_one_size), AfterValidator(_positive)]


class SettingDoc(NamedTuple):
    """One row of the settings table."""

    variable: str
    default: str
    description: str


class Settings(BaseSettings):
    """What the operator set, from `LORA_PLUGIN_*` variables; an empty variable counts as unset.

    Instances are read from the environment by `load_settings`; the constructor takes values by field name.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", populate_by_name=True)

    adapter_dir: Annotated[Path, AfterValidator(_directory)] = Field(
        validation_alias=AliasChoices(f"{PREFIX}ADAPTER_DIR", "NIM_PEFT_SOURCE"),
        description="The watched directory: each folder in it is an adapter. Unset: the plugin is off. "
        "Created when it is missing.",
    )
    enabled: bool = Field(True, description="0 switches the plugin off, whatever else is set.")
    watch: Literal["auto", "events", "poll"] = Field(
        "auto",
        description="How changes are noticed: events (inotify), poll, or auto: events, and polling where "
        "they do not work.",
    )
    rescan_seconds: float = Field(
        5.0,
        gt=0,
        allow_inf_nan=False,
        validation_alias=AliasChoices(f"{PREFIX}RESCAN_SECONDS", "NIM_PEFT_REFRESH_INTERVAL"),
        description="Seconds between full rescans, which catch what events miss.",
    )
    settle_seconds: float = Field(
        0.2,
        ge=0,
        allow_inf_nan=False,
        description="Seconds without any change before a changed folder is read.",
    )
    host_memory: Bytes = Field(
        ByteSize(4 << 30),
        description="Budget of an engine's host cache of packed adapters, shared by its workers; "
        "a size such as 4GiB.",
    )
    max_adapter_bytes: Bytes = Field(
        ByteSize(2 << 30),
        description="An adapter whose files are larger is refused unread; a size such as 2GiB.",
    )
    load_endpoints: bool = Field(
        True,
        description="Whether /v1/load_lora_adapter and /v1/unload_lora_adapter are there. Every client of "
        "the API may call them; --api-key guards them as the rest of it.",
    )
    hub_allow: Names = Field(
        (),
        description="Repositories of the Hugging Face Hub that may be fetched, comma between them: "
        "`org/name`, or a pattern such as `org/*`. Empty: none.",
    )
    load_timeout_seconds: float = Field(
        60.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that a request waits for an adapter that is not loaded yet, before a 503.",
    )
    max_wait_seconds: float = Field(
        10.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that requests wait for room on the device while other adapters are served; then "
        "it is their adapter's turn, as soon as running requests have made room.",
    )
    prefetch: bool = Field(
        True,
        description="Whether an adapter that appears while the server runs is checked and loaded at once, "
        "instead of by its first request; no other adapter leaves host memory for it.",
    )
    eviction: Literal["lru", "cost"] = Field(
        "lru",
        description="Which idle adapters leave host memory first: lru (least recently used), or cost (by "
        "use, size and how long a reload takes).",
    )
    kernels: Literal["auto", "native", "triton", "torch"] = Field(
        "auto",
        description="The kernels: native (CPU, needs a C++ compiler, and for bfloat16 AVX512-BF16), "
        "triton (GPU), torch, or auto: the first of them that can be had.",
    )
    hooks: Modules = Field(
        (), description="Modules with hook implementations, comma between them; asked in this order."
    )
    hooks_block: Names = Field(
        (),
        description="Plugins that are not loaded, comma between them; built-in ones too.",
    )
    log_requests: bool = Field(
        False,
        description="Whether the log line of a request (what it asked for and got, how long it waited) is at "
        "level INFO, instead of DEBUG.",
    )
    admin_host: str = Field(
        "127.0.0.1",
        description="Address of the admin endpoint; one that others can reach needs a token.",
    )
    admin_port: int = Field(
        8765,
        ge=0,
        le=65535,
        description="Port of the admin endpoint; 0: no admin endpoint. A taken port only warns.",
    )
    admin_token: Annotated[SecretStr, AfterValidator(_token)] | None = Field(
        None, description="Bearer token that the admin endpoint asks for. Unset: none."
    )
    admin_read_token: Annotated[SecretStr, AfterValidator(_token)] | None = Field(
        None, description="A second bearer token, which may read and change nothing."
    )
    admin_allowed_hosts: Names = Field(
        (),
        description="Names, separated by commas, that the admin endpoint may be called by besides localhost, "
        "its own address and IP addresses.",
    )
    admin_tls_cert: Path | None = Field(
        None, description="PEM file with the admin endpoint's certificate chain: it then speaks https only."
    )
    admin_tls_key: Path | None = Field(
        None, description="PEM file with the certificate's key; unset: it is in the certificate's file."
    )

    @model_validator(mode="after")
    def _admin_is_locked(self) -> Self:
        if self.admin_port and not self.admin_token and not is_loopback(self.admin_host):
            raise refuse_contradiction(
                f"{PREFIX}ADMIN_HOST={self.admin_host} lets others reach the admin endpoint without a token",
                expected=f"{PREFIX}ADMIN_TOKEN to be set, or a loopback address",
                hint=f"set {PREFIX}ADMIN_TOKEN, or {PREFIX}ADMIN_HOST=127.0.0.1, or {PREFIX}ADMIN_PORT=0",
            )
        if self.admin_read_token and self.admin_read_token in (self.admin_token or self.admin_read_token,):
            raise refuse_contradiction(
                f"{PREFIX}ADMIN_READ_TOKEN is of use only beside another {PREFIX}ADMIN_TOKEN",
                expected="two tokens that differ",
                hint=f"set {PREFIX}ADMIN_TOKEN too, or unset {PREFIX}ADMIN_READ_TOKEN",
            )
        if self.admin_tls_key and not self.admin_tls_cert:
            raise refuse_contradiction(
                f"{PREFIX}ADMIN_TLS_KEY is set without {PREFIX}ADMIN_TLS_CERT",
                hint=f"set {PREFIX}ADMIN_TLS_CERT to the certificate's file",
            )
        return self

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        given = {"max_adapter_bytes", "host_memory"} <= self.model_fields_set
        if given and self.max_adapter_bytes > self.host_memory:
            raise refuse_contradiction(
                f"{PREFIX}MAX_ADAPTER_BYTES allows an adapter larger than {PREFIX}HOST_MEMORY",
                expected=f"at most {_size_text(self.host_memory)}",
                found=_size_text(self.max_adapter_bytes),
                hint=f"raise {PREFIX}HOST_MEMORY or lower {PREFIX}MAX_ADAPTER_BYTES",
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: Source,
        env_settings: Source,
        dotenv_settings: Source,
        file_secret_settings: Source,
    ) -> tuple[Source, ...]:
        """Only the constructor's: `load_settings` reads the environment it is given, and no file."""
        return (init_settings,)

    @classmethod
    def variables(cls) -> dict[str, tuple[str, ...]]:
        """Every field's environment variables, the plugin's own name first."""
        return {field: _variables(field, info) for field, info in cls.model_fields.items()}

    @classmethod
    def describe(cls) -> list[SettingDoc]:
        """The settings table: (variable, default, description), in the order of the class."""
        return [
            SettingDoc(variables[0], _default_text(cls.model_fields[field]), _description(cls, field))
            for field, variables in cls.variables().items()
        ]

    def shown(self) -> dict[str, str]:
        """Every variable with its present value as it would be set; secrets masked."""
        return {names[0]: _text(getattr(self, field)) for field, names in self.variables().items()}


def load_settings(environ: Mapping[str, str] | None = None) -> Settings | None:
    """The settings of `environ` (the process's own by default), or None where the plugin is off.

    Raises:
        SettingsError: SETTINGS_INVALID, naming the variable, its value, what was expected and what to do.
    """
    environ = os.environ if environ is None else environ
    if not wanted(environ):
        return None
    given = {name: value.strip() for name, value in environ.items() if value.strip()}
    known = Settings.variables()
    refuse_unknown(given, {name for names in known.values() for name in names})
    for names in known.values():
        _refuse_disagreement([name for name in names if name in given], given)
    source = EnvSettingsSource(Settings)
    source.env_vars = {name.lower(): value for name, value in given.items()}
    try:
        return Settings(**source())
    except ValidationError as error:
        raise refuse_invalid(error, known, given) from None


def _refuse_disagreement(names: list[str], given: Mapping[str, str]) -> None:
    if len({given[name] for name in names}) > 1:
        raise refuse_contradiction(
            f"{' and '.join(names)} are two names of one setting and differ",
            found=", ".join(f"{name}={given[name]}" for name in names),
            hint=f"keep {names[0]} only",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address or name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _variables(field: str, info: FieldInfo) -> tuple[str, ...]:
    if isinstance(info.validation_alias, AliasChoices):
        return tuple(str(choice) for choice in info.validation_alias.choices)
    return (PREFIX + field.upper(),)


def _description(cls: type[Settings], field: str) -> str:
    aliases = "".join(f" Also {name}." for name in cls.variables()[field][1:])
    return f"{cls.model_fields[field].description}{aliases}"


def _default_text(info: FieldInfo) -> str:
    return "" if info.is_required() else _text(info.default)


def _text(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return str(int(value))
        case ByteSize():
            return _size_text(value)
        case SecretStr():
            return MASK
        case float():
            return f"{value:g}"
        case tuple():
            return ",".join(value)
    return str(value)


def _size_text(size: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >> shift and not size & ((1 << shift) - 1):
            return f"{size >> shift}{unit}"
    return f"{size}B"
