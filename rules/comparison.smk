"""READS results/metrics.parquet and the requests of each point. WRITES results/{comparison,arms,explanations,fairness}.csv, results/summary.md."""


localrules:
    comparison,


rule comparison:
    input:
        modules=COMPARISON_MODULES,
        # With it go the requests of each point, which none of these files is older than: see rules/metrics.smk.
        table="results/metrics.parquet",
    output:
        pairs="results/comparison.csv",
        arms="results/arms.csv",
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
