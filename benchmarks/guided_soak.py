"""Guided decoding under load: image streams and text streams with strict JSON schemas, on the scenario guided_vlm.

Every stream sends one request after another. The vision tower waits for the device with the GIL held
at every call, which is the worst that an encoder can do. A watchdog process counts hangs.

    python benchmarks/guided_soak.py --duration 180          # on a GPU: 32 image and 16 text streams
    python benchmarks/guided_soak.py --cost                  # text only, with and without the transform
    python benchmarks/guided_soak.py --duration 5 --device cpu --image-streams 4 --text-streams 2
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.guided import GrammarSpec, GuidedEngine, GuidedOutput, GuidedRequest, Vocabulary
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.hostfuncs import OrderedLayer, ThreadStreams

EOS, IMAGE, PATCH = 256, 257, 8

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "kind": {"enum": ["cat", "dog", "bird"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
        },
        "required": ["name", "kind", "age"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "labels": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
            "sure": {"type": "boolean"},
        },
        "required": ["labels", "sure"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "box": {
                "type": "object",
                "properties": {
                    "x": {"type": "integer", "minimum": 0, "maximum": 999},
                    "y": {"type": "integer", "minimum": -9, "maximum": 9},
                },
                "required": ["x", "y"],
                "additionalProperties": False,
            },
            "note": {"type": "string", "maxLength": 5},
        },
        "required": ["box", "note"],
        "additionalProperties": False,
    },
]


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is what a schema of the kinds above describes."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "object":
        properties = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(properties)
            and all(is_valid(value[name], properties[name]) for name in value)
        )
    if kind == "array":
        fits = isinstance(value, list) and len(value) <= schema["maxItems"]
        return fits and all(is_valid(item, schema["items"]) for item in value)
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "boolean":
        return type(value) is bool
    return isinstance(value, str) and len(value) <= schema["maxLength"]


def is_valid_text(outcome: GuidedOutput, schema: dict[str, Any], vocabulary: Vocabulary) -> bool:
    """Whether a complete text is strict UTF-8, parses, and is what its schema describes."""
    text = b"".join(vocabulary.tokens[token] for token in outcome.output.tokens)
    try:
        return is_valid(json.loads(text.decode("utf-8")), schema)
    except ValueError:
        return False


# ---------------------------------------------------------------- the engine under load


def build(device: str, streams: int, transform: bool) -> Pipeline:
    """The scenario for that many streams, with or without drain_hostfuncs."""
    return build_pipeline(
        load_config(
            "guided_vlm",
            overrides={
                "device": device,
                "max_batch_size": streams,
                "max_num_tokens": max(256, 64 * streams),
                "transforms.drain_hostfuncs.enabled": transform,
            },
        )
    )


def make_engine(pipeline: Pipeline, layer: str, **options: Any) -> GuidedEngine:
    """An engine on the pipeline's device."""
    layers = {"cuda": lambda: None, "ordered": OrderedLayer, "threads": ThreadStreams}
    vocabulary = Vocabulary.of_bytes(258, EOS)
    return GuidedEngine(
        pipeline.model,
        pipeline.cm,
        vocabulary,
        layer=layers[layer](),
        image_token_id=IMAGE,
        images_per_step=4,
        **options,
    )


def hold_gil_in_tower(pipeline: Pipeline) -> None:
    """Let every call of the vision tower wait for the device with the GIL held."""
    from auto_deploy_ext.hostfuncs.cuda import _cudart_path

    library = ctypes.PyDLL(_cudart_path())

    def wait(module: torch.nn.Module, args: Any) -> None:
        library.cudaDeviceSynchronize()

    pipeline.model.vision_encoder.tower.register_forward_pre_hook(wait)


