#!/usr/bin/env bash
# A real Slurm of one node for the tests: slurmctld and slurmd without systemd, with pretend GPUs.
#
#   cluster.sh install        install the packages with apt (as root, or with sudo)
#   cluster.sh start [DIR]    start it and print the exports that a client needs: eval "$(cluster.sh start DIR)"
#   cluster.sh stop [DIR]     stop exactly what `start` started, by pid file, with its jobs
#   cluster.sh cut [DIR]      end the node as a power cut does, daemon and jobs, and have Slurm notice it at once
#   cluster.sh slurmd [DIR]   start the node again, and wait until it can be given jobs
#
# Everything lies in DIR. It runs as root or as an ordinary user; jobs then run as that user.
# CPUS, MEMORY_MB and GPUS are what the node advertises; it need not have them. PORT is the first of two ports.
set -euo pipefail

command=${1:-}
dir=$(realpath -m "${2:-${TMPDIR:-/tmp}/offload-sweep-slurm}")
: "${CPUS:=64}" "${MEMORY_MB:=64000}" "${GPUS:=8}" "${PORT:=16917}"
user=$(id -un)
node=$(hostname -s)
PATH=$PATH:/usr/sbin:/sbin
export SLURM_CONF=$dir/slurm.conf

within() { # within SECONDS COMMAND...: repeat until it succeeds
  local tries=$(($1 * 10))
  shift
  until "$@" > /dev/null 2>&1; do
    tries=$((tries - 1))
    [ "$tries" -gt 0 ] || return 1
    sleep 0.1
  done
}

running() { # running NAME: does the daemon of this pid file live?
  [ -s "$dir/run/$1.pid" ] && kill -0 "$(cat "$dir/run/$1.pid")" 2> /dev/null
}

gone() { ! running "$1"; }

node_is_up() { sinfo --noheader --format=%T | grep -qE '^(idle|mixed|allocated)$'; }

nothing_on_its_way() { # has the controller delivered or given up all it had to tell nodes?
  [ -z "$(sdiag | grep -E '^Agent (queue size|count): ' | grep -vE ' 0$')" ]
}

write_files() {
  mkdir -p "$dir"/{state,spool,log,run,gpu,bin}
  chmod 755 "$dir"
  # Snakemake's job step drops every SLURM_* variable, SLURM_CONF too, before it calls srun; this srun sets it again.
  local srun
  srun=$(PATH=/usr/local/bin:/usr/bin:/bin command -v srun)
  printf '#!/bin/sh\nSLURM_CONF=%s exec %s "$@"\n' "$SLURM_CONF" "$srun" > "$dir/bin/srun"
  chmod 755 "$dir/bin/srun"
  write_gpus
  cat > "$SLURM_CONF" << CONF
ClusterName=test
SlurmctldHost=$node(127.0.0.1)
SlurmUser=$user
SlurmdUser=$user
# No munged: whoever reaches the ports is this user. Fit for tests on one machine only.
AuthType=auth/none
CredType=cred/none
SlurmctldPort=$PORT
SlurmdPort=$((PORT + 1))
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.log
# Cgroups are not there in a container. pgid would not count the memory of services, which have sessions of their own.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
# A node that was down serves again as soon as its daemon answers.
ReturnToService=2
SlurmdTimeout=60
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0,requeue_delay=1
# Kills a job that uses more memory than it asked for, without cgroups. Its state is then FAILED.
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
# Without accounting, finished jobs are known to squeue for this long.
MinJobAge=3600
MaxArraySize=10001
MaxJobCount=20000
KillWait=5
UnkillableStepTimeout=30
OverTimeLimit=0
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=$node NodeAddr=127.0.0.1 CPUs=$CPUS RealMemory=$MEMORY_MB Gres=gpu:$GPUS Feature=big State=UNKNOWN
# Nodes that exist only to be excluded.
NodeName=spare[1-2] NodeAddr=127.0.0.1 CPUs=1 State=DOWN
PartitionName=gpu-a Nodes=$node Default=YES MaxTime=24:00:00 DefMemPerCPU=100 State=UP
PartitionName=gpu-b Nodes=$node MaxTime=24:00:00 DefMemPerCPU=100 State=UP
CONF
}

