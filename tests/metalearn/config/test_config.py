"""Every yaml composes and builds; a wrong config ends with exit code 2 before anything is made."""

import importlib.util
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from distributed.strategies.common.work import WorkPlan
from metalearn.app.job import Job, script
from metalearn.app.parts import assemble, make_work
from metalearn.cli import train
from metalearn.config import check, options
from metalearn.config import compose as configs
from metalearn.config.build import build
from metalearn.config.options import help_text
from metalearn.errors import ConfigError, DataError
from tests.runs import PROGRAM, ROOT, Start, slow

OPTIONS = [(group, option) for group, options in options.groups().items() for option in options]
SUPERVISED = ["experiment=supervised_glyphs"]
SUITABLE = {
    ("model", "mlp"): ["dataset=sinusoid"],
    ("dataset", "sinusoid"): ["model=mlp"],
    ("dataset", "prior"): ["model=mlp", "dataset.prior=tests.own_prior", "plugins=[tests]"],
    ("dataset", "gp_prior"): ["model=mlp"],
    ("dataset", "sine_prior"): ["model=mlp"],
    ("dataset", "table_prior"): ["model=mlp"],
    ("model", "table"): ["algorithm=pfn"],
    ("algorithm", "pfn"): ["model=table"],
    ("algorithm", "deepbdc"): ["algorithm.channels=16"],  # of four pixels each, of the 64 features of a glyph
    ("dataset", "chains"): ["model=decoder", "algorithm=reading"],
    ("dataset", "texts"): ["model=decoder", "algorithm=reading", "trainer.val_tasks=4", "trainer.test_tasks=4"],
    ("algorithm", "reading"): ["model=decoder", "dataset=chains"],
    ("algorithm", "reweight"): ["model=mlp", "dataset=noisy_digits"],
    ("dataset", "noisy_digits"): ["model=mlp", "algorithm=reweight"],
    ("experiment", "pfn_own"): ["dataset.prior=tests.own_prior", "plugins=[tests]"],
    ("dataset", "table"): ["model=mlp", "dataset.file=t.csv", "dataset.task=who", "dataset.target=effect"],
    ("dataset", "several"): ["dataset.sets=[omniglot,glyphs]"],
    ("metric", "mse"): ["model=mlp", "dataset=sinusoid"],
    ("metric", "mae"): ["model=mlp", "dataset=sinusoid"],
    ("metric", "f1"): ["loss=binary"],
    ("metric", "exact_match"): ["loss=binary"],
    ("algorithm", "supervised"): SUPERVISED,
    ("dataset", "omniglot_characters"): SUPERVISED,
    ("dataset", "glyph_characters"): SUPERVISED,
    ("dataset", "mnist"): ["experiment=supervised_omniglot"],
    ("dataset", "fashion_mnist"): ["experiment=supervised_omniglot"],
    ("dataset", "cifar10"): ["experiment=supervised_omniglot"],
    ("strategy", "split"): SUPERVISED,
    ("experiment", "own_pictures"): ["model.weights=null", "model.frozen=false"],  # or the weights are downloaded
    ("partitioner", "function"): ["partitioner.name=tests.own_functions.deal_backwards"],
    ("reducer", "function"): ["reducer.name=tests.own_functions.mean"],
}


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    """Clears Hydra's global state before a test; after it, the environment and the log that `train` has set up."""
    GlobalHydra.instance().clear()
    before = dict(os.environ)
    os.environ |= {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}  # for launch=sagemaker
    yield
    os.environ.clear()
    os.environ.update(before)
    for package in ("metalearn", "distributed"):
        logging.getLogger(package).handlers.clear()


@pytest.fixture(scope="module")
def explained() -> str:
    return help_text()


EXPERIMENTS = [pair for pair in OPTIONS if pair[0] == "experiment"]
FEW = {*EXPERIMENTS[::4], *(pair for pair in OPTIONS if pair[0] != "experiment")}
"""Every fourth experiment: they choose among the other options. Those are all in the default set."""


