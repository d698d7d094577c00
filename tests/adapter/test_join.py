"""A composition is what PEFT makes of the same adapters with `combination_type="cat"`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_samples import LIMIT, deltas, llama_layout, packed_deltas, train
from base_weights import WeightsModel
from peft import LoraConfig, PeftModel
from torch import nn

from lora_plugin.adapter.join import join
from lora_plugin.adapter.load import load
from lora_plugin.composition import PartSource, compose, parts_of
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.layout import ModelLayout
from lora_plugin.worker.stager import Job, Stager

PARTS: dict[str, tuple[float, dict[str, Any]]] = {
    "a": (0.7, {"r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "b": (0.3, {"r": 5, "use_rslora": True, "target_modules": "all-linear"}),
    "c": (
        -1.5,
        {"r": 4, "rank_pattern": {"q_proj": 2}, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    ),
}


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PeftModel]:
    """The folders of the parts, and PEFT's composition of them."""
    root = tmp_path_factory.mktemp("parts")
    model = None
    for seed, (name, (_, config)) in enumerate(PARTS.items()):
        torch.manual_seed(seed)
        if model is None:
            model = train(**config)
            model.save_pretrained(str(root / name))
            model = PeftModel.from_pretrained(bare(model), str(root / name), adapter_name=name)
        else:
            settings = {"lora_alpha": 16, "init_lora_weights": False, **config}
            model.add_adapter(name, LoraConfig(**settings))
            model.save_pretrained(str(root), selected_adapters=[name])
    assert model is not None
    weights = [weight for weight, _ in PARTS.values()]
    model.add_weighted_adapter(list(PARTS), weights, "default", combination_type="cat")
    return root, model


def bare(model: PeftModel) -> nn.Module:
    return copy.deepcopy(model).unload()


def expected(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: delta for name, delta in deltas(model).items() if delta.any()}


def joined(root: Path, layout: ModelLayout) -> dict[str, torch.Tensor]:
    packed = join([load(root, n, layout, None, LIMIT, factor=weight) for n, (weight, _) in PARTS.items()])
    views = [tensor for layer in packed.layers for tensor in (layer.a, *layer.b)]
    assert sum(tensor.nbytes for tensor in views) == packed.nbytes == packed.slab.nbytes
    assert packed.rank == 8 + 5 + 2
    return packed_deltas(packed, layout)


def test_it_adds_what_pefts_composition_adds(composed: tuple[Path, PeftModel]) -> None:
    root, model = composed
    found, wanted = joined(root, llama_layout()), expected(model)
    assert found.keys() == wanted.keys()
    for name, delta in wanted.items():
        torch.testing.assert_close(found[name], delta, rtol=1e-5, atol=1e-6 * float(delta.abs().max()))


def test_shards_of_it_make_up_the_whole(composed: tuple[Path, PeftModel]) -> None:
    root, model = composed
    shards = [joined(root, llama_layout(ranks=2, rank=rank)) for rank in (0, 1)]
    for name, delta in expected(model).items():
        by_row = name.endswith(("o_proj", "down_proj"))
        torch.testing.assert_close(torch.cat([part[name] for part in shards], dim=int(by_row)), delta)


def test_the_weight_is_folded_in_before_the_only_rounding(composed: tuple[Path, PeftModel]) -> None:
    root, _ = composed
    exact = load(root, "a", llama_layout(), None, LIMIT, factor=0.3)
    served = load(root, "a", llama_layout(dtype="bfloat16"), None, LIMIT, factor=0.3)
    assert torch.equal(served.slab, exact.slab.bfloat16())


def test_the_parts_travel_in_the_path() -> None:
    assert parts_of("/adapters/sql") == ()
    source = PartSource('/adapters/"odd" name', "5f" * 32, -0.1)
    stager = Stager(llama_layout(), LIMIT, None, loader=lambda *args, **options: pytest.fail("read"))
    path = 'parts:[{"path":"/adapters/\\"odd\\" name","digest":"' + "5f" * 32 + '","weight":-0.1}]'
    assert parts_of(path) == (source,)
    # Only what the catalog gave a digest is taken for more than a folder.
    read: list[Path] = []
    stager._loader = lambda root, name, *args, **options: read.append(root / name)  # type: ignore[func-returns-value, assignment, return-value]
    stager._pack(Job(1, "offline", path, ""))
    assert read == [Path(path)]


@pytest.mark.parametrize("config", [{"use_dora": True}, {"lora_bias": True}])
def test_what_is_no_sum_is_refused_by_name(
    config: dict[str, Any], tmp_path: Path, layout: ModelLayout
) -> None:
    for name, settings in (("plain", {}), ("other", config)):
        train(**settings).save_pretrained(str(tmp_path / name))

    def any_version(
        root: Path, name: str, layout: ModelLayout, digest: str, *args: Any, **options: Any
    ) -> Any:
        return load(root, name, layout, None, *args, **options)

    stager = Stager(layout, LIMIT, None, loader=any_version)
    sources = [PartSource(str(tmp_path / name), "5f" * 32, 0.5) for name in ("plain", "other")]
    spec = compose("mix", [], sources)
    with pytest.raises(AdapterRejected, match="its part 'other': DoRA and trained biases") as caught:
        stager._pack(Job(spec.id, spec.name, spec.path, spec.digest))
    assert caught.value.code is Code.FEATURE_UNSUPPORTED


def test_trained_tokens_are_composed_with_their_weight(tmp_path: Path, layout: ModelLayout) -> None:
    base = bare(train())
    weights = WeightsModel(base, layout)
    model = train(base, trainable_token_indices=[3, 9])
    rows = model.get_input_embeddings().token_adapter.trainable_tokens_delta["default"]
    rows.data.normal_()
    model.save_pretrained(str(tmp_path / "a"))
    parts = [load(tmp_path, "a", layout, None, LIMIT, base=weights, factor=f) for f in (0.5, -2.0)]
    found = packed_deltas(join(parts), layout)["model.embed_tokens"]
    difference = rows.detach() - base.get_input_embeddings().weight[[3, 9]].detach()
    torch.testing.assert_close(found[[3, 9]], -1.5 * difference)
    assert found.any(dim=1).sum() == 2
