#!/bin/sh
# Print running, success or failed for a Slurm job.
state=$(squeue --noheader --states=all --format=%T --jobs="$1" 2> /dev/null)
case $state in
  COMPLETED) echo success ;;
  PENDING | CONFIGURING | RUNNING | COMPLETING | SUSPENDED | REQUEUED | STOPPED) echo running ;;
  # Slurm does not answer: the job may still run.
  "") echo running ;;
  *) echo failed ;;
esac
