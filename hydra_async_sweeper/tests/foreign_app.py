"""A Hydra app that knows nothing of the sweeper: a valley with two ways down."""

from dataclasses import dataclass

import hydra
from hydra.core.config_store import ConfigStore


@dataclass
class Valley:
    """Its lowest point is at x = 2, y = 0.1, to the left."""

    x: float = 0.0
    y: float = 1.0
    side: str = "left"


ConfigStore.instance().store(name="valley", node=Valley)


@hydra.main(version_base="1.3", config_path=None, config_name="valley")
def main(config: Valley) -> float:
    print(f"side={config.side}")
    return (config.x - 2) ** 2 + (config.y - 0.1) ** 2 + (config.side != "left")


if __name__ == "__main__":
    main()
