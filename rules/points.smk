"""READS nothing: the Snakefile has planned the points. WRITES results/points/<point>.json and results/plan.tsv."""


rule point:
    output:
        "results/points/{point}.json",
    log:
        "results/logs/points/{point}.log",
    params:
        document=lambda wildcards: SWEEP.points[wildcards.point].to_json(),
    conda:
        "../environment.yml"
    message:
        "Write the point {wildcards.point}"
    script:
        "../scripts/write_point.py"


rule plan:
    output:
        "results/plan.tsv",
    log:
        "results/logs/plan.log",
    params:
        table=plan_tsv(SWEEP.points.values()),
    conda:
        "../environment.yml"
    message:
        "Write the bill"
    script:
        "../scripts/write_plan.py"
