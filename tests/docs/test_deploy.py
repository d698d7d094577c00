"""The deployment examples name what there is: variables, and fields of the Kubernetes API."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from lora_plugin.settings import Settings

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
OBJECTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
KNOWN = {name for names in Settings.variables().values() for name in names}


@pytest.mark.parametrize("manifest", OBJECTS, ids=lambda manifest: manifest["kind"])
def test_the_kubernetes_api_takes_it(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, "1.33", strict=True)


def test_objects_fit_each_other() -> None:
    claim, deployment, service = OBJECTS
    template = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    assert service["spec"]["selector"] == template["metadata"]["labels"]
    volumes = template["spec"]["volumes"]
    claimed = [v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v]
    assert claimed == [claim["metadata"]["name"]]


@pytest.mark.parametrize("file", sorted(DEPLOY.iterdir()), ids=lambda file: file.name)
def test_every_variable_is_a_setting(file: Path) -> None:
    named = set(re.findall(r"\bLORA_PLUGIN_[A-Z_]*[A-Z]\b", file.read_text()))
    assert named <= KNOWN | {"LORA_PLUGIN_"}, named - KNOWN
