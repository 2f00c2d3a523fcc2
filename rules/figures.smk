"""READS results/metrics.parquet and results/comparison.csv. WRITES results/figures/<figure>.{svg,png}."""


rule figure:
    input:
        module="workflow/figures.py",
        style="workflow/style.py",
        table="results/metrics.parquet",
        comparison="results/comparison.csv",
    output:
        svg=report(
            "results/figures/{figure}.svg",
            caption="../workflow/captions/{figure}.rst",
            category="Figures",
            labels={"figure": "{figure}"},
        ),
        png="results/figures/{figure}.png",
    log:
        "results/logs/figures/{figure}.log",
    conda:
        "../environment.yml"
    message:
        "Draw {wildcards.figure}"
    script:
        "../scripts/draw_figure.py"


rule figures:
    input:
        collect(
            "results/figures/{figure}.{format}", figure=FIGURES, format=("svg", "png")
        ),
        "results/summary.md",
