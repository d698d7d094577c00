"""docs/adapters.md: what it says of every row is what becomes of an example of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_examples import NAMES, NOT_WHOLE, REFUSED, SERVED, Change
from adapter_samples import LIMIT, base_model, deltas, packed_deltas, train
from base_weights import WeightsModel
from documents import DOCS, rows, section

from lora_plugin.adapter.config import _UNSUPPORTED
from lora_plugin.adapter.load import load
from lora_plugin.adapter.names import check_name
from lora_plugin.errors import LoraPluginError
from lora_plugin.layout import ModelLayout

PAGE = DOCS / "adapters.md"
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def documented(title: str) -> dict[str, str]:
    """The second column by the first."""
    return {what: rest.strip("`") for what, rest in rows(section(PAGE, title))}


def examples(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(what, each, id=f"{what[:40]}-{i}")
        for what, all_ in table.items()
        for i, each in enumerate(all_)
    ]


def parts_of(module: str) -> list[str]:
    """The slices that a module of the trained model is in the layout."""
    head, _, leaf = module.rpartition(".")
    return [f"{head}.{part}" for part in PACKED[leaf]] if leaf in PACKED else [module]


def outcome(folder: Path, layout: ModelLayout) -> LoraPluginError:
    with pytest.raises(LoraPluginError) as caught:
        load(folder.parent, folder.name, layout, None, LIMIT, base=WeightsModel(base_model(), layout))
    return caught.value


def test_every_row_has_an_example() -> None:
    assert list(documented("Served")) == list(SERVED)
    assert list(documented("Not whole yet")) == list(NOT_WHOLE)
    assert list(documented("Refused")) == [*REFUSED, *NAMES]


def test_every_code_of_a_folder_is_in_errors() -> None:
    statuses = {row[0].strip("`"): row[1] for row in rows((DOCS / "errors.md").read_text())}
    assert all("400" in statuses[code] for code in documented("Refused").values())
    assert all(statuses[code] == "503" for code in documented("Not whole yet").values())


def test_every_feature_that_is_refused_is_named() -> None:
    text = PAGE.read_text()
    assert [field for field in _UNSUPPORTED if f"`{field}`" not in text] == []


@pytest.mark.parametrize(("what", "example"), examples(SERVED))
def test_served(
    what: str, example: tuple[dict[str, Any], Change], tmp_path: Path, layout: ModelLayout
) -> None:
    settings, change = example
    model = train(**settings)
    model.save_pretrained(str(tmp_path / "a"))
    change(tmp_path / "a")
    found = packed_deltas(load(tmp_path, "a", layout, None, LIMIT), layout)
    for name, delta in deltas(model).items():
        joined = torch.cat([found.pop(part) for part in parts_of(name)])
        torch.testing.assert_close(joined, delta, rtol=1e-5, atol=1e-6 * float(delta.abs().max()))
    assert not found


@pytest.mark.parametrize(("what", "change"), examples(NOT_WHOLE))
def test_not_whole_yet(what: str, change: Change, folder: Path, layout: ModelLayout) -> None:
    change(folder)
    error = outcome(folder, layout)
    assert (error.code, error.status) == (documented("Not whole yet")[what], 503)


@pytest.mark.parametrize(("what", "change"), examples(REFUSED))
def test_refused(what: str, change: Change, folder: Path, layout: ModelLayout) -> None:
    change(folder)
    # float16 is the dtype that a value can be beyond.
    error = outcome(folder, replace(layout, dtype="float16"))
    assert (error.code, error.status) == (documented("Refused")[what], 400)


@pytest.mark.parametrize("what", NAMES)
def test_names(what: str) -> None:
    for name in NAMES[what]:
        with pytest.raises(LoraPluginError) as caught:
            check_name(name, {"base"})
        assert (caught.value.code, caught.value.status) == (documented("Refused")[what], 400)
