"""READS a set's declaration in configs/traces.yaml. WRITES results/traces/<set>/: sessions and a manifest."""


rule trace_set:
    input:
        module="workflow/traces.py",
    output:
        "results/traces/{trace_set}/trace_set.json",
    log:
        "results/logs/traces/{trace_set}.log",
    params:
        declaration=lambda wildcards: SWEEP.traces[wildcards.trace_set].model_dump_json(),
    conda:
        "../environment.yml"
    message:
        "Prepare the trace set {wildcards.trace_set}"
    script:
        "../scripts/prepare_traces.py"
