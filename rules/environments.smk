"""READS configs/environments/<name>.txt. WRITES .envs/<name>-<hash>/, an environment apart for the client or an engine.

This rule and those of traces and models have what they depend on in their path, and neither script nor parameters:
once made, a part is never out of date. That matters: Snakemake 9 leaves every job behind an `ancient` input out of
account while the job that makes that input is due, so it would miss stale numbers.
"""


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
