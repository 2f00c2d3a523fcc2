"""READS a point's container image from its registry. WRITES results/images/<image>-<hash>/image.json, and the image.

The image itself lies in the cluster's folder of images, under its digest. Delete the record to look up again what a tag
stands for.
"""


localrules:
    image,


rule image:
    input:
        point=lambda wildcards: ancient(point_file(SWEEP.images[wildcards.image])),
    output:
        "results/images/{image}/image.json",
    log:
        "results/logs/images/{image}.log",
    conda:
        "../environment.yml"
    resources:
        # Not a parameter: where the file lies changes no image.
        clusters_file=SWEEP.config.clusters,
    message:
        "Import the container image {wildcards.image}"
    shell:
        "python -m workflow.images {input.point:q} --clusters {resources.clusters_file:q} > {log:q} 2>&1"
        " || {{ cat {log:q} >&2; exit 1; }}"
