"""Dockerfile and compose.yaml keep hadolint's rules and ours: there is no Docker engine here that could build them."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from typing import Any

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from metalearn.config.compose import compose_config
from tests.packaging.test_house import imported
from tests.packaging.test_package import FOLDERS
from tests.runs import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
NODES: dict[str, Any] = COMPOSE["services"]


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile and their arguments, each on one line."""
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines if line)]


def faults(text: str) -> set[str]:
    """The rules that a Dockerfile breaks."""
    steps = instructions(text)
    arguments = dict(rest.partition("=")[::2] for name, rest in steps if name == "ARG")
    bases = [re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], rest) for name, rest in steps if name == "FROM"]
    runs = [rest for name, rest in steps if name == "RUN"]
    users = [rest for name, rest in steps if name == "USER"]
    entries = [rest for name, rest in steps if name in ("ENTRYPOINT", "CMD")]
    order = [name if name != "RUN" else rest.split()[0] for name, rest in steps]
    pip = next(
        (place for place, (name, rest) in enumerate(steps) if name == "RUN" and "pip install" in rest), len(steps)
    )
    copied = {word for name, rest in steps[:pip] if name == "COPY" for word in rest.split()[:-1]}
    apt, pips = ([rest for rest in runs if f"{tool} install" in rest] for tool in ("apt-get", "pip"))
    kept = {
        "base": all(re.fullmatch(r"[a-z]+:\d+\.\d+\.\d+-[\w-]+@sha256:[0-9a-f]{64}", base) for base in bases),
        "apt": all("--no-install-recommends" in rest and "apt-get update" in rest for rest in apt),
        "apt lists": all("rm -rf /var/lib/apt/lists/*" in rest for rest in apt),
        "pip": all("--no-cache-dir" in rest and "--constraint requirements.lock" in rest for rest in pips),
        "user": bool(users) and re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]) is not None and "USER" in order,
        "secrets": not any(
            re.search(r"TOKEN|PASSWORD|SECRET|_KEY", rest) for name, rest in steps if name in ("ARG", "ENV")
        ),
        "add": not any(name == "ADD" or (name == "COPY" and rest.split()[0] == ".") for name, rest in steps),
        "layers": copied
        <= {
            "pyproject.toml",
            "requirements.lock",
            "deploy/docker/dependencies.py",
            "hydra_async_sweeper/pyproject.toml",
        },
        "entry": [json.loads(entry)[-1] for entry in entries if entry.startswith("[")] == ["/app/train.py"],
        "folders": all(rest.startswith("/") for name, rest in steps if name == "WORKDIR"),
    }
    return {rule for rule, is_kept in kept.items() if not is_kept}


def test_the_dockerfile_keeps_the_rules() -> None:
    assert faults(DOCKERFILE) == set()


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (r"@sha256:\w+", "", "base"),
        (r"python:3\S+@", "python:latest@", "base"),
        (" --no-install-recommends", "", "apt"),
        (r"&& rm -rf /var/lib/apt/lists/\*", "&& true", "apt lists"),
        (" --constraint requirements.lock", "", "pip"),
        ("USER 1000:1000", "USER metalearn", "user"),
        ("USER 1000:1000", "", "user"),
        ("ENV HOME=/cache", "ENV HOME=/cache DISTRIBUTED_TOKEN=1", "secrets"),
        ("COPY conf conf", "COPY . .", "add"),
        ("COPY pyproject.toml", "COPY train.py pyproject.toml", "layers"),
        ("ENTRYPOINT .*", "ENTRYPOINT python /app/train.py", "entry"),
        ("WORKDIR /app", "WORKDIR app", "folders"),
    ],
)
def test_a_broken_rule_is_seen(old: str, new: str, fault: str) -> None:
    broken, count = re.subn(old, new, DOCKERFILE)
    assert count and faults(broken) == {fault}


def test_what_is_copied_is_the_program_and_reaches_the_builder() -> None:
    sources = [word for name, rest in instructions(DOCKERFILE) if name == "COPY" for word in rest.split()[:-1]]
    assert {*FOLDERS, "hydra_async_sweeper", "scripts", "train.py"} < set(sources) and all(
        (ROOT / source).exists() for source in sources
    )
    own = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} - {"tests"}
    needed = {name.split(".")[0] for path in (ROOT / "scripts").glob("*.py") for name in imported(path)} & own
    assert needed <= set(sources), "scripts would not start in the image"
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert ignored[0] == "*" and {line[1:] for line in ignored if line[0] == "!"} == set(sources)


def test_what_is_installed_is_required_and_locked() -> None:
    command = [sys.executable, "deploy/docker/dependencies.py", "sweep"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sweeper = tomllib.loads((ROOT / "hydra_async_sweeper/pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["sweep"] == [sweeper["name"]]
    assert printed == [*project["dependencies"], *sweeper["dependencies"]]
    locked = {line.partition("==")[0].lower() for line in (ROOT / "requirements.lock").read_text().splitlines()}
    assert {re.split("[<>=]", line)[0] for line in printed} <= locked


def test_the_nodes_of_compose_share_a_bridge_and_nothing_else() -> None:
    assert COMPOSE["networks"] == {"nodes": {"driver": "bridge"}}
    for node in NODES.values():
        assert node["networks"] == ["nodes"] and not {"network_mode", "privileged", "ports"} & node.keys()
        assert node["read_only"] and node["init"] and node["cap_drop"] == ["ALL"]
        assert {mount.split(":")[-2 if mount.endswith(":ro") else -1] for mount in node["volumes"]} >= {
            "/data",
            "/cache",
        }
    folders = [mount.partition(":")[0] for node in NODES.values() for mount in node["volumes"]]
    assert {name for name in folders if folders.count(name) > 1} == {"${METALEARN_DATA"}


@pytest.mark.parametrize("name", NODES)
def test_every_node_has_a_command_that_can_be_composed(name: str) -> None:
    GlobalHydra.instance().clear()
    overrides = shlex.split(NODES[name]["command"].replace("${TRAIN:-}", ""))
    launch = compose_config(overrides)[0].launch
    assert f"node{launch.node_rank}" == name and (launch.nnodes, launch.master_addr) == (len(NODES), "node0")


def test_each_node_with_gpus_has_a_card_of_its_own() -> None:
    services = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text())["services"]
    assert services.keys() == NODES.keys()
    devices = [node["deploy"]["resources"]["reservations"]["devices"] for node in services.values()]
    assert all(device["capabilities"] == ["gpu"] and device["driver"] == "nvidia" for (device,) in devices)
    cards = [card for (device,) in devices for card in device["device_ids"]]
    assert len(cards) == len(set(cards)) == len(NODES)
