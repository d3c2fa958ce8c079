"""`auto-deploy-ext bench`: what a whole Eagle step costs under each mirror policy, beside a step without any mirror.

* `cells`: what is measured, and in which order;
* `pipelines`: one model, exported once, and a pipeline with its consumers per backend and draft length;
* `policies`: one rewritten orchestrator per policy over the same consumers;
* `batches`: the extend-only batches that every policy gets;
* `measure`: timed blocks, and the untimed passes that count transfers, waits and launches;
* `session`: interleaves repetitions and keeps within the time budget;
* `results`, `show`, `plot`: the JSON file, merging, tables and the picture;
* `command`: the command line.
"""
