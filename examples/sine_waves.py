"""MAML learns to learn sine waves: python examples/sine_waves.py [STEPS]"""

import sys

import numpy as np

import metalearn


def main(steps: int = 2000) -> None:
    """Trains, then adapts to one wave that the training has not seen."""
    learned = metalearn.train(
        metalearn.named("maml", inner_lr=0.01, inner_steps=1, eval_steps=10),
        "mlp",
        metalearn.named("sinusoid", shots=10),
        steps=steps,
        meta_batch_size=25,
    )
    by_step = learned.evaluate(count=200)["by_step"]
    print(f"mean squared error: {by_step['0']:.3f} before the inner steps, {by_step['10']:.3f} after ten")

    x = np.linspace(-5, 5, 10)
    wave = learned.adapt(x[:, None], 2 * np.sin(x - 1))
    for at in (-3.0, 0.0, 3.0):
        print(f"2 sin({at:g} - 1) = {2 * np.sin(at - 1):6.3f}, predicted {wave.predict([[at]])[0]:6.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
