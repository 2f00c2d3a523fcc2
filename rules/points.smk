"""READS results/{plan,preflight}.tsv, which planning itself writes, with results/points/, before the first job."""


localrules:
    plan,
    preflight,
    refused,


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


rule preflight:
    input:
        "results/preflight.tsv",
    log:
        "results/logs/preflight.log",
    conda:
        "../environment.yml"
    message:
        "Show what preflight found"
    shell:
        "column -t -s $'\\t' {input:q} | tee {log:q}"


rule refused:
    input:
        "results/preflight.tsv",
    output:
        "results/refused/{point}",
    log:
        "results/logs/refused/{point}.log",
    # After everything else: a point that cannot run must not keep others from running.
    priority: -100
    conda:
        "../environment.yml"
    message:
        "{wildcards.point} was refused by preflight and is not measured"
    shell:
        "grep -F {wildcards.point:q} {input:q} | tee {log:q} >&2; exit 1"
