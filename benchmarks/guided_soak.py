"""Guided decoding under load: image streams and text streams with strict JSON schemas, on the scenario guided_vlm.

Every stream sends one request after another, nearly always with new images. The vision tower waits for the device with
the GIL held at every call, which is the worst that an encoder can do. The engine encodes ahead: items of the next step
while a step runs. A watchdog counts hangs. Three parts:

* control: without drain_hostfuncs; it hangs, and is killed `--control-bound` seconds after its last step;
* soak: with it; images are encoded inside forwards and scheduled ahead of them, in turn;
* cost: text only, with the transform, without it, and without it once more, which shows what the measurement is worth.

    python benchmarks/guided_soak.py control soak cost --json result.json   # on a GPU: at most 6 minutes
    python benchmarks/guided_soak.py --soak-seconds 30 --device cpu --image-streams 8 --text-streams 4 --batch-size 6
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from watchdog import Watched, watch_child

from auto_deploy_ext.commands.command_line import check_gpu
from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.guided import GrammarSpec, GuidedEngine, GuidedOutput, GuidedRequest, Vocabulary
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.hostfuncs import OrderedLayer, ThreadStreams
from auto_deploy_ext.hostfuncs.launch import LaunchLayer
from auto_deploy_ext.orchestrator import orchestrator_graphs

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


def build(device: str, batch_size: int, transform: bool) -> Pipeline:
    """The scenario for batches of that size, with or without drain_hostfuncs."""
    return build_pipeline(
        load_config(
            "guided_vlm",
            overrides={
                "device": device,
                "max_batch_size": batch_size,
                "max_num_tokens": max(256, 64 * batch_size),
                "transforms.drain_hostfuncs.enabled": transform,
            },
        )
    )


def make_engine(pipeline: Pipeline, layer: str, **options: Any) -> GuidedEngine:
    """An engine on the pipeline's device."""
    layers = {"cuda": lambda: None, "ordered": OrderedLayer, "threads": WaitableStreams}
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


class WaitableStreams(ThreadStreams):
    """Streams as worker threads, and a wait for all of them that keeps the GIL, as `cudaDeviceSynchronize` may."""

    def __init__(self) -> None:
        super().__init__()
        self._libc = ctypes.PyDLL(None)
        self._done = ctypes.create_string_buffer(64)
        self._libc.sem_init(self._done, 0, 0)
        self._given = 0

    def _submit(self, work: Callable[[], None]) -> None:
        if self._on_worker():
            super()._submit(work)
            return

        def then_post() -> None:
            try:
                work()
            finally:
                self._libc.sem_post(self._done)

        self._given += 1
        super()._submit(then_post)

    def wait_holding_gil(self) -> None:
        """Return at once when everything is done; else never, because what is not done needs the GIL."""
        if not self._on_worker():  # what a worker was given before is done when it comes to this
            given, self._given = self._given, 0
            for _ in range(given):
                self._libc.sem_wait(self._done)


def hold_gil_in_tower(pipeline: Pipeline, layer: LaunchLayer) -> None:
    """Let every call of the vision tower wait for the device with the GIL held."""
    if isinstance(layer, OrderedLayer):
        return
    if isinstance(layer, WaitableStreams):
        wait: Callable[[], Any] = layer.wait_holding_gil
    else:
        from auto_deploy_ext.hostfuncs.cuda import _cudart_path

        wait = ctypes.PyDLL(_cudart_path()).cudaDeviceSynchronize

    def hold(module: torch.nn.Module, args: Any) -> None:
        wait()

    pipeline.model.vision_encoder.tower.register_forward_pre_hook(hold)


