"""READS results/points/<point>.json and the prepared parts. WRITES results/runs/<point>/. The one rule that costs money.

A shell rule, never a script: touching or checking out a script file would plan every point again. All inputs are
ancient: a point's id is the hash of everything its measurement depends on, so its path is its identity.
"""


rule run_point:
    input:
        prepared_parts,
        point=ancient("results/points/{point}.json"),
    output:
        "results/runs/{point}/run.json",
    log:
        "results/logs/runs/{point}.log",
    conda:
        "../environment.yml"
    threads: point_threads
    resources:
        try_number=lambda wildcards, attempt: attempt,
    message:
        "Measure {wildcards.point}"
    shell:
        # No params: a change of one would measure the point again.
        # exec: the job's own process is then the one that Snakemake signals, and it sees when Snakemake is gone.
        "exec {PYTHON} -m workflow.runs {input.point:q} results/runs/{wildcards.point}"
        " --log {log:q} --try {resources.try_number} --stop-with-parent"
