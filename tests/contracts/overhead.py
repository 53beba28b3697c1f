"""What chai's loop costs beyond the library's own: `python -m tests.contracts.overhead`, A B A B in one process."""

from __future__ import annotations

import statistics
import sys
import time

import torch

from chai_cli.backbones.base import Placement, find_record, load, resolve
from chai_cli.denoise import denoise
from chai_cli.prompts import Settings
from chai_cli.reuse.dense import Dense


def ratio(model: str, rounds: int, steps: int) -> float:
    """Median time of chai's loop over the median time of the pipeline's, text encoding included in both."""
    backbone = load(find_record(model), Placement(device="cpu"))
    pipe = backbone.pipe  # type: ignore[attr-defined]
    look = resolve(backbone.record, Settings(num_inference_steps=steps), "unipc")
    pipe.scheduler = backbone.schedule(look)
    prompt = "a large red ball bounces on a snowy field"

    def own() -> None:
        denoise(backbone, Dense(), look, backbone.encode(prompt, look))

    def library() -> None:
        pipe(
            prompt,
            height=look.height,
            width=look.width,
            num_frames=look.num_frames,
            num_inference_steps=steps,
            guidance_scale=look.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(look.seed),
            max_sequence_length=backbone.record.max_sequence_length,
            output_type="latent",
        )

    times: dict[str, list[float]] = {"own": [], "library": []}
    own()
    library()
    for _ in range(rounds):
        for name, run in (("own", own), ("library", library)):
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{model}: {steps} steps, {rounds} rounds, CPU seconds {medians}, ratio {medians['own'] / medians['library']:.4f}")
    return medians["own"] / medians["library"]


if __name__ == "__main__":
    ratio(sys.argv[1] if len(sys.argv) > 1 else "embedded", rounds=15, steps=10)
