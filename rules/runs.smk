"""READS results/points/<point>.json and the prepared parts. WRITES results/runs/<point>/. The one rule that costs money.

A point's id is the hash of everything its measurement depends on, so its path is its identity: a run that exists is
never measured again, whatever was touched, edited or killed, unless it is named with --forcerun or deleted.
"""

SHARED = load_shared()


rule run_point:
    input:
        prepared_parts,
        point=ancient("results/points/{point}.json"),
    output:
        "results/runs/{point}/run.json",
    log:
        "results/logs/runs/{point}.log",
    wildcard_constraints:
        point=point_among(due_points(), runs_there()),
    conda:
        "../environment.yml"
    threads: point_threads()
    resources:
        program="workflow.runs",
        try_number=lambda wildcards, attempt: attempt,
        # Not `clusters`: the Slurm plugin would take that for a list of Slurm clusters to submit to.
        clusters_file=SWEEP.config.clusters,
        nodes=1,
        slurm_partition=asked("partition"),
        slurm_account=asked("account"),
        qos=asked("qos"),
        constraint=asked("constraint"),
        gres=asked("gres"),
        mem_mb=asked("memory_mib"),
        runtime=asked("runtime"),
        slurm_extra=asked("extra"),
        asked_for=asked("summary"),
    message:
        "Measure {wildcards.point} on {resources.asked_for}"
    shell:
        # exec: the job's own process is then the one that Snakemake signals, and it sees when Snakemake is gone.
        "exec python -m {resources.program} {input.point:q} results/runs/{wildcards.point}"
        " --log {log:q} --clusters {resources.clusters_file:q} --try {resources.try_number} --stop-with-parent"


# Points that take turns on one server (share_server: true). A job with all their results as outputs would lose those
# that were measured if it failed, so it says only that it is through; each point then takes its own result over.
rule run_shared:
    input:
        prepared_parts,
        turns=ancient("results/shared/{allocation}.json"),
    output:
        "results/shared/{allocation}.done.json",
    log:
        "results/logs/shared/{allocation}.log",
    wildcard_constraints:
        allocation=r"[0-9a-f]{10}-\d+",
    conda:
        "../environment.yml"
    threads: point_threads()
    resources:
        try_number=lambda wildcards, attempt: attempt,
        clusters_file=SWEEP.config.clusters,
        nodes=1,
        slurm_partition=asked("partition"),
        slurm_account=asked("account"),
        qos=asked("qos"),
        constraint=asked("constraint"),
        gres=asked("gres"),
        mem_mb=asked("memory_mib"),
        runtime=asked("runtime"),
        slurm_extra=asked("extra"),
        asked_for=asked("summary"),
    message:
        "Measure the points of {input.turns} in turn on {resources.asked_for}"
    shell:
        "exec python -m workflow.turns {input.turns:q} {output:q}"
        " --log {log:q} --clusters {resources.clusters_file:q} --try {resources.try_number} --stop-with-parent"


if SHARED:

    localrules:
        publish_point,

    use rule run_point as publish_point with:
        input:
            lambda wildcards: f"results/shared/{SHARED[wildcards.point]}.done.json",
            point=ancient("results/points/{point}.json"),
        wildcard_constraints:
            point=point_among(SHARED, SWEEP.points),
        threads: 1
        resources:
            program=lambda wildcards: "workflow.turns --publish"
            f" results/shared/{SHARED[wildcards.point]}.done.json",
            try_number=lambda wildcards, attempt: attempt,
            # Not `clusters`: the Slurm plugin would take that for a list of Slurm clusters to submit to.
            clusters_file=SWEEP.config.clusters,
        message:
            "Take over what a shared server measured of {wildcards.point}"

    ruleorder: publish_point > run_point


if HOLDERS:

    # A point that a job of an earlier run still measures. The same command in the rule's text, or Snakemake would take the
    # result for that of an older rule and measure it again; what differs is in the resources, which it does not compare.
    localrules:
        adopt_point,

    use rule run_point as adopt_point with:
        wildcard_constraints:
            point=point_among(HOLDERS, SWEEP.points),
        threads: 1
        resources:
            program=lambda wildcards: "workflow.adoption --holders "
            + ",".join(HOLDERS[wildcards.point]),
            try_number=lambda wildcards, attempt: attempt,
            # Not `clusters`: the Slurm plugin would take that for a list of Slurm clusters to submit to.
            clusters_file=SWEEP.config.clusters,
        message:
            "Wait for the job that measures {wildcards.point}"

    ruleorder: adopt_point > run_point
