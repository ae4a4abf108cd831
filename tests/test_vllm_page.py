"""docs/vllm.md and examples/vllm: what an operator copies from there is right, down to each option and number.

The first part runs anywhere. The last asks the vLLM that is installed, where one is:
`/path/to/vllm-environment/bin/python -m pytest tests/test_vllm_page.py`.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.errors import MissingDependencyError
from kvstore.registry import backend_class, known_schemes
from kvstore.url import TierURL

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "vllm.md"
MANIFEST = ROOT / "examples" / "vllm" / "kubernetes.yaml"
OF_VLLM = {"type", "module_path", "backpressure"}
EXTRA_CONFIG = {"spec_name", "cpu_bytes_to_use", "secondary_tiers"}

if not PAGE.exists():
    pytest.skip("docs/vllm.md is not beside the tests", allow_module_level=True)

TEXT = PAGE.read_text(encoding="utf-8")


def module(path: str) -> ModuleType:
    """A module of `kvstore.vllm` by its file: the package wants vLLM, which these modules do not."""
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_of_the_page", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look themselves up there
    spec.loader.exec_module(found)
    return found


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """Each command of the page that calls `program`, split as a shell does."""
    text = "\n".join(blocks("bash"))
    starts = [match.start() for match in re.finditer(rf"^{program} ", text, re.MULTILINE)]
    return [shlex.split(_one_command(text[start:]), comments=True) for start in starts]


def _one_command(text: str) -> str:
    """Up to the first end of a line that is in no quotes."""
    end = text.find("\n")
    while text[:end].count("'") % 2:
        end = text.find("\n", end + 1)
    return text[:end]


def manifests() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))


def pod() -> dict[str, Any]:
    (stateful,) = [each for each in manifests() if each["kind"] == "StatefulSet"]
    template: dict[str, Any] = stateful["spec"]["template"]["spec"]
    return template


def arguments(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


LINES = commands("vllm serve")
CONFIGURATIONS = [json.loads(arguments(line, "--kv-transfer-config")) for line in LINES]


def configurations() -> list[dict[str, Any]]:
    """Of the page's lines, and of the manifest."""
    (engine,) = pod()["containers"]
    return [*CONFIGURATIONS, json.loads(arguments(engine["args"], "--kv-transfer-config"))]


def test_there_are_lines_for_nvme_for_nvme_and_a_bucket_and_for_a_bucket() -> None:
    schemes = [
        [TierURL.parse(tier["url"]).scheme for tier in found["kv_connector_extra_config"]["secondary_tiers"]]
        for found in CONFIGURATIONS
    ]
    assert schemes == [["file"], ["file", "s3"], ["s3"]]


def test_every_configuration_has_what_vllm_needs_and_nothing_that_it_does_not_know() -> None:
    for found in configurations():
        assert (found["kv_connector"], found["kv_role"]) == ("OffloadingConnector", "kv_both")
        extra = found["kv_connector_extra_config"]
        assert set(found) == {"kv_connector", "kv_role", "kv_connector_extra_config"}
        assert set(extra) == EXTRA_CONFIG
        assert extra["spec_name"] == "TieringOffloadingSpec"
        assert all(tier["type"] == "kvstore" for tier in extra["secondary_tiers"])


def test_every_tier_has_options_that_kvstore_knows_with_values_that_it_takes() -> None:
    options = module("kvstore/vllm/options.py")
    for found in configurations():
        for tier in found["kv_connector_extra_config"]["secondary_tiers"]:
            chosen = options.TierOptions.of({name: value for name, value in tier.items() if name not in OF_VLLM})
            check(chosen.url)


def check(url: TierURL) -> None:
    """That its backend is there and takes its options."""
    assert url.scheme in known_schemes()
    try:
        url.validated(backend_class(url).options)
    except MissingDependencyError as error:
        pytest.skip(str(error))


