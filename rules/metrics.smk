"""READS results/runs/<point>/run.json and its artefacts. WRITES results/metrics/<point>.* and results/metrics.{csv,parquet}."""


localrules:
    point_metrics,
    metrics,


rule point_metrics:
    input:
        point=ancient("results/points/{point}.json"),
        run="results/runs/{point}/run.json",
    output:
        # Written last. Its tables, <point>.requests.parquet and results/timelines/<point>.parquet, are there if it is:
        # as outputs, and as inputs of what reads them, they would make a dry run of a large sweep a quarter longer.
        "results/metrics/{point}.json",
    log:
        "results/logs/metrics/{point}.log",
    conda:
        "../environment.yml"
    params:
        # Not the files as inputs: with a dozen for each point, a dry run of a large sweep takes twice as long.
        code=contents(METRICS_MODULES),
        limits=SWEEP.config.limits.model_dump_json(),
    message:
        "Judge {wildcards.point}"
    # Not a script: Snakemake hashes one for every job, which takes a dry run of thousands of points minutes.
    shell:
        "python -m workflow.measured {input:q} {params.limits:q} results > {log:q} 2>&1"
        " || {{ cat {log:q} >&2; exit 1; }}"


rule metrics:
    input:
        modules=METRICS_MODULES,
        points=collect("results/points/{point}.json", point=SWEEP.points),
        # With them go the runs, which none of these files is older than.
        metrics=collect("results/metrics/{point}.json", point=wanted_points()),
    output:
        csv="results/metrics.csv",
        parquet="results/metrics.parquet",
    log:
        "results/logs/metrics.log",
    conda:
        "../environment.yml"
    message:
        "Join the metrics of all points"
    script:
        "../scripts/metrics_table.py"
