"""READS results/metrics.parquet, results/*.csv, runs. WRITES results/figures/ and results/report.html."""


localrules:
    figure,
    timelines,
    report_page,
    figures,


rule figure:
    input:
        modules=FIGURE_MODULES,
        table="results/metrics.parquet",
        pairs="results/comparison.csv",
        arms="results/arms.csv",
    output:
        svg=report(
            "results/figures/{figure}.svg",
            # A caption file takes no wildcard, so one file shows the text that stands in the parameters.
            caption="../workflow/templates/caption.rst",
            category="Figures",
            labels={"figure": "{figure}"},
        ),
        png="results/figures/{figure}.png",
    log:
        "results/logs/figures/{figure}.log",
    conda:
        "../environment.yml"
    params:
        caption=lambda wildcards: caption(wildcards.figure),
    message:
        "Draw {wildcards.figure}"
    script:
        "../scripts/draw_figure.py"


# One job for all points and one folder for what it draws: Snakemake compares each file that a rule needs with each
# output of each rule, so that a job or an output for every point would make a dry run of a large sweep a minute longer.
rule timelines:
    input:
        modules=FIGURE_MODULES,
        # With it goes the timeline of each point: see rules/metrics.smk.
        table="results/metrics.parquet",
    output:
        folder=directory("results/figures/timelines"),
    log:
        "results/logs/timelines.log",
    conda:
        "../environment.yml"
    threads: 8
    message:
        "Draw the points over time"
    script:
        "../scripts/draw_timelines.py"


rule report_page:
    input:
        modules=["workflow/report.py", "workflow/templates/report.html.j2"],
        changelog=SWEEP.config.changelog.file,
        # Of all planned points; the files of each are found by its id, and none changes without this table.
        table="results/metrics.parquet",
        pairs="results/comparison.csv",
        explanations="results/explanations.csv",
        fairness="results/fairness.csv",
        figures=collect("results/figures/{figure}.svg", figure=FIGURES),
        timelines="results/figures/timelines",
    output:
        page="results/report.html",
    log:
        "results/logs/report.log",
    conda:
        "../environment.yml"
    message:
        "Write the report"
    script:
        "../scripts/write_report.py"


rule figures:
    input:
        collect(
            "results/figures/{figure}.{format}", figure=FIGURES, format=("svg", "png")
        ),
        "results/summary.md",
        "results/report.html",