def test_every_url_of_the_page_is_one() -> None:
    urls = set(re.findall(r"`((?:file|lmdb|s3)://[^`\s…]+)`", TEXT))
    for command in commands("kvstore"):
        urls |= {word for word in command if "://" in word}
    (doctor,) = pod()["initContainers"]
    urls |= set(re.findall(r"'(\w+://[^']+)'", doctor["args"][0]))
    assert len(urls) >= 4
    for url in urls - {"file://", "lmdb://"}:
        check(TierURL.parse(url))


def test_the_table_of_options_is_the_tiers_own() -> None:
    table = TEXT.split("## Options of a tier")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [
        option.name for option in module("kvstore/vllm/options.py").KNOWN
    ]


def test_the_table_of_models_follows_from_its_formula() -> None:
    row = re.compile(r"^\| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \| (\d) \| ([\d,]+) \| ([\d.]+) GB \|$", re.MULTILINE)
    rows = row.findall(TEXT)
    assert len(rows) == 7
    for name, layers, heads, size, nbytes, per_token, longest in rows:
        both = 1 if "MLA" in name else 2
        expected = both * int(layers) * int(heads) * int(size) * int(nbytes)
        assert int(per_token.replace(",", "")) == expected, name
        assert longest == f"{expected * 32768 / 1e9:.2f}", name


def test_primary_memory_of_every_line_holds_its_longest_request() -> None:
    (per_token,) = re.findall(r"^\| Llama-3.1-8B \|.*\| ([\d,]+) \| [\d.]+ GB \|$", TEXT, re.MULTILINE)
    longest = int(per_token.replace(",", "")) * 131072  # tokens that this model takes at most
    for found in configurations():
        assert found["kv_connector_extra_config"]["cpu_bytes_to_use"] >= longest


def test_the_log_messages_of_the_page_are_in_the_code() -> None:
    table = TEXT.split("## What the log says")[1].split("\n## ")[0]
    said = [
        text for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for text in re.findall(r"`([^`]+)`", cell)
    ]
    sources = [*(ROOT / "kvstore").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]
    code = "\n".join(re.sub(r'"\s*\n\s*f?"', "", file.read_text(encoding="utf-8")) for file in sources)
    assert len(said) > 12
    for text in said:
        if text.startswith("kvstore "):
            continue
        for part in filter(None, (part.strip() for part in text.split("…"))):
            assert part in code, part


def test_every_metric_of_kvstore_is_on_the_page() -> None:
    names = metric_names()
    assert len(names) > 15
    assert set(re.findall(r"vllm:(kvstore_\w+)", TEXT)) == names


def metric_names() -> set[str]:
    """As `kvstore.vllm.metrics` declares them; read, because importing it takes vLLM."""
    tree = ast.parse((ROOT / "kvstore" / "vllm" / "metrics.py").read_text(encoding="utf-8"))
    tables = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.target) in ("COUNTERS", "GAUGES")
    ]
    return {f"kvstore_{name}" for table in tables for name, _ in table.values()}


# Kubernetes


def test_the_manifest_has_what_kubernetes_requires() -> None:
    found = manifests()
    assert [each["kind"] for each in found] == ["ServiceAccount", "Secret", "Service", "StatefulSet"]
    for each in found:
        assert each["apiVersion"]
        assert each["metadata"]["name"]
    stateful = found[-1]["spec"]
    labels = stateful["template"]["metadata"]["labels"]
    assert stateful["selector"]["matchLabels"] == labels == found[2]["spec"]["selector"]
    assert stateful["serviceName"] == found[2]["metadata"]["name"]
    for container in pod()["containers"] + pod()["initContainers"]:
        assert {"name", "image", "command", "args", "resources", "securityContext", "volumeMounts"} <= set(container)
        assert {"requests", "limits"} <= set(container["resources"])
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        for source in container["envFrom"]:
            assert source["secretRef"]["name"] == found[1]["metadata"]["name"]


