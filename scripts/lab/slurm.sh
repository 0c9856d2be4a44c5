#!/usr/bin/env bash
# A real Slurm on one machine, whose nodes can be lost. Linux; root; installs Debian's Slurm where it is missing.
#
#     scripts/lab/slurm.sh up [N]     start N nodes (3), n1, n2, ...; prints the line that sets SLURM_CONF
#     scripts/lab/slurm.sh lose nK    end all that runs on a node at once, its slurmd too: a machine that lost its power
#     scripts/lab/slurm.sh back nK    start it again, with an empty /tmp and /dev/shm
#     scripts/lab/slurm.sh enter nK COMMAND...    run a command there
#     scripts/lab/slurm.sh down       end everything
#
# With SLURM_CONF set, sinfo, sbatch, squeue and scancel work as on a cluster. A node has network, host name, processes,
# /tmp and /dev/shm of its own, and what it writes into the home folder stays there; all else is one file system, which
# all nodes share. The lab lies in $LAB (/var/tmp/moe_jax_slurm).
set -euo pipefail
LAB=${LAB:-/var/tmp/moe_jax_slurm}
export SLURM_CONF=$LAB/slurm.conf
NETWORK=10.77.0

# first_process nK: the first process of a node, as this machine numbers it; nothing where the node is down
first_process() {
  [ -f "$LAB/$1/unshare" ] && cat "/proc/$(cat "$LAB/$1/unshare")/task/"*/children 2>/dev/null | cut -d' ' -f1
}

# boot nK: an empty machine with a slurmd, which ends with its first process
boot() {
  local node=$1 folder=$LAB/$1
  rm -rf "$folder" && mkdir -p "$folder/home" "$folder/work" "$folder/spool"
  # shellcheck disable=SC2016
  nsenter --net="/run/netns/moe_jax_$node" unshare --uts --pid --mount --fork --kill-child --mount-proc sh -c '
    hostname "$1" && mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm &&
      mount -t overlay -o "lowerdir=$HOME,upperdir=$2/home,workdir=$2/work" overlay "$HOME" &&
      slurmd -N "$1" -f "$SLURM_CONF" && while :; do sleep 1000; done' boot "$node" "$folder" \
    </dev/null >"$folder/log" 2>&1 &
  echo $! >"$folder/unshare"
  disown
}

case ${1:-} in
  up)
    number=${2:-3}
    [ "$(id -u)" = 0 ] || { echo "a Slurm of its own needs root" >&2 && exit 2; }
    case $PWD/ in
      /tmp/* | /dev/shm/*)
        echo "nodes have a /tmp and /dev/shm of their own, where $PWD is not: clone into another folder" >&2
        exit 2
        ;;
    esac
    if ! command -v slurmctld >/dev/null; then
      echo "installing Slurm" >&2
      export DEBIAN_FRONTEND=noninteractive
      { apt-get update -qq && apt-get install -y -qq slurm-wlm munge iproute2; } >/dev/null 2>&1 ||
        { echo "Slurm cannot be installed here (apt-get install slurm-wlm munge iproute2)" >&2 && exit 2; }
    fi
    # shellcheck disable=SC2016
    unshare --net --uts --pid --mount --fork sh -c 'mount -t tmpfs tmpfs /tmp' 2>/dev/null ||
      { echo "nodes need namespaces of their own, which root may not make here" >&2 && exit 2; }
    "$0" down
    mkdir -p "$LAB/state" /run/munge
    chown munge /run/munge /var/log/munge /var/lib/munge
    munge -n >/dev/null 2>&1 || su -s /bin/sh munge -c munged
    ip link add moe_jax_slurm type bridge
    ip addr add $NETWORK.254/24 dev moe_jax_slurm
    ip link set moe_jax_slurm up
    echo "$NETWORK.254 slurmctl # moe_jax_slurm" >>/etc/hosts
    {
      cat <<CONF
ClusterName=lab
SlurmctldHost=slurmctl($NETWORK.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/%n/spool
SlurmctldPidFile=$LAB/slurmctld.pid
SlurmdPidFile=$LAB/%n/slurmd.pid
SlurmctldLogFile=$LAB/slurmctld.log
SlurmdLogFile=$LAB/%n/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=${SLURMD_TIMEOUT:-60}
KillWait=10
MpiDefault=none
CONF
      for at in $(seq "$number"); do
        echo "NodeName=n$at NodeAddr=n$at CPUs=2 RealMemory=4000 State=UNKNOWN"
      done
      echo "PartitionName=main Nodes=n[1-$number] Default=YES MaxTime=INFINITE State=UP"
    } >"$SLURM_CONF"
    for at in $(seq "$number"); do
      ip netns add "moe_jax_n$at"
      ip link add "mjs$at" type veth peer name eth0 netns "moe_jax_n$at"
      ip link set "mjs$at" master moe_jax_slurm up
      ip -n "moe_jax_n$at" addr add "$NETWORK.$at/24" dev eth0
      ip -n "moe_jax_n$at" link set eth0 up
      ip -n "moe_jax_n$at" link set lo up
      echo "$NETWORK.$at n$at # moe_jax_slurm" >>/etc/hosts
    done
    unshare --uts sh -c 'hostname slurmctl && exec slurmctld -f "$SLURM_CONF"'
    for at in $(seq "$number"); do boot "n$at"; done
    for _ in $(seq 60); do
      [ "$(sinfo --noheader --states=idle --format=%D 2>/dev/null)" = "$number" ] && break
      sleep 0.5
    done
    sinfo >&2
    timeout 60 srun --nodes="$number" true || { echo "its nodes run nothing on this machine" >&2 && "$0" down && exit 2; }
    echo "export SLURM_CONF=$SLURM_CONF"
    ;;
  lose)
    ip link set "mjs${2#n}" down      # nobody hears that its connections end
    kill -9 "$(first_process "$2")" # the kernel ends all others with it
    rm -f "$LAB/$2/unshare"
    ;;
  back)
    ip link set "mjs${2#n}" up
    boot "$2"
    sleep 2
    scontrol update "nodename=$2" state=resume 2>/dev/null || true
    ;;
  enter)
    exec nsenter --all --target "$(first_process "$2")" -- "${@:3}"
    ;;
  down)
    for folder in "$LAB"/n*; do
      first=$(first_process "$(basename "$folder")") && [ -n "$first" ] && kill -9 "$first"
    done
    [ ! -f "$LAB/slurmctld.pid" ] || kill "$(cat "$LAB/slurmctld.pid")" 2>/dev/null || true
    for name in $(ip netns list 2>/dev/null | grep -o '^moe_jax_n[0-9]*'); do ip netns del "$name"; done
    for link in $(ip -o link 2>/dev/null | grep -o 'mjs[0-9]*@' | tr -d @) moe_jax_slurm; do
      ip link del "$link" 2>/dev/null || true
    done
    [ ! -w /etc/hosts ] || { grep -v '# moe_jax_slurm$' /etc/hosts >/tmp/hosts.$$ && cat /tmp/hosts.$$ >/etc/hosts && rm /tmp/hosts.$$; }
    rm -rf "$LAB"
    ;;
  *)
    sed -n '2,15p' "$0" >&2
    exit 2
    ;;
esac
