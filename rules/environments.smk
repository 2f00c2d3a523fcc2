"""READS configs/environments/<name>.txt. WRITES .envs/<name>/, an environment apart for the client or an engine."""


rule environment:
    input:
        lock="configs/environments/{environment}.txt",
    output:
        ".envs/{environment}/environment.json",
    log:
        "results/logs/environments/{environment}.log",
    conda:
        "../environment.yml"
    message:
        "Prepare the environment {wildcards.environment}"
    shell:
        "{PYTHON} -m workflow.environments {input.lock:q} .envs/{wildcards.environment} > {log:q} 2>&1"
        " || {{ cat {log:q} >&2; exit 1; }}"