@pytest.mark.parametrize(
    ("group", "option"),
    [pytest.param(*pair, marks=() if pair in FEW else slow, id="=".join(pair)) for pair in OPTIONS],
)
def test_every_yaml_composes_and_builds_and_is_explained_by_help(
    group: str, option: str, explained: str, request: pytest.FixtureRequest
) -> None:
    if option in ("mlflow", "wandb", "ray") and importlib.util.find_spec(option) is None:
        pytest.skip(f"the package {option} is not installed; test_loggers.py and test_ray.py have the message")
    overrides = [*SUITABLE.get((group, option), []), f"{group}={option}"]
    composed = configs.compose_config(overrides)
    check.check_top_level(composed.config)
    try:
        parts = assemble(Job(*composed, PROGRAM, overrides, 1))
    except DataError:  # a baseline counts the pictures that it trains on
        request.getfixturevalue("omniglot_root")
        raise
    assert parts.settings.steps == composed.config.trainer.steps
    assert f"\n    {option} " in explained
    if group not in ("experiment", "sweep"):  # which change keys of the other groups
        for key in composed.config[group]:
            named = f"  {group}.{key}=" in explained or f"  {group}.{key}." in explained
            assert key == "_target_" or named, key


def test_hydra_lists_the_options_of_tables_as_those_of_folders() -> None:
    with initialize_config_dir(str(options.CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        listed = {group: loader.get_group_options(group, config_name="config") for group in options.groups()}
    assert listed == options.groups() and {"maml_omniglot", "maml_glyphs"} <= {*listed["experiment"]}


@pytest.mark.parametrize(("targets", "rate"), [("classes", 1.0), ("numbers", 0.01)])
def test_the_inner_rate_follows_what_a_table_asks_for(targets: str, rate: float) -> None:
    of_rows = [
        "dataset=table",
        "dataset.file=a.csv",
        "dataset.task=t",
        "dataset.target=y",
        f"dataset.targets={targets}",
    ]
    assert (
        configs.compose_config([*of_rows, f"dataset.targets={targets}", "model=mlp"]).config.algorithm.inner_lr == rate
    )


@pytest.mark.parametrize("path", sorted(options.CONF.glob("[!c]*.yaml")), ids=lambda path: path.name)
def test_a_table_is_a_yaml_of_yamls(path: Path) -> None:
    table = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(table, dict) and table
    group = path.name.partition(".")[0]
    assert table == {option: OmegaConf.to_container(options.keys_in(group, str(option))) for option in table}


def test_the_keys_of_no_group_are_explained_by_help(explained: str) -> None:
    for key in ("seed", "run", "workers", "device", "threads", "precision", "resume", "init_from", "checkpoint.every"):
        assert f"  {key}=" in explained


WRONG_NAMES = [
    ("trainer.stepps=3", "trainer.steps"),
    ("+trainer.stepps=3", "trainer.steps"),
    ("logger=[wandb,tensorbord]", "logger=tensorbord: there is no such choice; did you mean tensorboard?"),
    ("model=[conv4,mlp]", "model=[conv4,mlp]: takes one choice; type model=NAME"),
    ("++algorithm.inner_lrr=0.1", "algorithm.inner_lr"),
    ("inner_lr=0.1", "algorithm.inner_lr"),
    ("sed=1", "seed"),
    ("algorithm=mamll", "maml"),
    ("experiment=maml_omniglt", "maml_omniglot"),
    ("partitioner=bath", "batch"),
    ("trainer.steps=[1", "trainer.steps"),
    ("seed=${nowhere}", "nowhere"),
    ("experiment=maml_sinusoid run=other", "algorithm.inner_lr: 0.5 → 0.01"),
]


def test_what_is_wrong_is_reported_before_torch(tmp_path: Path) -> None:
    other = tmp_path / "outputs/maml_sinusoid/other"
    for folder in (".hydra", "checkpoints/last"):
        (other / folder).mkdir(parents=True)
    (other / "checkpoints/last/meta.json").write_text('{"config": {"algorithm": {"inner_lr": 0.5}}}')
    before = sorted(tmp_path.rglob("*"))
    program = """
import contextlib, io, json, sys
from metalearn.cli import train

said = []
for override in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as text:
        code = train.main(override.split())
    said.append([code, text.getvalue()])
assert "torch" not in sys.modules
print(json.dumps(said))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *(override for override, _ in WRONG_NAMES)],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for (override, named), (code, said) in zip(WRONG_NAMES, json.loads(done.stdout), strict=True):
        assert code == 2 and named in said, (override, said)
    assert sorted(tmp_path.rglob("*")) == before


WRONG_VALUES = [
    ("dataset.shots=0", "dataset.shots="),
    ("dataset.ways=101", "the split 'val' has 100 classes"),
    ("experiment=maml_omniglot dataset.ways=424", "the split 'val' has 100 classes"),
    ("experiment=maml_omniglot dataset.split=papers", "paper, lake, vinyals"),
    ("dataset=mini_imagenet dataset.root=nowhere", "dataset.root="),
    ("algorithm=reptile algorithm.meta_batch=7", "algorithm.meta_batch="),
    ("dataset=image_folder dataset.split=[0.5,0.5]", "type dataset.split=[0.64"),
    ("dataset=image_folder dataset.root=nowhere", "dataset.root="),
    ("dataset.ways=five", "dataset.ways="),
    ("trainer.steps=-1", "type trainer.steps=1"),
    ("algorithm.checkpoint_steps=often", "true, false or nested"),
    ("trainer.steps=1.5", "trainer.steps="),
    ("algorithm.inner_lr=-0.1", "algorithm.inner_lr="),
    ("algorithm.inner_lr=nan", "algorithm.inner_lr="),
    ("algorithm.first_order=maybe", "algorithm.first_order="),
    ("optimizer.lr=0", "optimizer.lr="),
    ("optimizer.schedule=stepwise", "type optimizer.schedule=constant"),
    ("algorithm=protonet inner=adam", "inner: metalearn.algorithms.protonet.protonet has no use for"),
    ("inner=adm", "did you mean adam"),
    ("dataset.train_ways=20", "type dataset.train_ways=null"),
    ("algorithm=reptile strategy=rpc_autograd", "no loss that a graph leads to; type strategy=rpc"),
    ("algorithm=anil model=torchvision model.name=squeezenet1_0", "come from one linear layer (nn.Linear)"),
    ("experiment=maml_sinusoid algorithm=protonet", "experiment=maml_sinusoid sets it"),
    ("algorithm=protonet model=mlp dataset=sinusoid", "targets are real numbers; type algorithm=maml"),
    ("algorithm=finetune strategy=split workers=2", "algorithm=supervised and model=conv4"),
    ("algorithm=finetune dataset=glyphs algorithm.ways=4", "type model.ways=5"),
    ("algorithm=finetune dataset=sinusoid model=mlp", "type another"),
    ("algorithm=finetune dataset.train_ways=7", "have no training tasks; type dataset.train_ways=null"),
    ("model.downsample=none", "stride, pool"),
    ("strategy.timeout=0", "strategy.timeout="),
    ("strategy=local workers=2", "strategy=rpc"),
    ("strategy=rpc partitioner=dim partitioner.dim=1", "partitioner.dim="),
    ("strategy=ddp workers=2 partitioner=exclusive", "type partitioner=batch"),
    ("strategy=ddp workers=2 reducer=stack", "type reducer=mean"),
    ("strategy=ddp strategy.overlap=2", "strategy.overlap="),
    ("strategy=split workers=2", "algorithm=supervised and model=conv4"),
    ("experiment=split_omniglot workers=6", "5 stages (block1, block2, block3, block4, head)"),
    ("experiment=split_omniglot workers=2 strategy.cuts=[block9]", "there is no stage 'block9'"),
    ("experiment=split_omniglot workers=2 strategy.cuts=[block2,head]", "make 3 shards for 2 workers"),
    ("experiment=split_omniglot workers=2 strategy.micro_batches=9", "strategy.micro_batches="),
    ("experiment=supervised_glyphs trainer.test_tasks=2001", "has 2000 samples; type trainer.test_tasks=2000"),
    ("dataset=glyph_characters", "it gives plain samples, and this algorithm learns from tasks"),
    ("algorithm=supervised", "type dataset=glyph_characters"),
    ("experiment=maml_omniglot algorithm=supervised", "experiment=maml_omniglot sets it"),
    (
        "experiment=supervised_glyphs model=torchvision trainer.meta_batch_size=9 trainer.task_chunk=4",
        "type a trainer.task_chunk that leaves none over",
    ),
    (
        "algorithm=finetune dataset=glyphs dataset.image_size=16 trainer.meta_batch_size=1",
        "or a larger trainer.meta_batch_size",
    ),
    (
        "algorithm=supervised dataset=glyph_characters dataset.ways=8 model.ways=8 dataset.known=8 "
        "dataset.image_size=16 trainer.meta_batch_size=4 trainer.val_tasks=4 trainer.test_tasks=5",
        "(or other val_tasks and test_tasks)",
    ),
    ("algorithm=supervised dataset=omniglot", "type dataset=omniglot_characters"),
    ("workers=0", "workers="),
    ("workers=3 launch.nnodes=2", "multiple of launch.nnodes=2"),
    ("workers=2 launch.nnodes=2", "launch.interface"),
    ("seed=-1", "seed="),
    ("seed=99999999999999999999", "seed="),
    ("launch.master_port=70000", "at most 65535"),
    ("launch.isolate=maybe", "launch.isolate="),
    ("launch.isolate='true'", "launch.isolate="),
    ("device=tpu", "auto, cpu, cuda"),
    ("precision=float16", "float32, float64, tf32, bf16"),
    ("precision=tf32 device=cpu", "type precision=float32"),
    ("model=module model.network._target_=no.such.Net", "model.network._target_="),
    ("model=module +model.network.width=3", "torchvision.models.resnet18: refuses its arguments"),
    ("model=module +model.netwrk.width=3", "did you mean model.network"),
    ("resume=nowhere", "resume="),
    ("resume=null", "resume="),
    ("init_from=nowhere", "init_from="),
    ("checkpoint=5", "type checkpoint.KEY=VALUE"),
    ("model=mlp dataset=sinusoid model.hidden=40", "type model.hidden=[40"),
    ("dataset.image_size=big", "dataset.image_size="),
    ("model=mlp", "cannot take this dataset's inputs of shape (1, 28, 28)"),
    ("model.ways=3", "type model.ways=5"),
    ("model.channels=3", "cannot take this dataset's inputs"),
    ("dataset=sinusoid", "do not fit together"),
    ("algorithm=protonet dataset=sinusoid", "which model=conv4 (model.ways=${dataset.ways}) needs"),
    ("algorithm=finetune dataset=sinusoid", "type another algorithm, such as algorithm=anil, and another model"),
    ("model.ways=${dataset.wayz}", "did you mean dataset.ways?"),
    ("dataset.shots=${.nowhere}", "'nowhere' not found; type ${KEY} with a key that exists"),
    ("seed=1,2", "--multirun"),
    ("--multirun seed=1,2 dataset.shots=0", "type dataset.shots=1"),
    ("--multirun experiment=glob(maml*)", "must list its values"),
    ("--multirun seed=interval(0,1)", "must list its values"),
    ("--multirun algorithm=maml,mamll", "did you mean maml"),
    ("resume=.", "resume="),
    ("init_from=.", "init_from="),
    ("run=a/b", "run="),
    ("run=null", "run="),
    ("launch.outputs=", "launch.outputs="),
    ("trainer.steps=1e3", "type trainer.steps=1000"),
    ("optimizer.weight_decay=1e-4", "there is no such key; type optimizer=adamw optimizer.weight_decay=0.01"),
    ("algorithm=protonet algorithm.inner_lr=0.1", "inner_lr: this algorithm has no such key; anil, baseline_pp, boil"),
    ("experiment=maml_sinusoid dataset.ways=5", "dataset.ways: this dataset has no such key; cifar10"),
    ("dataset=sinusoid", "type another model, such as model=mlp"),
    ("model=module model.network._target_=my.Net model.network.width=8", "type +model.network.width=VALUE"),
    ("optimizer.max_norm=1", "optimizer.max_norm: there is no such key; type optimizer.clip_norm=10.0"),
    ("trainer.early_stopping=3", "trainer.early_stopping: there is no such key; type trainer.patience=5"),
    ("trainer.patience=20", "trainer.patience="),
    ("optimizer.clip_norm=0", "optimizer.clip_norm="),
    ("optimizer.decay=0.1", "optimizer.decay="),
    ("logger.project=mine", "logger.project="),
    ("logger=mlflow logger.wandb_mode=online", "type logger.wandb=true, or leave"),
    ("init_strict=true", "init_strict="),
    ("model=torchvision model.input_size=64", "type model.weights=PATH, or"),
    ("--experimental-rerun=config.pickle", "--experimental-rerun="),
    ("dataset.ways=a=b", "cannot be read: "),
    ("dataset.ways=it's", "type 'dataset.ways='\"'\"'it\\'\"'\"'s'\"'\"''"),
    ("model._target_=os.system", "metalearn."),
    ("model._target_=metalearn.models.conv4.nothing", "metalearn.models.conv4.nothing"),
    ("~optimizer.lr", "optimizer.lr"),
]
"""What is typed, and a part of the message: the key, or what to type in its place."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("overrides", "named"),
    [pytest.param(*pair, marks=slow if at % 3 else (), id=pair[0]) for at, pair in enumerate(WRONG_VALUES)],
)
def test_impossible_values_are_reported_before_anything_is_made(
    overrides: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train.main(overrides.split(" ")) == 2
    message = capsys.readouterr().err
    assert named in message, message
    assert message.count("error:") == 1
    assert list(tmp_path.iterdir()) == []


def test_workers_that_contradict_torchrun_print_both_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError) as caught:
        check.world_size(configs.compose_config(["workers=4"]).config, "train.py workers=4")
    assert "torchrun --nproc_per_node=4 train.py" in str(caught.value)
    assert "python train.py workers=4" in str(caught.value)
    assert check.world_size(configs.compose_config(["workers=2"]).config, "") == 2


@slow
def test_a_wrong_value_under_torchrun_is_reported_once(start: Start, tmp_path: Path) -> None:
    outcome = start("dataset.shots=0", torchrun=2).wait()
    assert outcome.code != 0
    lines = outcome.text.splitlines()  # those of torchrun's report, which names it as the cause, begin with blanks
    assert sum(line.startswith("error: dataset.shots=0") for line in lines) == 1
    assert not (tmp_path / "outputs").exists()


def test_the_jobs_of_a_grid_keep_the_signs_of_its_keys() -> None:
    """And have values as Hydra hands them on."""
    assert configs.sweep_jobs(["+model.network.width=1,2", "++seed=3,4", "a=1e-2", "b=[20, 20]", "~c"]) == [
        [f"+model.network.width={width}", f"++seed={seed}", "a=0.01", "b=[20,20]", "~c"]
        for width in (1, 2)
        for seed in (3, 4)
    ]


def test_sets_are_composed_within_a_job_of_a_multirun() -> None:
    """Where Hydra is at work already: dataset=[A,B] composes the config of each."""
    with initialize_config_dir(str(options.CONF), version_base="1.3"):
        assert configs.compose_config(["dataset=[omniglot,glyphs]"]).config.dataset.sets == ["omniglot", "glyphs"]
        assert GlobalHydra.instance().is_initialized()


def test_a_multirun_under_torchrun_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main(["--multirun", "seed=1,2"], PROGRAM) == 2
    assert "python train.py --multirun workers=2 seed=1,2" in capsys.readouterr().err


def test_an_experiment_with_an_unknown_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    shutil.copytree(options.CONF, tmp_path / "conf")
    (tmp_path / "conf/experiment.mine.yaml").write_text(
        "# @package _global_\n\nmine:\n  algorithm:\n    inner_lrr: 0.1\n"
    )
    for module in (configs, options):
        monkeypatch.setattr(module, "CONF", tmp_path / "conf")
    with pytest.raises(ConfigError, match=r"algorithm\.inner_lrr.*algorithm\.inner_lr"):
        configs.compose_config(["experiment=mine"])


def test_several_hosts_need_a_named_interface(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    ranks = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (ranks | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    assert train.main([]) == 2
    assert "launch.interface=null: workers on several hosts" in capsys.readouterr().err
    assert train.main(["launch.interface=nope9"]) == 2
    assert "launch.interface=nope9: this host has no such interface; it has lo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "folder"),
    [
        ("", "maml_glyphs/seed0"),
        ("experiment=maml_glyphs trainer.steps=1 run=short", "maml_glyphs/short"),
        ("algorithm=maml dataset=glyphs model=resnet12", "maml_glyphs/seed0,model=resnet12"),
        ("dataset=image_folder", "maml-image_folder/seed0"),
        ("dataset=[omniglot,emoji]", "maml-several/seed0,dataset.sets=omniglot+emoji"),
        ("algorithm=anil seed=3", "anil-glyphs/seed3"),
        ("algorithm=protonet dataset=omniglot", "protonet-omniglot/seed0"),
        ("experiment=maml_omniglot", "maml_omniglot/seed0"),
        ("experiment=maml_omniglot algorithm=anil", "maml_omniglot/seed0,algorithm=anil"),
        # What makes no other run:
        ("workers=2 device=cpu threads=2 trainer.steps=7 strategy=rpc reducer=mean", "maml_glyphs/seed0"),
        ("resume=never pause_after=3 checkpoint.keep=1 launch.isolate=false", "maml_glyphs/seed0"),
        # A value that is typed, and the default of this experiment, or follows another key:
        ("experiment=maml_omniglot algorithm.inner_lr=2 model=conv4 dataset.seed=0", "maml_omniglot/seed0"),
        ("dataset.ways=7 model.ways=7", "maml_glyphs/seed0,dataset.ways=7"),
        ("experiment=maml_omniglot algorithm.inner_lr=1e-1 seed=2", "maml_omniglot/seed2,algorithm.inner_lr=0.1"),
        ("precision=float64 dataset.shots=[1,5]", "maml_glyphs/seed0,dataset.shots=1+5,precision=float64"),
        ("dataset.shots=[1,5] precision=float64 run=auto", "maml_glyphs/seed0,dataset.shots=1+5,precision=float64"),
        ("algorithm.inner_lr=0.3 run=mine", "maml_glyphs/mine"),
    ],
)
def test_a_run_folder_is_named_after_what_runs(overrides: str, folder: str) -> None:
    composed = configs.compose_config(overrides.split())
    assert composed.run_dir == Path("outputs") / folder
    assert composed.experiment == folder.partition("/")[0]  # what the start line and result.json say


def test_a_run_has_a_short_name_that_every_file_system_takes() -> None:
    named = "'init_from=/a b/{}/checkpoints/best'"

    def name(word: str) -> str:
        return configs.compose_config([configs.as_path(text) for text in shlex.split(named.format(word))]).config.run

    names = [name(word) for word in ("ü", "ö", "a,b=c", "x" * 300, "x" * 299 + "y")]
    assert len({*names}) == 5
    for one in names:
        assert re.fullmatch(r"seed0,init_from=[\w.,=+~-]+", one, re.ASCII) and len(one) <= 120


def test_the_jobs_of_a_multirun_are_named_by_their_folders() -> None:
    composed = configs.compose_config(["algorithm.inner_lr=0.3", "hydra.run.dir=x"])
    assert (composed.run_dir, composed.config.run) == (Path("x"), "seed0")


def test_no_experiment_has_the_folder_of_another_run() -> None:
    assert not [name for name in options.groups()["experiment"] if "-" in name]


def test_rpc_autograd_refuses_an_algorithm_without_a_loss() -> None:
    overrides = ["strategy=rpc_autograd", "workers=2"]
    composed = configs.compose_config(overrides)
    parts = assemble(Job(*composed, PROGRAM, overrides, 2))
    algorithm = parts.algorithm._replace(loss=None, outcome=None)
    work = make_work(composed.config, algorithm, parts.model, parts.source, parts.start, parts.outer)
    plan = WorkPlan(work, 2, build(composed.config, "partitioner"), parts.plan.reduce)
    with pytest.raises(ConfigError, match="has no loss that a graph leads to; type strategy=rpc"):
        build(composed.config, "strategy", plan=plan)


PATHS = (
    "a=b", "Fotos_für_Anna", "no#1", "Anna's", "set[1]", "copy (1)", "a,b=c", 'a"b', "a\\b", "$HOME", "plain/path-1.0",
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_what_the_shell_hands_over(path: str) -> None:
    for key in ("dataset.root", "init_from", "+launch.outputs"):
        (override,) = configs.parsed([configs.as_path(f"{key}=/home/{path}")])
        assert override.value() == f"/home/{path}" and override.key_or_group == key.lstrip("+")


def test_a_tilde_at_the_beginning_of_a_path_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/anna")
    assert configs.as_path("dataset.root=~/pictures") == "dataset.root=/home/anna/pictures"
    assert configs.as_path("dataset.root=a,b") == "dataset.root=a,b", "a sweep stays one"
    assert configs.as_path("dataset.ways=~/x") == "dataset.ways=~/x" and configs.as_path("--flag") == "--flag"


def test_a_list_of_paths_gets_the_quoted_form_that_works() -> None:
    """Such as folders that a multirun has made."""
    paths = ["/o/seed=0,lr=1/best", "./x y=2/last", "plain"]
    with pytest.raises(ConfigError) as caught:
        configs.parsed([f"ensemble=[{','.join(paths[:2])}]"])
    (typed,) = shlex.split(str(caught.value).rpartition("; type ")[2])
    (override,) = configs.parsed([typed])
    assert [getattr(part, "text", part) for part in override.value()] == paths[:2]


def test_flags_may_stand_between_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["seed=1", "--cfg", "job", "trainer.steps=7"]) == 0
    shown = capsys.readouterr().out
    assert "seed: 1\n" in shown and "steps: 7\n" in shown


def test_a_multirun_shows_no_config() -> None:
    with pytest.raises(ConfigError, match="--cfg: shows one run, and --multirun asks for several"):
        train.run_command(["--multirun", "seed=0,1", "--cfg", "job"], script(ROOT / "train.py"))


def test_real_numbers_have_a_smaller_inner_rate_by_default() -> None:
    rate = {
        dataset: configs.compose_config([f"dataset={dataset}", f"model={model}", "algorithm=maml"]).config.algorithm
        for dataset, model in (("glyphs", "conv4"), ("sinusoid", "mlp"))
    }
    assert (rate["glyphs"].inner_lr, rate["sinusoid"].inner_lr) == (1.0, 0.01)
