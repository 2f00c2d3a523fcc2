"""READS a model's declaration in configs/models.yaml. WRITES results/models/<model>/: weights and tokenizer."""


rule model:
    input:
        module="workflow/models.py",
        client=ancient(f".envs/{SWEEP.config.replay.client}/environment.json"),
    output:
        "results/models/{model}/model.json",
    log:
        "results/logs/models/{model}.log",
    params:
        name=lambda wildcards: SWEEP.model_names[wildcards.model],
        declaration=lambda wildcards: SWEEP.models[wildcards.model].model_dump_json(),
    conda:
        "../environment.yml"
    message:
        "Make the model {params.name}"
    script:
        "../scripts/make_model.py"
