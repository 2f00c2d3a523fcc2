"""READS results/metrics.parquet and the requests of each point. WRITES results/comparison.csv and results/summary.md."""


rule comparison:
    input:
        module="workflow/comparison.py",
        table="results/metrics.parquet",
        points=collect("results/points/{point}.json", point=SWEEP.points),
        requests=collect(
            "results/metrics/{point}.requests.parquet", point=wanted_points()
        ),
    output:
        pairs="results/comparison.csv",
        arms="results/comparison_arms.csv",
        explanations="results/explanations.csv",
        fairness="results/fairness.csv",
        summary="results/summary.md",
    log:
        "results/logs/comparison.log",
    conda:
        "../environment.yml"
    message:
        "Compare the arms"
    script:
        "../scripts/compare.py"
