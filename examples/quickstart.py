"""A trained pitch detector (the ONNX file of the package swift-f0) as a JAX function: run, compile, differentiate."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime

import transmuter

RATE = 16_000  # Hz, what the model was trained at


def tone(frequency: jax.Array | float, seconds: float = 1.0) -> jax.Array:
    """A note with three overtones: float32 [1, samples] in -1..1."""
    t = jnp.arange(int(RATE * seconds)) / RATE
    return sum(jnp.sin(2 * jnp.pi * frequency * k * t) / k for k in (1, 2, 3))[None] / 2


def milliseconds(call: Callable[[], object], repeats: int = 30) -> float:
    """The median time of a call, after one that does not count."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    package = Path(importlib.util.find_spec("swift_f0").origin).parent
    model = transmuter.load(package / "model.onnx")
    print(model, "\n")

    limits = {"fmin": np.array(50, np.float32), "fmax": np.array(2000, np.float32)}  # Hz
    inputs = {"audio": np.asarray(tone(440.0)), **limits}
    start = time.perf_counter()
    compiled = transmuter.compile(model, inputs)
    print(f"compile             {time.perf_counter() - start:.2f} s, {len(compiled.segments)} segment(s)")

    outputs = compiled(inputs)
    voiced = np.asarray(outputs["confidence"]) > 0.5
    print(f"pitch of A4         {np.median(np.asarray(outputs['pitch'])[voiced]):.2f} Hz (440 were played)")

    session = onnxruntime.InferenceSession(package / "model.onnx", providers=["CPUExecutionProvider"])
    reference = dict(zip(outputs, session.run(list(outputs), inputs)))
    apart = {name: np.abs(np.asarray(outputs[name]) - expected).max() for name, expected in reference.items()}
    print("ONNX Runtime        " + ", ".join(f"{name} {error:.1e} apart at most" for name, error in apart.items()))
    print(
        f"one call            {milliseconds(lambda: compiled(inputs)):.2f} ms, "
        f"ONNX Runtime {milliseconds(lambda: session.run(None, inputs)):.2f} ms"
    )

    # The model is a JAX function like any other: differentiate the heard pitch by the played one, through both.
    @jax.jit
    @jax.value_and_grad
    def heard(frequency: jax.Array) -> jax.Array:
        pitch = model.apply(model.params, {"audio": tone(frequency), **limits})["pitch"]
        return jnp.median(pitch)

    value, slope = heard(jnp.float32(440.0))
    print(f"gradient            d heard / d played = {slope:.3f} at {value:.2f} Hz")

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((compiled(inputs, params=params)["confidence"] - 1) ** 2)

    grads = jax.grad(loss)(model.params)
    norms = {name: np.linalg.norm(np.asarray(grad)) for name, grad in grads.items()}
    print(
        f"params              {len(grads)} gradients, of norms {min(norms.values()):.2g} to {max(norms.values()):.2g}"
    )


if __name__ == "__main__":
    main()