write_gpus() {
  # CUDA_VISIBLE_DEVICES is set only for GPUs that are character devices: make clones of /dev/null, or take terminals.
  local i made=yes
  for ((i = 0; i < GPUS; i++)); do
    [ -c "$dir/gpu/$i" ] || mknod "$dir/gpu/$i" c 1 3 2> /dev/null || made=no
  done
  if [ "$made" = yes ]; then
    echo "Name=gpu File=$dir/gpu/[0-$((GPUS - 1))]" > "$dir/gres.conf"
  else
    echo "Name=gpu File=/dev/tty[0-$((GPUS - 1))]" > "$dir/gres.conf"
  fi
}

start() {
  write_files
  running slurmctld || slurmctld -f "$SLURM_CONF"
  running slurmd || slurmd -f "$SLURM_CONF" -N "$node"
  within 30 node_is_up || {
    echo "Slurm did not come up; the ends of its logs in $dir/log:" >&2
    tail -n 20 "$dir"/log/*.log >&2
    exit 1
  }
  echo "export SLURM_CONF=$SLURM_CONF"
  echo "export PATH=$dir/bin:\$PATH"
}

of_jobs() { # print the pids of all processes of this cluster's jobs
  local file names
  # Slurm's step daemons first: one that outlives its job reports how it ended. Their titles overwrite their environment.
  for file in $(pgrep -x slurmstepd); do
    [[ $(readlink "/proc/$file/cwd") != "$dir"/* ]] || echo "$file"
  done
  for file in /proc/[0-9]*/environ; do
    names=$(cat "$file" 2> /dev/null | tr '\0' '\n') || continue
    if grep -qxF "SLURM_CONF=$SLURM_CONF" <<< "$names" && grep -q '^SLURM_JOB_ID=' <<< "$names"; then
      echo "${file//[^0-9]/}"
    fi
  done
}

stop() {
  if running slurmctld; then
    scancel --user="$user" || true
    # Jobs are ended before their daemon is: an orphan would go on measuring.
    within 20 sh -c '[ -z "$(squeue --noheader)" ]' || squeue >&2
  fi
  local name
  for name in slurmd slurmctld; do
    if running "$name"; then
      kill "$(cat "$dir/run/$name.pid")"
      within 15 gone "$name" || kill -KILL "$(cat "$dir/run/$name.pid")"
    fi
    rm -f "$dir/run/$name.pid"
  done
  # Without control groups Slurm loses a process whose parent has ended, such as after a lost node.
  local pids
  pids=$(of_jobs)
  # shellcheck disable=SC2086
  [ -z "$pids" ] || kill -KILL $pids 2> /dev/null || true
}

cut_power() {
  # The daemon first, so that it cannot report how its jobs ended.
  kill -KILL "$(cat "$dir/run/slurmd.pid")"
  rm -f "$dir/run/slurmd.pid"
  local pids
  pids=$(of_jobs)
  # shellcheck disable=SC2086
  kill -KILL $pids 2> /dev/null || true
  # As Slurm does by itself once the node has not answered for SlurmdTimeout.
  scontrol update "nodename=$node" state=down reason='power cut'
}

start_node() {
  running slurmd || slurmd -f "$SLURM_CONF" -N "$node"
  within 30 node_is_up
  # What ends the lost job is delivered late, and goes by its id: it would hit the same job, started anew. Slurm holds
  # such a job back for two minutes for this reason; slurmctld 22.05 crashed where that was cut short.
  within 30 nothing_on_its_way
}

case $command in
  install)
    sudo=()
    [ "$(id -u)" = 0 ] || sudo=(sudo)
    "${sudo[@]}" apt-get update -qq
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      slurmctld slurmd slurm-client slurm-wlm-basic-plugins
    ;;
  start) start ;;
  stop) stop ;;
  cut) cut_power ;;
  slurmd) start_node ;;
  *)
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
