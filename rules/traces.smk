"""READS a set's declaration in a point. WRITES results/traces/<set>-<hash>/: sessions and a manifest."""


localrules:
    trace_set,


rule trace_set:
    input:
        point=lambda wildcards: ancient(
            point_file(SWEEP.trace_sets[wildcards.trace_set])
        ),
    output:
        "results/traces/{trace_set}/trace_set.json",
    log:
        "results/logs/traces/{trace_set}.log",
    conda:
        "../environment.yml"
    resources:
        # Not a parameter: where the file lies changes no session.
        declared_in=SWEEP.config.traces,
    message:
        "Prepare the trace set {wildcards.trace_set}"
    shell:
        "python -m workflow.parts traces {input.point:q} {resources.declared_in:q} results/traces/{wildcards.trace_set}"
        " > {log:q} 2>&1 || {{ cat {log:q} >&2; exit 1; }}"
