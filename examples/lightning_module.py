"""Any of our algorithms as a LightningModule: python examples/lightning_module.py DEVICES [OVERRIDE of train.py …]"""

import sys

import lightning
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from distributed.reduce import tree_sum
from metalearn.app.job import installed, to_job
from metalearn.app.parts import assemble
from metalearn.app.process import set_up_torch
from metalearn.config.compose import compose_config
from metalearn.runs.metrics import main_metric, summary
from metalearn.training.chunks import chunk_functions
from metalearn.training.settings import tasks_in_chunks
from metalearn.training.trainer import TrainState


class MetaLearner(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, overrides: list[str]) -> None:
        super().__init__()
        self.automatic_optimization = False
        job = to_job(*compose_config(overrides), installed(), overrides)._replace(workers=1)
        set_up_torch(job.config)
        self.parts = parts = assemble(job)
        if parts.settings.ema_decay is not None:
            sys.exit("trainer.ema_decay: this example keeps no average; type trainer.ema_decay=null")
        self.weights = nn.ParameterList(parts.start.values())
        self.compute = chunk_functions(parts.algorithm, parts.source, parts.device, self.weights[0].dtype, tree_sum)

    def params(self) -> dict[str, Tensor]:
        return dict(zip(self.parts.start, self.weights, strict=True))

    def configure_optimizers(self) -> None:
        self.outer = self.parts.outer.start(self.params())

    def training_step(self, chunks: list[Tensor], done: int) -> None:
        devices, rate = self.trainer.world_size, self.parts.outer.rate(done + 1, self.parts.settings.steps)
        fixed = {name: value.detach() for name, value in self.params().items()}
        sums = [self.compute.map(fixed, tasks, done + 1).grads for tasks in chunks[self.global_rank :: devices]]
        grads = [{n: g.reshape(devices, *fixed[n].shape) for n, g in part.items()} for part in self.all_gather(sums)]
        in_order = [{n: g[device] for n, g in part.items()} for part in grads for device in range(devices)]
        gradient = self.parts.plan.reduce(in_order, [len(tasks) for tasks in chunks])
        TrainState(self.params(), self.outer).update(gradient, rate)

    def validation_step(self, tasks: Tensor) -> None:
        values = self.compute.evaluate(self.params(), "val", tasks)
        self.log("val_" + (name := main_metric(values)), summary(values)[name], batch_size=len(tasks), sync_dist=True)


if __name__ == "__main__":
    devices, learner = int(sys.argv[1]), MetaLearner(sys.argv[2:])
    loop, chunk, val_chunk = learner.parts.settings, learner.parts.training_chunk(), learner.parts.evaluation_chunk()
    train = [tasks_in_chunks(s * loop.meta_batch_size, loop.meta_batch_size, chunk) for s in range(loop.steps)]
    val = tasks_in_chunks(0, loop.val_tasks, val_chunk, "val")
    if len(train[0]) % devices:
        sys.exit(f"trainer.task_chunk={chunk}: {devices} devices cannot share {len(train[0])} chunks a step evenly")
    plan = {"max_epochs": 1, "devices": devices, "use_distributed_sampler": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(**plan, strategy="ddp" if devices > 1 else "auto", logger=False)
    trainer.fit(learner, *(DataLoader(data, batch_size=None) for data in (train, val)))  # type: ignore[arg-type]
    if trainer.is_global_zero:
        save_file({name: value.detach().cpu() for name, value in learner.params().items()}, "params.safetensors")
