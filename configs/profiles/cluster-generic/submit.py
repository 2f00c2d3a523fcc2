#!/usr/bin/env python3
"""Submit a job script of Snakemake with sbatch and print the job's id: `submit.py JOBSCRIPT`."""

import json
import re
import subprocess
import sys
from pathlib import Path

OPTIONS = {
    "slurm_partition": "--partition",
    "slurm_account": "--account",
    "qos": "--qos",
    "constraint": "--constraint",
    "gres": "--gres",
    "mem_mb": "--mem",
    "runtime": "--time",
    "nodes": "--nodes",
}

script = Path(sys.argv[1])
job = json.loads(re.search(r"^# properties = (.*)$", script.read_text(), re.MULTILINE)[1])
wildcards = "_".join(job["wildcards"].values())
logs = Path(".snakemake/slurm_logs") / f"rule_{job['rule']}" / wildcards
logs.mkdir(parents=True, exist_ok=True)
argv = ["sbatch", "--parsable", "--requeue", f"--job-name=offload-sweep_{job['rule']}"]
# Comment and log are how a job's point is recognised again, as with the Slurm plugin.
argv += [f"--comment=rule_{job['rule']}_wildcards_{wildcards}", f"--output={logs}/%j.log"]
argv += ["--ntasks=1", f"--cpus-per-task={job['threads']}"]
argv += [f"{option}={job['resources'][name]}" for name, option in OPTIONS.items() if job["resources"].get(name)]
# What the profile cannot say otherwise: excluded and exclusive nodes, quoted for a shell.
extra = job["resources"].get("slurm_extra", "").replace("'", "").split()
sys.exit(subprocess.run([*argv, *extra, str(script)], check=False).returncode)
