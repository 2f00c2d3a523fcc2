"""Rows and plans for tests: a search space with a line for every framework, written in InferenceX's format."""

import functools
from pathlib import Path
from typing import Any

from workflow import yamlfile
from workflow.changelog import Entry, LoggedEntry
from workflow.matrix import Master, PlannedRow, Runners, plan_rows
from workflow.plans import RECIPES, plan_for, with_backend
from workflow.recipes import load_recipes
from workflow.serving import ServePlan

MASTER = b"""
dsv4-b200-vllm:
  {image: "vllm/vllm-openai:v0.27.1", model: deepseek-ai/DeepSeek-V4-Pro, model-prefix: dsv4,
   runner: "cluster:b200-dgxc", precision: fp4, framework: vllm, multinode: false,
   scenarios: {agentic-coding: [{dram-utilization: 0.80, search-space: [
     {tp: 8, spec-decoding: mtp, kv-offloading: none, conc-list: [8]},
     {tp: 8, ep: 8, dp-attn: true, spec-decoding: mtp, kv-offloading: none,
      router: {name: vllm-router, version: "0.1.14"}, conc-list: [32]}]}]}}
kimik3-mi355x-vllm:
  {image: "vllm/vllm-openai-rocm:nightly-cb81048", model: moonshotai/Kimi-K3, model-prefix: kimik3,
   runner: "cluster:mi355x-amds", precision: fp4, framework: vllm, multinode: false,
   scenarios: {agentic-coding: [{dram-utilization: 0.5, search-space: [
     {tp: 8, spec-decoding: mtp, kv-offloading: none, conc-list: [8]}]}]}}
minimaxm3-mi355x-vllm:
  {image: "vllm/vllm-openai-rocm:v0.27.1", model: amd/MiniMax-M3-MXFP4, model-prefix: minimaxm3,
   runner: "cluster:mi355x-amds", precision: fp4, framework: vllm, multinode: false,
   scenarios: {agentic-coding: [{dram-utilization: 0.2, search-space: [
     {tp: 4, spec-decoding: mtp, kv-offloading: none, conc-list: [32]}]}]}}
minimaxm3-h100-vllm:
  {image: "vllm/vllm-openai:v0.27.1", model: MiniMaxAI/MiniMax-M3-MXFP8, model-prefix: minimaxm3,
   runner: "cluster:h100-dgxc", precision: fp8, framework: vllm, multinode: false,
   scenarios: {agentic-coding: [{dram-utilization: 0.8, search-space: [
     {tp: 8, spec-decoding: mtp, kv-offloading: none, conc-list: [6]}]}]}}
qwen3.5-h100-sglang:
  {image: "lmsysorg/sglang:v0.5.16-cu130", model: Qwen/Qwen3.5-397B-A17B-FP8, model-prefix: qwen3.5,
   runner: "cluster:h100-dgxc", precision: fp8, framework: sglang, multinode: false,
   scenarios: {agentic-coding: [{dram-utilization: 0.8, search-space: [
     {tp: 8, ep: 8, spec-decoding: mtp, kv-offloading: none, conc-list: [8]}]}]}}
glm5.2-mi355x-sglang:
  {image: "lmsysorg/sglang-rocm:v0.5.16-rocm720-mi35x-20260728", model: amd/GLM-5.2-MXFP4, model-prefix: glm5.2,
   runner: "cluster:mi355x-amds", precision: fp4, framework: sglang, multinode: false,
   scenarios: {agentic-coding: [{dram-utilization: 0.8, search-space: [
     {tp: 4, ep: 4, spec-decoding: mtp, kv-offloading: none, conc-list: [8]}]}]}}
dsv4-b300-sglang:
  {image: "lmsysorg/sglang:v0.5.17-cu130", model: deepseek-ai/DeepSeek-V4-Pro, model-prefix: dsv4,
   runner: "cluster:b300-nv", precision: fp4, framework: sglang, multinode: false,
   scenarios: {agentic-coding: [{dram-utilization: 0.8, search-space: [
     {tp: 4, ep: 4, dp-attn: true, spec-decoding: mtp, kv-offloading: none,
      router: {name: sglang-router, version: "0.3.2"}, conc-list: [32]}]}]}}
minimaxm3-b200-trt:
  {image: "nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc23.post1", model: nvidia/MiniMax-M3-NVFP4,
   model-prefix: minimaxm3, runner: "cluster:b200-dgxc", precision: fp4, framework: trt, multinode: false,
   scenarios: {agentic-coding: [{dram-utilization: 0.8, search-space: [
     {tp: 4, spec-decoding: mtp, kv-offloading: none, conc-list: [35]}]}]}}
kimik3-mi355x-atom:
  {image: "rocm/atom-dev:kimi_k3", model: moonshotai/Kimi-K3, model-prefix: kimik3,
   runner: "cluster:mi355x-amds", precision: fp4, framework: atom, multinode: false,
   scenarios: {agentic-coding: [{dram-utilization: 0.086, search-space: [
     {tp: 8, spec-decoding: mtp, kv-offloading: none, conc-list: [8]}]}]}}
tiny:
  {image: "xllamacpp:2026.10.11549", model: offload-sweep/tiny-llama, model-prefix: tiny, runner: "cluster:local",
   precision: f16, framework: llamacpp, multinode: false,
   scenarios: {agentic-coding: [{dram-utilization: 0.25, search-space: [
     {tp: 1, kv-offloading: none, conc-list: [3]}]}]}}
"""
RUNNERS = b"""
labels: {}
hardware:
  "cluster:b200-dgxc": {available-cpu-dram-mib: 3095781, gpus-per-node: 8}
  "cluster:b300-nv": {available-cpu-dram-mib: 2964436, gpus-per-node: 8}
  "cluster:h100-dgxc": {available-cpu-dram-mib: 2063837, gpus-per-node: 8}
  "cluster:mi355x-amds": {available-cpu-dram-mib: 3095781, gpus-per-node: 8}
  "cluster:local": {available-cpu-dram-mib: 4096, gpus-per-node: 1}
"""
# What the points of these search spaces have as host memory budget in decimal GB.
BUDGETS_GB = {
    "dsv4-b200-vllm": 2399,
    "kimik3-mi355x-vllm": 1499,
    "minimaxm3-mi355x-vllm": 299,
    "minimaxm3-h100-vllm": 1731,
    "qwen3.5-h100-sglang": 1731,
    "glm5.2-mi355x-sglang": 1199,
    "dsv4-b300-sglang": 1199,
    "minimaxm3-b200-trt": 1199,
    "kimik3-mi355x-atom": 257,
    "tiny": 1,
}


