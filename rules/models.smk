"""READS a model's declaration in a point. WRITES results/models/<model>-<hash>/: random weights and a tokenizer."""


localrules:
    model,


rule model:
    input:
        point=lambda wildcards: ancient(point_file(SWEEP.made_models[wildcards.model])),
        client=lambda wildcards: ancient(
            client_environment(SWEEP.made_models[wildcards.model])
        ),
    output:
        "results/models/{model}/model.json",
    log:
        "results/logs/models/{model}.log",
    conda:
        "../environment.yml"
    message:
        "Make the model {wildcards.model}"
    shell:
        "python -m workflow.parts model {input.point:q} $(dirname {input.client:q}) results/models/{wildcards.model}"
        " > {log:q} 2>&1 || {{ cat {log:q} >&2; exit 1; }}"