def test_every_mount_of_the_manifest_has_a_volume_and_every_pod_one_of_its_own() -> None:
    (claim,) = manifests()[-1]["spec"]["volumeClaimTemplates"]
    volumes = {volume["name"] for volume in pod()["volumes"]} | {claim["metadata"]["name"]}
    mounts = {mount["name"] for each in pod()["containers"] + pod()["initContainers"] for mount in each["volumeMounts"]}
    assert mounts == volumes
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert pod()["securityContext"]["fsGroup"] == pod()["securityContext"]["runAsGroup"]
    assert pod()["securityContext"]["runAsNonRoot"] is True


def test_the_sizes_of_the_manifest_fit_into_each_other() -> None:
    (engine,) = pod()["containers"]
    (claim,) = manifests()[-1]["spec"]["volumeClaimTemplates"]
    extra = configurations()[-1]["kv_connector_extra_config"]
    (shm,) = [volume["emptyDir"]["sizeLimit"] for volume in pod()["volumes"] if volume["name"] == "shm"]
    assert extra["cpu_bytes_to_use"] < gibibytes(shm) < gibibytes(engine["resources"]["limits"]["memory"])
    local = TierURL.parse(extra["secondary_tiers"][0]["url"])
    capacity = local.validated(backend_class(local).options).values["capacity"]
    assert getattr(capacity, "bytes") < gibibytes(claim["spec"]["resources"]["requests"]["storage"])  # noqa: B009
    assert any(local.location.startswith(mount["mountPath"] + "/") for mount in engine["volumeMounts"])
    (doctor,) = pod()["initContainers"]
    assert all(tier["url"] in doctor["args"][0] for tier in extra["secondary_tiers"])


def gibibytes(text: str) -> int:
    assert text.endswith("Gi")
    return int(text[:-2]) << 30


# Against vLLM itself


def test_vllm_takes_every_configuration() -> None:
    pytest.importorskip("vllm.v1.kv_offload.tiering.spec")
    from vllm.config import KVTransferConfig
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from kvstore.vllm.plugin import register
    from kvstore.vllm.tier import KVStoreTier

    register()
    for found in configurations():
        config = KVTransferConfig(**found)
        spec = OffloadingSpecFactory.get_spec_cls(config.kv_connector_extra_config)
        assert spec.__name__ == "TieringOffloadingSpec"
        for tier in config.kv_connector_extra_config["secondary_tiers"]:
            assert SecondaryTierFactory.get_tier_class(tier) is KVStoreTier
        assert spec.build_metric_definitions(config.kv_connector_extra_config)


def test_the_request_of_the_page_is_understood() -> None:
    pytest.importorskip("vllm.v1.kv_offload.tiering.spec")
    from kvstore.vllm.requests import said

    (request,) = map(json.loads, blocks("json"))
    mark = said(request["kv_transfer_params"])
    assert mark is not None
    assert (mark.label, mark.pinned, mark.tenant) == ("handbook-2026", True, "acme")
    assert request["cache_salt"]


def test_every_metric_of_the_page_is_one() -> None:
    pytest.importorskip("vllm.v1.kv_offload.tiering.spec")
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from kvstore.vllm.plugin import register

    register()
    there = set(TieringOffloadingSpec.build_metric_definitions(CONFIGURATIONS[0]["kv_connector_extra_config"]))
    later = set(re.findall(r"`(vllm:\w+)` \(0\.33\)", TEXT))
    named = set(re.findall(r"vllm:\w+", TEXT))
    assert len(named) > 8
    assert named <= there or (named - later <= there and not later & there)


def test_vllm_serve_knows_every_flag_of_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm.v1.kv_offload.tiering.spec")
    from vllm.platforms import current_platform

    if not current_platform.device_type:  # a build for GPUs on a machine without any
        monkeypatch.setattr(current_platform, "device_type", "cpu")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    (engine,) = pod()["containers"]
    served = [line[3:] for line in LINES] + [[word for word in engine["args"][1:] if not word.startswith("--port")]]
    for words in served:
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        assert parser.parse_args(words).kv_transfer_config is not None
