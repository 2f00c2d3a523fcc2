"""READS results/plan.tsv, which planning itself writes, with results/points/<point>.json, before the first job."""


rule plan:
    input:
        "results/plan.tsv",
    log:
        "results/logs/plan.log",
    conda:
        "../environment.yml"
    message:
        "Show the bill"
    shell:
        "column -t -s $'\\t' {input:q} | tee {log:q}"