class Streams:
    """Clients that each send their next request some time after the last one is done.

    They send in waves, when a quarter of them is idle, so that captured decode steps lie between the prefills.
    """

    def __init__(self, engine: GuidedEngine, image_streams: int, text_streams: int, seed: int = 0) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.images = [self._image() for _ in range(256)]
        self.has_image = [True] * image_streams + [False] * text_streams
        self.idle: list[int] = []
        self.running: dict[int, tuple[int, dict[str, Any]]] = {}
        self.counts = {"stop": 0, "length": 0, "cancelled": 0, "invalid": 0, "tokens": 0}
        for stream in range(len(self.has_image)):
            self.send(stream)

    def _image(self) -> torch.Tensor:
        height, width = (PATCH * self.random.randint(1, 4) for _ in range(2))
        return torch.randn(3, height, width, generator=self.generator)

    def send(self, stream: int) -> None:
        """Submit a stream's next request."""
        schema = self.random.choice(SCHEMAS)
        prompt = list(f"stream {stream} {self.random.randint(0, 99)}".encode())
        images = (
            [self.random.choice(self.images) for _ in range(self.random.randint(1, 2))]
            if self.has_image[stream]
            else []
        )
        for image in images:
            prompt += [IMAGE] * (image.shape[1] * image.shape[2] // PATCH**2)
        request = GuidedRequest(tuple(prompt), 160, grammar=GrammarSpec.json_schema(schema), images=tuple(images))
        self.running[self.engine.submit(request)] = (stream, schema)

    def step(self) -> None:
        """One forward; streams that are done send again, a few requests are cancelled."""
        self.counts["tokens"] += self.engine.step()
        if self.random.random() < 0.005:
            self.engine.cancel(self.random.choice(list(self.running)))
        assert self.engine.vocabulary is not None
        for request_id, (stream, schema) in list(self.running.items()):
            outcome = self.engine.outcome(request_id)
            if outcome is None:
                continue
            del self.running[request_id]
            self.counts[outcome.finish_reason] += 1
            if outcome.finish_reason == "stop" and not is_valid_text(outcome, schema, self.engine.vocabulary):
                self.counts["invalid"] += 1
                print(f"invalid: {outcome.text!r}", file=sys.stderr, flush=True)
            self.idle.append(stream)
        if 4 * len(self.idle) >= len(self.has_image):
            for stream in self.idle:
                self.send(stream)
            self.idle.clear()


def child(arguments: argparse.Namespace) -> None:
    """Run the load for the duration; a line of JSON per second, the summary last."""
    streams = arguments.image_streams + arguments.text_streams
    pipeline = build(arguments.device, streams, not arguments.without_transform)
    if arguments.device.startswith("cuda"):
        hold_gil_in_tower(pipeline)
    engine = make_engine(pipeline, arguments.layer, encode=arguments.encode)
    load = Streams(engine, arguments.image_streams, arguments.text_streams)
    print(json.dumps({"ready": True}), flush=True)
    start = last = time.monotonic()
    while (now := time.monotonic()) - start < arguments.duration:
        load.step()
        if now - last >= 1:
            last = now
            print(json.dumps({"steps": engine.steps, **load.counts}), flush=True)
    engine.owner.drain()
    seconds = time.monotonic() - start
    summary = {
        "seconds": seconds,
        "steps": engine.steps,
        **load.counts,
        "tokens_per_second": load.counts["tokens"] / seconds,
        "forwards": vars(engine.stats),
        "hostfuncs": vars(engine.owner.stats),
        "images": vars(engine.images.stats) if engine.images is not None else {},
        "drain_share": engine.owner.stats.drained_seconds / seconds,
    }
    print(json.dumps({"summary": summary}), flush=True)


def soak(arguments: argparse.Namespace) -> int:
    """Watch a child that runs the load; 0 without a hang and without an invalid text."""
    command = [sys.executable, __file__, "--child", *sys.argv[1:]]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
        reader.start()
        seen, last = 0, time.monotonic()
        while process.poll() is None:
            time.sleep(0.1)
            if len(lines) != seen:
                seen, last = len(lines), time.monotonic()
            if time.monotonic() - last > (arguments.bound if seen else 300):
                process.kill()
                break
        code = process.wait()
        reader.join(5)
    last_line = json.loads(lines[-1]) if lines else {}
    summary = last_line.get("summary")
    hangs = int(summary is None and code != 1)
    result = {"hangs": hangs, "summary": summary, "last": None if summary else last_line, "exit_code": code}
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if summary is not None and summary["invalid"] == 0 else 1


# ---------------------------------------------------------------- cost


def run_text_only(engine: GuidedEngine, streams: int, tokens: int, grammar: bool) -> float:
    """Tokens per second of a fixed load without images."""
    spec = GrammarSpec.regex(f"[a-z ]{{{tokens}}}") if grammar else None
    start, total = time.perf_counter(), 0
    for number in range(streams):
        engine.submit(GuidedRequest(tuple(f"text {number}".encode()), tokens, grammar=spec))
    while engine.has_work:
        total += engine.step()
    return total / (time.perf_counter() - start)


def cost(arguments: argparse.Namespace) -> int:
    """Text-only throughput with and without the transform, interleaved, all graphs captured beforehand."""
    streams, tokens = arguments.text_streams, arguments.cost_tokens
    pipelines = {name: build(arguments.device, streams, name == "with") for name in ("with", "without")}
    result: dict[str, Any] = {}
    for kind, grammar, graphs in (("guided, graphs", True, True), ("unguided, eager", False, False)):
        engines = {name: make_engine(pipeline, arguments.layer, graphs=graphs) for name, pipeline in pipelines.items()}
        speeds: dict[str, list[float]] = {"with": [], "without": []}
        for turn in range(-2, arguments.rounds):
            for name in ("with", "without") if turn % 2 else ("without", "with"):
                speed = run_text_only(engines[name], streams, tokens, grammar)
                if turn >= 0:  # the two before warm up and capture
                    speeds[name].append(speed)
        stats = engines["with"].owner.stats
        result[kind] = {
            "tokens per second": {name: statistics.median(values) for name, values in speeds.items()},
            "with/without, median of pairs": statistics.median(
                a / b for a, b in zip(speeds["with"], speeds["without"], strict=True)
            ),
            "with/without, best": max(speeds["with"]) / max(speeds["without"]),
            "host functions launched eagerly": stats.launches,
            "host functions run": stats.runs,
            "time in drains, seconds": stats.drained_seconds,
        }
        for engine in engines.values():
            engine.runner.release()
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def main() -> int:
    """Run the soak or the cost comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=180, help="seconds (default: %(default)s)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layer", choices=["cuda", "ordered", "threads"], help="default: cuda, or ordered on the CPU")
    parser.add_argument("--image-streams", type=int, default=32)
    parser.add_argument("--text-streams", type=int, default=16)
    parser.add_argument("--encode", choices=["schedule", "forward"], default="schedule")
    parser.add_argument("--bound", type=float, default=30, help="seconds without progress that count as a hang")
    parser.add_argument("--without-transform", action="store_true", help="leave drain_hostfuncs out: hangs on a GPU")
    parser.add_argument("--cost", action="store_true", help="compare text-only throughput instead")
    parser.add_argument("--rounds", type=int, default=7, help="of the cost comparison (default: %(default)s)")
    parser.add_argument("--cost-tokens", type=int, default=200, help="per request (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the result as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.layer = arguments.layer or ("cuda" if arguments.device.startswith("cuda") else "ordered")
    if arguments.child:
        child(arguments)
        return 0
    return cost(arguments) if arguments.cost else soak(arguments)


if __name__ == "__main__":
    sys.exit(main())
