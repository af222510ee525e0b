"""Hydra's way to the options in tables: a config source, as Hydra has one for files and one for packages.

`hydra.searchpath` in `conf/config.yaml` names it. ConfigStore would do the same, but it wants all options parsed at the
start of every process (0.2 s); a source parses those that are chosen.
"""

from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from metalearn.config import options

SOURCE = "tables://conf"


class TableSource(ConfigSource):
    """The options in the tables of `conf/`, each as if it had a yaml in the folder of its group."""

    @staticmethod
    def scheme() -> str:
        return "tables"

    def available(self) -> bool:
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        if not self.is_config(config_path):
            raise ConfigLoadError(f"Config not found : {config_path}")
        text = options.text_of(group, name)
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(text), self._get_header_dict(text))

    def is_group(self, config_path: str) -> bool:
        return config_path.rstrip("/") in {"", *options.tables(options.CONF)}

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        return name in options.tables(options.CONF).get(group, {})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        tables = options.tables(options.CONF)
        if config_path.strip("/"):
            return [] if results_filter is ObjectType.GROUP else sorted(tables.get(config_path.strip("/"), {}))
        return [] if results_filter is ObjectType.CONFIG else sorted(tables)


Plugins.instance().register(TableSource)