class Streams:
    """Clients that each send their next request some time after the last one is done.

    They send in waves, when three quarters of them are idle: at the beginning of a wave requests wait for room, at its
    end captured decode steps lie between the prefills. Every third wave has no grammars, so that prefetch meets batches
    with nothing pending. Nearly all images are new; some requests repeat one that was seen lately beside a new one.
    """

    def __init__(self, engine: GuidedEngine, image_streams: int, text_streams: int, seed: int = 0) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.has_image = [True] * image_streams + [False] * text_streams
        self.lately: deque[torch.Tensor] = deque(maxlen=16)
        self.waves = 0
        self.idle: list[int] = list(range(len(self.has_image)))
        self.running: dict[int, tuple[int, dict[str, Any] | None, tuple[torch.Tensor, ...]]] = {}
        names = ("requests", "stop", "length", "free", "cancelled", "invalid", "images", "different_images", "tokens")
        self.counts = dict.fromkeys(names, 0)

    def _new_image(self) -> torch.Tensor:
        self.counts["different_images"] += 1
        height, width = (PATCH * self.random.randint(1, 4) for _ in range(2))
        return torch.randn(3, height, width, generator=self.generator)

    def _images(self) -> tuple[torch.Tensor, ...]:
        repeats = bool(self.lately) and self.random.random() < 0.3  # a hit, in part where there are two
        images = [self.random.choice(self.lately)] if repeats else [self._new_image()]
        images += [self._new_image() for _ in range(self.random.randint(0, 1))]
        self.random.shuffle(images)
        self.counts["images"] += len(images)
        return tuple(images)

    def send(self, stream: int, is_free: bool) -> None:
        """Submit a stream's next request."""
        schema = None if is_free else self.random.choice(SCHEMAS)
        prompt = list(f"stream {stream} {self.random.randint(0, 99)}".encode())
        images = self._images() if self.has_image[stream] else ()
        for image in images:
            prompt += [IMAGE] * (image.shape[1] * image.shape[2] // PATCH**2)
        limit = self.random.randint(30, 60) if schema is None else 160
        grammar = None if schema is None else GrammarSpec.json_schema(schema)
        self.counts["requests"] += 1
        request = GuidedRequest(tuple(prompt), limit, grammar=grammar, images=images)
        self.running[self.engine.submit(request)] = (stream, schema, images)

    def step(self) -> None:
        """One forward; streams that are done send again, a few requests are cancelled."""
        if 4 * len(self.idle) >= 3 * len(self.has_image):
            self.waves += 1
            for stream in self.idle:
                self.send(stream, is_free=self.waves % 3 == 0)
            self.idle.clear()
        self.counts["tokens"] += self.engine.step()
        if self.running and self.random.random() < 0.005:
            self.engine.cancel(self.random.choice(list(self.running)))
        assert self.engine.vocabulary is not None
        for request_id, (stream, schema, images) in list(self.running.items()):
            outcome = self.engine.outcome(request_id)
            if outcome is None:
                continue
            del self.running[request_id]
            self.idle.append(stream)
            self.lately.extend(images)
            is_free = schema is None and outcome.finish_reason != "cancelled"
            self.counts["free" if is_free else outcome.finish_reason] += 1
            if (
                schema is not None
                and outcome.finish_reason == "stop"
                and not is_valid_text(outcome, schema, self.engine.vocabulary)
            ):
                self.counts["invalid"] += 1
                print(f"invalid: {outcome.text!r}", file=sys.stderr, flush=True)


def warm_up(pipeline: Pipeline, engine: GuidedEngine) -> None:
    """Whatever is set up at the first use: libraries, a first forward, a first image. Nothing is pending afterwards."""
    engine.submit(GuidedRequest(tuple(b"warm up"), 8))
    while engine.has_work:
        engine.step()
    assert engine.images is not None
    weight = pipeline.model.vision_encoder.projection.weight
    with torch.no_grad():
        pipeline.model.vision_encoder([torch.zeros(1, 3, PATCH, PATCH, device=weight.device, dtype=weight.dtype)])
    engine.owner.drain()


def say(**line: Any) -> None:
    """A line of JSON for the parent."""
    print(json.dumps(line), flush=True)


def state_of(engine: GuidedEngine, load: Streams, seconds: float) -> dict[str, Any]:
    """Counts so far."""
    assert engine.images is not None
    return {
        "seconds": round(seconds, 2),
        "steps": engine.steps,
        "waves": load.waves,
        **load.counts,
        "tokens_per_second": round(load.counts["tokens"] / max(seconds, 1e-9), 1),
        "forwards": vars(engine.stats),
        "hostfuncs": vars(engine.owner.stats),
        "images_encoded": vars(engine.images.stats),
        "drain_share": engine.owner.stats.drained_seconds / max(seconds, 1e-9),
    }


def run_load(arguments: argparse.Namespace) -> None:
    """In a child: run the load for the duration; a line of JSON twice a second, the summary last.

    The control tells of every step.
    """
    is_control = arguments.part == "control"
    pipeline = build(arguments.device, arguments.batch_size, transform=not is_control)
    ways = ["schedule", "forward"] if arguments.encode == "both" else [arguments.encode]
    engine = make_engine(pipeline, arguments.layer, encode=ways[0], encoder_cache_tokens=arguments.encoder_cache_tokens)
    warm_up(pipeline, engine)
    hold_gil_in_tower(pipeline, engine.owner.layer)
    engine.steps = 0
    if is_control and arguments.layer == "threads":
        # On a busy machine a worker could else get the GIL between a launch and the tower's wait, and nothing hang.
        sys.setswitchinterval(1000)
    load = Streams(engine, arguments.image_streams, arguments.text_streams)
    seconds_of = dict.fromkeys(ways, 0.0)
    say(ready=True)
    with open(arguments.trace, "w") as trace:
        start = before = time.monotonic()
        last = -math.inf
        while before - start < arguments.soak_seconds:
            if is_control or before - last >= 0.5 or load.engine.steps < 5:
                last = before
                say(state=state_of(engine, load, before - start))
                # Its thread needs no GIL, so it can say where a hang is.
                faulthandler.dump_traceback_later(0.7 * arguments.bound, file=trace)
            engine.encode = ways[int((before - start) / arguments.switch_seconds) % len(ways)]  # type: ignore[assignment]
            load.step()
            now = time.monotonic()
            seconds_of[engine.encode] += now - before
            before = now
        engine.owner.drain()
        faulthandler.cancel_dump_traceback_later()
    seconds = time.monotonic() - start
    say(summary={**state_of(engine, load, seconds), "seconds_by_encode": seconds_of})


def absent(summary: dict[str, Any], encode: str) -> list[str]:
    """What a soak is to exercise and did not."""
    encoded = summary["images_encoded"]
    ways = ["schedule", "forward"] if encode == "both" else [encode]
    happened = {
        **{f"images encoded by way of {way}": encoded["images"][way] for way in (*ways, "prefetch")},
        **({"encoders called ahead": encoded["calls_ahead"]} if "schedule" in ways else {}),
        "prefetches skipped": encoded["prefetch_skipped"],
        "partial hits of the encoder cache": encoded["partial_hits"],
        "replays with host functions": summary["hostfuncs"]["replays"],
        "drains": summary["hostfuncs"]["drains"],
        "complete texts": summary["stop"],
    }
    return [what for what, count in happened.items() if not count]


def soak(arguments: argparse.Namespace, report: Report) -> int:
    """Watch a child that runs the load; 0 without a hang, without an invalid text, and with everything exercised."""
    last: dict[str, Any] = {}

    def note(line: str) -> None:
        values = json.loads(line) if line.startswith("{") else {}
        if "state" in values:
            last.update(values["state"])
            report.put("soak", {"unfinished": True, "last": last}, at_most_every=10)

    watched = watch_child(
        command_of(arguments, "soak"),
        bound=arguments.bound,
        start_bound=arguments.start_bound,
        total_bound=math.inf,
        ready_bound=arguments.soak_seconds + arguments.bound,
        on_line=note,
    )
    summary = json.loads(watched.lines[-1]).get("summary") if watched.lines else None
    lacks = absent(summary, arguments.encode) if summary else []
    result = {
        "hangs": int(watched.hung),
        **outcome_of(watched),
        "not_exercised": lacks,
        "summary": summary,
        "last": None if summary else last,
    }
    report.put("soak", result)
    is_long = arguments.soak_seconds >= LONG_ENOUGH
    return 0 if summary is not None and summary["invalid"] == 0 and not (lacks and is_long) else 1


def control(arguments: argparse.Namespace, report: Report) -> int:
    """The same without drain_hostfuncs: 0 when it hangs, which the watchdog ends."""
    with tempfile.NamedTemporaryFile("r") as trace:
        # An encoder meets host functions ahead of a step that runs; a forward begins when those before it are over.
        encode = "schedule" if arguments.encode == "both" else arguments.encode
        changes = {
            "encode": encode,
            "bound": arguments.control_bound,
            "soak_seconds": arguments.control_seconds,
            "trace": trace.name,
        }
        arguments = argparse.Namespace(**{**vars(arguments), **changes})
        watched = watch_child(
            command_of(arguments, "control"),
            bound=arguments.bound,
            start_bound=arguments.start_bound,
            total_bound=math.inf,
            ready_bound=arguments.control_seconds,
        )
        where = where_of(trace.read())
    states = [json.loads(line)["state"] for line in watched.lines if line.startswith('{"state"')]
    hangs = int(watched.hung and any(line.endswith(" in hold") for line in where))
    result = {
        "hangs": hangs,
        **outcome_of(watched),
        "bound_seconds": arguments.bound,
        "steps_before": states[-1]["steps"] if states else 0,
        "seconds_before": states[-1]["seconds"] if states else 0,
        "hung_at": where,
        "last": states[-1] if states else None,
    }
    report.put("control", result)
    return 0 if hangs else 1


def where_of(trace: str) -> list[str]:
    """The calls of the thread that was encoding, from all threads' tracebacks; else of the one told of last.

    One line each, innermost first, without those of `torch.nn`; files below the repository by their path in it.
    """
    trace = trace.replace(f"{Path(__file__).resolve().parents[1]}/", "")
    threads = [thread.splitlines() for thread in trace.split("\n\n") if thread.strip()]
    calls = [[line.strip() for line in thread if line.strip().startswith("File")] for thread in threads]
    encoding = [thread for thread in calls if any(line.endswith(" in hold") for line in thread)]
    return [line for line in (encoding or calls or [[]])[-1] if "/torch/nn/modules/" not in line]


def outcome_of(watched: Watched) -> dict[str, Any]:
    """How a child ended."""
    return {
        "killed": watched.killed,
        "exit_code": watched.exit_code,
        "start_seconds": round(watched.start_seconds, 1),
        "seconds": round(watched.seconds, 1),
    }


# ---------------------------------------------------------------- cost


NAMES = ("with", "without", "without again")
KINDS = {"guided, graphs": (True, True), "unguided, eager": (False, False)}


def submit_text_only(engine: GuidedEngine, streams: int, tokens: int, grammar: bool) -> None:
    """A fixed load without images."""
    spec = GrammarSpec.regex(f"[a-z ]{{{tokens}}}") if grammar else None
    for number in range(streams):
        engine.submit(GuidedRequest(tuple(f"text {number}".encode()), tokens, grammar=spec))


def one_round(engines: dict[str, GuidedEngine], streams: int, tokens: int, grammar: bool, order: random.Random) -> Any:
    """Run the same load on all engines, step by step in turn; seconds and tokens by engine.

    In every turn each engine takes one step, in an order of its own: drifts of the machine meet all of them alike.
    """
    for engine in engines.values():
        submit_text_only(engine, streams, tokens, grammar)
    steps: dict[str, list[float]] = {name: [] for name in engines}
    added = dict.fromkeys(engines, 0)
    names = list(engines)
    while any(engine.has_work for engine in engines.values()):
        order.shuffle(names)
        for name in names:
            start = time.perf_counter()
            added[name] += engines[name].step()
            steps[name].append(time.perf_counter() - start)
    return {
        "seconds": {name: sum(times) for name, times in steps.items()},
        "median_step": {name: statistics.median(times) for name, times in steps.items()},
        "tokens": added,
    }


def text_only_graphs(pipeline: Pipeline) -> list[str]:
    """The code of the orchestrator graphs for batches without new images."""
    codes = [gm.code for gm in orchestrator_graphs(pipeline.model).values()]
    return sorted(code for code in codes if "vision_encoder" not in code)


def run_cost(arguments: argparse.Namespace) -> None:
    """In a child: text only, with the transform and twice without it; a line of JSON per round.

    Each kind has an equal share of the time that is left when its turn comes.
    """
    streams, order = arguments.text_streams, random.Random(0)
    pipelines = {name: build(arguments.device, streams, name == "with") for name in NAMES}
    say(ready=True)
    for turn, (kind, (grammar, graphs)) in enumerate(KINDS.items()):
        now = time.time()
        until = now + (arguments.deadline - now) / (len(KINDS) - turn)
        tokens = arguments.cost_tokens if grammar else arguments.cost_eager_tokens
        engines = {name: make_engine(pipeline, arguments.layer, graphs=graphs) for name, pipeline in pipelines.items()}
        for _ in range(3 if graphs else 1):  # set up, warm up, capture
            one_round(engines, streams, tokens, grammar, order)
            say(warm=kind)
        captured = {name: engine.stats.captures for name, engine in engines.items()}
        before = {name: dict(vars(engine.owner.stats)) for name, engine in engines.items()}
        gc.collect()
        gc.freeze()
        gc.disable()  # collections are between rounds, where nobody is timed
        longest, rounds = 0.0, 0
        while rounds < arguments.rounds and (rounds < 3 or time.time() + longest < until):
            start = time.time()
            say(kind=kind, round=one_round(engines, streams, tokens, grammar, order))
            rounds += 1
            gc.collect()
            longest = max(longest, time.time() - start)
        gc.enable()
        gc.unfreeze()
        counts = {
            name: {key: value - before[name][key] for key, value in vars(engine.owner.stats).items()}
            for name, engine in engines.items()
        }
        say(
            kind=kind,
            counts=counts,
            captures_while_timed=sum(engine.stats.captures - captured[name] for name, engine in engines.items()),
            same_graphs=text_only_graphs(pipelines["with"]) == text_only_graphs(pipelines["without"]),
            num_graphs=len(text_only_graphs(pipelines["with"])),
        )
        for engine in engines.values():
            engine.owner.drain()
            engine.runner.release()


def compare(over: list[float], under: list[float]) -> dict[str, Any]:
    """The ratio of two engines' throughputs from their seconds in the same rounds, with its confidence interval."""
    pairs = list(zip(over, under, strict=True))
    resample = random.Random(0)
    ratios = []
    for _ in range(4000):
        chosen = resample.choices(pairs, k=len(pairs))
        ratios.append(sum(b for _, b in chosen) / sum(a for a, _ in chosen))
    ratios.sort()
    low, high = ratios[int(0.025 * len(ratios))], ratios[int(0.975 * len(ratios)) - 1]
    faster, slower = sum(b > a for a, b in pairs), sum(b < a for a, b in pairs)
    decided = faster + slower
    tail = sum(math.comb(decided, k) for k in range(min(faster, slower) + 1)) / 2**decided
    return {
        "ratio": sum(under) / sum(over),
        "median_of_rounds": statistics.median(b / a for a, b in pairs),
        "confidence_95": [low, high],
        "rounds": len(pairs),
        "rounds_faster": faster,
        "sign_test_p": min(1.0, 2 * tail),
        "within_1_percent": low >= 0.99 and high <= 1.01,
    }


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """What the rounds of one kind show."""
    seconds = {name: [entry["seconds"][name] for entry in rounds] for name in NAMES}
    tokens = {name: [entry["tokens"][name] for entry in rounds] for name in NAMES}
    medians = {name: [entry["median_step"][name] for entry in rounds] for name in NAMES}
    return {
        "tokens_per_second": {name: sum(tokens[name]) / sum(seconds[name]) for name in NAMES},
        "with_over_without": compare(seconds["with"], seconds["without"]),
        "without_again_over_without": compare(seconds["without again"], seconds["without"]),
        # Single interruptions by the machine move sums, not medians.
        "with_over_without_by_median_steps": compare(medians["with"], medians["without"]),
        "without_again_over_without_by_median_steps": compare(medians["without again"], medians["without"]),
        "same_tokens": tokens["with"] == tokens["without"] == tokens["without again"],
        "seconds_of_rounds": seconds,
        "median_steps_of_rounds": medians,
    }


def cost(arguments: argparse.Namespace, report: Report) -> int:
    """Watch a child that compares; 0 when it came to its end. What the rounds so far show is written as they come."""
    rounds: dict[str, list[dict[str, Any]]] = {}
    ends: dict[str, dict[str, Any]] = {}

    def note(line: str) -> None:
        values = json.loads(line) if line.startswith("{") else {}
        if "round" in values:
            rounds.setdefault(values["kind"], []).append(values["round"])
            report.put("cost", {"unfinished": True, **result()}, at_most_every=10)
        elif "counts" in values:
            ends[values.pop("kind")] = values

    def result() -> dict[str, Any]:
        return {kind: {**summarise(entries), **ends.get(kind, {})} for kind, entries in rounds.items()}

    arguments = argparse.Namespace(**{**vars(arguments), "deadline": time.time() + arguments.cost_seconds})
    watched = watch_child(
        command_of(arguments, "cost"),
        bound=60,
        start_bound=arguments.start_bound,
        total_bound=arguments.cost_seconds + 10,
        on_line=note,
    )
    report.put("cost", {**outcome_of(watched), **result()})
    return 0 if watched.exit_code == 0 and set(ends) == set(KINDS) else 1


# ---------------------------------------------------------------- parts


LONG_ENOUGH = 20.0
"""Seconds after which a soak must have exercised everything."""


class Report:
    """The results of the parts, written to a file after each and now and then before; what it holds already stays."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.parts: dict[str, Any] = {}
        if path is not None and path.exists():
            self.parts = json.loads(path.read_text())
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        self.parts["machine"] = {"gpu": gpu, "python": sys.version.split()[0], "torch": torch.__version__}
        self._written = -math.inf

    def put(self, part: str, result: dict[str, Any], at_most_every: float = 0) -> None:
        """Note a part's result and write the file, unless that was done less than so many seconds ago."""
        self.parts[part] = result
        if at_most_every == 0:
            shown = {key: value for key, value in result.items() if key not in KINDS}
            shown |= {
                kind: {key: value for key, value in result[kind].items() if not key.endswith("_of_rounds")}
                for kind in KINDS
                if kind in result
            }
            print(json.dumps({part: shown}, indent=2), flush=True)
        now = time.monotonic()
        if self.path is not None and now - self._written >= at_most_every:
            self._written = now
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.path.with_suffix(".part")
            unfinished.write_text(json.dumps(self.parts, indent=2) + "\n")
            unfinished.replace(self.path)


def command_of(arguments: argparse.Namespace, part: str) -> list[str]:
    """The command of the child that runs a part."""
    passed = {name: value for name, value in vars(arguments).items() if name not in ("parts", "json", "part")}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in passed.items()]
    return [sys.executable, __file__, f"--part={part}", *options]