@functools.cache
def _rows() -> tuple[PlannedRow, ...]:
    path = Path("test-master.yaml")
    data = yamlfile.parse(MASTER, path)
    master = Master(dict.fromkeys(data, (path, data)))
    runners = yamlfile.validate(Runners, yamlfile.parse(RUNNERS, path), path)
    entry = Entry.model_validate(
        {
            "config-keys": tuple(data),
            "description": ("test",),
            "pr-link": "https://github.com/offload-sweep/offload-sweep/pull/1",
            "scenario-type": ("agentic-coding",),
        }
    )
    return tuple(plan_rows((LoggedEntry(0, 1, path, entry),), master, runners))


@functools.cache
def recipes() -> tuple:
    """Return the committed recipes."""
    return load_recipes(RECIPES)


def planned(key: str, backend: str = "none", version: str | None = None, *, dp_attn: bool = False) -> PlannedRow:
    """Return one row of the search space above under a backend."""
    row = next(row for row in _rows() if row.config_key == key and row.row.dp_attn == dp_attn)
    return with_backend(row, backend, version, BUDGETS_GB[key])


def plan(
    key: str,
    backend: str = "none",
    version: str | None = None,
    *,
    dp_attn: bool = False,
    options: dict[str, dict[str, Any]] | None = None,
) -> ServePlan:
    """Return its plan by the committed recipes, with other options of backends where some are given."""
    known = recipes()
    if options is not None:
        known = tuple((path, recipe.model_copy(update={"backends": options})) for path, recipe in known)
    return plan_for(planned(key, backend, version, dp_attn=dp_attn), known)[0]
