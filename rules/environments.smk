"""READS configs/environments/<name>.txt. WRITES .envs/<name>-<hash>/, an environment apart for the client or an engine.

What an environment, a trace set or a made model depends on is in its path, so one that exists is never out of date,
and the Snakefile's wildcard constraints leave no job that could make it again. That matters: while the job that makes
an `ancient` input is due, Snakemake 9 leaves everything behind that input out of account and calls the rest done.
"""


localrules:
    environment,


rule environment:
    input:
        lock=lambda wildcards: ancient(str(SWEEP.locks[wildcards.environment])),
    output:
        ".envs/{environment}/environment.json",
    log:
        "results/logs/environments/{environment}.log",
    conda:
        "../environment.yml"
    message:
        "Prepare the environment {wildcards.environment}"
    shell:
        "python -m workflow.environments {input.lock:q} .envs/{wildcards.environment} > {log:q} 2>&1"
        " || {{ cat {log:q} >&2; exit 1; }}"