def main() -> int:
    """Run the parts asked for; 0 when each shows what it is to show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: soak)")
    parser.add_argument("--soak-seconds", type=float, default=180, help="once it is ready (default: %(default)s)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layer", choices=["cuda", "ordered", "threads"], help="default: cuda, or ordered on the CPU")
    parser.add_argument("--image-streams", type=int, default=32)
    parser.add_argument("--text-streams", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32, help="fewer than streams (default: %(default)s)")
    parser.add_argument("--encoder-cache-tokens", type=int, default=512, help="(default: %(default)s)")
    parser.add_argument("--encode", choices=["both", "schedule", "forward"], default="both", help="both: in turn")
    parser.add_argument("--switch-seconds", type=float, default=5, help="between the two (default: %(default)s)")
    parser.add_argument("--bound", type=float, default=30, help="seconds without progress that count as a hang")
    parser.add_argument("--start-bound", type=float, default=120, help="seconds for starting up (default: %(default)s)")
    parser.add_argument("--control-bound", type=float, default=12, help="like --bound, where a hang is expected")
    parser.add_argument("--control-seconds", type=float, default=40, help="once it is ready, at most")
    parser.add_argument("--rounds", type=int, default=60, help="of the cost, per kind, at most (default: %(default)s)")
    parser.add_argument("--cost-seconds", type=float, default=90, help="of all, start included (default: %(default)s)")
    parser.add_argument("--cost-tokens", type=int, default=64, help="per guided request (default: %(default)s)")
    parser.add_argument("--cost-eager-tokens", type=int, default=16, help="per unguided one (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the results here, after each part and before")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--trace", default=os.devnull, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=math.inf, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda"):
        check_gpu(parser, f"--device {arguments.device}", "--device cpu")
    arguments.layer = arguments.layer or ("cuda" if arguments.device.startswith("cuda") else "ordered")
    if arguments.part:
        run_cost(arguments) if arguments.part == "cost" else run_load(arguments)
        return 0
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    report = Report(arguments.json)
    run = {"control": control, "soak": soak, "cost": cost}
    return max(run[part](arguments, report) for part in arguments.parts or ["soak"])


PARTS = ("control", "soak", "cost")

if __name__ == "__main__":
    sys.exit(main())
