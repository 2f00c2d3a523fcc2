"""Offload Sweep: changelog -> points -> runs -> metrics -> comparison -> figures and report.

A table of contents. Each stage is one file in rules/, one module in workflow/ and one folder in results/.
"""

from snakemake.utils import min_version

min_version("9.27")


include: "rules/common.smk"


SWEEP = load_sweep()
HOLDERS = load_holders()


wildcard_constraints:
    # Points are known by their files, which planning writes. Of the rest only what is missing can be made: see
    # rules/environments.smk.
    point=r"[^/]+",
    trace_set=any_of(missing("results/traces/{}/trace_set.json", SWEEP.trace_sets)),
    model=any_of(missing("results/models/{}/model.json", SWEEP.made_models)),
    image=any_of(missing("results/images/{}/image.json", SWEEP.images)),
    environment=any_of(missing(".envs/{}/environment.json", SWEEP.locks)),
    figure=any_of(FIGURES),


include: "rules/environments.smk"
include: "rules/images.smk"
include: "rules/traces.smk"
include: "rules/models.smk"
include: "rules/points.smk"
include: "rules/runs.smk"
include: "rules/metrics.smk"
include: "rules/comparison.smk"
include: "rules/figures.smk"


rule all:
    default_target: True
    input:
        "results/plan.tsv",
        # Every point's run by name: a table alone would not bring back one that was deleted.
        collect("results/runs/{point}/run.json", point=wanted_points()),
        collect("results/refused/{point}", point=refused_points()),
        multiext("results/metrics", ".csv", ".parquet"),
        collect("results/{table}", table=("comparison.csv", "summary.md")),
        collect(
            "results/figures/{figure}.{format}", figure=FIGURES, format=("svg", "png")
        ),
        "results/report.html",


onsuccess:
    print_file("results/summary.md")


onerror:
    show_problems()
