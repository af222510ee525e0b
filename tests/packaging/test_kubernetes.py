"""The manifests in deploy/kubernetes: what their pods run, and that they fit the schemas of their projects."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from metalearn.config.compose import compose_config
from tests.runs import ROOT, Program, Start, assert_same_bytes, slow

FOLDER = ROOT / "deploy/kubernetes"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))

SCHEMAS = "METALEARN_CRDS"
"""Environment variable: a folder with the CustomResourceDefinitions of JobSet and the training operator."""

TINY = (
    "experiment=maml_sinusoid", "run=seed0", "trainer.steps=5", "trainer.val_every=5",
    "trainer.val_tasks=4", "trainer.test_tasks=8",
)  # fmt: skip

every_manifest = pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)


def manifest(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


def pods(node: object) -> Iterator[dict[str, Any]]:
    """The pod templates in a manifest."""
    if isinstance(node, dict):
        if "containers" in node.get("spec", {}):
            yield node
        for value in node.values():
            yield from pods(value)
    elif isinstance(node, list):
        for value in node:
            yield from pods(value)


def command_of(path: Path) -> list[str]:
    """The command of all pods of a manifest."""
    commands = [pod["spec"]["containers"][0]["command"] for pod in pods(manifest(path))]
    assert commands and all(command == commands[0] for command in commands)
    command: list[str] = commands[0]
    return command


@every_manifest
def test_pods_run_commands_that_compose_and_write_volumes(path: Path) -> None:
    command = command_of(path)
    program = command.index("/app/train.py")
    composed = compose_config(command[program + 1 :])
    assert composed.config.launch.interface == "eth0"
    for pod in pods(manifest(path)):
        spec, container = pod["spec"], pod["spec"]["containers"][0]
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/data", "/cache", "/tmp", f"/work/{composed.run_dir.parts[0]}"} <= mounted
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
        assert container["securityContext"]["readOnlyRootFilesystem"] and spec["securityContext"]["runAsNonRoot"]


def test_the_numbers_and_names_of_the_jobset_agree() -> None:
    content = manifest(FOLDER / "jobset.yaml")
    (job,) = content["spec"]["replicatedJobs"]
    nodes, name = job["template"]["spec"]["completions"], content["metadata"]["name"]
    assert job["template"]["spec"]["parallelism"] == nodes
    command = command_of(FOLDER / "jobset.yaml")
    assert f"--nnodes={nodes}" in command
    assert f"--master-addr={name}-{job['name']}-0-0.{name}" in command  # JobSet's name of its first pod


# Schemas


def published_schema(group: str, kind: str, version: str) -> dict[str, Any]:
    """The schema of a kind, from the folder that the environment names."""
    if SCHEMAS not in os.environ:
        pytest.skip(
            f"set {SCHEMAS} to a folder with manifests/base/crds/kubeflow.org_pytorchjobs.yaml of kubeflow/training-"
            "operator, v1.9, and config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of kubernetes-sigs/jobset"
        )
    for path in Path(os.environ[SCHEMAS]).glob("*.yaml"):
        spec = manifest(path)["spec"]
        if (spec["group"], spec["names"]["kind"]) == (group, kind):
            (one,) = (one for one in spec["versions"] if one["name"] == version)
            schema: dict[str, Any] = one["schema"]["openAPIV3Schema"]
            return schema
    raise LookupError(f"{os.environ[SCHEMAS]} has no {kind} of {group}")


def strict(schema: Any) -> Any:
    """A schema of Kubernetes as JSON Schema, which refuses fields that it does not know."""
    if not isinstance(schema, dict):
        return schema
    own = {name: value for name, value in schema.items() if name not in ("properties", "items", "additionalProperties")}
    for name in ("items", "additionalProperties"):
        if name in schema:
            own[name] = strict(schema[name])
    if "properties" in schema:
        own["properties"] = {name: strict(value) for name, value in schema["properties"].items()}
        own["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    return own


@every_manifest
def test_the_manifests_fit_the_published_schemas(path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="the package jsonschema is not installed")
    content = manifest(path)
    group, _, version = content["apiVersion"].partition("/")
    schema = strict(published_schema(group, content["kind"], version))
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.validate(content, schema)
    next(pods(content))["spec"]["containers"][0]["image_"] = "misspelt"
    with pytest.raises(jsonschema.ValidationError, match="image_"):
        jsonschema.validate(content, schema)


# The commands, in the environment that Kubernetes and the operators give them


def environment(path: Path, node: int, port: int) -> tuple[list[str], dict[str, str]]:
    """The command of node 0 or 1 with one process, on this host, and its environment variables."""
    command = command_of(path)
    if path.stem == "jobset":
        changed = {
            "--master-addr": "127.0.0.1", "--master-port": str(port), "--nproc-per-node": "1", "--node-rank": str(node),
        }  # fmt: skip
        command = [f"{name}={changed.get(name, value)}" if value else name for name, _, value in map(parted, command)]
        return command, {}
    return command, {
        "PET_NNODES": "2", "PET_NODE_RANK": str(node), "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(node),
        "WORLD_SIZE": "2",
    }  # fmt: skip


def parted(text: str) -> tuple[str, str, str]:
    return text.partition("=")


@slow
@every_manifest
def test_two_pods_have_the_bits_of_one_host(path: Path, tmp_path: Path, start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    programs = []
    for node in (0, 1):
        command, variables = environment(path, node, port)
        options = command[1 : command.index("/app/train.py")]
        python = [sys.executable, "-m", "torch.distributed.run", *options, str(ROOT / "train.py")]
        programs.append(Program([*python, *TINY, "launch.interface=lo"], tmp_path, variables))
    for program in programs:
        outcome = program.wait()
        assert outcome.code == 0, outcome.text
    plain = start(*TINY, "run=plain", "workers=2").wait()
    assert plain.code == 0, plain.text
    assert_same_bytes(*(tmp_path / "outputs/maml_sinusoid" / run for run in ("seed0", "plain")))
